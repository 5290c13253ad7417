//! Which thread waited for which, however many threads started and ended before.

use std::ffi::OsString;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::ensure_times;
use gctrace_tests::gctrace::{Invocation, read};
use gctrace_tests::live::Live;
use gctrace_tests::report::{GvlWho, Report};
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

/// Eight threads that stay, and take turns with 3000 others that start and end one after the other: each that stays waits for each that ends, which
/// is more pairs than the kernel side can hold. Then two threads compute, as above.
const STAYING: &str = "
    def compute(s)
      stop = Process.clock_gettime(Process::CLOCK_MONOTONIC) + s
      nil while Process.clock_gettime(Process::CLOCK_MONOTONIC) < stop
    end
    over = false
    pause = Queue.new
    8.times { Thread.new { until over do 200.times { |i| i + 1 }; Thread.pass end; pause.pop } }
    3000.times { Thread.new { 200.times { |i| i + 1 }; Thread.pass }.join; sleep 0.001 }
    over = true
    2.times.map { |i| Thread.new { Thread.current.name = \"late#{i}\"; compute(2) } }.each(&:join)
";

/// Threads that compete for the GVL wait for each other: the pair accounts for over 80 % of the waits of each. All pairs together do not
/// exceed the waits of the process.
#[test]
fn of_threads_after_many() -> Result<()> {
    let _live = Live::beside_others()?;
    Ruby::first_and_last(|ruby| late_threads_are_there(ruby, PROGRAM).map(drop))
}

/// The same if the threads that waited for those that ended are still there: their pairs make room, too. (Up to 3.1 a thread is its native thread,
/// and few of these end.)
#[test]
fn of_threads_that_stay() -> Result<()> {
    let _live = Live::beside_others()?;
    let last = Ruby::all()?.pop().context("no Ruby")?;
    Ruby::two_of(vec![last], |ruby| {
        let report = late_threads_are_there(ruby, STAYING)?;
        let full = &report.ledger.as_ref().context("a ledger")?.kernel["gvl_edges_full"];
        ensure!(full == 0, "{full} pairs had no room");
        Ok(())
    })
}

fn late_threads_are_there(ruby: &Ruby, program: &str) -> Result<Report> {
    let mut args: Vec<OsString> =
        ["--gvl", "--gvl-budget", "100", "--format", "jsonl", "--"].map(Into::into).to_vec();
    args.extend(ruby.argv()?);
    args.extend(["-e".into(), program.into()]);
    let report = read(&Invocation::new(args)?.run()?)?;
    let process = report.gvl_processes.first().context("no process")?;
    ensure_times!(process.blocked.len() > 1000, "only {} pairs", process.blocked.len());
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
    Ok(report)
}
