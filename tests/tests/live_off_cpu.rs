//! Which of the many off-CPU times get a stack, and what is reported about the other ones.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::ensure_times;
use gctrace_tests::ledger;
use gctrace_tests::live::Live;
use gctrace_tests::report::Report;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Done, Script};
use gctrace_tests::stack_log::{self, Sample};
use serde_json::Value;

/// The frame of an off-CPU time whose stack was not taken.
const LIMITED: &str = "(no stack: sampling limit)";

fn has_stack(sample: &Sample) -> bool {
    sample.frames_of(LIMITED) == 0
}

fn watch(live: &Live, ruby: &Ruby, args: &[&str], limit: &str) -> Result<(Vec<Sample>, Report, Done)> {
    let path = live.path(&format!("waits-{}-{limit}.stacks", ruby.label()));
    let words = [
        "--wall".as_ref(),
        "--off-cpu-stacks".as_ref(),
        limit.as_ref(),
        "--stack-log".as_ref(),
        path.as_os_str(),
    ];
    let script = args.iter().fold(Script::unwitnessed(live, ruby, "waits.rb")?, Script::arg);
    let (mut done, gctrace) = Script::under([script], words)?;
    let (report, _) = gctrace.done()?;
    let done = done.pop().context("one script")?;
    let mut off = stack_log::of_process(&path, done.pid)?;
    off.retain(|sample| sample.state != "running");
    Ok((off, report, done))
}

fn kernel(report: &Report, name: &str) -> Result<u64> {
    let ledger = report.ledger.as_ref().context("no ledger line")?;
    ledger.kernel.get(name).and_then(Value::as_u64).with_context(|| format!("no counter {name}"))
}

/// Whether the kernel reports when a switch of threads is complete (Linux 6.15).
fn tells_returns() -> Result<bool> {
    let btf = std::fs::read("/sys/kernel/btf/vmlinux")?;
    Ok(btf.split(|byte| *byte == 0).any(|text| text == b"btf_trace_sched_exit_tp"))
}

/// Threads that sleep briefly thousands of times per second cost no stacks, and take none from those that sleep for long.
#[test]
fn short_times_cost_no_stack() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::first_and_last(|ruby| {
        // A limit above what two CPUs can reach in waits of a millisecond and more.
        let (samples, report, done) = watch(&live, ruby, &["10", "15", "3"], "20000")?;
        let wanted = kernel(&report, "off_cpu_wanted")?;
        if tells_returns()? {
            let told = kernel(&report, "off_cpu_submitted")?;
            let short = kernel(&report, "off_cpu_short")?;
            // The program's own count of brief sleeps. If a CPU was taken away in one, it was longer, whoever measured it.
            let brief = done.report.extra_u64("brief")?;
            ensure!(short > 1_000 && short >= brief, "only {short} short times of {brief}");
            ensure!(wanted == told, "{wanted} stacks wanted for {told} times that were reported");
            ensure!(kernel(&report, "off_cpu_shed")? == 0, "stacks were shed");
            ensure!(samples.iter().all(has_stack), "times without a stack: {samples:?}");
            ensure!(ledger::user(&report, "off_cpu_ns_without_stack")? == 0, "time without a stack");
        } else {
            ensure!(wanted == kernel(&report, "switch_outs")?, "{wanted} stacks wanted");
        }
        Ok(())
    })
}

/// If there are more off-CPU times than stacks, each has the same chance: the first ones are not preferred. The time without a stack is
/// reported, and counted.
#[test]
fn the_choice_is_fair() -> Result<()> {
    const THREADS: usize = 30;
    const TIMES: f64 = 40.0;
    let live = Live::begin()?;
    Ruby::first_and_last(|ruby| {
        let (samples, report, _) = watch(&live, ruby, &["30", "40", "0"], "50")?;
        let without: u64 =
            samples.iter().filter(|sample| !has_stack(sample)).map(|sample| sample.wall_ns).sum();
        let counted = ledger::user(&report, "off_cpu_ns_without_stack")?;
        ensure!(without > 0 && without <= counted, "{without} ns without a stack, {counted} counted");
        // Number of long off-CPU times with a stack, by thread id, which is the order of the threads.
        let mut threads: BTreeMap<u32, u32> = BTreeMap::new();
        for sample in samples.iter().filter(|sample| sample.wall_ns > 40_000_000) {
            *threads.entry(sample.tid).or_default() += u32::from(has_stack(sample));
        }
        // The main thread, which waits for all other threads, comes first.
        let stacks: Vec<f64> = threads.values().skip(1).map(|stacks| f64::from(*stacks)).collect();
        ensure!(stacks.len() >= THREADS, "{} threads of {THREADS}: {threads:?}", stacks.len());
        let third = THREADS / 3;
        let (first, last) =
            (stacks[..third].iter().sum::<f64>(), stacks[THREADS - third..THREADS].iter().sum::<f64>());
        let all = third as f64 * TIMES;
        ensure!(
            first + last > 0.0 && first + last < 1.5 * all,
            "{first} and {last} stacks of {all} times each"
        );
        // Five standard deviations of the difference of two binomial counts.
        let chance = (first + last) / (2.0 * all);
        let error = 5.0 * (2.0 * all * chance * (1.0 - chance)).sqrt();
        ensure_times!((first - last).abs() <= error, "{first} and {last} stacks, ± {error:.0}: {threads:?}");
        Ok(())
    })
}
