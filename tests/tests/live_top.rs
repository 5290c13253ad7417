//! `gctrace top`, as one table: its numbers against `/proc` and the program's own. The screen is tested without a terminal, in the agent.

use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use gctrace_tests::ensure_times;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use gctrace_tests::timing::settled;
use serde_json::Value;

/// A program that allocates all the time and one that does nothing, side by side.
#[test]
fn one_table() -> Result<()> {
    settled(compare_one_table)
}

fn compare_one_table() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let mut busy = Script::unwitnessed(&live, &ruby, "steady.rb")?.start()?;
    busy.wait_for("ready")?;
    let mut idle = Script::unwitnessed(&live, &ruby, "dumped.rb")?.start()?;
    idle.wait_for("dumped")?;
    let pids = format!("{},{}", busy.pid(), idle.pid());
    // Read meanwhile: pages with a breakpoint are resident while it exists, and some are not afterwards.
    let (pid, done) = (idle.pid(), AtomicBool::new(false));
    let (looked, seen) = thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = BTreeSet::new();
            while !done.load(Ordering::Relaxed) {
                seen.insert(resident(pid)?);
                thread::sleep(Duration::from_millis(2));
            }
            anyhow::Ok(seen)
        });
        let invocation =
            Invocation::new(["top", "--once", "--interval", "3s", "--format", "jsonl", "--pid", &pids]);
        let looked = invocation.and_then(Invocation::run);
        done.store(true, Ordering::Relaxed);
        (looked, reader.join())
    });
    let (looked, seen) = (looked?, seen.map_err(|_| anyhow!("reading VmRSS panicked"))??);
    busy.say("stop")?;
    idle.say("")?;
    busy.finish_any()?;
    idle.finish()?;
    ensure!(looked.status.success(), "{:?} {}", looked.status, looked.errors());
    let rows: Vec<Value> =
        looked.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
    ensure!(rows.len() == 2 && rows.iter().all(|row| row["type"] == "top"), "{rows:?}");
    // Sorted by CPU: the busy one is first.
    let (first, second) = (&rows[0], &rows[1]);
    ensure!(first["cycles"].as_u64() > Some(0), "{first}");
    for known in ["cpu_percent", "gc_percent", "pause_max_ns", "allocations_per_second", "heap_live_slots"] {
        ensure!(first[known].as_f64().is_some_and(|value| value > 0.0), "{known}: {first}");
    }
    ensure!(first["pause_p99_ns"].as_u64() <= first["pause_max_ns"].as_u64(), "{first}");
    ensure_times!(
        first["gc_percent"].as_f64() <= first["cpu_percent"].as_f64().map(|cpu| cpu + 10.0),
        "{first}"
    );
    // The other one sleeps: it had no GC, so its heap is not known, and its memory is the kernel's value.
    ensure!(second["cycles"] == 0 && second["pause_max_ns"].is_null(), "{second}");
    ensure!(second["allocations_per_second"].is_null() && second["gvl_wait_percent"].is_null(), "{second}");
    ensure!(
        second["gc_percent"] == 0.0
            && second["rss_bytes"].as_u64().is_some_and(|rss| seen.contains(&(rss / 1024))),
        "{second}, VmRSS {seen:?} kB"
    );
    Ok(())
}

/// `VmRSS` of a process, kB.
fn resident(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let value = |line: &str| line.strip_prefix("VmRSS:")?.trim().strip_suffix("kB")?.trim().parse().ok();
    status.lines().find_map(value).context("VmRSS")
}

/// Without a terminal it says what to do.
#[test]
fn no_terminal() -> Result<()> {
    let _live = Live::begin()?;
    let finished = Invocation::new(["top"])?.run()?;
    ensure!(
        finished.status.code() == Some(2) && finished.errors().contains("--once"),
        "{}",
        finished.errors()
    );
    Ok(())
}
