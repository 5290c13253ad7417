//! What threads did with the GVL, as a text table: written when a process or tracing ends.

use std::{collections::HashMap, io::Write};

use super::duration;
use crate::{
    export::place::{clip, program},
    model::{
        Process,
        gvl::{GvlBlocked, GvlProcessSummary, GvlSplit, GvlSums, GvlThreadSummary},
    },
    words::plural,
};

/// Maximum number of threads shown per process: those that waited longest.
const SHOWN: usize = 10;
/// Maximum number of pairs of waiting and holding thread shown.
const PAIRS: usize = 5;

/// The threads of each process that have waited longest so far.
#[derive(Debug, Default)]
pub(super) struct GvlTable(HashMap<u32, Vec<GvlThreadSummary>>);

impl GvlTable {
    /// A thread has ended.
    pub(super) fn thread(&mut self, pid: u32, thread: &GvlThreadSummary) {
        let threads = self.0.entry(pid).or_default();
        threads.push(thread.clone());
        threads.sort_by_key(|thread| std::cmp::Reverse(thread.sums.wait.ns));
        threads.truncate(SHOWN);
    }

    /// A process has ended: its table.
    pub(super) fn process(
        &mut self,
        out: &mut impl Write,
        width: Option<usize>,
        process: &Process,
        summary: &GvlProcessSummary,
    ) -> std::io::Result<()> {
        let threads = self.0.remove(&process.pid).unwrap_or_default();
        writeln!(
            out,
            "\nGVL of {} (pid {}): {} in {}",
            program(process),
            process.pid,
            plural(summary.threads, "thread"),
            duration(summary.span_ns)
        )?;
        let narrow = width.is_some_and(|width| width < WIDE);
        writeln!(
            out,
            "{}",
            joined(
                [
                    "TID",
                    "THREAD",
                    "WAIT%",
                    "HOLD%",
                    "OFF-GVL%",
                    "RUBY%",
                    "NATIVE%",
                    "CPU-WAIT%",
                    "BLOCK%",
                    "WAITS",
                    "P50<=",
                    "P99<=",
                    "MAX"
                ]
                .map(ToOwned::to_owned),
                narrow
            )
        )?;
        if summary.threads > 1 {
            row(out, narrow, "all", "", &summary.sums)?;
        }
        for thread in &threads {
            row(out, narrow, &thread.who.tid.to_string(), &clip(&thread.who.comm, 16), &thread.sums)?;
        }
        let unshown = summary.threads.saturating_sub(threads.len() as u64);
        if unshown > 0 {
            writeln!(out, "{:>7} {} in `all`", "", plural(unshown, "more thread"))?;
        }
        if summary.coverage.only_blocked {
            writeln!(out, "{:>7} {}", "", summary.coverage.lacks())?;
        }
        let sums = &summary.sums;
        if sums.watched_ns < sums.wall_ns {
            let share = sums.watched_ns as f64 * 100.0 / sums.wall_ns as f64;
            writeln!(
                out,
                "{:>7} measured during {share:.1} % of the run (CPU budget); rates are of that part",
                ""
            )?;
        }
        if let Some(gc) = summary.gc.filter(|gc| gc.pause_ns > 0) {
            write!(out, "{:>7} GC pauses took {}", "", duration(gc.pause_ns))?;
            if let Some(share) = summary.gc_of_hold() {
                write!(out, ", {:.1} % of the time for which the GVL was held", share * 100.0)?;
            }
            if let Some(ns) = gc.wait_ns {
                write!(out, "; in them, threads waited {} for the GVL (long waits only)", duration(ns))?;
            }
            writeln!(out)?;
        }
        for blocked in summary.blocked.iter().take(PAIRS) {
            pair(out, blocked)?;
        }
        let known_ns = summary.blocked.iter().map(|pair| pair.times.ns).fold(0, u64::saturating_add);
        let share = known_ns as f64 / sums.wait.ns.max(1) as f64;
        if known_ns > 0 && share < MOST_KNOWN {
            writeln!(
                out,
                "{:>7} the holder of the GVL is known for {:.0} % of these waits",
                "",
                share * 100.0
            )?;
        }
        Ok(())
    }
}

/// If the holders are known for less than this share of the wait time, a line says so. The part of each wait in which
/// the thread wakes up has no holder.
const MOST_KNOWN: f64 = 0.5;

/// Width of each column, and whether it is shown on a terminal of 80 columns.
const COLUMNS: [(usize, bool); 13] = [
    (7, true),
    (15, true),
    (6, true),
    (6, true),
    (8, true),
    (7, false),
    (7, false),
    (9, false),
    (6, true),
    (7, true),
    (9, false),
    (8, true),
    (8, true),
];
/// Terminal width from which all columns are shown.
const WIDE: usize = 120;

/// The columns of a row.
fn joined(cells: [String; 13], narrow: bool) -> String {
    let shown = cells.into_iter().zip(COLUMNS).enumerate().filter(|(_, (_, (_, always)))| *always || !narrow);
    let cell = |(at, (cell, (width, _))): (usize, (String, (usize, bool)))| {
        // The thread's name is left-aligned, numbers are right-aligned.
        if at == 1 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
    };
    shown.map(cell).collect::<Vec<_>>().join(" ")
}

/// Shares of a shorter time are meaningless: the thread was first seen when tracing ended, or shortly before.
const LEAST_KNOWN_NS: u64 = 1_000_000;

fn row(out: &mut impl Write, narrow: bool, tid: &str, comm: &str, sums: &GvlSums) -> std::io::Result<()> {
    // If the GVL was not traced in between, what a thread did is known for less time than that for which the probes were attached.
    let known_ns = match (sums.hold, sums.away) {
        (Some(hold), Some(away)) => sums.wait.ns + hold.ns + away.ns,
        _ => sums.watched_ns,
    };
    let share = |ns: u64, known_ns| match known_ns {
        ..LEAST_KNOWN_NS => "-".to_owned(),
        known => format!("{:.1}", ns as f64 * 100.0 / known as f64),
    };
    let percent = |ns: u64| share(ns, known_ns);
    // A thread without events is known to continue in its state, but what its native thread did is known for less of that time.
    let part = |of: fn(&GvlSplit) -> u64| {
        let known = |split: &GvlSplit| {
            [split.waiting, split.holding, split.away]
                .iter()
                .flat_map(|times| [times.cpu_ns, times.runnable_ns, times.blocked_ns])
                .fold(0, u64::saturating_add)
        };
        sums.split.as_ref().map_or_else(|| "-".to_owned(), |split| share(of(split), known(split)))
    };
    let quantile = |percent| duration(sums.waits.quantile(percent, sums.wait.max_ns));
    let cells = [
        tid.to_owned(),
        comm.to_owned(),
        percent(sums.wait.ns),
        sums.hold.map_or_else(|| "-".to_owned(), |hold| percent(hold.ns)),
        sums.away.map_or_else(|| "-".to_owned(), |away| percent(away.ns)),
        part(|split| split.holding.cpu_ns),
        part(|split| split.away.cpu_ns),
        part(|split| split.holding.runnable_ns + split.away.runnable_ns),
        part(|split| split.holding.blocked_ns + split.away.blocked_ns),
        sums.wait.count.to_string(),
        quantile(50),
        quantile(99),
        duration(sums.wait.max_ns),
    ];
    writeln!(out, "{}", joined(cells, narrow))
}

fn pair(out: &mut impl Write, blocked: &GvlBlocked) -> std::io::Result<()> {
    let name = |who: &Option<crate::model::gvl::GvlWho>| {
        who.as_ref().map_or_else(|| "?".to_owned(), |who| format!("{} {}", who.tid, clip(&who.comm, 16)))
    };
    if blocked.waiter.is_none() && blocked.holder.is_none() {
        let (ns, count) = (duration(blocked.times.ns), plural(blocked.times.count, "time"));
        return writeln!(out, "{:>7} other threads waited {ns} ({count}) for each other", "");
    }
    writeln!(
        out,
        "{:>7} waited {} ({}) while {} held the GVL",
        name(&blocked.waiter),
        duration(blocked.times.ns),
        plural(blocked.times.count, "time"),
        name(&blocked.holder)
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::gvl::{GvlTaskTimes, GvlTimes, GvlWho};

    /// If only a part of a thread's time is known, the shares are of that part, and add up.
    #[test]
    fn shares_add_up() {
        let times = |ns| GvlTimes { count: 1, ns, max_ns: ns };
        let mut sums = GvlSums { wall_ns: 2_000_000_000, watched_ns: 1_000_000_000, ..GvlSums::default() };
        (sums.wait, sums.hold, sums.away) = (times(10_000_000), Some(times(0)), Some(times(490_000_000)));
        let split = GvlSplit {
            waiting: GvlTaskTimes { blocked_ns: 2_000_000, ..GvlTaskTimes::default() },
            away: GvlTaskTimes { blocked_ns: 98_000_000, ..GvlTaskTimes::default() },
            ..GvlSplit::default()
        };
        sums.split = Some(split);
        let mut out = Vec::new();
        row(&mut out, false, "12", "sleeper", &sums).unwrap();
        let text = String::from_utf8(out).unwrap();
        let words: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(words[2..5], ["2.0", "0.0", "98.0"]);
        assert!(words[5..9].contains(&"98.0"), "{text}");
        // The thread was first seen 12 µs before the end.
        (sums.wait, sums.hold, sums.away) = (times(4_000), Some(times(8_000)), Some(times(0)));
        let mut out = Vec::new();
        row(&mut out, false, "12", "sleeper", &sums).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(text.split_whitespace().collect::<Vec<_>>()[2..5], ["-", "-", "-"]);
    }

    /// Shares are relative to the thread's lifetime, and unknown values are shown as a dash.
    #[test]
    fn rows() {
        let mut sums = GvlSums { wall_ns: 2_000_000_000, watched_ns: 1_000_000_000, ..GvlSums::default() };
        sums.wait = GvlTimes { count: 2, ns: 250_000_000, max_ns: 200_000_000 };
        let mut out = Vec::new();
        row(&mut out, false, "12", "worker", &sums).unwrap();
        let text = String::from_utf8(out).unwrap();
        let words: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(words[..7], ["12", "worker", "25.0", "-", "-", "-", "-"]);
        assert_eq!(words[12], "200.0ms");
        let mut out = Vec::new();
        let name = "n".repeat(15);
        row(&mut out, true, "4194304", &name, &sums).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.chars().count() <= 81 && text.contains(&name) && text.contains(" 200.0ms\n"), "{text}");
        let mut out = Vec::new();
        let who = |tid| Some(GvlWho { tid, comm: Arc::from("a") });
        let times = GvlTimes { count: 3, ns: 1_500_000, max_ns: 1 };
        pair(&mut out, &GvlBlocked { waiter: who(1), holder: None, times }).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(text.trim(), "1 a waited 1.50ms (3 times) while ? held the GVL");
    }
}
