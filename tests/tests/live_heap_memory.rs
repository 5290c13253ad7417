//! `gctrace heap --by memory`, and the memory that a census itself needs.

use std::cell::Cell;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use gctrace_tests::PATIENCE;
use gctrace_tests::child::{Finished, Guarded};
use gctrace_tests::heap::{census, heap, parsed, sum};
use gctrace_tests::live::{Live, gctrace_binary, rubies_dir};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use serde_json::Value;

/// Runs gctrace with these arguments. Returns its peak memory, kB, which the kernel reports to its parent when it has ended.
fn peak_memory(live: &Live, args: &[&str]) -> Result<(Finished, u64)> {
    let parent = live.path("peak");
    if !parent.exists() {
        let source = rubies_dir().join("peak/peak.c");
        let compiled = Command::new("cc").arg("-o").arg(&parent).arg(source).output()?;
        ensure!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    }
    let mut command = Command::new(parent);
    let finished = Guarded::start("peak", command.arg(gctrace_binary()?).args(args))?.finish(PATIENCE)?;
    let peak = finished.stderr.last().and_then(|last| last.strip_prefix("peak ")?.parse().ok());
    let peak = peak.with_context(|| finished.errors())?;
    Ok((finished, peak))
}

/// A large heap needs no more memory in gctrace than a small one, because it is read page by page.
#[test]
fn memory_is_bounded() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let peak = |objects: &str| -> Result<(u64, u64)> {
        let mut script = Script::unwitnessed(&live, &ruby, "heap_large.rb")?.arg(objects).start()?;
        script.wait_for("running")?;
        census(&live, script.pid(), "type")?;
        let cache = live.path("cache").to_string_lossy().into_owned();
        let pid = script.pid().to_string();
        let args = ["heap", "--pid", &pid, "--by", "class", "--format", "jsonl", "--cache-dir", &cache];
        let (finished, peak) = peak_memory(&live, &args)?;
        let (head, _) = parsed(&finished)?;
        Ok((peak, head["live_bytes"].as_u64().context("live_bytes")?))
    };
    let (small, _) = peak("1000")?;
    let (large, bytes) = peak("2000000")?;
    ensure!(bytes > 80_000_000, "{bytes}");
    ensure!(
        small > 1000 && large < small + 8_000,
        "{large} kB for {bytes} bytes, {small} kB for a small heap"
    );
    Ok(())
}

/// The parts of the memory add up to the kernel's resident memory, and a large heap is in the pages of objects.
#[test]
fn memory_adds_up() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::first_and_last(|ruby| {
        let mut script = Script::unwitnessed(&live, ruby, "heap_large.rb")?.arg("400000").start()?;
        script.wait_for("running")?;
        let finished = heap(&live, script.pid(), &["--by", "memory", "--format", "jsonl"])?;
        ensure!(finished.status.success(), "{}", finished.errors());
        let lines: Vec<Value> =
            finished.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
        let (head, parts) = lines.split_first().context("no line")?;
        let rss = head["rss"].as_u64().context("rss")?;
        ensure!(sum(parts, "bytes") == rss, "{lines:?}");
        let rollup = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", script.pid()))?;
        let witness = rollup.lines().find_map(|line| line.strip_prefix("Rss:")?.trim().strip_suffix(" kB"));
        let witness: u64 = witness.context("no Rss")?.trim().parse()?;
        // A waiting program changes little: its other threads touch a few pages.
        ensure!(rss.abs_diff(witness * 1024) < 1 << 20, "{rss} {witness} kB");
        let objects = head["objects"].as_u64().context("objects")?;
        let slots = head["slots_live"].as_u64().context("slots")?;
        ensure!(slots > 400_000 * 40 && objects >= slots && objects < rss, "{head}");
        Ok(())
    })
}

/// Pages without slots, which Ruby keeps for reuse from 3.4 on, are pages of objects.
#[test]
fn empty_pages_of_objects() -> Result<()> {
    let live = Live::beside_others()?;
    let with_empty = Cell::new(0);
    Ruby::each(|ruby| {
        let mut script = Script::unwitnessed(&live, ruby, "heap_empty.rb")?.start()?;
        let printed = script.wait_for_end(" pages")?;
        let numbers: Vec<u64> = printed.split(' ').filter_map(|number| number.parse().ok()).collect();
        let [pages, empty] = numbers[..] else { bail!("{printed}") };
        let finished = heap(&live, script.pid(), &["--by", "memory", "--format", "jsonl"])?;
        ensure!(finished.status.success(), "{}", finished.errors());
        let head: Value = serde_json::from_str(finished.stdout.first().context("no line")?)?;
        let of = |name: &str| head[name].as_u64().with_context(|| format!("no {name}: {head}"));
        ensure!(empty == 0 || ruby.is_at_least(3, 4), "{}: {printed}", ruby.label());
        // All pages had objects once, so they are in memory. The last page of a mapping may lack a part.
        ensure!(
            of("objects_empty")?.abs_diff(empty << 16) <= 4096 * empty,
            "{}: {printed}: {head}",
            ruby.label()
        );
        if empty > 0 {
            with_empty.set(with_empty.get() + 1);
            ensure!(of("objects")? * 100 >= (pages << 16) * 95, "{}: {printed}: {head}", ruby.label());
            let text = heap(&live, script.pid(), &["--by", "memory"])?.stdout;
            ensure!(text.iter().any(|line| line.contains("in pages without slots")), "{text:?}");
        }
        Ok(())
    })?;
    ensure!(with_empty.get() > 0, "no Ruby keeps empty pages");
    Ok(())
}

/// Each part contains what the program is known to have: a string of 100 MB is allocated, four threads have their stacks, and pages of
/// objects are those that Ruby counts. From glibc 2.42 on, guards are inside mappings; then what cannot be separated counts as the rest.
#[test]
fn parts_of_memory() -> Result<()> {
    let live = Live::beside_others()?;
    let told_apart = Cell::new(0);
    Ruby::each(|ruby| {
        let mut script = Script::unwitnessed(&live, ruby, "heap_memory.rb")?.start()?;
        script.wait_for("running")?;
        let finished = heap(&live, script.pid(), &["--by", "memory", "--format", "jsonl"])?;
        ensure!(finished.status.success(), "{}", finished.errors());
        let lines: Vec<Value> =
            finished.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
        let (head, parts) = lines.split_first().context("no line")?;
        let part = |name: &str| {
            parts.iter().find(|part| part["name"] == name).and_then(|part| part["bytes"].as_u64())
        };
        let rss = head["rss"].as_u64().context("rss")?;
        ensure!(sum(parts, "bytes") == rss, "{}: {lines:?}", ruby.label());
        let blocks = part("allocated (large blocks)").context("large blocks")?;
        // Ruby's timer thread may be one more; the main thread has its own part.
        let threads = std::fs::read_dir(format!("/proc/{}/task", script.pid()))?.count() as u64;
        ensure!(head["threads"] == threads && threads >= 5, "{threads}: {head}");
        let found = head["thread_stacks"].as_u64().context("thread_stacks")?;
        let stacks = part("thread stacks").context("thread stacks")?;
        if found == threads - 1 {
            told_apart.set(told_apart.get() + 1);
            ensure!((16 << 10..4 << 20).contains(&stacks), "{}: {lines:?}", ruby.label());
            ensure!((100_000_000..110_000_000).contains(&blocks), "{}: {lines:?}", ruby.label());
        } else {
            ensure!(found < threads && blocks < 1 << 20, "{}: {lines:?}", ruby.label());
            ensure!(part("other anonymous").is_some_and(|bytes| bytes > 100_000_000), "{lines:?}");
        }
        for name in ["vm_rss_before", "vm_rss_after"] {
            // The kernel's counter lags behind by some pages per CPU.
            let other = head[name].as_u64().context("VmRSS")?;
            ensure!(other.abs_diff(rss) < 2 << 20, "{name}: {head}");
        }
        Ok(())
    })?;
    ensure!(told_apart.get() > 0, "no Ruby whose parts are distinguished");
    Ok(())
}
