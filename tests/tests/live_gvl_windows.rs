//! Single waits for the GVL where watching all of them would exceed the budget.

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::perfetto::{Slice, Trace};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;

/// Names of the times in which single waits are not recorded.
const GAPS: [&str; 2] = ["GVL not watched (CPU budget)", "single GVL waits not recorded (CPU budget)"];

/// How long the storm lasts. The budget of 5 % pays for a slice about every ten seconds, and later where hand-overs are cheap and
/// therefore many: a third of the run is longer than that.
const SECONDS: u64 = 45;

/// Waits are seen all over the run, not only until the budget is used up; the times between are marked, and contain no waits.
#[test]
fn waits_are_spread_over_the_run() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let path = live.path("windows.pftrace");
    let mut args: Vec<&std::ffi::OsStr> = Vec::new();
    args.extend(["--all-ruby", "--gvl", "--gvl-threshold", "0.02ms"].map(std::ffi::OsStr::new));
    args.extend(["--gvl-budget", "5", "--perfetto"].map(std::ffi::OsStr::new));
    args.push(path.as_os_str());
    let gctrace = Invocation::jsonl(args)?.start_ready()?;
    let done = Script::unwitnessed(&live, &ruby, "gvl_storm.rb")?
        .env("GCTRACE_TEST_SECONDS", SECONDS.to_string())
        .run()?;
    let (report, finished) = gctrace.stop_by(rustix::process::Signal::INT)?;
    ensure!(finished.errors().contains("exceeds its CPU budget"), "{}", finished.errors());

    let process = report.gvl_processes.iter().find(|line| line.pid == done.pid).context("no summary")?;
    let waits: Vec<u64> =
        report.gvl_waits.iter().filter(|wait| wait.pid == done.pid).map(|wait| wait.begin_ns).collect();
    let first = *waits.iter().min().context("no waits")?;
    // Each of its four threads lives as long as the storm.
    let threads = process.threads.context("no threads")?;
    ensure!(threads > 0 && process.wall_ns > 0, "{process:?}");
    let third = SECONDS * 1_000_000_000 / 3;
    for part in 0..3 {
        let (from, to) = (first + part * third, first + (part + 1) * third);
        let seen = waits.iter().filter(|begin| (from..to).contains(begin)).count();
        ensure!(seen > 10, "{seen} of {} waits in part {part} of the run", waits.len());
    }

    let trace = Trace::open(&path)?;
    let gaps: Vec<_> = trace.slices.iter().filter(|slice| GAPS.contains(&slice.name.as_str())).collect();
    ensure!(!gaps.is_empty(), "no gaps are marked");
    for slice in trace.slices.iter().filter(|slice| slice.name == "waiting for the GVL") {
        let within = |gap: &&Slice| {
            // The programs stop a moment after the time that is noted.
            slice.begin_ns > gap.begin_ns + 50_000_000 && slice.end_ns < gap.end_ns
        };
        ensure!(!gaps.iter().any(within), "{slice:?} in one of {gaps:?}");
    }
    Ok(())
}
