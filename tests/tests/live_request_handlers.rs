//! What handles a request: the action of a Rails controller, the route of Sinatra or Grape, or something that no stack shows.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::{Live, marked_lines};
use gctrace_tests::puma::Puma;
use gctrace_tests::report::Report;
use gctrace_tests::timing::settled;
use gctrace_tests::{ensure_times, ledger};

const PROGRAM: &str = "web/handlers.ru";
/// Paths without their number, and the handler of each.
const HANDLED: [(&str, &str); 7] = [
    ("/orders", "OrdersController#show"),
    // The method that runs, with the class that defines it.
    ("/inherited", "ApplicationController#inherited"),
    // The action calls the route of Sinatra, which does the work.
    ("/nested", "OrdersController#nested"),
    ("/list", "ListController#index"),
    ("/bare", "BareController#hi"),
    ("/shop/routes", "block in <class:Shop>"),
    ("/api/things", "block in <class:Api>"),
];
/// Filters that respond by themselves, and an application without a framework.
const UNHANDLED: [&str; 3] = ["/halted", "/shop/stopped", "/plain"];

fn paths() -> Vec<&'static str> {
    HANDLED.iter().map(|(path, _)| *path).chain(UNHANDLED).collect()
}

fn ask(server: &Puma, path: &str, number: usize) -> Result<()> {
    let mut stream = server.connect()?;
    write!(stream, "GET {path}/{number} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    ensure!(answer.starts_with("HTTP/1.1 200 "), "{path}: {answer}");
    Ok(())
}

/// Requests all paths in turn: each eight times, and until the deadline.
fn client(server: &Puma, first: usize, until: Instant) -> Result<()> {
    let paths = paths();
    for number in first.. {
        if Instant::now() >= until && number >= first + 8 * paths.len() {
            break;
        }
        ask(server, paths[number % paths.len()], number)?;
    }
    Ok(())
}

fn traced(live: &Live, more: &[&str]) -> Result<Report> {
    let server = Puma::start(live, "handlers.ru", "0")?;
    // One thread loads what the frameworks load at a first request.
    for path in paths() {
        ask(&server, path, 0)?;
    }
    let pid = server.process.pid().to_string();
    let args = ["--pid", &pid, "--requests"];
    let gctrace = Invocation::jsonl(args.iter().chain(more))?.start_ready()?;
    let until = Instant::now() + Duration::from_secs(6);
    std::thread::scope(|scope| -> Result<()> {
        let server = &server;
        let clients: Vec<_> =
            (0..3).map(|first| scope.spawn(move || client(server, first * 3, until))).collect();
        clients.into_iter().try_for_each(|client| client.join().expect("a client panicked"))
    })?;
    // Its last requests end and are reported.
    std::thread::sleep(Duration::from_millis(500));
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    Ok(report)
}

/// Checks each request of a run: its handler is the right one, with the line at which it begins, or is unknown. Returns the number of requests
/// with a known handler and of all requests, by path.
fn known(report: &Report) -> Result<BTreeMap<&'static str, (usize, usize)>> {
    let mut known: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for request in &report.requests {
        let path = request.path.as_deref().context("no path")?;
        let (handler, line) = (request.handler.as_deref(), request.handler_line);
        if UNHANDLED.iter().any(|of| path.starts_with(of)) {
            ensure!(handler.is_none() && line.is_none(), "{request:?}");
            continue;
        }
        let (path, right) = HANDLED.iter().find(|(of, _)| path.starts_with(of)).context(path.to_owned())?;
        let (seen, of) = known.entry(path).or_default();
        *of += 1;
        let Some(handler) = handler else { continue };
        *seen += 1;
        let lines = marked_lines(PROGRAM, &format!("handles {path}"))?;
        ensure!(handler == *right && line.is_some_and(|line| lines == [line]), "{lines:?}: {request:?}");
        let file = request.handler_file.as_deref().unwrap_or_default();
        ensure!(file.ends_with(PROGRAM), "{request:?}");
    }
    Ok(known)
}

/// With CPU samples nearly all handlers are known, and none is wrong. Frames are named during the request or soon after.
#[test]
fn with_samples() -> Result<()> {
    settled(compare_with_samples)
}

fn compare_with_samples() -> Result<()> {
    let live = Live::begin()?;
    let folded = live.path("run.folded").to_string_lossy().into_owned();
    let report = traced(&live, &["--rate", "997", "--folded", &folded])?;
    let known = known(&report)?;
    println!("{known:?}");
    ensure!(known.len() == HANDLED.len(), "{known:?}");
    for (path, (seen, of)) in &known {
        ensure!(*of >= 5, "{path}: {of} requests");
        ensure_times!(seen * 10 >= of * 9, "{path}: the handlers of {seen} of {of} requests are known");
    }
    // Every request leaves an `svar` in the environment of `Rack::URLMap#call`, which its next collection frees: stacks are named before that.
    let (frames, stale) = (ledger::user(&report, "frames")?, ledger::user(&report, "frames_stale")?);
    ensure_times!(stale * 500 <= frames, "{stale} of {frames} frames were named too late");
    Ok(())
}

/// Without samples, the handlers of requests that start a collection are known, because its stack shows the handler.
#[test]
fn with_collections() -> Result<()> {
    let live = Live::beside_others()?;
    let report = traced(&live, &[])?;
    let known = known(&report)?;
    println!("{known:?}");
    ensure!(known.values().any(|(seen, _)| *seen > 0), "{known:?}");
    // A request that starts no collection has no stack.
    for request in &report.requests {
        ensure!(request.gcs != Some(0) || request.handler.is_none(), "{request:?}");
    }
    Ok(())
}
