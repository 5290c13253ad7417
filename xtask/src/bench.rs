//! `cargo xtask bench`: what gctrace costs the traced program, and what it uses itself.
//!
//! Runs of one script alternate, without and with gctrace, and each pair gives one ratio: a machine that slows down
//! over minutes slows both halves of a pair.

use std::{
    fs,
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use rustix::process::Signal;

use crate::{
    demo::ruby,
    setup::{self, Purpose},
    util::{Running, as_root, cargo, is_root, output, progress, root, run as run_command, target_dir},
};

/// Arguments of `bench`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Pairs of runs for each script.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
    /// gctrace is built already (we were started again as root).
    #[arg(long, hide = true)]
    built: bool,
}

const SCRIPTS: [&str; 2] = ["bench_gc", "bench_cpu"];
/// How long gctrace may take to find and prepare the Ruby that is running.
const SETTLE: Duration = Duration::from_secs(3);

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    if !args.built {
        setup::ensure(&[Purpose::Demo])?;
        progress("bench: building gctrace");
        run_command(cargo().args(["build", "--quiet", "--release", "--package", "gctrace-user"]))?;
        if !is_root() {
            let exe = std::env::current_exe().context("cannot tell where this program lies")?;
            let mut again = as_root(exe, "trace other processes")?;
            again
                .args(["bench", "--built", "--runs", &args.runs.to_string()])
                .args(args.json.then_some("--json"));
            return Err(again.exec()).context("cannot run sudo");
        }
    }
    // An idle Ruby keeps the image in use, so that gctrace has attached to it before the measured script starts.
    let mut idle = Command::new(ruby());
    let idle = Running::start(idle.args(["-e", "sleep"]).stdin(Stdio::null()))?;
    let mut results = Vec::new();
    for script in SCRIPTS {
        let mut pairs = Vec::new();
        for number in 1..=args.runs {
            let without = measure(script)?;
            let (with, agent) = traced(script)?;
            progress(format!(
                "bench: {script} {number}/{}: CPU {:.3} s without, {:.3} s with gctrace",
                args.runs, without.cpu, with.cpu
            ));
            pairs.push(Pair { without, with, agent });
        }
        results.push((script, pairs));
    }
    drop(idle);
    if args.json {
        println!("{}", json(&results));
    } else {
        print(&results);
    }
    Ok(())
}

/// What a script says of its own run, seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Run {
    wall: f64,
    cpu: f64,
}

/// What gctrace used in its whole life.
#[derive(Clone, Copy)]
struct Agent {
    cpu: f64,
    peak_rss_kib: u64,
}

struct Pair {
    without: Run,
    with: Run,
    agent: Agent,
}

fn measure(script: &str) -> Result<Run> {
    let path = root().join("tests/rubies").join(script).with_extension("rb");
    let said = output(Command::new(ruby()).arg(&path))?;
    Run::read(&said)
        .with_context(|| format!("{} did not end in a line with wall=… cpu=…: {said:?}", path.display()))
}

fn traced(script: &str) -> Result<(Run, Agent)> {
    let mut command = Command::new(target_dir()?.join("release/gctrace"));
    command.args(["--all-ruby", "--quiet", "--duration", "3600s"]).stdin(Stdio::null()).stdout(Stdio::null());
    let mut gctrace = Running::start(&mut command)?;
    thread::sleep(SETTLE);
    let run = measure(script)?;
    if let Some(status) = gctrace.ended()? {
        bail!("gctrace ended by itself ({status}) while {script} ran; its own lines above say why");
    }
    let agent = Agent::read(gctrace.pid())?;
    gctrace.signal(Signal::INT)?;
    let status = gctrace.wait(Duration::from_secs(30))?;
    if !status.success() {
        bail!("gctrace ended with {status} after SIGINT; its own lines above say why");
    }
    Ok((run, agent))
}

impl Run {
    fn read(text: &str) -> Option<Self> {
        let line = text.lines().last()?;
        let field =
            |name: &str| line.split_whitespace().find_map(|word| word.strip_prefix(name))?.parse().ok();
        Some(Self { wall: field("wall=")?, cpu: field("cpu=")? })
    }
}

impl Agent {
    fn read(pid: u32) -> Result<Self> {
        let proc = Path::new("/proc").join(pid.to_string());
        let read = |name: &str| {
            let path = proc.join(name);
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
        };
        let (stat, status) = (read("stat")?, read("status")?);
        let cpu = cpu_ticks(&stat).context("/proc/PID/stat has an unknown form")?;
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let peak = peak.and_then(|text| text.trim().strip_suffix(" kB")?.parse().ok());
        // USER_HZ has been 100 on every architecture this runs on.
        Ok(Self { cpu: cpu as f64 / 100.0, peak_rss_kib: peak.context("/proc/PID/status has no VmHWM")? })
    }
}

/// User and system time of `/proc/PID/stat`; the program's name in it may hold blanks and parentheses.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
}

/// Median, least and greatest.
#[derive(Debug, PartialEq)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
        Self { median: f64::midpoint(low, high), min: values[0], max: values[values.len() - 1] }
    }
}

fn ratios(pairs: &[Pair], of: fn(Run) -> f64) -> Spread {
    Spread::of(pairs.iter().map(|pair| of(pair.with) / of(pair.without)))
}

fn print(results: &[(&str, Vec<Pair>)]) {
    println!(
        "{:<12}{:<6}{:>8}{:>8}{:>8}   with gctrace / without, by pairs",
        "script", "time", "median", "min", "max"
    );
    for (script, pairs) in results {
        for (name, of) in [("cpu", (|run| run.cpu) as fn(Run) -> f64), ("wall", |run| run.wall)] {
            let Spread { median, min, max } = ratios(pairs, of);
            println!("{script:<12}{name:<6}{median:>8.4}{min:>8.4}{max:>8.4}   {} pairs", pairs.len());
        }
        let cpu = Spread::of(pairs.iter().map(|pair| pair.agent.cpu));
        let seconds = Spread::of(pairs.iter().map(|pair| pair.with.wall));
        println!(
            "{:<12}gctrace: {:.2} s CPU for {:.1} s of script and {} s of attaching (median), peak RSS {:.1} MiB",
            "",
            cpu.median,
            seconds.median,
            SETTLE.as_secs(),
            peak(pairs) / 1024.0
        );
    }
}

fn peak(pairs: &[Pair]) -> f64 {
    pairs.iter().map(|pair| pair.agent.peak_rss_kib).max().unwrap_or(0) as f64
}

fn json(results: &[(&str, Vec<Pair>)]) -> String {
    let spread =
        |s: &Spread| format!(r#"{{"median":{:.6},"min":{:.6},"max":{:.6}}}"#, s.median, s.min, s.max);
    let scripts: Vec<String> = results
        .iter()
        .map(|(script, pairs)| {
            format!(
                r#""{script}":{{"pairs":{},"cpu_ratio":{},"wall_ratio":{},"agent_cpu_s":{},"agent_peak_rss_kib":{}}}"#,
                pairs.len(),
                spread(&ratios(pairs, |run| run.cpu)),
                spread(&ratios(pairs, |run| run.wall)),
                spread(&Spread::of(pairs.iter().map(|pair| pair.agent.cpu))),
                peak(pairs)
            )
        })
        .collect();
    format!("{{{}}}", scripts.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The last line counts, in any order of its fields.
    #[test]
    fn script_line() {
        let run = Run::read("noise\nwall=3.5 cpu=3.25 gc=9 check=1\n").unwrap();
        assert_eq!(run, Run { wall: 3.5, cpu: 3.25 });
        assert_eq!(Run::read("wall=3.5"), None);
    }

    /// The name of a program cannot shift the fields.
    #[test]
    fn stat_with_a_hostile_name() {
        let stat = "7 (a) R 1) S 1 7 7 0 -1 4194560 100 0 0 0 25 17 0 0 20 0 1 0 5 1000 10";
        assert_eq!(cpu_ticks(stat), Some(42));
    }

    /// Even and odd numbers of values.
    #[test]
    fn median() {
        assert_eq!(Spread::of([3.0, 1.0, 2.0].into_iter()), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 3.0].into_iter()), Spread { median: 2.5, min: 1.0, max: 4.0 });
    }
}
