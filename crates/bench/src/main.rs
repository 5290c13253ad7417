//! `cargo xtask bench`: the cost of gctrace for the traced program, and its own resource usage.
//!
//! Runs of one script alternate, without a tracer and with each of them, and each round yields one ratio per tracer: a
//! machine that slows down over minutes slows down the whole of a round.

mod collector;
mod depth;
mod fleet;
mod gvl;
mod memory;
mod puma;
mod retention;
mod spread;
mod stalls;
mod start;
mod statistics;
mod tune;

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{ChildStderr, Command, ExitCode, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use rustix::process::Signal;

use spread::{Spread, interval};
use xtask::{
    demo::ruby,
    setup::{self, Purpose},
    util::{Running, as_root, cargo, is_root, output, progress, root, run as run_command, target_dir},
};

/// Measure what gctrace costs: paired runs of Ruby scripts with and without it.
#[derive(Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
#[expect(clippy::struct_excessive_bools, reason = "each is a separate flag")]
struct Args {
    /// Rounds for each script [default: 10; with --gvl: 4].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    runs: Option<u32>,
    /// Compare with this rbspy, too.
    #[arg(long, value_name = "FILE")]
    rbspy: Option<PathBuf>,
    /// Measure this gctrace, too, such as one of an earlier commit, in the same rounds with the same options.
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    /// Measure only what taking one stack costs the kernel, by depth.
    #[arg(long, conflicts_with_all = ["rbspy", "against"])]
    depth: bool,
    /// Measure only how many sample sets a collector accepts.
    #[arg(long, conflicts_with_all = ["rbspy", "against", "depth"])]
    collector: bool,
    /// Measure only size and answer times of a collector's store that has 30 days of sets of 500 processes, in this directory.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["rbspy", "against", "depth", "collector", "tune"])]
    retention: Option<PathBuf>,
    #[command(flatten)]
    simulated: retention::Simulated,
    /// Measure only whether the predictions of the advice hold, of time in GC, majors and peak of memory: --runs turns for each of six programs
    /// on one Ruby of each series, those of `GCTRACE_RUBIES` or all of the lab (about 15 minutes with --runs 2).
    #[arg(long, conflicts_with_all = ["rbspy", "against", "depth", "collector"])]
    tune: bool,
    /// With --tune: follow the advice on a web application instead, a shop on Puma, Sinatra and SQLite under load (about 15 minutes with
    /// --runs 3).
    #[arg(long, requires = "tune")]
    app: bool,
    /// Measure only what 300 idle and 20 working Ruby processes cost gctrace.
    #[arg(long, conflicts_with_all = ["rbspy", "against", "depth"])]
    fleet: bool,
    /// Measure only for what share of the time a running thread is stopped or interrupted, with and without gctrace, and
    /// with rbspy if it is given.
    #[arg(long, conflicts_with_all = ["against", "depth", "collector", "tune", "fleet"])]
    stalls: bool,
    /// Measure only what watching the GVL costs a Puma under load (needs puma and wrk; about ten minutes).
    #[arg(long, conflicts_with_all = ["rbspy", "against", "depth", "collector", "tune", "fleet", "stalls"])]
    gvl: bool,
    /// Measure only what requests and recordings cost a Puma under full load, and how large a recording is (needs puma and wrk; about a minute
    /// and a half for each of --runs).
    #[arg(long, conflicts_with_all = ["rbspy", "against", "depth", "collector", "tune", "fleet", "stalls", "gvl", "start"])]
    puma: bool,
    /// With --puma: how many connections send requests. With one the CPU time of a request is steady
    #[arg(long, value_name = "N", requires = "puma", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    connections: u32,
    /// Measure only what the ways of looking at memory cost a program that mostly allocates: `--alloc`, `malloc` and `heap` (about a minute for
    /// each of --runs).
    #[arg(long, conflicts_with_all = ["rbspy", "against", "depth", "collector", "tune", "fleet", "stalls", "gvl", "puma", "start"])]
    memory: bool,
    /// Measure only how long gctrace takes until it is ready, with several sets of options.
    #[arg(long, conflicts_with_all = ["rbspy", "against", "depth", "collector", "tune", "fleet", "stalls", "gvl"])]
    start: bool,
    /// With --start: measure this gctrace instead of building one; given twice, the second is compared with the first.
    #[arg(long = "binary", requires = "start", value_name = "FILE")]
    binaries: Vec<PathBuf>,
    #[command(flatten)]
    gvl_options: gvl::Options,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
    /// gctrace is built already (we were started again as root).
    #[arg(long, hide = true)]
    built: bool,
}

/// Default number of rounds.
const ROUNDS: u32 = 10;
const SCRIPTS: [&str; 2] = ["bench_gc", "bench_cpu"];
/// How long gctrace may take to find and prepare the running Ruby.
const SETTLE: Duration = Duration::from_secs(3);

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    if let Some(dir) = &args.retention {
        // No release build, no root: GCTRACE_BIN may name another gctrace.
        return retention::run(dir, &args.simulated);
    }
    let runs = args.runs.unwrap_or(if args.gvl { gvl::ROUNDS } else { ROUNDS });
    if args.gvl || args.puma {
        gvl::check()?;
    }
    if !args.built {
        setup::ensure(&[match () {
            () if args.collector => Purpose::Test,
            () if args.app => Purpose::App,
            () => Purpose::Demo,
        }])?;
        if args.gvl_options.gctrace.is_none() && args.binaries.is_empty() {
            progress("bench: building gctrace");
            run_command(cargo().args(["build", "--quiet", "--release", "--package", "gctrace-user"]))?;
        }
        if !is_root() {
            let exe = std::env::current_exe().context("cannot find the path of this program")?;
            let mut again = as_root(exe, "trace other processes")?;
            again
                .args(["--built", "--runs", &runs.to_string()])
                .args(args.json.then_some("--json"))
                .args(args.depth.then_some("--depth"))
                .args(args.collector.then_some("--collector"))
                .args(args.tune.then_some("--tune"))
                .args(args.app.then_some("--app"))
                .args(args.fleet.then_some("--fleet"))
                .args(args.stalls.then_some("--stalls"))
                .args(args.puma.then_some("--puma"))
                .args(args.puma.then(|| format!("--connections={}", args.connections)))
                .args(args.memory.then_some("--memory"))
                .args(args.start.then_some("--start"))
                .args(args.binaries.iter().flat_map(|path| ["--binary".as_ref(), path.as_os_str()]))
                .args(args.gvl_options.again(args.gvl))
                .args(args.rbspy.iter().flat_map(|path| ["--rbspy".as_ref(), path.as_os_str()]))
                .args(args.against.iter().flat_map(|path| ["--against".as_ref(), path.as_os_str()]));
            return Err(again.exec()).context("cannot run sudo");
        }
    }
    if args.gvl {
        return gvl::run(&args.gvl_options, runs, args.json);
    }
    if args.puma {
        return puma::run(runs, args.connections, args.json);
    }
    if args.memory {
        return memory::run(runs, args.json);
    }
    if args.fleet {
        return fleet::run(args.json);
    }
    if args.depth {
        return depth::run(args.json);
    }
    if args.app {
        return tune::run_app(runs, args.json);
    }
    if args.tune {
        return tune::run(runs, args.json);
    }
    if args.collector {
        return collector::run(args.json);
    }
    if args.start {
        return start::run(&args.binaries, runs, args.json);
    }
    if args.stalls {
        return stalls::run(args.rbspy.as_deref(), runs, args.json);
    }
    let own = target_dir()?.join("release/gctrace");
    let mut tracers = vec![Tracer::Gc(own.clone(), "gc")];
    tracers.extend(args.against.clone().map(|other| Tracer::Gc(other, "gc, the other")));
    tracers.push(Tracer::Stacks(own, "stacks"));
    tracers.extend(args.against.clone().map(|other| Tracer::Stacks(other, "stacks, the other")));
    tracers.extend(args.rbspy.clone().map(Tracer::Rbspy));
    let scratch = target_dir()?.join("bench");
    fs::create_dir_all(&scratch).with_context(|| format!("cannot create {}", scratch.display()))?;
    // An idle Ruby keeps the image in use, so that gctrace has attached to it before the measured script starts.
    let mut idle = Command::new(ruby());
    let idle = Running::start(idle.args(["-e", "sleep"]).stdin(Stdio::null()))?;
    let mut results = Vec::new();
    for script in SCRIPTS {
        let mut pairs: Vec<Vec<Pair>> = tracers.iter().map(|_| Vec::new()).collect();
        for number in 1..=runs {
            let without = untraced(script)?;
            progress(format!("bench: {script} {number}/{runs}: CPU {:.3} s alone", without.cpu));
            for (tracer, pairs) in tracers.iter().zip(&mut pairs) {
                let (with, agent) = tracer.run(script, &scratch)?;
                progress(format!(
                    "bench: {script} {number}/{runs}: CPU {:.3} s with {}",
                    with.cpu,
                    tracer.name()
                ));
                pairs.push(Pair { without, with, agent });
            }
        }
        results.extend(tracers.iter().zip(pairs).map(|(tracer, pairs)| Measured {
            script,
            tracer: tracer.name(),
            pairs,
        }));
    }
    drop(idle);
    fs::remove_dir_all(&scratch).with_context(|| format!("cannot remove {}", scratch.display()))?;
    if args.json {
        println!("{}", json(&results));
    } else {
        print(&results);
    }
    Ok(())
}

/// The measured tracer.
enum Tracer {
    /// A gctrace without options, which traces every GC event; and its name in the table.
    Gc(PathBuf, &'static str),
    /// The same, plus stacks with native frames at 99 Hz.
    Stacks(PathBuf, &'static str),
    /// rbspy at 99 Hz.
    Rbspy(PathBuf),
}

/// A script's own report of its run, seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Run {
    wall: f64,
    cpu: f64,
}

/// Resources that gctrace used over its whole lifetime.
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

/// All rounds of a script with one tracer.
struct Measured {
    script: &'static str,
    tracer: &'static str,
    pairs: Vec<Pair>,
}

fn script(name: &str) -> Command {
    let mut command = Command::new(ruby());
    command.arg(root().join("tests/rubies").join(name).with_extension("rb"));
    command
}

fn untraced(name: &str) -> Result<Run> {
    said(name, &output(&mut script(name))?)
}

fn said(name: &str, text: &str) -> Result<Run> {
    Run::read(text).with_context(|| format!("{name}.rb did not end in a line with wall=… cpu=…: {text:?}"))
}

impl Tracer {
    fn name(&self) -> &'static str {
        match self {
            Self::Gc(_, name) | Self::Stacks(_, name) => name,
            Self::Rbspy(_) => "rbspy",
        }
    }

    /// Runs a script under this tracer.
    fn run(&self, script: &str, scratch: &Path) -> Result<(Run, Agent)> {
        match self {
            Self::Gc(binary, _) => gctrace(binary, script, None),
            Self::Stacks(binary, _) => gctrace(binary, script, Some(&scratch.join("stacks.pb.gz"))),
            Self::Rbspy(path) => rbspy(path, script, scratch),
        }
    }
}

fn gctrace(binary: &Path, script: &str, pprof: Option<&Path>) -> Result<(Run, Agent)> {
    let mut command = Command::new(binary);
    command.args(["--all-ruby", "--quiet", "--duration", "3600s"]).stdin(Stdio::null()).stdout(Stdio::null());
    if let Some(path) = pprof {
        command.arg("--pprof").arg(path);
    }
    let mut gctrace = Running::start(&mut command)?;
    thread::sleep(SETTLE);
    let run = untraced(script)?;
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

/// Runs a script under rbspy, which is given the pid after the process has started, and ends with it.
fn rbspy(path: &Path, name: &str, scratch: &Path) -> Result<(Run, Agent)> {
    let mut traced = Running::start(script(name).stdout(Stdio::piped()))?;
    let mut command = Command::new(path);
    command.args([
        "record",
        "--silent",
        "--rate",
        "99",
        "--format",
        "collapsed",
        "--pid",
        &traced.pid().to_string(),
    ]);
    command.arg("--file").arg(scratch.join("rbspy.txt")).arg("--raw-file").arg(scratch.join("rbspy.raw.gz"));
    let mut rbspy = Running::start(command.stdout(Stdio::null()).stderr(Stdio::null()))?;
    let mut agent = Agent { cpu: 0.0, peak_rss_kib: 0 };
    let status = loop {
        if let Some(status) = rbspy.ended()? {
            break status;
        }
        // Its last moments are missing: /proc is empty once the process has ended.
        if let Ok(now) = Agent::read(rbspy.pid()) {
            agent = now;
        }
        thread::sleep(Duration::from_millis(20));
    };
    if !status.success() {
        bail!("rbspy ended with {status}");
    }
    traced.wait(Duration::from_secs(30))?;
    let mut text = String::new();
    traced.child().stdout.take().context("no pipe from the script")?.read_to_string(&mut text)?;
    Ok((said(name, &text)?, agent))
}

/// Waits until gctrace has attached; its later messages can be read from the returned reader.
fn until_ready(gctrace: &mut Running) -> Result<BufReader<ChildStderr>> {
    let mut lines = BufReader::new(gctrace.child().stderr.take().context("no pipe from gctrace")?);
    let (mut said, mut begin) = (String::new(), 0);
    while !said[begin..].contains("gctrace: ready") {
        begin = said.len();
        if lines.read_line(&mut said).context("cannot read what gctrace says")? == 0 {
            bail!("gctrace ended before it was ready: {said}");
        }
    }
    Ok(lines)
}

/// The number of stacks that gctrace reports at its end with `--verbose`.
fn stacks_taken(said: &str) -> Result<u64> {
    counter(said, "stacks").with_context(|| format!("gctrace does not say how many stacks it took: {said}"))
}

/// A counter from the final report of `gctrace --verbose`: `NAME NUMBER, NAME NUMBER`.
fn counter(said: &str, name: &str) -> Option<u64> {
    let mut words = said.split([' ', ',', '\n']).filter(|word| !word.is_empty());
    words.find(|word| *word == name)?;
    words.next()?.parse().ok()
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
        // USER_HZ is 100 on every architecture on which this runs.
        Ok(Self { cpu: cpu as f64 / 100.0, peak_rss_kib: peak.context("/proc/PID/status has no VmHWM")? })
    }
}

/// User and system time of `/proc/PID/stat`, in ticks; the program's name in it may contain blanks and parentheses.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
}

fn ratios(pairs: &[Pair], of: fn(Run) -> f64) -> Spread {
    Spread::of(pairs.iter().map(|pair| of(pair.with) / of(pair.without)))
}

fn print(results: &[Measured]) {
    println!(
        "{:<12}{:<18}{:<6}{:>8}{:>8}{:>8}   with the tracer / without, by rounds",
        "script", "tracer", "time", "median", "min", "max"
    );
    for Measured { script, tracer, pairs } in results {
        for (name, of) in [("cpu", (|run| run.cpu) as fn(Run) -> f64), ("wall", |run| run.wall)] {
            let Spread { median, min, max } = ratios(pairs, of);
            println!(
                "{script:<12}{tracer:<18}{name:<6}{median:>8.4}{min:>8.4}{max:>8.4}   {} rounds",
                pairs.len()
            );
        }
        let cpu = Spread::of(pairs.iter().map(|pair| pair.agent.cpu));
        let seconds = Spread::of(pairs.iter().map(|pair| pair.with.wall));
        println!(
            "{script:<12}{tracer:<18}itself: {:.2} s CPU for {:.1} s of script{} (median), peak RSS {:.1} MiB",
            cpu.median,
            seconds.median,
            if *tracer == "rbspy" { "" } else { " and 3 s of attaching" },
            peak(pairs) / 1024.0
        );
    }
}

fn peak(pairs: &[Pair]) -> f64 {
    pairs.iter().map(|pair| pair.agent.peak_rss_kib).max().unwrap_or(0) as f64
}

fn json(results: &[Measured]) -> String {
    let spread =
        |s: &Spread| format!(r#"{{"median":{:.6},"min":{:.6},"max":{:.6}}}"#, s.median, s.min, s.max);
    let scripts: Vec<String> = results
        .iter()
        .map(|Measured { script, tracer, pairs }| {
            format!(
                r#""{script}/{tracer}":{{"pairs":{},"cpu_ratio":{},"wall_ratio":{},"agent_cpu_s":{},"agent_peak_rss_kib":{}}}"#,
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

    /// Scripts are found relative to this package, which is two directories below the root.
    #[test]
    fn scripts_are_there() {
        for name in SCRIPTS.into_iter().chain(["bench_depth"]) {
            let path = script(name).get_args().next().map(PathBuf::from).unwrap();
            assert!(path.is_file(), "{}", path.display());
        }
    }

    /// The last line counts, with its fields in any order.
    #[test]
    fn script_line() {
        let run = Run::read("noise\nwall=3.5 cpu=3.25 gc=9 check=1\n").unwrap();
        assert_eq!(run, Run { wall: 3.5, cpu: 3.25 });
        assert_eq!(Run::read("wall=3.5"), None);
    }

    /// A program's name cannot shift the fields.
    #[test]
    fn stat_with_a_hostile_name() {
        let stat = "7 (a) R 1) S 1 7 7 0 -1 4194560 100 0 0 0 25 17 0 0 20 0 1 0 5 1000 10";
        assert_eq!(cpu_ticks(stat), Some(42));
    }

    /// The number is taken from the last line of a run.
    #[test]
    fn stacks_of_a_run() {
        let said = "gctrace: counted by gctrace: decoded_stacks 800, cycles 7, stacks 792, frames 9\n";
        assert_eq!((stacks_taken(said).unwrap(), counter(said, "cycles")), (792, Some(7)));
        stacks_taken("gctrace: counted by gctrace: cycles 7").unwrap_err();
    }
}
