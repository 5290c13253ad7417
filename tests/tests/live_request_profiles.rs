//! Samples of threads that serve requests belong to the endpoint: each path of a Puma runs its own method.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::puma::Puma;
use gctrace_tests::report::Report;
use gctrace_tests::{PATIENCE, ledger, pprof, stack_log};

const METHODS: [(&str, &str); 3] =
    [("only_alpha", "GET /alpha/:id"), ("only_beta", "GET /beta/:id"), ("only_gamma", "GET /gamma/:id")];

/// Requests three paths in turn, as long as the load goes on.
fn client(server: &Puma, first: usize, load: &Load) -> Result<()> {
    let mut stream: Option<TcpStream> = None;
    let mut number = first;
    while load.goes_on() {
        let path = ["alpha", "beta", "gamma"][number % 3];
        // Some connections are closed after a request.
        let close = number.is_multiple_of(5);
        let how = if close { "close" } else { "keep-alive" };
        let text = format!("GET /{path}/{number} HTTP/1.1\r\nHost: x\r\nConnection: {how}\r\n\r\n");
        let mut connection = stream.take().map_or_else(|| server.connect(), Ok)?;
        connection.write_all(text.as_bytes())?;
        let (mut got, mut buffer) = (Vec::new(), [0; 1024]);
        while !got.ends_with(b"\r\n\r\nOK") {
            let read = connection.read(&mut buffer)?;
            ensure!(read > 0, "closed after {}", String::from_utf8_lossy(&got));
            got.extend_from_slice(&buffer[..read]);
        }
        stream = (!close).then_some(connection);
        number += 1;
        load.answers.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// Work of six clients that takes a number of seconds, and longer if they have fewer than a number of answers by then.
struct Load {
    begun: Instant,
    seconds: u64,
    least: usize,
    answers: AtomicUsize,
}

impl Load {
    fn goes_on(&self) -> bool {
        let elapsed = self.begun.elapsed();
        elapsed < Duration::from_secs(self.seconds)
            || (self.answers.load(Ordering::Relaxed) < self.least && elapsed < PATIENCE)
    }
}

fn load(server: &Puma, seconds: u64, least: usize) -> Result<()> {
    let load = &Load { begun: Instant::now(), seconds, least, answers: AtomicUsize::new(0) };
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..6).map(|first| scope.spawn(move || client(server, first, load))).collect();
        clients.into_iter().try_for_each(|client| client.join().expect("a client panicked"))
    })
}

/// Number of samples with the endpoint of their method, with an unknown one, and with another one.
#[derive(Debug, Default)]
struct Bound {
    right: u64,
    unknown: u64,
    wrong: u64,
}

impl Bound {
    fn add(&mut self, expected: &str, found: Option<&str>, count: u64) {
        match found {
            Some(found) if found == expected => self.right += count,
            None | Some("(unknown)") => self.unknown += count,
            Some(_) => self.wrong += count,
        }
    }

    /// Checks that none is wrong. A client may still wait for its response when tracing starts, and requests in progress are not seen.
    fn demand(&self, what: &str, least: u64) -> Result<()> {
        ensure!(self.wrong == 0 && self.right >= least, "{what}: {self:?}");
        ensure!(self.unknown * 20 <= self.right, "{what}: {self:?}");
        println!("{what}: {self:?}");
        Ok(())
    }
}

/// The endpoint of the only method in a stack that belongs to one path.
fn expected<'a>(mut names: impl Iterator<Item = &'a str>) -> Option<&'static str> {
    let of = |name: &str| METHODS.iter().find(|(method, _)| name.ends_with(method)).map(|(_, of)| *of);
    names.find_map(of)
}

fn profiled(live: &Live, more: &[&str]) -> Result<(Report, u32)> {
    let server = Puma::start(live, "methods.ru", "0")?;
    let pid = server.process.pid().to_string();
    let path = |name: &str| live.path(name).to_string_lossy().into_owned();
    let files =
        [("--pprof", path("run.pb.gz")), ("--folded", path("run.folded")), ("--stack-log", path("stacks"))];
    let files: Vec<&str> = files.iter().flat_map(|(flag, file)| [*flag, file.as_str()]).collect();
    let args = ["--pid", &pid, "--requests", "--rate", "499", "--stack-root", "endpoint"];
    let args = args.iter().chain(&files).chain(more);
    let gctrace = Invocation::jsonl(args)?.start_ready()?;
    load(&server, 6, 600)?;
    // Its last requests end and are reported.
    std::thread::sleep(Duration::from_millis(500));
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    Ok((report, server.process.pid()))
}

/// CPU samples, off-CPU time, collections, waits for the GVL and allocation of a method that only one path runs belong to that path, or to an unknown
/// one: in the stack log (by the number of the request), in pprof (by label) and in collapsed stacks (by root).
#[test]
fn samples_have_their_endpoint() -> Result<()> {
    let live = Live::beside_others()?;
    let gvl = ["--gvl", "--gvl-threshold", "0.01ms", "--gvl-budget", "100"];
    let (report, pid) = profiled(&live, &[&["--wall", "--alloc"][..], &gvl].concat())?;
    let by_id: HashMap<u64, String> =
        report.requests.iter().filter_map(|line| Some((line.id, line.endpoint()?))).collect();
    let (mut running, mut away) = (Bound::default(), Bound::default());
    for sample in stack_log::of_process(&live.path("stacks"), pid)? {
        let Some(expected) = expected(sample.stack.iter().map(|frame| frame.name.as_str())) else { continue };
        let found = sample.request.and_then(|id| by_id.get(&id)).map(String::as_str);
        let bound = if sample.state == "running" { &mut running } else { &mut away };
        bound.add(expected, found, 1);
    }
    running.demand("samples on a CPU", 500)?;
    away.demand("samples off the CPU", 500)?;

    let profile = pprof::Profile::open(&live.path("run.pb.gz"))?;
    for (name, least) in [
        ("cpu/nanoseconds", 1_000_000_000),
        ("wall/nanoseconds", 1_000_000_000),
        ("gc_pauses/count", 50),
        ("gvl_waits/count", 50),
        ("alloc_objects/count", 10_000),
    ] {
        let at = profile.types.iter().position(|known| known == name).with_context(|| name.to_owned())?;
        let mut bound = Bound::default();
        for sample in &profile.samples {
            let names = sample.stack.iter().map(|frame| frame.name.as_str());
            if let Some(expected) = expected(names) {
                bound.add(expected, sample.label("endpoint"), sample.values[at]);
            }
        }
        bound.demand(name, least)?;
    }

    let mut bound = Bound::default();
    for line in std::fs::read_to_string(live.path("run.folded"))?.lines() {
        let (stack, ns) = line.rsplit_once(' ').context("a line")?;
        let mut frames = stack.split(';');
        let root = frames.next().filter(|root| *root != "(no request)");
        let names = frames.map(|frame| frame.split(" (").next().unwrap_or_default());
        if let Some(expected) = expected(names) {
            bound.add(expected, root, ns.parse()?);
        }
    }
    bound.demand("collapsed stacks", 1_000_000_000)
}

/// `--endpoint` keeps only what belongs to the endpoint: its own method, and none of the others.
#[test]
fn only_one_endpoint() -> Result<()> {
    let live = Live::beside_others()?;
    let (report, _) = profiled(&live, &["--endpoint", "GET /beta"])?;
    let text = std::fs::read_to_string(live.path("run.folded"))?;
    let roots: Vec<&str> = text.lines().filter_map(|line| line.split(';').next()).collect();
    ensure!(!roots.is_empty() && roots.iter().all(|root| *root == "GET /beta/:id"), "{roots:?}");
    ensure!(text.contains("only_beta") && !text.contains("only_alpha") && !text.contains("only_gamma"));
    let counted = |name: &str| report.ledger.as_ref().and_then(|ledger| ledger.user[name].as_u64());
    let dropped = counted("profile_samples_other_endpoints").context("no counter")?;
    ensure!(dropped > 100, "{dropped} samples were dropped");
    Ok(())
}

/// Requests whose end is lost have no endpoint, and their samples do not get another request's. The ring is not read for a while.
#[test]
fn lost_ends_make_endpoints_unknown() -> Result<()> {
    let live = Live::beside_others()?;
    let server = Puma::start(&live, "methods.ru", "0")?;
    let pid = server.process.pid();
    let log = live.path("stacks").to_string_lossy().into_owned();
    let (pids, folded) = (pid.to_string(), live.path("run.folded").to_string_lossy().into_owned());
    let args =
        ["--pid", &pids, "--requests", "--rate", "199", "--request-ring", "16KiB", "--stack-log", &log];
    let more = ["--folded", &folded, "--stack-root", "endpoint"];
    let gctrace = Invocation::jsonl(args.iter().chain(&more))?.start_ready()?;
    load(&server, 1, 60)?;
    gctrace.signal(rustix::process::Signal::STOP)?;
    load(&server, 3, 300)?;
    gctrace.signal(rustix::process::Signal::CONT)?;
    load(&server, 1, 60)?;
    std::thread::sleep(Duration::from_millis(500));
    let report = gctrace.stop()?;
    let counted = |of: &serde_json::Map<String, serde_json::Value>, name: &str| of[name].as_u64();
    let account = report.ledger.as_ref().context("no ledger")?;
    ensure!(counted(&account.kernel, "request_ring_full") > Some(0), "no request was lost");
    let by_id: HashMap<u64, String> =
        report.requests.iter().filter_map(|line| Some((line.id, line.endpoint()?))).collect();
    let mut bound = Bound::default();
    for sample in stack_log::of_process(&live.path("stacks"), pid)? {
        if let Some(expected) = expected(sample.stack.iter().map(|frame| frame.name.as_str())) {
            let found = sample.request.and_then(|id| by_id.get(&id)).map(String::as_str);
            bound.add(expected, found, 1);
        }
    }
    println!("{bound:?}");
    ensure!(bound.wrong == 0 && bound.right > 50 && bound.unknown > 50, "{bound:?}");
    let unresolved = counted(&account.user, "profile_endpoints_unknown").context("no counter")?;
    ensure!(unresolved >= bound.unknown, "{unresolved} are counted, {bound:?}");
    let text = std::fs::read_to_string(&folded)?;
    ensure!(text.lines().any(|line| line.starts_with("(unknown);") && line.contains("only_alpha")), "{text}");
    Ok(())
}
