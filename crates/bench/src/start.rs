//! How long gctrace takes from its start to `ready`, and how much CPU time, most of which the kernel spends verifying the BPF programs.
//!
//! Each round starts every binary with every set of options once, so that other load on the machine affects all of them.

use std::{
    fs,
    io::Read as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use serde_json::{Map, Value, json};

use super::{Agent, Spread, ruby, until_ready};
use xtask::util::{Running, progress, target_dir};

/// The file for profiles, in the scratch directory.
const FOLDED: &str = "start.folded";
/// Sets of options, by name.
const SETS: [(&str, &[&str]); 6] = [
    ("gc", &[]),
    ("stacks", &["--folded", FOLDED]),
    ("wall", &["--wall", "--folded", FOLDED]),
    ("gvl", &["--gvl"]),
    ("all", &["--gvl", "--wall", "--folded", FOLDED]),
    ("doctor", &["doctor"]),
];

/// The measurements of one start.
#[derive(Clone, Copy)]
struct Took {
    /// Time until it was ready, seconds; for doctor, until its end.
    wall: f64,
    /// User and system time so far, seconds; `None` if not measured, as for doctor, which has ended by then.
    cpu: Option<f64>,
}

/// Runs the measurement with these binaries, or with the built one. The second is compared with the first.
pub(super) fn run(binaries: &[PathBuf], rounds: u32, as_json: bool) -> Result<()> {
    let built = [target_dir()?.join("release/gctrace")];
    let binaries = if binaries.is_empty() { &built } else { binaries };
    ensure!(binaries.len() <= 2, "at most two binaries can be compared");
    let scratch = target_dir()?.join("bench");
    fs::create_dir_all(&scratch).with_context(|| format!("cannot create {}", scratch.display()))?;
    let traced = Running::start(Command::new(ruby()).args(["-e", "sleep"]).stdin(Stdio::null()))?;
    let pid = traced.pid().to_string();
    // By set of options, then by binary.
    let mut all = vec![vec![Vec::new(); binaries.len()]; SETS.len()];
    // The first round fills the caches, and does not count.
    for round in 0..=rounds {
        for ((name, options), took) in SETS.iter().zip(&mut all) {
            for (index, (binary, took)) in binaries.iter().zip(took).enumerate() {
                let one = start(binary, options, &pid, &scratch)?;
                progress(format!(
                    "bench: start {round}/{rounds}: {name} of binary {index}: {:.2} s",
                    one.wall
                ));
                if round > 0 {
                    took.push(one);
                }
            }
        }
    }
    if as_json {
        println!(
            "{}",
            Value::Object(
                SETS.iter().zip(&all).map(|((name, _), took)| entry(name, took)).collect::<Map<_, _>>()
            )
        );
    } else {
        print(&all);
    }
    Ok(())
}

fn start(binary: &Path, options: &[&str], pid: &str, scratch: &Path) -> Result<Took> {
    // Resolved before the working directory changes.
    let binary = fs::canonicalize(binary).with_context(|| format!("cannot find {}", binary.display()))?;
    let begin = Instant::now();
    let mut command = Command::new(binary);
    command
        .args(options)
        .current_dir(scratch)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    if options.first() == Some(&"doctor") {
        let mut doctor = Running::start(&mut command)?;
        doctor.wait(Duration::from_mins(1))?;
        return Ok(Took { wall: begin.elapsed().as_secs_f64(), cpu: None });
    }
    let mut gctrace = Running::start(command.args(["--pid", pid, "--quiet"]))?;
    let mut said = until_ready(&mut gctrace)?;
    let wall = begin.elapsed().as_secs_f64();
    let cpu = Some(Agent::read(gctrace.pid())?.cpu);
    gctrace.signal(Signal::INT)?;
    let mut rest = String::new();
    said.read_to_string(&mut rest).context("cannot read what gctrace says")?;
    let status = gctrace.wait(Duration::from_mins(1))?;
    ensure!(status.success(), "gctrace ended with {status}: {rest}");
    Ok(Took { wall, cpu })
}

/// Spreads per binary (of CPU time if it was measured), and the spread of the ratios of the second to the first binary by round.
fn spreads(took: &[Vec<Took>]) -> (Vec<(Spread, Option<Spread>)>, Option<Spread>) {
    let cpu = |took: &[Took]| {
        let times: Option<Vec<f64>> = took.iter().map(|took| took.cpu).collect();
        times.map(|times| Spread::of(times.into_iter()))
    };
    let each = took.iter().map(|took| (Spread::of(took.iter().map(|took| took.wall)), cpu(took))).collect();
    let ratio = match took {
        [first, second] => Some(Spread::of(first.iter().zip(second).map(|(a, b)| b.wall / a.wall))),
        _ => None,
    };
    (each, ratio)
}

fn entry(name: &str, took: &[Vec<Took>]) -> (String, Value) {
    let spread = |s: &Spread| json!({"median": s.median, "min": s.min, "max": s.max});
    let (each, ratio) = spreads(took);
    let each: Vec<Value> = each
        .iter()
        .map(|(wall, cpu)| json!({"wall_s": spread(wall), "cpu_s": cpu.as_ref().map(spread)}))
        .collect();
    (name.to_owned(), json!({"binaries": each, "ratio": ratio.as_ref().map(spread)}))
}

fn print(all: &[Vec<Vec<Took>>]) {
    println!("{:<8}{:>8}{:>8}{:>8}{:>8}{:>8}", "options", "binary", "wall s", "min", "max", "cpu s");
    for ((name, _), took) in SETS.iter().zip(all) {
        let (each, ratio) = spreads(took);
        for (index, (wall, cpu)) in each.iter().enumerate() {
            let cpu = cpu.as_ref().map_or_else(|| "-".to_owned(), |cpu| format!("{:.2}", cpu.median));
            println!("{name:<8}{index:>8}{:>8.2}{:>8.2}{:>8.2}{cpu:>8}", wall.median, wall.min, wall.max);
        }
        if let Some(Spread { median, min, max }) = ratio {
            println!("{name:<8}{:>8}{median:>8.2}{min:>8.2}{max:>8.2}   by rounds", "ratio");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ratio is computed by round, not from the medians.
    #[test]
    fn ratio_by_rounds() {
        let took = |walls: [f64; 3]| walls.map(|wall| Took { wall, cpu: Some(0.5) }).to_vec();
        let (each, ratio) = spreads(&[took([2.0, 4.0, 8.0]), took([1.0, 2.0, 2.0])]);
        assert_eq!(each[0].0, Spread { median: 4.0, min: 2.0, max: 8.0 });
        assert_eq!(ratio, Some(Spread { median: 0.5, min: 0.25, max: 0.5 }));
        assert_eq!(spreads(&[took([1.0, 2.0, 3.0])]).1, None);
    }

    /// CPU time that was not measured is absent.
    #[test]
    fn no_cpu_time() {
        let (_, entry) = entry("doctor", &[vec![Took { wall: 2.0, cpu: None }]]);
        assert_eq!(entry["binaries"][0]["cpu_s"], Value::Null);
        assert_eq!(entry["binaries"][0]["wall_s"]["median"], 2.0);
    }
}
