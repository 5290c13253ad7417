//! Requests of Unicorn and WEBrick with the header `traceparent`: gctrace reports for each what the application saw, or nothing, and then counts
//! the reason.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use gctrace_tests::child::Guarded;
use gctrace_tests::free_port;
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::live::{Live, rubies_dir};
use gctrace_tests::report::{Report, RequestLine};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::traceparent::{name, specified, truths, value};
use gctrace_tests::{PATIENCE, ledger};
use rustix::process::Signal;

/// Text of other headers and of bodies, which must never appear in an output.
const SECRET: &str = "SECRET";
/// Debian's path, in the Rubies that have it.
const UNICORN: &str = "/usr/bin/unicorn";

struct Server {
    process: Guarded,
    truth: PathBuf,
    port: u16,
    is_webrick: bool,
    /// Number of requests so far.
    number: usize,
}

impl Server {
    fn start(live: &Live, ruby: &Ruby, is_webrick: bool) -> Result<Self> {
        let port = free_port()?;
        let truth = live.path(&format!("truth-{port}"));
        let web = |name: &str| rubies_dir().join("web").join(name).to_string_lossy().into_owned();
        let mut command = ruby.command()?;
        if is_webrick {
            command.arg("-rstringio").arg(web("webrick.rb")).args([web("traces.ru"), port.to_string()]);
        } else {
            command.arg(UNICORN).args(["-E", "production", "-c", &web("unicorn_two.rb")]);
            command.args(["-l", &format!("127.0.0.1:{port}"), &web("traces.ru")]);
        }
        command.current_dir(rubies_dir().join("web")).env("GCTRACE_TEST_TRUTH", &truth);
        let process = Guarded::start("server", &mut command)?;
        let mut server = Self { process, truth, port, is_webrick, number: 0 };
        let since = Instant::now();
        while server.connect().is_err() {
            if !server.process.running()? {
                bail!("it has ended: {}", server.process.finish(PATIENCE)?.errors());
            }
            ensure!(since.elapsed() < PATIENCE, "it does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }

    fn connect(&self) -> Result<TcpStream> {
        let stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// A number and a name for the next request.
    fn next(&mut self) -> (usize, String) {
        self.number += 1;
        (self.number, name(self.number))
    }

    /// The text of a request with this header line among others. A trace of its own replaces that of [`lines`].
    fn text(&mut self, line: &str, body: &str) -> String {
        let (number, name) = self.next();
        let line = line.replace(&value(1)[3..52], &value(number)[3..52]);
        let (method, length) = if body.is_empty() {
            ("GET", String::new())
        } else {
            ("POST", format!("Content-Length: {}\r\n", body.len()))
        };
        format!(
            "{method} /spin/{name}?token={SECRET} HTTP/1.1\r\nHost: x\r\nCookie: c={SECRET}; traceparent: {}\r\n\
             X-Traceparent: {}\r\n{line}Authorization: {SECRET}\r\n{length}\r\n{body}",
            value(9_000),
            value(9_001)
        )
    }

    /// Sends a request on its own connection, in pieces that end at these offsets. It must be answered.
    fn ask(&self, text: &str, ends: &[usize]) -> Result<()> {
        let mut stream = self.connect()?;
        let mut from = 0;
        for &end in ends.iter().chain(&[text.len()]) {
            stream.write_all(&text.as_bytes()[from..end])?;
            if end < text.len() {
                std::thread::sleep(Duration::from_millis(4));
            }
            from = end;
        }
        answered(&mut stream)
    }

    /// Sends any text, and reads until the server closes the connection.
    fn send(&self, text: &str) -> Result<()> {
        let mut stream = self.connect()?;
        stream.write_all(text.as_bytes())?;
        // A server that refuses a request may close the connection before it has read everything.
        let over = [std::io::ErrorKind::ConnectionReset, std::io::ErrorKind::NotConnected];
        let shut = stream.shutdown(std::net::Shutdown::Write);
        if let Err(error) = shut.and_then(|()| stream.read_to_end(&mut Vec::new())) {
            ensure!(over.contains(&error.kind()), "{error}");
        }
        Ok(())
    }

    fn watch(&self) -> Result<Gctrace> {
        let pid = self.process.pid().to_string();
        Invocation::jsonl(["--pid", &pid, "--requests"])?.start_ready()
    }
}

fn answered(stream: &mut TcpStream) -> Result<()> {
    let (mut got, mut buffer) = (String::new(), [0; 4096]);
    // As a whole body, or as a chunk.
    while !got.contains("\r\n\r\nOK") && !got.contains("\r\n2\r\nOK\r\n") {
        let read = stream.read(&mut buffer)?;
        ensure!(read > 0, "closed after {got}");
        got.push_str(&String::from_utf8_lossy(&buffer[..read]));
    }
    Ok(())
}

/// Header lines, each for its own request, and whether the trace must be known when the request arrives in one piece.
fn lines(is_webrick: bool) -> Vec<(String, bool)> {
    let good = value(1);
    let long = |count: usize| format!("X-Long: {}\r\n", SECRET.repeat(count));
    let mut lines = vec![
        (String::new(), false),
        (format!("traceparent: {good}\r\n"), true),
        (format!("Traceparent:{good}\r\n"), true),
        (format!("TRACEPARENT:   {good}  \r\n"), true),
        (format!("tRaCePaReNt: {good}\r\ntracestate: a={SECRET}\r\n"), true),
        (format!("traceparent: 01{}\r\n", &good[2..]), true),
        (format!("traceparent: cc{}-{SECRET}\r\n", &good[2..]), true),
        (format!("{}traceparent: {good}\r\n", long(500)), true),
        // The search covers up to 4 KiB for WEBrick, and up to 8 KiB for Unicorn.
        (format!("{}traceparent: {good}\r\n", long(1_000)), !is_webrick),
        (format!("{}traceparent: {good}\r\n", long(3_000)), false),
        (format!("traceparent: {good}\r\n{}", long(3_000)), false),
        (format!("traceparent: {good}\r\nX: y\r\nTraceparent: {good}\r\n"), false),
    ];
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
        lines.push((format!("traceparent: {invalid}\r\n"), false));
    }
    lines
}

/// Requests that servers interpret in different ways, or refuse. `NAME` stands for the name of the request.
fn odd() -> Vec<String> {
    let good = value(1);
    let head = "GET /spin/NAME HTTP/1.1\r\nHost: x\r\n";
    vec![
        // A folded line, and a header in a continuation line.
        format!("{head}traceparent: {good}\r\n more\r\n\r\n"),
        format!("{head}traceparent: {good}\r\n\tmore\r\n\r\n"),
        format!("{head}traceparent:\r\n {good}\r\n\r\n"),
        format!("{head}X: y\r\n traceparent: {good}\r\n\r\n"),
        // Lone LF.
        format!("{head}X: y\ntraceparent: {good}\r\n\r\n"),
        format!("{head}traceparent: {good}\n\r\n"),
        format!("{head}\ntraceparent: {good}\r\n\r\n"),
        format!("GET /spin/NAME HTTP/1.1\ntraceparent: {good}\n\n"),
        format!("{head}X: y\rtraceparent: {good}\r\n\r\n"),
        // HTTP/0.9 has no headers.
        format!("GET /spin/NAME\r\ntraceparent: {good}\r\n\r\n"),
        format!("GET /spin/NAME HTTP/0.9\r\ntraceparent: {good}\r\n\r\n"),
        // WEBrick cuts lines of more than 4096 bytes, and takes the rest of this one for the end of the head.
        format!("{head}X: {}\r\ntraceparent: {good}\r\n\r\n", "x".repeat(4093)),
        // What follows a request is not part of it.
        format!("{head}\r\ntraceparent: {good}\r\n\r\n"),
        format!("{head}Connection: close\r\n\r\nGET /spin/other HTTP/1.1\r\ntraceparent: {good}\r\n\r\n"),
        format!("{head}traceparent : {good}\r\n\r\n"),
        format!("{head}traceparent: {good}\0\r\n\r\n"),
    ]
}

fn name_of(line: &RequestLine) -> Option<&str> {
    line.path.as_deref()?.rsplit('/').next()
}

/// Checks that every line reports what the application saw, or nothing. Returns whether the trace is known, by name of the request, and for how
/// many requests it is unknown although the application saw a header.
fn agrees(report: &Report, truths: &HashMap<String, Option<String>>) -> Result<(HashMap<String, bool>, u64)> {
    let (mut known, mut without) = (HashMap::new(), 0);
    for line in &report.requests {
        let found = line.trace_id.clone().zip(line.parent_span_id.clone());
        let seen = name_of(line).and_then(|name| truths.get(name));
        let Some(seen) = seen.map(Option::as_deref) else {
            // The application was not called, or it is unknown which request this is.
            ensure!(line.path.is_some() || found.is_none(), "{line:?}");
            continue;
        };
        let expected = seen.map(str::trim).and_then(specified);
        ensure!(found.is_none() || found == expected, "{line:?}: {seen:?}");
        ensure!(line.trace_origin.as_deref() == found.as_ref().map(|_| "traceparent"), "{line:?}");
        let sampled = seen.filter(|_| found.is_some()).map(|seen| seen.trim().as_bytes()[54] == b'1');
        ensure!(line.trace_sampled == sampled, "{line:?}: {seen:?}");
        without += u64::from(seen.is_some() && found.is_none());
        let name = name_of(line).unwrap_or_default().to_owned();
        ensure!(known.insert(name, found.is_some()).is_none(), "it is there twice: {line:?}");
    }
    Ok((known, without))
}

/// Stops gctrace once it has reported what the application has served.
fn stop(server: &Server, gctrace: Gctrace, answered: usize) -> Result<Report> {
    gctrace.wait_requests(answered)?;
    let (report, finished) = gctrace.stop_by(Signal::INT)?;
    ledger::check_lossless(&report)?;
    ensure!(!finished.stdout.join("\n").contains(SECRET), "a secret came out of {}", server.port);
    Ok(report)
}

fn counted(report: &Report) -> Result<(u64, u64)> {
    let of = |name: &str| report.ledger.as_ref().and_then(|ledger| ledger.kernel[name].as_u64());
    of("traceparent_invalid").zip(of("traceparent_unread")).context("no counters")
}

/// Heads that arrive in one piece, in two pieces cut at each position around the header, and in many pieces; bodies that look like a header.
fn regular(server: &mut Server) -> Result<()> {
    let gctrace = server.watch()?;
    let before = server.number;
    let (mut must, mut invalid) = (Vec::new(), 0);
    for (line, is_known) in lines(server.is_webrick) {
        let text = server.text(&line, "");
        server.ask(&text, &[])?;
        must.push((name(server.number), is_known));
        // Headers that are too deep are unknown, and so are those that are cut by pieces.
        if !line.is_empty() && !is_known && !line.contains("X-Long") {
            // In a Unicorn's head that arrives in pieces, an empty value stays unread.
            invalid += if line == "traceparent: \r\n" && !server.is_webrick { 1 } else { 2 };
        }
        let body = format!("\r\ntraceparent: {}\r\n\r\n{SECRET}", value(9_002));
        let text = server.text(&line, &body);
        let head = text.len() - body.len();
        server.ask(&text, &[head - 2, head, head + 2])?;
        must.push((name(server.number), is_known));
        let text = server.text(&line, "");
        let first = text.find("\r\n").context("a line")? + 2;
        let step = if text.len() > 2_000 { 1_999 } else { 23 };
        server.ask(&text, &(first..text.len()).step_by(step).collect::<Vec<_>>())?;
    }
    let line = format!("traceparent: {}\r\n", value(1));
    let at = server.text(&line, "").find("\r\ntraceparent").context("a header")? + 2;
    server.number -= 1;
    let (value_at, behind) = (at + "traceparent:".len(), at + line.len());
    for cut in at - 20..behind + 20 {
        let text = server.text(&line, "");
        server.ask(&text, &[cut])?;
        // The value is complete with the end of its line and two more bytes.
        if cut < value_at || cut >= behind + 2 {
            must.push((name(server.number), true));
        }
    }
    // The request line must arrive in one piece.
    let text = server.text(&line, "");
    server.ask(&text, &[9])?;

    let answered = server.number - before;
    let report = stop(server, gctrace, answered)?;
    let (known, without) = agrees(&report, &truths(&server.truth)?)?;
    ensure!(known.len() == answered && report.requests.len() == answered, "{} of {answered}", known.len());
    let wrong: Vec<&(String, bool)> = must.iter().filter(|(name, is)| known[name] != *is).collect();
    ensure!(wrong.is_empty(), "known, or not known: {wrong:?}");
    let (is_invalid, unread) = counted(&report)?;
    let of = known.values().filter(|known| **known).count();
    println!("{answered} answered, {of} with a trace, {is_invalid} invalid, {unread} unread");
    // Each head was searched to its end, or the header of its request counts as unread.
    ensure!(
        is_invalid + unread == without && is_invalid >= invalid,
        "{without} without: {is_invalid} {unread}"
    );
    Ok(())
}

/// Heads that servers interpret in different ways or refuse, and pipelining: gctrace never reports anything that the application did not see.
fn strange(server: &mut Server) -> Result<()> {
    let gctrace = server.watch()?;
    let before = truths(&server.truth)?.len();
    for text in odd() {
        let (number, name) = server.next();
        server.send(&text.replace("NAME", &name).replace(&value(1)[3..52], &value(number)[3..52]))?;
    }
    let with = format!("traceparent: {}\r\n", value(1));
    for three in [["", with.as_str(), ""], [with.as_str(), "", with.as_str()]] {
        let text: String = three.iter().map(|line| server.text(line, "")).collect();
        server.send(&text)?;
        // The second request is cut.
        let texts: Vec<String> = three.iter().map(|line| server.text(line, "")).collect();
        let (first, second) = texts[1].split_at(texts[1].len() - 60);
        let mut stream = server.connect()?;
        stream.write_all((texts[0].clone() + first).as_bytes())?;
        answered(&mut stream)?;
        if server.is_webrick {
            stream.write_all((second.to_owned() + &texts[2]).as_bytes())?;
            answered(&mut stream)?;
        }
    }
    let seen = truths(&server.truth)?.len() - before;
    let report = stop(server, gctrace, seen)?;
    let truths = truths(&server.truth)?;
    let (known, without) = agrees(&report, &truths)?;
    let (invalid, unread) = counted(&report)?;
    println!("{seen} served of {}, {} lines agree, {without} without", report.requests.len(), known.len());
    ensure!(seen > 8 && invalid + unread >= without, "{seen} served, {without}: {invalid} {unread}");
    Ok(())
}

#[test]
fn webrick() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::each(|ruby| {
        let mut server = Server::start(&live, ruby, true)?;
        regular(&mut server).context("regular")?;
        strange(&mut server).context("strange")
    })
}

#[test]
fn unicorn() -> Result<()> {
    let live = Live::beside_others()?;
    ensure!(Ruby::main()?.host_path(UNICORN).is_file(), "no Unicorn: run `cargo xtask setup --for test`");
    Ruby::each(|ruby| {
        if !ruby.host_path(UNICORN).is_file() {
            return Ok(());
        }
        let mut server = Server::start(&live, ruby, false)?;
        regular(&mut server).context("regular")?;
        strange(&mut server).context("strange")
    })
}
