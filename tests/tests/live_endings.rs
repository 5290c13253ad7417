//! How signals end a run: its files survive repeated signals, and nothing is overwritten before tracing has started.

use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::Guarded;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::{Live, gctrace_binary};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::timing::settled;
use gctrace_tests::{PATIENCE, ensure_times};
use rustix::process::Signal;

/// Collects and computes until it is killed.
const BUSY: &str = "loop { Array.new(2000) { 'x' * 50 }; GC.start; sleep 0.01 }";

fn busy() -> Result<Guarded> {
    let mut command = Ruby::main()?.command()?;
    Guarded::start("ruby", command.args(["-e", BUSY]))
}

/// Whether a complete flame graph exists.
fn is_svg(path: &Path) -> Result<bool> {
    match std::fs::read_to_string(path) {
        Ok(text) => {
            ensure!(text.trim_end().ends_with("</svg>"), "half of a file is left");
            Ok(true)
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).context("the flame graph"),
    }
}

/// On SIGINT, SIGTERM and SIGHUP the files are finished, even if a second signal follows at once.
#[test]
fn repeated_signals_keep_the_files() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = busy()?;
    let pid = ruby.pid().to_string();
    let cases: [(&str, [Signal; 2]); 4] = [
        ("term", [Signal::TERM, Signal::TERM]),
        ("hup", [Signal::HUP, Signal::TERM]),
        ("int", [Signal::INT, Signal::INT]),
        ("both", [Signal::INT, Signal::TERM]),
    ];
    for (name, signals) in cases {
        let svg = live.path(name);
        let path = svg.to_string_lossy().into_owned();
        let gctrace = Invocation::new(["--pid", &pid, "--quiet", "--flamegraph", &path])?.start_ready()?;
        for signal in signals {
            gctrace.signal(signal)?;
        }
        let finished = gctrace.wait()?;
        ensure!(finished.status.success(), "{name}: {}:\n{}", finished.status, finished.errors());
        ensure!(is_svg(&svg)?, "{name}: no file:\n{}", finished.errors());
    }
    Ok(())
}

/// `timeout` signals its child, then its process group. A run that had started keeps its file.
#[test]
fn timeout_keeps_the_files() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = busy()?;
    let (mut seconds, mut kept) = (1, 0);
    while kept < 6 {
        let svg = live.path("timeout.svg");
        let mut command = Command::new("timeout");
        command.arg("--preserve-status").arg(seconds.to_string()).arg(gctrace_binary()?);
        command.args(["--pid", &ruby.pid().to_string(), "--quiet", "--flamegraph"]).arg(&svg);
        let finished = Guarded::start("timeout", &mut command)?.finish(PATIENCE)?;
        if finished.status.success() {
            ensure!(is_svg(&svg)?, "after {kept} runs no file:\n{}", finished.errors());
            std::fs::remove_file(&svg)?;
            kept += 1;
        } else {
            // This machine is too slow to start within that time. A run that had started ends by itself.
            let started = finished.errors().contains("gctrace: ready");
            ensure!(!started, "it ended with {}:\n{}", finished.status, finished.errors());
            ensure!(!is_svg(&svg)?, "a file without a run:\n{}", finished.errors());
            seconds += 1;
            ensure!(seconds < 100, "not ready in {seconds} s:\n{}", finished.errors());
        }
    }
    Ok(())
}

/// A signal during the start ends gctrace at once. An existing file with the name of an output stays, and no new file is left behind.
#[test]
fn interrupted_start() -> Result<()> {
    settled(interrupt_starts)
}

fn interrupt_starts() -> Result<()> {
    let live = Live::begin()?;
    let ruby = busy()?;
    let pid = ruby.pid().to_string();
    let svg = live.path("old.svg");
    std::fs::write(&svg, "old")?;
    let path = svg.to_string_lossy().into_owned();
    let (recording, lines) = (live.path("new.gctrace"), live.path("new.jsonl"));
    let new = [&recording, &lines].map(|path| path.to_string_lossy().into_owned());
    let args = ["--pid", &pid, "--quiet", "--wall", "--gvl", "--flamegraph", &path];
    let args = [&args[..], &["--record", &new[0], "--output", &new[1], "--format", "jsonl"]].concat();
    // How long a start takes here. The kernel handles no signal while it verifies a program.
    let began = Instant::now();
    let gctrace = Invocation::new(&args)?.start_ready()?;
    let most = began.elapsed().max(Duration::from_secs(2));
    gctrace.signal(Signal::TERM)?;
    gctrace.wait()?;
    let begin_anew = || {
        std::fs::write(&svg, "old")?;
        [&recording, &lines].into_iter().try_for_each(std::fs::remove_file)
    };
    begin_anew()?;
    let mut interrupted = 0;
    for (milliseconds, signal) in
        [(50, Signal::INT), (200, Signal::INT), (400, Signal::TERM), (700, Signal::INT)]
    {
        let gctrace = Invocation::new(&args)?.start()?;
        std::thread::sleep(Duration::from_millis(milliseconds));
        let signalled = Instant::now();
        gctrace.signal(signal)?;
        let finished = gctrace.wait()?;
        let took = signalled.elapsed();
        // A start that is interrupted ends by the signal.
        if finished.status.signal().is_none() {
            // Tracing had already begun, which is before it is said that all is ready: it has the files of a whole run.
            let all = recording.exists() && lines.exists() && is_svg(&svg)?;
            ensure!(finished.status.success() && all, "{}:\n{}", finished.status, finished.errors());
            begin_anew()?;
            continue;
        }
        interrupted += 1;
        ensure!(!finished.errors().contains("gctrace: ready"), "a run that had started ended by the signal");
        ensure!(!finished.status.success(), "{}:\n{}", finished.status, finished.errors());
        ensure_times!(took < most, "after {milliseconds} ms: {took:?} to end");
        ensure!(std::fs::read_to_string(&svg)? == "old", "after {milliseconds} ms the old file is gone");
        for path in [&recording, &lines] {
            ensure!(!path.exists(), "after {milliseconds} ms {} is left", path.display());
        }
    }
    ensure_times!(interrupted > 0, "no start was interrupted");
    Ok(())
}

/// A second Ctrl-C, a second later, makes gctrace give up. Its message about the files is correct.
#[test]
fn giving_up() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = busy()?;
    let pid = ruby.pid().to_string();
    // A receiver that never answers delays the end of the run.
    let silent = TcpListener::bind("127.0.0.1:0")?;
    let url = format!("http://{}", silent.local_addr()?);
    let svg = live.path("written.svg");
    let path = svg.to_string_lossy().into_owned();
    let args = ["--pid", &pid, "--quiet", "--otlp", &url, "--flamegraph", &path];
    let mut gctrace = Invocation::new(args)?.start_ready()?;
    gctrace.signal(Signal::INT)?;
    gctrace.wait_error("finishing…")?;
    std::thread::sleep(Duration::from_millis(1100));
    gctrace.signal(Signal::INT)?;
    let finished = gctrace.wait()?;
    let said = finished.errors();
    ensure!(finished.status.code() == Some(2), "{}:\n{said}", finished.status);
    if said.contains("gave up: no output files were written") {
        ensure!(!is_svg(&svg)?, "there is a file:\n{said}");
    } else {
        ensure!(said.contains("gave up: only these output files were written"), "{said}");
        ensure!(is_svg(&svg)? == said.contains(&path), "{said}");
    }
    Ok(())
}

/// On one terminal, messages, the progress line and data never share a line.
#[test]
fn lines_of_a_terminal() -> Result<()> {
    let _live = Live::beside_others()?;
    let ruby = busy()?;
    let command = format!(
        "{} --pid {} --duration 2s --wall --otlp http://127.0.0.1:9",
        gctrace_binary()?.display(),
        ruby.pid()
    );
    // script(1) is in Debian's essential packages. Pushes that nobody accepts lead to more messages.
    for command in [command.clone(), command.replace(" --otlp http://127.0.0.1:9", "")] {
        let output = Command::new("script").args(["-qec", &command, "/dev/null"]).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // The text that the terminal shows: erased lines are gone.
        let shown: Vec<&str> =
            text.split('\n').map(|line| line.rsplit("\r\u{1b}[K").next().unwrap_or_default()).collect();
        let joined: Vec<&&str> = shown
            .iter()
            .filter(|line| {
                let line = line.trim_end_matches('\r');
                line.rfind("gctrace: ").is_some_and(|at| at > 0)
                    || (line.contains("gctrace: ") && line.contains("TOTAL"))
            })
            .collect();
        ensure!(joined.is_empty(), "{joined:?}\n{text}");
        // There was a run, its progress line was erased, and its results were printed.
        for part in ["gctrace: ready", "\r\u{1b}[K", "TOTAL"] {
            ensure!(text.contains(part), "no {part:?}: {text}");
        }
    }
    Ok(())
}

/// A run that gives up names the files to which it added all along, and offers no end without files.
#[test]
fn giving_up_streams() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = busy()?;
    let pid = ruby.pid().to_string();
    let silent = TcpListener::bind("127.0.0.1:0")?;
    let url = format!("http://{}", silent.local_addr()?);
    let paths = ["run.gctrace", "lines"].map(|name| live.path(name).display().to_string());
    let [record, lines] = &paths;
    let args = ["--pid", &pid, "--otlp", &url, "--record", record, "-o", lines, "--format", "jsonl"];
    let mut gctrace = Invocation::new(args)?.start_ready()?;
    std::thread::sleep(Duration::from_secs(2));
    gctrace.signal(Signal::INT)?;
    let offered = gctrace.wait_error("finishing…")?;
    ensure!(offered.contains("(Ctrl-C again to give up)"), "{offered}");
    std::thread::sleep(Duration::from_millis(1100));
    gctrace.signal(Signal::INT)?;
    let finished = gctrace.wait()?;
    let said = finished.errors();
    ensure!(finished.status.code() == Some(2), "{}:\n{said}", finished.status);
    let last = said.lines().find(|line| line.contains("gave up: only these output files were written: "));
    let last = last.with_context(|| said.clone())?;
    for path in &paths {
        ensure!(last.contains(path) && std::fs::metadata(path)?.len() > 0, "{path}: {last}");
    }
    Ok(())
}

/// The reader of a FIFO closes it: the run ends if it writes nothing else. Otherwise the other output is complete, and the status says that one failed.
#[test]
fn readers_that_leave() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = busy()?;
    let pid = ruby.pid().to_string();
    for with_csv in [false, true] {
        let pipe = live.path(&format!("pipe-{with_csv}"));
        ensure!(Command::new("mkfifo").arg(&pipe).status()?.success());
        let csv = live.path("cycles.csv").display().to_string();
        let path = pipe.display().to_string();
        let mut args = vec!["--pid", &pid, "--format", "jsonl", "-o", &path];
        if with_csv {
            args.extend(["--csv", &csv]);
        }
        let mut gctrace = Invocation::new(args)?.start()?;
        let mut first = String::new();
        let mut reader = std::io::BufReader::new(std::fs::File::open(&pipe)?);
        std::io::BufRead::read_line(&mut reader, &mut first)?;
        drop(reader);
        ensure!(first.starts_with('{'), "{first}");
        let told = gctrace.wait_error("has closed it")?;
        ensure!(told.contains(&path) && told.contains("; the other outputs go on") == with_csv, "{told}");
        // As in the first column of the table.
        let now = Command::new("date").args(["-u", "+%Y-%m-%dT%H:%M:%S.%NZ"]).output()?.stdout;
        let left = String::from_utf8(now)?;
        if with_csv {
            std::thread::sleep(Duration::from_secs(2));
            ensure!(gctrace.running()?, "it has ended");
            gctrace.signal(Signal::INT)?;
        }
        let finished = gctrace.wait()?;
        let wanted = if with_csv { 2 } else { 0 };
        ensure!(finished.status.code() == Some(wanted), "{}:\n{}", finished.status, finished.errors());
        if with_csv {
            let rows = std::fs::read_to_string(&csv)?;
            let last = rows.lines().next_back().and_then(|row| row.split(',').next());
            ensure!(
                last.is_some_and(|last| last.len() == 30 && last > left.trim()),
                "none after {left}: {rows}"
            );
        }
    }
    Ok(())
}
