//! `cargo xtask bench --memory`: the cost of gctrace's ways of tracing memory, for a program that mostly allocates and for gctrace itself.
//!
//! One program runs for the whole measurement. The turn of each arm has a turn without gctrace before and after it, and is compared
//! with their mean, so that a machine whose speed changes shifts no ratio; every other round runs in reverse order.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::{ChildStdout, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::Signal;
use serde_json::json;

use super::{Agent, Spread, interval, script};
use xtask::util::{Running, progress, target_dir};

/// Iterations of the script's loop per turn: about two seconds.
const WORK: u32 = 2_000_000;
/// Time until gctrace has attached, or has read the heap for the first time.
const SETTLED: Duration = Duration::from_secs(3);
/// Pause after a turn, during which the probes are removed.
const REST: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_mins(1);

/// The ways of tracing memory: name, and arguments of gctrace. `FILE` stands for an output file.
const ARMS: [(&str, &[&str]); 6] = [
    ("GC only", &["--quiet"]),
    ("--alloc", &["--quiet", "--alloc"]),
    ("--alloc --pprof", &["--quiet", "--alloc", "--pprof", "FILE"]),
    // With the default budget its measuring window would end at once.
    ("malloc --budget 100", &["malloc", "--duration", "1h", "--budget", "100"]),
    ("heap --by class --every 1s", &["heap", "--by", "class", "--every", "1s"]),
    ("heap --leaks", &["heap", "--leaks", "1h"]),
];

/// The results of a turn.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Turn {
    wall_ns: f64,
    cpu_ns: f64,
    objects: f64,
    /// CPU time of gctrace during the turn, percent of a core.
    agent_percent: f64,
    agent_peak_kib: f64,
}

impl Turn {
    /// Parses the answer of the script.
    fn read(line: &str) -> Option<Self> {
        let field = |name: &str| {
            line.split_whitespace().find_map(|word| word.strip_prefix(name))?.parse::<f64>().ok()
        };
        Some(Self {
            wall_ns: field("wall_ns=")?,
            cpu_ns: field("cpu_ns=")?,
            objects: field("objects=")?,
            agent_percent: 0.0,
            agent_peak_kib: 0.0,
        })
    }
}

/// A turn, and the turns without gctrace before and after it.
struct Pair {
    with: Turn,
    without: [Turn; 2],
}

impl Pair {
    fn ratio(&self, of: fn(&Turn) -> f64) -> f64 {
        of(&self.with) / f64::midpoint(of(&self.without[0]), of(&self.without[1]))
    }
}

/// Runs the measurement.
pub(super) fn run(rounds: u32, json: bool) -> Result<()> {
    let scratch = target_dir()?.join("bench");
    fs::create_dir_all(&scratch).with_context(|| format!("cannot create {}", scratch.display()))?;
    let mut program = Program::start()?;
    let gctrace = target_dir()?.join("release/gctrace");
    let mut all: Vec<Vec<Pair>> = ARMS.iter().map(|_| Vec::new()).collect();
    // A first run grows the heap and fills the method caches.
    program.work()?;
    for number in 1..=rounds {
        let mut places: Vec<usize> = (0..ARMS.len()).collect();
        if number.is_multiple_of(2) {
            places.reverse();
        }
        let mut before = program.work()?;
        for place in places {
            let (name, arguments) = ARMS[place];
            let with =
                watched(&gctrace, arguments, &mut program, &scratch).with_context(|| name.to_owned())?;
            let after = program.work()?;
            let pair = Pair { with, without: [before, after] };
            progress(format!(
                "bench: memory {number}/{rounds}: CPU × {:.3} with {name}",
                pair.ratio(|turn| turn.cpu_ns)
            ));
            all[place].push(pair);
            before = after;
        }
    }
    program.end()?;
    fs::remove_dir_all(&scratch).with_context(|| format!("cannot remove {}", scratch.display()))?;
    report(&all, json);
    Ok(())
}

/// The traced program.
struct Program {
    process: Running,
    answers: BufReader<ChildStdout>,
}

impl Program {
    fn start() -> Result<Self> {
        let mut command = script("bench_memory");
        let mut process = Running::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
        let answers = process.child().stdout.take().context("no pipe from the script")?;
        Ok(Self { process, answers: BufReader::new(answers) })
    }

    fn work(&mut self) -> Result<Turn> {
        let input = self.process.child().stdin.as_mut().context("no pipe to the script")?;
        writeln!(input, "{WORK}").context("cannot start the script")?;
        let mut line = String::new();
        self.answers.read_line(&mut line).context("cannot read what the script says")?;
        Turn::read(&line).with_context(|| format!("bench_memory.rb answered {line:?}"))
    }

    /// Closes the program's input, which ends it.
    fn end(mut self) -> Result<()> {
        drop(self.process.child().stdin.take());
        let status = self.process.wait(PATIENCE)?;
        ensure!(status.success(), "bench_memory.rb ended with {status}");
        Ok(())
    }
}

/// A turn under gctrace.
fn watched(gctrace: &PathBuf, arguments: &[&str], program: &mut Program, scratch: &Path) -> Result<Turn> {
    let said = scratch.join("memory.err");
    let errors = fs::File::create(&said).with_context(|| format!("cannot create {}", said.display()))?;
    let said = || fs::read_to_string(&said).unwrap_or_default();
    let mut command = Command::new(gctrace);
    for argument in arguments {
        if *argument == "FILE" {
            command.arg(scratch.join("memory.pb.gz"));
        } else {
            command.arg(argument);
        }
    }
    command.args(["--pid", &program.process.pid().to_string()]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
    let mut tracer = Running::start(&mut command)?;
    thread::sleep(SETTLED);
    // A run that is not measured: the first stacks of a process wake gctrace one by one, and a budget is used up.
    program.work()?;
    let before = Agent::read(tracer.pid()).with_context(|| format!("gctrace has ended: {}", said()))?;
    let turn = program.work()?;
    let after = Agent::read(tracer.pid()).with_context(|| format!("gctrace has ended: {}", said()))?;
    if let Some(status) = tracer.ended()? {
        bail!("gctrace ended by itself ({status}): {}", said());
    }
    tracer.signal(Signal::INT)?;
    let status = tracer.wait(PATIENCE)?;
    // A repeated census has nothing to finish, and is terminated by the signal itself.
    let ended = status.success() || status.signal() == Some(Signal::INT.as_raw());
    ensure!(ended, "gctrace ended with {status} after SIGINT: {}", said());
    thread::sleep(REST);
    Ok(Turn {
        agent_percent: (after.cpu - before.cpu) * 1e11 / turn.wall_ns,
        agent_peak_kib: after.peak_rss_kib as f64,
        ..turn
    })
}

fn report(all: &[Vec<Pair>], json: bool) {
    let rounds = all.first().map_or(0, Vec::len);
    let alone =
        |of: fn(&Turn) -> f64| Spread::of(all.iter().flatten().flat_map(|pair| pair.without.iter().map(of)));
    let (cpu, objects) = (alone(|turn| turn.cpu_ns), alone(|turn| turn.objects));
    let mut rows = serde_json::Map::new();
    if !json {
        println!(
            "without gctrace: {:.2} s of CPU for {:.1} million objects ({:.2} to {:.2}); ratios of {rounds} rounds, median and its interval of 95 %\n",
            cpu.median / 1e9,
            objects.median / 1e6,
            cpu.min / 1e9,
            cpu.max / 1e9
        );
        println!(
            "{:<28}{:>26}{:>26}{:>12}{:>12}",
            "", "CPU of the program", "its wall time", "gctrace", "peak RSS"
        );
    }
    for ((name, _), pairs) in ARMS.iter().zip(all) {
        let ratio = |of: fn(&Turn) -> f64| {
            let ratios: Vec<f64> = pairs.iter().map(|pair| pair.ratio(of)).collect();
            let interval = interval(&ratios);
            (Spread::of(ratios.into_iter()).median, interval.0, interval.1)
        };
        let (cpu, wall) = (ratio(|turn| turn.cpu_ns), ratio(|turn| turn.wall_ns));
        let agent = Spread::of(pairs.iter().map(|pair| pair.with.agent_percent)).median;
        let peak = pairs.iter().map(|pair| pair.with.agent_peak_kib).fold(0.0, f64::max) / 1024.0;
        if json {
            let row = json!({
                "cpu_ratio": cpu.0, "cpu_interval95": [cpu.1, cpu.2], "wall_ratio": wall.0, "wall_interval95": [wall.1, wall.2],
                "agent_percent_of_core": agent, "agent_peak_rss_mib": peak,
            });
            rows.insert((*name).to_owned(), row);
            continue;
        }
        let text =
            |(median, least, most): (f64, f64, f64)| format!("× {median:.3} ({least:.3} to {most:.3})");
        println!(
            "{name:<28}{:>26}{:>26}{:>12}{:>12}",
            text(cpu),
            text(wall),
            format!("{agent:.1} %"),
            format!("{peak:.1} MiB")
        );
    }
    if json {
        println!(
            "{}",
            json!({"rounds": rounds, "cpu_ns": cpu.median, "objects": objects.median, "with": rows})
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fields in any order; an invalid line is refused.
    #[test]
    fn answers() {
        let turn = Turn::read("cpu_ns=2000 objects=7 wall_ns=3000\n").unwrap();
        assert_eq!((turn.wall_ns, turn.cpu_ns, turn.objects), (3000.0, 2000.0, 7.0));
        assert_eq!(Turn::read("cpu_ns=2000\n"), None);
    }
}
