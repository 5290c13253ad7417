//! Allocation counted at page refills, against the VM's own counter.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::ledger;
use gctrace_tests::live::Live;
use gctrace_tests::report::{AllocLine, Report};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use serde_json::Value;

/// Longer than from one line to the next, in seconds.
const QUIET: &str = "2";

fn tracing() -> Result<Gctrace> {
    Invocation::jsonl(["--all-ruby", "--alloc"])?.start_ready()
}

/// The lines about a process; each must be right by itself.
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

/// Slots that the pages of these sizes have, one of each size: 64 KiB pages since 3.2 (`HEAP_PAGE_ALIGN_LOG`, gc.c), 16 KiB before.
fn one_page_of_each<'a>(lines: impl Iterator<Item = &'a AllocLine>) -> Result<u64> {
    let mut all = BTreeMap::new();
    for line in lines {
        all.extend(sizes(line)?);
    }
    Ok(all.keys().map(|size| 65_536 / size).sum())
}

/// In a time without collections as many slots are taken as the VM counts objects, but for what was left of the pages that were open
/// at its beginning and at its end. And over the whole life no object is in a slot that was not seen to be taken.
#[test]
fn sums_are_those_of_the_vm() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        let gctrace = tracing()?;
        // The first one brings the probes of the image about.
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
        ensure!(
            growth > 400_000 && taken.abs_diff(growth) <= open,
            "{taken} slots, {growth} objects, {open}"
        );
        let objects: u64 = lines.iter().map(|line| line.objects).sum();
        let (allocated, gcs) = (done.report.extra_u64("allocated")?, done.report.extra_u64("collections")?);
        ensure!(gcs > 0 && objects >= allocated, "{objects} slots were taken for {allocated} objects");
        Ok(())
    })
}

/// Nothing is probed or reported where nobody asked.
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
