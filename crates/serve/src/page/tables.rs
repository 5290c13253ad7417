//! The tables of the page.

use std::cmp::Reverse;

use gctrace_pages::{
    Column, stacked_table, table,
    timeline::after,
    words::{bytes, count, percent},
};
use gctrace_report::{
    aggregate::request_summary::{Part, RequestSummary},
    export::profile::Kept,
    model::gvl::{GvlTimes, GvlWho},
    trace_file::Subjects,
    words::plural,
};
use maud::{Markup, html};

use super::{Links, name, time};
use crate::{
    figures::{Figures, OneProcess, OneThread},
    source::View,
};

/// Maximum number of rows in the table of methods.
const METHODS: usize = 20;
/// Maximum number of rows in other tables.
const ROWS: usize = 50;

fn section(id: &str, title: &str, content: &Markup) -> Markup {
    html! { section aria-labelledby=(id) { h2 id=(id) { (title) } (content) } }
}

/// A note with the number of rows left out of a table. `what`: the noun for one of them.
fn more(left: u64, what: &str) -> Markup {
    html! { @if left > 0 { p.soft { (counted(left, &format!("more {what}"))) "." } } }
}

/// The same if the number includes events of those for which there was no room.
fn more_or(left: u64, what: &str, events: &str) -> Markup {
    html! { @if left > 0 { p.soft { (counted(left, &format!("more {what}"))) ", or " (events) " of such." } } }
}

/// `1 more thread`, `2 more threads`, with the digits of large numbers grouped.
pub(super) fn counted(n: u64, noun: &str) -> String {
    let text = plural(n, noun);
    text.strip_prefix(&n.to_string()).map_or_else(|| text.clone(), |rest| count(n) + rest)
}

fn share(part: u64, whole: u64) -> String {
    if whole == 0 { "–".to_owned() } else { percent(part as f64 / whole as f64) }
}

/// The hottest methods.
pub(super) fn methods(kept: &Kept, cpu_ns: u64) -> Markup {
    let (methods, left) = kept.hottest(METHODS);
    let all_ns = cpu_ns.max(methods.iter().map(|method| method.total_ns).max().unwrap_or(0));
    let rows: Vec<Vec<Markup>> = methods
        .iter()
        .map(|method| {
            vec![
                name(&method.text),
                html! { (share(method.self_ns, all_ns)) },
                html! { (share(method.total_ns, all_ns)) },
                html! { (time(method.self_ns)) },
            ]
        })
        .collect();
    if rows.is_empty() {
        return html! { p.soft { "No CPU samples: no traced thread was on a CPU." } };
    }
    let heads =
        [Column::Text("Method"), Column::Number("Self"), Column::Number("Total"), Column::Number("CPU time")];
    html! {
        details open {
            summary { "Methods with most CPU time" }
            (table("CPU time with the method on top, and anywhere on the stack", &heads, &rows))
            (more(left as u64, "method"))
        }
    }
}

/// The longest pauses.
pub(super) fn worst(links: &Links<'_>, view: &View) -> Markup {
    let rows: Vec<Vec<Markup>> = view
        .figures
        .worst
        .iter()
        .map(|pause| {
            let at = links.seconds(pause.begin_ns);
            // Enough time before and after to show what led to it.
            let around = (pause.ns as f64 / 1e9 * 5.0).max(0.05);
            let thread = view.figures.threads.get(&(pause.pid, pause.tid)).map_or("", |thread| &thread.name);
            vec![
                html! { a href=(links.at(at - around, at + pause.ns as f64 / 1e9 + around)) { (after((at * 1e6).round() / 1e6)) } },
                html! { (time(pause.ns)) },
                html! { "#" (pause.count) " " (pause.kind) " " (pause.reason) },
                html! { (pause.pid) " " (who(pause.tid, thread)) },
                pause.by.as_deref().map_or_else(|| html! { "not seen" }, name),
            ]
        })
        .collect();
    if rows.is_empty() {
        return html! {};
    }
    let heads = [
        Column::Text("When"),
        Column::Number("Pause"),
        Column::Text("Cycle"),
        Column::Text("Process, thread"),
        Column::Text("Line that started the cycle"),
    ];
    section(
        "worst",
        "Longest GC pauses",
        &stacked_table("The longest first; the time leads to what was around it", &heads, &rows),
    )
}

fn who(tid: u32, comm: &str) -> Markup {
    html! { (tid) " " @if comm.is_empty() { "(name not seen)" } @else { (name(comm)) } }
}

fn of_thread(gvl: Option<&GvlWho>) -> Markup {
    gvl.map_or_else(|| html! { "not known" }, |gvl| who(gvl.tid, &gvl.comm))
}

/// The cells about the GC pauses of a thread: their number, and its time in them. What is not seen of this Ruby is not shown as 0.
fn seen_of_pauses(of: &OneThread) -> [Markup; 2] {
    let known = |is_known: bool, text: String| html! { (if is_known { text } else { "–".to_owned() }) };
    [known(of.times_pauses, count(of.pauses)), known(of.times_pauses || of.pause_ns > 0, time(of.pause_ns))]
}

/// The activity of each thread.
pub(crate) fn threads(figures: &Figures, subjects: Subjects) -> Markup {
    let mut all: Vec<(&(u32, u32), &OneThread)> = figures.threads.iter().collect();
    let weight = |of: &OneThread| of.cpu_ns + of.pause_ns + of.waits.ns;
    all.sort_by_key(|(key, of)| (Reverse(weight(of)), **key));
    let whole = all.iter().any(|(_, of)| of.gvl.is_some());
    let cell = |text: String| html! { (text) };
    let rows: Vec<Vec<Markup>> = all
        .iter()
        .take(ROWS)
        .map(|((pid, tid), of)| {
            let mut row = vec![html! { (pid) " " (who(*tid, &of.name)) }];
            if subjects.samples {
                row.extend([cell(time(of.cpu_ns)), cell(count(of.samples))]);
            }
            if subjects.wall {
                row.push(cell(time(of.off_ns)));
            }
            row.extend(seen_of_pauses(of));
            if subjects.gvl {
                row.extend([
                    cell(count(of.waits.count)),
                    cell(time(of.waits.ns)),
                    cell(time(of.waits.max_ns)),
                ]);
            }
            if whole {
                let sums = of.gvl.as_ref();
                let part = |times: Option<GvlTimes>| match (times, sums) {
                    (Some(times), Some(sums)) => share(times.ns, sums.watched_ns),
                    _ => "–".to_owned(),
                };
                row.extend([
                    cell(part(sums.map(|sums| sums.wait))),
                    cell(part(sums.and_then(|sums| sums.hold))),
                    cell(part(sums.and_then(|sums| sums.away))),
                ]);
            }
            row
        })
        .collect();
    if rows.is_empty() {
        return html! {};
    }
    let mut heads = vec![Column::Text("Process, thread")];
    if subjects.samples {
        heads.extend([Column::Number("CPU time"), Column::Number("Samples")]);
    }
    if subjects.wall {
        heads.push(Column::Number("Off the CPU"));
    }
    heads.extend([Column::Number("GC pauses"), Column::Number("In GC")]);
    if subjects.gvl {
        heads.extend([Column::Number("Long GVL waits"), Column::Number("Waited"), Column::Number("Longest")]);
    }
    if whole {
        heads.extend([Column::Number("GVL wait"), Column::Number("hold"), Column::Number("away")]);
    }
    let left = all.len().saturating_sub(ROWS) as u64;
    let content = html! {
        (table("Those that ran, collected or waited most come first", &heads, &rows))
        (more_or(left + figures.more_threads, "thread", "events"))
    };
    section("threads", "Threads", &content)
}

/// Which thread waited for which.
pub(super) fn blocked(view: &View) -> Markup {
    let figures = &view.figures;
    let mut pairs: Vec<_> = figures.pairs.iter().collect();
    pairs.sort_by(|(a, x), (b, y)| y.ns.cmp(&x.ns).then_with(|| a.cmp(b)));
    let rows: Vec<Vec<Markup>> = pairs
        .iter()
        .take(ROWS)
        .map(|(pair, times)| {
            vec![
                html! { (pair.pid) " " (who(pair.waiter.tid, &pair.waiter.comm)) },
                of_thread(pair.holder.as_ref()),
                pair.place.as_deref().map_or_else(|| html! { "not seen" }, name),
                html! { (count(times.count)) },
                html! { (time(times.ns)) },
                html! { (time(times.max_ns)) },
            ]
        })
        .collect();
    let of_process = |process: &OneProcess| {
        let blocked = process.gvl.iter().flat_map(|gvl| &gvl.blocked);
        blocked.map(|blocked| (process.pid, blocked.clone())).collect::<Vec<_>>()
    };
    let mut whole: Vec<_> = figures.processes.iter().flat_map(of_process).collect();
    whole.sort_by_key(|(pid, blocked)| (Reverse(blocked.times.ns), *pid));
    let sums: Vec<Vec<Markup>> = whole
        .iter()
        .take(ROWS)
        .map(|(pid, blocked)| {
            vec![
                html! { (*pid) " " (of_thread(blocked.waiter.as_ref())) },
                of_thread(blocked.holder.as_ref()),
                html! { (count(blocked.times.count)) },
                html! { (time(blocked.times.ns)) },
                html! { (time(blocked.times.max_ns)) },
            ]
        })
        .collect();
    let of_gvl = figures.processes.iter().filter_map(|of| of.gvl.as_ref());
    let all_ns: u64 = of_gvl.map(|gvl| gvl.sums.wait.ns).fold(0, u64::saturating_add);
    let held = whole.iter().filter(|(_, blocked)| blocked.holder.is_some());
    let unknown_ns =
        all_ns.saturating_sub(held.map(|(_, blocked)| blocked.times.ns).fold(0, u64::saturating_add));
    let numbers = [Column::Number("Times"), Column::Number("Waited"), Column::Number("Longest")];
    let heads =
        [&[Column::Text("Waited"), Column::Text("Held the GVL"), Column::Text("Where it ran")], &numbers[..]]
            .concat();
    let of_sums = [&[Column::Text("Waited"), Column::Text("Held the GVL")], &numbers[..]].concat();
    let content = html! {
        @if rows.is_empty() { p.soft { "No long wait for the GVL." } } @else {
            (table("Long waits, each with the thread that held the GVL longest meanwhile", &heads, &rows))
            (more_or(pairs.len().saturating_sub(ROWS) as u64 + figures.more_pairs, "pair", "waits"))
        }
        @if !sums.is_empty() {
            details {
                summary { "All waits, added up over whole lives of threads" }
                (table("Who waited while whom held the GVL", &of_sums, &sums))
                (more(whole.len().saturating_sub(ROWS) as u64, "pair"))
                @if unknown_ns > 0 {
                    p.soft { "Of " (time(all_ns)) ", the holder of the GVL is unknown for " (time(unknown_ns)) "." }
                }
            }
        }
    };
    section("blocked", "Who blocks whom", &content)
}

/// Requests by endpoint.
pub(super) fn requests(summary: &RequestSummary) -> Markup {
    let groups = summary.by_time();
    let all_ns = summary.ns();
    let services = summary.has_services();
    // The division of the time is known only if threads were traced (--gvl).
    let states = summary.has_cpu();
    let part = |part: Part| if part.of_ns == 0 { "–".to_owned() } else { share(part.ns, part.of_ns) };
    let rows: Vec<Vec<Markup>> = groups
        .iter()
        .take(ROWS)
        .map(|(group, of)| {
            let quantile = |quantile| match of.times.count() {
                0 => "–".to_owned(),
                _ => time(of.times.quantile_ns(quantile)),
            };
            let mut row = vec![
                html! {
                    @if services { (name(&group.service)) " " }
                    (name(&group.name))
                    @if let Some(handler) = of.handlers.one() { br; span.soft { (name(&handler.name)) } }
                },
                html! { (count(of.count)) },
                html! { (quantile(0.5)) },
                html! { (quantile(0.99)) },
                html! { (quantile(1.0)) },
                html! { (if of.times.count() == 0 { "–".to_owned() } else { share(of.ns, all_ns) }) },
            ];
            if states {
                row.extend([of.cpu, of.runnable, of.blocked].map(|of| html! { (part(of)) }));
            }
            row.extend([of.own, of.other, of.gvl].map(|of| html! { (part(of)) }));
            row.push(html! { (if of.status_known == 0 { "–".to_owned() } else { count(of.failed) }) });
            row
        })
        .collect();
    if rows.is_empty() {
        return section("requests", "Requests", &html! { p.soft { "No request was served." } });
    }
    let mut heads = vec![Column::Text("Endpoint")];
    heads.extend(["Count", "p50", "p99", "Longest", "Time"].map(Column::Number));
    if states {
        heads.extend(["CPU", "Ready", "Waiting"].map(Column::Number));
    }
    heads.extend(["Own GC", "Other GC", "GVL wait", "5xx"].map(Column::Number));
    let content = html! {
        (table("By endpoint, those with most time first", &heads, &rows))
        @if states {
            p.soft {
                "CPU, ready, waiting: for this share of its time the request's thread ran, could run and had no CPU, or waited for a socket, a \
                 lock, the GVL or a timer."
            }
        }
        (more(groups.len().saturating_sub(ROWS) as u64, "endpoint"))
    };
    section("requests", "Requests", &content)
}

/// The cells about the GC of a process: cycles, time in it, longest pause. What is not seen of this Ruby is not shown as 0.
pub(crate) fn seen_of_gc(of: &OneProcess) -> [Markup; 3] {
    let known = |is_known: bool, text: String| html! { (if is_known { text } else { "–".to_owned() }) };
    [
        known(of.sees_cycles, count(of.gc.count(None))),
        html! { (time(of.gc_ns())) @if let Some(span_ns) = of.span_ns { " (" (share(of.gc_ns(), span_ns)) ")" } },
        known(of.times_pauses, time(of.gc.stops.max_ns())),
    ]
}

/// The processes.
pub(super) fn processes(links: &Links<'_>, view: &View, subjects: Subjects) -> Markup {
    let figures = &view.figures;
    let mut all: Vec<_> = figures.processes.iter().collect();
    all.sort_by_key(|of| (Reverse(of.gc_ns() + of.cpu_ns), of.pid));
    let rows: Vec<Vec<Markup>> = all
        .iter()
        .take(ROWS)
        .map(|of| {
            let [cycles, in_gc, longest] = seen_of_gc(of);
            let mut row = vec![
                html! { a href=(links.pid(of.pid)) { (of.pid) } },
                html! { (name(&of.program)) @if !of.cmdline.is_empty() { br; span.soft { (name(&of.cmdline)) } } },
                name(&of.ruby),
                cycles,
                in_gc,
                longest,
                html! { (of.gc.rss.map_or_else(|| "–".to_owned(), |rss| bytes(rss.last))) },
            ];
            if subjects.samples {
                row.push(html! { (time(of.cpu_ns)) });
            }
            row
        })
        .collect();
    let mut heads = vec![
        Column::Text("Pid"),
        Column::Text("Program and command line"),
        Column::Text("Ruby"),
        Column::Number("GC cycles"),
        Column::Number("In GC"),
        Column::Number("Longest"),
        Column::Number("Memory"),
    ];
    if subjects.samples {
        heads.push(Column::Number("CPU time"));
    }
    let content = html! {
        (table("The pid leads to the same page of one process", &heads, &rows))
        (more(all.len().saturating_sub(ROWS) as u64 + figures.more_processes, "process"))
    };
    section("processes", "Processes", &content)
}

#[cfg(test)]
mod tests {
    use gctrace_report::model::request::{Request, RequestMemory};

    use super::*;

    fn request(path: &str, ns: Option<u64>, status: Option<u16>) -> Request {
        Request {
            id: 1,
            tid: 1,
            begin_ns: 100,
            end_ns: ns.map(|ns| 100 + ns),
            method: Some("GET"),
            path: Some(path.to_owned()),
            status,
            queue_ns: None,
            first_byte_ns: None,
            last_byte_ns: None,
            response_bytes: None,
            gcs: None,
            gc_ns: None,
            gc_pauses: None,
            gc_other: None,
            gvl_wait_ns: None,
            states: None,
            split: None,
            alloc: None,
            memory: RequestMemory::default(),
            job: None,
            is_run: false,
            handler: None,
            gc_states: None,
            trace: None,
        }
    }

    /// One of something is not several.
    #[test]
    fn numbers() {
        assert_eq!(
            [counted(1, "more pair"), counted(2, "more process")],
            ["1 more pair", "2 more processes"]
        );
        assert_eq!(counted(12_345, "sample"), format!("{} samples", count(12_345)));
        let text = more(1, "thread").into_string() + &more_or(1, "pair", "waits").into_string();
        assert!(
            text.contains(">1 more thread.<") && text.contains(">1 more pair, or waits of such.<"),
            "{text}"
        );
    }

    /// If no duration or no status of an endpoint is known, neither its share of the time nor its number of failures is shown.
    #[test]
    fn unknown_is_not_zero() {
        let mut summary = RequestSummary::default();
        summary.add(&request("/known", Some(5_000_000), Some(500)));
        summary.add(&request("/unknown", None, None));
        let page = requests(&summary).into_string();
        let row = |endpoint: &str| -> Vec<&str> {
            let row = page.split("<tr>").find(|row| row.contains(endpoint)).unwrap();
            row.split("</td>").skip(1).filter_map(|cell| cell.rsplit('>').next()).collect()
        };
        // Count, p50, p99, longest, time; its own GC and that of other threads, GVL wait, 5xx.
        assert_eq!(row("/unknown")[..9], ["1", "–", "–", "–", "–", "–", "–", "–", "–"], "{page}");
        let known = row("/known");
        assert_eq!((known[4], known[8]), ("100.0 %", "1"), "{page}");
    }
}
