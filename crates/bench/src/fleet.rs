//! Many Ruby processes at once: how soon gctrace is ready, how much memory it needs, and how much CPU time it uses while they idle and
//! while some of them work.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::Signal;

use super::{Agent, counter};
use xtask::{
    demo::ruby,
    util::{Running, progress, target_dir},
};

const IDLE: usize = 300;
const BUSY: usize = 20;
/// How long each state is measured.
const WINDOW: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_mins(2);

/// Waits for a line, then creates garbage repeatedly, a little at a time, until its input ends.
const PROGRAM: &str = "$stdout.sync = true; puts 'ready'; exit unless gets
    Thread.new { gets; exit! }
    loop { 4_000.times { |i| [i, i.to_s] }; sleep 0.05 }";

struct Figures {
    first_s: f64,
    ready_s: f64,
    idle_cpu: f64,
    busy_cpu: f64,
    hits: u64,
    cycles: u64,
    peak_rss_kib: u64,
}

/// Runs the measurement.
pub(super) fn run(json: bool) -> Result<()> {
    progress(format!("bench: starting {} Ruby processes", IDLE + BUSY));
    let mut fleet = Vec::new();
    for _ in 0..IDLE + BUSY {
        let mut command = Command::new(ruby());
        command.args(["--disable-gems", "-e", PROGRAM]).stdin(Stdio::piped()).stdout(Stdio::piped());
        fleet.push(Running::start(&mut command)?);
    }
    for process in &mut fleet {
        let mut line = String::new();
        let output = process.child().stdout.take().context("no pipe from the program")?;
        BufReader::new(output).read_line(&mut line)?;
        ensure!(line == "ready\n", "a Ruby process said {line:?}");
    }
    // The first start analyses the images; later ones read the analysis from the cache.
    let cache = target_dir()?.join("bench-cache");
    let (mut first, _, first_s) = start(&cache)?;
    first.signal(Signal::INT)?;
    first.wait(PATIENCE)?;
    let (mut gctrace, lines, ready_s) = start(&cache)?;
    let window = |pid: u32| -> Result<f64> {
        let (before, since) = (Agent::read(pid)?.cpu, Instant::now());
        thread::sleep(WINDOW);
        Ok((Agent::read(pid)?.cpu - before) / since.elapsed().as_secs_f64())
    };
    let idle_cpu = window(gctrace.pid())?;
    for process in fleet.iter_mut().take(BUSY) {
        let input = process.child().stdin.as_mut().context("no pipe to the program")?;
        writeln!(input, "go")?;
    }
    let busy_cpu = window(gctrace.pid())?;
    let peak_rss_kib = Agent::read(gctrace.pid())?.peak_rss_kib;
    gctrace.signal(Signal::INT)?;
    // With --verbose: `gctrace: counted in the kernel: hits 42, …`, then `gctrace: counted by gctrace: …, cycles 7, …`.
    let kernel = wait(&lines, "counted in the kernel:")?;
    let hits = counted(&kernel, "hits")?;
    let user = wait(&lines, "counted by gctrace:")?;
    let cycles = counted(&user, "cycles")?;
    gctrace.wait(PATIENCE)?;
    for mut process in fleet {
        // The program ends with its input.
        drop(process.child().stdin.take());
        process.wait(PATIENCE)?;
    }
    fs::remove_dir_all(&cache).with_context(|| format!("cannot remove {}", cache.display()))?;
    let figures = Figures { first_s, ready_s, idle_cpu, busy_cpu, hits, cycles, peak_rss_kib };
    print(&figures, json);
    Ok(())
}

/// Starts gctrace and waits until it is ready. Returns the number of seconds that it took.
fn start(cache: &Path) -> Result<(Running, Receiver<String>, f64)> {
    let mut command = Command::new(target_dir()?.join("release/gctrace"));
    command.args(["--all-ruby", "--quiet", "--verbose", "--cache-dir"]).arg(cache);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let since = Instant::now();
    let mut gctrace = Running::start(&mut command)?;
    let lines = lines(&mut gctrace)?;
    let ready = wait(&lines, "gctrace: ready")?;
    let seconds = since.elapsed().as_secs_f64();
    progress(ready);
    Ok((gctrace, lines, seconds))
}

fn lines(gctrace: &mut Running) -> Result<Receiver<String>> {
    let errors = gctrace.child().stderr.take().context("no pipe from gctrace")?;
    let (sender, lines) = channel();
    thread::spawn(move || {
        for line in BufReader::new(errors).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    Ok(lines)
}

fn wait(lines: &Receiver<String>, wanted: &str) -> Result<String> {
    loop {
        match lines.recv_timeout(PATIENCE) {
            Ok(line) if line.contains(wanted) => return Ok(line),
            Ok(line) => progress(line),
            Err(_) => bail!("gctrace did not say `{wanted}`"),
        }
    }
}

/// A counter of gctrace, which must not be 0: the processes collect garbage.
fn counted(line: &str, name: &str) -> Result<u64> {
    let count = counter(line, name).filter(|&count| count > 0);
    count.with_context(|| format!("gctrace counted no {name}, so nothing was measured: {line}"))
}

/// Microseconds per hit; `None` if the work is not visible in the CPU time.
fn hit_us(figures: &Figures) -> Option<f64> {
    let seconds = (figures.busy_cpu - figures.idle_cpu) * WINDOW.as_secs_f64();
    (seconds > 0.0 && figures.hits > 0).then(|| seconds * 1e6 / figures.hits as f64)
}

fn print(figures: &Figures, json: bool) {
    let per_hit_us = hit_us(figures).map(|us| format!("{us:.2}"));
    let Figures { first_s, ready_s, idle_cpu, busy_cpu, hits, cycles, peak_rss_kib } = *figures;
    if json {
        let per_hit_us = per_hit_us.as_deref().unwrap_or("null");
        println!(
            r#"{{"idle":{IDLE},"busy":{BUSY},"first_ready_s":{first_s:.3},"ready_s":{ready_s:.3},"idle_cpu":{idle_cpu:.5},"busy_cpu":{busy_cpu:.5},"hits":{hits},"cycles":{cycles},"hit_us":{per_hit_us},"peak_rss_kib":{peak_rss_kib}}}"#
        );
        return;
    }
    println!("{IDLE} idle and {BUSY} working Ruby processes");
    println!("ready after        {ready_s:.2} s; the first time, with its images analysed, {first_s:.2} s");
    println!("CPU, all idle      {:.2} % of a core", idle_cpu * 100.0);
    let per_hit_us = per_hit_us.as_deref().unwrap_or("-");
    println!(
        "CPU, some working  {:.2} % of a core: {cycles} cycles, {hits} probe hits, {per_hit_us} µs each",
        busy_cpu * 100.0
    );
    println!("peak RSS           {:.1} MiB", peak_rss_kib as f64 / 1024.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A figure that was not measured is absent, or an error.
    #[test]
    fn nothing_measured() {
        let line = "gctrace: counted by gctrace: records 9, cycles 7, lost 0";
        assert_eq!(counted(line, "cycles").unwrap(), 7);
        for name in ["lost", "hits"] {
            let error = counted(line, name).unwrap_err().to_string();
            assert!(error.contains("nothing was measured"), "{error}");
        }
        let busy = |busy_cpu, hits| Figures {
            first_s: 2.0,
            ready_s: 1.0,
            idle_cpu: 0.01,
            busy_cpu,
            hits,
            cycles: 1,
            peak_rss_kib: 1,
        };
        assert!(hit_us(&busy(0.02, 100_000)).is_some_and(|us| (1.9..2.1).contains(&us)));
        assert_eq!(hit_us(&busy(0.01, 100_000)), None);
        assert_eq!(hit_us(&busy(0.02, 0)), None);
    }
}
