//! Requests of a Puma that logs what really happened: each is found, on the thread that served it, and no collection is attributed to
//! another request than the one that started it.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::live::Live;
use gctrace_tests::puma::Puma;
use gctrace_tests::report::{Report, RequestLine};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::timing::settled;
use gctrace_tests::{PATIENCE, ensure_times, ledger};
use rustix::process::Signal;

/// Text in requests that must never appear in an output.
const SECRET: &str = "SECRET";

/// The application's own record of a request.
#[derive(Clone, Debug)]
struct Truth {
    tid: u32,
    begin_ns: u64,
    end_ns: u64,
    method: String,
    status: u16,
}

struct Server(Puma);

impl std::ops::Deref for Server {
    type Target = Puma;

    fn deref(&self) -> &Puma {
        &self.0
    }
}

impl Server {
    fn start(live: &Live, workers: &str) -> Result<Self> {
        Ok(Self(Puma::start(live, "requests.ru", workers)?))
    }

    fn start_on(live: &Live, ruby: &Ruby) -> Result<Self> {
        Ok(Self(Puma::start_on(live, ruby, "requests.ru")?))
    }

    fn truths(&self) -> Result<HashMap<String, Truth>> {
        let text = std::fs::read_to_string(&self.truth)?;
        let mut truths = HashMap::new();
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let [name, tid, begin_ns, end_ns, method, status] = words[..] else {
                anyhow::bail!("line {line}")
            };
            let truth = Truth {
                tid: tid.parse()?,
                begin_ns: begin_ns.parse()?,
                end_ns: end_ns.parse()?,
                method: method.to_owned(),
                status: status.parse()?,
            };
            ensure!(truths.insert(name.to_owned(), truth).is_none(), "{name} was served twice");
        }
        Ok(truths)
    }
}

/// A distinct name without digits for each request, which no template replaces.
fn name(number: usize) -> String {
    let letter = |at: usize| char::from(b'g' + (at % 20) as u8);
    [number / 400, number / 20, number].into_iter().map(letter).collect()
}

fn get(kind: &str, name: &str) -> String {
    format!(
        "GET /{kind}/{name}?token={SECRET}QUERY HTTP/1.1\r\nHost: x\r\nCookie: c={SECRET}COOKIE\r\n\
         Authorization: {SECRET}HEADER\r\n\r\n"
    )
}

/// Reads this many responses of this application.
fn responses(stream: &mut TcpStream, count: usize) -> Result<()> {
    let mut text = Vec::new();
    let mut buffer = [0; 4096];
    let end = "SECRETBODY".repeat(3);
    while String::from_utf8_lossy(&text).matches(&end).count() < count {
        let read = stream.read(&mut buffer)?;
        ensure!(read > 0, "closed after {}", String::from_utf8_lossy(&text));
        text.extend_from_slice(&buffer[..read]);
    }
    Ok(())
}

/// The work of one client. Returns the names of the requests that were answered.
fn client(server: &Server, number: usize) -> Result<Vec<String>> {
    let kinds = ["gc", "lazy", "plain", "missing", "slow", "lazy"];
    let mut names = Vec::new();
    let mut next = || {
        let at = number * 40 + names.len();
        names.push(name(at));
        (kinds[at % kinds.len()], name(at))
    };
    // Keep-alive; some requests go through the reactor.
    let mut stream = server.connect()?;
    for at in 0..10 {
        let (kind, name) = next();
        stream.write_all(get(kind, &name).as_bytes())?;
        responses(&mut stream, 1)?;
        if at % 3 == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    // Puma 5.6 may close a kept connection after its tenth request if other clients wait.
    let mut stream = server.connect()?;
    // Pipelined.
    let three: Vec<String> = (0..3).map(|_| next()).map(|(kind, name)| get(kind, &name)).collect();
    stream.write_all(three.concat().as_bytes())?;
    responses(&mut stream, 3)?;
    // A slow client: the head arrives in pieces.
    for _ in 0..2 {
        let (kind, name) = next();
        for piece in get(kind, &name).as_bytes().chunks(17) {
            stream.write_all(piece)?;
            std::thread::sleep(Duration::from_millis(1));
        }
        responses(&mut stream, 1)?;
    }
    // With a body, which arrives later.
    for _ in 0..2 {
        let (kind, name) = next();
        let body = format!("{SECRET}BODY{name}");
        let head =
            format!("POST /{kind}/{name} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes())?;
        std::thread::sleep(Duration::from_millis(3));
        stream.write_all(body.as_bytes())?;
        responses(&mut stream, 1)?;
    }
    // One request per connection.
    for _ in 0..5 {
        let (kind, name) = next();
        let mut stream = server.connect()?;
        let text = get(kind, &name).replace("Host: x\r\n", "Host: x\r\nConnection: close\r\n");
        stream.write_all(text.as_bytes())?;
        responses(&mut stream, 1)?;
    }
    Ok(names)
}

/// Misbehaving clients: none of these is a request that the application answers. Returns the number of those that the server itself refuses.
fn hostile(server: &Server) -> Result<usize> {
    let mut refused = 0;
    for garbage in [&b"\0\xff\x1b[2J HTTP/1.1\r\n\r\n"[..], b"GET /\x1b]0;x HTTP/1.1\r\n\r\n"] {
        let mut stream = server.connect()?;
        stream.write_all(garbage)?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let status = answer.get(8..13).unwrap_or_default();
        ensure!(status == b" 400 ", "{}", String::from_utf8_lossy(&answer));
        refused += 1;
    }
    server.connect()?.write_all(b"GET")?;
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(20_000));
    let _refused_midway = server.connect()?.write_all(long.as_bytes());
    refused += 1;
    for _ in 0..30 {
        drop(server.connect()?);
    }
    // Disconnected before the response.
    server.connect()?.write_all(get("slow", "abandoned").as_bytes())?;
    Ok(refused)
}

fn by_name(report: &Report) -> HashMap<&str, &RequestLine> {
    let named =
        report.requests.iter().filter_map(|line| Some((line.path.as_deref()?.rsplit('/').next()?, line)));
    named.collect()
}

/// Checks that every line is true.
fn all_true(report: &Report, truths: &HashMap<String, Truth>) -> Result<()> {
    let mut seen = std::collections::HashSet::new();
    for line in &report.requests {
        let name = line.path.as_deref().and_then(|path| path.rsplit('/').next()).unwrap_or_default();
        let Some(truth) = truths.get(name) else {
            // The application was not called: the server itself refuses what it cannot parse.
            ensure!(matches!(line.status, None | Some(400)), "{line:?}");
            continue;
        };
        ensure!(seen.insert(name), "{name} is there twice");
        ensure!(line.tid == truth.tid && line.minor_faults.is_some(), "{line:?} {truth:?}");
        let end_ns = line.begin_ns + line.duration_ns.context("no duration")?;
        ensure!(line.begin_ns <= truth.begin_ns && truth.end_ns <= end_ns, "{line:?} {truth:?}");
        ensure!(line.method.as_deref() == Some(&truth.method), "{line:?} {truth:?}");
        ensure!(name == "abandoned" || line.status == Some(truth.status), "{line:?} {truth:?}");
    }
    let by_id: HashMap<u64, &RequestLine> = report.requests.iter().map(|line| (line.id, line)).collect();
    ensure!(by_id.len() == report.requests.len(), "an id is there twice");
    let lost = report.ledger.as_ref().context("no ledger")?.user["lost_records"].as_u64() > Some(0);
    for gc in &report.gcs {
        let begin_ns = match gc.pauses.first() {
            Some(pause) => pause.begin_ns,
            // Its records are among the lost ones.
            None if lost => continue,
            None => bail!("a cycle without pauses: {gc:?}"),
        };
        let line = gc.request.and_then(|id| by_id.get(&id));
        if let Some(line) = line {
            let end_ns = line.begin_ns + line.duration_ns.unwrap_or(u64::MAX - line.begin_ns);
            ensure!(line.tid == gc.tid, "{gc:?} {line:?}");
            ensure!((line.begin_ns..=end_ns).contains(&begin_ns), "{gc:?} {line:?}");
        }
        for (name, truth) in truths {
            if truth.tid == gc.tid && (truth.begin_ns..truth.end_ns).contains(&begin_ns) {
                let path = line.map(|line| line.path.as_deref().unwrap_or_default());
                ensure!(
                    path.is_none_or(|path| path.ends_with(name.as_str())),
                    "{gc:?} is of {name}: {line:?}"
                );
            }
        }
    }
    Ok(())
}

/// GC of a request's own thread and of other threads together covers every pause in its time, as reported with the cycles.
fn pauses_add_up(report: &Report) -> Result<()> {
    let outside = report.ledger.as_ref().and_then(|ledger| ledger.user["pauses_outside"].as_u64());
    for line in &report.requests {
        let Some(ns) = line.duration_ns else { continue };
        let (begin_ns, end_ns) = (line.begin_ns, line.begin_ns + ns);
        let pauses = report.gcs_of(line.pid).flat_map(|gc| &gc.pauses);
        let part = |from: u64, ns: u64| (from + ns).min(end_ns).saturating_sub(from.max(begin_ns));
        let parts: Vec<u64> =
            pauses.map(|pause| part(pause.begin_ns, pause.ns)).filter(|&part| part > 0).collect();
        let sum = line.gc_own_ns.zip(line.gc_other_ns).map(|(own, other)| own + other);
        let count = line.gc_own_pauses.zip(line.gc_other_pauses).map(|(own, other)| u64::from(own + other));
        let (sum, count) = (sum.context("unknown")?, count.context("unknown")?);
        let (sum_of, count_of) = (parts.iter().sum::<u64>(), parts.len() as u64);
        // Pauses of a cycle that started before tracing are in no cycle.
        let equal = sum == sum_of && count == count_of;
        let more = outside > Some(0) && sum >= sum_of && count >= count_of;
        ensure!(equal || more, "{line:?} has {count_of} pauses, {sum_of} ns");
        ensure!(line.gc_own_ns == line.gc_ns, "{line:?}");
    }
    Ok(())
}

fn watch(server: &Server, more: &[&str]) -> Result<Gctrace> {
    let pid = server.process.pid().to_string();
    let args = ["--pid", &pid, "--requests"];
    Invocation::jsonl(args.iter().chain(more))?.start_ready()
}

/// Keep-alive, pipelined, slow and closing clients, concurrently and twice: every request is reported once and correctly, and so is
/// every collection in it. Nothing from query, headers and bodies is exported.
#[test]
fn every_request_is_there_and_true() -> Result<()> {
    let live = Live::beside_others()?;
    for ruby in Puma::rubies()? {
        every_request(&live, &ruby).with_context(|| format!("Ruby {} ({})", ruby.version(), ruby.label()))?;
    }
    Ok(())
}

fn every_request(live: &Live, ruby: &Ruby) -> Result<()> {
    let server = Server::start_on(live, ruby)?;
    let gctrace = watch(&server, &[])?;
    let (mut answered, mut refused) = (Vec::new(), 0);
    for round in 0..2 {
        let names: Result<Vec<Vec<String>>> = std::thread::scope(|scope| {
            let server = &server;
            let clients: Vec<_> =
                (0..4).map(|at| scope.spawn(move || client(server, round * 4 + at))).collect();
            clients.into_iter().map(|client| client.join().expect("a client panicked")).collect()
        });
        answered.extend(names?.concat());
        refused += hostile(&server)?;
    }
    gctrace.wait_requests(answered.len())?;
    // The abandoned request may still be served.
    std::thread::sleep(Duration::from_millis(300));
    let (report, finished) = gctrace.stop_by(Signal::INT)?;
    ledger::check_lossless(&report)?;
    ensure!(!finished.stdout.join("\n").contains(SECRET), "a secret came out");
    let mut truths = server.truths()?;
    truths.retain(|name, _| name != "abandoned");
    let refusals = report.requests.iter().filter(|line| line.status == Some(400)).count();
    ensure!(refusals <= refused, "{refusals} refusals of {refused}");
    ensure!(answered.len() == 8 * 22 && truths.len() >= answered.len(), "{} answered", answered.len());
    all_true(&report, &truths)?;
    let lines = by_name(&report);
    for name in &answered {
        ensure!(lines.contains_key(name.as_str()), "{name} is not there");
    }
    // Each collection within a request is attributed to one (which one was compared above), and they add up.
    let mut inside = 0;
    for gc in &report.gcs {
        let begin_ns = gc.pauses[0].begin_ns;
        let is_in = |truth: &Truth| truth.tid == gc.tid && (truth.begin_ns..truth.end_ns).contains(&begin_ns);
        if truths.values().any(is_in) {
            inside += 1;
            ensure!(gc.request.is_some(), "{gc:?} is of no request");
        }
    }
    ensure!(inside >= 30, "only {inside} collections in requests");
    let started: u64 = report.requests.iter().map(|line| u64::from(line.gcs.unwrap_or_default())).sum();
    ensure!(report.requests.iter().all(|line| line.gcs.is_some() && line.gc_ns.is_some()), "unknown GC");
    pauses_add_up(&report)?;
    let named = report.gcs.iter().filter(|gc| gc.request.is_some()).count() as u64;
    ensure!(started == named, "{started} collections by requests, {named} with one");
    server.process.signal(Signal::TERM)?;
    server.0.process.finish(PATIENCE)?;
    Ok(())
}

/// A connection that was handed over is closed by another thread, and its descriptor number is reused by the next connection: a request there is a
/// new one, even if its bytes come late, so that the thread that takes it did not read them.
#[test]
fn a_number_of_a_connection_that_was_handed_over() -> Result<()> {
    let live = Live::begin()?;
    Puma::rubies()?.iter().try_for_each(|ruby| settled(|| reuses_a_number(&live, ruby)))
}

fn reuses_a_number(live: &Live, ruby: &Ruby) -> Result<()> {
    let server = Server::start_on(live, ruby)?;
    let gctrace = watch(&server, &[])?;
    let mut answered = Vec::new();
    for at in 0..12 {
        let mut handed_over = server.connect()?;
        handed_over.write_all(get("hijack", "handed-over").as_bytes())?;
        handed_over.read_to_end(&mut Vec::new())?;
        std::thread::sleep(Duration::from_millis(30));
        let mut stream = server.connect()?;
        for second in [false, true] {
            std::thread::sleep(Duration::from_millis(30));
            answered.push(name(at * 2 + usize::from(second)));
            stream.write_all(get("plain", &answered[answered.len() - 1]).as_bytes())?;
            responses(&mut stream, 1)?;
        }
    }
    gctrace.wait_request(&answered[answered.len() - 1])?;
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    let truths = server.truths()?;
    all_true(&report, &truths)?;
    let lines = by_name(&report);
    for name in &answered {
        let found = lines.get(name.as_str()).with_context(|| format!("{name} is not there"))?;
        let truth = &truths[name];
        ensure_times!(truth.begin_ns - found.begin_ns < 20_000_000, "begins too early: {found:?} {truth:?}");
    }
    Ok(())
}

/// Puma 6 and later send a file with `sendfile(2)`, which takes as long as the client does.
#[test]
fn files() -> Result<()> {
    let live = Live::begin()?;
    Puma::rubies()?.iter().try_for_each(|ruby| settled(|| sends_a_file(&live, ruby)))
}

fn sends_a_file(live: &Live, ruby: &Ruby) -> Result<()> {
    const PAUSE: Duration = Duration::from_millis(100);
    let server = Server::start_on(live, ruby)?;
    let gctrace = watch(&server, &[])?;
    let mut stream = server.connect()?;
    stream.write_all(get("file", &name(0)).as_bytes())?;
    let mut buffer = vec![0; 1 << 16];
    let mut there = stream.read(&mut buffer)?;
    std::thread::sleep(PAUSE);
    while there < 32 << 20 {
        let read = stream.read(&mut buffer)?;
        ensure!(read > 0, "closed after {there} bytes");
        there += read;
    }
    gctrace.wait_requests(1)?;
    let report = gctrace.stop()?;
    let [request] = &report.requests[..] else { bail!("{:?}", report.requests) };
    let (pause_ns, last_ns) = (PAUSE.as_nanos() as u64, request.last_byte_ns.unwrap_or_default());
    ensure!(request.status == Some(200), "{} {request:?}", ruby.label());
    // The kernel's buffers take the first part at once.
    ensure_times!(request.first_byte_ns < Some(pause_ns), "{} {request:?}", ruby.label());
    ensure!(last_ns >= pause_ns && Some(last_ns) <= request.duration_ns, "{} {request:?}", ruby.label());
    Ok(())
}

/// Lost records in the middle make requests unknown, but none wrong.
#[test]
fn lost_records_make_nothing_wrong() -> Result<()> {
    let live = Live::beside_others()?;
    let server = Server::start(&live, "0")?;
    let gctrace = watch(&server, &["--request-ring", "16KiB"])?;
    let mut stream = server.connect()?;
    // Meanwhile the ring is not read.
    gctrace.signal(Signal::STOP)?;
    for at in 0..20 {
        let names: Vec<String> = (0..20).map(|of| get("plain", &name(at * 20 + of))).collect();
        stream.write_all(names.concat().as_bytes())?;
        responses(&mut stream, 20)?;
    }
    gctrace.signal(Signal::CONT)?;
    for at in 400..410 {
        stream.write_all(get("gc", &name(at)).as_bytes())?;
        responses(&mut stream, 1)?;
    }
    let report = gctrace.stop()?;
    let counted = |name: &str| report.ledger.as_ref().and_then(|ledger| ledger.kernel[name].as_u64());
    let lost = counted("request_ring_full").context("no counter")?;
    ensure!(lost > 0, "nothing was lost");
    // The client has the last response before its thread is free again.
    let open = report.ledger.as_ref().and_then(|ledger| ledger.user["requests_open"].as_u64());
    let lines = report.requests.len() as u64;
    ensure!(
        open <= Some(1) && counted("requests") == open.map(|open| lines + lost + open),
        "{:?} are not {lines}, {lost} lost and {open:?} open",
        counted("requests")
    );
    all_true(&report, &server.truths()?)
}

/// Lost GC records make the GC figures of requests that were in progress unknown, but none too low. Earlier and later
/// requests keep theirs. Each of these requests collects at least once.
#[test]
fn lost_gc_records_make_no_figure_too_low() -> Result<()> {
    let live = Live::beside_others()?;
    let server = Server::start(&live, "0")?;
    let gctrace = watch(&server, &["--gc-ring", "16KiB"])?;
    let mut stream = server.connect()?;
    let mut one = |at: usize| -> Result<()> {
        stream.write_all(get("gc", &name(at)).as_bytes())?;
        responses(&mut stream, 1)?;
        Ok(())
    };
    for at in 0..3 {
        one(at)?;
        gctrace.wait_requests(at + 1)?;
    }
    // Meanwhile the ring is not read; no later record shows the gap when the last of these requests are reported.
    gctrace.signal(Signal::STOP)?;
    (3..60).try_for_each(&mut one)?;
    gctrace.signal(Signal::CONT)?;
    gctrace.wait_requests(60)?;
    for at in 60..63 {
        one(at)?;
        gctrace.wait_requests(at + 1)?;
    }
    let report = gctrace.stop()?;
    ledger::check(&report)?;
    all_true(&report, &server.truths()?)?;
    let lines = by_name(&report);
    let mut unknown = 0;
    for at in 0..63 {
        let name = name(at);
        let request = lines.get(name.as_str()).with_context(|| format!("{name} is not there"))?;
        ensure!(request.gcs.is_some() == request.gc_ns.is_some(), "{request:?}");
        // With one client, no other thread has requests. If the own figure is unknown, that of other threads is unknown, too.
        ensure!(request.gcs.is_some() || request.gc_other_ns.is_none(), "{request:?}");
        let known = request.gcs.is_some();
        ensure!(known || (3..=60).contains(&at), "request {at} lost nothing: {request:?}");
        ensure!(!known || (request.gcs >= Some(1) && request.gc_ns > Some(0)), "too low: {request:?}");
        unknown += usize::from(!known);
    }
    ensure!(unknown > 20, "{unknown} of 57 are unknown");
    Ok(())
}

/// A process that execs another server keeps only its pid and its descriptor numbers: earlier connections, whose close was
/// not seen, never count as requests of the new program.
#[test]
fn another_program_in_the_same_process() -> Result<()> {
    let live = Live::beside_others()?;
    let server = Server::start(&live, "0")?;
    let gctrace = watch(&server, &[])?;
    let mut connections: Vec<TcpStream> = (0..4).map(|_| server.connect()).collect::<Result<_>>()?;
    let mut names = (0..).map(name);
    let mut round = |connections: &mut [TcpStream]| -> Result<Vec<String>> {
        let mut answered = Vec::new();
        for stream in connections {
            let name = names.next().context("a name")?;
            stream.write_all(get("plain", &name).as_bytes())?;
            responses(stream, 1)?;
            answered.push(name);
        }
        Ok(answered)
    };
    round(&mut connections)?;
    round(&mut connections)?;
    gctrace.wait_requests(8)?;
    // gctrace sees the new program late, when its first connections already exist.
    gctrace.signal(Signal::STOP)?;
    server.process.signal(Signal::WINCH)?;
    for stream in &mut connections {
        ensure!(matches!(stream.read(&mut [0; 64]), Ok(0) | Err(_)), "an answer without a request");
    }
    // The listening socket is closed last, some time before the new program opens its own.
    let since = Instant::now();
    while server.connect().is_ok() {
        ensure!(since.elapsed() < PATIENCE, "the old socket still listens");
    }
    server.wait_until_it_listens()?;
    let mut connections: Vec<TcpStream> = (0..4).map(|_| server.connect()).collect::<Result<_>>()?;
    round(&mut connections)?;
    gctrace.signal(Signal::CONT)?;
    let (since, mut of_the_new) = (Instant::now(), Vec::new());
    loop {
        of_the_new.extend(round(&mut connections)?);
        let lines = gctrace.stdout_so_far().join("\n");
        if of_the_new.iter().filter(|name| lines.contains(&format!("/{name}\""))).count() >= 8 {
            break;
        }
        ensure!(since.elapsed() < PATIENCE, "no request of the new program is seen");
        std::thread::sleep(Duration::from_millis(50));
    }
    let report = gctrace.stop()?;
    all_true(&report, &server.truths()?)
}

/// Sends these requests, each on a new connection, from four clients. Returns their names.
fn singles(server: &Server, numbers: std::ops::Range<usize>) -> Result<Vec<String>> {
    let names: Vec<String> = numbers.map(name).collect();
    std::thread::scope(|scope| {
        let clients: Vec<_> = names
            .chunks(names.len().div_ceil(4))
            .map(|names| {
                scope.spawn(move || {
                    names.iter().try_for_each(|name| -> Result<()> {
                        let mut stream = server.connect()?;
                        let text = get("gc", name).replace("Host: x", "Host: x\r\nConnection: close");
                        stream.write_all(text.as_bytes())?;
                        responses(&mut stream, 1)
                    })
                })
            })
            .collect();
        clients.into_iter().try_for_each(|client| client.join().expect("a client panicked"))
    })?;
    Ok(names)
}

/// The workers of a cluster are servers, too, each with its own connections with the same descriptor numbers.
#[test]
fn workers_of_a_cluster() -> Result<()> {
    let live = Live::beside_others()?;
    let server = Server::start(&live, "2")?;
    // Both workers have answered, so both exist.
    let tids = |server: &Server| -> Result<std::collections::HashSet<u32>> {
        let truths = server.truths().unwrap_or_default();
        truths.values().map(|truth| process_of(truth.tid)).collect()
    };
    let (since, mut number) = (Instant::now(), 4000);
    while tids(&server)?.len() < 2 {
        ensure!(since.elapsed() < PATIENCE, "one worker does not answer");
        singles(&server, number..number + 4)?;
        number += 4;
    }
    let gctrace = watch(&server, &[])?;
    let names = singles(&server, 0..80)?;
    gctrace.wait_requests(names.len())?;
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    all_true(&report, &server.truths()?)?;
    let lines = by_name(&report);
    ensure!(names.iter().all(|name| lines.contains_key(name.as_str())), "{} of {}", lines.len(), names.len());
    let workers: std::collections::HashSet<u32> = report.requests.iter().map(|line| line.pid).collect();
    ensure!(workers.len() == 2, "{workers:?}");
    Ok(())
}

/// The process of a thread.
fn process_of(tid: u32) -> Result<u32> {
    let status = std::fs::read_to_string(format!("/proc/{tid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("Tgid:")).context("no Tgid")?;
    Ok(line.trim().parse()?)
}
