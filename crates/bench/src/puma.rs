//! `cargo xtask bench --puma`: the cost of tracing requests, and of a recording with its usual contents, for a Puma that does almost
//! nothing else, and the size of such a recording.
//!
//! One server runs for the whole measurement, under the load of `--connections`. With one connection, its threads never wait for each other, and
//! the CPU time per request is steady; with several on few CPUs it varies by a third from turn to turn. The turn of each arm has
//! a turn without gctrace before and after it, and is compared with their mean, so that a machine whose speed changes shifts no ratio;
//! every other round runs in reverse order.

use std::{
    fs,
    io::BufReader,
    path::{Path, PathBuf},
    process::{ChildStderr, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::live::Live;
use rustix::process::Signal;
use serde_json::json;

use super::{
    Agent, Spread,
    gvl::load::{self, Load, Puma},
    interval, until_ready,
};
use xtask::{
    demo::ruby,
    util::{Running, progress, target_dir},
};

/// Seconds of load before a turn without gctrace: the server has been warm for long.
const WARM_S: u32 = 2;
/// Seconds until gctrace is in its steady state: its budget for the GVL has settled, and the first 1,024 stacks of the process, each of which
/// wakes it at once, have been taken.
const SETTLED_S: u32 = 14;
const MEASURED_S: u32 = 6;
/// The path of the cheapest request.
const PATH: &str = "hello";
const PATIENCE: Duration = Duration::from_mins(1);

/// What gctrace does in a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arm {
    /// Traces another process, with requests.
    Elsewhere,
    /// GC only.
    Gc,
    /// GC and requests.
    Requests,
    /// A recording: GC, CPU stacks, and the GVL with its budget.
    Record,
    /// A recording with requests.
    RecordRequests,
}

const ARMS: [Arm; 5] = [Arm::Elsewhere, Arm::Gc, Arm::Requests, Arm::Record, Arm::RecordRequests];

impl Arm {
    fn name(self) -> &'static str {
        match self {
            Self::Elsewhere => "--requests of another process",
            Self::Gc => "GC only",
            Self::Requests => "--requests",
            Self::Record => "record --gvl",
            Self::RecordRequests => "record --gvl --requests",
        }
    }

    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Gc => &["--quiet"],
            Self::Elsewhere | Self::Requests => &["--quiet", "--requests"],
            Self::Record => &["record", "--gvl"],
            Self::RecordRequests => &["record", "--gvl", "--requests"],
        }
    }

    fn records(self) -> bool {
        matches!(self, Self::Record | Self::RecordRequests)
    }
}

/// The results of a turn.
#[derive(Clone, Copy)]
struct Turn {
    load: Load,
    /// CPU time of the server per request, microseconds.
    cpu_us: f64,
    /// CPU time of gctrace's user space, percent of a core.
    agent_percent: f64,
    /// CPU time of gctrace's user space before the turn, including its start, seconds.
    agent_before: f64,
    /// Growth of the recording, bytes per minute.
    recorded: f64,
}

/// The state shared by all turns.
struct Bench {
    gctrace: PathBuf,
    live: Live,
    puma: Puma,
    other: Running,
    connections: u32,
}

/// A turn, and the turns without gctrace before and after it.
struct Pair {
    with: Turn,
    without: [Turn; 2],
}

impl Pair {
    /// A figure relative to the mean of the turns without gctrace.
    fn ratio(&self, of: fn(&Turn) -> f64) -> f64 {
        of(&self.with) / f64::midpoint(of(&self.without[0]), of(&self.without[1]))
    }
}

/// Runs the measurement.
pub(super) fn run(rounds: u32, connections: u32, json: bool) -> Result<()> {
    load::check()?;
    let live = Live::begin()?;
    let puma = Puma::start(&live.path("puma.log"))?;
    let other = Running::start(Command::new(ruby()).args(["-e", "sleep"]).stdin(Stdio::null()))?;
    let mut bench = Bench { gctrace: target_dir()?.join("release/gctrace"), live, puma, other, connections };
    let mut all: Vec<Vec<Pair>> = ARMS.iter().map(|_| Vec::new()).collect();
    for number in 1..=rounds {
        let mut places: Vec<usize> = (0..ARMS.len()).collect();
        if number.is_multiple_of(2) {
            places.reverse();
        }
        let mut before = bench.turn(None)?;
        for place in places {
            let with = bench.turn(Some(ARMS[place]))?;
            let after = bench.turn(None)?;
            let pair = Pair { with, without: [before, after] };
            progress(format!(
                "bench: puma {number}/{rounds}: {:.0} requests/s, {:.1} µs of CPU each, × {:.3}, {}",
                pair.with.load.per_second,
                pair.with.cpu_us,
                pair.ratio(|turn| turn.cpu_us),
                ARMS[place].name()
            ));
            all[place].push(pair);
            before = after;
        }
    }
    bench.puma.end()?;
    report(&all, json);
    Ok(())
}

impl Bench {
    fn turn(&mut self, arm: Option<Arm>) -> Result<Turn> {
        let file = self.live.path("puma.gctrace");
        let mut tracer = arm.map(|arm| self.start(arm, &file)).transpose()?;
        let warm = if arm.is_some() { SETTLED_S } else { WARM_S };
        self.puma.load_from(self.connections, PATH, warm)?;
        let used = |tracer: &Option<(Running, BufReader<ChildStderr>)>| {
            tracer.as_ref().map_or(Ok(0.0), |(process, _)| cpu_of_threads(process.pid()))
        };
        let size =
            || if arm.is_some_and(Arm::records) { fs::metadata(&file).map(|file| file.len()) } else { Ok(0) };
        let before = (Agent::read(self.puma.pid())?.cpu, used(&tracer)?, size()?);
        let load = self.puma.load_from(self.connections, PATH, MEASURED_S)?;
        let after = (Agent::read(self.puma.pid())?.cpu, used(&tracer)?, size()?);
        if let Some((process, errors)) = &mut tracer {
            process.signal(Signal::INT)?;
            let said = std::io::read_to_string(errors).context("cannot read what gctrace says")?;
            let status = process.wait(PATIENCE)?;
            ensure!(status.success(), "gctrace ended with {status} after SIGINT: {said}");
            // Let the probes be removed before the next turn.
            thread::sleep(Duration::from_millis(500));
        }
        let seconds = f64::from(MEASURED_S);
        Ok(Turn {
            load,
            cpu_us: (after.0 - before.0) * 1e6 / load.requests as f64,
            agent_percent: (after.1 - before.1) * 100.0 / seconds,
            agent_before: before.1,
            recorded: (after.2 - before.2) as f64 * 60.0 / seconds,
        })
    }

    fn start(&self, arm: Arm, file: &Path) -> Result<(Running, BufReader<ChildStderr>)> {
        let pid = if arm == Arm::Elsewhere { self.other.pid() } else { self.puma.pid() };
        let mut command = Command::new(&self.gctrace);
        command
            .args(arm.options())
            .args(["--pid", &pid.to_string()])
            .arg("--cache-dir")
            .arg(self.live.path("cache"));
        if arm.records() {
            command.arg("--output").arg(file);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut process = Running::start(&mut command)?;
        let errors = until_ready(&mut process)?;
        Ok((process, errors))
    }
}

/// CPU time of the threads of a process, seconds, from the scheduler's statistics; `/proc/PID/stat` has only ticks of 10 ms.
fn cpu_of_threads(pid: u32) -> Result<f64> {
    let mut ns = 0;
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = fs::read_to_string(thread?.path().join("schedstat"))?;
        let ran = text.split_whitespace().next().and_then(|ran| ran.parse::<u64>().ok());
        ns += ran.with_context(|| format!("schedstat has an unknown form: {text:?}"))?;
    }
    Ok(ns as f64 / 1e9)
}

/// A figure over all rounds, relative to that without gctrace.
struct Ratio {
    median: f64,
    interval: (f64, f64),
}

impl Ratio {
    fn of(pairs: &[Pair], of: fn(&Turn) -> f64) -> Self {
        let ratios: Vec<f64> = pairs.iter().map(|pair| pair.ratio(of)).collect();
        Self { median: Spread::of(ratios.iter().copied()).median, interval: interval(&ratios) }
    }

    fn json(&self) -> serde_json::Value {
        json!({"median": self.median, "interval95": [self.interval.0, self.interval.1]})
    }

    fn text(&self) -> String {
        format!("× {:.3} ({:.3} to {:.3})", self.median, self.interval.0, self.interval.1)
    }
}

fn report(all: &[Vec<Pair>], json: bool) {
    let alone =
        |of: fn(&Turn) -> f64| Spread::of(all.iter().flatten().flat_map(|pair| pair.without.iter().map(of)));
    let (base, speed) = (alone(|turn| turn.cpu_us), alone(|turn| turn.load.per_second));
    let rounds = all.first().map_or(0, Vec::len);
    let spread = |spread: &Spread| json!({"median": spread.median, "min": spread.min, "max": spread.max});
    let mut rows = serde_json::Map::new();
    if !json {
        println!(
            "without gctrace: {:.1} µs of CPU for a request ({:.1} to {:.1}), {:.0} requests/s; ratios of {rounds} rounds, median and its interval of 95 %\n",
            base.median, base.min, base.max, speed.median,
        );
        println!(
            "{:<31}{:>28}{:>28}{:>24}{:>10}{:>14}",
            "", "CPU of a request", "throughput", "gctrace", "before", "recording"
        );
    }
    for (arm, pairs) in ARMS.iter().zip(all) {
        let cpu = Ratio::of(pairs, |turn| turn.cpu_us);
        let throughput = Ratio::of(pairs, |turn| turn.load.per_second);
        let agent = Spread::of(pairs.iter().map(|pair| pair.with.agent_percent));
        let before = Spread::of(pairs.iter().map(|pair| pair.with.agent_before));
        let recorded = Spread::of(pairs.iter().map(|pair| pair.with.recorded));
        if json {
            let row = json!({
                "cpu_ratio": cpu.json(), "throughput_ratio": throughput.json(), "agent_percent_of_core": spread(&agent),
                "agent_seconds_before": spread(&before), "recorded_bytes_per_minute": spread(&recorded),
            });
            rows.insert(arm.name().to_owned(), row);
            continue;
        }
        let size = if arm.records() { format!("{:.1} MB/min", recorded.median / 1e6) } else { String::new() };
        println!(
            "{:<31}{:>28}{:>28}{:>24}{:>8.2} s{:>14}",
            arm.name(),
            cpu.text(),
            throughput.text(),
            format!("{:.2} % ({:.2} to {:.2})", agent.median, agent.min, agent.max),
            before.median,
            size
        );
    }
    if json {
        println!(
            "{}",
            json!({"rounds": rounds, "cpu_us": spread(&base), "requests_per_second": spread(&speed), "with": rows})
        );
    }
}
