//! Recordings of a server: `gctrace report` produces the same outputs as the run, including requests, loads and endpoints.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::puma::Puma;
use gctrace_tests::timing::settled;
use gctrace_tests::{ensure_times, http, ledger};

use super::live_record::{FILES, LOOK, contents, outputs};

/// Runs `work` while two clients send requests of several kinds.
fn beside_requests<T>(puma: &Puma, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let (address, over) = (SocketAddr::from(([127, 0, 0, 1], puma.port)), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let client = |name: &'static str| {
            let over = &over;
            scope.spawn(move || -> Result<()> {
                for kind in ["gc", "lazy", "slow", "plain"].into_iter().cycle() {
                    if over.load(Ordering::Relaxed) {
                        break;
                    }
                    let answer = http::get(address, &format!("/{kind}/{name}"))?;
                    ensure!(answer.code == 200, "{kind}: {}", answer.code);
                }
                Ok(())
            })
        };
        let clients = [client("one"), client("two")];
        // Some requests lie completely within the run.
        std::thread::sleep(Duration::from_millis(100));
        let done = work();
        over.store(true, Ordering::Relaxed);
        for client in clients {
            client.join().expect("a client panicked")?;
        }
        done
    })
}

/// A run of two seconds that records what it sees, with these flags.
fn run(puma: &Puma, recording: &Path, flags: Vec<OsString>) -> Result<Invocation> {
    let mut args: Vec<OsString> = ["--duration", "2s", "--pid"].map(OsString::from).into();
    args.extend([puma.process.pid().to_string().into(), "--record".into(), recording.into()]);
    args.extend(LOOK.map(OsString::from));
    args.extend(flags);
    Invocation::new(args)
}

/// All files and JSON lines.
#[test]
fn every_output() -> Result<()> {
    let live = Live::beside_others()?;
    let puma = Puma::start(&live, "requests.ru", "0")?;
    let mut attempts = 0..;
    settled(|| outputs_of_a_run(&live, &puma, attempts.next().unwrap_or(0)))
}

fn outputs_of_a_run(live: &Live, puma: &Puma, attempt: usize) -> Result<()> {
    let (first, again) = (live.dir(&format!("run{attempt}"))?, live.dir(&format!("again{attempt}"))?);
    live.dir(&format!("run{attempt}/sets"))?;
    live.dir(&format!("again{attempt}/sets"))?;
    let recording = live.path("run.gctrace");
    let flags = [["--format".into(), "jsonl".into()].to_vec(), outputs(&first)].concat();
    let finished = beside_requests(puma, || run(puma, &recording, flags)?.run())?;
    ensure!(finished.status.success(), "{}", finished.errors());
    let report = gctrace_tests::report::Report::parse(&finished.stdout)?;
    ledger::check_lossless(&report)?;
    ensure_times!(
        report.requests.len() > 20 && !report.loads.is_empty(),
        "{} requests",
        report.requests.len()
    );
    let flags = ["report", "--format", "jsonl"].map(OsString::from).to_vec();
    let replayed = Invocation::new([flags, vec![recording.into()], outputs(&again)].concat())?.run()?;
    ensure!(replayed.status.success(), "{}", replayed.errors());
    ensure!(replayed.stdout == finished.stdout, "JSON lines differ");
    let (ours, theirs) = (contents(&first)?, contents(&again)?);
    ensure!(ours.len() >= FILES.len() && ours.len() == theirs.len(), "{} and {}", ours.len(), theirs.len());
    for (ours, theirs) in ours.iter().zip(&theirs) {
        ensure!(ours == theirs, "{} differs", ours.0.display());
    }
    Ok(())
}

/// Text lines, and flags that choose which requests, frames and threads are shown.
#[test]
fn choices() -> Result<()> {
    let live = Live::beside_others()?;
    let puma = Puma::start(&live, "requests.ru", "0")?;
    let (recording, lines) = (live.path("run.gctrace"), live.path("lines"));
    let (graph, again) = (live.path("graph.svg"), live.path("again.svg"));
    for (flags, of_report, word) in [
        (&["--slower-than=5ms"][..], &["--slower-than=5ms"][..], "GET /slow/"),
        (&["--by=endpoint"], &["--lines", "--by=endpoint"], "Requests of all processes by endpoint"),
        (&["--by=thread"], &["--lines", "--by=thread"], "Requests of all processes by thread"),
        (
            &[
                "--format=jsonl",
                "--brief",
                "--flamegraph-of=wall",
                "--endpoint=slow",
                "--stack-root=endpoint",
            ],
            &[
                "--format=jsonl",
                "--brief",
                "--flamegraph-of=wall",
                "--endpoint=slow",
                "--stack-root=endpoint",
            ],
            "\"type\":\"request\"",
        ),
        (
            &["--format=jsonl", "--flamegraph-of=gc", "--thread=puma", "--hide=Puma", "--stack-lines"],
            &["--format=jsonl", "--flamegraph-of=gc", "--thread=puma", "--hide=Puma", "--stack-lines"],
            "\"type\":\"load\"",
        ),
    ] {
        settled(|| {
            let mut args: Vec<OsString> = flags.iter().map(OsString::from).collect();
            args.extend(["-o".into(), lines.clone().into()]);
            args.extend(["--flamegraph".into(), graph.clone().into()]);
            let finished = beside_requests(&puma, || run(&puma, &recording, args)?.run())?;
            ensure!(finished.status.success(), "{flags:?}: {}", finished.errors());
            let mut args: Vec<OsString> = vec!["report".into(), recording.clone().into()];
            args.extend(of_report.iter().map(OsString::from));
            args.extend(["--flamegraph".into(), again.clone().into()]);
            let replayed = Invocation::new(args)?.run()?;
            ensure!(replayed.status.success(), "{of_report:?}: {}", replayed.errors());
            let lines = std::fs::read_to_string(&lines)?;
            let replayed = replayed.stdout.join("\n") + "\n";
            ensure_times!(lines.contains(word), "{flags:?}: no {word} in {lines}");
            ensure!(replayed == lines, "{flags:?}:\n{lines}\n{replayed}");
            let (ours, theirs) = (std::fs::read(&graph)?, std::fs::read(&again)?);
            ensure!(ours == theirs, "{flags:?}: the flame graphs differ");
            ensure_times!(ours.len() > 5_000, "{flags:?}: a flame graph of {} bytes", ours.len());
            Ok(())
        })?;
    }
    Ok(())
}
