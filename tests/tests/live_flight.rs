//! The flight recorder: when something happens, the events before it are written as an ordinary recording, and nothing else is written.

use std::ffi::OsString;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::{Finished, Guarded};
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::live::Live;
use gctrace_tests::memory::status_kb;
use gctrace_tests::puma::Puma;
use gctrace_tests::report::Report;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::{PATIENCE, ensure_times, ledger};
use rustix::process::Signal;
use serde_json::Value;

/// Quiet for 6 s, except for two collections per second. When told to continue, it runs larger and larger collections until one takes 300 ms
/// by Ruby's own clock.
const PLANTED: &str = "$stdout.sync = true; $stdin.gets
    now = -> { Process.clock_gettime(Process::CLOCK_MONOTONIC) }
    12.times { GC.start; sleep 0.5 }
    puts 'quiet'; $stdin.gets
    kept = []; took = 0
    until took > 0.3
      GC.disable; 1_000_000.times { |i| kept << [i] }; GC.enable
      began = now.(); GC.start; took = now.() - began
    end
    puts took; sleep 2";
/// Threads that endlessly wait for the GVL and collect. Given a line with a number and a word, it prints that line after that many more cycles.
const BUSY: &str =
    "3.times.map { Thread.new { loop { (1..3000).map { |x| \"s#{x}\" }.sort.first; sleep 0.002 } } }
    $stdout.sync = true; puts 'busy'
    while (line = $stdin.gets)
      cycles = GC.count + line.to_i
      sleep 0.01 while GC.count < cycles
      puts line
    end";

/// Starts a program and waits until it reports that it is busy.
fn busy(ruby: &Ruby, program: &str) -> Result<Guarded> {
    let mut program = Guarded::start("ruby", ruby.command()?.args(["-e", program]))?;
    program.wait_stdout(PATIENCE, "busy", |line| line == "busy")?;
    Ok(program)
}

/// Waits until a busy program has run this many more collections. The word must be different each time.
fn collects(program: &mut Guarded, cycles: u32, word: &str) -> Result<()> {
    let line = format!("{cycles} {word}");
    program.say(&line)?;
    program.wait_stdout(PATIENCE, &line, |said| said == line).map(drop)
}

/// Prefixes of the lines of cycles, and of individual waits for the GVL.
const CYCLE: &str = "{\"type\":\"gc\"";
const WAIT: &str = "{\"type\":\"gvl\",\"what\":\"wait\"";

/// Waits until gctrace has printed this many lines with this prefix to standard output. It also keeps what it reports.
fn told(gctrace: &Gctrace, count: usize, what: &str) -> Result<()> {
    let since = Instant::now();
    loop {
        let lines = gctrace.stdout_so_far();
        let there = lines.iter().filter(|line| line.starts_with(what)).count();
        if there >= count {
            return Ok(());
        }
        ensure!(since.elapsed() < PATIENCE, "{there} of {count} lines {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The files in a directory, sorted by name.
fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found: Vec<PathBuf> =
        std::fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    found.sort();
    Ok(found)
}

fn name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// Starts gctrace on a process in flight-recorder mode (`--keep`).
fn keeping(pid: u32, path: &Path, flags: &[&str]) -> Result<Gctrace> {
    let mut args: Vec<OsString> = vec!["record".into(), "--pid".into(), pid.to_string().into()];
    args.extend(["-o".into(), path.as_os_str().to_owned(), "--keep".into()]);
    args.extend(flags.iter().map(OsString::from));
    Invocation::new(args)?.start_ready()
}

/// Requests a file with SIGUSR2. Returns the file, which must be the only new one in the directory, and the message about it.
fn ask(gctrace: &mut Gctrace, dir: &Path) -> Result<(PathBuf, String)> {
    let before = files(dir)?;
    gctrace.signal(Signal::USR2)?;
    let since = Instant::now();
    while since.elapsed() < PATIENCE {
        if let Some(new) = files(dir)?.iter().find(|file| !before.contains(file)) {
            ensure!(files(dir)?.len() == before.len() + 1, "{:?}", files(dir)?);
            let said = gctrace.wait_error(&format!("gctrace: wrote {}", new.display()))?;
            return Ok((new.clone(), said));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    anyhow::bail!("no file came")
}

fn report(path: &Path) -> Result<Finished> {
    let args = [OsString::from("report"), path.into(), "--format=jsonl".into()];
    let finished = Invocation::new(args)?.run()?;
    ensure!(finished.status.success(), "{}", finished.errors());
    ensure!(!finished.errors().contains("cut off"), "{}", finished.errors());
    Ok(finished)
}

/// The lines of cycles among JSON lines.
fn cycles(finished: &Finished) -> Vec<&str> {
    finished.stdout.iter().filter(|line| line.starts_with(CYCLE)).map(String::as_str).collect()
}

/// The lines of individual waits for the GVL among JSON lines.
fn single_waits(finished: &Finished) -> Vec<&str> {
    finished.stdout.iter().filter(|line| line.starts_with(WAIT)).map(String::as_str).collect()
}

/// Checks that the lines of two dumps appear once when merged, and as the run reported them. Returns the number of merged lines.
fn once(what: &str, [first, second, merged, reported]: [Vec<&str>; 4]) -> Result<usize> {
    let at = first.iter().position(|line| Some(line) == second.first());
    let at = at.with_context(|| format!("dumps have no {what} in common"))?;
    let expected = [&first[..at], &second[..]].concat();
    let differs = merged.iter().zip(&expected).position(|(one, other)| one != other);
    ensure!(
        merged == expected,
        "{what}: {} merged of {} in the first dump and {} in the second one, {} of them in both; the first that differs: {:?}",
        merged.len(),
        first.len(),
        second.len(),
        first.len() - at,
        differs.map(|at| (at, merged[at], expected[at]))
    );
    let from = reported.iter().position(|line| Some(line) == merged.first());
    let from = from.with_context(|| format!("the first of the {what} was not reported"))?;
    ensure!(reported[from..].starts_with(&merged), "other {what} than the run has reported");
    Ok(merged.len())
}

fn field(line: &str, key: &str) -> Result<f64> {
    let line: Value = serde_json::from_str(line)?;
    line[key].as_f64().with_context(|| format!("no {key} in {line}"))
}

/// One long pause after a quiet time is written once, together with the quiet time before it, line by line as the run reported it. Anything
/// older than requested is absent, and all counts are those of the file.
#[test]
fn planted() -> Result<()> {
    /// How much is kept, seconds.
    const KEEP: f64 = 2.0;
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let dir = live.dir("kept")?;
    let mut program = Guarded::start("ruby", ruby.command()?.args(["-e", PLANTED]))?;
    let mut args: Vec<OsString> = vec!["--pid".into(), program.pid().to_string().into(), "--record".into()];
    args.extend([dir.join("app.gctrace").into_os_string(), format!("--keep={KEEP}s").into()]);
    args.extend(["--dump-on=gc.pause > 200ms", "--dump-cooldown=5m"].map(OsString::from));
    let gctrace = Invocation::jsonl(args)?.start_ready()?;
    program.say("go")?;
    program.wait_stdout(PATIENCE, "quiet", |line| line == "quiet")?;
    ensure!(files(&dir)?.is_empty(), "written for nothing: {:?}", files(&dir)?);
    program.say("grow")?;
    let (run, finished) = gctrace.done()?;
    let witness = program.finish(PATIENCE)?.stdout.pop().context("no time")?;
    let [file] = &files(&dir)?[..] else { anyhow::bail!("{:?}\n{}", files(&dir)?, finished.errors()) };
    ensure!(name(file).starts_with("app-20") && name(file).ends_with("Z-gc.pause.gctrace"), "{}", name(file));
    ensure!(std::fs::metadata(file)?.permissions().mode() & 0o777 == 0o600);
    let replayed = report(file)?;
    let why = "(trigger: gc.pause > 200ms: ";
    ensure!(replayed.errors().contains(why), "{}", replayed.errors());
    ensure!(finished.errors().contains(&format!("wrote {}", file.display())), "{}", finished.errors());
    // The content of the file is a part of what the run reported, without gaps.
    let (all, some) = (cycles(&finished), cycles(&replayed));
    let begin = all.iter().position(|line| Some(line) == some.first()).context("no cycle of the run")?;
    ensure!(all[begin..].starts_with(&some), "other cycles than those of the run");
    // The long pause is the last one, except for those of the second after it; what was to be kept is before it.
    let longest = |line: &&str| field(line, "max_pause_ns");
    let pauses = some.iter().map(longest).collect::<Result<Vec<f64>>>()?;
    let first = pauses.iter().position(|ns| *ns > 200e6).context("no long pause in it")?;
    let told =
        replayed.errors().split(why).nth(1).and_then(|rest| rest.split("ms").next()?.parse::<f64>().ok());
    ensure!((told.context("no time")? - pauses[first] / 1e6).abs() < 0.06, "{told:?} {pauses:?}");
    ensure!(pauses.iter().fold(0.0_f64, |most, ns| most.max(*ns)) / 1e9 < witness.parse::<f64>()? + 0.001);
    let at = field(some[first], "ts")?;
    let quiet = some.iter().map(|line| field(line, "ts")).collect::<Result<Vec<_>>>()?;
    let times = all.iter().map(|line| field(line, "ts")).collect::<Result<Vec<_>>>()?;
    let gap = times.windows(2).map(|two| two[1] - two[0]).fold(0.0_f64, f64::max);
    // The time of writing is the file's mtime, accurate to a tick of the kernel. The file covers all of the kept time before that moment,
    // so its first cycle is that old, except for a time without cycles.
    let written = std::fs::metadata(file)?.modified()?.duration_since(UNIX_EPOCH)?.as_secs_f64();
    let kept = written - quiet[0];
    ensure!(kept > KEEP - gap - 0.1, "{kept} s are kept, with cycles {gap} s apart: {quiet:?}");
    // At most a second more is kept, because accounts are a second apart, if gctrace gets a CPU in time.
    let before = at - quiet[0];
    ensure!(before < KEEP + 3.0 + gap, "{before} s before it, with cycles {gap} s apart: {quiet:?}");
    ensure!(begin >= 5, "the older ones are gone: {begin}");
    ensure!(field(some[some.len() - 1], "ts")? - at < 2.5, "{quiet:?}");
    // The counts are those of the file. Those of the run balance.
    let of_file = Report::parse(&replayed.stdout)?;
    let user = of_file.ledger.as_ref().context("no ledger")?.user.clone();
    let count =
        |user: &serde_json::Map<String, Value>, key: &str| user.get(key).and_then(Value::as_u64).unwrap_or(0);
    ensure!(count(&user, "cycles") == some.len() as u64, "{} {}", count(&user, "cycles"), some.len());
    ensure!(count(&user, "processes") == 1);
    let of_run = run.ledger.as_ref().context("no ledger")?.user.clone();
    ensure!(count(&of_run, "dumps_written") == 1 && count(&of_run, "recorded_expired") > 0);
    ensure!(count(&of_run, "dump_requests") == 1 + count(&of_run, "dumps_suppressed"));
    Ok(())
}

/// A run that keeps nothing says so on SIGUSR2 and continues: a user who signals all gctraces of a host ends none.
#[test]
fn asked_for_nothing() -> Result<()> {
    let live = Live::beside_others()?;
    let program = busy(&Ruby::main()?, BUSY)?;
    let csv = live.path("asked.csv");
    let args =
        ["--pid".into(), program.pid().to_string().into(), "--csv".into(), csv.clone().into_os_string()];
    let gctrace = Invocation::jsonl(args)?.start_ready()?;
    for said in 1..=2 {
        gctrace.signal(Signal::USR2)?;
        gctrace.wait_errors("SIGUSR2: this run keeps nothing", said)?;
    }
    let before = gctrace.stdout_so_far().len();
    told(&gctrace, before + 5, CYCLE)?;
    let finished = gctrace.interrupt()?;
    ensure!(finished.status.success() && csv.is_file(), "{:?}: {}", finished.status, finished.errors());
    let said = finished.errors().matches("SIGUSR2: this run keeps nothing").count();
    ensure!(said == 2, "{said}: {}", finished.errors());
    ledger::check(&Report::parse(&finished.stdout)?)
}

/// Each SIGUSR2 writes a file, for Rubies of all series; nothing else does.
#[test]
fn asked() -> Result<()> {
    let live = Live::beside_others()?;
    let main = Ruby::main()?.label();
    Ruby::each(|ruby| {
        let program = busy(ruby, BUSY)?;
        // A separate directory, so that leftovers of a failed attempt do not affect the next one.
        let dir = live.dir(&format!("asked-{}", program.pid()))?;
        let mut args: Vec<OsString> =
            vec!["--pid".into(), program.pid().to_string().into(), "--record".into()];
        args.push(dir.join("app").into_os_string());
        let flags =
            ["--keep=1m", "--gvl", "--gvl-budget=100", "--gvl-threshold=0.1ms", "--dump-on=gc.pause>9m"];
        args.extend(flags.map(OsString::from));
        let mut gctrace = Invocation::jsonl(args)?.start_ready()?;
        told(&gctrace, 21, CYCLE)?;
        // On a busy machine, the threads may not have contended for the GVL by then.
        told(&gctrace, 6, WAIT)?;
        ensure!(files(&dir)?.is_empty());
        // What two files have in common does not depend on the Ruby.
        let rounds = if ruby.label() == main { 2 } else { 1 };
        let mut asked = Vec::new();
        for round in 1..=rounds {
            if round > 1 {
                // File names have a resolution of one second, and there should be something new.
                std::thread::sleep(Duration::from_millis(1100));
            }
            asked.push(ask(&mut gctrace, &dir)?.0);
            ensure!(files(&dir)?.len() == round, "{:?}", files(&dir)?);
        }
        let finished = gctrace.interrupt()?;
        ensure!(finished.status.success(), "{}", finished.errors());
        ensure!(finished.errors().matches("gctrace: wrote").count() == rounds, "{}", finished.errors());
        let found = files(&dir)?;
        // A second file within the same second would have a number after its name.
        ensure!(
            found.len() == rounds
                && name(&asked[0]).ends_with("Z-SIGUSR2.gctrace")
                && found.iter().all(|file| name(file).contains("Z-SIGUSR2")),
            "{found:?}"
        );
        let reports = asked.iter().map(|file| report(file)).collect::<Result<Vec<_>>>()?;
        for of_file in &reports {
            ensure!(cycles(of_file).len() > 20, "{}: {}", ruby.label(), cycles(of_file).len());
            ensure!(of_file.errors().contains("(trigger: SIGUSR2)"), "{}", of_file.errors());
        }
        // The second file has the content of the first one, except for what is too old, and more.
        if let [first, second] = &reports[..] {
            let (first, second) = (cycles(first), cycles(second));
            let at =
                first.iter().position(|line| *line == second[0]).context("they have nothing in common")?;
            ensure!(second.starts_with(&first[at..]) && second.len() > first.len() - at);
            // In the merged file, common content appears once, and as the run reported it.
            let merged = live.path("merged.gctrace").into_os_string();
            let files = asked.iter().map(|file| file.clone().into_os_string());
            let args = [OsString::from("merge"), "-o".into(), merged.clone()].into_iter().chain(files.rev());
            let done = Invocation::new(args)?.run()?;
            ensure!(done.status.success(), "{}", done.errors());
            let merged = report(Path::new(&merged))?;
            let waited = once("waits", [&reports[0], &reports[1], &merged, &finished].map(single_waits))?;
            ensure!(waited > 5, "{waited} waits for the GVL");
            once("cycles", [&reports[0], &reports[1], &merged, &finished].map(cycles))?;
        }
        std::fs::remove_dir_all(&dir)?;
        Ok(())
    })
}

/// If nothing happens, nothing is written. With `--dump-on=end` a file is written at the end, which contains all of a short run.
#[test]
fn nothing_and_end() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let dir = live.dir("kept")?;
    let command = || -> Result<Vec<OsString>> {
        Ok([vec!["--".into()], ruby.argv()?, vec!["-e".into(), "30.times { GC.start; sleep 0.05 }".into()]]
            .concat())
    };
    let run = |flags: &[&str]| -> Result<Finished> {
        let args = ["--record".into(), dir.join("app.gctrace").into_os_string(), "--keep=1m".into()];
        let args = [args.to_vec(), flags.iter().map(OsString::from).collect(), command()?].concat();
        let finished = Invocation::jsonl(args)?.run()?;
        ledger::check(&Report::parse(&finished.stdout)?)?;
        ensure!(finished.status.success(), "{}", finished.errors());
        Ok(finished)
    };
    let quiet = run(&["--dump-on=gc.pause > 9m", "--dump-on=rss>1TiB"])?;
    ensure!(
        files(&dir)?.is_empty() && quiet.errors().contains("no recording was written"),
        "{}",
        quiet.errors()
    );
    let waits = "waits until gc.pause > 9m or rss > 1TiB; `kill -USR2";
    ensure!(quiet.errors().contains(waits), "{}", quiet.errors());
    let ended = run(&["--dump-on=end"])?;
    let [file] = &files(&dir)?[..] else { anyhow::bail!("{:?}", files(&dir)?) };
    ensure!(name(file).ends_with("Z-end.gctrace"), "{}", name(file));
    let replayed = report(file)?;
    ensure!(cycles(&replayed).len() >= 30 && cycles(&replayed) == cycles(&ended));
    let of_kind = |finished: &Finished, kind: &str| -> Vec<String> {
        finished.stdout.iter().filter(|line| line.contains(kind)).cloned().collect()
    };
    for kind in ["\"type\":\"summary\"", "\"type\":\"exit\"", "\"type\":\"process\""] {
        ensure!(of_kind(&replayed, kind) == of_kind(&ended, kind), "{kind}");
    }
    Ok(())
}

/// The triggers for the share of the GC, memory and requests write one file each, and `info` has the reason.
#[test]
fn other_triggers() -> Result<()> {
    let live = Live::beside_others()?;
    let program = busy(&Ruby::main()?, "$stdout.puts 'busy'; $stdout.flush; loop { GC.start; sleep 0.002 }")?;
    let puma = Puma::start(&live, "requests.ru", "0")?;
    let mut running = Vec::new();
    for (pid, metric, above) in [
        (program.pid(), "gc.share", "10%"),
        (program.pid(), "rss", "1MiB"),
        (puma.process.pid(), "request", "10ms"),
    ] {
        let (dir, trigger) = (live.dir(metric)?, format!("{metric} > {above}"));
        let requests = (metric == "request").then_some("--requests");
        let flags: Vec<&str> = ["1m", "--dump-on", &trigger].into_iter().chain(requests).collect();
        running.push((keeping(pid, &dir.join("app"), &flags)?, dir, metric, trigger));
    }
    let mut stream = puma.connect()?;
    stream.write_all(b"GET /slow/one HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
    stream.read_to_end(&mut Vec::new())?;
    for (mut gctrace, dir, metric, trigger) in running {
        gctrace.wait_error("gctrace: wrote")?;
        let finished = gctrace.interrupt()?;
        ensure!(finished.status.success(), "{}", finished.errors());
        let [file] = &files(&dir)?[..] else { anyhow::bail!("{trigger}: {:?}", files(&dir)?) };
        ensure!(name(file).ends_with(&format!("Z-{metric}.gctrace")), "{}", name(file));
        let info = Invocation::new([OsString::from("info"), file.into()])?.run()?;
        ensure!(info.stdout.iter().any(|line| line.contains(&format!("{trigger}: "))), "{:#?}", info.stdout);
    }
    Ok(())
}

/// Threads that hold the GVL for as long as they can make other threads wait for 100 ms and more.
#[test]
fn waits() -> Result<()> {
    let live = Live::beside_others()?;
    let dir = live.dir("kept")?;
    let program = "3.times { Thread.new { x = 0; loop { x += 1 } } }
        $stdout.puts 'busy'; $stdout.flush; sleep";
    let program = busy(&Ruby::main()?, program)?;
    // Individual waits are not sampled, whatever else the machine does.
    let flags =
        ["1m", "--gvl", "--gvl-budget=100", "--dump-on=gvl.wait.p99 > 60ms", "--dump-on=gvl.wait > 10m"];
    let mut gctrace = keeping(program.pid(), &dir.join("app"), &flags)?;
    let said = gctrace.wait_error("gctrace: wrote")?;
    ensure!(said.contains("gvl.wait.p99 > 60ms: at least "), "{said}");
    gctrace.interrupt()?;
    let [file] = &files(&dir)?[..] else { anyhow::bail!("{:?}", files(&dir)?) };
    ensure!(name(file).ends_with("Z-gvl.wait.p99.gctrace"));
    let replayed = report(file)?;
    // The individual waits agree.
    let waits = replayed.stdout.iter().filter(|line| line.starts_with("{\"type\":\"gvl\",\"what\":\"wait\""));
    let long = waits.filter(|line| field(line, "wait_ns").is_ok_and(|ns| ns > 60e6)).count();
    ensure!(long > 0, "no long wait in it, {said}: {:#?}", replayed.stdout);
    Ok(())
}

/// If a program hangs, a file that is written meanwhile contains what it waits for, up to that moment, and the time grows from file to file.
/// A thread that wakes up now and then is shown with the same time, and no time is counted twice.
#[test]
fn hangs() -> Result<()> {
    let live = Live::beside_others()?;
    // Some kernels do not report every switch of threads (docs/gvl.md); what a thread did between two unreported switches is in no file.
    Ruby::first_and_last(|ruby| hangs_on(&live, ruby))
}

fn hangs_on(live: &Live, ruby: &Ruby) -> Result<()> {
    let program = "def hung; Queue.new.pop; end
        Thread.new { loop { sleep 0.7 } }; $stdout.puts 'busy'; $stdout.flush; hung";
    let program = busy(ruby, program)?;
    let dir = live.dir(&format!("hangs-{}", program.pid()))?;
    let mut gctrace = keeping(program.pid(), &dir.join("app"), &["1m", "--wall", "--gvl"])?;
    let mut before = 0;
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(1500));
        let (file, _) = ask(&mut gctrace, &dir)?;
        let folded = live.path("hangs.folded");
        let args = [OsString::from("report"), file.into(), "-q".into(), "--folded".into()];
        let args = [&args[..], &[folded.clone().into(), "--flamegraph-of".into(), "wall".into()]].concat();
        let finished = Invocation::new(args)?.run()?;
        ensure!(finished.status.success(), "{}", finished.errors());
        let text = std::fs::read_to_string(&folded)?;
        let of = |frame: &str| -> Result<u64> {
            let lines = text.lines().filter(|line| line.contains(frame));
            lines.map(|line| Ok(line.rsplit(' ').next().context("a weight")?.parse::<u64>()?)).sum()
        };
        let (hung, other) = (of("#hung")?, of("Kernel#sleep")?);
        ensure!(
            hung >= before + 1_300_000_000 && hung < before + 30_000_000_000,
            "{hung} of {before}: {text}"
        );
        ensure_times!(hung.abs_diff(other) < 200_000_000, "{hung} and {other}: {text}");
        before = hung;
    }
    let finished = gctrace.interrupt()?;
    ensure!(!finished.errors().contains("DO NOT ADD UP"), "{}", finished.errors());
    Ok(())
}

/// If gctrace is killed while it writes, it leaves a complete file or none.
#[test]
fn killed() -> Result<()> {
    let live = Live::beside_others()?;
    let mut program = busy(&Ruby::main()?, BUSY)?;
    for ms in [0, 2, 5, 10, 20, 60] {
        let dir = live.dir(&format!("killed-{ms}"))?;
        let gctrace =
            keeping(program.pid(), &dir.join("app"), &["1m", "--gvl", "--gvl-budget=100", "--wall"])?;
        // This much is to be written.
        collects(&mut program, 20, &format!("before {ms} ms"))?;
        gctrace.signal(Signal::USR2)?;
        std::thread::sleep(Duration::from_millis(ms));
        gctrace.kill()?;
        for file in files(&dir)? {
            ensure!(!cycles(&report(&file)?).is_empty(), "after {ms} ms");
        }
    }
    // Once it has said so, the file is there.
    let dir = live.dir("killed-later")?;
    let mut gctrace =
        keeping(program.pid(), &dir.join("app"), &["1m", "--gvl", "--gvl-budget=100", "--wall"])?;
    collects(&mut program, 20, "before the last one")?;
    let (file, _) = ask(&mut gctrace, &dir)?;
    gctrace.kill()?;
    ensure!(files(&dir)? == [file.clone()], "{:?}", files(&dir)?);
    ensure!(cycles(&report(&file)?).len() >= 20, "{} cycles", cycles(&report(&file)?).len());
    Ok(())
}

/// Fills the disk that a new file is on, except for one page.
fn fill(path: &Path) -> Result<()> {
    let mut file = std::fs::File::create(path)?;
    let failed = loop {
        if let Err(error) = file.write_all(&[1; 4096]) {
            break error;
        }
    };
    ensure!(failed.kind() == ErrorKind::StorageFull, "{failed}");
    Ok(file.set_len(file.metadata()?.len().saturating_sub(4096))?)
}

/// A path that cannot be written is refused at once. A failure later on is reported, leaves no file behind, and does not end the run.
#[test]
fn unwritable() -> Result<()> {
    let live = Live::beside_others()?;
    let mut program = busy(&Ruby::main()?, BUSY)?;
    let pid = program.pid().to_string();
    let refused = |path: &Path, part: &str| -> Result<()> {
        let args = ["record", "--keep=1m", "--pid", &pid, "-o"].map(OsString::from).to_vec();
        let finished = Invocation::new([args, vec![path.into()]].concat())?.run()?;
        let errors = finished.errors();
        ensure!(finished.status.code() == Some(2), "{}: {errors}", finished.status);
        ensure!(errors.contains(part) && finished.stderr.len() == 1, "{errors}");
        Ok(())
    };
    refused(&live.path("no/app"), "no/app cannot be written: No such file or directory")?;
    refused(&live.dir("is")?, "name a file in it")?;
    let disk = live.dir("disk")?;
    let mount = |args: &[&str]| -> Result<()> {
        let done = std::process::Command::new(args[0]).args(&args[1..]).arg(&disk).status()?;
        ensure!(done.success(), "{args:?}: {done}");
        Ok(())
    };
    mount(&["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs"])?;
    let found = (|| {
        mount(&["mount", "-o", "remount,ro"])?;
        refused(&disk.join("app"), "Read-only file system")?;
        mount(&["mount", "-o", "remount,rw"])?;
        let filler = disk.join("filler");
        fill(&filler)?;
        let mut gctrace = keeping(program.pid(), &disk.join("app"), &["1m", "--gvl", "--gvl-budget=100"])?;
        // More than a page holds, even if few of the program's waits for the GVL are seen on a slow machine; and on a fast one far less
        // than the disk holds without the filler.
        collects(&mut program, 40, "before the disk is full")?;
        gctrace.signal(Signal::USR2)?;
        let said = gctrace.wait_error("No space left on device")?;
        ensure!(said.contains("-SIGUSR2.gctrace") && said.contains("this file was not written"), "{said}");
        ensure!(files(&disk)? == [filler.clone()], "{:?}", files(&disk)?);
        std::fs::remove_file(filler)?;
        let (file, _) = ask(&mut gctrace, &disk)?;
        let finished = gctrace.interrupt()?;
        ensure!(finished.status.code() == Some(2), "{}: {}", finished.status, finished.errors());
        ensure!(finished.errors().matches("No space left").count() == 1, "{}", finished.errors());
        ensure!(files(&disk)? == [file.clone()], "{:?}", files(&disk)?);
        ensure!(cycles(&report(&file)?).len() > 20);
        Ok(())
    })();
    mount(&["umount"])?;
    found
}

/// `--keep-size` bounds the memory that gctrace uses and the size of the files that it writes.
#[test]
fn bounded() -> Result<()> {
    const SIZE: u64 = 4 << 20;
    let live = Live::beside_others()?;
    let mut program = busy(&Ruby::main()?, &BUSY.replace("3.times", "12.times").replace("0.002", "0.0005"))?;
    let peak = |gctrace: &Gctrace| -> Result<u64> { Ok(status_kb(gctrace.pid(), "VmHWM")? << 10) };
    let look = ["--gvl", "--gvl-budget=100", "--gvl-threshold=0.001ms", "--wall", "--off-cpu-min=0.001ms"];
    let flags = [&["1h", "--keep-size=4MiB"][..], &look[..]].concat();
    let dir = live.dir("kept")?;
    let mut gctrace = keeping(program.pid(), &dir.join("app"), &flags)?;
    collects(&mut program, 40, "before the base")?;
    let (mut base, mut size) = (0, 0);
    let since = Instant::now();
    // Until the size is reached; how long that takes depends on the machine.
    while since.elapsed() < PATIENCE {
        // File names have a resolution of one second.
        std::thread::sleep(Duration::from_millis(1100));
        // The memory used while it keeps little, including what it knows about the program by then.
        if size < SIZE / 2 {
            base = peak(&gctrace)?;
        }
        let (file, said) = ask(&mut gctrace, &dir)?;
        size = std::fs::metadata(&file)?.len();
        ensure!(size < SIZE + (64 << 10), "{size}");
        std::fs::remove_file(file)?;
        if said.contains("less than --keep because of --keep-size") {
            let used = peak(&gctrace)?;
            ensure!(used < base + 2 * SIZE + (8 << 20), "{used} bytes, and {base} without");
            let finished = gctrace.interrupt()?;
            ensure!(finished.status.success(), "{}", finished.errors());
            return Ok(());
        }
    }
    anyhow::bail!("{size} bytes are not {SIZE}")
}
