//! Jobs of a Sidekiq that log what really happened: each is found, on the thread that ran it, and each collection is attributed to the job that
//! started it, or to none.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::live::Live;
use gctrace_tests::report::{Report, RequestLine};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::sidekiq::{CONCURRENCY, MARKER, Redis, Sidekiq, Truth};
use gctrace_tests::timing::settled;
use gctrace_tests::traceparent::specified;
use gctrace_tests::tunemygc::Set;
use gctrace_tests::{PATIENCE, ensure_times, ledger};
use rustix::process::Signal;
use serde_json::Value;

/// Text in arguments and errors, which must never be exported.
const SECRET: &str = "SECRET";

type Truths = HashMap<String, Vec<Truth>>;

/// Runs a test with each Ruby that has a Sidekiq: Sidekiq 6 on 3.1, 7 on 3.3.
fn each(live: &Live, test: impl Fn(&Live, &Ruby) -> Result<()>) -> Result<()> {
    let rubies: Vec<Ruby> = Ruby::all()?.into_iter().filter(Sidekiq::is_there).collect();
    ensure!(!rubies.is_empty(), "no Ruby has a Sidekiq: run `cargo xtask setup --for test`");
    for ruby in rubies {
        println!("Ruby {} ({})", ruby.version(), ruby.label());
        test(live, &ruby).with_context(|| format!("Ruby {} ({})", ruby.version(), ruby.label()))?;
    }
    Ok(())
}

fn watch(sidekiq: &Sidekiq, more: &[&str]) -> Result<Gctrace> {
    let pid = sidekiq.process.pid().to_string();
    let args = ["--pid", &pid, "--requests"];
    let gctrace = Invocation::jsonl(args.iter().chain(more))?.start_ready()?;
    // A reply that a thread was already waiting for is not seen. After this run, each thread has got a job, and has asked again.
    sidekiq.run(&[])?;
    Ok(gctrace)
}

/// Waits until gctrace has reported this many jobs, not counting markers and earlier jobs.
fn wait_jobs(gctrace: &Gctrace, count: usize, before: &Truths) -> Result<()> {
    let is_new = |line: &str| {
        line.starts_with(r#"{"type":"request""#)
            && serde_json::from_str::<Value>(line).is_ok_and(|line| {
                line["path"] != MARKER && line["jid"].as_str().is_none_or(|jid| !before.contains_key(jid))
            })
    };
    let since = Instant::now();
    loop {
        let there = gctrace.stdout_so_far().iter().filter(|line| is_new(line)).count();
        if there >= count {
            return Ok(());
        }
        ensure!(since.elapsed() < PATIENCE, "{there} of {count} jobs");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The run of a job that a line is about.
fn truth_of<'a>(line: &RequestLine, truths: &'a Truths) -> Result<&'a Truth> {
    let jid = line.jid.as_ref().with_context(|| format!("no jid: {line:?}"))?;
    let runs = truths.get(jid).with_context(|| format!("no such job: {line:?}"))?;
    // A job that failed may run again.
    let next = runs.iter().filter(|truth| truth.begin_ns >= line.begin_ns).min_by_key(|truth| truth.begin_ns);
    next.with_context(|| format!("not run: {line:?} {runs:?}"))
}

/// Checks that every line is true: its thread had ended the previous job, and did not start the next one meanwhile. Returns the sorted
/// overhead of the jobs beside their own work, nanoseconds.
fn all_true(report: &Report, truths: &Truths) -> Result<Vec<u64>> {
    let mut of_thread: HashMap<u32, Vec<&Truth>> = HashMap::new();
    for truth in truths.values().flatten() {
        of_thread.entry(truth.tid).or_default().push(truth);
    }
    let mut seen = HashSet::new();
    let mut beside = Vec::new();
    for line in &report.requests {
        let truth = truth_of(line, truths)?;
        ensure!(seen.insert((&truth.jid, truth.begin_ns)), "{truth:?} is there twice");
        ensure!(line.kind == "job" && line.method.is_none() && line.status.is_none(), "{line:?}");
        ensure!(line.tid == truth.tid && line.path.as_deref() == Some(&truth.class), "{line:?} {truth:?}");
        let queue = if truth.class.starts_with("Shop::") { "low" } else { "default" };
        ensure!(line.queue.as_deref() == Some(queue) && line.queue_ns.is_none(), "{line:?}");
        // For a job with long arguments, a part is missing, which is counted.
        let seen = truth.traceparent.as_deref();
        let trace = line.trace_id.clone().zip(line.parent_span_id.clone());
        ensure!(trace.is_none() || trace == seen.and_then(specified), "{line:?} {truth:?}");
        ensure!(line.trace_origin.as_deref() == trace.as_ref().map(|_| "job"), "{line:?}");
        let sampled = seen.filter(|_| trace.is_some()).map(|seen| seen.as_bytes()[54] == b'1');
        ensure!(line.trace_sampled == sampled, "{line:?} {truth:?}");
        let latency = line.ts - line.enqueued_at.context("not enqueued")?;
        // Both clocks are of this host.
        let latency_ns = line.latency_ns.with_context(|| format!("no latency: {line:?}"))?;
        ensure!((latency_ns as f64 / 1e9 - latency).abs() < 1e-3, "{latency} s: {line:?}");
        // Sidekiq's own work, with its waits for the GVL, may take any time, but a thread runs one job at a time.
        let all = of_thread.get(&truth.tid).into_iter().flatten().copied();
        let others: Vec<&Truth> = all.filter(|other| other.begin_ns != truth.begin_ns).collect();
        let before =
            others.iter().filter(|other| other.begin_ns < truth.begin_ns).max_by_key(|other| other.end_ns);
        ensure!(
            before.is_none_or(|before| before.end_ns <= line.begin_ns),
            "{line:?} {truth:?} after {before:?}"
        );
        if let Some(ns) = line.duration_ns {
            let end_ns = line.begin_ns + ns;
            ensure!(truth.end_ns <= end_ns, "{line:?} {truth:?}");
            let next = others
                .iter()
                .filter(|other| other.begin_ns > truth.begin_ns)
                .min_by_key(|other| other.begin_ns);
            ensure!(next.is_none_or(|next| end_ns <= next.begin_ns), "{line:?} {truth:?} before {next:?}");
            beside.push(ns - (truth.end_ns - truth.begin_ns));
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

/// Number of collections within the runs themselves. Checks that each has its job.
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

/// Short and long arguments, two queues, five jobs at a time, an empty queue in between, and jobs that raise: every job is reported once and
/// correctly, and so is every collection in it. Nothing from arguments and errors is exported.
fn every_job_is_there_and_true(live: &Live, ruby: &Ruby, sidekiq: &Sidekiq) -> Result<()> {
    // After this run, every thread has its connection.
    sidekiq.run(&["Shop::WaitJob=20"])?;
    let sets = live.path(&format!("sets-{}", ruby.label()));
    let gctrace = watch(sidekiq, &["--gvl", "--alloc", "--tunemygc", &sets.to_string_lossy()])?;
    let before = sidekiq.truths()?;
    for _ in 0..2 {
        sidekiq.run(&["HardJob=24", "Shop::WaitJob=24", "BadJob=6"])?;
    }
    // Native threads of jobs that raised end; up to 3.2 only after some seconds.
    wait_jobs(&gctrace, 108, &before)?;
    let (report, finished) = gctrace.stop_by(Signal::INT)?;
    ledger::check_lossless(&report)?;
    let text = [finished.stdout, finished.stderr].concat().join("\n");
    ensure!(!text.contains(SECRET), "a secret came out");
    let mut truths = sidekiq.truths()?;
    let beside = all_true(&report, &truths)?;
    truths.retain(|jid, _| !before.contains_key(jid));
    let lines: Vec<&RequestLine> = report
        .requests
        .iter()
        .filter(|line| line.path.as_deref() != Some(MARKER))
        .filter(|line| line.jid.as_ref().is_some_and(|jid| truths.contains_key(jid)))
        .collect();
    ensure!(lines.len() >= 108, "{} of 108", lines.len());
    let median = beside.get(beside.len() / 2);
    println!("beside: median {median:?} ns, most {:?} ns of {}", beside.last(), beside.len());
    let inside = all_attributed(&report, &truths)?;
    ensure!(inside >= 100, "only {inside} collections in jobs");
    traces_are_known_or_counted(&report, &truths)?;
    let without = |class: &str, bad: bool| {
        let of = lines.iter().filter(|line| (line.path.as_deref() == Some(class)) == bad);
        of.filter(|line| line.duration_ns.is_none()).count()
    };
    ensure!(without("BadJob", false) == 0, "{} have no duration", without("BadJob", false));
    let threads_end = ruby.is_at_least(3, 3);
    ensure!(!threads_end || without("BadJob", true) == 0, "{} have none", without("BadJob", true));
    ensure!(threads_end || without("BadJob", true) >= 12, "an end that nobody knows");
    // A job creates two strings in each of 60 000 rounds; five jobs at a time use each other's pages.
    let hard = lines.iter().filter(|line| line.path.as_deref() == Some("HardJob"));
    let taken: Vec<u64> = hard.filter_map(|line| line.alloc_objects).collect();
    let (sum, count) = (taken.iter().sum::<u64>(), taken.len() as u64);
    println!("{sum} objects of {count} jobs");
    ensure!(count >= 40 && sum.abs_diff(count * 120_000) <= count * 12_000, "{sum} of {count}");
    for line in &lines {
        let ended = line.duration_ns.is_some();
        ensure!(!ended || (line.gcs.is_some() && line.gc_other_ns.is_some()), "{line:?}");
        ensure!(line.minor_faults.is_some() == ended && line.major_faults.is_some() == ended, "{line:?}");
        // A thread that has ended no longer has the memory of its process.
        let there = ended && line.path.as_deref() != Some("BadJob");
        ensure!(line.rss_growth_bytes.is_some() == there, "{line:?}");
    }
    units_are_jobs(&report, &sets)
}

/// Every trace that a job contains is reported, or counted: as invalid, or as possibly in the missing part of a long job.
fn traces_are_known_or_counted(report: &Report, truths: &Truths) -> Result<()> {
    let (mut known, mut invalid, mut deep) = (0, 0, 0);
    for line in &report.requests {
        let Some(runs) = line.jid.as_ref().and_then(|jid| truths.get(jid)) else { continue };
        let seen = runs.first().and_then(|truth| truth.traceparent.as_deref());
        known += u64::from(line.trace_id.is_some());
        invalid += u64::from(seen.is_some_and(|seen| specified(seen).is_none()));
        deep += u64::from(line.trace_id.is_none() && seen.is_some_and(|seen| specified(seen).is_some()));
    }
    let counted = |name| ledger::user(report, name);
    let (is_invalid, unread) = (counted("job_traceparent_invalid")?, counted("job_traceparent_unread")?);
    println!("{known} jobs with a trace, {invalid} invalid, {deep} deep; counted {is_invalid} and {unread}");
    // Earlier jobs, and jobs without the member, are counted, too.
    ensure!(known >= 40 && invalid >= 10 && is_invalid >= invalid && unread >= deep, "too few");
    // OpenTelemetry's member comes after the arguments, in the part of a long job that is kept.
    ensure!(deep == 0, "{deep} are too deep");
    Ok(())
}

/// Lost records make jobs unknown, but none wrong.
fn lost_records_make_nothing_wrong(sidekiq: &Sidekiq) -> Result<()> {
    let gctrace = watch(sidekiq, &["--request-ring", "16KiB"])?;
    // Meanwhile the ring is not read.
    gctrace.signal(Signal::STOP)?;
    sidekiq.run(&["Shop::WaitJob=60"])?;
    gctrace.signal(Signal::CONT)?;
    sidekiq.run(&["HardJob=20"])?;
    let report = gctrace.stop()?;
    let lost = report.ledger.as_ref().and_then(|ledger| ledger.kernel["request_ring_full"].as_u64());
    ensure!(lost > Some(0), "nothing was lost");
    all_true(&report, &sidekiq.truths()?)?;
    Ok(())
}

/// Samples of a method that only one class runs are attributed to that class, or to an unknown one.
fn samples_have_their_class(live: &Live, sidekiq: &Sidekiq) -> Result<()> {
    let folded = live.path("jobs.folded").to_string_lossy().into_owned();
    let files = ["--rate", "499", "--stack-root", "endpoint", "--folded", &folded];
    let gctrace = watch(sidekiq, &files)?;
    // The next requests of the threads end these jobs.
    sidekiq.run(&["HardJob=60", "Shop::WaitJob=30"])?;
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
}

/// One Sidekiq, watched three times. Jobs that raise come last, because Sidekiq retries them after some time.
#[test]
fn jobs() -> Result<()> {
    let live = Live::beside_others()?;
    each(&live, |live, ruby| {
        let redis = Redis::start(live)?;
        let sidekiq = Sidekiq::start(live, ruby, &redis)?;
        lost_records_make_nothing_wrong(&sidekiq).context("lost records")?;
        samples_have_their_class(live, &sidekiq).context("samples")?;
        every_job_is_there_and_true(live, ruby, &sidekiq).context("every job")
    })
}

/// Jobs are units of work in sample sets: one for each job whose end is known, with its class, and with more objects at its end.
fn units_are_jobs(report: &Report, sets: &Path) -> Result<()> {
    let sets = Set::read_dir(sets)?;
    let [set] = &sets[..] else { anyhow::bail!("{} sets", sets.len()) };
    ensure!(!set.text.contains(SECRET), "a secret came out");
    let objects = set.keys.iter().position(|key| key == "total_allocated_objects").context("no key")?;
    let (mut open, mut units) = (HashMap::new(), 0);
    for sample in &set.samples {
        let class = sample.meta["path"].as_str();
        match sample.event.as_str() {
            "PROCESSING_STARTED" => {
                ensure!(open.insert(sample.thread, (class, sample.stat[objects])).is_none(), "{sample:?}");
            }
            "PROCESSING_ENDED" => {
                let (begun, before) = open.remove(&sample.thread).context("an end without a begin")?;
                let known = ["HardJob", "Shop::WaitJob", MARKER].map(Some).contains(&class);
                ensure!(known && begun == class && before < sample.stat[objects], "{sample:?}");
                units += 1;
            }
            _ => {}
        }
    }
    let (jobs, without) = (report.requests.len() as u64, ledger::user(report, "requests_without_states")?);
    println!("{units} units of {jobs} jobs, {without} without states");
    ensure!(open.is_empty() && units + without == jobs && units >= 48, "{units} units, {without} without");
    Ok(())
}

/// Connections break, and Redis is away for seconds: unknown facts about a job are absent, and nothing is wrong.
#[test]
fn a_redis_that_goes_away() -> Result<()> {
    let live = Live::beside_others()?;
    each(&live, |live, ruby| {
        let mut redis = Redis::start(live)?;
        let sidekiq = Sidekiq::start(live, ruby, &redis)?;
        let gctrace = watch(&sidekiq, &[])?;
        let before = sidekiq.truths()?;
        sidekiq.push(&["HardJob=20", "Shop::WaitJob=20"])?;
        redis.disconnect_clients()?;
        // Jobs that Redis had handed out on a broken connection are lost; the other ones have ended after this.
        sidekiq.run(&[])?;
        sidekiq.push(&["LongJob=3"])?;
        sidekiq.wait_begun(3)?;
        redis.kill();
        // The jobs end while Redis is away, and Redis is away for longer than Sidekiq waits before it asks again.
        sidekiq.release()?;
        sidekiq.wait_ended("LongJob", 3)?;
        std::thread::sleep(Duration::from_millis(1500));
        redis.restart()?;
        sidekiq.run(&["HardJob=20"])?;
        let report = gctrace.stop()?;
        let truths = sidekiq.truths()?;
        all_true(&report, &truths)?;
        let counted = |truth: &&Truth| truth.class != MARKER && !before.contains_key(&truth.jid);
        let all = truths.values().flatten().filter(counted).count();
        let lines: Vec<&RequestLine> =
            report.requests.iter().filter(|line| line.path.as_deref() != Some(MARKER)).collect();
        let known = lines.iter().filter(|line| line.duration_ns.is_some()).count();
        println!("{} of {all} jobs, {known} with duration", lines.len());
        // Jobs that were in progress, twice, may be missing. Other jobs may not, because each thread asked for another job after them.
        ensure!(lines.len() + 2 * CONCURRENCY >= all, "{} of {all}", lines.len());
        ensure!(lines.iter().filter(|line| line.path.as_deref() == Some("LongJob")).count() == 3);
        ensure!(known >= 20, "only {known} have a duration");
        Ok(())
    })
}

/// A Sidekiq that no longer accepts jobs: a thread that is still waiting for one gets it, and puts it back. Nothing ran, so nothing is
/// reported, but it is counted.
#[test]
fn put_back() -> Result<()> {
    /// Lengths above and below the part of a reply that is kept.
    const ARGUMENTS: [usize; 2] = [2000, 10];
    let live = Live::beside_others()?;
    let with = |live: &Live, ruby: &Ruby, bytes: usize| {
        settled(|| {
            let redis = Redis::start(live)?;
            let mut sidekiq = Sidekiq::start(live, ruby, &redis)?;
            let gctrace = watch(&sidekiq, &[])?;
            let before = sidekiq.truths()?;
            sidekiq.process.signal(Signal::TSTP)?;
            let quiet = "no longer accepting new work";
            sidekiq.process.wait_stdout(PATIENCE, quiet, |line| line.contains(quiet))?;
            // Within the two seconds for which its threads wait.
            std::thread::sleep(Duration::from_millis(200));
            let job = serde_json::json!({
                "retry": true, "queue": "default", "class": "HardJob", "args": ["x".repeat(bytes)],
                "jid": "0123456789abcdef01234567", "created_at": 1.5, "enqueued_at": 1.5,
            });
            redis.enqueue("default", &job.to_string())?;
            let since = Instant::now();
            // Wait until its threads end.
            std::thread::sleep(Duration::from_millis(2500));
            let report = gctrace.stop()?;
            ensure!(
                redis.waiting("default")? == 1,
                "the job is not in its queue after {:?}",
                since.elapsed()
            );
            ensure!(sidekiq.truths()?.len() == before.len(), "it was run");
            let lines = report.requests.iter().filter(|line| line.path.as_deref() != Some(MARKER));
            ensure!(lines.clone().count() == 0, "{:?}", lines.collect::<Vec<_>>());
            let returned = ledger::user(&report, "jobs_returned")?;
            // A thread that was late has not waited any more.
            ensure_times!(returned > 0, "no thread has put it back");
            println!("{returned} times");
            ledger::check_lossless(&report)
        })
    };
    each(&live, |live, ruby| ARGUMENTS.into_iter().try_for_each(|bytes| with(live, ruby, bytes)))
}
