//! Allocation counted at page refills, compared with the VM's own counter.

use std::{collections::BTreeMap, ffi::OsStr, fs};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::live::Live;
use gctrace_tests::pprof::Profile;
use gctrace_tests::report::{AllocLine, Report};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use gctrace_tests::{ensure_times, ledger};
use serde_json::Value;

/// Seconds without collections; longer than the time from one line to the next.
const QUIET: &str = "2";

fn tracing() -> Result<Gctrace> {
    Invocation::jsonl(["--all-ruby", "--alloc"])?.start_ready()
}

/// The lines of a process. Each must be consistent by itself.
fn lines(report: &Report, pid: u32) -> Result<Vec<&AllocLine>> {
    let lines: Vec<_> = report.allocs.iter().filter(|line| line.pid == pid).collect();
    for line in &lines {
        ensure!(line.lost == 0 && line.refills > 0, "{line:?}");
        let slots = sizes(line)?;
        ensure!(slots.values().sum::<u64>() == line.objects, "{line:?}");
        ensure!(slots.iter().map(|(size, slots)| size * slots).sum::<u64>() == line.bytes, "{line:?}");
    }
    Ok(lines)
}

fn sizes(line: &AllocLine) -> Result<BTreeMap<u64, u64>> {
    let parsed = |(size, slots): (&String, &Value)| Some((size.parse().ok()?, slots.as_u64()?));
    line.slots.iter().map(parsed).collect::<Option<_>>().with_context(|| format!("{line:?}"))
}

/// Number of slots of one page of each of these sizes: pages have 64 KiB since 3.2 (`HEAP_PAGE_ALIGN_LOG`, gc.c), and 16 KiB before.
fn one_page_of_each<'a>(lines: impl Iterator<Item = &'a AllocLine>) -> Result<u64> {
    let mut all = BTreeMap::new();
    for line in lines {
        all.extend(sizes(line)?);
    }
    Ok(all.keys().map(|size| 65_536 / size).sum())
}

/// In a period without collections, the number of slots taken equals the number of objects that the VM counts, except for the rest of the
/// pages that were open at its start and at its end. Over the whole run, at least as many slots are seen to be taken as objects are allocated.
#[test]
fn sums_are_those_of_the_vm() -> Result<()> {
    let live = Live::begin()?;
    Ruby::two_at_a_time(|ruby| {
        let gctrace = tracing()?;
        // The first run makes gctrace attach the probes of the image.
        Script::unwitnessed(&live, ruby, "allocs.rb")?.run()?;
        let done = Script::unwitnessed(&live, ruby, "allocs.rb")?.arg(QUIET).run()?;
        let report = gctrace.stop()?;
        ledger::check_lossless(&report)?;
        let lines = lines(&report, done.pid)?;
        let seconds = |name: &str| done.report.extra[name].as_f64().with_context(|| name.to_owned());
        let (from, to) = (seconds("from")?, seconds("to")?);
        let within = |line: &&&AllocLine| line.ts + line.ns as f64 / 1e9 > from && line.ts < to;
        let taken: u64 = lines.iter().filter(within).map(|line| line.objects).sum();
        let growth = done.report.extra_u64("growth")?;
        let open = one_page_of_each(lines.iter().filter(within).copied())?;
        eprintln!("{}: {taken} slots for {growth} objects, at most {open} apart", ruby.label());
        ensure!(growth > 400_000, "{growth} objects");
        // A line that is late has objects of the work before or behind.
        ensure_times!(taken.abs_diff(growth) <= open, "{taken} slots, {growth} objects, {open}");
        let objects: u64 = lines.iter().map(|line| line.objects).sum();
        let (allocated, gcs) = (done.report.extra_u64("allocated")?, done.report.extra_u64("collections")?);
        ensure!(gcs > 0 && objects >= allocated, "{objects} slots were taken for {allocated} objects");
        Ok(())
    })
}

/// Nothing is reported without the flag.
#[test]
fn only_on_demand() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        let gctrace = Gctrace::all_ruby(&live)?;
        Script::unwitnessed(&live, ruby, "allocs.rb")?.run()?;
        let report = gctrace.stop()?;
        ensure!(report.allocs.is_empty(), "{:?}", report.allocs);
        ledger::check_lossless(&report)
    })
}

/// Stacks of allocation represent all slots, and the share of a method is that of its objects: within five standard deviations, so that
/// one of the twelve shares fails by chance in one of 100,000 runs.
#[test]
fn stacks_are_where_objects_are_allocated() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::each(|ruby| {
        let dir = live.dir(&format!("alloc-{}", ruby.label()))?;
        let (pprof, folded) = (dir.join("a.pb.gz"), dir.join("a.folded"));
        let args = [OsStr::new("--alloc"), "--flamegraph-of".as_ref(), "alloc".as_ref()];
        let files = [OsStr::new("--pprof"), pprof.as_ref(), "--folded".as_ref(), folded.as_ref()];
        let scripts = ["allocs.rb", "alloc_shares.rb"].map(|name| Script::unwitnessed(&live, ruby, name));
        let scripts = scripts.into_iter().collect::<Result<Vec<_>>>()?;
        let (mut both, gctrace) = Script::under(scripts, args.into_iter().chain(files))?;
        let (report, _) = gctrace.done()?;
        ledger::check_lossless(&report)?;

        let profile = Profile::open(&pprof)?;
        let done = both.pop().context("no script")?;
        for pid in [both[0].pid, done.pid] {
            let lines = || report.allocs.iter().filter(|line| line.pid == pid);
            let (objects, bytes): (u64, u64) =
                (lines().map(|line| line.objects).sum(), lines().map(|line| line.bytes).sum());
            let totals =
                (profile.total_of(pid, "alloc_objects/count")?, profile.total_of(pid, "alloc_space/bytes")?);
            ensure!(objects > 400_000, "{objects} objects of {pid}");
            ensure!(
                totals == (objects, bytes),
                "{totals:?} under stacks, {objects} objects in {bytes} bytes"
            );
        }
        let bytes = profile.total("alloc_space/bytes")?;
        let text = fs::read_to_string(&folded)?;
        let widths = text.lines().filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok());
        ensure!(widths.sum::<u64>() == bytes, "the flame graph is of other bytes than {bytes}");

        let index = profile.index("alloc_objects/count")?;
        let pid = done.pid.to_string();
        let mut seen = BTreeMap::from([("most", 0), ("some", 0), ("few", 0)]);
        for sample in profile.samples.iter().filter(|sample| sample.label("pid") == Some(&pid)) {
            for (name, objects) in &mut seen {
                if sample.stack.iter().any(|frame| frame.name == format!("Shop#{name}")) {
                    *objects += sample.values[index];
                    let thread = sample.label("thread name");
                    ensure!(*name != "few" || thread == Some("helper"), "few in {thread:?}");
                }
            }
        }
        let stacks = report.ledger.as_ref().context("no ledger")?.user["alloc_stacks"].as_u64().unwrap_or(0);
        let (all, called) = (seen.values().sum::<u64>() as f64, done.report.extra_u64("most")? as f64);
        ensure!(stacks > 200, "{stacks} stacks");
        let calls = called / 0.63;
        for (name, objects) in &seen {
            let (share, truth) = (*objects as f64 / all, done.report.extra_u64(name)? as f64 / calls);
            // A stack represents 0 to 2 times the average, at random, which adds a third to the variance of a number of stacks.
            let deviation = (truth * (1.0 - truth) * (4.0 / 3.0) / stacks as f64).sqrt();
            eprintln!("{}: {name} {share:.4}, truly {truth:.4} (deviation {deviation:.4})", ruby.label());
            ensure!((share - truth).abs() <= 5.0 * deviation, "{name}: {share} of {all}, truly {truth}");
        }
        Ok(())
    })
}
