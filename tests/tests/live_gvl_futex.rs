//! Waits for the GVL detected only by futexes, without a probe in the program.

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::ensure_times;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::lock_step::LockStep;
use gctrace_tests::report::{GvlWaitLine, Report};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Done, Script};
use gctrace_tests::{ledger, witness};
use serde::Deserialize;
use serde::de::IgnoredAny;

const ARGS: [&str; 6] = ["--all-ruby", "--gvl=futex", "--gvl-threshold", "0.000001ms", "--gvl-budget", "100"];

/// Runs a script under gctrace, with every wait reported.
fn watch(live: &Live, ruby: &Ruby, script: &str) -> Result<(Report, Done)> {
    let gctrace = Invocation::jsonl(ARGS)?.start_ready()?;
    let script = Script::unwitnessed(live, ruby, script)?.seeing_proc();
    let done = script.env("GCTRACE_TEST_GVL_WITNESS", witness::gvl_extension(ruby)?).run()?;
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    for line in report.gvl_threads.iter().chain(&report.gvl_processes) {
        ensure!(line.mode == "futex" && line.hold_ns.is_none() && line.split.is_none(), "{line:?}");
        let in_histogram: u64 = line.wait_histogram.iter().map(|(_, count)| count).sum();
        ensure!(in_histogram == line.waits && line.wait_ns <= line.watched_ns, "{line:?}");
    }
    for wait in &report.gvl_waits {
        ensure!(wait.blocked_by.is_none(), "a holder that cannot have been seen: {wait:?}");
    }
    Ok((report, done))
}

/// For a series without tables, it is unknown where threads wait: gctrace says so, and reports nothing.
fn refused(live: &Live, ruby: &Ruby) -> Result<()> {
    let gctrace = Invocation::jsonl(ARGS)?.start_ready()?;
    let script = Script::unwitnessed(live, ruby, "gvl_lockstep.rb")?.seeing_proc();
    script.env("GCTRACE_TEST_GVL_WITNESS", witness::gvl_extension(ruby)?).run()?;
    let (report, finished) = gctrace.stop_by(rustix::process::Signal::INT)?;
    ledger::check_lossless(&report)?;
    let (said, version) = (finished.errors(), ruby.version());
    let reason = format!("its GVL is not watched: the layout of rb_thread_t in CRuby {version} is not known");
    ensure!(said.contains(&reason), "{said}");
    ensure!(report.gvl_waits.is_empty() && report.gvl_threads.is_empty(), "{:?}", report.gvl_threads);
    Ok(())
}

/// While several threads compute, all but one wait for the GVL: each time in which a thread could not read the clock although
/// others did is a wait, and no other time is.
#[test]
fn waits_add_up_in_lock_step() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        if !ruby.has_tables() {
            return refused(&live, ruby);
        }
        let (report, done) = watch(&live, ruby, "gvl_lockstep.rb")?;
        LockStep::of(&done)?.agrees(ruby, done.pid, &report.gvl_waits).context(format!("{:?}", report.ledger))
    })
}

/// An event as the witness saw it: event, time, native thread, Ruby thread, how often that native thread had been preempted, and
/// how long it had been runnable without a CPU.
#[derive(Clone, Debug, Deserialize)]
struct Event(String, u64, u32, u64, IgnoredAny, u64);

/// Each long wait in CRuby's own thread events that a thread started by itself is reported, nothing else is reported as a
/// wait, and their durations agree.
#[test]
fn waits_agree_with_the_thread_events() -> Result<()> {
    let live = Live::begin()?;
    let mut tried = 0;
    Ruby::each(|ruby| {
        if !ruby.is_at_least(3, 3) || !ruby.has_tables() {
            return Ok(());
        }
        tried += 1;
        let (report, done) = watch(&live, ruby, "gvl_events.rb")?;
        let events: Vec<Event> = serde_json::from_value(done.report.extra["gvl"].clone())?;
        let (first, last) = (events.first().context("no events")?.1, events.last().context("no events")?.1);
        // Native thread, begin, end, whether the thread itself started the wait, and in that case how long of it the thread waited for a CPU.
        let mut ready = std::collections::HashMap::new();
        let mut witnessed: Vec<(u32, u64, u64, bool, u64)> = Vec::new();
        for Event(event, ns, tid, thread, _, delay) in &events {
            if event == "ready" {
                ready.insert(*thread, (*ns, *tid, *delay));
            } else if event == "resumed"
                && let Some((begin, by, before)) = ready.remove(thread)
            {
                witnessed.push((*tid, begin, *ns, by == *tid, delay.saturating_sub(before)));
            }
        }
        let told: Vec<&GvlWaitLine> = report
            .gvl_waits
            .iter()
            .filter(|wait| {
                wait.pid == done.pid && wait.begin_ns >= first && wait.begin_ns + wait.wait_ns <= last
            })
            .collect();
        let inside = |wait: &GvlWaitLine, &(tid, begin, end, ..): &(u32, u64, u64, bool, u64)| {
            wait.tid == tid && begin <= wait.begin_ns && wait.begin_ns + wait.wait_ns <= end
        };
        let invented = told.iter().filter(|wait| !witnessed.iter().any(|one| inside(wait, one))).count();
        ensure!(invented == 0, "{invented} of {} waits did not happen", told.len());
        // Longer than any acquisition of an uncontended GVL.
        let long: Vec<_> = witnessed.iter().filter(|one| one.3 && one.2 - one.1 > 5_000_000).collect();
        ensure_times!(long.len() >= 5, "only {} long waits", long.len());
        let (mut told_ns, mut true_ns, mut delay_ns) = (0, 0, 0);
        for one in &long {
            let of = told.iter().filter(|wait| inside(wait, one)).collect::<Vec<_>>();
            ensure_times!(of.len() == 1, "{} waits are reported for {one:?}", of.len());
            told_ns += of[0].wait_ns;
            true_ns += one.2 - one.1;
            delay_ns += one.4;
        }
        // A wait ends with the hand-over; the witness sees that only when the thread has a CPU.
        let shortest =
            (true_ns - true_ns / 50).saturating_sub(delay_ns + done.report.extra_u64("stolen_ns")?);
        ensure_times!(
            told_ns <= true_ns && told_ns >= shortest,
            "{told_ns} ns of long waits told, {shortest} to {true_ns} ns true"
        );
        Ok(())
    })?;
    ensure!(tried > 0, "no Ruby from 3.3 on has thread events and tables");
    Ok(())
}
