//! Runs of programs that are not servers as units of work: from their exec to their exit.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::Guarded;
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::live::Live;
use gctrace_tests::report::{Report, RequestLine};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::{PATIENCE, ledger};
use rustix::time::{ClockId, clock_gettime};

/// Records by its own clock when its first line ran, collects, forks a child that also collects, and prints when its last line ran.
const PROGRAM: &str = r#"
clock = -> { Process.clock_gettime(Process::CLOCK_MONOTONIC, :nanosecond) }
begun = clock.call
3.times.map { Thread.new { 20.times { 2000.times.map { |i| "x#{i}" }; GC.start } } }.each(&:join)
Process.wait(fork { 5.times { GC.start } })
at_exit { $stdout.puts "ran #{begun} #{clock.call} #{GC.count}"; $stdout.flush }
"#;

fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn tracing() -> Result<Gctrace> {
    Invocation::jsonl(["--all-ruby", "--requests"])?.start_ready()
}

/// What the program printed: the times of its first and its last line, and its number of collections.
fn said(lines: &[String]) -> Result<[u64; 3]> {
    let line = lines.iter().rev().find_map(|line| line.strip_prefix("ran ")).context("it did not run")?;
    let words = line.split(' ').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
    words.try_into().map_err(|words| anyhow::anyhow!("{words:?}"))
}

/// The line of a process. Checks that it is the only one, and that it is a run.
fn run_of(report: &Report, pid: u32) -> Result<&RequestLine> {
    let lines: Vec<_> = report.requests.iter().filter(|line| line.pid == pid).collect();
    let [line] = lines[..] else { anyhow::bail!("runs of {pid}: {lines:?}") };
    ensure!(line.kind == "run" && line.tid == pid, "{line:?}");
    ensure!(line.method.is_none() && line.status.is_none() && line.queue_ns.is_none(), "{line:?}");
    Ok(line)
}

/// The program's own times lie within its run, and the GC figures of the run are those of the lines of its cycles. If a shell execs the script, the
/// run begins with the script, not with the shell. A forked child has no run of its own.
#[test]
fn whole_runs() -> Result<()> {
    let live = Live::begin()?;
    Ruby::two_at_a_time(|ruby| {
        let script = live.path(&format!("import{}.rb", ruby.label()));
        std::fs::write(&script, PROGRAM)?;
        let gctrace = tracing()?;
        // The first run makes gctrace attach the probes of the image.
        let first = Guarded::start("ruby", ruby.command()?.arg(&script))?.finish(PATIENCE)?;
        ensure!(first.status.success(), "{}", first.errors());
        let mut runs = Vec::new();
        for round in 0..2 {
            let ruby = ruby.command()?;
            let mut shell = Command::new("sh");
            shell.args(["-c", "sleep 0.3; exec \"$@\"", "sh"]).arg(ruby.get_program());
            shell.args(ruby.get_args()).arg(&script);
            for (key, value) in ruby.get_envs() {
                match value {
                    Some(value) => shell.env(key, value),
                    None => shell.env_remove(key),
                };
            }
            let forked_ns = monotonic_ns();
            let process = Guarded::start("ruby", &mut shell)?;
            let pid = process.pid();
            let done = process.finish(PATIENCE)?;
            let gone_ns = monotonic_ns();
            ensure!(done.status.success(), "round {round}: {}", done.errors());
            runs.push((pid, forked_ns, said(&done.stdout)?, gone_ns));
        }
        let report = gctrace.stop()?;
        ledger::check_lossless(&report)?;
        for (pid, forked_ns, [begun_ns, ended_ns, gcs], gone_ns) in runs {
            let run = run_of(&report, pid)?;
            let end_ns = run.begin_ns + run.duration_ns.context("no end")?;
            ensure!(
                run.begin_ns >= forked_ns + 300_000_000 && run.begin_ns < begun_ns,
                "{run:?}: forked at {forked_ns}, its first line ran at {begun_ns}"
            );
            ensure!(end_ns > ended_ns && end_ns < gone_ns, "{run:?}: from {ended_ns} to {gone_ns}");
            ensure!(run.path.as_deref().is_some_and(|path| path.starts_with("import")), "{run:?}");
            ensure!(run.endpoint == run.path.clone().unwrap_or_default(), "{run:?}");
            let cycles: Vec<_> = report.gcs_of(pid).collect();
            let ns: u64 = cycles.iter().flat_map(|cycle| &cycle.pauses).map(|pause| pause.ns).sum();
            // Pauses outside of cycles, such as those of finalizers at the end.
            let summary = report.summaries.iter().find(|line| line["pid"] == pid).context("no summary")?;
            let ns = ns + summary["outside_pause_ns"].as_u64().context("no pauses outside cycles")?;
            let known = (run.gcs.map(u64::from), run.gc_ns);
            ensure!(
                known == (Some(cycles.len() as u64), Some(ns)),
                "{known:?}, {} cycles, {ns} ns",
                cycles.len()
            );
            // Collections of a VM that ends come in addition.
            ensure!(gcs >= 60 && cycles.len() as u64 >= gcs, "{} of {gcs}", cycles.len());
            ensure!(cycles.iter().all(|cycle| cycle.request.is_none()), "a cycle names the run");
        }
        // Neither the children nor the shells have a run.
        let name = script.file_name().context("a name")?.to_string_lossy();
        let lines = report.requests.iter().filter(|line| line.endpoint == name);
        ensure!(lines.count() == 3, "{:?}", report.requests);
        Ok(())
    })
}

/// A program that is older than tracing has no run, and one that is still running has none yet. What is not reported is counted.
#[test]
fn runs_without_begin() -> Result<()> {
    let _live = Live::begin()?;
    let ruby = Ruby::main()?;
    let program = "GC.start; $stdout.puts 'runs'; $stdout.flush; $stdin.gets; GC.start";
    let start = || -> Result<Guarded> {
        let mut process = Guarded::start("ruby", ruby.command()?.args(["-e", program]))?;
        process.wait_stdout(PATIENCE, "its start", |line| line == "runs")?;
        Ok(process)
    };
    let mut older = start()?;
    let gctrace = tracing()?;
    let mut younger = start()?;
    let still = start()?;
    older.say("end")?;
    younger.say("end")?;
    let pids = [older.pid(), younger.pid()];
    older.finish(PATIENCE)?;
    younger.finish(PATIENCE)?;
    std::thread::sleep(Duration::from_millis(300));
    let report = gctrace.stop()?;
    ledger::check(&report)?;
    ensure!(report.requests.len() == 1, "{:?}", report.requests);
    let line = run_of(&report, pids[1])?;
    ensure!(line.endpoint == "ruby", "{line:?}");
    let counted = &report.ledger.as_ref().context("no ledger")?.user;
    let count = |name: &str| counted.get(name).and_then(serde_json::Value::as_u64);
    let counts = (count("runs_reported"), count("runs_without_begin"));
    ensure!(counts == (Some(1), Some(1)), "{counts:?}: {pids:?}, and {} still runs", still.pid());
    Ok(())
}
