//! Page faults of requests, and the growth of their process, compared with what the application of a Puma reads in `/proc` by itself.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::ledger;
use gctrace_tests::live::Live;
use gctrace_tests::puma::Puma;
use gctrace_tests::ruby::Ruby;
use rustix::process::Signal;

/// What the application does to its memory, by the first part of the path, and by how many blocks it grows.
const KINDS: [(&str, i64); 5] = [("none", 0), ("touch", 1), ("other", 1), ("free", -2), ("none", 0)];
/// Size of a block, bytes.
const BLOCK: i64 = 40 << 20;
/// Rounds of these.
const ROUNDS: usize = 3;
/// Maximum number of page faults, and of new pages, outside of the application's work: the server reads and writes, the application reads `/proc`
/// and logs, and a thread that serves its first request uses new pages of its stack, its arena and of code. At most 22 were seen.
const AROUND: u64 = 64;
/// Before Linux 6.2 the pages of at most 64 faults of each other thread are not seen ([docs/memory.md]); the server has a dozen.
const UNSEEN: u64 = 64 * 12;
/// The first Linux in which threads do not cache their own changes of the counters.
const BY_CPU: (u32, u32) = (6, 2);

/// Major and minor version of this kernel.
fn kernel() -> Result<(u32, u32)> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
        anyhow::bail!("kernel {release:?}")
    };
    Ok((major, minor))
}

/// The application's own record of a request: its thread, and at begin and end the thread's page faults and the resident memory.
struct Truth {
    tid: u32,
    begin: [u64; 3],
    end: [u64; 3],
}

impl Truth {
    /// Minor and major page faults, and growth in bytes.
    fn between(&self) -> (u64, u64, i64) {
        let of = |at: usize| self.end[at] - self.begin[at];
        (of(0), of(1), (self.end[2].cast_signed() - self.begin[2].cast_signed()) * 1024)
    }
}

fn truths(server: &Puma) -> Result<HashMap<String, Truth>> {
    let text = std::fs::read_to_string(&server.truth)?;
    let truth = |line: &str| {
        let (name, rest) = line.split_once(' ').context("a name")?;
        let numbers = rest.split(' ').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
        let &[tid, ref moments @ ..] = &numbers[..] else { anyhow::bail!("line {line}") };
        let (begin, end) = moments.split_at_checked(3).with_context(|| format!("line {line}"))?;
        let tid = u32::try_from(tid)?;
        Ok((name.to_owned(), Truth { tid, begin: begin.try_into()?, end: end.try_into()? }))
    };
    text.lines().map(truth).collect()
}

fn ask(server: &Puma, kind: &str, name: &str) -> Result<()> {
    let mut stream = server.connect()?;
    let request = format!("GET /{kind}/{name} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut got = Vec::new();
    stream.read_to_end(&mut got)?;
    ensure!(got.ends_with(b"OK"), "{}", String::from_utf8_lossy(&got));
    Ok(())
}

/// Every request has the page faults of its thread, and the growth of its process, also if another thread causes it. A recording has the same.
#[test]
fn memory_of_requests() -> Result<()> {
    let live = Live::beside_others()?;
    for ruby in Puma::rubies()? {
        compare(&live, &ruby).with_context(|| ruby.label())?;
    }
    Ok(())
}

fn compare(live: &Live, ruby: &Ruby) -> Result<()> {
    let server = Puma::start_on(live, ruby, "memory.ru")?;
    let pid = server.process.pid().to_string();
    let recording = live.path(&format!("{}.gctrace", ruby.label()));
    let recording = recording.to_str().context("the path")?;
    let args = ["--pid", &pid, "--requests", "--alloc", "--record", recording];
    let gctrace = Invocation::jsonl(args)?.start_ready()?;
    let mut done = 0;
    for round in 0..ROUNDS {
        for (number, (kind, _)) in KINDS.into_iter().enumerate() {
            let name: String = [round, number].into_iter().map(|at| char::from(b'g' + at as u8)).collect();
            ask(&server, kind, &name)?;
            done += 1;
            // The client has its response before the request ends.
            gctrace.wait_requests(done)?;
        }
    }
    let (report, finished) = gctrace.stop_by(Signal::INT)?;
    ledger::check_lossless(&report)?;
    ensure!(report.requests.len() == done, "{} of {done} requests", report.requests.len());
    let truths = truths(&server)?;
    let unseen = if kernel()? < BY_CPU { UNSEEN } else { 0 };
    let (mut most_faults, mut most_pages) = (0, 0);
    for line in &report.requests {
        let path = line.path.as_deref().context("no path")?;
        let (kind, name) = path.trim_start_matches('/').split_once('/').context("path")?;
        let truth = truths.get(name).with_context(|| format!("{line:?}"))?;
        let (minor, major, grew) = truth.between();
        let place = || format!("{minor} and {major} faults, grew by {grew}: {line:?}");
        ensure!(line.tid == truth.tid, "thread {}: {}", truth.tid, place());
        let faults = line.minor_faults.zip(line.major_faults).with_context(place)?;
        ensure!(faults.0 >= minor && faults.1 >= major, "too few: {}", place());
        let more = faults.0 + faults.1 - minor - major;
        ensure!(more <= AROUND, "too many: {}", place());
        let growth = line.rss_growth_bytes.with_context(place)?;
        let pages = growth.abs_diff(grew) / 4096;
        ensure!(pages <= AROUND + unseen, "{pages} pages: {}", place());
        // The application did what it was told to.
        let (_, blocks) = KINDS.into_iter().find(|(name, _)| *name == kind).context("kind")?;
        ensure!(grew.abs_diff(blocks * BLOCK) / 4096 <= AROUND, "{}", place());
        ensure!(kind == "touch" || minor <= AROUND, "not its own: {}", place());
        (most_faults, most_pages) = (most_faults.max(more), most_pages.max(pages));
    }
    println!("{}: at most {most_faults} faults and {most_pages} pages off", ruby.label());

    let again = Invocation::new(["report", recording, "--format", "jsonl"])?.run()?;
    let lines = |text: &[String]| {
        let of = |line: &&String| line.starts_with(r#"{"type":"request""#);
        text.iter().filter(of).cloned().collect::<Vec<_>>()
    };
    ensure!(lines(&again.stdout) == lines(&finished.stdout), "the recording has other requests");
    let slow = Invocation::new(["report", recording, "--slower-than", "1us"])?.run()?.stdout;
    let about = |sign: &str| {
        let begin = format!("  memory: RSS of the process {sign}");
        slow.iter().filter(|line| line.starts_with(&begin) && line.contains(" page fault")).count()
    };
    // The others are not worth a line.
    ensure!((about("+"), about("-")) == (2 * ROUNDS, ROUNDS), "{}", slow.join("\n"));
    let condition = format!("request.rss_growth < -{BLOCK} or request.minor_faults > 100000");
    let shrank =
        ["report", recording, "--format", "jsonl", "--fields", "endpoint,rss_growth_bytes", "--where"];
    let shrank = Invocation::new(shrank.into_iter().chain([condition.as_str()]))?.run()?;
    let freed = lines(&shrank.stdout);
    ensure!(freed.len() == ROUNDS && freed.iter().all(|line| line.contains("/free/")), "{freed:?}");
    Ok(())
}

/// Without `--alloc`, page faults are known, and growth is not.
#[test]
fn page_faults_alone() -> Result<()> {
    let live = Live::beside_others()?;
    let server = Puma::start(&live, "memory.ru", "0")?;
    let pid = server.process.pid().to_string();
    let gctrace = Invocation::jsonl(["--pid", &pid, "--requests"])?.start_ready()?;
    ask(&server, "touch", "a")?;
    gctrace.wait_requests(1)?;
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    let [request] = &report.requests[..] else { anyhow::bail!("{} requests", report.requests.len()) };
    let (minor, major, _) = truths(&server)?.get("a").context("not served")?.between();
    ensure!(
        request.minor_faults >= Some(minor) && request.major_faults >= Some(major),
        "{minor} {major} {request:?}"
    );
    ensure!(request.rss_growth_bytes.is_none(), "{request:?}");
    Ok(())
}
