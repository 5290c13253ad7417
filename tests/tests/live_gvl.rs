//! The GVL: who waits, for how long, and for whom, against witnesses inside the programs.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::report::{GvlSumsLine, GvlWaitLine, Report};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Done, Script};
use gctrace_tests::{ledger, witness};
use serde::Deserialize;
use serde_json::Value;

/// Runs a script under gctrace, which reports every wait. Nothing may be lost.
fn watch(live: &Live, ruby: &Ruby, script: &str) -> Result<(Report, Done)> {
    let gctrace =
        Invocation::jsonl(["--all-ruby", "--gvl", "--gvl-threshold", "0.000001ms"])?.start_ready()?;
    let script = Script::unwitnessed(live, ruby, script)?;
    let done = script.env("GCTRACE_TEST_GVL_WITNESS", witness::gvl_extension(ruby)?).run()?;
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    for thread in report.gvl_threads.iter().chain(&report.gvl_processes) {
        consistent(thread)?;
    }
    Ok((report, done))
}

/// The parts of a thread's life add up, and its histogram holds its waits.
fn consistent(line: &GvlSumsLine) -> Result<()> {
    let parts = line.wait_ns + line.hold_ns.unwrap_or(0) + line.away_ns.unwrap_or(0);
    ensure!(parts <= line.wall_ns, "parts are {parts} of {line:?}");
    let in_histogram: u64 = line.wait_histogram.iter().map(|(_, count)| count).sum();
    ensure!(in_histogram == line.waits, "{in_histogram} waits in the histogram of {line:?}");
    ensure!(
        line.wait_p50_ns <= line.wait_p99_ns && line.wait_p99_ns <= line.wait_max_ns.max(1023),
        "{line:?}"
    );
    Ok(())
}

fn within(what: &str, told: u64, true_ns: u64, percent: u64) -> Result<()> {
    let off = told.abs_diff(true_ns);
    ensure!(off * 100 <= true_ns * percent, "{what}: {told} ns told, {true_ns} ns true");
    Ok(())
}

fn kernel(report: &Report, name: &str) -> Result<u64> {
    let ledger = report.ledger.as_ref().context("no ledger line")?;
    ledger.kernel.get(name).and_then(Value::as_u64).with_context(|| format!("no counter {name}"))
}

/// An event as the witness saw it: event, time, native thread, Ruby thread.
#[derive(Clone, Debug, Deserialize)]
struct Event(String, u64, u32, u64);

/// A wait as the witness saw it.
#[derive(Debug)]
struct Wait {
    tid: u32,
    begin_ns: u64,
    end_ns: u64,
}

/// The waits in a log of thread events: from READY, whoever made it, to RESUMED of the same thread.
fn waits_of(events: &[Event]) -> Vec<Wait> {
    let mut ready: HashMap<u64, u64> = HashMap::new();
    let mut waits = Vec::new();
    for Event(event, ns, tid, thread) in events {
        match event.as_str() {
            "ready" => {
                ready.insert(*thread, *ns);
            }
            "resumed" => {
                if let Some(begin_ns) = ready.remove(thread) {
                    waits.push(Wait { tid: *tid, begin_ns, end_ns: *ns });
                }
            }
            _ => {}
        }
    }
    waits
}

/// Every wait that CRuby's own thread events tell is told, no other is, and they take the same time.
#[test]
fn waits_agree_with_the_thread_events() -> Result<()> {
    let live = Live::begin()?;
    let mut tried = 0;
    Ruby::each(|ruby| {
        // 3.2 does not tell its hooks which thread it is about.
        if !ruby.is_at_least(3, 3) {
            return Ok(());
        }
        tried += 1;
        let (report, done) = watch(&live, ruby, "gvl_events.rb")?;
        let events: Vec<Event> = serde_json::from_value(done.report.extra["gvl"].clone())?;
        let (first, last) = (events.first().context("no events")?.1, events.last().context("no events")?.1);
        let witnessed = waits_of(&events);
        ensure!(witnessed.len() > 100, "only {} waits", witnessed.len());
        // A wait is told when it is over; those that began before the witness did are not in its log.
        let told: Vec<&GvlWaitLine> = report.gvl_waits.iter().filter(|wait| wait.pid == done.pid).collect();
        let slack = 50_000;
        let inside =
            |wait: &&&GvlWaitLine| wait.begin_ns + slack >= first && wait.begin_ns + wait.wait_ns <= last;
        let told: Vec<&GvlWaitLine> = told.iter().filter(inside).copied().collect();
        let tids: BTreeSet<u32> =
            told.iter().map(|wait| wait.tid).chain(witnessed.iter().map(|wait| wait.tid)).collect();
        let mut different = Vec::new();
        for tid in tids {
            let of_witness: Vec<&Wait> = witnessed.iter().filter(|wait| wait.tid == tid).collect();
            let mut of_gctrace: Vec<&GvlWaitLine> =
                told.iter().filter(|wait| wait.tid == tid).copied().collect();
            of_gctrace.sort_by_key(|wait| wait.begin_ns);
            let counts = (of_gctrace.len(), of_witness.len());
            ensure!(counts.0 == counts.1, "{} waits of thread {tid} told, {} there", counts.0, counts.1);
            for (mine, wait) in of_gctrace.into_iter().zip(of_witness) {
                let (ns, true_ns) = (mine.wait_ns, wait.end_ns - wait.begin_ns);
                if ns.abs_diff(true_ns) > 50_000.max(true_ns / 50) {
                    different.push((true_ns, ns));
                }
            }
        }
        // The machine can take the CPU from a thread between the two clocks, which nobody tells in a virtual one.
        let most = witnessed.len() / 50;
        ensure!(different.len() <= most, "{} of {} differ: {different:?}", different.len(), witnessed.len());
        // Nothing of this happens to a program that is watched from its start.
        for orphan in ["gvl_orphan_ready", "gvl_orphan_resumed"] {
            ensure!(kernel(&report, orphan)? == 0, "{orphan} = {}", kernel(&report, orphan)?);
        }
        Ok(())
    })?;
    ensure!(tried > 0, "no Ruby from 3.3 on among the tested ones");
    Ok(())
}

#[derive(Debug, Deserialize)]
struct Life {
    tid: u32,
    begin_ns: u64,
    end_ns: u64,
}

/// Time of waits inside an interval.
fn waited_within<'a>(waits: impl Iterator<Item = &'a GvlWaitLine>, begin_ns: u64, end_ns: u64) -> u64 {
    let part = |wait: &GvlWaitLine| {
        let (from, to) = (wait.begin_ns.max(begin_ns), (wait.begin_ns + wait.wait_ns).min(end_ns));
        to.saturating_sub(from)
    };
    waits.map(part).sum()
}

/// While several threads compute, one of them holds the GVL and all others wait for it: their waits add up to their lives
/// but one.
#[test]
fn waits_add_up_in_lock_step() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        let (report, done) = watch(&live, ruby, "gvl_lockstep.rb")?;
        let lives: Vec<Life> = serde_json::from_value(done.report.extra["lives"].clone())?;
        ensure!(lives.len() == 4, "{lives:?}");
        // The time in which all four run.
        let begin = lives.iter().map(|life| life.begin_ns).max().unwrap_or(0);
        let end = lives.iter().map(|life| life.end_ns).min().unwrap_or(0);
        ensure!(end > begin + 1_000_000_000, "they ran together for {begin}..{end} only: {lives:?}");
        let mut all = 0;
        for life in &lives {
            let own = report.gvl_waits.iter().filter(|wait| (wait.pid, wait.tid) == (done.pid, life.tid));
            let waited = waited_within(own, begin, end);
            ensure!(waited > (end - begin) / 2, "thread {} waited {waited} ns of {}", life.tid, end - begin);
            all += waited;
        }
        within("waits of four threads", all, 3 * (end - begin), 2)?;
        let process = report.gvl_processes.iter().find(|line| line.pid == done.pid).context("no summary")?;
        let waits = report.gvl_waits.iter().filter(|wait| wait.pid == done.pid);
        ensure!(process.wait_ns >= waits.map(|wait| wait.wait_ns).sum(), "{process:?}");
        if let Some(hold_ns) = process.hold_ns {
            // One at a time.
            ensure!(hold_ns <= process.wall_ns && hold_ns + 20_000_000 >= end - begin, "{process:?}");
        }
        Ok(())
    })
}

/// The thread that is named as the reason of a wait is the one that held the GVL, and how late sleepers are is how long they
/// waited for it.
#[test]
fn holders_are_named() -> Result<()> {
    #[derive(Deserialize)]
    struct Sleeper {
        tid: u32,
        begin_ns: u64,
        late_ns: u64,
    }
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        let (report, done) = watch(&live, ruby, "gvl_holder.rb")?;
        let hog = u32::try_from(done.report.extra_u64("hog")?)?;
        let sleepers: Vec<Sleeper> = serde_json::from_value(done.report.extra["sleepers"].clone())?;
        let (mut late, mut waited) = (0, 0);
        for sleeper in &sleepers {
            let own =
                || report.gvl_waits.iter().filter(|wait| (wait.pid, wait.tid) == (done.pid, sleeper.tid));
            let long: Vec<&GvlWaitLine> = own().filter(|wait| wait.wait_ns > 20_000_000).collect();
            ensure!(long.len() >= 6, "{} long waits of {}", long.len(), sleeper.tid);
            for wait in &long {
                let first = own().map(|wait| wait.begin_ns).min() == Some(wait.begin_ns);
                if first && wait.blocked_by.is_none() && !ruby.is_at_least(3, 3) {
                    // A thread of 3.2 has no context when it begins, so its GVL cannot be told.
                    continue;
                }
                let holder = wait.blocked_by.as_ref().with_context(|| format!("no holder of {wait:?}"))?;
                ensure!((holder.tid, holder.comm.as_str()) == (hog, "hog"), "{wait:?}");
                let stack = wait.stack.as_ref().with_context(|| format!("no stack of {wait:?}"))?;
                // A thread that begins has no frames yet.
                ensure!(first || stack.iter().any(|frame| frame.contains("gvl_holder.rb")), "{wait:?}");
            }
            late += sleeper.late_ns;
            // Not the one before its first instruction.
            let slept = own().filter(|wait| wait.begin_ns > sleeper.begin_ns);
            waited += slept.map(|wait| wait.wait_ns).sum::<u64>();
        }
        within("how late the sleepers were", waited, late, 2)?;
        let process = report.gvl_processes.iter().find(|line| line.pid == done.pid).context("no summary")?;
        let worst = process.blocked.first().context("nobody waited for anybody")?;
        ensure!(worst.holder.as_ref().is_some_and(|holder| holder.tid == hog), "{worst:?}");
        ensure!(worst.holds > 0 && worst.wait_ns > 500_000_000, "{worst:?}");
        ensure!(worst.waiter.as_ref().is_some_and(|w| sleepers.iter().any(|s| s.tid == w.tid)), "{worst:?}");
        Ok(())
    })
}

/// Threads that are killed while they wait, sleep or block, exceptions and forks leave nothing behind.
#[test]
fn ends_of_threads() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        let (report, done) = watch(&live, ruby, "gvl_ends.rb")?;
        ensure!(done.report.extra_u64("sum")? == 4 + 4 * 3, "{:?}", done.report.extra);
        let of_it: Vec<_> = report.gvl_threads.iter().filter(|line| line.pid == done.pid).collect();
        // 4 × (1 + 3 + 3 + 3 + 1) threads and the main one; Timeout has one of its own, or one per call.
        let (least, most) = (4 * 11 + 1, 4 * 12 + 2);
        // Up to 3.1 a native thread that is used again for a thread at the same address is taken for the same thread.
        if ruby.is_at_least(3, 2) {
            ensure!((least..=most).contains(&of_it.len()), "{} threads", of_it.len());
            let alive = of_it.iter().filter(|line| line.ended == Some(false)).count();
            ensure!(alive <= 2, "{alive} threads without an end");
        }
        for line in &report.gvl_threads {
            // Threads that would compute for 5 s are killed in the first moments.
            ensure!(line.wait_max_ns < 3_000_000_000, "a wait that never ended: {line:?}");
        }
        // A forked child begins in the middle of holding the GVL; nothing else is unpaired.
        let unpaired: u64 = ["gvl_orphan_ready", "gvl_orphan_resumed", "gvl_orphan_suspended"]
            .into_iter()
            .map(|name| kernel(&report, name))
            .sum::<Result<u64>>()?;
        ensure!(unpaired <= 3 * 4 + 2, "{unpaired} unpaired events: {:?}", report.ledger);
        Ok(())
    })
}

/// Programs whose threads change native threads run as they do when nobody looks: no probe sits on a return there.
#[test]
fn threads_that_move_survive() -> Result<()> {
    let _live = Live::begin()?;
    Ruby::each(|ruby| {
        for what in ["threads", "ractors"] {
            if what == "ractors" && !ruby.is_at_least(3, 0) {
                continue;
            }
            let gctrace = Invocation::jsonl(["--all-ruby", "--gvl"])?.start_ready()?;
            let mut pids = Vec::new();
            for _ in 0..3 {
                let mut command = ruby.command()?;
                command.arg(gctrace_tests::live::rubies_dir().join("gvl_mn.rb")).arg(what);
                command.env("RUBY_MN_THREADS", "1");
                let running = gctrace_tests::child::Guarded::start("gvl_mn.rb", &mut command)?;
                pids.push(running.pid());
                let finished = running.finish(Duration::from_mins(1))?;
                ensure!(finished.status.success(), "{what}: {}: {}", finished.status, finished.errors());
                ensure!(finished.stdout == ["values [524657833]"], "{what}: {:?}", finished.stdout);
            }
            let report = gctrace.stop()?;
            ledger::check_lossless(&report)?;
            for line in &report.gvl_threads {
                consistent(line)?;
            }
            let seen: u64 =
                report.gvl_processes.iter().filter(|l| pids.contains(&l.pid)).map(|l| l.waits).sum();
            ensure!(seen > 100, "{what}: {seen} waits");
        }
        Ok(())
    })
}
