//! Compares gctrace's lines with the witness's log.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use serde_json::{Map, Value};

use crate::ensure_times;
use crate::report::{GcLine, Report};
use crate::slowness;
use crate::witness::{Event, Kind, Log, Pause};

/// Tolerance for conversions between the clocks.
const SAME_MOMENT_NS: i64 = 1_000_000;
/// Maximum distance between the two times of an event: the median over events whose thread was not preempted since the
/// `GC_ENTER` before them. Single events may be further apart without a fault on either side, because a hypervisor takes
/// the CPU away without a trace. The check for each event is that it lies within its pause.
const MEDIAN_LATE_NS: u64 = 250_000;
/// Tolerance between readings of the same clock by the kernel and by the program.
const CLOCK_SLACK_NS: u64 = 10_000;
/// Maximum difference of the lengths of a pause: the median over the pauses in which the thread was not preempted.
const MEDIAN_PAUSE_DIFFERENCE_NS: u64 = 100_000;

/// Counters that change without the GVL (`objspace_malloc_increase`, gc.c): native threads outside the VM allocate, too.
const MOVING: [&str; 2] = ["malloc_increase_bytes", "oldmalloc_increase_bytes"];

/// The coverage of a comparison, and the differences that it found.
#[derive(Clone, Debug, Default)]
pub struct Comparison {
    /// Number of cycles whose state at `GC_START` was compared.
    pub starts: usize,
    /// Number of cycles whose state at `GC_END_SWEEP` was compared.
    pub ends: usize,
    /// One line per difference.
    pub differences: Vec<String>,
    /// Differences in counters that another native thread could change between the trap and the witness's reading.
    moved: Vec<String>,
    /// Set if the times differ from the witness's by more than the probes between them take.
    late: Option<String>,
}

impl Comparison {
    /// Fails with the first differences, if there are any.
    pub fn demand_equal(&self) -> Result<()> {
        let shown = |differences: &[String]| {
            let first = differences.iter().take(20).cloned().collect::<Vec<_>>().join("\n");
            format!(
                "{} differences in {} starts and {} ends:\n{first}",
                differences.len(),
                self.starts,
                self.ends
            )
        };
        ensure!(self.differences.is_empty(), "{}", shown(&self.differences));
        // These must be equal in one of the attempts.
        ensure_times!(self.moved.is_empty(), "{}", shown(&self.moved));
        ensure_times!(self.late.is_none(), "{}", self.late.as_deref().unwrap_or_default());
        Ok(())
    }

    /// Compares `GC.stat` and `GC.latest_gc_info` of a line with the values at the witness's event.
    fn state(
        &mut self,
        place: &str,
        (stat, info): (&Map<String, Value>, &Map<String, Value>),
        event: &Event,
        absent: &[&str],
    ) {
        for (key, difference) in objects(stat, &event.stat, absent) {
            let can_move = !event.alone && MOVING.contains(&key);
            let differences = if can_move { &mut self.moved } else { &mut self.differences };
            differences.push(format!("{place}: stat: {difference}"));
        }
        let info = objects(info, &event.info, &[]).into_iter();
        self.differences.extend(info.map(|(_, difference)| format!("{place}: info: {difference}")));
    }
}

/// The lines of the log's process within the time of the log. If a pid was reused, this selects the right process.
fn in_time<'a>(lines: &[&'a GcLine], log: &Log) -> Vec<&'a GcLine> {
    let (from, to) = (log.begin_ns as i64 - SAME_MOMENT_NS, log.end_ns as i64 + SAME_MOMENT_NS);
    let falls = |line: &&GcLine| line.pid == log.pid && (from..=to).contains(&began_ns(line, log));
    lines.iter().copied().filter(falls).collect()
}

/// The begin of the pause in which a cycle starts: on the clock of the log, however the clock of the day was set between both programs.
fn began_ns(line: &GcLine, log: &Log) -> i64 {
    line.pauses.first().map_or_else(|| monotonic_ns(line, log), |pause| pause.begin_ns as i64)
}

/// The time of `GC_START` on the witness's clock.
fn monotonic_ns(line: &GcLine, log: &Log) -> i64 {
    (line.ts * 1e9) as i64 - log.epoch_offset_ns
}

/// Compares every cycle whose start the witness saw, and every end of sweeping, key by key and including the order of the keys.
pub fn cycles(lines: &[&GcLine], log: &Log) -> Comparison {
    let mut result = Comparison::default();
    let mut by_count: BTreeMap<u64, &GcLine> = BTreeMap::new();
    for line in in_time(lines, log) {
        if by_count.insert(line.count, line).is_some() {
            result.differences.push(format!("pid {} count {}: more than one line", log.pid, line.count));
        }
    }

    let mut undisturbed = Vec::new();
    let mut enter: Option<&Event> = None;
    for start in &log.events {
        if start.kind == Kind::Enter {
            enter = Some(start);
        }
        if start.kind != Kind::Start {
            continue;
        }
        let place = format!("pid {} count {} at GC_START", log.pid, start.count());
        let Some(line) = by_count.get(&start.count()) else {
            result.differences.push(format!("{place}: no line"));
            continue;
        };
        result.starts += 1;
        let differences = &mut result.differences;
        let mut expect = |what: &str, ours: &str, theirs: &str| {
            if ours != theirs {
                differences.push(format!("{place}: {what} is {ours}, the witness has {theirs}"));
            }
        };
        expect("kind", &line.kind, start.cycle_kind());
        let or_none = |reason: Option<&str>| reason.unwrap_or("none").to_owned();
        expect("gc_by", &or_none(line.gc_by.as_deref()), &or_none(start.reason("gc_by")));
        expect("major_by", &or_none(line.major_by.as_deref()), &or_none(start.reason("major_by")));
        expect("tid", &line.tid.to_string(), &start.tid.to_string());
        // gctrace's probe fires between the witness's GC_ENTER and its GC_START.
        let enter_ns = enter.map_or(log.begin_ns, |enter| enter.ns);
        let (after, before) = (enter_ns as i64 - SAME_MOMENT_NS, start.ns as i64 + SAME_MOMENT_NS);
        let kept_cpu = enter.is_some_and(|e| (e.tid, e.preempted) == (start.tid, start.preempted));
        let ns = monotonic_ns(line, log);
        let late = ns - start.ns as i64;
        if !(after..=before).contains(&ns) {
            // The two read the offset of the wall clock at different moments, and the clock may be stepped in between.
            result.late = Some(format!("{place}: the time is {late} ns off, outside its pause"));
        } else if kept_cpu {
            undisturbed.push(late.unsigned_abs());
        }
        let absent = absent_keys(&line.ruby);
        result.state(&place, (&line.stat, &line.latest_gc_info), start, absent);
    }

    let late = median(&mut undisturbed);
    if late > MEDIAN_LATE_NS * slowness() {
        result.late = Some(format!("pid {}: the times are {late} ns off, in the median", log.pid));
    }

    // The first end may belong to a cycle that started before the log. It has a line only if gctrace was already running.
    let first = log.starts().next().map_or(u64::MAX, Event::count);
    let all = lines.iter().filter(|line| line.pid == log.pid);
    let earlier =
        all.filter(|line| line.count < first).map(|line| (line.count, *line)).collect::<BTreeMap<_, _>>();
    for end in log.ends() {
        let place = format!("pid {} count {} at GC_END_SWEEP", log.pid, end.count());
        let line = if end.count() < first { earlier.get(&end.count()) } else { by_count.get(&end.count()) };
        let absent = line.map_or(&[][..], |line| absent_keys(&line.ruby));
        match line.map(|line| (&line.stat_end, &line.latest_gc_info_end, line.complete)) {
            Some((Some(stat), Some(info), true)) => {
                result.ends += 1;
                result.state(&place, (stat, info), end, absent);
            }
            Some((stat, info, complete)) => result.differences.push(format!(
                "{place}: the line has stat_end {}, latest_gc_info_end {}, complete {complete}",
                stat.is_some(),
                info.is_some()
            )),
            None if end.count() < first => {}
            None => result.differences.push(format!("{place}: no line")),
        }
    }
    let (first, last) = (first, log.starts().last().map_or(0, Event::count));
    let seen = log.starts().count();
    let ours = by_count.keys().filter(|count| (first..=last).contains(*count)).count();
    if ours != seen {
        result
            .differences
            .push(format!("pid {}: {ours} lines, the witness saw {seen} cycles start", log.pid));
    }
    result
}

/// Keys of `GC.stat` that an unreleased Ruby lacks in gctrace's output, because its code does not have them as sums.
/// Empty for all other Rubies.
pub fn absent_keys(ruby: &str) -> &'static [&'static str] {
    const OF_4_1: [&str; 4] =
        ["total_malloc_bytes", "total_free_bytes", "malloc_increase_bytes", "oldmalloc_increase_bytes"];
    if ruby.starts_with("4.1.") { &OF_4_1 } else { &[] }
}

/// The keys and values that differ between two objects, except keys that must be absent. If the keys or their order differ, the result is a
/// single entry; the order is not compared for a Ruby with absent keys, which has no layout table.
fn objects<'a>(
    ours: &'a Map<String, Value>,
    theirs: &Map<String, Value>,
    absent: &[&str],
) -> Vec<(&'a str, String)> {
    let mut our_keys = ours.keys().collect::<Vec<_>>();
    let mut their_keys = theirs.keys().filter(|key| !absent.contains(&key.as_str())).collect::<Vec<_>>();
    if !absent.is_empty() {
        our_keys.sort();
        their_keys.sort();
    }
    if our_keys != their_keys {
        return vec![("keys", format!("keys {our_keys:?}, the witness has {their_keys:?}"))];
    }
    let differing = ours.iter().filter(|(key, value)| theirs.get(*key) != Some(*value));
    let described = |(key, value): (&'a String, &Value)| {
        (key.as_str(), format!("{key} is {value}, the witness has {:?}", theirs.get(key)))
    };
    differing.map(described).collect()
}

/// Compares the pauses with the witness's. gctrace's probe fires before the witness at every event, so both ends of
/// gctrace's pause come just before the witness's: after the witness's previous event and not after its own. The rest of
/// a cycle that started before the log counts only if that cycle has a line.
pub fn pauses(lines: &[&GcLine], log: &Log) -> Result<usize> {
    let first = log.starts().next().map_or(u64::MAX, Event::count);
    let known =
        |count: u64| count >= first || lines.iter().any(|line| line.pid == log.pid && line.count == count);
    let theirs = log.pauses()?.into_iter().filter(|pause| known(pause.count)).collect::<Vec<_>>();
    let mut ours = lines
        .iter()
        .filter(|line| line.pid == log.pid)
        .flat_map(|line| {
            line.pauses.iter().map(|p| Pause {
                begin_ns: p.begin_ns,
                end_ns: p.begin_ns + p.ns,
                count: line.count,
                preempted: false,
            })
        })
        .filter(|pause| (log.begin_ns..=log.end_ns).contains(&pause.begin_ns))
        .collect::<Vec<_>>();
    ours.sort_by_key(|pause| pause.begin_ns);
    ensure!(
        ours.len() == theirs.len(),
        "pid {}: {} pauses, the witness has {}; first that has no partner: {:?}",
        log.pid,
        ours.len(),
        theirs.len(),
        first_unmatched(&ours, &theirs)
    );

    let mut before = log.begin_ns;
    let mut differences = Vec::new();
    for (index, (a, b)) in ours.iter().zip(&theirs).enumerate() {
        let place = format!("pid {}: pause {index}, ours {a:?}, the witness's {b:?}", log.pid);
        ensure!(a.begin_ns + CLOCK_SLACK_NS >= before, "{place}: begins before the previous one ended");
        ensure!(a.begin_ns <= b.begin_ns + CLOCK_SLACK_NS, "{place}: begins after GC_ENTER");
        ensure!(a.end_ns + CLOCK_SLACK_NS >= b.begin_ns, "{place}: ends before GC_ENTER");
        ensure!(a.end_ns <= b.end_ns + CLOCK_SLACK_NS, "{place}: ends after GC_EXIT");
        ensure!(a.count == b.count, "{place}: different cycles");
        let (our_ns, their_ns) = (a.end_ns - a.begin_ns, b.end_ns - b.begin_ns);
        before = b.end_ns;
        // A preemption between the two readings of the clock is time that only one of the two saw.
        if b.preempted {
            continue;
        }
        differences.push(our_ns.abs_diff(their_ns));
    }
    let difference = median(&mut differences);
    ensure_times!(
        difference <= MEDIAN_PAUSE_DIFFERENCE_NS * slowness(),
        "pid {}: the lengths of the pauses differ by {difference} ns, in the median",
        log.pid
    );
    Ok(ours.len())
}

/// The median; 0 for no values.
fn median(values: &mut [u64]) -> u64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

fn first_unmatched(ours: &[Pause], theirs: &[Pause]) -> Option<Pause> {
    let mut rest = theirs.iter().peekable();
    for pause in ours {
        match rest.next() {
            Some(other)
                if pause.begin_ns.abs_diff(other.begin_ns) < 1_000_000 && pause.count == other.count => {}
            _ => return Some(*pause),
        }
    }
    rest.next().copied()
}

/// Invariants of every line, independent of the witness.
pub fn line_is_sound(line: &GcLine) -> Result<()> {
    let place = format!("pid {} count {}", line.pid, line.count);
    let sum = line.pauses.iter().map(|pause| pause.ns).sum::<u64>();
    ensure!(line.pause_ns == sum, "{place}: pause_ns is {}, its pauses sum up to {sum}", line.pause_ns);
    ensure!(
        line.steps == line.pauses.len() as u64,
        "{place}: {} steps, {} pauses",
        line.steps,
        line.pauses.len()
    );
    let phases = line.phases.mark_ns + line.phases.sweep_ns + line.phases.other_ns;
    ensure!(phases == sum, "{place}: the phases sum up to {phases}, the pauses to {sum}");
    ensure!(
        line.pauses.windows(2).all(|pair| pair[0].begin_ns + pair[0].ns <= pair[1].begin_ns),
        "{place}: pauses overlap or are out of order: {:?}",
        line.pauses
    );
    ensure!(
        (line.kind == "major") == line.major_by.is_some(),
        "{place}: {} by {:?}",
        line.kind,
        line.major_by
    );
    ensure!(
        line.stat.get("count").and_then(Value::as_u64) == Some(line.count),
        "{place}: stat has another count"
    );
    ensure!(
        line.complete == line.stat_end.is_some(),
        "{place}: complete {} and stat_end differ",
        line.complete
    );
    if let (Some(rss), Some(peak)) = (line.rss, line.peak_rss) {
        ensure!(peak >= rss && rss > 0, "{place}: RSS {rss}, peak {peak}");
    }
    for (rss, parts) in [(line.rss, line.memory), (line.rss_end, line.memory_end)] {
        ensure!(rss == parts.map(|parts| parts.resident()), "{place}: RSS {rss:?}, made of {parts:?}");
    }
    ensure!(
        line.rss_source.is_some() == (line.rss.is_some() || line.rss_end.is_some()),
        "{place}: RSS {:?} and {:?} from {:?}",
        line.rss,
        line.rss_end,
        line.rss_source
    );
    Ok(())
}

/// Compares the lines of a process with the report of the program itself: which cycles, and how many of each kind.
pub fn program(lines: &[&GcLine], report: &crate::script::Report) -> Result<()> {
    let counts = report.counts()?;
    let ours = lines.iter().filter(|line| line.pid == report.pid && counts.contains(&line.count));
    let ours = ours.copied().collect::<Vec<_>>();
    let seen = ours.iter().map(|line| line.count).collect::<Vec<_>>();
    ensure!(
        seen.iter().copied().eq(counts.clone()),
        "pid {}: lines of the cycles {seen:?}, the program counted {counts:?}",
        report.pid
    );
    for kind in ["minor", "major"] {
        let seen = ours.iter().filter(|line| line.kind == kind).count() as u64;
        let said = report.growth(&format!("{kind}_gc_count"))?;
        ensure!(seen == said, "pid {}: {seen} {kind} cycles, the program counted {said}", report.pid);
    }
    for line in ours {
        line_is_sound(line)?;
        ensure!(line.ruby == report.ruby, "Ruby {} in the line, {} in the program", line.ruby, report.ruby);
    }
    Ok(())
}

/// Checks a process that started and ended while gctrace ran, and did not exec: it has one `process` and one `exit`
/// line, nothing about it was refused, and its cycles start with the first one and have no gaps.
pub fn one_life(report: &Report, pid: u32) -> Result<()> {
    let processes = report.processes_of(pid).collect::<Vec<_>>();
    ensure!(processes.len() == 1, "pid {pid}: {} process lines: {processes:?}", processes.len());
    let exits = report.exits.iter().filter(|exit| exit.pid == pid).count();
    ensure!(exits == 1, "pid {pid}: {exits} exit lines");
    let refused = report.refused.iter().filter(|refused| refused.pid == Some(pid)).collect::<Vec<_>>();
    ensure!(refused.is_empty(), "pid {pid}: {refused:?}");
    whole_life(&report.gcs_of(pid).collect::<Vec<_>>(), pid)
}

/// Checks that the lines of one program, traced since its start, start with its first cycle and have no gaps.
pub fn whole_life(lines: &[&GcLine], pid: u32) -> Result<()> {
    let counts = lines.iter().filter(|line| line.pid == pid).map(|line| line.count).collect::<Vec<_>>();
    ensure!(
        counts.iter().copied().eq(1..=counts.len() as u64),
        "pid {pid}: cycles of its whole life, but the lines have {counts:?}"
    );
    Ok(())
}
