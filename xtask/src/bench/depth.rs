//! What taking one stack costs the kernel, by its depth, out of the kernel's own run statistics of BPF programs.

use std::{
    fs,
    io::BufReader,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use rustix::process::Signal;

use super::{stacks_taken, until_ready};
use crate::{
    demo::ruby,
    util::{Running, root, target_dir},
};

/// Frames of the recursion.
const DEPTHS: [u32; 5] = [10, 50, 200, 400, 800];
const SWITCH: &str = "/proc/sys/kernel/bpf_stats_enabled";
/// `BPF_PROG_TYPE_PERF_EVENT` (include/uapi/linux/bpf.h).
const PERF_EVENT: u64 = 7;

/// Cost of a stack: all that ran on ticks of the CPU clock, idle CPUs included, over the stacks taken.
struct Cost {
    depth: u32,
    native: bool,
    stacks: u64,
    ns: u64,
}

/// Turns the statistics off again.
struct Statistics(String);

impl Statistics {
    fn on() -> Result<Self> {
        let before = fs::read_to_string(SWITCH).with_context(|| format!("cannot read {SWITCH}"))?;
        fs::write(SWITCH, "1").with_context(|| format!("cannot write {SWITCH}"))?;
        Ok(Self(before))
    }
}

impl Drop for Statistics {
    fn drop(&mut self) {
        if let Err(error) = fs::write(SWITCH, self.0.trim()) {
            eprintln!("xtask: {SWITCH} stays on: {error}");
        }
    }
}

/// Runs the measurement.
pub(super) fn run(json: bool) -> Result<()> {
    let _on = Statistics::on()?;
    let mut costs = Vec::new();
    for depth in DEPTHS {
        for native in [false, true] {
            costs.push(measure(depth, native)?);
        }
    }
    if json {
        let lines: Vec<String> = costs
            .iter()
            .map(|c| {
                let (depth, native, stacks, ns) = (c.depth, c.native, c.stacks, c.ns);
                format!(r#"{{"depth":{depth},"native":{native},"stacks":{stacks},"ns_per_stack":{ns}}}"#)
            })
            .collect();
        println!("[{}]", lines.join(","));
        return Ok(());
    }
    println!("{:>6}  {:<16}{:>8}{:>12}", "depth", "frames", "stacks", "us a stack");
    for Cost { depth, native, stacks, ns } in costs {
        let frames = if native { "Ruby and native" } else { "Ruby" };
        println!("{depth:>6}  {frames:<16}{stacks:>8}{:>12.1}", ns as f64 / 1000.0);
    }
    Ok(())
}

fn measure(depth: u32, native: bool) -> Result<Cost> {
    let mut command = Command::new(target_dir()?.join("release/gctrace"));
    let pprof = target_dir()?.join("bench.pb.gz");
    command.args(["--quiet", "--rate", "999", "--pprof"]).arg(&pprof);
    command.args((!native).then_some("--no-native")).args(["--duration", "3600s"]);
    let mut script = Command::new(ruby());
    script.arg(root().join("tests/rubies/bench_depth.rb")).arg(depth.to_string());
    let mut script = Running::start(script.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
    let mut said = BufReader::new(script.child().stdout.take().context("no pipe from the script")?);
    expect(&mut said, "ready")?;
    command.args(["--pid", &script.pid().to_string()]).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut gctrace = Running::start(&mut command)?;
    let lines = until_ready(&mut gctrace)?;
    let before = statistics(gctrace.pid())?;
    drop(script.child().stdin.take());
    expect(&mut said, "done")?;
    let ns = statistics(gctrace.pid())? - before;
    gctrace.signal(Signal::INT)?;
    let said = std::io::read_to_string(lines).context("cannot read what gctrace says")?;
    if !gctrace.wait(Duration::from_mins(1))?.success() {
        bail!("gctrace failed: {said}");
    }
    fs::remove_file(&pprof).with_context(|| format!("cannot remove {}", pprof.display()))?;
    // The script used no CPU time before, so all stacks are from the time that was measured.
    let stacks = stacks_taken(&said)?;
    Ok(Cost { depth, native, stacks, ns: ns / u64::max(stacks, 1) })
}

fn expect(said: &mut impl std::io::BufRead, word: &str) -> Result<()> {
    let mut line = String::new();
    said.read_line(&mut line).context("cannot read what the script says")?;
    if line.trim() != word {
        bail!("the script said {line:?} instead of {word}");
    }
    Ok(())
}

/// Nanoseconds of the programs of a process on perf events.
fn statistics(pid: u32) -> Result<u64> {
    let dir = PathBuf::from(format!("/proc/{pid}/fdinfo"));
    let mut sum = 0;
    for entry in fs::read_dir(&dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let text = fs::read_to_string(entry?.path()).unwrap_or_default();
        if field(&text, "prog_type") == Some(PERF_EVENT) {
            sum += field(&text, "run_time_ns").with_context(|| format!("no run_time_ns in {text}"))?;
        }
    }
    Ok(sum)
}

fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().parse().ok()
}
