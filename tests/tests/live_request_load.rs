//! Many connections, how close the begin and end of requests are to the application's own times, and what has no requests.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::ensure_times;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::ledger;
use gctrace_tests::live::Live;
use gctrace_tests::memory::status_kb;
use gctrace_tests::puma::Puma;
use gctrace_tests::report::RequestLine;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use gctrace_tests::timing::settled;

/// The end of each response of `requests.ru`.
const BODY: &[u8] = b"SECRETBODYSECRETBODYSECRETBODY";

/// Sends a request on this connection, and reads its whole response.
fn ask(stream: &mut TcpStream, path: &str) -> Result<()> {
    write!(stream, "GET /{path} HTTP/1.1\r\nHost: x\r\n\r\n")?;
    let (mut text, mut part) = (Vec::new(), [0; 1024]);
    while !text.ends_with(BODY) {
        let read = stream.read(&mut part)?;
        ensure!(read > 0, "no whole response: {}", String::from_utf8_lossy(&text));
        text.extend(&part[..read]);
    }
    Ok(())
}

/// All requests of 24,000 connections with two requests each are reported, and nothing about the connections is kept.
#[test]
fn connections_are_opened_and_closed() -> Result<()> {
    const CLIENTS: usize = 4;
    const CONNECTIONS: usize = 6000;
    /// Connections of each client until every table of gctrace has grown to its full size.
    const FIRST: usize = 3000;
    /// Maximum growth over 12,000 connections.
    const MOST_KB: u64 = 512;
    /// Without the allocator's dynamic thresholds (`mallopt(3)`): with them it keeps some MB of freed buffers if records have waited for 0.2 s.
    const ALLOCATOR: [(&str, &str); 2] =
        [("MALLOC_MMAP_THRESHOLD_", "131072"), ("MALLOC_TRIM_THRESHOLD_", "131072")];
    let live = Live::beside_others()?;
    let puma = Puma::start(&live, "requests.ru", "0")?;
    let pid = puma.process.pid().to_string();
    let gctrace = Invocation::jsonl(["--pid", &pid, "--requests"])?;
    let gctrace =
        gctrace.envs(ALLOCATOR.map(|(name, value)| (name.into(), value.into())).into()).start_ready()?;
    // Memory after each client has made another `count` connections: without the pages of the binary, which the kernel evicts and reads again as
    // it likes, and once gctrace has read all that happened. A client may have its response before the server has finished the request.
    let connect = |count: usize, all: usize| -> Result<u64> {
        std::thread::scope(|scope| {
            let client = || -> Result<()> {
                for _ in 0..count {
                    let mut stream = puma.connect()?;
                    (0..2).try_for_each(|_| ask(&mut stream, "plain/one"))?;
                }
                Ok(())
            };
            let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(client)).collect();
            clients.into_iter().try_for_each(|client| client.join().expect("no panic"))
        })?;
        gctrace.wait_requests(all)?;
        status_kb(gctrace.pid(), "RssAnon")
    };
    let all = CLIENTS * CONNECTIONS * 2;
    let (first, last) = (connect(FIRST, CLIENTS * FIRST * 2)?, connect(CONNECTIONS - FIRST, all)?);
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    let reported = ledger::user(&report, "requests_reported")?;
    let lines = report.requests.len();
    ensure!(
        reported == all as u64 && lines == all,
        "{reported} requests are reported, {lines} have a line, of {all}"
    );
    eprintln!("{first} kB after {} connections, {last} kB at the end", CLIENTS * FIRST);
    ensure!(
        last <= first + MOST_KB,
        "{first} kB after {} connections, {last} kB at the end",
        CLIENTS * FIRST
    );
    Ok(())
}

/// The value below which this fraction of the values lies.
fn quantile(sorted: &[u64], part: f64) -> u64 {
    sorted[((sorted.len() - 1) as f64 * part) as usize]
}

/// A request begins when a thread takes it, before the application gets it, and ends after its response is written. No other thread wants the
/// GVL meanwhile, so the time in between is the server's own work.
#[test]
fn begins_and_ends_are_the_servers() -> Result<()> {
    const REQUESTS: usize = 500;
    let live = Live::begin()?;
    for ruby in Puma::rubies()? {
        settled(|| {
            let puma = Puma::start_on(&live, &ruby, "requests.ru")?;
            let pid = puma.process.pid().to_string();
            let gctrace = Invocation::jsonl(["--pid", &pid, "--requests"])?.start_ready()?;
            let mut stream = puma.connect()?;
            let path = |number: usize| format!("plain/q{}", "x".repeat(number % 7 + 1));
            (0..REQUESTS).try_for_each(|number| ask(&mut stream, &path(number)))?;
            gctrace.wait_requests(REQUESTS)?;
            let report = gctrace.stop()?;
            ledger::check_lossless(&report)?;
            // Sorted by begin, per thread: times in the application, and times of the whole requests.
            let mut inner: HashMap<u32, Vec<(u64, u64)>> = HashMap::new();
            for line in std::fs::read_to_string(&puma.truth)?.lines() {
                let words: Vec<&str> = line.split(' ').collect();
                let [_, tid, begin, end, ..] = words[..] else { anyhow::bail!("line {line}") };
                inner.entry(tid.parse()?).or_default().push((begin.parse()?, end.parse()?));
            }
            let mut outer: HashMap<u32, Vec<(u64, u64)>> = HashMap::new();
            for line in &report.requests {
                let end = line.begin_ns + line.duration_ns.with_context(|| format!("no end: {line:?}"))?;
                outer.entry(line.tid).or_default().push((line.begin_ns, end));
            }
            let (mut begins, mut ends) = (Vec::new(), Vec::new());
            for (tid, served) in &mut inner {
                let seen = outer.get_mut(tid).with_context(|| format!("nothing of thread {tid}"))?;
                ensure!(seen.len() == served.len(), "{} of {} of thread {tid}", seen.len(), served.len());
                served.sort_unstable();
                seen.sort_unstable();
                for (served, seen) in served.iter().zip(seen.iter()) {
                    ensure!(seen.0 <= served.0 && served.1 <= seen.1, "{seen:?} {served:?}");
                    begins.push(served.0 - seen.0);
                    ends.push(seen.1 - served.1);
                }
            }
            ensure!(begins.len() == REQUESTS, "{} requests", begins.len());
            for (what, times) in [("before its begin", &mut begins), ("behind its end", &mut ends)] {
                times.sort_unstable();
                let (median, p95) = (quantile(times, 0.5), quantile(times, 0.95));
                eprintln!("{}: {what}: median {median} ns, p95 {p95} ns", ruby.label());
                ensure_times!(median < 200_000 && p95 < 2_000_000, "{what}: {median} and {p95} ns");
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Without the flag, and in a program that serves nothing, there are no requests.
#[test]
fn no_server_and_no_flag() -> Result<()> {
    let live = Live::begin()?;
    let server = Puma::start(&live, "requests.ru", "0")?;
    let gctrace = Invocation::jsonl(["--pid", &server.process.pid().to_string()])?.start_ready()?;
    ask(&mut server.connect()?, "gc/ggg")?;
    let report = gctrace.stop()?;
    ensure!(report.requests.is_empty() && report.gcs.iter().all(|gc| gc.request.is_none()), "requests");
    ensure!(!report.gcs.is_empty(), "no collection was seen");

    let gctrace = Invocation::jsonl(["--all-ruby", "--requests"])?.start_ready()?;
    let done = Script::new(&live, &Ruby::at("/usr/bin/ruby".as_ref())?, "explicit.rb")?.run()?;
    let report = gctrace.stop()?;
    ensure!(report.gcs_of(done.pid).count() > 0, "no collection of the program was seen");
    ensure!(report.gcs_of(done.pid).all(|gc| gc.request.is_none()), "a request in a program without");
    let known = |line: &RequestLine| line.kind == "run" || line.pid == server.process.pid();
    ensure!(report.requests.iter().all(known), "{:?}", report.requests);
    Ok(())
}
