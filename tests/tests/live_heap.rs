//! `gctrace heap`: the heap of a running process, against what `ObjectSpace` says inside of it.

use std::cell::Cell;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use serde_json::Value;

/// The first line of a census, and its rows.
fn census(live: &Live, pid: u32, by: &str) -> Result<(Value, Vec<Value>)> {
    let cache = live.path("cache").to_string_lossy().into_owned();
    let pid = pid.to_string();
    let args = ["heap", "--pid", &pid, "--by", by, "--format", "jsonl", "--cache-dir", &cache];
    let finished = Invocation::new(args)?.run()?;
    ensure!(finished.status.success(), "{:?}\n{}", finished.status, finished.errors());
    let lines: Vec<Value> =
        finished.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
    let (first, rows) = lines.split_first().context("no line")?;
    ensure!(first["type"] == "census" && rows.iter().all(|row| row["type"] == "heap"), "{lines:?}");
    Ok((first.clone(), rows.to_vec()))
}

fn count(rows: &[Value], name: &str) -> Option<u64> {
    rows.iter().find(|row| row["name"] == name)?["count"].as_u64()
}

fn sum(rows: &[Value], field: &str) -> u64 {
    rows.iter().filter_map(|row| row[field].as_u64()).sum()
}

/// Types, FREE and TOTAL are those of `ObjectSpace.count_objects`, to the object; classes are those of `each_object`; and
/// whatever the rows stand for, they add up to the same heap. A second look sees the same.
#[test]
fn equals_object_space() -> Result<()> {
    let live = Live::begin()?;
    let named = Cell::new(0);
    Ruby::each(|ruby| {
        let mut script = Script::unwitnessed(&live, ruby, "heap_census.rb")?.start()?;
        script.wait_for("counting")?;
        // It counts once more after that line and then allocates nothing, which two equal looks in a row show.
        let mut looks = vec![census(&live, script.pid(), "type")?];
        for _ in 0..50 {
            std::thread::sleep(std::time::Duration::from_millis(20));
            looks.push(census(&live, script.pid(), "type")?);
            let [.., one, two] = looks.as_slice() else { continue };
            if one == two {
                break;
            }
        }
        let (head, types) = looks.pop().context("no census")?;
        // A release that no table has yet is counted, and its classes are not named.
        let classes = match census(&live, script.pid(), "class") {
            Ok((_, classes)) => Some(classes),
            Err(error) if error.to_string().contains("no layout is known for CRuby") => None,
            Err(error) => return Err(error),
        };
        let (_, sizes) = census(&live, script.pid(), "size")?;
        let (_, pages) = census(&live, script.pid(), "page")?;
        script.say("go")?;
        let done = script.finish()?;

        ensure!(head["gc_count"] == head["gc_count_after"], "{head}");
        let expected = done.report.extra["counts"].as_object().context("no counts")?;
        let differing: Vec<String> = expected
            .iter()
            .filter(|(name, expected)| count(&types, name).unwrap_or(0) != expected.as_u64().unwrap_or(0))
            .map(|(name, expected)| format!("{name}: {expected}, gctrace {:?}", count(&types, name)))
            .collect();
        ensure!(differing.is_empty(), "{}: {}", ruby.label(), differing.join("; "));
        let unexpected: Vec<&Value> =
            types.iter().filter(|row| !expected.contains_key(row["name"].as_str().unwrap_or(""))).collect();
        ensure!(unexpected.is_empty(), "{unexpected:?}");

        let live_objects = head["live"].as_u64().context("live")?;
        ensure!(done.report.extra_u64("orders")? == 5_000 && done.report.extra_u64("large")? == 300);
        if let Some(classes) = classes {
            named.set(named.get() + 1);
            ensure!(count(&classes, "Order") == Some(5_000), "{classes:?}");
            ensure!(count(&classes, "LargeOrder") == Some(300), "{classes:?}");
            ensure!(count(&classes, "(class without a name)").is_some_and(|n| n >= 70), "{classes:?}");
            ensure!(sum(&classes, "count") == live_objects, "{classes:?}");
        }
        ensure!(sum(&sizes, "count") == live_objects, "{sizes:?}");
        let slots = head["slots"].as_u64().context("slots")?;
        ensure!(sum(&sizes, "free") + live_objects == slots, "{sizes:?}");
        ensure!(sum(&pages, "count") == head["pages"].as_u64().context("pages")?, "{pages:?}");
        ensure!(sum(&pages, "free") == head["free"].as_u64().context("free")?, "{pages:?}");
        Ok(())
    })?;
    ensure!(named.get() > 0, "no Ruby whose classes could be named");
    Ok(())
}

/// A program that allocates and collects all the time is counted, and it is said that the sums are of no one moment.
#[test]
fn a_busy_heap_is_reported_as_such() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let mut script = Script::unwitnessed(&live, &ruby, "steady.rb")?.start()?;
    script.wait_for("ready")?;
    let mut busy = false;
    for _ in 0..20 {
        let (head, rows) = census(&live, script.pid(), "type")?;
        ensure!(count(&rows, "TOTAL") == head["slots"].as_u64(), "{head}");
        let consistent = head["consistent"].as_bool().context("consistent")?;
        let moved = head["gc_count"] != head["gc_count_after"]
            || head["allocated_meanwhile"] != 0
            || head["sweeping"] == true;
        ensure!(consistent != moved, "{head}");
        busy |= moved;
        if busy {
            break;
        }
    }
    ensure!(busy, "the program allocated nothing");
    Ok(())
}

/// What is no Ruby, or not there, is one clear line and status 1.
#[test]
fn others_are_refused() -> Result<()> {
    let live = Live::begin()?;
    let cache = live.path("cache").to_string_lossy().into_owned();
    let own = std::process::id().to_string();
    for (pid, reason) in [(own.as_str(), "not a Ruby process"), ("4194304", "no such process")] {
        let finished = Invocation::new(["heap", "--pid", pid, "--cache-dir", &cache])?.run()?;
        ensure!(finished.status.code() == Some(1), "{:?}", finished.status);
        ensure!(finished.stdout.is_empty() && finished.errors().contains(reason), "{}", finished.errors());
    }
    Ok(())
}
