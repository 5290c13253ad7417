//! `cargo xtask bench --puma`: what watching requests, and a recording of everything that it usually has, cost a Puma that does next to
//! nothing else, and how large such a recording is.
//!
//! One server stays for the whole of the measurement, at full load. In each round there is a turn for each way of watching and one without
//! gctrace, with which they are compared; every other round runs in reverse order.

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
    until_ready,
};
use xtask::{
    demo::ruby,
    util::{Running, progress, target_dir},
};

/// Until a recording's budget for the GVL has settled; the server is warm long before.
const WARM_S: u32 = 3;
const MEASURED_S: u32 = 10;
/// The request that costs a server least.
const PATH: &str = "hello";
const PATIENCE: Duration = Duration::from_mins(1);

/// What gctrace does in a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arm {
    /// It does not run.
    Alone,
    /// It traces another process, with requests.
    Elsewhere,
    /// GC only.
    Gc,
    /// GC and requests.
    Requests,
    /// A recording: GC, CPU stacks, and the GVL with its budget.
    Record,
    /// The same with requests.
    RecordRequests,
}

const ARMS: [Arm; 6] = [Arm::Alone, Arm::Elsewhere, Arm::Gc, Arm::Requests, Arm::Record, Arm::RecordRequests];

impl Arm {
    fn name(self) -> &'static str {
        match self {
            Self::Alone => "without gctrace",
            Self::Elsewhere => "--requests of another process",
            Self::Gc => "GC only",
            Self::Requests => "--requests",
            Self::Record => "record --gvl",
            Self::RecordRequests => "record --gvl --requests",
        }
    }

    fn options(self) -> Option<&'static [&'static str]> {
        Some(match self {
            Self::Alone => return None,
            Self::Gc => &["--quiet"],
            Self::Elsewhere | Self::Requests => &["--quiet", "--requests"],
            Self::Record => &["record", "--gvl"],
            Self::RecordRequests => &["record", "--gvl", "--requests"],
        })
    }

    fn records(self) -> bool {
        matches!(self, Self::Record | Self::RecordRequests)
    }
}

/// What a turn has.
struct Turn {
    load: Load,
    /// CPU time of the server for each request, microseconds.
    cpu_us: f64,
    /// CPU time of gctrace's user space, percent of a core.
    agent_percent: f64,
    /// Growth of the recording, bytes a minute.
    recorded: f64,
}

/// What stays for all turns.
struct Bench {
    gctrace: PathBuf,
    live: Live,
    puma: Puma,
    other: Running,
}

/// Runs it.
pub(super) fn run(rounds: u32, json: bool) -> Result<()> {
    load::check()?;
    let live = Live::begin()?;
    let puma = Puma::start(&live.path("puma.log"))?;
    let other = Running::start(Command::new(ruby()).args(["-e", "sleep"]).stdin(Stdio::null()))?;
    let mut bench = Bench { gctrace: target_dir()?.join("release/gctrace"), live, puma, other };
    let mut all: Vec<Vec<Turn>> = ARMS.iter().map(|_| Vec::new()).collect();
    for number in 1..=rounds {
        let mut places: Vec<usize> = (0..ARMS.len()).collect();
        if number.is_multiple_of(2) {
            places.reverse();
        }
        for place in places {
            let turn = bench.turn(ARMS[place])?;
            progress(format!(
                "bench: puma {number}/{rounds}: {:.0} requests/s, {:.1} µs of CPU each, {}",
                turn.load.per_second,
                turn.cpu_us,
                ARMS[place].name()
            ));
            all[place].push(turn);
        }
    }
    bench.puma.end()?;
    report(&all, json);
    Ok(())
}

impl Bench {
    fn turn(&mut self, arm: Arm) -> Result<Turn> {
        let file = self.live.path("puma.gctrace");
        let mut tracer = arm.options().map(|options| self.start(arm, options, &file)).transpose()?;
        self.puma.load(PATH, WARM_S)?;
        let used = |tracer: &Option<(Running, BufReader<ChildStderr>)>| {
            tracer
                .as_ref()
                .map_or(Ok(0.0), |(process, _)| Ok::<_, anyhow::Error>(Agent::read(process.pid())?.cpu))
        };
        let size = || if arm.records() { fs::metadata(&file).map(|file| file.len()) } else { Ok(0) };
        let before = (Agent::read(self.puma.pid())?.cpu, used(&tracer)?, size()?);
        let load = self.puma.load(PATH, MEASURED_S)?;
        let after = (Agent::read(self.puma.pid())?.cpu, used(&tracer)?, size()?);
        if let Some((process, errors)) = &mut tracer {
            process.signal(Signal::INT)?;
            let said = std::io::read_to_string(errors).context("cannot read what gctrace says")?;
            let status = process.wait(PATIENCE)?;
            ensure!(status.success(), "gctrace ended with {status} after SIGINT: {said}");
            // The next turn finds the program without probes.
            thread::sleep(Duration::from_millis(500));
        }
        let seconds = f64::from(MEASURED_S);
        Ok(Turn {
            load,
            cpu_us: (after.0 - before.0) * 1e6 / load.requests as f64,
            agent_percent: (after.1 - before.1) * 100.0 / seconds,
            recorded: (after.2 - before.2) as f64 * 60.0 / seconds,
        })
    }

    fn start(&self, arm: Arm, options: &[&str], file: &Path) -> Result<(Running, BufReader<ChildStderr>)> {
        let pid = if arm == Arm::Elsewhere { self.other.pid() } else { self.puma.pid() };
        let mut command = Command::new(&self.gctrace);
        command
            .args(options)
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

/// Median, least and most of a figure relative to that of the same round without gctrace.
fn ratio(turns: &[Turn], alone: &[Turn], of: fn(&Turn) -> f64) -> Spread {
    Spread::of(turns.iter().zip(alone).map(|(turn, alone)| of(turn) / of(alone)))
}

fn report(all: &[Vec<Turn>], json: bool) {
    let Some((alone, others)) = all.split_first() else { return };
    let base = Spread::of(alone.iter().map(|turn| turn.cpu_us));
    let speed = Spread::of(alone.iter().map(|turn| turn.load.per_second));
    let spread = |spread: &Spread| json!({"median": spread.median, "min": spread.min, "max": spread.max});
    let mut rows = serde_json::Map::new();
    if !json {
        println!(
            "without gctrace: {:.1} µs of CPU for a request, {:.0} requests/s; {} rounds, by which ratios are taken\n",
            base.median,
            speed.median,
            alone.len()
        );
        println!(
            "{:<31}{:>28}{:>28}{:>12}{:>14}",
            "", "CPU of a request", "throughput", "gctrace", "recording"
        );
    }
    for (arm, turns) in ARMS[1..].iter().zip(others) {
        let cpu = ratio(turns, alone, |turn| turn.cpu_us);
        let throughput = ratio(turns, alone, |turn| turn.load.per_second);
        let agent = Spread::of(turns.iter().map(|turn| turn.agent_percent));
        let recorded = Spread::of(turns.iter().map(|turn| turn.recorded));
        if json {
            let row = json!({
                "cpu_ratio": spread(&cpu), "throughput_ratio": spread(&throughput), "agent_percent_of_core": spread(&agent),
                "recorded_bytes_per_minute": spread(&recorded),
            });
            rows.insert(arm.name().to_owned(), row);
            continue;
        }
        let text = |s: &Spread| format!("× {:.3} ({:.3} to {:.3})", s.median, s.min, s.max);
        let size = if arm.records() { format!("{:.1} MB/min", recorded.median / 1e6) } else { String::new() };
        println!(
            "{:<31}{:>28}{:>28}{:>10.2} %{:>14}",
            arm.name(),
            text(&cpu),
            text(&throughput),
            agent.median,
            size
        );
    }
    if json {
        println!("{}", json!({"cpu_us": spread(&base), "requests_per_second": spread(&speed), "with": rows}));
    }
}
