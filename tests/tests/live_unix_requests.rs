//! Requests of servers on Unix sockets: each agrees with the log of the application that served it, and no other traffic on
//! Unix sockets is mistaken for a request.

use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::live::Live;
use gctrace_tests::report::{Report, RequestLine};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::timing::settled;
use gctrace_tests::unix_server::{Truth, UnixServer};
use gctrace_tests::{PATIENCE, ensure_times, ledger};
use rustix::process::Signal;

/// Text in requests that must never appear in an output.
const SECRET: &str = "SECRET";
/// How long the application sleeps before some responses.
const SLEEP: Duration = Duration::from_millis(30);

trait Connection: Read + Write {}

impl<T: Read + Write> Connection for T {}

/// The client side of a connection, and the bytes received after the last response.
struct Client {
    stream: Box<dyn Connection>,
    rest: Vec<u8>,
}

impl Client {
    fn unix(server: &UnixServer) -> Result<Self> {
        Ok(Self { stream: Box::new(server.connect()?), rest: Vec::new() })
    }

    fn tcp(server: &UnixServer) -> Result<Self> {
        Ok(Self { stream: Box::new(server.connect_tcp()?), rest: Vec::new() })
    }

    fn send(&mut self, text: &str, piece: usize) -> Result<()> {
        for piece in text.as_bytes().chunks(piece) {
            self.stream.write_all(piece)?;
            if piece.len() < text.len() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    /// Reads until the received text contains `end`, and returns the text before it.
    fn until(&mut self, end: &str) -> Result<String> {
        loop {
            let text = String::from_utf8_lossy(&self.rest).into_owned();
            if let Some(at) = text.find(end) {
                self.rest.drain(..at + end.len());
                return Ok(text[..at].to_owned());
            }
            let mut buffer = [0; 4096];
            let read = self.stream.read(&mut buffer)?;
            ensure!(read > 0, "closed after {text}");
            self.rest.extend_from_slice(&buffer[..read]);
        }
    }

    /// Reads a final response and returns its status.
    fn response(&mut self) -> Result<u16> {
        loop {
            let head = self.until("\r\n\r\n")?.to_lowercase();
            let status: u16 = head.split(' ').nth(1).context("a status")?.parse()?;
            if status < 200 {
                continue;
            }
            if head.contains("transfer-encoding: chunked") {
                self.until("0\r\n\r\n")?;
            } else if let Some((_, length)) = head.split_once("content-length: ") {
                let length: usize = length.lines().next().unwrap_or_default().parse()?;
                while self.rest.len() < length {
                    let mut buffer = [0; 4096];
                    let read = self.stream.read(&mut buffer)?;
                    ensure!(read > 0, "closed in a body");
                    self.rest.extend_from_slice(&buffer[..read]);
                }
                self.rest.drain(..length);
            }
            return Ok(status);
        }
    }
}

/// The requests of one client: each has a distinct name without digits, which no template replaces, and its own trace.
struct Names {
    prefix: String,
    taken: Vec<String>,
}

impl Names {
    fn new(client: usize) -> Self {
        Self { prefix: format!("m{}", letter(client)), taken: Vec::new() }
    }

    /// The names of requests over TCP.
    fn tcp(client: usize) -> Self {
        Self { prefix: format!("t{}", letter(client)), taken: Vec::new() }
    }

    fn next(&mut self, method: &str, kind: &str, more: &str) -> String {
        let at = self.taken.len();
        let name = format!("{}{}{}", self.prefix, letter(at / 20), letter(at));
        let number = name.bytes().fold(0_u64, |sum, byte| sum * 32 + u64::from(byte - b'a'));
        self.taken.push(name.clone());
        format!(
            "{method} /{kind}/{name}?token={SECRET} HTTP/1.1\r\nHost: x\r\nCookie: {SECRET}\r\n\
             traceparent: 00-{:032x}-{number:016x}-01\r\n{more}\r\n",
            u128::from(number) << 20 | 1,
        )
    }
}

fn letter(at: usize) -> char {
    char::from(b'g' + (at % 20) as u8)
}

const KINDS: [&str; 8] = ["gc", "lazy", "redis", "locals", "missing", "slow", "accepts", "plain"];

/// Sends one request per connection.
fn closing(server: &UnixServer, names: &mut Names, kinds: &[&str]) -> Result<()> {
    for kind in kinds {
        for (method, body) in [("GET", ""), ("POST", "GET /none/none HTTP/1.1\r\n\r\n")] {
            let length = match body.len() {
                0 => String::new(),
                length => format!("Content-Length: {length}\r\n"),
            };
            let text = names.next(method, kind, &format!("Connection: close\r\n{length}"));
            let mut client = Client::unix(server)?;
            client.send(&text, text.len())?;
            if !body.is_empty() {
                std::thread::sleep(Duration::from_millis(2));
                client.send(body, body.len())?;
            }
            client.response()?;
        }
    }
    Ok(())
}

/// Sends requests on a kept connection: at once, after a while (so that Puma's reactor reads them), in pieces, and pipelined.
fn kept(mut client: Client, names: &mut Names) -> Result<()> {
    // Puma 5.6 may close a connection after its tenth request.
    for kind in KINDS {
        let text = names.next("GET", kind, "");
        client.send(&text, text.len())?;
        client.response()?;
        if kind == "lazy" || kind == "missing" {
            // Longer than a thread of Puma 5 or 6 waits for the next request.
            std::thread::sleep(Duration::from_millis(250));
        }
    }
    Ok(())
}

fn client(server: &UnixServer, number: usize) -> Result<Vec<String>> {
    let mut names = Names::new(number);
    kept(Client::unix(server)?, &mut names)?;
    // The same server also listens on TCP.
    let mut by_tcp = Names::tcp(number);
    kept(Client::tcp(server)?, &mut by_tcp)?;
    let mut client = Client::unix(server)?;
    let four: Vec<String> =
        ["gc", "plain", "redis", "lazy"].iter().map(|kind| names.next("GET", kind, "")).collect();
    client.send(&four.concat(), usize::MAX)?;
    four.iter().try_for_each(|_| client.response().map(|_| ()))?;
    for piece in [3, 40] {
        let text = names.next("GET", "gc", "");
        client.send(&text, piece)?;
        client.response()?;
    }
    let mut client = Client::unix(server)?;
    for kind in ["hints", "pieces", "raise"] {
        let text = names.next("GET", kind, "");
        client.send(&text, text.len())?;
        ensure!(client.response()? == if kind == "raise" { 500 } else { 200 }, "{kind}");
    }
    closing(server, &mut names, &["gc", "plain", "accepts"])?;
    Ok([names.taken, by_tcp.taken].concat())
}

fn at_the_same_time<T: Send>(count: usize, work: impl Fn(usize) -> Result<T> + Sync) -> Result<Vec<T>> {
    std::thread::scope(|scope| {
        let work = &work;
        let clients: Vec<_> = (0..count).map(|at| scope.spawn(move || work(at))).collect();
        clients.into_iter().map(|client| client.join().expect("a client panicked")).collect()
    })
}

fn name(line: &RequestLine) -> &str {
    line.path.as_deref().and_then(|path| path.rsplit('/').next()).unwrap_or_default()
}

/// The name of the request of a line. A request that was handed over may have no path: if the next connection's parser reused the memory of its
/// own, that memory contains another request by now. Then it is the first request that its thread served from then on.
fn served<'a>(line: &'a RequestLine, truths: &'a HashMap<String, Truth>) -> Option<&'a String> {
    if line.path.is_some() || line.duration_ns.is_some() {
        return truths.get_key_value(name(line)).map(|(name, _)| name);
    }
    let later = truths.iter().filter(|(_, truth)| truth.tid == line.tid && truth.begin_ns >= line.begin_ns);
    later.min_by_key(|(_, truth)| truth.begin_ns).map(|(name, _)| name)
}

fn traceparent(line: &RequestLine) -> Option<String> {
    let flags = if line.trace_sampled? { "01" } else { "00" };
    Some(format!("00-{}-{}-{flags}", line.trace_id.as_ref()?, line.parent_span_id.as_ref()?))
}

/// Checks that every answered request has one line, and that every line and every collection is where the application had it. Returns lines by name.
fn agree<'a>(
    report: &'a Report,
    truths: &HashMap<String, Truth>,
    answered: &[String],
) -> Result<HashMap<&'a str, &'a RequestLine>> {
    let mut lines = HashMap::new();
    for line in &report.requests {
        let truth = truths.get(name(line)).with_context(|| format!("nobody served {line:?}"))?;
        let end_ns = line.begin_ns + line.duration_ns.with_context(|| format!("no end: {line:?}"))?;
        ensure!(line.tid == truth.tid && line.minor_faults.is_some(), "{line:?} {truth:?}");
        ensure!(line.begin_ns <= truth.begin_ns && truth.end_ns <= end_ns, "{line:?} {truth:?}");
        ensure!(line.method.as_deref() == Some(&truth.method), "{line:?} {truth:?}");
        ensure!(line.status == Some(truth.status), "{line:?} {truth:?}");
        let (first, last) = line.first_byte_ns.zip(line.last_byte_ns).context("no response")?;
        ensure!(first <= last && line.begin_ns + last <= end_ns, "{line:?}");
        // A body that comes in pieces begins after the head.
        ensure!(line.begin_ns + last >= truth.end_ns, "{line:?} {truth:?}");
        ensure!(lines.insert(name(line), line).is_none(), "it is there twice: {line:?}");
    }
    let missing: Vec<&String> = answered.iter().filter(|name| !lines.contains_key(name.as_str())).collect();
    ensure!(missing.is_empty(), "not there: {missing:?}");

    let mut inside = 0;
    let by_id: HashMap<u64, &RequestLine> = report.requests.iter().map(|line| (line.id, line)).collect();
    for gc in &report.gcs {
        let begin_ns = gc.pauses.first().context("a cycle without pauses")?.begin_ns;
        let of = truths
            .iter()
            .find(|(_, truth)| truth.tid == gc.tid && (truth.begin_ns..truth.end_ns).contains(&begin_ns));
        let line = gc.request.and_then(|id| by_id.get(&id));
        if let Some((served, _)) = of.filter(|(served, _)| lines.contains_key(served.as_str())) {
            inside += 1;
            ensure!(line.is_some_and(|line| name(line) == served), "{gc:?} is of {served}, not {line:?}");
        }
        if let Some(line) = line {
            let end_ns = line.begin_ns + line.duration_ns.unwrap_or_default();
            ensure!(line.tid == gc.tid && (line.begin_ns..=end_ns).contains(&begin_ns), "{gc:?} {line:?}");
        }
    }
    ensure!(inside >= answered.len() / 5, "only {inside} collections in {} requests", answered.len());
    let started: u64 = report.requests.iter().map(|line| u64::from(line.gcs.unwrap_or_default())).sum();
    let named = report.gcs.iter().filter(|gc| gc.request.is_some_and(|id| by_id.contains_key(&id))).count();
    ensure!(started == named as u64, "{started} collections by requests, {named} with one");
    ensure!(report.requests.iter().all(|line| line.gcs.is_some() && line.gc_ns.is_some()), "unknown GC");
    pauses_add_up(report)?;
    Ok(lines)
}

/// GC of a request's own thread and of other threads together covers every pause in its time.
fn pauses_add_up(report: &Report) -> Result<()> {
    let outside = report.ledger.as_ref().and_then(|ledger| ledger.user["pauses_outside"].as_u64());
    for line in &report.requests {
        let (begin_ns, end_ns) = (line.begin_ns, line.begin_ns + line.duration_ns.context("no end")?);
        let pauses = report.gcs_of(line.pid).flat_map(|gc| &gc.pauses);
        let part = |from: u64, ns: u64| (from + ns).min(end_ns).saturating_sub(from.max(begin_ns));
        let sum: u64 = pauses.map(|pause| part(pause.begin_ns, pause.ns)).sum();
        let of_line = line.gc_own_ns.zip(line.gc_other_ns).map(|(own, other)| own + other);
        let of_line = of_line.with_context(|| format!("unknown GC: {line:?}"))?;
        // Pauses of a cycle that started before tracing are in no cycle.
        ensure!(of_line == sum || outside > Some(0) && of_line > sum, "{line:?} has {sum} ns");
    }
    Ok(())
}

/// Traces are those that the application saw. On a Unix socket, the time in which requests waited is unknown.
fn says_what_is_known(lines: &HashMap<&str, &RequestLine>, truths: &HashMap<String, Truth>) -> Result<()> {
    for (name, line) in lines {
        let truth = truths.get(*name).context("a truth")?;
        ensure!(traceparent(line) == truth.traceparent, "{line:?} {truth:?}");
        ensure!(line.queue_ns.is_none() || name.starts_with('t'), "{line:?}");
    }
    Ok(())
}

fn watch(server: &UnixServer) -> Result<Gctrace> {
    Invocation::jsonl(["--pid", &server.process.pid().to_string(), "--requests"])?.start_ready()
}

/// A Puma that listens on a Unix socket and on TCP, with clients that keep, pipeline, split and close. Its requests themselves communicate over Unix
/// sockets, set variables of their threads as Puma does, raise, send early hints and hand connections over.
#[test]
fn puma_on_a_unix_socket() -> Result<()> {
    let live = Live::begin()?;
    for ruby in UnixServer::rubies(false)? {
        settled(|| puma(&live, &ruby))
            .with_context(|| format!("Ruby {} ({})", ruby.version(), ruby.label()))?;
    }
    Ok(())
}

fn puma(live: &Live, ruby: &Ruby) -> Result<()> {
    let server = UnixServer::puma(live, ruby, "0")?;
    // A connection that is older than tracing.
    let (mut older, mut of_older) = (Client::unix(&server)?, Names::new(19));
    older.send(&of_older.next("GET", "gc", ""), usize::MAX)?;
    older.response()?;
    std::thread::sleep(Duration::from_millis(300));
    let gctrace = watch(&server)?;
    let mut answered = Vec::new();
    for _ in 0..3 {
        older.send(&of_older.next("GET", "gc", ""), usize::MAX)?;
        older.response()?;
    }
    answered.extend(of_older.taken.split_off(1));
    answered.extend(at_the_same_time(4, |at| client(&server, at))?.concat());
    // Their connections are handed over, and their threads serve other requests.
    let mut handed_over = Names::new(18);
    for _ in 0..6 {
        let mut client = Client::unix(&server)?;
        client.send(&handed_over.next("GET", "hijack", ""), usize::MAX)?;
        client.response()?;
    }
    // The same over TCP, closed by another thread: a line without an end, and the threads' next requests come over the Unix socket.
    let mut by_tcp = Names::tcp(17);
    for _ in 0..6 {
        let mut client = Client::tcp(&server)?;
        client.send(&by_tcp.next("GET", "handed", ""), usize::MAX)?;
        client.response()?;
    }
    answered.extend(at_the_same_time(4, |at| client(&server, 10 + at))?.concat());
    // Connections without a request.
    for _ in 0..5 {
        drop(Client::unix(&server)?);
        Client::unix(&server)?.send("GET\0 / HTTP/1.1\r\n\r\n", usize::MAX)?;
        Client::unix(&server)?.send("GE", usize::MAX)?;
    }
    gctrace.wait_requests(answered.len())?;
    std::thread::sleep(Duration::from_millis(300));
    let (mut report, finished) = gctrace.stop_by(Signal::INT)?;
    ledger::check_lossless(&report)?;
    ensure!(!finished.stdout.join("\n").contains(SECRET), "a secret came out");
    let truths = server.truths()?;
    let (by_tcp, rest) = report
        .requests
        .into_iter()
        .partition(|line| served(line, &truths).is_some_and(|name| by_tcp.taken.contains(name)));
    report.requests = rest;
    let by_tcp: Vec<RequestLine> = by_tcp;
    // The last one of each thread may still be open.
    let open = |line: &RequestLine| line.duration_ns.is_none() && line.minor_faults.is_none();
    ensure!((2..=6).contains(&by_tcp.len()) && by_tcp.iter().all(open), "{by_tcp:?}");
    let lines = agree(&report, &truths, &answered)?;
    says_what_is_known(&lines, &truths)?;

    let counted = |name: &str| report.ledger.as_ref().and_then(|ledger| ledger.kernel[name].as_u64());
    let count = handed_over.taken.len() as u64;
    let open = report.ledger.as_ref().and_then(|ledger| ledger.user["requests_open"].as_u64());
    // A thread without another request since then still has that one.
    let unanswered = counted("request_unanswered").zip(open).map(|(gone, open)| gone + open);
    ensure!(unanswered == Some(count), "{unanswered:?} of {count} were handed over");
    for name in &handed_over.taken {
        ensure!(!lines.contains_key(name.as_str()), "{name} was not answered by its thread");
    }
    let of_kind = |kind: &str| {
        let of = format!("/{kind}/");
        lines.values().filter(move |line| line.path.as_deref().is_some_and(|path| path.starts_with(&of)))
    };
    for line in of_kind("hints") {
        ensure_times!(
            line.first_byte_ns < Some(SLEEP.as_nanos() as u64),
            "its hints came before it slept: {line:?}"
        );
    }
    for line in of_kind("slow") {
        ensure!(line.first_byte_ns >= Some(SLEEP.as_nanos() as u64), "{line:?}");
    }
    let mut early: Vec<u64> =
        lines.iter().map(|(name, line)| truths[*name].begin_ns - line.begin_ns).collect();
    early.sort_unstable();
    ensure_times!(early[early.len() / 2] < 500_000, "begins are too early: {early:?}");
    Ok(())
}

/// The two workers of a cluster, as soon as both exist.
fn workers(server: &UnixServer) -> Result<Vec<u32>> {
    let since = Instant::now();
    loop {
        let pid = server.process.pid();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
        let children: Vec<u32> = children.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        if children.len() == 2 {
            return Ok(children);
        }
        ensure!(since.elapsed() < PATIENCE, "workers {children:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The workers of a cluster, from its start on: gctrace runs before the cluster listens.
#[test]
fn puma_cluster_on_a_unix_socket() -> Result<()> {
    let live = Live::begin()?;
    for ruby in UnixServer::rubies(false)? {
        let mut gctrace = Invocation::jsonl(["--all-ruby", "--requests"])?.informing().start_ready()?;
        let server = UnixServer::puma(&live, &ruby, "2")?;
        for worker in workers(&server)? {
            gctrace.wait_unix_server(worker)?;
        }
        let answered = at_the_same_time(6, |at| {
            let mut names = Names::new(at);
            kept(Client::unix(&server)?, &mut names)?;
            closing(&server, &mut names, &KINDS)?;
            Ok(names.taken)
        })?
        .concat();
        gctrace.wait_requests(answered.len())?;
        let mut report = gctrace.stop()?;
        ledger::check_lossless(&report)?;
        let workers: HashSet<u32> = report.requests.iter().map(|line| line.pid).collect();
        // Other servers on this machine may have requests, too.
        report.gcs.retain(|gc| workers.contains(&gc.pid));
        let truths = server.truths()?;
        let lines = agree(&report, &truths, &answered)?;
        says_what_is_known(&lines, &truths)?;
        ensure!(workers.len() == 2 && !workers.contains(&server.process.pid()), "{workers:?}");
    }
    Ok(())
}

/// A Unicorn on a Unix socket. (If it accepts a connection while it serves a request, it is considered to have handed that request over.)
#[test]
fn unicorn_on_a_unix_socket() -> Result<()> {
    let live = Live::beside_others()?;
    for ruby in UnixServer::rubies(true)? {
        let server = UnixServer::unicorn(&live, &ruby)?;
        let gctrace = watch(&server)?;
        let answered = at_the_same_time(3, |at| {
            let mut names = Names::new(at);
            let kinds: Vec<&str> = KINDS.into_iter().filter(|kind| *kind != "accepts").collect();
            closing(&server, &mut names, &kinds)?;
            for piece in [3, 40] {
                let mut client = Client::unix(&server)?;
                client.send(&names.next("GET", "gc", ""), piece)?;
                client.response()?;
            }
            Ok(names.taken)
        })?
        .concat();
        gctrace.wait_requests(answered.len())?;
        std::thread::sleep(Duration::from_millis(200));
        let (report, finished) = gctrace.stop_by(Signal::INT)?;
        ledger::check_lossless(&report)?;
        ensure!(!finished.stdout.join("\n").contains(SECRET), "a secret came out");
        let lines = agree(&report, &server.truths()?, &answered)?;
        ensure!(lines.values().all(|line| line.queue_ns.is_none()), "a queue time");
    }
    Ok(())
}
