//! The activity of threads over time.

use std::cmp::Reverse;

use gctrace_pages::{
    Column,
    strips::{Doing, Row, strips},
    table,
    timeline::Span,
    words::{count, percent},
};
use gctrace_report::trace_file::Subjects;
use gctrace_tunemygc::printable::printable_part;
use maud::{Markup, html};

use super::{Links, tables::counted, time};
use crate::{
    columns::Over,
    figures::{Did, Figures, OneThread},
    source::View,
};

/// Maximum number of threads drawn.
const ROWS: usize = 12;
/// Maximum number of characters of a name.
const NAME: usize = 60;

/// A kind of activity, and how to get its time from a column.
type Kind = (Doing<'static>, fn(&Did) -> u64);

/// The kinds of activity that such a recording contains.
fn kinds(subjects: Subjects) -> Vec<Kind> {
    let doing = |name, short, class| Doing { name, short, class };
    let all: [(bool, Kind); 5] = [
        (subjects.requests, (doing("In a request or job", "request", "served"), |did| did.request)),
        (subjects.samples, (doing("On a CPU (samples)", "CPU", "cpu"), |did| did.cpu)),
        (true, (doing("In a GC pause of its own", "own GC", "gc"), |did| did.gc)),
        (subjects.gvl, (doing("Waiting long for the GVL", "GVL wait", "wait"), |did| did.wait)),
        (subjects.gvl, (doing("Holding the GVL for long", "GVL hold", "hold"), |did| did.hold)),
    ];
    all.into_iter().filter_map(|(is, kind)| is.then_some(kind)).collect()
}

/// A thread to draw, with the sum of its activity.
struct One<'a> {
    pid: u32,
    tid: u32,
    of: &'a OneThread,
    did: &'a Over<Did>,
    sum: Did,
}

impl One<'_> {
    /// The time by which threads are ranked, nanoseconds: the sum of the kinds of activity, where CPU time and holds of the GVL overlap.
    fn weight(&self) -> u64 {
        let Did { request, cpu, gc, wait, hold } = self.sum;
        [cpu.max(hold), gc, wait, request].into_iter().fold(0, u64::saturating_add)
    }

    fn name(&self, several: bool) -> String {
        let name = if self.of.name.is_empty() { "(name not seen)" } else { &self.of.name };
        let name = printable_part(name, NAME);
        if several { format!("{} {} {name}", self.pid, self.tid) } else { format!("{} {name}", self.tid) }
    }
}

/// A picture with one row for each of the most active threads, and the same figures as a table.
pub(super) fn over_time(links: &Links<'_>, view: &View, subjects: Subjects, end_ns: u64) -> Markup {
    let figures = &view.figures;
    let mut all: Vec<One<'_>> = figures
        .threads
        .iter()
        .filter_map(|(&(pid, tid), of)| {
            let did = of.did.as_deref()?;
            Some(One { pid, tid, of, did, sum: did.sum() })
        })
        .collect();
    all.retain(|one| one.sum != Did::default());
    all.sort_by_key(|one| (Reverse(one.weight()), one.pid, one.tid));
    if all.is_empty() {
        return html! {};
    }
    let kinds = kinds(subjects);
    let several = figures.processes.len() > 1;
    let shown = all.get(..ROWS).unwrap_or(&all);
    let (doings, rows) = (kinds.iter().map(|(doing, _)| *doing).collect::<Vec<_>>(), shown.iter());
    let rows: Vec<Row> = rows.map(|one| row(one, &kinds, several)).collect();
    let columns = &figures.lanes.columns;
    let most = shown.iter().map(|one| one.did.cells.len()).fold(columns.cells.len(), usize::max);
    let from = links.seconds(columns.from_ns);
    let span = Span { from, to: from + columns.width_ns as f64 * most as f64 / 1e9 };
    let not_drawn = (all.len() - shown.len()) as u64;
    let not_kept =
        figures.threads.values().filter(|of| of.did.is_none()).count() as u64 + figures.more_threads;
    html! {
        section aria-labelledby="when" {
            h2 #when { "Thread activity over time" }
            (strips("What threads did", span, most, &doings, &rows))
            @if not_drawn > 0 { p.soft { (count(not_drawn)) " more that did less are not drawn; those of one process are on its page." } }
            @if not_kept > 0 {
                p.soft { "Activity over time is not kept for " (counted(not_kept, "thread")) " seen later, or for events of such: choose a part." }
            }
            @if subjects.gvl { p.soft { "Waits and holds are those that were reported one by one, when they had ended (--gvl-threshold)." } }
            (gaps(figures, end_ns))
            details {
                summary { "What threads did as a table" }
                (as_table(&kinds, shown, several))
            }
        }
    }
}

fn row(one: &One<'_>, kinds: &[Kind], several: bool) -> Row {
    let width_ns = one.did.width_ns.max(1) as f64;
    let strip = |(_, of): &Kind| {
        let shares = one.did.cells.iter().map(|did| of(did) as f64 / width_ns).collect();
        (shares, time(of(&one.sum)))
    };
    Row { name: one.name(several), strips: kinds.iter().map(strip).collect() }
}

/// A note on how long individual waits were not reported.
fn gaps(figures: &Figures, end_ns: u64) -> Markup {
    let all_ns = figures.gvl_unreported_ns(end_ns);
    let share = all_ns as f64 / end_ns.saturating_sub(figures.lanes.columns.from_ns).max(1) as f64;
    html! {
        @if all_ns > 0 {
            p.note role="note" {
                "For " (time(all_ns)) " (" (percent(share)) ") individual waits for the GVL were not reported, because that would have cost too \
                 much (--gvl-budget): waits and holds of that time are not drawn."
            }
        }
    }
}

fn as_table(kinds: &[Kind], shown: &[One<'_>], several: bool) -> Markup {
    let mut heads = vec![Column::Text(if several { "Process, thread" } else { "Thread" })];
    heads.extend(kinds.iter().map(|(doing, _)| Column::Number(doing.name)));
    let rows: Vec<Vec<Markup>> = shown
        .iter()
        .map(|one| {
            let mut row = vec![html! { bdi { (one.name(several)) } }];
            row.extend(kinds.iter().map(|(_, of)| html! { (time(of(&one.sum))) }));
            row
        })
        .collect();
    table("What threads did", &heads, &rows)
}
