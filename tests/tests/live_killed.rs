//! kill -9 of a gctrace that sends sample sets: the next run sends what it had written, whole sets at most once, and no more is
//! missing than docs/collector.md says.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::live::Live;
use gctrace_tests::receiver::{Answer, Push, Receiver};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Done, Running, Script};
use gctrace_tests::timing::settled;
use gctrace_tests::tunemygc::{self, Set};
use gctrace_tests::witness::{Event, Log};
use gctrace_tests::{PATIENCE, ensure_times, slowness};
use rustix::process::Signal;

const OK: Answer = (200, "", b"http://x/configs/1");
/// Interval at which a growing set is written.
const INTERVAL: Duration = Duration::from_secs(30);
/// Maximum delay of an interval: the thread that writes is woken by events and shares its CPU.
const LATE: Duration = Duration::from_secs(5);

/// The arguments of a run that sends to this address.
fn sending(live: &Live, address: std::net::SocketAddr, which: &[&str]) -> Vec<std::ffi::OsString> {
    let mut args: Vec<_> = which.iter().map(Into::into).collect();
    args.extend(["--tunemygc-url".into(), format!("http://{address}").into()]);
    args.extend(["--tunemygc-spool".into(), live.path("spool").into()]);
    args
}

fn start(args: Vec<std::ffi::OsString>) -> Result<Gctrace> {
    let token = |command: &mut std::process::Command| {
        command.env("RUBY_GC_TOKEN", "t");
    };
    Invocation::jsonl(args)?.with(token).start_ready()
}

/// The files of a spool with a single address, without its lock.
fn spooled(live: &Live) -> Result<Vec<PathBuf>> {
    let dirs = tunemygc::files(&live.path("spool"))?;
    let [dir] = &dirs[..] else { anyhow::bail!("not the spool of one collector: {dirs:?}") };
    Ok(tunemygc::files(dir)?.into_iter().filter(|path| !path.ends_with("lock")).collect())
}

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|found| found == extension)
}

/// The time of the last write to a file, seconds since the epoch.
fn written(path: &Path) -> Result<f64> {
    Ok(std::fs::metadata(path)?.modified()?.duration_since(UNIX_EPOCH)?.as_secs_f64())
}

fn now() -> Result<f64> {
    Ok(std::time::SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64())
}

/// Waits until the only draft in the spool has grown beyond this many bytes and gctrace has made progress since. Returns the draft, its size,
/// and when it was written.
fn grown(live: &Live, gctrace: &mut Gctrace, pid: u32, from: u64) -> Result<(PathBuf, u64, f64)> {
    let begun = Instant::now();
    loop {
        ensure!(begun.elapsed() < PATIENCE, "no draft of more than {from} bytes: {:?}", spooled(live)?);
        if let [draft] = &spooled(live)?[..]
            && std::fs::metadata(draft)?.len() > from
        {
            let at = written(draft)?;
            // A cycle that started later was also read later.
            gctrace.wait_line_with("gc", pid, |line| line["ts"].as_f64().is_some_and(|ts| ts > at))?;
            ensure!(has_extension(draft, "draft"), "{} is no draft", draft.display());
            return Ok((draft.clone(), std::fs::metadata(draft)?.len(), at));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until this many sets have been accepted.
fn accepted(receiver: &Receiver, count: usize) -> Result<Vec<Set>> {
    let begun = Instant::now();
    while receiver.pushes().len() < count {
        ensure!(begun.elapsed() < PATIENCE, "{} of {count} sets", receiver.pushes().len());
        std::thread::sleep(Duration::from_millis(20));
    }
    receiver.pushes().iter().map(set).collect()
}

fn set(push: &Push) -> Result<Set> {
    ensure!(push.path == "/ruby", "a push to {}", push.path);
    if !push.head.contains("content-encoding: gzip") {
        return Set::parse(std::str::from_utf8(&push.body)?);
    }
    Set::parse(&std::io::read_to_string(flate2::read::GzDecoder::new(push.body.as_slice()))?)
}

/// A program that collects garbage a few dozen times per second until it is told to stop, with a witness.
fn steady(live: &Live, ruby: &Ruby) -> Result<Running> {
    let mut program = Script::new(live, ruby, "steady.rb")?.arg("slow").start()?;
    program.wait_for("ready")?;
    Ok(program)
}

/// Stops it. Its output and status must be those of an undisturbed run.
fn stop(mut program: Running) -> Result<Done> {
    ensure!(program.running()?, "the program has ended by itself");
    program.say("stop")?;
    let done = program.finish_any()?;
    ensure!(done.finished.status.code() == Some(7), "the program ended with {}", done.finished.status);
    ensure!(done.finished.stdout == ["ready", "checksum 524657833"], "it printed {:?}", done.finished.stdout);
    ensure!(done.finished.stderr.is_empty(), "it complained: {:?}", done.finished.stderr);
    Ok(done)
}

/// `GC.stat[:count]` of the samples with this event.
fn counts(set: &Set, event: &str) -> Result<Vec<u64>> {
    let at = set.keys.iter().position(|key| key == "count").context("count")?;
    Ok(set.samples.iter().filter(|sample| sample.event == event).map(|sample| sample.stat[at]).collect())
}

/// The counts of the events of the log whose time (seconds since the epoch) satisfies a condition.
fn numbers<'a>(log: &Log, events: impl Iterator<Item = &'a Event>, when: impl Fn(f64) -> bool) -> Vec<u64> {
    let ts = |event: &Event| (event.ns as i64 + log.epoch_offset_ns) as f64 / 1e9;
    events.filter(|event| when(ts(event))).map(Event::count).collect()
}

/// Every sample of a cycle during the log has the `GC.stat` that the program's own hook saw, in keys that do not change there.
fn agrees(set: &Set, log: &Log) -> Result<()> {
    let of_gc = ["count", "minor_gc_count", "major_gc_count", "heap_live_slots", "total_allocated_objects"];
    let epoch = |ns: u64| (ns as i64 + log.epoch_offset_ns) as f64 / 1e9;
    let logged = epoch(log.begin_ns)..epoch(log.end_ns);
    for sample in set.samples.iter().filter(|sample| logged.contains(&sample.ts)) {
        let mut events = match sample.event.as_str() {
            "GC_CYCLE_STARTED" => log.starts().collect::<Vec<_>>(),
            "GC_CYCLE_ENDED" => log.ends().collect(),
            _ => continue,
        }
        .into_iter();
        let values: Vec<_> = of_gc
            .iter()
            .map(|key| Some(sample.stat[set.keys.iter().position(|name| name == key)?]))
            .collect::<Option<_>>()
            .context("a key is missing")?;
        let found = events.find(|event| event.count() == values[0]);
        let event = found.with_context(|| format!("{} {} never was", sample.event, values[0]))?;
        let own: Vec<_> = of_gc.iter().map(|key| event.stat[*key].as_u64().unwrap_or(u64::MAX)).collect();
        ensure!(values == own, "{} has {values:?}, the program itself saw {own:?}", sample.event);
    }
    Ok(())
}

/// The set of a long-lived program is written every half minute, and only the rest can be lost. The next run sends it. It never becomes a file of
/// a whole set, and the program is not affected.
#[test]
fn a_set_that_grows() -> Result<()> {
    settled(kill_while_a_set_grows)
}

fn kill_while_a_set_grows() -> Result<()> {
    let live = Live::idle_beside_others()?;
    let ruby = Ruby::main()?;
    let program = steady(&live, &ruby)?;
    let pid = program.pid();
    let receiver = Receiver::start(|_, _| OK)?;
    let files = live.path("sets");
    let which = ["--pid", &pid.to_string(), "--tunemygc", &files.display().to_string()];
    let before = now()?;
    let mut gctrace = start(sending(&live, receiver.address, &which))?;
    let ready = now()?;
    let (draft, size, first) = grown(&live, &mut gctrace, pid, 0)?;
    let (same, size, last) = grown(&live, &mut gctrace, pid, size)?;
    let killed = gctrace.kill()?;
    ensure!(!killed.status.success(), "it was not killed: {}", killed.status);
    ensure!(same == draft && std::fs::metadata(&draft)?.len() == size, "another draft, or more of it");
    let most = (INTERVAL + LATE * u32::try_from(slowness())?).as_secs_f64();
    ensure!(first - before > INTERVAL.as_secs_f64() - 1.0, "the first one after {} s", first - before);
    ensure_times!(
        first - ready < most && last - first < most,
        "{ready}, {first}, {last}: not every half minute"
    );

    // There is nothing that a reader takes for a set.
    ensure!(
        tunemygc::files(&files)?.is_empty(),
        "files of a set that is not whole: {:?}",
        tunemygc::files(&files)?
    );
    ensure!(spooled(&live)? == [draft.as_path()], "{:?}", spooled(&live)?);
    ensure!(Set::parse(&std::fs::read_to_string(&draft)?).is_err(), "the draft reads as a whole set");
    ensure!(receiver.pushes().is_empty(), "a set was sent that had not ended");

    let mut again = start(sending(&live, receiver.address, &["--pid", &pid.to_string()]))?;
    let said = again.wait_error("of earlier runs wait")?;
    ensure!(said.contains("gctrace: 1 sample set of earlier runs waits"), "{said}");
    accepted(&receiver, 1)?;
    again.wait_line("gc", pid)?;
    let (report, finished) = again.stop_by(Signal::INT)?;
    let user = &report.ledger.as_ref().context("a ledger")?.user;
    ensure!(user["sets"] == 2 && user["sets_sent"] == 2, "{user:?}, {}", finished.errors());
    ensure!(spooled(&live)?.is_empty(), "left: {:?}", spooled(&live)?);

    let done = stop(program)?;
    let log = done.log()?;
    let sets = accepted(&receiver, 2)?;
    ensure!(sets.len() == 2 && sets.iter().all(|set| set.pid == pid), "{} sets", sets.len());
    for set in &sets {
        agrees(set, log)?;
    }
    let (starts, ends) = (counts(&sets[0], "GC_CYCLE_STARTED")?, counts(&sets[0], "GC_CYCLE_ENDED")?);
    // Cycles are written when they have ended. Those of the last second may have been in flight.
    let begun = numbers(log, log.starts(), |ts| ts > ready);
    let due = numbers(log, log.ends(), |ts| ts < last - 1.0);
    let due: Vec<u64> = due.into_iter().filter(|count| begun.contains(count)).collect();
    ensure!(due.len() > 100, "{} cycles are little", due.len());
    let missing: Vec<_> = due.iter().filter(|count| !ends.contains(count)).collect();
    ensure_times!(missing.is_empty(), "of {} that ended before {last} there are not {missing:?}", due.len());
    // Between the first and the last, nothing is missing, and nothing is duplicated.
    let all: Vec<u64> = log.starts().map(Event::count).filter(|count| within(*count, &starts)).collect();
    ensure!(starts == all, "{} starts, {} of the program's own", starts.len(), all.len());
    // It contains nothing that came later, and the set of the second run starts where that run's own knowledge does.
    let later = numbers(log, log.starts(), |ts| ts > last);
    ensure!(!later.iter().any(|count| starts.contains(count)), "it has what came after {last}");
    let second = counts(&sets[1], "GC_CYCLE_STARTED")?;
    ensure!(
        !second.is_empty() && !second.iter().any(|count| starts.contains(count)),
        "what was sent already"
    );
    Ok(())
}

/// Whether a number lies between the first and the last of a list, inclusive.
fn within(number: u64, list: &[u64]) -> bool {
    list.first().is_some_and(|first| *first <= number) && list.last().is_some_and(|last| number <= *last)
}

/// While a collector does not answer, sets that end wait behind the one that is being sent. They are on disk, too.
#[test]
fn sets_that_wait_for_a_silent_collector() -> Result<()> {
    settled(wait_for_a_silent_collector)
}

fn wait_for_a_silent_collector() -> Result<()> {
    /// After that time the running program has a draft, too, and the set that is being sent is given up.
    const UNTIL: Duration = Duration::from_secs(25);
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let silent = TcpListener::bind("127.0.0.1:0")?;
    let address = silent.local_addr()?;
    let begun = Instant::now();
    let mut gctrace = start(sending(&live, address, &["--all-ruby"]))?;
    let first = Script::new(&live, &ruby, "explicit.rb")?.run()?;
    // Its set is being sent now, and is never answered.
    let (connection, _) = silent.accept()?;
    let others = [(), ()].map(|()| Script::new(&live, &ruby, "explicit.rb").and_then(Script::run));
    let others = others.into_iter().collect::<Result<Vec<_>>>()?;
    for done in &others {
        gctrace.wait_line("exit", done.pid)?;
    }
    // All effects of their ends were processed before this.
    let program = steady(&live, &ruby)?;
    gctrace.wait_line("gc", program.pid())?;
    gctrace.kill()?;
    ensure_times!(begun.elapsed() < UNTIL, "{:?} until it was killed", begun.elapsed());
    drop((connection, silent));
    let there = spooled(&live)?;
    let of = |extension| there.iter().filter(|path| has_extension(path, extension)).count();
    ensure!((of("json"), of("draft"), there.len()) == (1, 2, 3), "{there:?}");

    let receiver = Receiver::on(TcpListener::bind(address)?, |_, _| OK)?;
    let mut again = start(sending(&live, address, &["--all-ruby"]))?;
    let said = again.wait_error("of earlier runs wait")?;
    ensure!(said.contains("gctrace: 3 sample sets of earlier runs wait"), "{said}");
    accepted(&receiver, 3)?;
    again.wait_line("gc", program.pid())?;
    let report = again.stop()?;
    // Including the set of the program that is still running.
    let user = &report.ledger.as_ref().context("a ledger")?.user;
    ensure!(user["sets"] == 4 && user["sets_sent"] == 4, "{user:?}");
    ensure!(spooled(&live)?.is_empty(), "left: {:?}", spooled(&live)?);
    let log = stop(program)?;
    let sets = accepted(&receiver, 4)?;
    agrees(sets.iter().find(|set| set.pid == log.pid).context("its set")?, log.log()?)?;
    for done in std::iter::once(&first).chain(&others) {
        let own: Vec<&Set> = sets.iter().filter(|set| set.pid == done.pid).collect();
        let [set] = own[..] else { anyhow::bail!("{} sets of {}", own.len(), done.pid) };
        let log = done.log()?;
        agrees(set, log)?;
        let events = |name| set.samples.iter().filter(move |sample| sample.event == name).count();
        ensure!(events("TERMINATED") == 1, "{} has no end", done.pid);
        let starts = counts(set, "GC_CYCLE_STARTED")?;
        ensure!(log.starts().all(|event| starts.contains(&event.count())), "{starts:?} of {}", done.pid);
    }
    Ok(())
}
