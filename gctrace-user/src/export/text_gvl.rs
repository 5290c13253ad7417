//! What threads did with the GVL, as a table for people: written when a process or tracing ends.

use std::{collections::HashMap, io::Write};

use super::text::{clip, duration};
use crate::model::{
    Process,
    gvl::{GvlBlocked, GvlProcessSummary, GvlSplit, GvlSums, GvlThreadSummary},
};

/// Threads of a process that are shown: those that waited longest.
const SHOWN: usize = 10;
/// Pairs of waiting and holding threads that are shown.
const PAIRS: usize = 5;

/// The threads of each process that waited longest so far.
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
        process: &Process,
        summary: &GvlProcessSummary,
    ) -> std::io::Result<()> {
        let threads = self.0.remove(&process.pid).unwrap_or_default();
        writeln!(
            out,
            "\nGVL of pid {} {}: {} threads in {}",
            process.pid,
            clip(&process.comm, 16),
            summary.threads,
            duration(summary.span_ns)
        )?;
        writeln!(
            out,
            "{:>8} {:<16} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>9} {:>9} {:>9} {:>9}",
            "TID",
            "COMM",
            "WAIT%",
            "HOLD%",
            "AWAY%",
            "RUBY%",
            "NATIVE%",
            "NOCPU%",
            "BLOCK%",
            "WAITS",
            "P50<=",
            "P99<=",
            "MAX"
        )?;
        if summary.threads > 1 {
            row(out, "all", "", &summary.sums)?;
        }
        for thread in &threads {
            row(out, &thread.who.tid.to_string(), &clip(&thread.who.comm, 16), &thread.sums)?;
        }
        let unshown = summary.threads.saturating_sub(threads.len() as u64);
        if unshown > 0 {
            writeln!(out, "{:>8} {unshown} threads that waited less", "")?;
        }
        if summary.coverage.only_blocked {
            writeln!(out, "{:>8} {}", "", summary.coverage.lacks())?;
        }
        let sums = &summary.sums;
        if sums.watched_ns < sums.wall_ns {
            let share = sums.watched_ns as f64 * 100.0 / sums.wall_ns as f64;
            writeln!(
                out,
                "{:>8} of {share:.1} % of the time only: watching cost more than --gvl-budget",
                ""
            )?;
        }
        if let Some(gc) = summary.gc.filter(|gc| gc.pause_ns > 0) {
            write!(out, "{:>8} GC pauses took {}", "", duration(gc.pause_ns))?;
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
        Ok(())
    }
}

fn row(out: &mut impl Write, tid: &str, comm: &str, sums: &GvlSums) -> std::io::Result<()> {
    let percent = |ns: u64| match sums.watched_ns {
        0 => "-".to_owned(),
        wall => format!("{:.1}", ns as f64 * 100.0 / wall as f64),
    };
    let part = |of: fn(&GvlSplit) -> u64| {
        sums.split.as_ref().map_or_else(|| "-".to_owned(), |split| percent(of(split)))
    };
    let quantile = |percent| duration(sums.waits.quantile(percent, sums.wait.max_ns));
    writeln!(
        out,
        "{tid:>8} {comm:<16} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>9} {:>9} {:>9} {:>9}",
        percent(sums.wait.ns),
        sums.hold.map_or_else(|| "-".to_owned(), |hold| percent(hold.ns)),
        sums.away.map_or_else(|| "-".to_owned(), |away| percent(away.ns)),
        part(|split| split.holding.cpu_ns),
        part(|split| split.away.cpu_ns),
        part(|split| split.holding.runnable_ns + split.away.runnable_ns),
        part(|split| split.holding.blocked_ns + split.away.blocked_ns),
        sums.wait.count,
        quantile(50),
        quantile(99),
        duration(sums.wait.max_ns),
    )
}

fn pair(out: &mut impl Write, blocked: &GvlBlocked) -> std::io::Result<()> {
    let name = |who: &Option<crate::model::gvl::GvlWho>| {
        who.as_ref().map_or_else(|| "?".to_owned(), |who| format!("{} {}", who.tid, clip(&who.comm, 16)))
    };
    writeln!(
        out,
        "{:>8} waited {} ({} times) while {} held the GVL",
        name(&blocked.waiter),
        duration(blocked.times.ns),
        blocked.times.count,
        name(&blocked.holder)
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::gvl::{GvlTimes, GvlWho};

    /// Shares are of the thread's life, and what is not seen is a dash.
    #[test]
    fn rows() {
        let mut sums = GvlSums { wall_ns: 2_000_000_000, watched_ns: 1_000_000_000, ..GvlSums::default() };
        sums.wait = GvlTimes { count: 2, ns: 250_000_000, max_ns: 200_000_000 };
        let mut out = Vec::new();
        row(&mut out, "12", "worker", &sums).unwrap();
        let text = String::from_utf8(out).unwrap();
        let words: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(words[..7], ["12", "worker", "25.0", "-", "-", "-", "-"]);
        assert_eq!(words[12], "200.00ms");
        let mut out = Vec::new();
        let who = |tid| Some(GvlWho { tid, comm: Arc::from("a") });
        let times = GvlTimes { count: 3, ns: 1_500_000, max_ns: 1 };
        pair(&mut out, &GvlBlocked { waiter: who(1), holder: None, times }).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(text.trim(), "1 a waited 1.50ms (3 times) while ? held the GVL");
    }
}
