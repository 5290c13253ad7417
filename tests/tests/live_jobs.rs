//! Jobs of a Sidekiq that log their own truth: each is found, on the thread that ran it, and no collection is attributed to another one
//! than the one that started it.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::ledger;
use gctrace_tests::live::Live;
use gctrace_tests::report::{Report, RequestLine};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::sidekiq::{Redis, Sidekiq, Truth};
use rustix::process::Signal;

/// Text in arguments and errors, which must never be exported.
const SECRET: &str = "SECRET";
/// How much longer than in its own `perform` a job may have been, nanoseconds: Sidekiq's own work, and waits for the GVL in it.
const MOST_BESIDE_NS: u64 = 1_500_000_000;
/// The same of half of all jobs.
const MEDIAN_BESIDE_NS: u64 = 100_000_000;

type Truths = HashMap<String, Vec<Truth>>;

/// With each Ruby that has a Sidekiq: 6 on 3.1, 7 on 3.3.
fn each(test: impl Fn(&Live, &Ruby) -> Result<()>) -> Result<()> {
    let live = Live::begin()?;
    let rubies: Vec<Ruby> = Ruby::all()?.into_iter().filter(Sidekiq::is_there).collect();
    ensure!(!rubies.is_empty(), "no Ruby has a Sidekiq: run `cargo xtask setup --for test`");
    for ruby in rubies {
        println!("Ruby {} ({})", ruby.version(), ruby.label());
        test(&live, &ruby).with_context(|| format!("Ruby {} ({})", ruby.version(), ruby.label()))?;
    }
    Ok(())
}

/// For how long a thread waits before it asks again, with some more.
const ASKS_AGAIN: Duration = Duration::from_millis(2600);

fn watch(sidekiq: &Sidekiq, more: &[&str]) -> Result<Gctrace> {
    let pid = sidekiq.process.pid().to_string();
    let args = ["--pid", &pid, "--requests"];
    let gctrace = Invocation::jsonl(args.iter().chain(more))?.start_ready()?;
    // What a thread gets that had asked before is not seen.
    std::thread::sleep(ASKS_AGAIN);
    Ok(gctrace)
}

/// The run that a line is about.
fn truth_of<'a>(line: &RequestLine, truths: &'a Truths) -> Result<&'a Truth> {
    let jid = line.jid.as_ref().with_context(|| format!("no jid: {line:?}"))?;
    let runs = truths.get(jid).with_context(|| format!("no such job: {line:?}"))?;
    // A job that has failed may be run again.
    let next = runs.iter().filter(|truth| truth.begin_ns >= line.begin_ns).min_by_key(|truth| truth.begin_ns);
    next.with_context(|| format!("not run: {line:?} {runs:?}"))
}

/// Every line is true. Returns what the jobs took beside their own work, nanoseconds, in order.
fn all_true(report: &Report, truths: &Truths) -> Result<Vec<u64>> {
    let mut seen = HashSet::new();
    let mut beside = Vec::new();
    for line in &report.requests {
        let truth = truth_of(line, truths)?;
        ensure!(seen.insert((&truth.jid, truth.begin_ns)), "{truth:?} is there twice");
        ensure!(line.kind == "job" && line.method.is_none() && line.status.is_none(), "{line:?}");
        ensure!(line.tid == truth.tid && line.path.as_deref() == Some(&truth.class), "{line:?} {truth:?}");
        let queue = if truth.class.starts_with("Shop::") { "low" } else { "default" };
        ensure!(line.queue.as_deref() == Some(queue) && line.queue_ns.is_none(), "{line:?}");
        let latency = line.ts - line.enqueued_at.context("not enqueued")?;
        ensure!((-0.01..120.0).contains(&latency), "{latency} s: {line:?}");
        if let Some(ns) = line.duration_ns {
            let end_ns = line.begin_ns + ns;
            ensure!(truth.end_ns <= end_ns, "{line:?} {truth:?}");
            let more = ns - (truth.end_ns - truth.begin_ns);
            ensure!(more < MOST_BESIDE_NS, "{more} ns longer: {line:?} {truth:?}");
            beside.push(more);
        }
    }
    let by_id: HashMap<u64, &RequestLine> = report.requests.iter().map(|line| (line.id, line)).collect();
    ensure!(by_id.len() == report.requests.len(), "an id is there twice");
    for gc in &report.gcs {
        let begin_ns = gc.pauses.first().with_context(|| format!("a cycle without pauses: {gc:?}"))?.begin_ns;
        let line = gc.request.and_then(|id| by_id.get(&id));
        if let Some(line) = line {
            let end_ns = line.duration_ns.map_or(u64::MAX, |ns| line.begin_ns + ns);
            ensure!(line.tid == gc.tid && (line.begin_ns..=end_ns).contains(&begin_ns), "{gc:?} {line:?}");
        }
        for truth in truths.values().flatten() {
            if truth.tid == gc.tid && (truth.begin_ns..truth.end_ns).contains(&begin_ns) {
                let other = line.is_some_and(|line| line.jid.as_ref() != Some(&truth.jid));
                ensure!(!other, "{gc:?} is of {truth:?}: {line:?}");
            }
        }
    }
    beside.sort_unstable();
    Ok(beside)
}

/// Collections in the runs themselves; each has its job.
fn all_attributed(report: &Report, truths: &Truths) -> Result<usize> {
    let mut inside = 0;
    for truth in truths.values().flatten() {
        let own: Vec<_> = report
            .gcs
            .iter()
            .filter(|gc| gc.tid == truth.tid)
            .filter(|gc| (truth.begin_ns..truth.end_ns).contains(&gc.pauses[0].begin_ns))
            .collect();
        ensure!(own.len() as u64 <= truth.gcs, "{} of {truth:?}", own.len());
        let without = own.iter().filter(|gc| gc.request.is_none()).count();
        ensure!(without == 0, "{without} of {} have no job: {truth:?}", own.len());
        inside += own.len();
    }
    Ok(inside)
}

/// Short and long arguments, two queues, five at a time, an empty queue in between, and jobs that raise: every job is reported once and
/// correctly, and so is every collection in it. Nothing of arguments and errors is exported.
#[test]
fn every_job_is_there_and_true() -> Result<()> {
    each(|live, ruby| {
        let redis = Redis::start(live)?;
        let sidekiq = Sidekiq::start(live, ruby, &redis)?;
        // Every thread has its connection.
        sidekiq.push(&["Shop::WaitJob=20"])?;
        sidekiq.wait(20)?;
        let gctrace = watch(&sidekiq, &["--gvl"])?;
        let before = sidekiq.truths()?;
        for round in 1..=2 {
            sidekiq.push(&["HardJob=24", "Shop::WaitJob=24", "BadJob=6"])?;
            sidekiq.wait(20 + round * 54)?;
        }
        // Native threads of jobs that have raised end, up to 3.2 after some seconds.
        gctrace.wait_requests(108)?;
        let (report, finished) = gctrace.stop_by(Signal::INT)?;
        ledger::check_lossless(&report)?;
        let text = [finished.stdout, finished.stderr].concat().join("\n");
        ensure!(!text.contains(SECRET), "a secret came out");
        let mut truths = sidekiq.truths()?;
        truths.retain(|jid, _| !before.contains_key(jid));
        let beside = all_true(&report, &truths)?;
        ensure!(report.requests.len() >= 108, "{} of 108", report.requests.len());
        let median = beside[beside.len() / 2];
        println!("beside: median {median} ns, most {:?} ns of {}", beside.last(), beside.len());
        ensure!(median < MEDIAN_BESIDE_NS, "{median} ns");
        let inside = all_attributed(&report, &truths)?;
        ensure!(inside >= 100, "only {inside} collections in jobs");
        let without = |class: &str, bad: bool| {
            let of = report.requests.iter().filter(|line| (line.path.as_deref() == Some(class)) == bad);
            of.filter(|line| line.duration_ns.is_none()).count()
        };
        ensure!(without("BadJob", false) == 0, "{} have no duration", without("BadJob", false));
        let threads_end = ruby.is_at_least(3, 3);
        ensure!(!threads_end || without("BadJob", true) == 0, "{} have none", without("BadJob", true));
        ensure!(threads_end || without("BadJob", true) >= 12, "an end that nobody knows");
        for line in report.requests.iter().filter(|line| line.duration_ns.is_some()) {
            ensure!(line.gcs.is_some() && line.gc_other_ns.is_some(), "{line:?}");
        }
        Ok(())
    })
}

/// Connections that break, and a Redis that is away for seconds: what of a job is not known is absent, and nothing is wrong.
#[test]
fn a_redis_that_goes_away() -> Result<()> {
    each(|live, ruby| {
        let mut redis = Redis::start(live)?;
        let sidekiq = Sidekiq::start(live, ruby, &redis)?;
        let gctrace = watch(&sidekiq, &[])?;
        sidekiq.push(&["HardJob=20", "Shop::WaitJob=20"])?;
        redis.disconnect_clients()?;
        sidekiq.wait(20)?;
        sidekiq.push(&["LongJob=3"])?;
        let running = sidekiq.truths()?.values().map(Vec::len).sum::<usize>();
        std::thread::sleep(Duration::from_secs(1));
        redis.kill();
        // They end while it is away.
        std::thread::sleep(Duration::from_millis(4500));
        redis.restart()?;
        sidekiq.wait(running + 3)?;
        sidekiq.push(&["HardJob=20"])?;
        sidekiq.wait(running + 3 + 20)?;
        std::thread::sleep(Duration::from_millis(500));
        let report = gctrace.stop()?;
        let truths = sidekiq.truths()?;
        let beside = all_true(&report, &truths)?;
        let all: usize = truths.values().map(Vec::len).sum();
        println!("{} of {all} jobs, {} with duration", report.requests.len(), beside.len());
        // A job may be lost with its connection, and one that is running has no line.
        ensure!(report.requests.len() * 10 >= all * 9, "{} of {all}", report.requests.len());
        ensure!(report.requests.iter().filter(|line| line.path.as_deref() == Some("LongJob")).count() == 3);
        ensure!(beside.len() >= 20, "only {} have a duration", beside.len());
        Ok(())
    })
}

/// Lost records make jobs unknown, and none wrong.
#[test]
fn lost_records_make_nothing_wrong() -> Result<()> {
    each(|live, ruby| {
        let redis = Redis::start(live)?;
        let sidekiq = Sidekiq::start(live, ruby, &redis)?;
        let gctrace = watch(&sidekiq, &["--request-ring", "16KiB"])?;
        // The ring is not read meanwhile.
        gctrace.signal(Signal::STOP)?;
        sidekiq.push(&["Shop::WaitJob=60"])?;
        sidekiq.wait(60)?;
        gctrace.signal(Signal::CONT)?;
        sidekiq.push(&["HardJob=20"])?;
        sidekiq.wait(80)?;
        std::thread::sleep(Duration::from_millis(500));
        let report = gctrace.stop()?;
        let lost = report.ledger.as_ref().and_then(|ledger| ledger.kernel["request_ring_full"].as_u64());
        ensure!(lost > Some(0), "nothing was lost");
        all_true(&report, &sidekiq.truths()?)?;
        Ok(())
    })
}

/// Samples of the method that only one class runs are of that class, or of none that is known.
#[test]
fn samples_have_their_class() -> Result<()> {
    each(|live, ruby| {
        let redis = Redis::start(live)?;
        let sidekiq = Sidekiq::start(live, ruby, &redis)?;
        let folded = live.path("jobs.folded").to_string_lossy().into_owned();
        let files = ["--rate", "499", "--stack-root", "endpoint", "--folded", &folded];
        let gctrace = watch(&sidekiq, &files)?;
        sidekiq.push(&["HardJob=60", "Shop::WaitJob=30"])?;
        sidekiq.wait(90)?;
        std::thread::sleep(Duration::from_millis(500));
        gctrace.stop()?;
        let text = std::fs::read_to_string(&folded)?;
        let (mut right, mut unknown) = (0, 0);
        for line in text.lines() {
            let (stack, count) = line.rsplit_once(' ').context("a line without a count")?;
            let count: u64 = count.parse()?;
            let (root, frames) = stack.split_once(';').unwrap_or((stack, ""));
            for class in ["HardJob", "Shop::WaitJob"] {
                if !frames.contains(&format!("{class}#work")) {
                    continue;
                }
                match root {
                    _ if root == class => right += count,
                    "(unknown)" | "(no request)" => unknown += count,
                    _ => ensure!(false, "{line}"),
                }
            }
        }
        println!("{right} right, {unknown} unknown");
        ensure!(right > 0 && unknown * 20 <= right, "{right} right, {unknown} unknown");
        ensure!(!text.contains(SECRET), "a secret came out");
        Ok(())
    })
}
