//! How long a tracer keeps a running thread from running, measured by the gaps between readings of a clock in a loop.
//!
//! One process runs for the whole measurement. Each round has one turn without a tracer and one with each of them, and
//! yields one difference per tracer: other interruptions of a thread (ticks, other programs, a stolen CPU) are in both of its terms.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{ChildStdout, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::{Spread, script, stacks_taken, until_ready};
use xtask::util::{Running, progress, target_dir};

/// How long each turn lasts.
const TURN: Duration = Duration::from_secs(8);
/// How long the thread runs under a tracer before it is measured: each of the first 1,024 stacks of a process wakes gctrace at once, and rbspy
/// reads what it needs of a new process.
const WARM: Duration = Duration::from_secs(12);
/// Gaps longer than this count, nanoseconds. A reading takes some tenths of a microsecond.
const LONGER_THAN: u64 = 3_000;
/// Pause from the start of a tracer, or from its ready message, to the turn, during which it attaches.
const SETTLE: Duration = Duration::from_secs(2);
/// Pause from the end of a tracer to the next turn, during which it detaches.
const REST: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_mins(1);
/// Samples per second.
const RATE: &str = "99";
/// The method of the script in which the thread runs while it is measured.
const METHOD: &str = "read_clock";

/// The script's report on a turn.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Gaps {
    wall_ns: u64,
    gap_ns: u64,
    count: u64,
    longest_ns: u64,
}

/// The results of a turn.
#[derive(Clone, Copy)]
struct Turn {
    gaps: Gaps,
    /// How long the thread was runnable while others had its CPU, if the kernel reports that: on a busy machine most of
    /// the gaps are of this kind, with any tracer.
    queued_ns: Option<u64>,
    /// Stacks of the turn and of the time before it, if there is a tracer: they prove that it was active, and how much.
    samples: Option<u64>,
}

struct Round {
    without: Turn,
    gctrace: Turn,
    rbspy: Option<Turn>,
}

/// Runs the measurement, with rbspy as well if there is one.
pub(super) fn run(rbspy: Option<&Path>, rounds: u32, json: bool) -> Result<()> {
    let scratch = target_dir()?.join("bench");
    fs::create_dir_all(&scratch).with_context(|| format!("cannot create {}", scratch.display()))?;
    let mut traced = TracedRuby::start()?;
    let mut results = Vec::new();
    for number in 1..=rounds {
        let tell = |tracer: &str, turn: &Turn| {
            progress(format!("bench: stalls {number}/{rounds}: {:.3} % {tracer}", turn.gaps.percent()));
        };
        let without = traced.turn(TURN)?;
        tell("without a tracer", &without);
        let gctrace = gctrace(&mut traced, &scratch)?;
        tell("with gctrace", &gctrace);
        let rbspy = rbspy.map(|path| self::rbspy(path, &mut traced, &scratch)).transpose()?;
        if let Some(rbspy) = &rbspy {
            tell("with rbspy", rbspy);
        }
        results.push(Round { without, gctrace, rbspy });
    }
    traced.end()?;
    fs::remove_dir_all(&scratch).with_context(|| format!("cannot remove {}", scratch.display()))?;
    if json {
        println!("{}", to_json(&results));
    } else {
        print(&results);
    }
    Ok(())
}

/// The traced process.
struct TracedRuby {
    process: Running,
    answers: BufReader<ChildStdout>,
}

impl TracedRuby {
    fn start() -> Result<Self> {
        let mut command = script("bench_stalls");
        command.arg(LONGER_THAN.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Running::start(&mut command)?;
        let answers = process.child().stdout.take().context("no pipe from the script")?;
        Ok(Self { process, answers: BufReader::new(answers) })
    }

    fn pid(&self) -> String {
        self.process.pid().to_string()
    }

    /// Measures for this duration; the caller fills in the samples.
    fn turn(&mut self, length: Duration) -> Result<Turn> {
        let before = self.queued_ns();
        let input = self.process.child().stdin.as_mut().context("no pipe to the script")?;
        writeln!(input, "{}", length.as_secs()).context("cannot start the script")?;
        let mut line = String::new();
        self.answers.read_line(&mut line).context("cannot read what the script says")?;
        let gaps = Gaps::read(&line)
            .with_context(|| format!("bench_stalls.rb answered {line:?}, which is not an account of gaps"))?;
        let queued_ns = self.queued_ns().zip(before).map(|(after, before)| after - before);
        Ok(Turn { gaps, queued_ns, samples: None })
    }

    /// Total time that its main thread has waited for a CPU, nanoseconds.
    fn queued_ns(&self) -> Option<u64> {
        run_delay(&fs::read_to_string(format!("/proc/{}/schedstat", self.pid())).ok()?)
    }

    /// Closes the process's input, which ends it.
    fn end(mut self) -> Result<()> {
        drop(self.process.child().stdin.take());
        let status = self.process.wait(PATIENCE)?;
        ensure!(status.success(), "bench_stalls.rb ended with {status}");
        Ok(())
    }
}

fn gctrace(traced: &mut TracedRuby, scratch: &Path) -> Result<Turn> {
    let mut command = Command::new(target_dir()?.join("release/gctrace"));
    command.args([
        "--quiet",
        "--verbose",
        "--pid",
        &traced.pid(),
        "--rate",
        RATE,
        "--duration",
        "3600s",
        "--pprof",
    ]);
    command.arg(scratch.join("stalls.pb.gz"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut gctrace = Running::start(&mut command)?;
    let lines = until_ready(&mut gctrace)?;
    thread::sleep(SETTLE);
    traced.turn(WARM)?;
    let turn = traced.turn(TURN)?;
    let early = gctrace.ended()?;
    gctrace.signal(Signal::INT)?;
    let said = std::io::read_to_string(lines).context("cannot read what gctrace says")?;
    if let Some(status) = early {
        bail!("gctrace ended by itself ({status}) before the turn was over: {said}");
    }
    let status = gctrace.wait(PATIENCE)?;
    ensure!(status.success(), "gctrace ended with {status} after SIGINT: {said}");
    // The process uses CPU time only in turns, so all stacks belong to them.
    let samples = stacks_taken(&said)?;
    ensure!(samples > 0, "gctrace took no stack: {said}");
    thread::sleep(REST);
    Ok(Turn { samples: Some(samples), ..turn })
}

fn rbspy(path: &Path, traced: &mut TracedRuby, scratch: &Path) -> Result<Turn> {
    let (stacks, said) = (scratch.join("stalls.txt"), scratch.join("stalls.err"));
    let errors = fs::File::create(&said).with_context(|| format!("cannot create {}", said.display()))?;
    let said = || fs::read_to_string(&said).unwrap_or_default();
    // Stacks of an earlier round must not count for this one.
    fs::write(&stacks, "").with_context(|| format!("cannot write {}", stacks.display()))?;
    let mut command = Command::new(path);
    command.args(["record", "--silent", "--pid", &traced.pid(), "--rate", RATE, "--format", "collapsed"]);
    command.arg("--file").arg(&stacks).arg("--raw-file").arg(scratch.join("stalls.raw.gz"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
    let mut rbspy = Running::start(&mut command)?;
    thread::sleep(SETTLE);
    traced.turn(WARM)?;
    let turn = traced.turn(TURN)?;
    if let Some(status) = rbspy.ended()? {
        bail!("rbspy ended by itself ({status}) before the turn was over: {}", said());
    }
    rbspy.signal(Signal::INT)?;
    let status = rbspy.wait(PATIENCE)?;
    ensure!(status.success(), "rbspy ended with {status} after SIGINT: {}", said());
    let text = fs::read_to_string(&stacks).with_context(|| format!("cannot read {}", stacks.display()))?;
    let samples = samples_within(&text).with_context(|| format!("rbspy wrote unknown lines: {text}"))?;
    ensure!(samples > 0, "rbspy took no stack: {}", said());
    thread::sleep(REST);
    Ok(Turn { samples: Some(samples), ..turn })
}

/// Number of samples in collapsed stacks that contain the measured method: rbspy samples the thread while it waits for its turn, too.
fn samples_within(collapsed: &str) -> Option<u64> {
    let counts = collapsed.lines().map(|line| {
        let (stack, count) = line.rsplit_once(' ')?;
        let within = stack.split(';').any(|frame| frame.split(" - ").next() == Some(METHOD));
        Some(if within { count.parse::<u64>().ok()? } else { 0 })
    });
    counts.sum()
}

/// The second field of `/proc/PID/schedstat` (Documentation/scheduler/sched-stats.rst), nanoseconds. All fields
/// are zero if the kernel does not count.
fn run_delay(schedstat: &str) -> Option<u64> {
    let mut fields = schedstat.split_whitespace().map(str::parse);
    let ran: u64 = fields.next()?.ok()?;
    fields.next()?.ok().filter(|_| ran > 0)
}

impl Gaps {
    /// Parses a line such as `wall_ns=8000000042 gap_ns=9000 gaps=2 longest_ns=5000`.
    fn read(line: &str) -> Option<Self> {
        let field = |name: &str| {
            let text = line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='))?;
            text.parse().ok()
        };
        let gaps = Self {
            wall_ns: field("wall_ns")?,
            gap_ns: field("gap_ns")?,
            count: field("gaps")?,
            longest_ns: field("longest_ns")?,
        };
        (gaps.wall_ns > 0 && gaps.longest_ns <= gaps.gap_ns && gaps.gap_ns <= gaps.wall_ns).then_some(gaps)
    }

    /// Share of the time spent in gaps, percent.
    fn percent(&self) -> f64 {
        self.gap_ns as f64 * 100.0 / self.wall_ns as f64
    }
}

impl Turn {
    /// Share of the time spent waiting for a CPU, percent.
    fn queued_percent(&self) -> Option<f64> {
        Some(self.queued_ns? as f64 * 100.0 / self.gaps.wall_ns as f64)
    }
}

/// What a tracer adds to the share of gaps in the time, in percentage points.
fn added(rounds: &[Round], turn: fn(&Round) -> Option<Turn>) -> Option<Spread> {
    let added = |round| Some(turn(round)?.gaps.percent() - round.without.gaps.percent());
    let added: Option<Vec<f64>> = rounds.iter().map(added).collect();
    Some(Spread::of(added?.into_iter()))
}

/// Ratio of what gctrace adds to what rbspy adds; `None` if one of them is not above the other interruptions of the thread.
fn ratio(gctrace: &Spread, rbspy: &Spread) -> Option<f64> {
    (gctrace.median > 0.0 && rbspy.median > 0.0).then(|| gctrace.median / rbspy.median)
}

fn print(rounds: &[Round]) {
    println!("gaps of more than {} µs between two readings of the clock", LONGER_THAN / 1000);
    println!("queued: the thread was ready to run and others had its CPU, whose gaps are counted, too");
    println!(
        "{:>5}  {:<8}{:>10}{:>10}{:>8}{:>12}{:>9}",
        "round", "tracer", "% of time", "% queued", "gaps", "longest µs", "samples"
    );
    for (number, round) in (1..).zip(rounds) {
        let turns = [
            ("none", Some(&round.without)),
            ("gctrace", Some(&round.gctrace)),
            ("rbspy", round.rbspy.as_ref()),
        ];
        for (tracer, turn) in turns {
            let Some(Turn { gaps, samples, .. }) = turn else { continue };
            let queued =
                turn.and_then(Turn::queued_percent).map_or("-".into(), |percent| format!("{percent:.3}"));
            let samples = samples.map_or("-".into(), |samples| samples.to_string());
            let (percent, longest) = (gaps.percent(), gaps.longest_ns / 1000);
            println!(
                "{number:>5}  {tracer:<8}{percent:>10.3}{queued:>10}{:>8}{longest:>12}{samples:>9}",
                gaps.count
            );
        }
    }
    let (gctrace, rbspy) = (added(rounds, |round| Some(round.gctrace)), added(rounds, |round| round.rbspy));
    for (tracer, spread) in [("gctrace", &gctrace), ("rbspy", &rbspy)] {
        if let Some(Spread { median, min, max }) = spread {
            println!(
                "{tracer:<8}adds {median:.3} percentage points (median; {min:.3} to {max:.3}) in {} rounds",
                rounds.len()
            );
        }
    }
    if let (Some(gctrace), Some(rbspy)) = (gctrace, rbspy) {
        match ratio(&gctrace, &rbspy) {
            Some(ratio) => println!("gctrace adds {ratio:.3} of what rbspy adds (medians)"),
            None => println!("no ratio of the medians: not both are above what else interrupts the thread"),
        }
    }
}

fn to_json(rounds: &[Round]) -> Value {
    let turn = |turn: &Turn| {
        let gaps = &turn.gaps;
        json!({
            "wall_ns": gaps.wall_ns, "gap_ns": gaps.gap_ns, "percent": gaps.percent(), "gaps": gaps.count,
            "longest_ns": gaps.longest_ns, "queued_ns": turn.queued_ns, "samples": turn.samples,
        })
    };
    let spread = |s: &Spread| json!({ "median": s.median, "min": s.min, "max": s.max });
    let (gctrace, rbspy) = (added(rounds, |round| Some(round.gctrace)), added(rounds, |round| round.rbspy));
    let ratio = gctrace.as_ref().zip(rbspy.as_ref()).and_then(|(gctrace, rbspy)| ratio(gctrace, rbspy));
    let rounds: Vec<Value> = rounds
        .iter()
        .map(|round| {
            json!({
                "none": turn(&round.without), "gctrace": turn(&round.gctrace),
                "rbspy": round.rbspy.as_ref().map(turn),
            })
        })
        .collect();
    json!({
        "longer_than_ns": LONGER_THAN, "rounds": rounds, "gctrace_added_points": gctrace.as_ref().map(spread),
        "rbspy_added_points": rbspy.as_ref().map(spread), "gctrace_to_rbspy": ratio,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All fields count, in any order; impossible values are refused.
    #[test]
    fn account_of_a_turn() {
        let gaps = Gaps::read("gaps=2 wall_ns=8000 gap_ns=400 longest_ns=300\n").unwrap();
        assert_eq!(gaps, Gaps { wall_ns: 8000, gap_ns: 400, count: 2, longest_ns: 300 });
        assert!((gaps.percent() - 5.0).abs() < 1e-9);
        for wrong in [
            "",
            "wall_ns=8000 gap_ns=400 gaps=2",
            "wall_ns=8000 gap_ns=400 gaps=two longest_ns=300",
            "wall_ns=0 gap_ns=0 gaps=0 longest_ns=0",
            "wall_ns=8000 gap_ns=8001 gaps=2 longest_ns=300",
            "wall_ns=8000 gap_ns=400 gaps=2 longest_ns=401",
        ] {
            assert_eq!(Gaps::read(wrong), None, "{wrong}");
        }
    }

    /// A figure that the kernel does not count is absent, not zero.
    #[test]
    fn time_in_the_queue() {
        assert_eq!(run_delay("81234 567 9\n"), Some(567));
        assert_eq!(run_delay("81234 0 9\n"), Some(0));
        assert_eq!(run_delay("0 0 0\n"), None);
        assert_eq!(run_delay("81234"), None);
    }

    /// Samples from before the turn, and files named like the method, do not count.
    #[test]
    fn samples_of_the_turn() {
        let text = "<main> - /a b/x.rb:29 7\n\
            <main> - /a b/x.rb:29;read_clock - /a b/x.rb:27 88\n\
            <main> - /read_clock - /x.rb:29 3\n\
            <main> - /a b/x.rb:29;read_clock - /a b/x.rb:27;(unknown) [c function] - (unknown) 110\n";
        assert_eq!(samples_within(text), Some(198));
        assert_eq!(samples_within(""), Some(0));
        assert_eq!(samples_within("<main> - x.rb:1;read_clock - x.rb:2 many"), None);
    }

    /// Each turn is compared with the turn without a tracer of its own round.
    #[test]
    fn difference_by_rounds() {
        let gaps = |gap_ns| Gaps { wall_ns: 1000, gap_ns, count: 1, longest_ns: gap_ns };
        let turn = |gap_ns| Turn { gaps: gaps(gap_ns), queued_ns: None, samples: None };
        let round = |none, gctrace, rbspy| Round {
            without: turn(none),
            gctrace: turn(gctrace),
            rbspy: Some(turn(rbspy)),
        };
        let mut rounds = [round(100, 110, 140), round(500, 520, 580), round(0, 30, 120)];
        let gctrace = added(&rounds, |round| Some(round.gctrace)).unwrap();
        let rbspy = added(&rounds, |round| round.rbspy).unwrap();
        assert_eq!(gctrace, Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(rbspy, Spread { median: 8.0, min: 4.0, max: 12.0 });
        assert_eq!(ratio(&gctrace, &rbspy), Some(0.25));
        assert_eq!(ratio(&gctrace, &Spread { median: 0.0, min: 0.0, max: 0.0 }), None);
        assert_eq!(ratio(&Spread { median: -0.1, min: -0.1, max: 0.0 }, &rbspy), None);
        rounds[1].rbspy = None;
        assert_eq!(added(&rounds, |round| round.rbspy), None);
    }
}
