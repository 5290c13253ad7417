//! `cargo xtask bench --gvl`: the cost of tracing the GVL for a Puma with five threads.
//!
//! One server runs for the whole measurement. Each round has one turn per way of tracing, one after the other
//! under the same load, and one in which gctrace traces only GC: the compared cost is that of tracing the GVL, not of tracing at all. Every
//! other round runs in reverse order, so that drift affects both sides of each pair.

mod costs;
mod figures;
pub(super) mod load;
mod report;

use std::{
    ffi::OsString,
    fs,
    io::BufReader,
    path::{Path, PathBuf},
    process::{ChildStderr, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use gctrace_tests::live::Live;
use rustix::process::Signal;

use self::{
    figures::Ledger,
    load::{ENDPOINTS, Load, Puma},
};
use super::{Agent, until_ready};
use xtask::util::{Running, progress, target_dir};

pub(super) use load::check;

/// Default number of rounds: half of them in each direction.
pub(super) const ROUNDS: u32 = 4;
/// The period of the budget (docs/gvl.md): a traced slice uses half of the budget of a period, so there are about two slices per period.
const PERIOD_S: u32 = 10;
/// Seconds until the cost of the first moments, which are traced completely, is compensated by pauses in tracing.
const SETTLE_S: u32 = 12;
/// Seconds before a turn without a budget: only the server must warm up.
const WARM_S: u32 = 2;
/// Approximate total time to start and stop gctrace, seconds.
const AROUND_S: u32 = 4;
const PATIENCE: Duration = Duration::from_mins(1);

/// Arguments of `bench --gvl`.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Options {
    /// With --gvl: what is compared with tracing of GC alone.
    #[arg(long, value_enum, value_delimiter = ',', requires = "gvl", default_value = "budget")]
    arms: Vec<Arm>,
    /// With --gvl: seconds of a measured turn; the budget of --gvl comes out even in multiples of 10.
    #[arg(long, requires = "gvl", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// With --gvl: measure this gctrace instead of building one.
    #[arg(long, requires = "gvl", value_name = "FILE")]
    pub(super) gctrace: Option<PathBuf>,
}

impl Options {
    /// These arguments as a command line, if they apply.
    pub(super) fn again(&self, wanted: bool) -> Vec<OsString> {
        if !wanted {
            return Vec::new();
        }
        let arms: Vec<&str> = self.arms.iter().map(|arm| arm.name()).collect();
        let mut all: Vec<OsString> = vec!["--gvl".into(), "--arms".into(), arms.join(",").into()];
        all.extend(["--seconds".into(), self.seconds.to_string().into()]);
        all.extend(self.gctrace.iter().flat_map(|path| ["--gctrace".into(), path.into()]));
        all
    }
}

/// What gctrace does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Arm {
    /// GC only: the others are compared with it.
    #[value(skip)]
    Gc,
    /// `--gvl`, with its budget.
    Budget,
    /// `--gvl=futex`, with its budget.
    Futex,
    /// `--gvl --gvl-budget 100`: all the time, each wait of at least 1 ms reported.
    All,
    /// The same without reports of individual waits: only sums.
    Sums,
}

impl Arm {
    const fn name(self) -> &'static str {
        match self {
            Self::Gc => "gc",
            Self::Budget => "budget",
            Self::Futex => "futex",
            Self::All => "all",
            Self::Sums => "sums",
        }
    }

    const fn options(self) -> &'static [&'static str] {
        match self {
            Self::Gc => &[],
            Self::Budget => &["--gvl"],
            Self::Futex => &["--gvl=futex"],
            Self::All => &["--gvl", "--gvl-budget", "100"],
            Self::Sums => &["--gvl", "--gvl-budget", "100", "--gvl-threshold", "1h"],
        }
    }

    const fn settle_s(self) -> u32 {
        match self {
            Self::Budget | Self::Futex => SETTLE_S,
            Self::Gc | Self::All | Self::Sums => WARM_S,
        }
    }
}

/// The subject of the measurement, and where its files are.
struct Bench {
    gctrace: PathBuf,
    puma: Puma,
    live: Live,
}

/// The results of a turn.
#[derive(Clone, Copy)]
struct Turn {
    load: Load,
    /// CPU time of the server per request, microseconds.
    cpu_us: f64,
    /// CPU time of gctrace's user space, percent of a core.
    agent_percent: f64,
    /// The ledger of the whole run of gctrace, including the time before the turn.
    ledger: Ledger,
}

/// The turns of one round and endpoint, in the order of [`Plan::arms`].
type Round = Vec<Turn>;

/// The requested measurement.
struct Plan {
    rounds: u32,
    seconds: u32,
    /// The arms; [`Arm::Gc`] is the first.
    arms: Vec<Arm>,
}

impl Plan {
    fn new(rounds: u32, options: &Options) -> Self {
        let mut arms = vec![Arm::Gc];
        for &arm in &options.arms {
            if !arms.contains(&arm) {
                arms.push(arm);
            }
        }
        Self { rounds, seconds: options.seconds, arms }
    }

    /// Approximate duration, seconds.
    fn seconds(&self) -> u32 {
        let turns: u32 = self.arms.iter().map(|arm| AROUND_S + arm.settle_s() + self.seconds).sum();
        turns * self.rounds * ENDPOINTS.len() as u32 + costs::seconds(&self.arms)
    }

    /// The order in which the arms have their turns.
    fn order(&self, round: u32) -> Vec<usize> {
        let order = 0..self.arms.len();
        if round.is_multiple_of(2) { order.rev().collect() } else { order.collect() }
    }
}

/// Runs the measurement.
pub(super) fn run(options: &Options, rounds: u32, json: bool) -> Result<()> {
    check()?;
    let plan = Plan::new(rounds, options);
    let gctrace = match &options.gctrace {
        Some(path) => path.canonicalize().with_context(|| format!("cannot find {}", path.display()))?,
        None => target_dir()?.join("release/gctrace"),
    };
    ensure!(gctrace.is_file(), "{} is not a file: leave --gctrace out, and it is built", gctrace.display());
    announce(&plan, &gctrace);
    let live = Live::begin()?;
    let puma = Puma::start(&live.path("puma.log"))?;
    let mut bench = Bench { gctrace, puma, live };
    for (endpoint, _) in ENDPOINTS {
        bench.puma.load(endpoint, WARM_S)?;
    }
    let mut all: Vec<Vec<Round>> = ENDPOINTS.iter().map(|_| Vec::new()).collect();
    for number in 1..=plan.rounds {
        for ((endpoint, _), rounds) in ENDPOINTS.iter().zip(&mut all) {
            let order = plan.order(number);
            let mut turns = Vec::new();
            for &place in &order {
                let arm = plan.arms[place];
                let turn = bench.turn(arm, endpoint, plan.seconds)?;
                progress(format!(
                    "bench: gvl {number}/{}: /{endpoint} {}: {:.1} requests/s{}",
                    plan.rounds,
                    arm.name(),
                    turn.load.per_second,
                    turn.ledger
                        .watched_percent()
                        .map_or(String::new(), |p| format!(", watched {p:.1} % of the run"))
                ));
                turns.push((place, turn));
            }
            turns.sort_by_key(|(place, _)| *place);
            rounds.push(turns.into_iter().map(|(_, turn)| turn).collect());
        }
    }
    let costs = costs::measure(&mut bench, &plan.arms)?;
    bench.puma.end()?;
    if json {
        println!("{}", report::to_json(&plan, &all, &costs));
    } else {
        report::print(&plan, &all, &costs);
    }
    Ok(())
}

/// Prints what will be measured, and how long it will take.
fn announce(plan: &Plan, gctrace: &Path) {
    let names: Vec<&str> = plan.arms.iter().map(|arm| arm.name()).collect();
    progress(format!("bench: gctrace is {}", gctrace.display()));
    progress(format!(
        "bench: {} rounds of turns of {} s ({}; before them {WARM_S} s to get going, {SETTLE_S} where there is a budget to settle to), \
         about {} minutes in all",
        plan.rounds,
        plan.seconds,
        names.join(", "),
        (plan.seconds() + 30) / 60
    ));
    if !plan.seconds.is_multiple_of(PERIOD_S) && plan.arms.iter().any(|arm| arm.settle_s() == SETTLE_S) {
        progress(format!(
            "bench: turns that are no multiple of {PERIOD_S} s have more or less of the time that is watched in them than is so in \
             the long run"
        ));
    }
}

impl Bench {
    fn turn(&mut self, arm: Arm, endpoint: &str, seconds: u32) -> Result<Turn> {
        let mut gctrace = Tracer::start(self, self.puma.pid(), arm.options())?;
        self.puma.load(endpoint, arm.settle_s())?;
        let before = (Agent::read(self.puma.pid())?.cpu, Agent::read(gctrace.process.pid())?.cpu);
        let load = self.puma.load(endpoint, seconds)?;
        let after = (Agent::read(self.puma.pid())?.cpu, Agent::read(gctrace.process.pid())?.cpu);
        gctrace.check()?;
        Ok(Turn {
            load,
            cpu_us: (after.0 - before.0) * 1e6 / load.requests as f64,
            agent_percent: (after.1 - before.1) * 100.0 / f64::from(seconds),
            ledger: gctrace.stop()?,
        })
    }
}

/// A gctrace that traces one process.
struct Tracer {
    process: Running,
    errors: BufReader<ChildStderr>,
    lines: PathBuf,
}

impl Tracer {
    /// Starts gctrace and waits until it has attached.
    fn start(bench: &Bench, pid: u32, options: &[&str]) -> Result<Self> {
        let lines = bench.live.path("gctrace.jsonl");
        let file = fs::File::create(&lines).with_context(|| format!("cannot create {}", lines.display()))?;
        let mut command = Command::new(&bench.gctrace);
        command.args(["--pid", &pid.to_string(), "--format", "jsonl"]).args(options);
        command.arg("--cache-dir").arg(bench.live.path("cache"));
        command.stdin(Stdio::null()).stdout(file).stderr(Stdio::piped());
        let mut process = Running::start(&mut command)?;
        let errors = until_ready(&mut process)?;
        Ok(Self { process, errors, lines })
    }

    /// Fails if gctrace has ended.
    fn check(&mut self) -> Result<()> {
        if let Some(status) = self.process.ended()? {
            let said = std::io::read_to_string(&mut self.errors).unwrap_or_default();
            bail!("gctrace ended by itself ({status}) before the turn was over: {said}");
        }
        Ok(())
    }

    /// Stops gctrace; its ledger must add up.
    fn stop(mut self) -> Result<Ledger> {
        self.process.signal(Signal::INT)?;
        let said = std::io::read_to_string(&mut self.errors).context("cannot read what gctrace says")?;
        let status = self.process.wait(PATIENCE)?;
        ensure!(status.success(), "gctrace ended with {status} after SIGINT: {said}");
        ensure!(!said.contains("DOES NOT BALANCE"), "{said}");
        let ledger = Ledger::read(&self.lines).with_context(|| said)?;
        // Let the probes be removed before the next gctrace starts.
        thread::sleep(Duration::from_millis(500));
        Ok(ledger)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(arms: &[Arm], seconds: u32) -> Options {
        Options { arms: arms.to_vec(), seconds, gctrace: None }
    }

    /// GC alone comes first, and once; every other round is in reverse order.
    #[test]
    fn orders() {
        let plan = Plan::new(4, &options(&[Arm::All, Arm::Budget, Arm::All], 20));
        assert_eq!(plan.arms, [Arm::Gc, Arm::All, Arm::Budget]);
        assert_eq!(
            (plan.order(1), plan.order(2), plan.order(3)),
            (vec![0, 1, 2], vec![2, 1, 0], vec![0, 1, 2])
        );
    }

    /// Without options it takes about ten minutes.
    #[test]
    fn ten_minutes() {
        let minutes = Plan::new(ROUNDS, &options(&[Arm::Budget], 20)).seconds() / 60;
        assert!((5..=10).contains(&minutes), "{minutes}");
    }
}
