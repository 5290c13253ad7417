//! Requests whose response comes in parts, those whose client goes meanwhile, and requests through TLS, against the application's own log.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::ledger;
use gctrace_tests::live::{Live, rubies_dir};
use gctrace_tests::puma::Puma;
use gctrace_tests::report::{Report, RequestLine};

/// The application's own record of a request, nanoseconds of `CLOCK_MONOTONIC`.
struct Truth {
    tid: u32,
    begin_ns: u64,
    /// When it handed out its last part.
    last_ns: u64,
    closed_ns: u64,
}

fn truths(puma: &Puma) -> Result<HashMap<String, Truth>> {
    let truth = |line: &str| -> Result<(String, Truth)> {
        let (name, times) = line.split_once(' ').context("no name")?;
        let times = times.split(' ').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
        let [tid, begin_ns, _, last_ns, closed_ns] = times[..] else { anyhow::bail!("line {line}") };
        Ok((name.to_owned(), Truth { tid: u32::try_from(tid)?, begin_ns, last_ns, closed_ns }))
    };
    std::fs::read_to_string(&puma.truth)?.lines().map(truth).collect()
}

fn watch(puma: &Puma) -> Result<Gctrace> {
    Invocation::jsonl(["--pid", &puma.process.pid().to_string(), "--requests"])?.start_ready()
}

/// The one line of a request, which is of the thread that served it, and lies around the application's own times.
fn line_of<'a>(report: &'a Report, name: &str, truth: &Truth) -> Result<&'a RequestLine> {
    let is_its = |line: &&RequestLine| line.path.as_deref().is_some_and(|path| path.ends_with(name));
    let lines: Vec<_> = report.requests.iter().filter(is_its).collect();
    let [line] = lines[..] else { anyhow::bail!("{name}: {lines:?}") };
    ensure!(line.tid == truth.tid && line.method.as_deref() == Some("GET"), "{name}: {line:?}");
    let end_ns = line.begin_ns + line.duration_ns.with_context(|| format!("{name} has no end"))?;
    ensure!(line.begin_ns <= truth.begin_ns && truth.closed_ns <= end_ns, "{name}: {line:?}");
    Ok(line)
}

/// Of a response that comes in parts the first bytes are early and the last ones are the last part's; the request lasts until its body is closed,
/// also where the client is gone by then.
#[test]
fn in_parts() -> Result<()> {
    let live = Live::beside_others()?;
    for ruby in Puma::rubies()? {
        let puma = Puma::start_on(&live, &ruby, "streams.ru")?;
        let gctrace = watch(&puma)?;
        let mut stream = puma.connect()?;
        // Twice on the same connection, one after the other.
        for (name, parts) in [("early", 4), ("later", 6)] {
            write!(stream, "GET /stream/{parts}/{name} HTTP/1.1\r\nHost: x\r\n\r\n")?;
            let mut text = Vec::new();
            let mut buffer = [0; 4096];
            while !text.ends_with(b"\r\n0\r\n\r\n") {
                let read = stream.read(&mut buffer)?;
                ensure!(read > 0, "closed after {}", String::from_utf8_lossy(&text));
                text.extend_from_slice(&buffer[..read]);
            }
        }
        let mut leaving = puma.connect()?;
        write!(leaving, "GET /stream/9/gone HTTP/1.1\r\nHost: x\r\n\r\n")?;
        ensure!(leaving.read(&mut [0; 64])? > 0);
        drop(leaving);
        gctrace.wait_requests(3)?;
        let report = gctrace.stop()?;
        ledger::check_lossless(&report)?;
        let truths = truths(&puma)?;
        ensure!(truths.len() == 3 && report.requests.len() == 3, "{:?}", report.requests);
        for (name, truth) in &truths {
            let seen = line_of(&report, name, truth)?;
            ensure!(seen.status == Some(200) && seen.gcs == Some(1), "{name}: {seen:?}");
            let at = |ns: Option<u64>| Some(seen.begin_ns + ns?);
            let first_ns = at(seen.first_byte_ns).context("no first bytes")?;
            ensure!((truth.begin_ns..truth.last_ns).contains(&first_ns), "{name}: {first_ns}, {seen:?}");
            let last_ns = at(seen.last_byte_ns).context("no last bytes")?;
            // What is written for a client that is gone may fail.
            ensure!(name == "gone" || last_ns >= truth.last_ns, "{name}: {last_ns} {}", truth.last_ns);
        }
    }
    Ok(())
}

/// Through TLS the parser sees the plain request: method, path and times are known, and the status is not.
#[test]
fn through_tls() -> Result<()> {
    let live = Live::beside_others()?;
    let (key, certificate) = (live.path("key.pem"), live.path("certificate.pem"));
    let helper = rubies_dir().join("web/tls.rb");
    let made = Command::new("ruby").arg(&helper).arg("certificate").args([&key, &certificate]).status()?;
    ensure!(made.success(), "no certificate: {made}");
    let puma = Puma::start_with_tls(&live, "streams.ru", &key, &certificate)?;
    let gctrace = watch(&puma)?;
    let names = ["one", "two", "three"];
    for connection in ["first", "second"] {
        let paths = names.map(|name| format!("/stream/2/{connection}-{name}"));
        let output =
            Command::new("ruby").arg(&helper).args(["get", &puma.port.to_string()]).args(paths).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success() && text.matches("200 OK").count() == 3, "{output:?}");
    }
    gctrace.wait_requests(6)?;
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    let truths = truths(&puma)?;
    let connections = report.requests.iter().filter(|line| line.path.is_some()).count();
    ensure!(truths.len() == 6 && connections == 6, "{:?}", report.requests);
    for (name, truth) in &truths {
        let seen = line_of(&report, name, truth)?;
        ensure!(seen.status.is_none() && seen.gcs == Some(1), "{name}: {seen:?}");
    }
    Ok(())
}
