//! Individual waits for the GVL, if watching all of them would exceed the budget.

use std::ffi::OsStr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::PATIENCE;
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::live::Live;
use gctrace_tests::perfetto::{Slice, Trace};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use rustix::process::Signal;
use serde::Deserialize;

/// Names of the slices in which individual waits are not recorded.
const GAPS: [&str; 2] = ["GVL not watched (CPU budget)", "individual GVL waits not recorded (CPU budget)"];

/// In a storm, waits follow each other closely. If two consecutive waits begin this many nanoseconds apart, waits were not recorded in
/// between: at any budget, at least the budget of one second is saved before recording resumes.
const SILENCE_NS: u64 = 1_000_000_000;

/// Number of separate periods with recorded waits that must be seen, and the minimum number of waits in each.
const GROUPS: usize = 3;
const ENOUGH: usize = 10;

/// The members of a line about a wait that are read while gctrace runs.
#[derive(Deserialize)]
struct Line {
    what: Option<String>,
    pid: u32,
    begin_ns: Option<u64>,
}

/// Groups of waits that follow each other: the begin of the first and of the last wait, and the number of waits.
fn groups(begins: &[u64]) -> Vec<(u64, u64, usize)> {
    let mut begins = begins.to_vec();
    begins.sort_unstable();
    let mut groups: Vec<(u64, u64, usize)> = Vec::new();
    for begin in begins {
        match groups.last_mut() {
            Some(last) if begin - last.1 <= SILENCE_NS => {
                last.1 = begin;
                last.2 += 1;
            }
            _ => groups.push((begin, begin, 1)),
        }
    }
    groups
}

/// Waits until gctrace has reported enough groups of waits of this process. How long that takes depends on the cost of
/// hand-overs on this machine.
fn wait_for_groups(gctrace: &Gctrace, pid: u32) -> Result<()> {
    let since = Instant::now();
    let (mut read, mut begins) = (0, Vec::new());
    loop {
        let lines = gctrace.stdout_so_far();
        for line in lines[read..].iter().filter(|line| line.starts_with(r#"{"type":"gvl""#)) {
            let line: Line = serde_json::from_str(line).with_context(|| line.clone())?;
            if line.pid == pid && line.what.as_deref() == Some("wait") {
                begins.push(line.begin_ns.context("a wait without begin")?);
            }
        }
        read = lines.len();
        let groups = groups(&begins);
        if groups.iter().filter(|group| group.2 >= ENOUGH).count() >= GROUPS {
            return Ok(());
        }
        ensure!(since.elapsed() < PATIENCE, "{} waits, in these groups: {groups:?}", begins.len());
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// The slices that mark times without individual waits.
fn gaps(trace: &Trace) -> Vec<&Slice> {
    trace.slices.iter().filter(|slice| GAPS.contains(&slice.name.as_str())).collect()
}

/// Waits are recorded throughout the run, not only until the budget is used up. The gaps are marked, and contain no waits. What a flight
/// recorder writes during the run has the gaps of its time.
#[test]
fn waits_are_spread_over_the_run() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let path = live.path("windows.pftrace");
    let mut args: Vec<&OsStr> = Vec::new();
    args.extend(["--all-ruby", "--gvl", "--gvl-threshold", "0.02ms"].map(OsStr::new));
    // The larger the budget, the sooner the cost of the time before the first gap is saved; that cost is the same with any budget.
    args.extend(["--gvl-budget", "15", "--perfetto"].map(OsStr::new));
    args.push(path.as_os_str());
    let kept = live.dir("kept")?;
    let recording = kept.join("storm.gctrace");
    args.extend([OsStr::new("--record"), recording.as_os_str(), OsStr::new("--keep=10m")]);
    let mut gctrace = Invocation::jsonl(args)?.start_ready()?;
    let mut storm = Script::unwitnessed(&live, &ruby, "gvl_storm.rb")?.arg("told").start()?;
    wait_for_groups(&gctrace, storm.pid())?;
    gctrace.signal(Signal::USR2)?;
    gctrace.wait_error("gctrace: wrote ")?;
    storm.say("stop")?;
    let done = storm.finish()?;
    let (report, finished) = gctrace.stop_by(Signal::INT)?;
    ensure!(finished.errors().contains("exceeds its CPU budget"), "{}", finished.errors());

    let process = report.gvl_processes.iter().find(|line| line.pid == done.pid).context("no summary")?;
    // Each of its four threads lives as long as the storm.
    let threads = process.threads.context("no threads")?;
    ensure!(threads > 0 && process.wall_ns > 0, "{process:?}");

    let trace = Trace::open(&path)?;
    let gaps = gaps(&trace);
    let waits: Vec<_> = trace.slices.iter().filter(|slice| slice.name == "waiting for the GVL").collect();
    for wait in &waits {
        let within = |gap: &&&Slice| wait.begin_ns > gap.begin_ns && wait.end_ns < gap.end_ns;
        let gap = gaps.iter().find(within);
        ensure!(gap.is_none(), "{wait:?} in {gap:?}");
    }
    // The times without waits are the marked ones.
    let begins: Vec<u64> = waits.iter().map(|wait| wait.begin_ns).collect();
    let groups = groups(&begins);
    let marked = |silence: &&[(u64, u64, usize)]| {
        gaps.iter().any(|gap| gap.begin_ns < silence[1].0 && gap.end_ns > silence[0].1)
    };
    let silences = groups.windows(2).filter(marked).count();
    ensure!(silences + 1 >= GROUPS, "{silences} silences between {groups:?} are marked: {gaps:?}");

    let dump = std::fs::read_dir(&kept)?.next().context("no dump")??.path();
    let path = live.path("dump.pftrace");
    let args = [OsStr::new("report"), dump.as_os_str(), OsStr::new("--perfetto"), path.as_os_str()];
    let reported = Invocation::new(args)?.run()?;
    ensure!(reported.status.success(), "{}", reported.errors());
    let dumped = Trace::open(&path)?;
    let dumped = self::gaps(&dumped);
    ensure!(dumped.len() + 1 >= GROUPS && dumped.len() <= gaps.len(), "{dumped:?} of {gaps:?}");
    let dump = [dump.as_path(), dump.as_path()];
    let compared = Invocation::new([&["diff".as_ref()][..], &dump.map(Path::as_os_str)].concat())?.run()?;
    let why = "did not report individual waits for";
    ensure!(compared.stdout.iter().any(|line| line.contains(why)), "{:?}", compared.stdout);
    Ok(())
}
