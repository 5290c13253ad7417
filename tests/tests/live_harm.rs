//! What gctrace leaves behind, however it ends: undisturbed programs, unchanged code, complete files or no files.

use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::live::Live;
use gctrace_tests::puma::Puma;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Done, Running, Script};
use gctrace_tests::{PATIENCE, compare, ledger, memory, pprof, slowness, tunemygc};
use rustix::process::Signal;

/// Starts the program that collects garbage until it is told to stop.
fn steady(live: &Live, ruby: &Ruby) -> Result<Running> {
    let mut running = Script::unwitnessed(live, ruby, "steady.rb")?.start()?;
    running.wait_for("ready")?;
    Ok(running)
}

/// Stops it. Its output and status must be those of an undisturbed run.
fn stop(mut running: Running) -> Result<Done> {
    ensure!(running.running()?, "the program has ended by itself");
    running.say("stop")?;
    let done = running.finish_any()?;
    ensure!(done.finished.status.code() == Some(7), "the program ended with {}", done.finished.status);
    ensure!(done.finished.stdout == ["ready", "checksum 524657833"], "it printed {:?}", done.finished.stdout);
    ensure!(done.finished.stderr.is_empty(), "it complained: {:?}", done.finished.stderr);
    Ok(done)
}

/// Waits until the code of the program is restored.
fn restored(pid: u32, before: &[u64]) -> Result<()> {
    let deadline = Instant::now() + Duration::from_mins(1);
    loop {
        let changed = memory::changed_code(pid)?;
        if changed == before {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "bytes of the program's code are still changed at {changed:x?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Starts gctrace on all Rubies with output files. Returns it once it is ready and in the middle of tracing `pid`.
fn in_the_middle(pid: u32, sets: &Path, profile: &Path) -> Result<Gctrace> {
    let args = [
        "--all-ruby".as_ref(),
        "--tunemygc".as_ref(),
        sets.as_os_str(),
        "--pprof".as_ref(),
        profile.as_ref(),
    ];
    let mut gctrace = Invocation::jsonl(args)?.start_ready()?;
    gctrace.wait_line("gc", pid)?;
    Ok(gctrace)
}

/// The program that the other tests disturb prints its result when undisturbed.
#[test]
fn undisturbed_program() -> Result<()> {
    let live = Live::begin()?;
    Ruby::first_and_last(|ruby| {
        let running = steady(&live, ruby)?;
        stop(running)?;
        Ok(())
    })
}

/// kill -9 of gctrace in the middle of a run: the program continues, no probe remains, no partial file is left, and the
/// next gctrace works.
#[test]
fn killed_in_the_middle() -> Result<()> {
    let live = Live::begin()?;
    Ruby::first_and_last(|ruby| {
        let index = ruby.label();
        let events = memory::uprobe_events()?;
        let program = steady(&live, ruby)?;
        let before = memory::changed_code(program.pid())?;
        let out = live.dir(&format!("out{index}"))?;
        let (sets, profile) = (live.dir(&format!("out{index}/sets"))?, out.join("gc.pb.gz"));
        let gctrace = in_the_middle(program.pid(), &sets, &profile)?;
        // The check would notice a probe: it finds some while gctrace runs.
        ensure!(memory::changed_code(program.pid())?.len() > before.len(), "no probe in the program's code");
        let killed = gctrace.kill()?;
        ensure!(!killed.status.success(), "it was not killed: {}", killed.status);

        restored(program.pid(), &before)?;
        ensure!(memory::uprobe_events()? == events, "probes are left in uprobe_events");
        tunemygc::Set::read_dir(&sets)?;
        let left = tunemygc::files(&out)?;
        for path in left.iter().filter(|path| **path != sets) {
            ensure!(path == &profile, "{} is left behind", path.display());
            pprof::Profile::open(path)?;
        }

        let mut again = Gctrace::all_ruby(&live)?;
        again.wait_line("gc", program.pid())?;
        let report = again.stop()?;
        ensure!(report.gcs_of(program.pid()).next().is_some(), "the next gctrace sees nothing");
        stop(program)?;
        Ok(())
    })
}

/// gctrace is killed while programs start and end all the time, several times in a row.
#[test]
fn killed_while_programs_come_and_go() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    for _ in 0..3 {
        let gctrace = Gctrace::all_ruby(&live)?;
        let scripts =
            (0..3).map(|_| Script::new(&live, &ruby, "explicit.rb")?.start()).collect::<Result<Vec<_>>>()?;
        gctrace.kill()?;
        for running in scripts {
            let done = running.finish()?;
            ensure!(done.finished.errors().is_empty(), "the program complained: {}", done.finished.errors());
            ensure!(done.log()?.starts().count() as u64 == done.report.growth("count")?);
        }
    }
    Ok(())
}

/// An orderly end also restores the program's code.
#[test]
fn interrupted_leaves_no_probe() -> Result<()> {
    let live = Live::begin()?;
    let events = memory::uprobe_events()?;
    let program = steady(&live, &Ruby::main()?)?;
    let before = memory::changed_code(program.pid())?;
    let mut gctrace = Gctrace::all_ruby(&live)?;
    gctrace.wait_line("gc", program.pid())?;
    let report = gctrace.stop()?;
    ledger::check(&report)?;
    restored(program.pid(), &before)?;
    ensure!(memory::uprobe_events()? == events, "probes are left in uprobe_events");
    stop(program)?;
    Ok(())
}

/// SIGTERM, and the end of --duration, flush everything seen so far to all outputs while the program continues.
#[test]
fn termination_and_duration_flush() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    for (index, by_signal) in [true, false].into_iter().enumerate() {
        let program = steady(&live, &ruby)?;
        let (sets, profile) = (live.dir(&format!("sets{index}"))?, live.path(&format!("gc{index}.pb.gz")));
        let (report, done) = if by_signal {
            let gctrace = in_the_middle(program.pid(), &sets, &profile)?;
            let done = Script::unwitnessed(&live, &ruby, "explicit.rb")?.run()?;
            (gctrace.stop_by(Signal::TERM)?.0, done)
        } else {
            // Several times as long as the script takes.
            let duration = format!("{}s", 6 * slowness());
            let args = ["--all-ruby", "--duration", &duration, "--tunemygc"].map(std::ffi::OsStr::new);
            let args = args.into_iter().chain([sets.as_os_str(), "--pprof".as_ref(), profile.as_os_str()]);
            let gctrace = Invocation::jsonl(args)?.start_ready()?;
            let done = Script::unwitnessed(&live, &ruby, "explicit.rb")?.run()?;
            (gctrace.done()?.0, done)
        };
        compare::program(&report.gcs_of(done.pid).collect::<Vec<_>>(), &done.report)?;
        let written = tunemygc::Set::read_dir(&sets)?;
        for pid in [program.pid(), done.pid] {
            let of_pid = written.iter().filter(|set| set.pid == pid).collect::<Vec<_>>();
            // A long set is written in parts of ten thousand samples.
            let short = of_pid.iter().filter(|set| set.samples.len() < 10_000).count();
            ensure!(!of_pid.is_empty() && short <= 1, "{} sample sets of {pid}", of_pid.len());
            let started = of_pid.iter().map(|set| set.of("GC_CYCLE_STARTED").count()).sum::<usize>();
            ensure!(started == report.gcs_of(pid).count(), "{started} cycles in the sets of {pid}");
        }
        let opened = pprof::Profile::open(&profile)?;
        // A profile starts when everything is being traced: earlier cycles are in the lines but not in the profile.
        let user = &report.ledger.as_ref().context("a ledger")?.user;
        let early = user["profile_events_early"].as_u64().context("profile_events_early")?;
        let mut cycles: Vec<_> = report.gcs.iter().collect();
        cycles.sort_by(|one, two| one.ts.total_cmp(&two.ts));
        let pauses = cycles.iter().skip(early as usize).map(|line| line.steps).sum::<u64>();
        ensure!(
            opened.total("gc_pauses/count")? == pauses,
            "{:?}, {pauses} in jsonl",
            opened.total("gc_pauses/count")
        );
        stop(program)?;
    }
    Ok(())
}

/// A traced program that is killed leads to a line, not to a failure; tracing of the other programs continues.
#[test]
fn killed_program() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let (victim, other) = (steady(&live, &ruby)?, steady(&live, &ruby)?);
    let mut gctrace = Gctrace::all_ruby(&live)?;
    gctrace.wait_line("gc", victim.pid())?;
    victim.signal(Signal::KILL)?;
    let pid = victim.pid();
    drop(victim);
    gctrace.wait_line("exit", pid)?;
    let done = Script::unwitnessed(&live, &ruby, "explicit.rb")?.run()?;
    let other_pid = other.pid();
    stop(other)?;
    let report = gctrace.stop()?;
    compare::program(&report.gcs_of(done.pid).collect::<Vec<_>>(), &done.report)?;
    ensure!(report.gcs_of(other_pid).next().is_some(), "nothing about the other program");
    Ok(())
}

/// If the ring overflows (because gctrace itself is stopped), the program continues, the exact number of lost records is
/// reported with the process, and the ledger balances.
#[test]
fn overflow_is_told() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::first_and_last(|ruby| {
        let running = steady(&live, ruby)?;
        let pid = running.pid();
        let arguments = ["--pid", &pid.to_string(), "--gc-ring", "16KiB"];
        let mut gctrace = Invocation::jsonl(arguments)?.start_ready()?;
        gctrace.wait_line("gc", pid)?;
        // Until the program had enough CPU time in such a second.
        let since = Instant::now();
        let is_lost = |line: &String| line.contains(r#""type":"gc""#) && !line.contains(r#""lost":0"#);
        while !gctrace.stdout_so_far().iter().any(is_lost) {
            ensure!(since.elapsed() < PATIENCE, "nothing is lost");
            gctrace.signal(Signal::STOP)?;
            std::thread::sleep(Duration::from_secs(1));
            gctrace.signal(Signal::CONT)?;
            std::thread::sleep(Duration::from_secs(1));
        }
        stop(running)?;
        let report = gctrace.stop()?;
        let lost = ledger::kernel_losses(&report)?;
        assert!(lost > 0, "nothing was lost, so nothing was tested");
        let exit = report.exits.iter().find(|exit| exit.pid == pid);
        assert_eq!(exit.map(|exit| exit.lost), Some(lost));
        assert!(report.gcs_of(pid).map(|cycle| cycle.lost).sum::<u64>() <= lost);
        Ok(())
    })
}

/// A Puma that is not selected has no request probes, even if a selected one runs the same files (from Linux 6.11 on, where one link
/// attaches the probes of a file to one process). Its only probes are at calls of `listen`, which it has already made.
#[test]
fn a_server_that_is_not_selected() -> Result<()> {
    let live = Live::begin()?;
    let [selected, other] =
        [Puma::start(&live, "requests.ru", "0")?, Puma::start(&live, "requests.ru", "0")?];
    let pid = selected.process.pid().to_string();
    let gctrace = Invocation::jsonl(["--pid", &pid, "--requests"])?.start_ready()?;
    let mut stream = selected.connect()?;
    stream.write_all(b"GET /plain/seen HTTP/1.1\r\nHost: x\r\n\r\n")?;
    gctrace.wait_requests(1)?;
    let probes = |server: &Puma, library| memory::changed_library(server.process.pid(), library);
    for library in ["/puma_http11.so", "/socket.so", "/libc.so.6"] {
        let (of_selected, of_other) = (probes(&selected, library)?, probes(&other, library)?);
        ensure!(of_selected.len() >= 2, "{library}: {of_selected:x?}");
        let is_listen = library == "/socket.so" && of_other.len() < of_selected.len() / 2;
        ensure!(of_other.is_empty() || is_listen, "{library}: {of_other:x?} of {of_selected:x?}");
    }
    gctrace.stop()?;
    for library in ["/puma_http11.so", "/socket.so", "/libc.so.6"] {
        let deadline = Instant::now() + Duration::from_mins(1);
        while !probes(&selected, library)?.is_empty() {
            ensure!(Instant::now() < deadline, "{library} of the selected one is still changed");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    Ok(())
}
