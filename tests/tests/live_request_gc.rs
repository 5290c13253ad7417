//! GC that a request's own thread ran, separate from that of other threads meanwhile, compared with what the threads of a Puma log about
//! themselves.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::ledger;
use gctrace_tests::live::Live;
use gctrace_tests::puma::Puma;
use gctrace_tests::report::RequestLine;

/// A call of `GC.start`.
struct Call {
    tid: u32,
    begin_ns: u64,
    end_ns: u64,
}

/// Requests by name: thread, begin, end.
type Requests = HashMap<String, (u32, u64, u64)>;

/// The application's own records of its requests and of its calls of `GC.start`.
fn truth(server: &Puma) -> Result<(Requests, Vec<Call>)> {
    let (mut requests, mut calls) = (HashMap::new(), Vec::new());
    for line in std::fs::read_to_string(&server.truth)?.lines() {
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["request", name, tid, begin, end] => {
                requests.insert(name.to_owned(), (tid.parse()?, begin.parse()?, end.parse()?));
            }
            ["gc", tid, begin, end] => {
                calls.push(Call { tid: tid.parse()?, begin_ns: begin.parse()?, end_ns: end.parse()? });
            }
            _ => anyhow::bail!("line {line}"),
        }
    }
    Ok((requests, calls))
}

/// Sends one request on a connection that is closed after it, or kept.
fn ask(stream: &mut std::net::TcpStream, kind: &str, name: &str, close: bool) -> Result<()> {
    let how = if close { "close" } else { "keep-alive" };
    let text = format!("GET /{kind}/{name} HTTP/1.1\r\nHost: x\r\nConnection: {how}\r\n\r\n");
    stream.write_all(text.as_bytes())?;
    let (mut got, mut buffer) = (Vec::new(), [0; 1024]);
    while !got.ends_with(b"\r\n\r\nOK") {
        let read = stream.read(&mut buffer)?;
        ensure!(read > 0, "closed after {}", String::from_utf8_lossy(&got));
        got.extend_from_slice(&buffer[..read]);
    }
    Ok(())
}

/// How long a call of `GC.start` overlaps this interval, nanoseconds.
fn overlap(call: &Call, begin_ns: u64, end_ns: u64) -> u64 {
    call.end_ns.min(end_ns).saturating_sub(call.begin_ns.max(begin_ns))
}

fn compare(line: &RequestLine, calls: &[Call]) -> Result<(u32, u32)> {
    let end_ns = line.begin_ns + line.duration_ns.context("no duration")?;
    let of = |own: bool| calls.iter().filter(move |call| (call.tid == line.tid) == own);
    let inside = |call: &&Call| line.begin_ns <= call.begin_ns && call.end_ns <= end_ns;
    let touches = |call: &&Call| overlap(call, line.begin_ns, end_ns) > 0;
    let sum = |own| of(own).map(|call| overlap(call, line.begin_ns, end_ns)).sum::<u64>();
    // A call is one collection with one pause, and the pause is not longer than the call.
    let own = of(true).filter(inside).count() as u32;
    ensure!(of(true).filter(touches).count() as u32 == own, "a call is not in one request: {line:?}");
    ensure!(line.gcs == Some(own) && line.gc_own_pauses == Some(own), "{own} calls of its own: {line:?}");
    let own_ns = line.gc_own_ns.context("unknown")?;
    ensure!((own_ns > 0) == (own > 0) && own_ns <= sum(true), "{} ns of its own: {line:?}", sum(true));
    let (least, most) = (of(false).filter(inside).count() as u32, of(false).filter(touches).count() as u32);
    let (other, other_ns) = line.gc_other_pauses.zip(line.gc_other_ns).context("unknown")?;
    ensure!((least..=most).contains(&other), "{least} to {most} calls of others: {line:?}");
    ensure!((other_ns > 0) == (other > 0) && other_ns <= sum(false), "{} ns of others: {line:?}", sum(false));
    Ok((own, other))
}

/// Sleeping requests are stopped by pauses of other threads and have none of their own. Collecting requests have their own, and no pause counts
/// as both. Connections that are closed end in the middle of another thread's pause.
#[test]
fn own_and_other() -> Result<()> {
    let live = Live::beside_others()?;
    let server = Puma::start(&live, "split.ru", "0")?;
    let gctrace =
        Invocation::jsonl(["--pid", &server.process.pid().to_string(), "--requests"])?.start_ready()?;
    let clients = [("gc", false), ("wait", false), ("gc", true), ("wait", true)];
    let each = 40;
    std::thread::scope(|scope| -> Result<()> {
        let client = |(at, (kind, close)): (usize, (&'static str, bool))| {
            let server = &server;
            scope.spawn(move || -> Result<()> {
                let mut stream = server.connect()?;
                let letter = |n: usize| char::from(b'g' + n as u8);
                for n in 0..each {
                    // Puma 5.6 may silently close a kept connection after its tenth request if other clients wait.
                    if n > 0 && (close || n % 8 == 0) {
                        stream = server.connect()?;
                    }
                    let name: String = [at, n / 20, n % 20].into_iter().map(letter).collect();
                    ask(&mut stream, kind, &name, close)?;
                }
                Ok(())
            })
        };
        let threads: Vec<_> = clients.into_iter().enumerate().map(client).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("a client panicked"))
    })?;
    gctrace.wait_requests(clients.len() * each)?;
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    let (requests, calls) = truth(&server)?;
    let (mut owns, mut others, mut split) = (0, 0, 0);
    for line in &report.requests {
        let name = line.path.as_deref().and_then(|path| path.rsplit('/').next()).context("a path")?;
        let &(tid, begin_ns, end_ns) = requests.get(name).with_context(|| format!("{line:?}"))?;
        let is_in = line.begin_ns <= begin_ns && end_ns <= line.begin_ns + line.duration_ns.unwrap_or(0);
        ensure!(line.tid == tid && is_in, "{line:?}");
        let (own, other) = compare(line, &calls)?;
        owns += own;
        others += other;
        split += u32::from(own > 0 && other > 0);
    }
    // Every call belongs to one request, and all requests have been compared.
    ensure!(report.requests.len() == clients.len() * each && owns as usize == calls.len(), "{owns} calls");
    ensure!(calls.len() == 2 * 3 * each, "{} calls", calls.len());
    ensure!(others > 100 && split > 20, "{others} pauses of others, {split} requests with both");
    Ok(())
}
