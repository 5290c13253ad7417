//! Every cycle, its reason, its state and its pauses, compared with the program and the witness inside it.

use anyhow::{Context as _, Result, bail, ensure};
use gctrace_tests::child::Guarded;
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::live::Live;
use gctrace_tests::report::{GcLine, PauseKind, Report};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Done, Script};
use gctrace_tests::witness::Event;
use gctrace_tests::{PATIENCE, compare, ensure_times, ledger};
use serde_json::Value;
use std::{ffi::OsString, process::Command, time::Duration};

/// The lines of one process.
fn lines(report: &Report, pid: u32) -> Vec<&GcLine> {
    report.gcs_of(pid).collect()
}

/// Each explicit collection is reported with the reason that `GC.latest_gc_info` gave right after it.
fn explicit_ones_match(lines: &[&GcLine], done: &Done) -> Result<()> {
    let explicit =
        done.report.extra.get("explicit").and_then(|list| list.as_array()).context("no explicit list")?;
    for one in explicit {
        let line = lines.iter().find(|line| Some(line.count) == one["count"].as_u64());
        let line = line.with_context(|| format!("no line for {one}"))?;
        ensure!(line.gc_by.as_deref() == one["gc_by"].as_str(), "gc_by {:?}, but {one}", line.gc_by);
        ensure!(
            line.major_by.as_deref() == one["major_by"].as_str(),
            "major_by {:?}, but {one}",
            line.major_by
        );
    }
    Ok(())
}

/// Runs scripts with a witness under one gctrace and compares all cycles, states and pauses.
fn witnessed(name: &str, args: &[&str]) -> Result<()> {
    witnessed_and(name, args, |_, _| Ok(()))
}

/// Like [`witnessed`], and checks that the script has done its work.
fn witnessed_and(name: &str, args: &[&str], check: impl Fn(&Ruby, &Done) -> Result<()> + Sync) -> Result<()> {
    let live = Live::begin()?;
    Ruby::two_at_a_time(|ruby| {
        let gctrace = Gctrace::all_ruby(&live)?;
        let script = args.iter().fold(Script::new(&live, ruby, name)?, Script::arg);
        let done = script.run()?;
        let report = gctrace.stop()?;
        ledger::check_lossless(&report)?;
        let lines = lines(&report, done.pid);
        compare::program(&lines, &done.report)?;
        compare::one_life(&report, done.pid)?;
        let comparison = compare::cycles(&lines, done.log()?);
        comparison.demand_equal()?;
        let expected = done.report.growth("count")?;
        ensure!(comparison.starts as u64 == expected, "{} starts compared of {expected}", comparison.starts);
        ensure!(comparison.ends as u64 + 1 >= expected, "{} ends compared of {expected}", comparison.ends);
        compare::pauses(&lines, done.log()?)?;
        starts_come_first(&lines)?;
        check(ruby, &done)
    })
}

/// A cycle starts in its first pause and in no other.
fn starts_come_first(lines: &[&GcLine]) -> Result<()> {
    for line in lines {
        let starts = line.pauses.iter().map(|pause| pause.kind == Some(PauseKind::Start)).collect::<Vec<_>>();
        let expected = (0..starts.len()).map(|at| at == 0).collect::<Vec<_>>();
        ensure!(starts == expected, "count {}: pauses {:?}", line.count, line.pauses);
    }
    Ok(())
}

/// Explicit collections with allocation in between: number, kind and reasons are exact, twenty runs in a row.
#[test]
fn explicit_cycles_twenty_runs_in_a_row() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        let gctrace = Gctrace::all_ruby(&live)?;
        // The other tests cover the other Rubies; this test is about rare events.
        let rounds = if ruby.root().is_none() { 20 } else { 4 };
        let runs = (0..rounds)
            .map(|round| Script::new(&live, ruby, "explicit.rb")?.arg((5 + round).to_string()).run())
            .collect::<Result<Vec<_>>>()?;
        let report = gctrace.stop()?;
        ledger::check_lossless(&report)?;
        for done in &runs {
            let lines = lines(&report, done.pid);
            compare::program(&lines, &done.report)?;
            compare::one_life(&report, done.pid)?;
            explicit_ones_match(&lines, done)?;
            compare::cycles(&lines, done.log()?).demand_equal()?;
            compare::pauses(&lines, done.log()?)?;
        }
        Ok(())
    })
}

/// The same for programs without a witness inside, each with a separate gctrace.
#[test]
fn explicit_cycles_without_witness() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        let rounds = if ruby.root().is_none() { 4 } else { 1 };
        for round in 0..rounds {
            let gctrace = Gctrace::all_ruby(&live)?;
            let done = Script::unwitnessed(&live, ruby, "explicit.rb")?.arg((8 + round).to_string()).run()?;
            let report = gctrace.stop()?;
            ledger::check_lossless(&report)?;
            let lines = lines(&report, done.pid);
            compare::program(&lines, &done.report)?;
            compare::one_life(&report, done.pid)?;
            explicit_ones_match(&lines, &done)?;
        }
        Ok(())
    })
}

/// Collections caused by the program's needs, including incremental marking, equal the witness's key by key.
#[test]
fn pressure_equals_the_witness() -> Result<()> {
    witnessed("pressure.rb", &[])
}

/// Compaction, explicit and automatic. Ruby 2.6 has neither and runs the same program without it.
#[test]
fn compaction_equals_the_witness() -> Result<()> {
    witnessed_and("compact.rb", &[], |ruby, done| {
        let compacted = done.report.extra.get("compacted").and_then(Value::as_u64);
        let compacted = compacted.context("the program does not say how often it compacted")?;
        ensure!((compacted > 0) == ruby.is_at_least(2, 7), "compacted {compacted} times");
        let automatic = done.report.extra.get("auto_compact").and_then(Value::as_bool);
        ensure!(automatic == Some(ruby.is_at_least(3, 0)), "automatic compaction: {automatic:?}");
        Ok(())
    })
}

/// The number of cycles reported as compacting equals the program's count. (The `GC.compact` of 2.7 works outside any cycle.)
#[test]
fn compacting_cycles_are_told() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        let gctrace = Gctrace::all_ruby(&live)?;
        let done = Script::new(&live, ruby, "compact.rb")?.run()?;
        let report = gctrace.stop()?;
        let counts = done.report.counts()?;
        let inside = lines(&report, done.pid).into_iter().filter(|line| counts.contains(&line.count));
        let told = inside.filter(|line| line.compacting == Some(true)).count() as u64;
        let expected = if ruby.is_at_least(3, 0) { done.report.growth("compact_count")? } else { 0 };
        ensure!(told == expected, "{told} cycles, the program has counted {expected}");
        ensure!(expected > 0 || !ruby.is_at_least(3, 0), "nothing was compacted");
        Ok(())
    })
}

/// The text lines of exactly these cycles say that their sweep includes compaction.
#[test]
fn compacting_cycles_are_told_in_text() -> Result<()> {
    let live = Live::begin()?;
    Ruby::first_and_last(|ruby| {
        let gctrace = Invocation::new(["--all-ruby"])?.start_ready()?;
        let done = Script::new(&live, ruby, "compact.rb")?.run()?;
        let finished = gctrace.interrupt()?;
        ensure!(finished.status.success(), "{}", finished.errors());
        let pid = done.pid.to_string();
        let its = finished.stdout.iter().filter(|line| line.split_whitespace().nth(1) == Some(&pid));
        let told = its.filter(|line| line.contains("sweep includes compaction")).count() as u64;
        let expected = if ruby.is_at_least(3, 0) { done.report.growth("compact_count")? } else { 0 };
        ensure!(told == expected, "{told} lines, the program has counted {expected}");
        Ok(())
    })
}

/// GC.stress.
#[test]
fn stress_equals_the_witness() -> Result<()> {
    witnessed("stress.rb", &[])
}

/// All ways to request a collection, and disabling and enabling the GC.
#[test]
fn modes_equal_the_witness() -> Result<()> {
    witnessed("modes.rb", &[])
}

/// `Process.warmup`, if this Ruby has it.
#[test]
fn warmup_equals_the_witness() -> Result<()> {
    witnessed("warmup.rb", &[])
}

/// Programs that run as machine code of Ruby's own JIT compiler, if it is built in.
#[test]
fn yjit_equals_the_witness() -> Result<()> {
    let live = Live::begin()?;
    let mut compared = 0;
    Ruby::each(|ruby| {
        let ruby = ruby.clone().with_option("--yjit");
        let probe = ruby.command()?.args(["-e", "exit(RubyVM::YJIT.enabled?)"]).output()?;
        if !probe.status.success() {
            return Ok(());
        }
        let gctrace = Gctrace::all_ruby(&live)?;
        let done = Script::new(&live, &ruby, "explicit.rb")?.arg("20").run()?;
        let report = gctrace.stop()?;
        ledger::check_lossless(&report)?;
        let lines = lines(&report, done.pid);
        compare::program(&lines, &done.report)?;
        compare::cycles(&lines, done.log()?).demand_equal()?;
        compare::pauses(&lines, done.log()?)?;
        compared += 1;
        Ok(())
    })?;
    ensure!(compared > 0, "no Ruby here has YJIT; Debian's 3.1 does");
    Ok(())
}

/// Collections on several threads are attributed to the right thread.
#[test]
fn threads_equal_the_witness() -> Result<()> {
    witnessed("threads.rb", &[])
}

/// `GC.stat_heap` at the end of each explicit collection equals what the program reads right after it, heap by heap and key
/// by key, including the order. Rubies without it have no such field.
#[test]
fn stat_heap_equals_the_program() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        let gctrace = Gctrace::all_ruby(&live)?;
        let done = Script::new(&live, ruby, "heaps.rb")?.run()?;
        let report = gctrace.stop()?;
        ledger::check_lossless(&report)?;
        let lines = lines(&report, done.pid);
        ensure!(lines.len() > 3, "{} cycles", lines.len());
        let seen = done.report.extra.get("heaps").and_then(|list| list.as_array()).context("no heaps")?;
        if ruby.is_at_least(4, 1) {
            ensure!(lines.iter().all(|line| line.stat_heap_end.is_none()), "it is known from tables alone");
            return Ok(());
        }
        if ruby.is_at_least(3, 2) {
            ensure!(!seen.is_empty(), "the program has read nothing");
        } else {
            ensure!(lines.iter().all(|line| line.stat_heap_end.is_none()), "no such thing before 3.2");
        }
        for one in seen {
            let at = lines.iter().position(|line| Some(line.count) == one["count"].as_u64());
            let ours = at.and_then(|at| lines[at].stat_heap_end.as_ref());
            let ours = ours.with_context(|| format!("no stat_heap at count {}", one["count"]))?;
            let (ours, theirs) = (serde_json::to_string(ours)?, one["heaps"].to_string());
            ensure!(ours == theirs, "count {}: {ours}, the program has {theirs}", one["count"]);
        }
        Ok(())
    })
}

/// The sums of the pauses of minor and of major cycles, separately, equal the times between `GC_ENTER` and `GC_EXIT`.
#[test]
fn pause_sums_by_kind() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        // On a busy machine, every cycle of a kind may have been preempted.
        const TRIES: u32 = 5;
        for _ in 0..TRIES {
            let gctrace = Gctrace::all_ruby(&live)?;
            let done = Script::new(&live, ruby, "explicit.rb")?.arg("40").run()?;
            let report = gctrace.stop()?;
            if pause_sums_of(&report, &done)? {
                return Ok(());
            }
        }
        bail!("of {TRIES} runs none had undisturbed cycles of both kinds")
    })
}

/// Returns whether both kinds had cycles without preemption. If a preemption adds time to only one of the two logs, they cannot be
/// compared.
fn pause_sums_of(report: &Report, done: &Done) -> Result<bool> {
    let (lines, log) = (lines(report, done.pid), done.log()?);
    let pauses = log.pauses()?;
    let mut both = true;
    for kind in ["minor", "major"] {
        let counts = log.starts().filter(|event| event.cycle_kind() == kind).map(Event::count);
        let counts = counts.collect::<Vec<_>>();
        // The last cycle may continue after the log.
        let counts = counts[..counts.len() - 1].iter().copied();
        let disturbed = |count: &u64| pauses.iter().any(|pause| pause.count == *count && pause.preempted);
        let counts = counts.filter(|count| !disturbed(count)).collect::<Vec<_>>();
        both &= !counts.is_empty();
        let of_kind = pauses.iter().filter(|pause| counts.contains(&pause.count)).collect::<Vec<_>>();
        let theirs = of_kind.iter().map(|pause| pause.end_ns - pause.begin_ns).sum::<u64>();
        let ours = lines.iter().filter(|line| counts.contains(&line.count)).collect::<Vec<_>>();
        ensure!(ours.iter().all(|line| line.kind == kind), "another kind than {kind}");
        let steps = ours.iter().map(|line| line.steps).sum::<u64>();
        ensure!(steps == of_kind.len() as u64, "{steps} {kind} pauses, the witness has {}", of_kind.len());
        let sum = ours.iter().map(|line| line.pause_ns).sum::<u64>();
        ensure_times!(
            sum.abs_diff(theirs) <= 200_000 * of_kind.len() as u64,
            "{kind}: {sum} ns, the witness has {theirs} ns in {} pauses",
            of_kind.len()
        );
    }
    Ok(both)
}

/// If Ractors allocate concurrently, CRuby loses some counts, so that the number of live slots can become negative. The program is traced
/// nevertheless, both from its start and from the middle, with its own cycle counts.
#[test]
fn ractors_that_lose_counts() -> Result<()> {
    const ALLOCATE: &str = r#"
Warning[:experimental] = false
finish = Process.clock_gettime(Process::CLOCK_MONOTONIC) + Float(ARGV[0])
over = ARGV[1].to_s.freeze
ractors = 4.times.map do
  Ractor.new(finish, over) do |finish, over|
    100.times { Array.new(100) { "x" * 50 } } until Process.clock_gettime(Process::CLOCK_MONOTONIC) > finish || File.exist?(over)
  end
end
$stderr.sync = true
warn "begun"
ractors.each { |ractor| ractor.respond_to?(:value) ? ractor.value : ractor.take }
warn "count #{GC.count}"
"#;
    let live = Live::beside_others()?;
    Ruby::each(|ruby| {
        if !ruby.is_at_least(3, 0) {
            return Ok(());
        }
        let over = live.path(&format!("over{}", ruby.label()));
        // Left by an earlier attempt.
        let _is_absent = std::fs::remove_file(&over);
        let program = |seconds: &str| -> Result<Vec<OsString>> {
            let mut argv: Vec<OsString> = ruby.argv()?;
            argv.extend(["-e", ALLOCATE, seconds].map(OsString::from));
            argv.push(over.clone().into_os_string());
            Ok(argv)
        };
        let count = |lines: &[String]| -> Result<u64> {
            let said = lines.iter().find_map(|line| line.strip_prefix("count ")).context("no count")?;
            Ok(said.parse()?)
        };
        let seen = |report: &Report, pid: Option<u32>, last: u64, errors: &str| -> Result<()> {
            ensure!(report.refused.is_empty(), "{:?}\n{errors}", report.refused);
            let of = |line: &&GcLine| pid.is_none_or(|pid| line.pid == pid);
            let counts: Vec<u64> = report.gcs.iter().filter(of).map(|line| line.count).collect();
            let first = *counts.first().with_context(|| format!("no cycle\n{errors}"))?;
            ensure!(counts.iter().copied().eq(first..first + counts.len() as u64), "{counts:?}");
            ensure!(counts.last() >= Some(&last), "{:?} of {last} cycles\n{errors}", counts.last());
            let slots = |line: &GcLine, name: &str| line.stat[name].as_u64();
            let wrapped =
                |line: &&GcLine| slots(line, "heap_live_slots") > slots(line, "heap_available_slots");
            println!(
                "{}: {} of {} cycles have more live slots than there are",
                ruby.label(),
                report.gcs.iter().filter(wrapped).count(),
                counts.len()
            );
            Ok(())
        };
        let mut args: Vec<OsString> = vec!["--".into()];
        args.extend(program("1.5")?);
        let finished = Invocation::jsonl(args)?.run()?;
        let report = Report::parse(&finished.stdout)?;
        seen(&report, None, count(&finished.stderr)?, &finished.errors())?;
        // Until gctrace has seen some of it.
        let command = program("120")?;
        let mut child = Guarded::start("ractors", Command::new(&command[0]).args(&command[1..]))?;
        child.wait_stderr(PATIENCE, "begun", |line| line == "begun")?;
        let pid = child.pid();
        let gctrace = Invocation::jsonl(["--pid", &pid.to_string()])?.start_ready()?;
        std::thread::sleep(Duration::from_millis(1500));
        std::fs::write(&over, "")?;
        let (report, finished) = gctrace.done()?;
        seen(&report, Some(pid), count(&child.finish(PATIENCE)?.stderr)?, &finished.errors())
    })
}
