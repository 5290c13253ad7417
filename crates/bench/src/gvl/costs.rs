//! The cost of a hand-over of the GVL in BPF programs: by gctrace's own clock, and by the kernel's, in short runs that are traced
//! throughout. The kernel's run statistics cost time themselves, so nothing else is measured in those runs.

use std::{
    collections::BTreeSet,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::Result;

use super::{AROUND_S, Arm, Bench, Tracer, figures::Ledger, load::ENDPOINTS};
use crate::statistics::{KPROBE, Program, Statistics, programs};
use xtask::{
    demo::ruby,
    util::{Running, progress},
};

/// Length of a run, seconds.
const RUN_S: u32 = 3;
/// Threads that only hand over the GVL: another thread is waiting for it each time.
const STORM: (&str, &str) = ("pass", "four threads in Thread.pass");
const STORM_PROGRAM: &str = "4.times { Thread.new { loop { Thread.pass } } }; sleep";

/// The results of two runs.
pub(super) struct Cost {
    pub(super) target: &'static str,
    pub(super) arm: Arm,
    /// The ledger of the run without the kernel's statistics.
    pub(super) ledger: Ledger,
    /// The ledger of the run with the kernel's statistics, and (`kernel`) those statistics.
    pub(super) with_statistics: Ledger,
    pub(super) kernel: Kernel,
}

/// Statistics of the programs that do not run without `--gvl`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Kernel {
    /// Programs at GVL points: nanoseconds, and number of runs.
    pub(super) points_ns: u64,
    pub(super) points: u64,
    /// Programs on tracepoints, for any thread of the host: nanoseconds, and number of runs.
    pub(super) others_ns: u64,
    pub(super) others: u64,
}

impl Kernel {
    fn of(programs: &[Program], without_gvl: &BTreeSet<String>) -> Self {
        let mut sums = Self::default();
        for program in programs.iter().filter(|program| !without_gvl.contains(&program.tag)) {
            let (ns, runs) = if program.kind == KPROBE {
                (&mut sums.points_ns, &mut sums.points)
            } else {
                (&mut sums.others_ns, &mut sums.others)
            };
            *ns += program.ns;
            *runs += program.runs;
        }
        sums
    }
}

/// The arms whose costs are reported.
fn arms(selected: &[Arm]) -> Vec<Arm> {
    let futex = selected.contains(&Arm::Futex).then_some(Arm::Futex);
    [Arm::All, Arm::Sums].into_iter().chain(futex).collect()
}

/// The options with which gctrace traces the GVL throughout.
fn options(arm: Arm) -> &'static [&'static str] {
    match arm {
        Arm::Futex => &["--gvl=futex", "--gvl-budget", "100"],
        _ => arm.options(),
    }
}

/// Approximate duration of the measurement, seconds.
pub(super) fn seconds(selected: &[Arm]) -> u32 {
    let runs = 1 + 2 * arms(selected).len() as u32;
    runs * (ENDPOINTS.len() as u32 + 1) * (RUN_S + AROUND_S)
}

/// The traced process.
enum Target {
    Puma(&'static str),
    /// A process that runs as long as this value exists.
    Storm(Running),
}

impl Target {
    fn pid(&self, bench: &Bench) -> u32 {
        match self {
            Self::Puma(_) => bench.puma.pid(),
            Self::Storm(process) => process.pid(),
        }
    }

    fn work(&self, bench: &mut Bench) -> Result<()> {
        match self {
            Self::Puma(endpoint) => bench.puma.load(endpoint, RUN_S).map(drop),
            Self::Storm(_) => {
                thread::sleep(Duration::from_secs(RUN_S.into()));
                Ok(())
            }
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Puma(endpoint) => endpoint,
            Self::Storm(_) => STORM.0,
        }
    }
}

/// The rows of the table: name and description.
pub(super) fn targets() -> [(&'static str, &'static str); 3] {
    [ENDPOINTS[0], ENDPOINTS[1], STORM]
}

/// Runs the measurement.
pub(super) fn measure(bench: &mut Bench, selected: &[Arm]) -> Result<Vec<Cost>> {
    let mut costs = Vec::new();
    for place in 0..=ENDPOINTS.len() {
        let target = match ENDPOINTS.get(place) {
            Some((endpoint, _)) => Target::Puma(endpoint),
            None => Target::Storm(storm()?),
        };
        progress(format!("bench: gvl: what a hand-over costs: {}", target.name()));
        let without_gvl = {
            let _on = Statistics::on()?;
            let (_, programs) = run(bench, &target, Arm::Gc)?;
            let ran = programs.into_iter().filter(|program| program.runs > 0);
            ran.map(|program| program.tag).collect::<BTreeSet<String>>()
        };
        for arm in arms(selected) {
            if arm == Arm::Futex && matches!(target, Target::Storm(_)) {
                // Almost none of its waits blocks.
                continue;
            }
            let (ledger, _) = run(bench, &target, arm)?;
            let _on = Statistics::on()?;
            let (with_statistics, programs) = run(bench, &target, arm)?;
            let kernel = Kernel::of(&programs, &without_gvl);
            costs.push(Cost { target: target.name(), arm, ledger, with_statistics, kernel });
        }
    }
    Ok(costs)
}

fn storm() -> Result<Running> {
    let mut command = Command::new(ruby());
    Running::start(command.args(["--disable-gems", "-e", STORM_PROGRAM]).stdin(Stdio::null()))
}

/// One run. Returns its ledger, and the run statistics of its programs at the end of the work.
fn run(bench: &mut Bench, target: &Target, arm: Arm) -> Result<(Ledger, Vec<Program>)> {
    let mut gctrace = Tracer::start(bench, target.pid(bench), options(arm))?;
    target.work(bench)?;
    gctrace.check()?;
    let programs = programs(gctrace.process.pid())?;
    Ok((gctrace.stop()?, programs))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Programs that also run without `--gvl` are not part of the cost of tracing the GVL.
    #[test]
    fn programs_of_the_gvl() {
        let program = |kind, tag: &str, runs, ns| Program { kind, tag: tag.into(), runs, ns };
        let programs = [
            program(KPROBE, "ready", 10, 4_000),
            program(KPROBE, "resumed", 10, 6_000),
            program(KPROBE, "gc_enter", 7, 700),
            program(17, "switch", 40, 2_000),
            program(5, "exit", 3, 300),
        ];
        let without = ["gc_enter", "exit"].map(String::from).into();
        let wanted = Kernel { points_ns: 10_000, points: 20, others_ns: 2_000, others: 40 };
        assert_eq!(Kernel::of(&programs, &without), wanted);
        assert_eq!(Kernel::of(&[], &without), Kernel::default());
    }
}
