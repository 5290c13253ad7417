//! Requests with the header `traceparent`: gctrace reports for each what the application saw, or nothing, and then counts the reason.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::puma::Puma;
use gctrace_tests::receiver::Receiver;
use gctrace_tests::report::RequestLine;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::traceparent::{name, specified, truths, value};
use gctrace_tests::{ledger, pprof, python};
use rustix::process::Signal;

/// Values of profiles by sample type and by trace with span.
type Labels<'a> = HashMap<(&'a str, Option<(String, String)>), u64>;

/// Text of other headers and of bodies, which must never appear in an output.
const SECRET: &str = "SECRET";

/// The head of a request with these lines among others, and with the length of its body.
fn head(number: usize, lines: &str, body: usize) -> String {
    // Puma takes what follows an empty body for the body.
    let (method, length) = match body {
        0 => ("GET", String::new()),
        _ => ("POST", format!("Content-Length: {body}\r\n")),
    };
    format!(
        "{method} /spin/{}?token={SECRET}QUERY HTTP/1.1\r\nHost: x\r\nCookie: c={SECRET}; traceparent: {}\r\n\
         X-Traceparent: {}\r\n{lines}Authorization: {SECRET}\r\n{length}\r\n",
        name(number),
        value(9_000),
        value(9_001)
    )
}

fn responses(stream: &mut TcpStream, count: usize) -> Result<()> {
    let (mut got, mut buffer) = (String::new(), [0; 4096]);
    while got.matches("\r\n\r\nOK").count() < count {
        let read = stream.read(&mut buffer)?;
        ensure!(read > 0, "closed after {got}");
        got.push_str(&String::from_utf8_lossy(&buffer[..read]));
    }
    Ok(())
}

/// Header lines, each for its own request.
fn lines() -> Vec<String> {
    let own = || value(1);
    let mut lines = vec![
        String::new(),
        format!("traceparent: {}\r\n", own()),
        format!("Traceparent:{}\r\n", own()),
        format!("TRACEPARENT:   {}  \r\n", own()),
        format!("tRaCePaReNt: {}\r\ntracestate: a={SECRET}\r\n", own()),
        // Later versions may have more after a dash.
        format!("traceparent: 01{}\r\n", &own()[2..]),
        format!("traceparent: cc{}-{SECRET}\r\n", &own()[2..]),
        // Deep in a long head.
        format!("X-Long: {}\r\ntraceparent: {}\r\n", SECRET.repeat(1_000), own()),
        // Beyond the part that is searched.
        format!("X-Long: {}\r\ntraceparent: {}\r\n", SECRET.repeat(3_000), own()),
        format!("traceparent: {}\r\nX-Long: {}\r\n", own(), SECRET.repeat(3_000)),
    ];
    let good = own();
    for invalid in [
        good.to_uppercase(),
        format!("ff{}", &good[2..]),
        format!("{good}-00"),
        format!("{good} {SECRET}"),
        good[..54].to_owned(),
        format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)),
        format!("00-4bf92f3577b34da6a3ce929d0e0e4736-{}-01", "0".repeat(16)),
        good.replace('-', "_"),
        SECRET.repeat(10),
        String::new(),
    ] {
        lines.push(format!("traceparent: {invalid}\r\n"));
    }
    // More than one.
    lines.push(format!("traceparent: {good}\r\nX: y\r\nTraceparent: {good}\r\n"));
    lines
}

/// Each line is sent on its own connection, in pieces, and in a pipeline with all other lines.
fn load(server: &Puma) -> Result<usize> {
    let lines = lines();
    let mut number = 100;
    let mut next = |line: &str, body: usize| {
        number += 1;
        // Each request has its own trace.
        head(number, &line.replace(&value(1)[3..52], &value(number)[3..52]), body)
    };
    for line in &lines {
        let mut stream = server.connect()?;
        stream.write_all(next(line, 0).as_bytes())?;
        responses(&mut stream, 1)?;
        // What looks like a header in a body is not one.
        let body = format!("\r\ntraceparent: {}\r\n\r\n{SECRET}", value(9_002));
        stream.write_all((next(line, body.len()) + &body).as_bytes())?;
        responses(&mut stream, 1)?;
        for piece in [1, 13, 40] {
            let text = next(line, 0);
            let pieces = if text.len() > 2_000 { 1_999 } else { piece };
            for piece in text.as_bytes().chunks(pieces) {
                stream.write_all(piece)?;
                std::thread::sleep(Duration::from_micros(200));
            }
            responses(&mut stream, 1)?;
        }
    }
    // Pipelined: requests with a header before and after requests without one.
    for four in lines.chunks(4) {
        let texts: Vec<String> =
            four.iter().flat_map(|line| ["", line.as_str(), ""]).map(|line| next(line, 0)).collect();
        for eight in texts.chunks(8) {
            let mut stream = server.connect()?;
            stream.write_all(eight.concat().as_bytes())?;
            responses(&mut stream, eight.len())?;
        }
    }
    Ok(number - 100)
}

fn of_line(line: &RequestLine) -> Option<(String, String)> {
    line.trace_id.clone().zip(line.parent_span_id.clone())
}

/// Every request has the trace that the application saw, or none if that is invalid or too deep in the head, which is counted. The same holds for
/// its samples, collections and allocations in pprof, and its links in OTLP. No other header appears in an output.
#[test]
fn traces_are_those_that_the_application_saw() -> Result<()> {
    let live = Live::beside_others()?;
    for ruby in Puma::rubies()? {
        traces(&live, &ruby).with_context(|| format!("Ruby {} ({})", ruby.version(), ruby.label()))?;
    }
    Ok(())
}

fn traces(live: &Live, ruby: &Ruby) -> Result<()> {
    let server = Puma::start_on(live, ruby, "traces.ru")?;
    let receiver = Receiver::start(|_, _| (200, "", b""))?;
    let url = format!("http://{}/", receiver.address);
    let (pid, file) = (server.process.pid().to_string(), live.path("run.pb.gz"));
    let text = file.to_string_lossy();
    let args = ["--pid", &pid, "--requests", "--alloc", "--rate", "499", "--pprof", &text, "--otlp", &url];
    let more = ["--otlp-signals", "profiles", "--push-interval", "60s"];
    let gctrace = Invocation::jsonl(args.iter().chain(&more))?.start_ready()?;
    let answered = load(&server)?;
    gctrace.wait_requests(answered)?;
    let (report, finished) = gctrace.stop_by(Signal::INT)?;
    ledger::check_lossless(&report)?;
    ensure!(!finished.stdout.join("\n").contains(SECRET), "a secret came out");

    let truths = truths(&server.truth)?;
    ensure!(truths.len() == answered && report.requests.len() == answered, "{answered} answered");
    let name_of =
        |line: &RequestLine| line.path.as_deref().and_then(|path| path.rsplit('/').next()).map(str::to_owned);
    let (mut known, mut invalid, mut unread) = (HashMap::new(), 0, 0);
    for line in &report.requests {
        let name = name_of(line).context("a name")?;
        let seen = truths.get(&name).context("a truth")?.as_deref();
        let expected = seen.and_then(specified);
        let deep = line.trace_id.is_none() && expected.is_some();
        ensure!(deep || of_line(line) == expected, "{line:?}: {seen:?}");
        ensure!(line.trace_origin.as_deref() == line.trace_id.as_ref().map(|_| "traceparent"), "{line:?}");
        let sampled = seen.filter(|_| line.trace_id.is_some()).map(|seen| seen.as_bytes()[54] == b'1');
        ensure!(line.trace_sampled == sampled, "{line:?}: {seen:?}");
        invalid += u64::from(seen.is_some() && expected.is_none());
        unread += u64::from(deep);
        ensure!(line.endpoint == line.endpoint().unwrap_or_else(|| "(unknown)".to_owned()), "{line:?}");
        if let Some((trace, parent)) = of_line(line) {
            known.insert(line.endpoint().context("an endpoint")?, (trace, parent));
        }
    }
    let counted = |name: &str| report.ledger.as_ref().and_then(|ledger| ledger.kernel[name].as_u64());
    let counts = (counted("traceparent_invalid"), counted("traceparent_unread"));
    println!("{answered} answered, {} with a trace, {invalid} invalid, {unread} too deep", known.len());
    ensure!(counts == (Some(invalid), Some(unread)), "{invalid} and {unread} are not {counts:?}");
    // Two lines are too deep, each in five requests and in a pipeline.
    ensure!(unread == 12 && invalid == 66 && known.len() == 42, "{unread} {invalid} {}", known.len());

    let profile = pprof::Profile::open(&file)?;
    let mut with_trace = HashMap::new();
    for sample in &profile.samples {
        let found = sample.label("trace_id").zip(sample.label("span_id"));
        let found = found.map(|(trace, span)| (trace.to_owned(), span.to_owned()));
        let endpoint = sample.label("endpoint").filter(|endpoint| *endpoint != "(unknown)");
        ensure!(found == endpoint.and_then(|endpoint| known.get(endpoint).cloned()), "{}", sample.labels);
        for (kind, value) in profile.types.iter().zip(&sample.values) {
            let sum: &mut u64 = with_trace.entry((kind.as_str(), found.clone())).or_default();
            *sum += value;
        }
    }
    for kind in ["samples/count", "gc_pauses/count", "alloc_objects/count"] {
        let of_kind =
            with_trace.iter().filter(|((of, trace), sum)| *of == kind && trace.is_some() && **sum > 0);
        let traces = of_kind.count();
        println!("{kind}: {traces} traces");
        ensure!(traces * 2 > known.len(), "{traces} traces have {kind}");
    }
    let (trace, _) = known.values().next().context("a trace")?;
    let focused = pprof::go_tool_pprof(&["-raw", &format!("-tagfocus=trace_id={trace}")], &file)?;
    ensure!(focused.contains(trace.as_str()), "{focused}");
    ensure!(
        !known.values().any(|(other, _)| other != trace && focused.contains(other.as_str())),
        "{focused}"
    );
    ensure!(!pprof::go_tool_pprof(&["-raw"], &file)?.contains(SECRET), "a secret is in the profile");

    linked(live, &receiver, &with_trace, &profile)
}

/// The links and endpoints of OTLP profiles equal the labels of the pprof file.
fn linked(live: &Live, receiver: &Receiver, labels: &Labels<'_>, profile: &pprof::Profile) -> Result<()> {
    let mut files: Vec<PathBuf> = Vec::new();
    for (at, push) in receiver.pushes().iter().enumerate() {
        files.push(live.path(&format!("{at}.profiles")));
        std::fs::write(&files[at], &push.body)?;
    }
    let found = python::script("otlp.py", &files)?;
    ensure!(found["errors"].as_array().is_some_and(Vec::is_empty), "against the rules: {}", found["errors"]);
    for (kind, of) in [
        ("gc_pauses", "gc_pauses/count"),
        ("alloc_objects", "alloc_objects/count"),
        ("cpu", "cpu/nanoseconds"),
    ] {
        let expected = labels.iter().filter(|((label, _), sum)| *label == of && **sum > 0);
        let expected = expected.filter_map(|((_, trace), sum)| Some((trace.clone()?, *sum)));
        let expected: HashMap<String, u64> =
            expected.map(|((trace, span), sum)| (format!("{trace}:{span}"), sum)).collect();
        let links: HashMap<String, u64> = serde_json::from_value(found["links"][kind].clone())?;
        ensure!(!links.is_empty() && links == expected, "{kind}: {links:?} {expected:?}");
        let value = profile.index(of)?;
        let mut expected: HashMap<String, u64> = HashMap::new();
        for sample in profile.samples.iter().filter(|sample| sample.values[value] > 0) {
            if let Some(endpoint) = sample.label("endpoint") {
                *expected.entry(endpoint.to_owned()).or_default() += sample.values[value];
            }
        }
        let endpoints: HashMap<String, u64> = serde_json::from_value(found["endpoints"][kind].clone())?;
        ensure!(!endpoints.is_empty() && endpoints == expected, "{kind}: {endpoints:?} {expected:?}");
    }
    Ok(())
}
