//! Other states of threads (on a CPU, waiting for one, blocked), compared with the kernel's accounting.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::Guarded;
use gctrace_tests::ensure_times;
use gctrace_tests::free_port;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::{Live, rubies_dir};
use gctrace_tests::report::{GvlSplitLine, GvlSumsLine, Report};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use gctrace_tests::timing::{settled, stolen_ns};
use gctrace_tests::{PATIENCE, ledger};
use serde::Deserialize;

/// Checks that two times differ by at most this percentage plus 10 ms.
fn near(what: &str, told: u64, true_ns: u64, percent: u64) -> Result<()> {
    let slack = true_ns * percent / 100 + 10_000_000;
    ensure_times!(told.abs_diff(true_ns) <= slack, "{what}: {told} ns told, {true_ns} ns true");
    Ok(())
}

/// Checks that the parts of a thread's time add up to its total, and that those of each GVL state add up to the time in that state.
fn adds_up(line: &GvlSumsLine) -> Result<GvlSplitLine> {
    let split = line.split.with_context(|| format!("no split of {line:?}"))?;
    let parts = split.all().sum();
    // A thread whose start was seen was in no state at first.
    ensure_times!(
        parts <= line.watched_ns + 100_000 && parts + 20_000_000 + line.watched_ns / 100 >= line.watched_ns,
        "parts are {parts} of {line:?}"
    );
    for (what, row, whole) in [
        ("wait", split.wait, Some(line.wait_ns)),
        ("hold", split.hold, line.hold_ns),
        ("away", split.away, line.away_ns),
    ] {
        let whole = whole.with_context(|| format!("no {what}"))?;
        // The process that does the counting can lose its CPU.
        let off = row.sum().abs_diff(whole);
        ensure_times!(
            off * 200 <= line.watched_ns + 400_000_000,
            "{what}: {} of {whole}: {line:?}",
            row.sum()
        );
    }
    Ok(split)
}

/// A computing thread runs with the GVL, a compressing thread runs without it, and a sleeping thread does not run. The times agree with
/// those of the kernel.
#[test]
fn parts_agree_with_the_kernel() -> Result<()> {
    #[derive(Deserialize)]
    struct Charged {
        cpu_ns: u64,
        delay_ns: Option<u64>,
    }
    let lock = Live::begin()?;
    let mut tried = 0;
    Ruby::each(|ruby| {
        let gctrace = Invocation::jsonl(["--all-ruby", "--gvl", "--gvl-budget", "100"])?.start_ready()?;
        let stolen = stolen_ns()?;
        let done = Script::unwitnessed(&lock, ruby, "gvl_split.rb")?.run()?;
        let stolen = stolen_ns()?.saturating_sub(stolen);
        let report = gctrace.stop()?;
        ledger::check_lossless(&report)?;
        let unseen = unseen(&report)?;
        let charged: BTreeMap<String, Charged> =
            serde_json::from_value(done.report.extra["threads"].clone())?;
        for (name, charged) in &charged {
            let mut lines =
                report.gvl_threads.iter().filter(|line| line.pid == done.pid && line.comm == *name);
            let line = lines.next().with_context(|| format!("no line of {name}"))?;
            if !ruby.tells_holds() {
                ensure!(line.split.is_none() && line.hold_ns.is_none(), "{line:?}");
                continue;
            }
            let split = adds_up(line)?;
            let all = split.all();
            // The kernel does not charge the time that a hypervisor takes.
            let cpu = charged.cpu_ns;
            ensure_times!(
                all.cpu_ns + 10_000_000 + cpu / 50 >= cpu
                    && all.cpu_ns <= cpu + cpu / 50 + stolen + 10_000_000,
                "{name}: {cpu} ns charged, {stolen} ns stolen: {line:?}"
            );
            // A kernel that hides switches also hides wake-ups: then it is unknown when a thread became runnable.
            if let Some(delay) = charged.delay_ns.filter(|_| unseen == 0) {
                let slack = 20_000_000 + delay / 20 + stolen;
                ensure_times!(
                    all.runnable_ns.abs_diff(delay) <= slack,
                    "{name}: {delay} ns delayed: {line:?}"
                );
            }
            let (part, whole) = match name.as_str() {
                "computes" => (split.hold.cpu_ns, all.cpu_ns),
                "presses" => (split.away.cpu_ns, all.cpu_ns),
                _ => (split.away.blocked_ns + split.wait.sum() + split.away.runnable_ns, line.watched_ns),
            };
            ensure_times!(part * 10 >= whole * 9, "{name}: {part} of {whole}: {line:?}");
        }
        let process = report.gvl_processes.iter().find(|line| line.pid == done.pid).context("no summary")?;
        if !ruby.tells_holds() {
            ensure!(process.gc_of_hold.is_none() && process.gc_pause_ns.is_some(), "{process:?}");
            return Ok(());
        }
        tried += 1;
        let share = process.gc_of_hold.context("no share of GC")?;
        let (pause, hold) = (process.gc_pause_ns.context("no pauses")?, process.hold_ns.context("no holds")?);
        ensure!((share - pause as f64 / hold as f64).abs() < 1e-9 && share < 1.0, "{process:?}");
        Ok(())
    })?;
    ensure!(tried > 0, "no Ruby shows how long a thread holds the GVL");
    Ok(())
}

/// By how much more the kernel charges a thread per switch to a CPU, compared with the switches that it reports (docs/gvl.md). Measured, not
/// explained.
const SWITCH_NS: u64 = 8_000;

/// Number of switches and wake-ups that the kernel did not report (the kernel of a sandbox does not report those of its own agent).
fn unseen(report: &Report) -> Result<u64> {
    let kernel = &report.ledger.as_ref().context("no ledger")?.kernel;
    kernel["gvl_switch_unseen"].as_u64().context("no count of unseen switches")
}

/// CPU time and delay of each thread in nanoseconds, and how often it got a CPU.
fn schedstats(pid: u32) -> Result<BTreeMap<u32, (u64, u64, u64)>> {
    let mut found = BTreeMap::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let path = task?.path();
        let text = std::fs::read_to_string(path.join("schedstat"))?;
        let mut words = text.split_whitespace().map(str::parse);
        let (Some(run), Some(delay), Some(times)) = (words.next(), words.next(), words.next()) else {
            continue;
        };
        let tid = path.file_name().and_then(|name| name.to_str()).context("no tid")?.parse()?;
        found.insert(tid, (run?, delay?, times?));
    }
    Ok(found)
}

/// For each thread of a server under load, waits for the GVL, CPU time, waits for a CPU and blocked time add up to its total time, and
/// CPU time and delay agree with those of the kernel.
#[test]
fn threads_of_puma() -> Result<()> {
    settled(compare_threads_of_puma)
}

fn compare_threads_of_puma() -> Result<()> {
    let _live = Live::begin()?;
    let port = free_port()?;
    let web = rubies_dir().join("web");
    let mut command = Command::new("puma");
    command.args(["-q", "-t", "5:5", "-b"]).arg(format!("tcp://127.0.0.1:{port}"));
    command.arg(web.join("threads.ru")).current_dir(&web).env("RACK_ENV", "production");
    let puma = Guarded::start("puma", &mut command)?;
    let since = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        ensure!(since.elapsed() < PATIENCE, "puma does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    let pid = puma.pid();
    let gctrace =
        Invocation::jsonl(["--pid", &pid.to_string(), "--gvl", "--gvl-budget", "100"])?.start_ready()?;
    let (before, stolen) = (schedstats(pid)?, stolen_ns()?);
    for path in ["cpu", "io"] {
        let mut wrk = Command::new("wrk");
        wrk.args(["-t1", "-c8", "-d2s", &format!("http://127.0.0.1:{port}/{path}")]);
        let output = wrk.output().context("cannot run wrk")?;
        ensure!(output.status.success(), "wrk: {}", String::from_utf8_lossy(&output.stderr));
    }
    let (after, stolen) = (schedstats(pid)?, stolen_ns()?.saturating_sub(stolen));
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    let unseen = unseen(&report)?;
    let workers: Vec<&GvlSumsLine> =
        report.gvl_threads.iter().filter(|line| line.comm.contains(" tp ")).collect();
    ensure!(workers.len() == 5, "{} of 5 threads: {:?}", workers.len(), report.gvl_threads);
    for line in workers {
        let split = adds_up(line)?;
        let tid = line.tid.context("no tid")?;
        let at =
            |stats: &BTreeMap<u32, (u64, u64, u64)>| stats.get(&tid).copied().context("a thread is gone");
        let (from, to) = (at(&before)?, at(&after)?);
        let parts = line.wait_ns
            + split.hold.cpu_ns
            + split.away.cpu_ns
            + split.hold.runnable_ns
            + split.away.runnable_ns
            + split.hold.blocked_ns
            + split.away.blocked_ns;
        near("all parts", parts, line.watched_ns, 3)?;
        let all = split.all();
        let cpu = to.0 - from.0;
        let switches = (to.2 - from.2) * SWITCH_NS;
        ensure_times!(
            all.cpu_ns + cpu * 3 / 100 + 10_000_000 + switches >= cpu
                && all.cpu_ns <= cpu + cpu * 3 / 100 + 10_000_000 + stolen,
            "{cpu} ns charged, {switches} ns of it for switches at most, {stolen} ns stolen: {line:?}"
        );
        let delay = to.1 - from.1;
        ensure_times!(
            unseen > 0 || all.runnable_ns.abs_diff(delay) <= delay * 3 / 100 + 20_000_000 + stolen,
            "{delay} ns delayed: {line:?}"
        );
        ensure_times!(line.wait_ns * 10 > line.watched_ns, "hardly any wait: {line:?}");
    }
    puma.signal(rustix::process::Signal::TERM)?;
    puma.finish(PATIENCE)?;
    Ok(())
}
