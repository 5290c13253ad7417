//! `cargo xtask demo`: shows the outputs of gctrace for a bundled program.

use std::{
    fs,
    io::{BufRead as _, BufReader, IsTerminal as _, Read, Write as _, stderr, stdout},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc::{RecvTimeoutError, Sender, channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::process::Signal;

use crate::{
    setup::{self, Purpose},
    util::{Running, as_root, cargo, output, progress, root, run, short, target_dir},
};

const SECONDS: u64 = 10;

/// Runs the command.
pub(crate) fn run_demo() -> Result<()> {
    setup::ensure(&[Purpose::Demo])?;
    let gctrace = target_dir()?.join("release/gctrace");
    let mut build = cargo();
    build.args(["build", "--release", "--package", "gctrace-user"]);
    // The collector's databases take a fifth of a first build, and the demo does not need them. If the executable already has them, they stay.
    let complete = has_collector(&gctrace);
    if !complete {
        build.arg("--no-default-features");
    }
    progress("demo: building gctrace (some minutes the first time)");
    run(&mut build)?;
    let folder = target_dir()?.join("demo");
    let (sets, pprof, graph) = (folder.join("tunemygc"), folder.join("run.pb.gz"), folder.join("cpu.svg"));
    fs::create_dir_all(&sets).with_context(|| format!("cannot create {}", sets.display()))?;
    for old in [&sets, &folder] {
        remove_files(old)?;
    }

    let mut workload = Command::new(ruby());
    workload.arg(root().join("tests/rubies/demo_web.rb")).arg("60").stdout(Stdio::piped());
    let mut workload = Running::start(&mut workload).context("cannot start the demonstration workload")?;
    progress(format!(
        "demo: a Ruby workload runs as process {}; tracing every Ruby for {SECONDS} s",
        workload.pid()
    ));

    let mut tracer = as_root(&gctrace, "trace other processes")?;
    tracer.args(["--all-ruby", "--duration", &format!("{SECONDS}s"), "--tunemygc"]).arg(&sets);
    tracer.arg("--pprof").arg(&pprof).arg("--flamegraph").arg(&graph);
    let lines = watch(&mut tracer)?;

    workload.signal(Signal::TERM)?;
    let own = workload.child().stdout.take();
    workload.wait(Duration::from_secs(10))?;
    let mut account = String::new();
    if let Some(mut pipe) = own {
        pipe.read_to_string(&mut account).context("cannot read what the workload said")?;
    }
    report(&lines, workload.pid(), account.trim(), &sets, &[&pprof, &graph])?;
    if !complete {
        println!("The collector     cargo build --release    (this build is without `gctrace collector`)");
    }
    Ok(())
}

/// Whether an executable of gctrace exists that has the collector.
fn has_collector(gctrace: &Path) -> bool {
    let help = Command::new(gctrace).args(["collector", "--help"]).output();
    help.is_ok_and(|help| help.status.success())
}

/// Runs gctrace, shows its lines as they arrive with a countdown below them, and returns the lines of its standard output.
fn watch(command: &mut Command) -> Result<Vec<String>> {
    let mut gctrace =
        Running::start(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()))?;
    let (send, receive) = channel();
    let readers = [
        gctrace.child().stdout.take().map(|pipe| forward(pipe, true, send.clone())),
        gctrace.child().stderr.take().map(|pipe| forward(pipe, false, send)),
    ];
    let terminal = stderr().is_terminal();
    let (begin, mut lines) = (Instant::now(), Vec::new());
    loop {
        let received = receive.recv_timeout(Duration::from_millis(200));
        if terminal {
            eprint!("\r\x1b[K");
        }
        match received {
            Ok((true, line)) => {
                println!("{line}");
                stdout().flush().context("cannot write to standard output")?;
                lines.push(line);
            }
            Ok((false, line)) => eprintln!("{line}"),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if terminal {
            let done = begin.elapsed().as_secs().min(SECONDS);
            let (bar, rest) = ("#".repeat(done as usize), ".".repeat((SECONDS - done) as usize));
            eprint!("[{bar}{rest}] {} s left, {} lines", SECONDS - done, lines.len());
        }
    }
    for reader in readers.into_iter().flatten() {
        reader.join().map_err(|_| anyhow!("reading the lines of gctrace panicked"))?;
    }
    let status = gctrace.wait(Duration::from_secs(10))?;
    if !status.success() {
        bail!("gctrace ended with {status}; its own lines above say why");
    }
    Ok(lines)
}

/// Forwards each line of a pipe, marked as output or diagnostics.
fn forward(
    pipe: impl Read + Send + 'static,
    output: bool,
    to: Sender<(bool, String)>,
) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
            if to.send((output, String::from_utf8_lossy(&line).into_owned())).is_err() {
                break;
            }
        }
    })
}

fn report(lines: &[String], pid: u32, account: &str, sets: &Path, profiles: &[&Path; 2]) -> Result<()> {
    let cycles: Vec<Cycle> = lines.iter().filter_map(|line| Cycle::read(line)).collect();
    let majors = cycles.iter().filter(|cycle| cycle.major).count();
    let pauses: Vec<f64> = cycles.iter().filter_map(|cycle| cycle.pause_ms).collect();
    println!();
    println!("GC cycles seen    {} ({majors} major, {} minor)", cycles.len(), cycles.len() - majors);
    if pauses.len() == cycles.len() && !pauses.is_empty() {
        let total: f64 = pauses.iter().sum();
        let longest = pauses.iter().copied().fold(0.0, f64::max);
        println!("paused by them    {total:.1} ms in {SECONDS} s, longest {longest:.2} ms");
    }
    println!("the program says  {account} (over its whole life)");
    let mut written = Vec::new();
    for entry in fs::read_dir(sets).with_context(|| format!("cannot read {}", sets.display()))? {
        written.push(entry.with_context(|| format!("cannot read {}", sets.display()))?.path());
    }
    if written.is_empty() {
        bail!("gctrace wrote no TuneMyGC set into {}", sets.display());
    }
    if let Some(missing) = profiles.iter().find(|profile| !profile.is_file()) {
        bail!("gctrace wrote no profile to {}", missing.display());
    }
    let [pprof, graph] = profiles;
    // The workload's own set first; other Ruby processes of this host may have sets, too.
    written.sort_by_key(|path| !path.to_string_lossy().contains(&format!("-{pid}-")));
    let gctrace = target_dir()?.join("release/gctrace");
    let advice = output(Command::new(&gctrace).arg("tune").arg(&written[0]))?;
    println!();
    println!("Found in this program:");
    for line in findings(&advice)? {
        println!("  {line}");
    }
    println!();
    println!("Flame graph       file://{}", graph.display());
    println!("pprof profile     go tool pprof -top {}    (apt install golang-go)", short(pprof));
    println!("all the advice    {} tune {}", short(&gctrace), short(&written[0]));
    println!("Next              sudo {} --all-ruby", short(&gctrace));
    Ok(())
}

/// The share of time in the GC, what starts its cycles, and the first setting that `gctrace tune` recommends. It finds them by how the
/// lines of the report start, which a test of gctrace-tunemygc checks (`lines_that_the_demo_shows`).
fn findings(advice: &str) -> Result<[String; 3]> {
    let line = |start: &str| advice.lines().map(str::trim).find(|line| line.starts_with(start));
    let share = line("time in the GC: ").context("`gctrace tune` does not report the time in the GC")?;
    let causes: Vec<&str> = advice
        .lines()
        .map(str::trim)
        .filter(|line| line.starts_with("minor by ") || line.starts_with("major by "))
        .collect();
    let setting = line("export ").map_or_else(
        || "gctrace tune recommends no change".to_owned(),
        |export| format!("gctrace tune recommends {}", export.trim_start_matches("export ")),
    );
    Ok([share.to_owned(), format!("cycles: {}", causes.join(", ")), setting])
}

/// The part of a line that the summary needs: `… #42 minor newobj 1.23ms …`.
#[derive(Debug, PartialEq)]
struct Cycle {
    major: bool,
    pause_ms: Option<f64>,
}

impl Cycle {
    /// Parses the line of a GC cycle; `None` for other lines.
    fn read(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let kind = words.windows(2).position(|pair| {
            let count = pair[0].strip_prefix('#').is_some_and(|count| count.parse::<u64>().is_ok());
            count && matches!(pair[1], "minor" | "major")
        })? + 1;
        // The reasons between the kind and the pause do not parse as durations.
        let pause_ms = words[kind + 1..].iter().find_map(|word| milliseconds(word));
        Some(Self { major: words[kind] == "major", pause_ms })
    }
}

/// Parses a duration: `1.5ms`, `900µs`, `2s`, `0`.
fn milliseconds(text: &str) -> Option<f64> {
    let end = text.find(|c: char| c != '.' && !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let factor = match unit {
        "µs" => 1e-3,
        "ms" | "" => 1.0,
        "s" => 1e3,
        _ => return None,
    };
    Some(number.parse::<f64>().ok()? * factor)
}

/// Debian's Ruby if it is installed, whatever comes first on `PATH`; otherwise the one on `PATH`.
pub fn ruby() -> PathBuf {
    let debian = Path::new("/usr/bin/ruby");
    if debian.exists() { debian.into() } else { "ruby".into() }
}

fn remove_files(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry.with_context(|| format!("cannot read {}", folder.display()))?.path();
        if path.is_file() {
            fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output of `gctrace tune` is reduced to three lines.
    #[test]
    fn three_findings() {
        let advice = "set.json (pid 1 on vm)\nRuby 3.1: 84 cycles\n  time in the GC: 6.6 %\n  minor by newobj 76\n  \
                      major by nofree 8\n\n  For speed:\n    export A=1    # Ruby's default: 2\n      why: it helps\n";
        let found = findings(advice).unwrap();
        assert_eq!(found[0], "time in the GC: 6.6 %");
        assert_eq!(found[1], "cycles: minor by newobj 76, major by nofree 8");
        assert_eq!(found[2], "gctrace tune recommends A=1    # Ruby's default: 2");
        let nothing = "  time in the GC: 0.1 %\n  For speed:\n    nothing to set\n";
        assert_eq!(findings(nothing).unwrap()[2], "gctrace tune recommends no change");
        assert!(findings("").is_err());
    }

    /// Cycle lines are distinguished from others, whatever the name of the program, and their pauses are read in any unit.
    #[test]
    fn cycle_lines() {
        let read =
            Cycle::read("12:00:01.001 77 puma #1 x #42 major force, nofree 1.50ms 1.00ms 0 1").unwrap();
        assert_eq!(read, Cycle { major: true, pause_ms: Some(1.5) });
        assert_eq!(
            Cycle::read("12:00:01.001 77 ruby #43 minor newobj 900µs 1.00s").unwrap().pause_ms,
            Some(0.9)
        );
        assert_eq!(Cycle::read("77 ruby #44 minor ?").unwrap().pause_ms, None);
        assert_eq!(Cycle::read("TIME PID COMM GC KIND WHY PAUSE"), None);
    }
}
