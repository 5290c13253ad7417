//! Requests of Unicorn and WEBrick, whose threads block. Each must agree with the log of the application that served it.

use std::collections::{BTreeSet, HashMap};
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
use gctrace_tests::{PATIENCE, ensure_times, ledger};
use rustix::process::Signal;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Text in requests that must never appear in an output.
const SECRET: &str = "SECRET";
/// Debian's path, in the Rubies that have it.
const UNICORN: &str = "/usr/bin/unicorn";
/// Debian's path, for its own Ruby.
const THIN: &str = "/usr/bin/thin";

struct Server {
    process: Guarded,
    truth: PathBuf,
    port: u16,
}

/// The application's own record of a request: thread, begin, end, method, status.
type Truth = (u32, u64, u64, String, u16);

impl Server {
    fn unicorn(live: &Live, ruby: &Ruby) -> Result<Self> {
        let mut command = ruby.command()?;
        command.arg(UNICORN).args(["-E", "production", "-c", &web("unicorn_two.rb")]);
        Self::start(live, "unicorn", &mut command, |port| {
            vec!["-l".into(), format!("127.0.0.1:{port}"), web("requests.ru")]
        })
    }

    fn thin(live: &Live, ruby: &Ruby) -> Result<Self> {
        let mut command = ruby.command()?;
        command.arg(THIN).args(["-a", "127.0.0.1", "-R", &web("requests.ru")]);
        Self::start(live, "thin", &mut command, |port| vec!["-p".into(), port.to_string(), "start".into()])
    }

    fn webrick(live: &Live, ruby: &Ruby) -> Result<Self> {
        let mut command = ruby.command()?;
        command.arg("-rstringio").arg(web("webrick.rb"));
        Self::start(live, "webrick", &mut command, |port| vec![web("requests.ru"), port.to_string()])
    }

    /// A WEBrick that never runs while gctrace wants its CPU.
    fn idle_webrick(live: &Live, ruby: &Ruby) -> Result<Self> {
        let mut command = std::process::Command::new("chrt");
        command.args(["--idle", "0"]).args(ruby.argv()?).arg("-rstringio").arg(web("webrick.rb"));
        Self::start(live, "idle-webrick", &mut command, |port| vec![web("requests.ru"), port.to_string()])
    }

    fn start(
        live: &Live,
        name: &str,
        command: &mut std::process::Command,
        arguments: impl FnOnce(u16) -> Vec<String>,
    ) -> Result<Self> {
        let port = free_port()?;
        // A server of another Ruby has another port, so it writes another file.
        let truth = live.path(&format!("{name}-{port}"));
        command.args(arguments(port)).current_dir(rubies_dir().join("web"));
        // The application finds the id of its thread in `/proc`.
        command.env("GCTRACE_TEST_TRUTH", &truth).env("GCTRACE_TEST_PROC", "1");
        Ok(Self { process: Guarded::start(name, command)?, truth, port })
    }

    fn wait_until_it_listens(mut self) -> Result<Self> {
        let since = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            if !self.process.running()? {
                bail!("it has ended: {}", self.process.finish(PATIENCE)?.errors());
            }
            ensure!(since.elapsed() < PATIENCE, "it does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(self)
    }

    fn connect(&self) -> Result<TcpStream> {
        let stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// Waits until every answered request has its line, and so has each whose client did not wait.
    fn all_are_over(&self, gctrace: &Gctrace, answered: &[(String, u64)], loads: &[&str]) -> Result<()> {
        for (name, _) in answered {
            gctrace.wait_request(&format!("/{name}\""))?;
        }
        let since = Instant::now();
        for prefix in loads {
            let name = format!("{prefix}abandoned");
            while !self.truths()?.contains_key(&name) {
                ensure!(since.elapsed() < PATIENCE, "{name} was not served");
                std::thread::sleep(Duration::from_millis(20));
            }
            gctrace.wait_request(&format!("/{name}\""))?;
        }
        Ok(())
    }

    fn truths(&self) -> Result<HashMap<String, Truth>> {
        let mut truths = HashMap::new();
        let text = std::fs::read(&self.truth)?;
        // The last line may be being written.
        for line in
            String::from_utf8_lossy(&text).split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'))
        {
            let words: Vec<&str> = line.split(' ').collect();
            let [name, tid, begin, end, method, status] = words[..] else { bail!("line {line}") };
            // Some WEBricks call the application for a line of arbitrary bytes, which gctrace does not consider a request.
            if !method.bytes().all(|byte| byte.is_ascii_uppercase()) {
                continue;
            }
            let truth = (tid.parse()?, begin.parse()?, end.parse()?, method.to_owned(), status.parse()?);
            ensure!(truths.insert(name.to_owned(), truth).is_none(), "{name} was served twice");
        }
        Ok(truths)
    }

    /// Sends a request in pieces of this size (`None`: in one piece), waits for its response and returns the number of its bytes.
    fn ask(stream: &mut TcpStream, text: &str, piece: Option<usize>) -> Result<u64> {
        for piece in text.as_bytes().chunks(piece.unwrap_or(text.len())) {
            stream.write_all(piece)?;
            if piece.len() < text.len() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        answer(stream, !text.starts_with("HEAD"))
    }

    /// Sends requests of all kinds, each on its own connection except for those on a kept one. Returns the names of those that were answered, and
    /// the size of each response in bytes.
    fn load(&self, prefix: &str, keeps: bool) -> Result<Vec<(String, u64)>> {
        let (mut names, mut sizes) = (Vec::new(), Vec::new());
        let mut next = |method: &str, kind: &str, body: &str| {
            let letter = |at: usize| char::from(b'g' + (at % 20) as u8);
            let name = format!("{prefix}{}{}", letter(names.len() / 20), letter(names.len()));
            let length =
                if body.is_empty() { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
            let text = format!(
                "{method} /{kind}/{name}?token={SECRET} HTTP/1.1\r\nHost: x\r\nCookie: {SECRET}\r\n{length}\r\n{body}"
            );
            names.push(name);
            text
        };
        let kinds = [("GET", "gc"), ("GET", "lazy"), ("GET", "missing"), ("HEAD", "plain"), ("GET", "slow")];
        for (method, kind) in kinds.into_iter().cycle().take(10) {
            sizes.push(Self::ask(&mut self.connect()?, &next(method, kind, ""), None)?);
        }
        for piece in [2, 17, 200] {
            sizes.push(Self::ask(&mut self.connect()?, &next("GET", "lazy", ""), Some(piece))?);
            let post = next("POST", "plain", "GET /none/none HTTP/1.1\r\n\r\n");
            sizes.push(Self::ask(&mut self.connect()?, &post, Some(piece))?);
        }
        if keeps {
            let mut stream = self.connect()?;
            for kind in ["gc", "plain", "lazy", "missing"] {
                sizes.push(Self::ask(&mut stream, &next("GET", kind, ""), None)?);
                // Think time of the client: it belongs to no request.
                std::thread::sleep(Duration::from_millis(60));
            }
        }
        // Connections without a request, or whose client does not wait for the response.
        drop(self.connect()?);
        self.connect()?.write_all(b"\0\xff\x1b[2J HTTP/1.1\r\n\r\n")?;
        self.connect()?.write_all(b"GE")?;
        self.connect()?.write_all(format!("GET /slow/{prefix}abandoned HTTP/1.1\r\n\r\n").as_bytes())?;
        Ok(names.into_iter().zip(sizes).collect())
    }
}

fn web(name: &str) -> String {
    rubies_dir().join("web").join(name).to_string_lossy().into_owned()
}

/// Reads a complete response of the application, and returns its number of bytes.
fn answer(stream: &mut TcpStream, has_body: bool) -> Result<u64> {
    let end = if has_body { "SECRETBODY".repeat(3) } else { "\r\n\r\n".to_owned() };
    let (mut all, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        let read = stream.read(&mut buffer)?;
        all.extend_from_slice(&buffer[..read]);
        let text = String::from_utf8_lossy(&all).to_ascii_lowercase();
        let (is_chunked, closes) =
            (text.contains("\r\ntransfer-encoding: chunked"), text.contains("\r\nconnection: close"));
        let last = if is_chunked && has_body { "\r\n0\r\n\r\n" } else { &end.to_ascii_lowercase() };
        if read == 0 || (!closes && text.ends_with(last)) {
            ensure!(text.contains(&end.to_ascii_lowercase()), "closed after {text}");
            if read == 0 {
                // The server closes the connection first.
                std::thread::sleep(Duration::from_millis(5));
            }
            return Ok(all.len() as u64);
        }
    }
}

/// Checks that every answered request has exactly one line, and that every line and every collection is where the application had it.
fn agrees(report: &Report, truths: &HashMap<String, Truth>, answered: &[(String, u64)]) -> Result<()> {
    let name = |line: &RequestLine| {
        let path = line.path.as_deref().unwrap_or_default();
        path.rsplit('/').next().unwrap_or_default().to_owned()
    };
    let mut lines: HashMap<String, &RequestLine> = HashMap::new();
    for line in &report.requests {
        let name = name(line);
        let Some((tid, begin_ns, end_ns, method, status)) = truths.get(&name) else {
            // The server itself refused it; the application was not called.
            ensure!(line.status.is_none_or(|status| status == 400), "{line:?}");
            continue;
        };
        let until = line.begin_ns + line.duration_ns.with_context(|| format!("no duration: {line:?}"))?;
        ensure!(line.tid == *tid && line.begin_ns <= *begin_ns && *end_ns <= until, "{line:?} {name}");
        // 0.06 s is the think time of the client after the response.
        ensure_times!(until - end_ns < 50_000_000, "{line:?} ends late");
        ensure!(line.method.as_deref() == Some(method) && line.minor_faults.is_some(), "{line:?}");
        let abandoned = name.ends_with("abandoned") && line.status.is_none();
        ensure!(abandoned || line.status == Some(*status), "{line:?} {status}");
        ensure!(lines.insert(name, line).is_none(), "it is there twice: {line:?}");
    }
    for (name, size) in answered {
        let line = lines.get(name).with_context(|| format!("{name} is not there"))?;
        ensure!(line.response_bytes == Some(*size), "{line:?} has {size} bytes");
    }
    let mut inside = 0;
    for gc in &report.gcs {
        let begin_ns = gc.pauses.first().context("a cycle without pauses")?.begin_ns;
        let of = truths.iter().find(|(_, truth)| truth.0 == gc.tid && (truth.1..truth.2).contains(&begin_ns));
        let Some((name, _)) = of else { continue };
        let line = lines.get(name).with_context(|| format!("no line of {name}"))?;
        ensure!(gc.request == Some(line.id), "{gc:?} is of {name}");
        inside += 1;
    }
    ensure!(inside > 0, "no collection in a request");
    ensure!(report.requests.iter().all(|line| line.gcs.is_some()), "unknown GC");
    Ok(())
}

/// The workers of a Unicorn.
fn workers(server: &Server) -> Result<BTreeSet<u32>> {
    let pid = server.process.pid();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    Ok(children.split_whitespace().map(str::parse).collect::<Result<_, _>>()?)
}

/// Two existing workers, and one more that is forked while gctrace runs; twice in a row.
#[test]
fn unicorn() -> Result<()> {
    let live = Live::begin()?;
    ensure!(Ruby::main()?.host_path(UNICORN).is_file(), "no Unicorn: run `cargo xtask setup --for test`");
    Ruby::each(|ruby| {
        if !ruby.host_path(UNICORN).is_file() {
            return Ok(());
        }
        let server = Server::unicorn(&live, ruby)?.wait_until_it_listens()?;
        for round in ["m", "n"] {
            let pid = server.process.pid().to_string();
            let gctrace = Invocation::jsonl(["--pid", &pid, "--requests"])?.informing();
            let mut gctrace = gctrace.start_ready()?;
            let mut answered = server.load(round, false)?;
            let before = workers(&server)?;
            server.process.signal(Signal::TTIN)?;
            let since = Instant::now();
            let new = loop {
                if let Some(&new) = workers(&server)?.difference(&before).next() {
                    break new;
                }
                ensure!(since.elapsed() < PATIENCE, "no new worker");
                std::thread::sleep(Duration::from_millis(20));
            };
            gctrace.wait_server(new)?;
            answered.extend(server.load(&format!("{round}p"), false)?);
            server.all_are_over(&gctrace, &answered, &[round, &format!("{round}p")])?;
            let (report, finished) = gctrace.stop_by(Signal::INT)?;
            ledger::check_lossless(&report)?;
            ensure!(!finished.stdout.join("\n").contains(SECRET), "a secret came out");
            agrees(&report, &server.truths()?, &answered)?;
        }
        Ok(())
    })
}

/// A WEBrick from its first request on, with kept connections, and beside it a program that listens but is not a known server.
#[test]
fn webrick() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        let mut gctrace = Invocation::jsonl(["--all-ruby", "--requests"])?.informing().start_ready()?;
        let server = Server::webrick(&live, ruby)?;
        let mut command = ruby.command()?;
        command.arg(web("listener.rb"));
        let other = Server::start(&live, "listener", &mut command, |port| vec![port.to_string()])?;
        let (server, other) = (server.wait_until_it_listens()?, other.wait_until_it_listens()?);
        gctrace.wait_server(server.process.pid())?;
        let mut answered = server.load("m", true)?;
        answered.extend(server.load("n", true)?);
        for _ in 0..20 {
            let mut stream = other.connect()?;
            stream.write_all(b"GET /none/none HTTP/1.1\r\n")?;
            ensure!(stream.read(&mut [0; 64])? > 0, "no answer");
        }
        server.all_are_over(&gctrace, &answered, &["m", "n"])?;
        let (mut report, finished) = gctrace.stop_by(Signal::INT)?;
        ledger::check_lossless(&report)?;
        ensure!(!finished.stdout.join("\n").contains(SECRET), "a secret came out");
        // Other servers on this machine may have requests, too.
        let ours = [server.process.pid(), other.process.pid()];
        report.requests.retain(|line| ours.contains(&line.pid));
        report.gcs.retain(|gc| ours.contains(&gc.pid));
        let of_none = report.requests.iter().find(|line| line.pid != server.process.pid());
        ensure!(of_none.is_none(), "requests of no server: {of_none:?}");
        agrees(&report, &server.truths()?, &answered)
    })
}

/// A WEBrick that gctrace, which shares its only CPU, preempts as soon as it is seen to listen.
#[test]
fn webrick_on_a_busy_cpu() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let own = sched_getaffinity(None)?;
    let first = (0..CpuSet::MAX_CPU).find(|cpu| own.is_set(*cpu)).context("no CPU")?;
    let mut one = CpuSet::new();
    one.set(first);
    // Processes that this thread starts inherit the affinity.
    sched_setaffinity(None, &one)?;
    for _ in 0..2 {
        let mut gctrace = Invocation::jsonl(["--all-ruby", "--requests"])?.informing().start_ready()?;
        let server = Server::idle_webrick(&live, &ruby)?.wait_until_it_listens()?;
        gctrace.wait_server(server.process.pid())?;
        Server::ask(&mut server.connect()?, "GET /plain/busy HTTP/1.1\r\nHost: x\r\n\r\n", None)?;
        gctrace.wait_requests(1)?;
        let (report, _) = gctrace.stop_by(Signal::INT)?;
        let seen = report.requests.iter().filter(|line| line.pid == server.process.pid()).count();
        ensure!(seen == 1, "{seen} of 1 request");
    }
    Ok(())
}

/// gctrace reports once that the requests of a server are not seen, whether the server ran before or starts meanwhile. Its cycles are seen.
/// Without `--requests`, gctrace reports nothing about it.
#[test]
fn other_servers_are_named() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    ensure!(ruby.host_path(THIN).is_file(), "no Thin: run `cargo xtask setup --for test`");
    let server = Server::thin(&live, &ruby)?.wait_until_it_listens()?;
    for (requests, expected) in [(true, 1), (false, 0)] {
        let flags = ["--all-ruby", "--requests"];
        let gctrace = Invocation::jsonl(flags.iter().take(1 + usize::from(requests)))?.start_ready()?;
        let second = Server::thin(&live, &ruby)?.wait_until_it_listens()?;
        for server in [&server, &second] {
            for name in ["gm", "gn"] {
                Server::ask(&mut server.connect()?, &format!("GET /gc/{name} HTTP/1.0\r\n\r\n"), None)?;
            }
        }
        let (report, finished) = gctrace.stop_by(Signal::INT)?;
        ledger::check_lossless(&report)?;
        let errors = finished.errors();
        let said = errors.lines().filter(|line| line.starts_with("gctrace: requests to Thin are not seen"));
        ensure!(said.count() == expected, "{errors}");
        ensure!(report.requests.is_empty(), "{:?}", report.requests);
        for server in [&server, &second] {
            ensure!(report.gcs_of(server.process.pid()).count() > 0, "no cycles");
        }
    }
    Ok(())
}
