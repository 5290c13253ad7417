//! Requests whose response comes in parts, whose client leaves meanwhile, or that use TLS, compared with the application's own log.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::ledger;
use gctrace_tests::live::{Live, rubies_dir};
use gctrace_tests::puma::Puma;
use gctrace_tests::report::{Report, RequestLine};

/// The application's own record of a request, `CLOCK_MONOTONIC` nanoseconds.
struct Truth {
    tid: u32,
    begin_ns: u64,
    /// When it returned its last part.
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

/// The only line of a request. Checks that it is of the thread that served it, and encloses the application's own times.
fn line_of<'a>(report: &'a Report, name: &str, truth: &Truth) -> Result<&'a RequestLine> {
    let is_its = |line: &&RequestLine| line.path.as_deref().is_some_and(|path| path.ends_with(name));
    let lines: Vec<_> = report.requests.iter().filter(is_its).collect();
    let [line] = lines[..] else { anyhow::bail!("{name}: {lines:?}") };
    ensure!(line.tid == truth.tid && line.method.as_deref() == Some("GET"), "{name}: {line:?}");
    let end_ns = line.begin_ns + line.duration_ns.with_context(|| format!("{name} has no end"))?;
    ensure!(line.begin_ns <= truth.begin_ns && truth.closed_ns <= end_ns, "{name}: {line:?}");
    Ok(line)
}

/// In a response that comes in parts, the first bytes are early and the last bytes are those of the last part. The request lasts until its body is
/// closed, even if the client is gone by then.
#[test]
fn in_parts() -> Result<()> {
    let live = Live::beside_others()?;
    for ruby in Puma::rubies()? {
        let puma = Puma::start_on(&live, &ruby, "streams.ru")?;
        let gctrace = watch(&puma)?;
        let mut stream = puma.connect()?;
        // Two requests on the same connection, one after the other.
        let mut sizes = HashMap::new();
        for (name, parts) in [("early", 4), ("later", 6)] {
            write!(stream, "GET /stream/{parts}/{name} HTTP/1.1\r\nHost: x\r\n\r\n")?;
            let mut text = Vec::new();
            let mut buffer = [0; 4096];
            while !text.ends_with(b"\r\n0\r\n\r\n") {
                let read = stream.read(&mut buffer)?;
                ensure!(read > 0, "closed after {}", String::from_utf8_lossy(&text));
                text.extend_from_slice(&buffer[..read]);
            }
            sizes.insert(name.to_owned(), text.len() as u64);
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
            // Writing to a client that is gone may fail.
            ensure!(name == "gone" || last_ns >= truth.last_ns, "{name}: {last_ns} {}", truth.last_ns);
            let size = sizes.get(name);
            ensure!(name == "gone" || seen.response_bytes.as_ref() == size, "{name}: {size:?}, {seen:?}");
        }
    }
    Ok(())
}

/// Reads one response, and returns its number of bytes.
fn size_of_response(stream: &mut TcpStream, has_body: bool) -> Result<u64> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        head.extend(byte);
    }
    let text = String::from_utf8_lossy(&head).to_ascii_lowercase();
    let length = text.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length: usize = length.with_context(|| format!("no length: {text}"))?.parse()?;
    let mut body = vec![0; if has_body { length } else { 0 }];
    stream.read_exact(&mut body)?;
    Ok((head.len() + body.len()) as u64)
}

/// The size of a response is what its client received, head and body: for small responses and for a file, sequential and pipelined, without a
/// body, and on kept and closed connections. If the connection was handed over, the size is unknown.
#[test]
fn sizes() -> Result<()> {
    let live = Live::beside_others()?;
    for ruby in Puma::rubies()? {
        let puma = Puma::start_on(&live, &ruby, "requests.ru")?;
        let gctrace = watch(&puma)?;
        let ask = |method: &str, kind: &str, name: &str| {
            format!("{method} /{kind}/{name} HTTP/1.1\r\nHost: x\r\n\r\n")
        };
        let mut sizes = HashMap::new();
        let mut stream = puma.connect()?;
        let alone =
            [("GET", "plain"), ("GET", "file"), ("HEAD", "plain"), ("GET", "missing"), ("GET", "file")];
        for ((method, kind), name) in alone.into_iter().zip(["za", "zb", "zc", "zd", "ze"]) {
            stream.write_all(ask(method, kind, name).as_bytes())?;
            sizes.insert(name, Some(size_of_response(&mut stream, method != "HEAD")?));
        }
        let together = [("plain", "zf"), ("missing", "zg"), ("file", "zh"), ("plain", "zi")];
        let asked: Vec<String> = together.iter().map(|(kind, name)| ask("GET", kind, name)).collect();
        stream.write_all(asked.concat().as_bytes())?;
        for (_, name) in together {
            sizes.insert(name, Some(size_of_response(&mut stream, true)?));
        }
        let mut closed = puma.connect()?;
        closed.write_all(b"GET /plain/zj HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
        sizes.insert("zj", Some(closed.read_to_end(&mut Vec::new())? as u64));
        let mut handed_over = puma.connect()?;
        handed_over.write_all(ask("GET", "hijack", "zk").as_bytes())?;
        handed_over.read_to_end(&mut Vec::new())?;
        sizes.insert("zk", None);
        // The next request shows that its thread has finished it.
        stream.write_all(ask("GET", "plain", "zl").as_bytes())?;
        sizes.insert("zl", Some(size_of_response(&mut stream, true)?));
        // There may be a line of the one that was handed over.
        gctrace.wait_request("/plain/zl")?;
        gctrace.wait_requests(sizes.len() - 1)?;
        let report = gctrace.stop()?;
        ledger::check_lossless(&report)?;
        let name = |line: &RequestLine| {
            line.path.as_deref().and_then(|path| path.rsplit('/').next().map(str::to_owned))
        };
        let mut seen: HashMap<String, Option<u64>> = HashMap::new();
        for line in &report.requests {
            let name = name(line).with_context(|| format!("{line:?}"))?;
            ensure!(seen.insert(name.clone(), line.response_bytes).is_none(), "{name} is there twice");
        }
        for (name, size) in &sizes {
            let is = seen.remove(*name);
            ensure!(is == Some(*size) || (is.is_none() && size.is_none()), "{name}: {is:?} is not {size:?}");
        }
        ensure!(seen.is_empty(), "{seen:?}");
    }
    Ok(())
}

/// With TLS the parser sees the plain request, and the server passes the plain response to OpenSSL: everything is known.
#[test]
fn through_tls() -> Result<()> {
    let live = Live::beside_others()?;
    let (key, certificate) = (live.path("key.pem"), live.path("certificate.pem"));
    let helper = rubies_dir().join("web/tls.rb");
    let made = Command::new("ruby").arg(&helper).arg("certificate").args([&key, &certificate]).status()?;
    ensure!(made.success(), "no certificate: {made}");
    for ruby in Puma::rubies()? {
        let puma = Puma::start_with_tls(&live, &ruby, "streams.ru", (&key, &certificate))?;
        let gctrace = watch(&puma)?;
        let requests = [("one", 200), ("two", 404), ("three", 503)];
        for connection in ["first", "second"] {
            let paths = requests.map(|(name, status)| format!("/{status}/2/{connection}-{name}"));
            let output = Command::new("ruby")
                .arg(&helper)
                .args(["get", &puma.port.to_string()])
                .args(paths)
                .output()?;
            let text = String::from_utf8_lossy(&output.stdout);
            ensure!(output.status.success() && text.matches("HTTP/1.1 ").count() == 3, "{output:?}");
        }
        gctrace.wait_requests(6)?;
        let report = gctrace.stop()?;
        ledger::check_lossless(&report)?;
        let truths = truths(&puma)?;
        let connections = report.requests.iter().filter(|line| line.path.is_some()).count();
        ensure!(truths.len() == 6 && connections == 6, "{:?}", report.requests);
        for (name, truth) in &truths {
            let seen = line_of(&report, name, truth)?;
            let status = requests.iter().find(|(of, _)| name.ends_with(of)).map(|(_, status)| *status);
            ensure!(seen.status == status && seen.gcs == Some(1), "{name}: {seen:?}");
            // A TLS record has at least a head and a tag. The client leaves after the last request, perhaps before the server checks the
            // connection.
            let larger = seen.response_bytes > Some(100);
            ensure!(larger || (name.ends_with("three") && seen.response_bytes.is_none()), "{name}: {seen:?}");
        }
    }
    Ok(())
}
