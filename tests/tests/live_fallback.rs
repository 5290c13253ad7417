//! A Ruby whose event sites are not used: gctrace reports only the duration of GC work, and says that this is all.

use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::report::{Report, WorkLine};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Done, Script};
use gctrace_tests::witness::{Log, Pause};

/// Tolerance between readings of the same clock by the kernel and by the program, nanoseconds.
const CLOCK_SLACK_NS: u64 = 10_000;

fn traced(live: &Live, method: &str, ruby: &Ruby) -> Result<(Report, Done)> {
    let mut script = Script::new(live, ruby, "explicit.rb")?.arg("20").waiting().start()?;
    script.wait_for("ready")?;
    let mut gctrace = Invocation::jsonl(["--pid", &script.pid().to_string(), "--probes", method])?.start()?;
    gctrace.wait_ready()?;
    script.say("go")?;
    let (done, finished) = (script.finish()?, gctrace.wait()?);
    // If the Ruby is refused, nothing is traced: gctrace ends at once, with status 2.
    let refused = finished.status.code() == Some(2);
    let report =
        if refused { Report::parse(&finished.stdout)? } else { gctrace_tests::gctrace::read(&finished)? };
    Ok((report, done))
}

/// The intervals of one phase of the script within the witness's time.
fn works<'a>(report: &'a Report, log: &'a Log, phase: &'a str) -> Vec<&'a WorkLine> {
    let during = |work: &&WorkLine| (log.begin_ns..=log.end_ns).contains(&work.begin_ns);
    report.works.iter().filter(|work| work.pid == log.pid && work.phase == phase).filter(during).collect()
}

fn inside(work: &WorkLine, pauses: &[Pause]) -> bool {
    let end = work.begin_ns + work.ns;
    pauses
        .iter()
        .any(|pause| pause.begin_ns <= work.begin_ns + CLOCK_SLACK_NS && end <= pause.end_ns + CLOCK_SLACK_NS)
}

/// Checks the refusal of a Ruby without such probes: it names what is missing, and nothing else is reported about the Ruby.
fn refused(report: &Report, done: &Done, reason: &str) -> Result<()> {
    let told = report.refused.iter().find(|line| line.pid == Some(done.pid));
    ensure!(told.is_some_and(|line| line.reason.contains(reason)), "{:?}", report.refused);
    ensure!(report.works.iter().all(|work| work.pid != done.pid) && report.gcs_of(done.pid).count() == 0);
    Ok(())
}

/// What `readelf` or `nm` prints about the library of a Ruby.
fn told(program: &str, arg: &str, ruby: &Ruby) -> Result<String> {
    let output =
        Command::new(program).arg(arg).arg(ruby.library()?).output().with_context(|| program.to_owned())?;
    ensure!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// Old USDT probes, whose semaphores the kernel increments for us: as many marks as the witness has starts, each inside
/// one of its pauses, and no number that these probes cannot provide.
#[test]
fn usdt_marks_equal_the_witness() -> Result<()> {
    let live = Live::beside_others()?;
    let mut tried = 0;
    Ruby::each(|ruby| {
        let (report, done) = traced(&live, "usdt", ruby)?;
        let has_probes = told("readelf", "-n", ruby)?.contains("stapsdt");
        let Some(process) = report.processes_of(done.pid).next() else {
            ensure!(!has_probes, "it has USDT probes: {:?}", report.refused);
            refused(&report, &done, "no USDT probes")?;
            return Ok(());
        };
        ensure!(has_probes, "it has no USDT probes: {process:?}");
        tried += 1;
        if ruby.is_at_least(4, 1) {
            assert_eq!(process.method, "usdt_pauses");
            return usdt_pauses(&report, done.log()?);
        }
        assert_eq!(process.method, "usdt");
        assert!(process.misses.as_ref().is_some_and(|text| text.contains("GC.stat")));
        assert!(report.gcs.is_empty(), "cycles are not known by USDT");
        let log = done.log()?;
        let pauses = log.pauses()?;
        let marks = works(&report, log, "mark");
        ensure!(
            marks.len() == log.starts().count(),
            "{} marks, {} starts",
            marks.len(),
            log.starts().count()
        );
        ensure!(marks.len() > 10, "{} marks", marks.len());
        let sweeps = works(&report, log, "sweep");
        ensure!(sweeps.len() >= marks.len(), "{} sweeps, {} marks", sweeps.len(), marks.len());
        for work in marks.iter().chain(&sweeps) {
            ensure!(inside(work, &pauses), "{work:?} is in no pause");
        }
        Ok(())
    })?;
    ensure!(tried > 0, "no Ruby of the lab has USDT probes");
    Ok(())
}

/// The USDT probes of 4.1 fire before the event at both ends of a pause: there is one interval for each pause of the witness,
/// which begins and ends before the pause does, and no other interval between the first and the last.
fn usdt_pauses(report: &Report, log: &Log) -> Result<()> {
    let pauses = log.pauses()?;
    let works = works(report, log, "pause");
    let end = |work: &WorkLine| work.begin_ns + work.ns;
    let belongs = |work: &WorkLine, pause: &Pause| {
        work.begin_ns <= pause.begin_ns + CLOCK_SLACK_NS
            && (pause.begin_ns..=pause.end_ns + CLOCK_SLACK_NS).contains(&end(work))
    };
    for pause in &pauses {
        let found = works.iter().filter(|work| belongs(work, pause)).count();
        ensure!(found == 1, "{found} intervals for {pause:?}");
    }
    let (Some(first), Some(last)) = (pauses.first(), pauses.last()) else {
        bail!("the witness saw no pause")
    };
    let between = |work: &&&WorkLine| end(work) > first.begin_ns && work.begin_ns < last.end_ns;
    let seen = works.iter().filter(between).count();
    ensure!(seen == pauses.len(), "{seen} intervals, {} pauses", pauses.len());
    ensure!(report.works.iter().all(|work| work.pid != log.pid || work.phase == "pause"), "other phases");
    Ok(())
}

/// Functions found by symbol: one effective call of `gc_start` around each start of the witness, and no other one. A stripped Ruby has no
/// symbols and is refused for that reason. Those of Debian are stripped; those of `cargo xtask lab --built` are not.
#[test]
fn functions_equal_the_witness() -> Result<()> {
    let live = Live::beside_others()?;
    let mut compared = 0;
    Ruby::each(|ruby| {
        let (report, done) = traced(&live, "functions", ruby)?;
        let symbols = told("nm", "--defined-only", ruby)?;
        let has_symbol = symbols.lines().any(|line| line.split_whitespace().nth(2) == Some("gc_start"));
        let Some(process) = report.processes_of(done.pid).next() else {
            ensure!(!has_symbol, "it has symbols: {:?}", report.refused);
            return refused(&report, &done, "no symbol gc_start");
        };
        ensure!(has_symbol, "it has no symbol gc_start: {process:?}");
        assert_eq!(process.method, "functions");
        let log = done.log()?;
        let starts = works(&report, log, "start");
        for start in log.starts() {
            let around = |work: &&&WorkLine| (work.begin_ns..=work.begin_ns + work.ns).contains(&start.ns);
            ensure!(starts.iter().filter(around).count() == 1, "count {}", start.count());
        }
        let seen = log.starts().count();
        ensure!(starts.len() == seen && seen > 10, "{} calls, {seen} starts", starts.len());
        compared += 1;
        Ok(())
    })?;
    if compared == 0 {
        println!(
            "nothing was compared: no Ruby under test has symbols (`cargo xtask lab --built` makes one)"
        );
    }
    Ok(())
}
