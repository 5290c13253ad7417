//! The witness alone: it must agree with the program before gctrace is compared with it.

use anyhow::{Result, ensure};
use gctrace_tests::live::Live;
use gctrace_tests::report::Report;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{self, Script};
use gctrace_tests::witness::{Event, Kind, Log};
use gctrace_tests::{compare, ledger, witness};

/// Checks that the log is consistent, and counts the same as the script's own `GC.stat`.
fn check(report: &script::Report, log: &Log) -> Result<()> {
    ensure!(report.pid == log.pid, "the log is of {}, the report of {}", log.pid, report.pid);
    let counts = log.starts().map(Event::count).collect::<Vec<_>>();
    ensure!(
        counts == report.counts()?.collect::<Vec<_>>(),
        "cycles {counts:?}, the script has {:?}",
        report.counts()
    );
    for kind in ["minor", "major"] {
        let seen = log.starts().filter(|event| event.cycle_kind() == kind).count() as u64;
        let said = report.growth(&format!("{kind}_gc_count"))?;
        ensure!(seen == said, "{seen} {kind} cycles, the script has {said}");
    }
    for event in &log.events {
        let has_state = matches!(event.kind, Kind::Start | Kind::EndSweep);
        ensure!(has_state != event.stat.is_empty(), "{event:?}");
        if has_state {
            ensure!(event.stat.keys().eq(report.before.keys()), "keys of GC.stat: {event:?}");
            let state = if event.kind == Kind::Start { "none" } else { "sweeping" };
            ensure!(event.reason("state") == Some(state), "state at {event:?}");
        }
    }
    let pauses = log.pauses()?;
    ensure!(pauses.len() >= counts.len(), "{} pauses for {} cycles", pauses.len(), counts.len());
    // The last cycle may still be sweeping when the log ends, and an earlier cycle may end in the log.
    ensure!(log.ends().count().abs_diff(counts.len()) <= 1, "{} ends of sweeping", log.ends().count());
    Ok(())
}

/// Every script runs to its end, and its witness agrees with it.
#[test]
fn witness_agrees_with_the_program() -> Result<()> {
    let live = Live::without_gctrace()?;
    Ruby::each(|ruby| {
        for name in ["explicit.rb", "compact.rb", "stress.rb", "modes.rb", "threads.rb", "short.rb"] {
            let done = Script::new(&live, ruby, name)?.run()?;
            check(&done.report, done.log()?)?;
        }
        Ok(())
    })
}

/// The witness of the GVL gets built, for machines without a compiler, such as the guests of `cargo xtask vm`.
#[test]
fn gvl_witness_is_built() -> Result<()> {
    Ruby::each(|ruby| {
        let path = witness::gvl_extension(ruby)?;
        ensure!(path.is_file(), "{} is not there", path.display());
        Ok(())
    })
}

/// The pressure script really triggers every intended kind of collection, and incremental marking.
#[test]
fn pressure_covers_the_reasons() -> Result<()> {
    let live = Live::without_gctrace()?;
    Ruby::each(|ruby| {
        let done = Script::new(&live, ruby, "pressure.rb")?.run()?;
        let log = done.log()?;
        check(&done.report, log)?;
        for by in ["newobj", "malloc", "method"] {
            assert!(log.starts().any(|event| event.reason("gc_by") == Some(by)), "no cycle by {by}");
        }
        for by in ["nofree", "oldgen", "shady", "oldmalloc", "force"] {
            assert!(log.starts().any(|event| event.reason("major_by") == Some(by)), "no major cycle by {by}");
        }
        // Incremental marking: the pause in which a cycle starts ends before its marking does.
        let order =
            log.events.iter().filter(|event| event.kind != Kind::EndSweep && event.kind != Kind::Enter);
        let order = order.map(|event| event.kind).collect::<Vec<_>>();
        assert!(order.windows(2).any(|pair| pair == [Kind::Start, Kind::Exit]), "no incremental marking");
        Ok(())
    })
}

/// A child has its own log, and a program that execs has two.
#[test]
fn witness_in_children_and_successors() -> Result<()> {
    let live = Live::without_gctrace()?;
    let ruby = Ruby::main()?;
    for (name, suffixes) in [("forker.rb", &[".child", ".grandchild"][..]), ("execer.rb", &[".after"])] {
        let running = Script::new(&live, &ruby, name)?.start()?;
        let outputs = running.outputs();
        let done = running.finish()?;
        check(&done.report, done.log()?)?;
        for suffix in suffixes {
            let (report, log) = outputs.read(suffix)?;
            check(&report, &log.expect("it ran with a witness"))?;
        }
    }
    Ok(())
}

/// The comparison detects differences: a comparison that cannot fail would be useless.
#[test]
fn comparison_notices_differences() -> Result<()> {
    let live = Live::without_gctrace()?;
    let done = Script::new(&live, &Ruby::main()?, "explicit.rb")?.run()?;
    let log = done.log()?;
    let faithful = lines_of(log)?;
    let all = |lines: &[String]| Report::parse(lines);
    let equal = all(&faithful)?;
    let borrowed = equal.gcs.iter().collect::<Vec<_>>();
    compare::cycles(&borrowed, log).demand_equal()?;
    compare::pauses(&borrowed, log)?;
    ledger::check(&equal).expect_err("there is no ledger");

    let spoil = |from: &str, to: &str| -> Result<bool> {
        let at = faithful.len() / 2;
        assert!(faithful[at].contains(from), "{from} is not in {}", faithful[at]);
        let mut lines = faithful.clone();
        lines[at] = lines[at].replacen(from, to, 1);
        let report = all(&lines)?;
        let borrowed = report.gcs.iter().collect::<Vec<_>>();
        Ok(compare::cycles(&borrowed, log).demand_equal().is_err()
            || compare::pauses(&borrowed, log).is_err())
    };
    assert!(spoil("\"heap_live_slots\":", "\"heap_live_slots\":1")?, "another value");
    assert!(spoil("\"minor_gc_count\":", "\"miner_gc_count\":")?, "another key");
    assert!(spoil("\"state\":\"none\"", "\"state\":\"marking\"")?, "another state");
    assert!(spoil("\"tid\":", "\"tid\":1")?, "another thread");
    assert!(spoil("\"begin_ns\":", "\"begin_ns\":1")?, "another pause");
    let without = all(&faithful[1..])?;
    assert!(
        compare::cycles(&without.gcs.iter().collect::<Vec<_>>(), log).demand_equal().is_err(),
        "a line less"
    );
    let doubled = [faithful.clone(), faithful[1..2].to_vec()].concat();
    let doubled = all(&doubled)?;
    assert!(
        compare::cycles(&doubled.gcs.iter().collect::<Vec<_>>(), log).demand_equal().is_err(),
        "a line more"
    );
    Ok(())
}

/// The lines that a perfect tracer would print for a log.
fn lines_of(log: &Log) -> Result<Vec<String>> {
    let pauses = log.pauses()?;
    log.starts()
        .map(|start| {
            let count = start.count();
            let end = log.ends().find(|end| end.count() == count);
            let list = pauses.iter().filter(|pause| pause.count == count).map(
                |pause| serde_json::json!({"begin_ns": pause.begin_ns, "ns": pause.end_ns - pause.begin_ns}),
            );
            let line = serde_json::json!({
                "type": "gc",
                "ts": (log.epoch_offset_ns + i64::try_from(start.ns)?) as f64 / 1e9,
                "pid": log.pid, "tid": start.tid, "comm": "ruby", "ruby": "3.1.2", "container": null,
                "count": count, "kind": start.cycle_kind(), "gc_by": start.reason("gc_by"),
                "major_by": start.reason("major_by"), "pause_ns": 0, "pauses": list.collect::<Vec<_>>(),
                "phases": {"mark_ns": 0, "sweep_ns": 0, "other_ns": 0}, "steps": 0,
                "stat": start.stat, "stat_end": end.map(|end| &end.stat),
                "latest_gc_info": start.info, "latest_gc_info_end": end.map(|end| &end.info),
                "rss": 1, "peak_rss": 1, "rss_source": "kernel",
                "memory": {"anon": 1, "file": 0, "shmem": 0, "swap": 0}, "lost": 0, "complete": end.is_some(),
            });
            Ok(line.to_string())
        })
        .collect()
}
