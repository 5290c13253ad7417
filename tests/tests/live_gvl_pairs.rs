//! Which thread waited for which, however many threads started and ended before.

use std::ffi::OsString;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::ensure_times;
use gctrace_tests::gctrace::{Invocation, read};
use gctrace_tests::live::Live;
use gctrace_tests::report::GvlWho;
use gctrace_tests::ruby::Ruby;

/// More pairs of threads than the kernel side can hold at a time (16,384), as in a server that starts a thread for each request.
/// Then two threads compute and compete for the GVL.
const PROGRAM: &str = "
    600.times { 8.times.map { Thread.new { 2000.times { |i| i + 1 }; Thread.pass } }.each(&:join); sleep 0.002 }
    def compute(s)
      stop = Process.clock_gettime(Process::CLOCK_MONOTONIC) + s
      nil while Process.clock_gettime(Process::CLOCK_MONOTONIC) < stop
    end
    2.times.map { |i| Thread.new { Thread.current.name = \"late#{i}\"; compute(2) } }.each(&:join)
";

/// Threads that compete for the GVL wait for each other: the pair accounts for over 80 % of the waits of each. All pairs together do not
/// exceed the waits of the process.
#[test]
fn of_threads_after_many() -> Result<()> {
    let _live = Live::beside_others()?;
    Ruby::first_and_last(|ruby| {
        let mut args: Vec<OsString> =
            ["--gvl", "--gvl-budget", "100", "--format", "jsonl", "--"].map(Into::into).to_vec();
        args.extend(ruby.argv()?);
        args.extend(["-e".into(), PROGRAM.into()]);
        let report = read(&Invocation::new(args)?.run()?)?;
        let process = report.gvl_processes.first().context("no process")?;
        ensure!(process.blocked.len() > 1000, "only {} pairs", process.blocked.len());
        let known_ns: u64 = process.blocked.iter().map(|pair| pair.wait_ns).sum();
        ensure!(known_ns <= process.wait_ns, "{known_ns} of {} ns", process.wait_ns);
        for (waiter, holder) in [("late0", "late1"), ("late1", "late0")] {
            let of = |who: &Option<GvlWho>, name: &str| who.as_ref().is_some_and(|who| who.comm == name);
            let pair = process.blocked.iter().find(|it| of(&it.waiter, waiter) && of(&it.holder, holder));
            let thread = report.gvl_threads.iter().find(|line| line.comm == waiter);
            let (waited, in_all) = (pair.map_or(0, |pair| pair.wait_ns), thread.context(waiter)?.wait_ns);
            ensure_times!(in_all > 300_000_000, "{waiter} waited {in_all} ns");
            ensure_times!(
                waited * 10 > in_all * 8,
                "{waiter} waited {waited} ns for {holder} and {in_all} in all: {:?}",
                report.ledger
            );
        }
        Ok(())
    })
}
