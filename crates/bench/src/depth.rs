//! The kernel's cost of taking one stack, by its depth, measured by the kernel's own run statistics of BPF programs.

use std::{
    fs,
    io::BufReader,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use rustix::process::Signal;

use super::{
    stacks_taken,
    statistics::{PERF_EVENT, Statistics, programs},
    until_ready,
};
use xtask::{
    demo::ruby,
    util::{Running, root, target_dir},
};

/// Numbers of frames of the recursion.
const DEPTHS: [u32; 5] = [10, 50, 200, 400, 800];
/// Cost of a stack: the time of all programs on ticks of the CPU clock, including those of idle CPUs, divided by the number of stacks taken.
struct Cost {
    depth: u32,
    native: bool,
    stacks: u64,
    ns: u64,
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
    command.args(["--quiet", "--verbose", "--rate", "999", "--pprof"]).arg(&pprof);
    command.args((!native).then_some("--no-native")).args(["--duration", "3600s"]);
    let mut script = Command::new(ruby());
    script.arg(root().join("tests/rubies/bench_depth.rb")).arg(depth.to_string());
    let mut script = Running::start(script.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
    let mut said = BufReader::new(script.child().stdout.take().context("no pipe from the script")?);
    expect(&mut said, "ready")?;
    command.args(["--pid", &script.pid().to_string()]).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut gctrace = Running::start(&mut command)?;
    let lines = until_ready(&mut gctrace)?;
    let before = on_ticks(gctrace.pid())?;
    drop(script.child().stdin.take());
    expect(&mut said, "done")?;
    let ns = on_ticks(gctrace.pid())? - before;
    gctrace.signal(Signal::INT)?;
    let said = std::io::read_to_string(lines).context("cannot read what gctrace says")?;
    if !gctrace.wait(Duration::from_mins(1))?.success() {
        bail!("gctrace failed: {said}");
    }
    fs::remove_file(&pprof).with_context(|| format!("cannot remove {}", pprof.display()))?;
    // The script used no CPU time before, so all stacks belong to the measured time.
    let stacks = stacks_taken(&said)?;
    Ok(Cost { depth, native, stacks, ns: each(ns, stacks)? })
}

/// Nanoseconds per stack.
fn each(ns: u64, stacks: u64) -> Result<u64> {
    ns.checked_div(stacks).context("gctrace took no stack, so there is nothing to measure")
}

fn expect(said: &mut impl std::io::BufRead, word: &str) -> Result<()> {
    let mut line = String::new();
    said.read_line(&mut line).context("cannot read what the script says")?;
    if line.trim() != word {
        bail!("the script said {line:?} instead of {word}");
    }
    Ok(())
}

/// Nanoseconds that a process's programs on perf events have run.
fn on_ticks(pid: u32) -> Result<u64> {
    Ok(programs(pid)?.iter().filter(|program| program.kind == PERF_EVENT).map(|program| program.ns).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without a stack there is no cost per stack.
    #[test]
    fn no_stacks() {
        assert_eq!(each(900, 3).unwrap(), 300);
        assert!(each(900, 0).unwrap_err().to_string().contains("no stack"));
    }
}
