//! Recordings on standard output, and recordings that end at a maximum size.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::PATIENCE;
use gctrace_tests::child::Guarded;
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::ledger;
use gctrace_tests::live::{Live, gctrace_binary};
use gctrace_tests::report::Report;
use gctrace_tests::ruby::Ruby;

/// Threads that collect, contend and sleep, for longer than several chunks. The program prints the number of collections in that time.
const PROGRAM: &str = r#"
$stdout.puts "waits"; $stdout.flush; $stdin.gets
GC.disable
before = GC.count
3.times.map { Thread.new { 60.times { (1..4000).map { |x| "s#{x}" }.sort.first; GC.start; sleep 0.05 } } }.each(&:join)
$stdout.puts "collected #{GC.count - before}"; $stdout.flush
"#;
/// The same, endlessly.
const ENDLESS: &str = r#"
3.times { Thread.new { loop { (1..3000).map { |x| "s#{x}" }.sort.first; GC.start; sleep 0.001 } } }
$stdout.puts "busy"; $stdout.flush; sleep
"#;

fn start(program: &str, ruby: &Ruby, says: &str) -> Result<Guarded> {
    let mut program = Guarded::start("ruby", ruby.command()?.args(["-e", program]))?;
    program.wait_stdout(PATIENCE, says, |line| line == says)?;
    Ok(program)
}

/// The kind of each chunk of a recording, and where it ends (a header of 12 bytes, then chunks: kind, stored length, expanded length, CRC-32,
/// and the stored bytes).
fn chunks(file: &Path) -> Result<Vec<(u32, usize)>> {
    let bytes = std::fs::read(file)?;
    let word = |at: usize| -> Result<u32> {
        let word = bytes.get(at..at + 4).with_context(|| format!("cut off at {at} of {}", bytes.len()))?;
        Ok(u32::from_le_bytes(word.try_into()?))
    };
    let (mut found, mut at) = (Vec::new(), 12);
    while at < bytes.len() {
        let kind = word(at)?;
        at += 16 + word(at + 4)? as usize;
        found.push((kind, at));
    }
    ensure!(at == bytes.len() && found.last().is_some_and(|(kind, _)| *kind == 3), "{found:?}");
    Ok(found)
}

/// Checks that a run ended at this size: after the chunk that reached it, there is only what came until the end of tracing, less than a second.
fn ends_at(least: usize, file: &Path) -> Result<()> {
    let all: Vec<usize> = chunks(file)?.into_iter().map(|(_, end)| end).collect();
    let written = all[all.len() - 1];
    let reached = all.iter().find(|end| **end >= least);
    let reached = *reached.with_context(|| format!("{written} bytes, not {least}: {all:?}"))?;
    let second = all.windows(2).map(|pair| pair[1] - pair[0]).max().context("no chunk")?;
    ensure!(
        written - reached < second + second / 4,
        "{} bytes behind {reached}, where {least} were reached: chunks end at {all:?}",
        written - reached
    );
    Ok(())
}

/// Starts a shell pipeline in which `$0` is gctrace and `$1` the process, and waits until it traces.
fn pipeline(text: &str, pid: u32) -> Result<Gctrace> {
    let (gctrace, pid) = (gctrace_binary()?.into_os_string(), OsString::from(pid.to_string()));
    let args = [OsString::from("-c"), format!("set -o pipefail; {text}").into(), gctrace, pid];
    Invocation::of(Path::new("bash"), args).start_ready()
}

/// A recording that comes through a pipe agrees with what the program says. It is complete, and its ledger balances.
#[test]
fn piped() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::first_and_last(|ruby| {
        let mut program = start(PROGRAM, ruby, "waits")?;
        let file = live.path("kept.gctrace");
        // A copy of the piped data is read as a file afterwards.
        let text = format!(
            "\"$0\" record --pid \"$1\" --gvl --gvl-budget 100 -o - | tee '{}' | \"$0\" report - --format jsonl",
            file.display()
        );
        let gctrace = pipeline(&text, program.pid())?;
        program.say("go")?;
        let said = program.wait_stdout(PATIENCE, "its collections", |line| line.starts_with("collected "))?;
        let collected: usize = said["collected ".len()..].parse()?;
        let finished = gctrace.wait()?;
        ensure!(finished.status.success(), "{}", finished.errors());
        let errors = finished.errors();
        ensure!(
            errors.contains("recorded to standard output") && !errors.contains("was cut off"),
            "{errors}"
        );
        let report = Report::parse(&finished.stdout)?;
        ledger::check(&report)?;
        ensure!(collected >= 180 && report.gcs.len() == collected, "{} of {collected}", report.gcs.len());
        let again =
            Invocation::new([OsString::from("report"), file.into(), "--format=jsonl".into()])?.run()?;
        ensure!(again.status.success() && again.stdout == finished.stdout, "{}", again.errors());
        // A single chunk would not test those in the middle.
        let chunks = chunks(&live.path("kept.gctrace"))?;
        ensure!(chunks.iter().filter(|(kind, _)| *kind == 2).count() >= 4, "{chunks:?}");
        Ok(())
    })
}

/// A reader that goes away ends the run. What it has read can be read up to that point.
#[test]
fn reader_gone() -> Result<()> {
    let live = Live::beside_others()?;
    let program = start(ENDLESS, &Ruby::main()?, "busy")?;
    let file = live.path("part.gctrace");
    let text = format!(
        "\"$0\" record --pid \"$1\" --gvl --gvl-budget 100 -o - | head -c 100000 > '{file}'; \"$0\" info '{file}'",
        file = file.display()
    );
    let finished = pipeline(&text, program.pid())?.wait()?;
    ensure!(finished.status.success(), "{}", finished.errors());
    let errors = finished.errors();
    ensure!(errors.contains(" not in the recording") && !errors.contains("panicked"), "{errors}");
    let info = finished.stdout.join("\n");
    ensure!(info.contains("cut off"), "{info}");
    let cycles = finished.stdout.iter().find(|line| line.contains(" GC cycles")).context("no cycles")?;
    ensure!(!cycles.trim().starts_with('0'), "{cycles}");
    Ok(())
}

/// With a maximum size the run ends by itself, and its recording is complete: it exceeds that size by at most its last second.
#[test]
fn largest_size() -> Result<()> {
    let live = Live::beside_others()?;
    let program = start(ENDLESS, &Ruby::main()?, "busy")?;
    let pid = program.pid().to_string();
    for (kib, to) in [(64_usize, "a.gctrace"), (200, "b.gctrace")] {
        let file = live.path(to);
        let size = format!("{kib}KiB");
        let mut args = vec![OsString::from("record"), "--pid".into(), pid.clone().into(), "--gvl".into()];
        args.extend(["--gvl-budget=100".into(), "--max-size".into(), size.into()]);
        args.extend(["-o".into(), file.clone().into_os_string()]);
        let finished = Invocation::new(args)?.start_ready()?.wait()?;
        let errors = finished.errors();
        ensure!(finished.status.success(), "{errors}");
        ensure!(errors.contains("--max-size"), "{errors}");
        ends_at(kib * 1024, &file)?;
        let report =
            Invocation::new([OsString::from("report"), file.into(), "--format=jsonl".into()])?.run()?;
        ensure!(report.status.success() && !report.errors().contains("cut off"), "{}", report.errors());
        let report = Report::parse(&report.stdout)?;
        ledger::check(&report)?;
        ensure!(!report.gcs.is_empty());
    }
    Ok(())
}

/// The same beside other outputs, which are complete, too: they have the same cycles.
#[test]
fn largest_size_beside_others() -> Result<()> {
    let live = Live::beside_others()?;
    let program = start(ENDLESS, &Ruby::main()?, "busy")?;
    let file = live.path("beside.gctrace");
    let pid = program.pid().to_string();
    let flags = ["--pid", &pid, "--gvl", "--gvl-budget=100", "--max-size=64KiB", "--record"];
    let args = flags.into_iter().map(OsString::from).chain([file.clone().into_os_string()]);
    let finished = Invocation::jsonl(args)?.start_ready()?.wait()?;
    let errors = finished.errors();
    ensure!(finished.status.success() && errors.contains("--max-size"), "{errors}");
    ends_at(64 << 10, &file)?;
    let replayed =
        Invocation::new([OsString::from("report"), file.into(), "--format=jsonl".into()])?.run()?;
    ensure!(replayed.status.success() && !replayed.errors().contains("cut off"), "{}", replayed.errors());
    let (lines, replayed) = (Report::parse(&finished.stdout)?, Report::parse(&replayed.stdout)?);
    ledger::check(&lines)?;
    ensure!(!lines.gcs.is_empty() && lines.gcs.len() == replayed.gcs.len(), "{}", replayed.gcs.len());
    let alone = Invocation::jsonl(["--pid", &pid, "--max-size=64KiB"])?.run()?;
    ensure!(alone.status.code() == Some(2) && alone.errors().contains("--record"), "{}", alone.errors());
    Ok(())
}

/// A reader that does not read does not block gctrace: it gives up after 10 s.
#[test]
fn stuck_reader() -> Result<()> {
    let _live = Live::beside_others()?;
    let program = start(ENDLESS, &Ruby::main()?, "busy")?;
    let text = "\"$0\" record --pid \"$1\" --gvl --gvl-budget 100 --max-size 200KiB -o - | sleep 60 > /dev/null 2>&1";
    let begun = std::time::Instant::now();
    let mut gctrace = pipeline(text, program.pid())?;
    gctrace.wait_error("its reader has read nothing for 10 s")?;
    ensure!(begun.elapsed() < Duration::from_secs(50), "{:?}", begun.elapsed());
    gctrace.kill()?;
    Ok(())
}
