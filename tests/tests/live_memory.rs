//! The memory of a process is reported as of its event.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::compare;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::ledger;
use gctrace_tests::live::Live;
use gctrace_tests::report::{GcLine, Parts, Report};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Done, Script};
use gctrace_tests::slowness;
use gctrace_tests::witness::{Event, Kind, Log, Memory};
use serde_json::Value;

/// Number of threads that use all CPUs, so that gctrace has to wait for one.
const BUSY: usize = 4;

/// Runs `work` on a busy machine. An emulated machine is always busy.
fn under_pressure<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..if slowness() > 1 { 0 } else { BUSY } {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let result = work();
        over.store(true, Ordering::Relaxed);
        result
    })
}

/// Runs a script under gctrace, and returns gctrace's report, too.
fn traced(script: Script, args: &[&str]) -> Result<(Done, Report)> {
    let gctrace = Invocation::jsonl(["--all-ruby"].iter().chain(args))?.start_ready()?;
    let done = under_pressure(|| script.run())?;
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    Ok((done, report))
}

/// Checks that the memory of every event of a process was read at the event.
fn all_at_their_events(lines: &[&GcLine]) -> Result<()> {
    for line in lines {
        let place = format!("cycle {}", line.count);
        ensure!(line.rss_source.as_deref() == Some("kernel"), "{place}: memory from {:?}", line.rss_source);
        ensure!(line.rss.is_some() && line.memory.is_some(), "{place}: no memory at its start");
        ensure!(line.rss_end.is_some() == line.complete, "{place}: memory at its end {:?}", line.rss_end);
    }
    Ok(())
}

/// A large buffer is allocated right after each of 200 collections, on a busy machine: none of them is reported with the buffer, and none
/// without memory.
#[test]
fn buffers_after_collections_are_not_in_them() -> Result<()> {
    const ROUNDS: usize = 200;
    let live = Live::begin()?;
    Ruby::first_and_last(|ruby| {
        let script = Script::unwitnessed(&live, ruby, "buffers.rb")?.seeing_proc().arg(ROUNDS.to_string());
        let (done, report) = traced(script, &[])?;
        let lines: Vec<&GcLine> = report.gcs_of(done.pid).collect();
        compare::program(&lines, &done.report)?;
        all_at_their_events(&lines)?;
        // Other collections are triggered by the buffers themselves, and may end when one of the buffers is full.
        let explicit: Vec<_> = lines.iter().filter(|line| line.gc_by.as_deref() == Some("method")).collect();
        ensure!(explicit.len() == ROUNDS, "{} explicit collections", explicit.len());
        let most = done.report.extra_u64("before")? + done.report.extra_u64("buffer")? / 2;
        let late = |rss: Option<u64>| rss.is_none_or(|rss| rss > most);
        let late = explicit.iter().filter(|line| late(line.rss) || late(line.rss_end)).count();
        ensure!(late == 0, "{late} of {ROUNDS} collections have more than {most} bytes");
        // The buffers existed: the peak includes them.
        let last = lines.last().context("no cycles")?;
        ensure!(last.peak_rss_end.or(last.peak_rss) > Some(most), "peak {:?}", last.peak_rss_end);
        Ok(())
    })
}

/// A program that ends at once has memory in all of its cycles, including the last.
#[test]
fn short_programs_have_memory() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        let script = Script::unwitnessed(&live, ruby, "short.rb")?;
        let (done, report) = traced(script, &[])?;
        let lines: Vec<&GcLine> = report.gcs_of(done.pid).collect();
        compare::program(&lines, &done.report)?;
        all_at_their_events(&lines)?;
        for name in ["memory_late", "memory_unread"] {
            ensure!(ledger::user(&report, name)? == 0, "{name} is {}", ledger::user(&report, name)?);
        }
        Ok(())
    })
}

/// If the kernel does not show how it stores its counters, memory is read in /proc, and each line says so.
#[test]
fn memory_from_proc_says_so() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let script = Script::unwitnessed(&live, &ruby, "explicit.rb")?.arg("200");
    let (done, report) = traced(script, &["--without-kernel-memory"])?;
    let lines: Vec<&GcLine> = report.gcs_of(done.pid).collect();
    compare::program(&lines, &done.report)?;
    let mut told = 0;
    for line in lines {
        let known = u64::from(line.rss.is_some()) + u64::from(line.rss_end.is_some());
        told += known;
        let expected = (known > 0).then_some("proc");
        ensure!(line.rss_source.as_deref() == expected, "cycle {}: {:?}", line.count, line.rss_source);
    }
    let late = ledger::user(&report, "memory_late")?;
    ensure!(told > 0 && late >= told, "{told} readings told, {late} counted");
    Ok(())
}

/// The first Linux whose `/proc/PID/status` has exact sums of the counters (`get_mm_counter_sum`).
const SUMS: (u32, u32) = (6, 17);

/// The first Linux in which threads do not cache their own changes of the counters.
const BY_CPU: (u32, u32) = (6, 2);

/// Major and minor version of this kernel.
fn kernel() -> Result<(u32, u32)> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
        anyhow::bail!("kernel {release:?}")
    };
    Ok((major, minor))
}

/// Maximum error of the counters in `/proc/PID/status` on this kernel, in kB.
fn slack_of_status() -> Result<u64> {
    let possible = std::fs::read_to_string("/sys/devices/system/cpu/possible")?;
    let last = possible.trim().rsplit('-').next().unwrap_or_default().parse::<u64>()?;
    let cpus = last + 1;
    let pages = match kernel()? {
        newer if newer >= SUMS => 0,
        // `percpu_counter_batch` per CPU and counter.
        newer if newer >= BY_CPU => 3 * cpus * (2 * cpus).max(32),
        // What a thread has not added yet: 64 faults (`TASK_RSS_EVENTS_THRESH`) of up to 17 pages (`fault_around_bytes`).
        _ => 64 * FAULT_PAGES,
    };
    Ok(pages * 4)
}

/// Maximum number of pages that one fault maps: one, and for a file also the pages around it (`fault_around_bytes`).
const FAULT_PAGES: u64 = 17;

/// Maximum error of gctrace's reading on this kernel, in kB: what other threads have not added yet (docs/memory.md), at most all of their page
/// faults. Even a program with one Ruby thread has a timer thread from 3.3 on.
fn slack_of_reading(log: &Log) -> Result<u64> {
    Ok(if kernel()? < BY_CPU { log.faults_of_others * FAULT_PAGES * 4 } else { 0 })
}

/// Maximum errors of values on this kernel, in kB.
#[derive(Clone, Copy)]
struct Slack {
    /// For values of `/proc/PID/status`.
    status: u64,
    /// For gctrace's values.
    reading: u64,
}

/// Memory that the witness's hook itself needs between gctrace's reading and its own.
const HOOK_KB: u64 = 16;

fn close(place: &str, what: &str, ours: u64, theirs_kb: u64, slack_kb: u64) -> Result<u64> {
    let ours = ours / 1024;
    let off = ours.abs_diff(theirs_kb);
    ensure!(
        off <= slack_kb,
        "{place}: {what} is {ours} kB, the witness has {theirs_kb} (at most {slack_kb} kB off)"
    );
    Ok(off)
}

fn same(place: &str, rss: u64, peak: u64, parts: Parts, theirs: &Memory, slack: Slack) -> Result<u64> {
    let status = HOOK_KB + slack.status + slack.reading;
    close(place, "rss", rss, theirs.rss, status)?;
    close(place, "anon", parts.anon, theirs.anon, status)?;
    close(place, "file", parts.file, theirs.file, status)?;
    close(place, "shmem", parts.shmem, theirs.shmem, status)?;
    close(place, "swap", parts.swap, theirs.swap, status)?;
    close(place, "peak", peak, theirs.peak, status)?;
    // Whatever the kernel's counters show, this memory was mapped.
    close(place, "rss (page tables)", rss, theirs.walked, HOOK_KB + slack.reading)
}

/// Memory at both ends of each cycle equals what the process itself reads there, from its counters and from its page tables.
#[test]
fn memory_equals_the_witness() -> Result<()> {
    let live = Live::begin()?;
    let status = slack_of_status()?;
    Ruby::each(|ruby| {
        let gctrace = Invocation::jsonl(["--all-ruby"])?.start_ready()?;
        let done = Script::new(&live, ruby, "memory.rb")?.seeing_proc().run()?;
        let report = gctrace.stop()?;
        ledger::check_lossless(&report)?;
        let lines: Vec<&GcLine> = report.gcs_of(done.pid).collect();
        compare::program(&lines, &done.report)?;
        all_at_their_events(&lines)?;
        let (mut compared, mut most) = (0, 0);
        let log = done.log()?;
        let slack = Slack { status, reading: slack_of_reading(log)? };
        for event in &log.events {
            let Some(theirs) = &event.memory else { continue };
            let Some(ours) = lines.iter().find(|line| line.count == event.count()) else {
                ensure!(event.kind == Kind::EndSweep, "no line for cycle {}", event.count());
                continue;
            };
            let off = compare_event(ours, event, theirs, slack)?;
            most = most.max(off);
            compared += 1;
        }
        ensure!(compared >= 2 * 40 / 4, "{compared} events compared");
        println!(
            "{}: {compared} events, at most {most} kB off ({} allowed)",
            ruby.label(),
            HOOK_KB + slack.reading
        );
        Ok(())
    })
}

fn compare_event(line: &GcLine, event: &Event, theirs: &Memory, slack: Slack) -> Result<u64> {
    let place = format!("cycle {} at {:?}", event.count(), event.kind);
    let ours = match event.kind {
        Kind::EndSweep => line.rss_end.zip(line.peak_rss_end).zip(line.memory_end),
        _ => line.rss.zip(line.peak_rss).zip(line.memory),
    };
    let ((rss, peak), parts) = ours.with_context(|| format!("{place}: no memory"))?;
    same(&place, rss, peak, parts, theirs, slack)
}

/// At the end of a run, the account of a process that still runs equals that of `gctrace heap --by memory`, and its parts add up. A process that
/// has ended has no account, and neither do JSON lines.
#[test]
fn account_at_the_end() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::first_and_last(|ruby| {
        let mut script = Script::unwitnessed(&live, ruby, "heap_large.rb")?.arg("400000").start()?;
        script.wait_for("running")?;
        let pid = script.pid().to_string();
        let traced = ["--pid", &pid, "--duration", "1s", "--quiet", "--memory-account"];
        let finished = Invocation::new(traced)?.run()?;
        ensure!(finished.status.success(), "{}", finished.errors());
        let text = finished.stdout.join("\n");
        let rows = finished.stdout.iter().skip_while(|line| !line.ends_with("PART (SOURCE)")).skip(1);
        let rows = rows.take_while(|line| !line.is_empty());
        let bytes: Vec<u64> = rows.filter_map(|line| line.split_whitespace().next()?.parse().ok()).collect();
        let other = ["heap", "--pid", &pid, "--by", "memory", "--format", "jsonl"];
        let other = Invocation::new(other)?.run()?;
        let head: Value = serde_json::from_str(other.stdout.first().context("no line")?)?;
        let rss = head["rss"].as_u64().context("rss")?;
        // A waiting program changes little: its other threads touch a few pages.
        ensure!(bytes.len() == 9 && bytes.iter().sum::<u64>().abs_diff(rss) < 1 << 20, "{rss}:\n{text}");
        ensure!(text.contains("\nRSS ") && text.contains(&format!("(pid {pid}), Ruby ")), "{text}");

        let lines = Invocation::jsonl(traced)?.run()?;
        let note = "--memory-account has no effect on JSON lines";
        ensure!(lines.errors().contains(note), "{}", lines.errors());
        let ended = ["--quiet", "--memory-account", "--", "ruby", "-e", "1"];
        let ended = Invocation::new(ended)?.run()?.stdout.join("\n");
        ensure!(ended.contains("no traced process runs any more"), "{ended}");
        Ok(())
    })
}
