//! Memory that workers share with their parent since a fork, and the part of it that became private: compared with what the workers wrote,
//! and with the kernel's sums per mapping.

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::PATIENCE;
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::heap::{heap, sum};
use gctrace_tests::live::Live;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Running, Script};
use serde_json::Value;

const PAGE: u64 = 4096;
/// Maximum number of bytes that a worker writes besides what it is told to write: its stacks, variables of libc and the VM, the line that it
/// reads. The part of it that was written before the first look does not count as having become private.
const OWN: u64 = 64 * PAGE;

fn forked(live: &Live, ruby: &Ruby) -> Result<Running> {
    let mut script = Script::unwitnessed(live, ruby, "forked_pages.rb")?.start()?;
    script.wait_for("loaded")?;
    Ok(script)
}

/// Pids of the workers, in the order of their forks.
fn workers(script: &Running) -> Result<Vec<u32>> {
    // Another program may have entered the separate root.
    let mut pid = script.pid();
    for _ in 0..4 {
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
        let children: Vec<u32> = children.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        match children[..] {
            [only] => pid = only,
            [_, _, _] => return Ok(children),
            _ => break,
        }
    }
    anyhow::bail!("no three workers below {}", script.pid())
}

/// The anonymous memory that a process shares with other processes, as the kernel sums it up per mapping.
fn shared(pid: u32) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let (mut counts, mut bytes) = (false, 0);
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().context("an empty line")?;
        match first {
            "Shared_Clean:" | "Shared_Dirty:" if counts => {
                bytes += 1024 * words.next().context("no size")?.parse::<u64>()?;
            }
            _ if first.ends_with(':') => {}
            // The line of a range: permissions, offset, device, inode, path.
            _ => counts = line.split_whitespace().nth(4) == Some("0") && !line.contains("[v"),
        }
    }
    Ok(bytes)
}

fn number(line: &Value, field: &str) -> Result<u64> {
    line[field].as_u64().with_context(|| format!("no {field} in {line}"))
}

/// The last report of a watch since its first look: the line, and the bytes that became private, of objects and of all other parts.
fn whole(lines: &[String]) -> Result<(Value, u64, u64)> {
    let lines: Vec<Value> = lines.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
    let last = lines
        .iter()
        .rposition(|line| line["type"] == "sharing" && line["since"] == "first")
        .context("no line since the first look")?;
    let parts: Vec<Value> =
        lines[last + 1..].iter().take_while(|line| line["type"] == "sharing_part").cloned().collect();
    let head = lines[last].clone();
    let fates = ["became_private", "shared", "swapped", "gone"];
    let all = fates.iter().map(|name| number(&head, name)).sum::<Result<u64>>()?;
    ensure!(all == number(&head, "shared_before")?, "does not add up: {head}");
    let private = sum(&parts, "became_private");
    let objects = parts.iter().find(|part| part["name"] == "pages of objects");
    let objects = objects.map_or(Ok(0), |part| number(part, "became_private"))?;
    ensure!(private <= number(&head, "became_private")?, "{head}: {parts:?}");
    Ok((head, objects, private - objects))
}

/// In a worker that writes to known pages of objects and of a large string, those pages became private and no others; in an idle worker none
/// did; in a collecting worker the bytes agree with the kernel's sums.
#[test]
fn written_pages_became_private() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::two_at_a_time(|ruby| {
        let mut script = forked(&live, ruby)?;
        script.say("fork")?;
        script.wait_for("forked")?;
        let workers = workers(&script)?;
        let cache = live.path(&format!("cache-{}", ruby.label())).to_string_lossy().into_owned();
        let mut watches = Vec::new();
        for pid in &workers {
            let pid = pid.to_string();
            let args = ["heap", "--pid", &pid, "--by", "memory", "--format", "jsonl", "--every", "2s"];
            let args = args.into_iter().chain(["--cache-dir", &cache]);
            watches.push(Invocation::new(args)?.start_ready()?);
        }
        let before: Vec<u64> = workers.iter().map(|pid| shared(*pid)).collect::<Result<_>>()?;
        script.say("write")?;
        script.wait_for("written")?;
        let after: Vec<u64> = workers.iter().map(|pid| shared(*pid)).collect::<Result<_>>()?;
        let rounds = |watch: &Gctrace| {
            let ends = |line: &&String| line.contains("\"sharing\"") && line.contains("\"first\"");
            watch.stdout_so_far().iter().filter(ends).count()
        };
        let seen: Vec<usize> = watches.iter().map(rounds).collect();
        for ((watch, pid), seen) in watches.iter().zip(&workers).zip(seen) {
            // The next round may have started before the write.
            let until = Instant::now() + PATIENCE;
            while rounds(watch) < seen + 2 {
                ensure!(Instant::now() < until, "{pid}: nothing more");
                sleep(Duration::from_millis(50));
            }
            let other = heap(&live, *pid, &["--by", "memory", "--format", "jsonl"])?;
            let parts: Vec<Value> =
                other.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
            // Pages of files that were written before the fork are in the parts, but not in these mappings.
            let parts: Vec<Value> = parts
                .into_iter()
                .filter(|part| part["type"] == "memory_part" && part["name"] != "programs, libraries, files")
                .collect();
            let (ours, theirs) = (sum(&parts, "shared"), shared(*pid)?);
            ensure!(ours.abs_diff(theirs) <= OWN, "{pid} shares {ours}, {theirs} by smaps");
        }
        script.say("end")?;
        let done = script.finish()?;
        let written = done.report.extra_u64("object_pages")? * PAGE;
        let big = done.report.extra_u64("big_pages")? * PAGE;
        ensure!(written > 1000 * PAGE, "{written}");
        let mut results = Vec::new();
        for watch in watches {
            let finished = watch.wait()?;
            ensure!(finished.status.success(), "{}", finished.errors());
            results.push(whole(&finished.stdout)?);
        }
        let [writer, idle, collector] = &results[..] else { anyhow::bail!("{results:?}") };
        println!("{}: {written} and {big} written: {results:?}, by smaps {before:?} {after:?}", ruby.label());
        let within = |bytes: u64, written: u64| bytes.abs_diff(written) <= OWN;
        ensure!(within(writer.1, written) && within(writer.2, big), "{writer:?}, not {written} and {big}");
        ensure!(within(idle.1 + idle.2, 0), "{idle:?}");
        ensure!(collector.1 + collector.2 > 16 * PAGE, "{collector:?}");
        for ((head, ..), (before, after)) in results.iter().zip(before.iter().zip(&after)) {
            let ours = number(head, "became_private")? + number(head, "gone")?;
            // Pages of files that became private are in gctrace's numbers only.
            ensure!(
                ours.abs_diff(before.saturating_sub(*after)) <= OWN,
                "{head}, {before} and {after} by smaps"
            );
            ensure!(number(head, "shared_before")?.abs_diff(*before) < 4 << 20, "{head}, {before} by smaps");
        }
        let gcs = |head: &Value| {
            Ok::<_, anyhow::Error>(number(head, "gc_count")? - number(head, "gc_count_before")?)
        };
        ensure!(gcs(&idle.0)? == 0 && gcs(&writer.0)? == 0 && gcs(&collector.0)? >= 1, "{results:?}");
        Ok(())
    })
}

/// The account at the end of a run reports the same for workers that were forked meanwhile, since they were first seen.
#[test]
fn account_of_workers() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::first_and_last(|ruby| {
        let mut script = forked(&live, ruby)?;
        let pid = script.pid().to_string();
        let args = ["--pid", &pid, "--memory-account", "--quiet"];
        let mut gctrace = Invocation::new(args)?.informing().start_ready()?;
        script.say("fork")?;
        script.wait_for("forked")?;
        let workers = workers(&script)?;
        // Their pages are read soon after their forks.
        for worker in &workers[..2] {
            gctrace.wait_error(&format!("pid {worker}: what it shares has been read"))?;
        }
        script.say("write")?;
        script.wait_for("written")?;
        let text = gctrace.interrupt()?.stdout.join("\n");
        script.say("end")?;
        let done = script.finish()?;
        let written = done.report.extra_u64("object_pages")? * PAGE;
        let of = |pid: u32| {
            let its = text.split_once(&format!("(pid {pid}), Ruby ")).map(|(_, its)| its)?;
            let table = its.split_once("PRIVATE NOW")?.1;
            let row = table.lines().find(|line| line.ends_with("  pages of objects"))?;
            row.split_whitespace().next()?.parse::<u64>().ok()
        };
        let found = of(workers[0]).with_context(|| text.clone())?;
        ensure!(found.abs_diff(written) <= OWN, "{found}, not {written}:\n{text}");
        let found = of(workers[1]).with_context(|| text.clone())?;
        ensure!(found <= OWN, "{found}:\n{text}");
        ensure!(text.contains("shared with other processes when it was first seen, "), "{text}");
        Ok(())
    })
}
