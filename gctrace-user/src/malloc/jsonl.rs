//! A window as JSON lines: one `malloc`, then a `malloc_size` line for each size class and a `malloc_site` line for each allocation site.
//! Documented in docs/malloc.md.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use gctrace_common::malloc::{MallocCount, MallocTally};
use gctrace_tunemygc::printable::printable_json;
use serde::Serialize;

use super::{
    report::{FUNCTIONS, Report, Sums},
    sampling::SiteRow,
};
use crate::aggregate::estimate::CallsAndBytes;

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Line<'a> {
    Malloc {
        pid: u32,
        command: Option<&'a str>,
        ruby: &'a str,
        seconds: f64,
        ended_by: &'static str,
        gc_count: Option<u64>,
        gc_count_after: Option<u64>,
        calls: BTreeMap<&'static str, u64>,
        bytes: BTreeMap<&'static str, u64>,
        failed: u64,
        frees: u64,
        frees_unknown: u64,
        reallocs_unknown: u64,
        reallocs_unpaired: u64,
        followed: u64,
        live: u64,
        live_bytes: u64,
        overflow: u64,
        unread: u64,
        replaced: u64,
        lost: u64,
        adds_up: bool,
        hits: u64,
        other_hits: u64,
        /// Bytes per stack; 0: no stacks were taken.
        sample: u64,
        stacks: u64,
        stacks_lost: u64,
        stacks_lost_bytes: u64,
    },
    MallocTotal {
        processes: usize,
        calls: BTreeMap<&'static str, u64>,
        bytes: BTreeMap<&'static str, u64>,
        failed: u64,
        frees: u64,
        frees_unknown: u64,
        reallocs_unknown: u64,
        reallocs_unpaired: u64,
        followed: u64,
        live: u64,
        live_bytes: u64,
        overflow: u64,
        unread: u64,
        replaced: u64,
        lost: u64,
        adds_up: bool,
    },
    MallocSize {
        pid: u32,
        up_to: u64,
        calls: BTreeMap<&'static str, u64>,
        bytes: BTreeMap<&'static str, u64>,
        /// By age.
        freed: BTreeMap<usize, u64>,
        freed_bytes: BTreeMap<usize, u64>,
        live: u64,
        live_bytes: u64,
    },
    MallocSite {
        pid: u32,
        method: Option<&'a str>,
        file: Option<&'a str>,
        line: Option<u32>,
        library: Option<&'a str>,
        symbol: Option<&'a str>,
        stacks_lost: bool,
        asked: Estimates,
        left: Estimates,
    },
}

/// Estimates with their standard errors.
#[derive(Serialize)]
struct Estimates {
    stacks: u64,
    calls: f64,
    calls_error: f64,
    bytes: f64,
    bytes_error: f64,
}

impl From<&CallsAndBytes> for Estimates {
    fn from(of: &CallsAndBytes) -> Self {
        Self {
            stacks: of.taken,
            calls: of.calls.sum,
            calls_error: of.calls.error(),
            bytes: of.bytes.sum,
            bytes_error: of.bytes.error(),
        }
    }
}

pub(super) fn write(out: &mut impl Write, report: &Report) -> io::Result<()> {
    let (pid, totals, live) = (report.who.pid, report.sums.totals(), report.sums.live());
    let count = |count: MallocCount| report.sums.count(count);
    line(
        out,
        &Line::Malloc {
            pid,
            command: report.who.command.as_deref(),
            ruby: &report.who.ruby,
            seconds: report.lasted.as_secs_f64(),
            ended_by: report.ended.name(),
            gc_count: report.gc_count[0],
            gc_count_after: report.gc_count[1],
            calls: by_function(&totals, |tally| tally.calls),
            bytes: by_function(&totals, |tally| tally.bytes),
            failed: count(MallocCount::Failed),
            frees: count(MallocCount::Frees),
            frees_unknown: count(MallocCount::FreesUnknown),
            reallocs_unknown: count(MallocCount::ReallocsUnknown),
            reallocs_unpaired: count(MallocCount::ReallocsUnpaired),
            followed: count(MallocCount::Followed),
            live: live.calls,
            live_bytes: live.bytes,
            overflow: count(MallocCount::Overflow),
            unread: count(MallocCount::Unread),
            replaced: count(MallocCount::Replaced),
            lost: count(MallocCount::Lost),
            adds_up: report.sums.adds_up(),
            hits: count(MallocCount::Hits),
            other_hits: count(MallocCount::OtherHits),
            sample: report.sampled.as_ref().map_or(0, |sampled| sampled.period),
            stacks: report.sampled.as_ref().map_or(0, |sampled| sampled.stacks),
            stacks_lost: report.stacks_lost().calls,
            stacks_lost_bytes: report.stacks_lost().bytes,
        },
    )?;
    for row in &report.sums.sizes {
        line(
            out,
            &Line::MallocSize {
                pid,
                up_to: row.up_to,
                calls: by_function(&row.calls, |tally| tally.calls),
                bytes: by_function(&row.calls, |tally| tally.bytes),
                freed: by_age(&row.freed, |tally| tally.calls),
                freed_bytes: by_age(&row.freed, |tally| tally.bytes),
                live: row.live.calls,
                live_bytes: row.live.bytes,
            },
        )?;
    }
    for row in report.sampled.iter().flat_map(|sampled| &sampled.rows) {
        line(out, &site(pid, row))?;
    }
    Ok(())
}

/// Writes the sums of several processes.
pub(super) fn total(out: &mut impl Write, sums: &Sums, processes: usize) -> io::Result<()> {
    let (totals, live) = (sums.totals(), sums.live());
    line(
        out,
        &Line::MallocTotal {
            processes,
            calls: by_function(&totals, |tally| tally.calls),
            bytes: by_function(&totals, |tally| tally.bytes),
            failed: sums.count(MallocCount::Failed),
            frees: sums.count(MallocCount::Frees),
            frees_unknown: sums.count(MallocCount::FreesUnknown),
            reallocs_unknown: sums.count(MallocCount::ReallocsUnknown),
            reallocs_unpaired: sums.count(MallocCount::ReallocsUnpaired),
            followed: sums.count(MallocCount::Followed),
            live: live.calls,
            live_bytes: live.bytes,
            overflow: sums.count(MallocCount::Overflow),
            unread: sums.count(MallocCount::Unread),
            replaced: sums.count(MallocCount::Replaced),
            lost: sums.count(MallocCount::Lost),
            adds_up: sums.adds_up(),
        },
    )
}

fn site(pid: u32, row: &SiteRow) -> Line<'_> {
    let site = row.site.as_ref();
    let place = site.and_then(|site| site.line.as_ref());
    let caller = site.and_then(|site| site.caller.as_ref());
    Line::MallocSite {
        pid,
        method: place.map(|line| &*line.method),
        file: place.map(|line| &*line.file),
        line: place.map(|line| line.number),
        library: caller.map(|caller| &*caller.library),
        symbol: caller.map(|caller| &*caller.symbol),
        stacks_lost: site.is_none(),
        asked: (&row.asked).into(),
        left: (&row.left).into(),
    }
}

fn by_function(tallies: &[MallocTally], value: impl Fn(&MallocTally) -> u64) -> BTreeMap<&'static str, u64> {
    FUNCTIONS.into_iter().zip(tallies.iter().map(value)).collect()
}

/// Values by age; ages without calls are omitted.
fn by_age(tallies: &[MallocTally], value: impl Fn(&MallocTally) -> u64) -> BTreeMap<usize, u64> {
    let some = tallies.iter().enumerate().filter(|(_, tally)| tally.calls > 0);
    some.map(|(age, tally)| (age, value(tally))).collect()
}

/// Writes a line, escaped for a terminal.
fn line(out: &mut impl Write, line: &Line<'_>) -> io::Result<()> {
    let text = serde_json::to_string(line)?;
    writeln!(out, "{}", printable_json(&text))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::{super::report::Ended, *};
    use crate::malloc::report::tests::sample;

    /// Each line is a separate object, and names are escaped.
    #[test]
    fn lines() {
        let mut out = Vec::new();
        write(&mut out, &sample(Ended::Signal)).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(!text.contains('\u{1b}'));
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 4);
        assert_eq!((&lines[0]["type"], &lines[0]["ended_by"]), (&"malloc".into(), &"signal".into()));
        assert_eq!((&lines[0]["calls"]["malloc"], &lines[0]["adds_up"]), (&3.into(), &true.into()));
        assert_eq!((&lines[1]["up_to"], &lines[1]["freed"]["2"]), (&128.into(), &1.into()));
        assert_eq!(lines[3]["bytes"]["realloc"], 9000);
    }
}
