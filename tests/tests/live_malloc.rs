//! `gctrace malloc`: calls of the allocation functions, compared with an extension inside the process that makes a known number of them.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::Finished;
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::live::Live;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Running, Script};
use gctrace_tests::witness::malloc_extension;
use serde_json::Value;

const MIB: u64 = 1 << 20;

fn script(live: &Live, ruby: &Ruby) -> Result<Running> {
    let script = Script::unwitnessed(live, ruby, "malloc_calls.rb")?;
    let mut script = script.env("GCTRACE_TEST_MALLOC_WITNESS", malloc_extension(ruby)?).start()?;
    script.wait_for("counting")?;
    Ok(script)
}

/// Counts in a process for a minute, or until a signal.
fn malloc(live: &Live, pid: u32, budget: &str) -> Result<Gctrace> {
    let (pid, cache) = (pid.to_string(), live.path("cache").to_string_lossy().into_owned());
    let args = ["malloc", "--pid", &pid, "--cache-dir", &cache, "--format", "jsonl"];
    Invocation::new(args.into_iter().chain(["--duration", "60s", "--budget", budget]))?.start_ready()
}

/// Its first line, and the others by the largest size of their class.
fn parsed(finished: &Finished) -> Result<(Value, BTreeMap<u64, Value>)> {
    ensure!(finished.status.success(), "{:?}\n{}", finished.status, finished.errors());
    let lines: Vec<Value> =
        finished.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
    let (first, rows) = lines.split_first().context("no line")?;
    ensure!(first["type"] == "malloc" && rows.iter().all(|row| row["type"] == "malloc_size"), "{lines:?}");
    let by_size = rows.iter().filter_map(|row| Some((row["up_to"].as_u64()?, row.clone()))).collect();
    Ok((first.clone(), by_size))
}

/// Calls and bytes by function, ages of what was freed, and what is left are those of the extension, to the call.
#[test]
fn calls_are_those_of_the_extension() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        let mut script = script(&live, ruby)?;
        let gctrace = malloc(&live, script.pid(), "100")?;
        script.say("go")?;
        script.wait_for("counted")?;
        let finished = gctrace.interrupt()?;
        script.say("end")?;
        let done = script.finish()?;
        let extra = |name: &str| done.report.extra_u64(name);
        let (head, rows) = parsed(&finished)?;
        eprintln!("{}: {head}", ruby.label());

        let row = |size: u64| rows.get(&size).with_context(|| format!("nothing up to {size} in {rows:?}"));
        let is = |row: &Value, calls: [u64; 3], bytes: [u64; 3], freed: &[(u64, u64)], left: u64| {
            let names = ["malloc", "calloc", "realloc"];
            let freed: serde_json::Map<String, Value> =
                freed.iter().map(|(age, count)| (age.to_string(), (*count).into())).collect();
            let all = names.iter().zip(calls).all(|(name, calls)| row["calls"][name] == calls)
                && names.iter().zip(bytes).all(|(name, bytes)| row["bytes"][name] == bytes)
                && row["freed"] == Value::Object(freed.clone())
                && row["live"] == left;
            ensure!(all, "{}: {row}, not {calls:?} {bytes:?} {freed:?} {left}", ruby.label());
            Ok(())
        };
        ensure!(
            extra("at_once")? == 0 && extra("later")? >= 2 && extra("moved")? >= 3,
            "{:?}",
            done.report.extra
        );
        // 20 that were freed at once, and 10 that were then moved to another class.
        is(row(4 * MIB)?, [30, 0, 0], [90 * MIB, 0, 0], &[(0, 20)], 0)?;
        is(row(8 * MIB)?, [0, 15, 0], [0, 75 * MIB, 0], &[(extra("later")?, 15)], 0)?;
        is(row(16 * MIB)?, [0, 0, 10], [0, 0, 100 * MIB], &[(extra("moved")?, 10)], 0)?;
        is(row(32 * MIB)?, [7, 0, 0], [140 * MIB, 0, 0], &[], 7)?;
        // Allocated before: its free is counted, and nothing else is known of it.
        ensure!(!rows.contains_key(&(64 * MIB)) && !rows.contains_key(&(1 << 62)), "{rows:?}");
        ensure!(head["frees_unknown"].as_u64() >= Some(5), "{head}");
        ensure!(extra("refused")? == 1 && head["failed"].as_u64() >= Some(1), "{head}");
        // A few more than the script's own: the interpreter, too, may have a buffer of that size.
        let strings = row(1 << 17)?["calls"]["malloc"].as_u64().context("calls")?;
        ensure!((extra("strings")?..extra("strings")? + 20).contains(&strings), "{strings} strings");

        let zero = ["overflow", "unread", "lost", "reallocs_unpaired"];
        ensure!(head["adds_up"] == true && zero.iter().all(|name| head[name] == 0), "{head}");
        ensure!(head["ended_by"] == "signal" && head["pid"] == done.pid, "{head}");
        Ok(())
    })
}

/// A process whose calls cost more than the budget is left alone before the time is over, and goes on.
#[test]
fn budget_ends_the_window() -> Result<()> {
    let live = Live::begin()?;
    let mut script = script(&live, &Ruby::main()?)?;
    let gctrace = malloc(&live, script.pid(), "1")?;
    script.say("churn")?;
    let (head, rows) = parsed(&gctrace.wait()?)?;
    ensure!(head["ended_by"] == "budget" && head["seconds"].as_f64() < Some(60.0), "{head}");
    // 400,000 pairs take twice as many hits.
    let churned = rows.get(&64).and_then(|row| row["calls"]["malloc"].as_u64()).context("no calls")?;
    ensure!(churned > 0 && head["hits"].as_u64() >= Some(churned), "{head} {churned}");
    script.wait_for("counted")?;
    script.say("end")?;
    script.finish()?;
    Ok(())
}

/// A process that is no Ruby gives one clear line and status 1.
#[test]
fn others_are_refused() -> Result<()> {
    let live = Live::begin()?;
    let (own, cache) = (std::process::id().to_string(), live.path("cache").to_string_lossy().into_owned());
    let finished = Invocation::new(["malloc", "--pid", &own, "--cache-dir", &cache])?.run()?;
    ensure!(finished.status.code() == Some(1), "{:?}", finished.status);
    ensure!(
        finished.stdout.is_empty() && finished.errors().contains("not a Ruby process"),
        "{}",
        finished.errors()
    );
    Ok(())
}
