//! The requests of one or all processes in the summary.

use std::io::Write;

use super::row;
use crate::{
    aggregate::{
        gc_summary::Distribution,
        request_summary::{By, Group, GroupSummary, Part, RequestSummary},
        server_load::{LoadSummary, Readings},
    },
    export::{
        place::{clip, place},
        text::duration,
    },
    words::{data_size, percent, plural},
};

/// Maximum number of groups shown: those with the most time.
const SHOWN: usize = 10;
/// Maximum number of groups named for their GC, and for their allocation.
const SHOWN_GC: usize = 3;
/// Columns before the names.
const INDENT: usize = 12;
/// Minimum and maximum width of a name. Longer names have a row of their own.
const NAMES: (usize, usize) = (11, 40);

/// Maximum width of any name.
const LONGEST: usize = 300;

/// The column of waits for the GVL, if these are known.
const GVL: &str = "GVL";
/// The column of time on a CPU, if that is known.
const CPU: &str = "CPU";
/// The column of average bytes allocated per request, if known.
const ALLOC: &str = "alloc/req";
/// The column of failed requests, if statuses are known.
const STATUS: &str = "5xx";
/// The priority of that column if any request failed.
const FAILED: u8 = 12;
/// The column of waits for a thread, if these are known.
const QUEUE: &str = "queue95";

/// A column of figures.
struct Column {
    head: &'static str,
    width: usize,
    /// Priority: if space is short, the column with the lowest one is left out first (in the order of docs/requests.md). All are different.
    worth: u8,
    text: fn(&GroupSummary, u64) -> String,
}

/// The figures of a group; the second argument is the time of all groups.
const COLUMNS: [Column; 14] = [
    Column { head: "count", width: 7, worth: 15, text: |of, _| of.count.to_string() },
    Column { head: "p50", width: 8, worth: 14, text: |of, _| time(of, 0.5) },
    Column { head: "p95", width: 8, worth: 5, text: |of, _| time(of, 0.95) },
    Column { head: "p99", width: 8, worth: 13, text: |of, _| time(of, 0.99) },
    Column { head: "max", width: 8, worth: 3, text: |of, _| time(of, 1.0) },
    Column { head: QUEUE, width: 8, worth: 6, text: |of, _| at(&of.queues, 0.95) },
    Column { head: "time", width: 8, worth: 4, text: time_share },
    Column { head: CPU, width: 8, worth: 7, text: |of, _| share(of.cpu) },
    Column { head: "own GC", width: 8, worth: 11, text: |of, _| share(of.own) },
    Column { head: "other GC", width: 9, worth: 8, text: |of, _| share(of.other) },
    Column { head: GVL, width: 8, worth: 9, text: |of, _| share(of.gvl) },
    Column { head: ALLOC, width: 11, worth: 10, text: |of, _| allocated(of) },
    Column { head: "GCs/req", width: 8, worth: 1, text: |of, _| each(of) },
    Column { head: STATUS, width: 5, worth: 2, text: |of, _| failed(of) },
];

/// Number of failed requests, of those whose status is known.
fn failed(of: &GroupSummary) -> String {
    match of.status_known {
        0 => "?".to_owned(),
        _ => of.failed.to_string(),
    }
}

fn time(of: &GroupSummary, quantile: f64) -> String {
    at(&of.times, quantile)
}

/// The group's share of the time of all groups.
fn time_share(of: &GroupSummary, all_ns: u64) -> String {
    match of.times.count() {
        0 => "?".to_owned(),
        _ => brief(of.ns, all_ns),
    }
}

fn at(times: &Distribution, quantile: f64) -> String {
    match times.count() {
        0 => "?".to_owned(),
        _ => duration(times.quantile_ns(quantile)),
    }
}

fn share(part: Part) -> String {
    if part.of_ns == 0 { "?".to_owned() } else { brief(part.ns, part.of_ns) }
}

/// A share in a narrow form.
fn brief(part: u64, whole: u64) -> String {
    percent(part, whole).replace("below ", "<")
}

/// Average number of cycles started per request.
fn each(of: &GroupSummary) -> String {
    match of.gcs_known {
        0 => "?".to_owned(),
        known => format!("{:.2}", of.gcs as f64 / known as f64),
    }
}

/// Average bytes allocated on the heap per request.
fn allocated(of: &GroupSummary) -> String {
    match of.alloc_known {
        0 => "?".to_owned(),
        known => data_size(of.alloc.bytes / known),
    }
}

/// The columns that fit, and for which some value is known.
fn columns(room: usize, requests: &RequestSummary) -> Vec<&'static Column> {
    let known = |column: &&Column| match column.head {
        GVL => requests.has_gvl(),
        QUEUE => requests.has_queues(),
        CPU => requests.has_cpu(),
        ALLOC => requests.has_alloc(),
        STATUS => requests.has_status(),
        _ => true,
    };
    let failed = requests.has_failed();
    let worth = |column: &Column| if failed && column.head == STATUS { FAILED } else { column.worth };
    let mut columns: Vec<&Column> = COLUMNS.iter().filter(known).collect();
    while columns.iter().map(|column| column.width).sum::<usize>() > room
        && let Some(least) = columns.iter().copied().map(worth).min()
    {
        columns.retain(|column| worth(column) != least);
    }
    columns
}

/// The requests of a process: their number, and the endpoints that took the most time.
pub(super) fn write(out: &mut impl Write, width: usize, requests: &RequestSummary) -> std::io::Result<()> {
    table(out, width, requests, By::Endpoint)
}

/// The load of a server, in rows; empty if nothing is known. `has_pool`: it has a pool of threads, whether or not their load is known.
pub(super) fn load(load: &LoadSummary, has_pool: bool) -> Vec<String> {
    let LoadSummary { busy, waiting } = load;
    let readings = plural(busy.all, "reading");
    // A reading without this figure may have missed its maximum.
    let figure = |of: &Readings, before: &str, after: &str| {
        let average = of.average()?;
        let figure = format!("{before}{average:.1}{after}");
        Some(if of.count == of.all {
            (true, format!("{figure}, at most {}", of.most))
        } else {
            (false, format!("{figure} (average of {} of {readings}; no figure in the rest)", of.count))
        })
    };
    let unknown = || (false, format!("threads busy: not known ({readings})"));
    let threads = figure(busy, "", " threads busy").or_else(|| (has_pool && busy.all > 0).then(unknown));
    let queue = figure(waiting, "accept queue ", "");
    match (threads, queue) {
        (Some((true, threads)), Some((true, queue))) => {
            vec![format!("{threads}; {queue} (average of {readings})")]
        }
        (threads, queue) => {
            let row = |(whole, text)| if whole { format!("{text} (average of {readings})") } else { text };
            [threads, queue].into_iter().flatten().map(row).collect()
        }
    }
}

/// The requests of all processes, grouped as requested.
pub(super) fn write_all(
    out: &mut impl Write,
    width: usize,
    requests: &RequestSummary,
    by: By,
) -> std::io::Result<()> {
    let what = match by {
        By::Endpoint => "endpoint",
        By::Service => "service",
        By::Thread => "thread",
    };
    writeln!(out, "\nRequests of all processes by {what}")?;
    if requests.count() == 0 {
        return row(out, width, "requests", "none");
    }
    table(out, width, requests, by)
}

fn table(out: &mut impl Write, width: usize, requests: &RequestSummary, by: By) -> std::io::Result<()> {
    let groups = requests.by_time();
    if groups.is_empty() {
        return Ok(());
    }
    let noun = match by {
        By::Endpoint => "to {} endpoint",
        By::Service => "to {} service",
        By::Thread => "on {} thread",
    };
    let (preposition, noun) = noun.split_once(" {} ").unwrap_or_default();
    let known = plural(groups.len() as u64, noun);
    let text = format!("{} {preposition} {known}, those with most time first:", requests.count());
    row(out, width, "requests", &text)?;
    let columns = columns(width.saturating_sub(INDENT + NAMES.0), requests);
    let figures: usize = columns.iter().map(|column| column.width).sum();
    let name_width = width.saturating_sub(INDENT + figures).clamp(NAMES.0, NAMES.1);
    let cells = |text: &dyn Fn(&Column) -> String| -> String {
        let cell = |column: &&Column| format!("{:>width$}", text(column), width = column.width);
        columns.iter().map(cell).collect::<Vec<_>>().concat()
    };
    let head = cells(&|column| column.head.to_owned());
    row(out, width, "", &format!("{:<name_width$}{head}", ""))?;
    let services = requests.has_services();
    for (group, of) in groups.iter().take(SHOWN) {
        let mut name = group_name(group, services);
        let handler = of.handlers.one().filter(|_| by == By::Endpoint);
        if let Some(handler) = handler {
            name = format!("{name}  by {}", place(handler));
        }
        if handler.is_some() || name.chars().count() > name_width {
            row(out, width, "", &name)?;
            name.clear();
        }
        let figures = cells(&|column| (column.text)(of, requests.ns()));
        row(out, width, "", &format!("{name:<name_width$}{figures}"))?;
    }
    if groups.len() > SHOWN {
        row(out, width, "", &format!("{} more", plural((groups.len() - SHOWN) as u64, noun)))?;
    }
    for (at, (group, of)) in requests.by_gc().into_iter().take(SHOWN_GC).enumerate() {
        let label = if at == 0 { "most GC" } else { "" };
        let known = |part: Part| if part.of_ns == 0 { "?".to_owned() } else { duration(part.ns) };
        let (own, other) = (known(of.own), known(of.other));
        let figures = format!("{own:>8} own, {other:>8} of other threads: ");
        let room = width.saturating_sub(INDENT + figures.len());
        row(out, width, label, &format!("{figures}{}", clip(&group_name(group, services), room)))?;
    }
    let waited = requests.by_gvl();
    let all: u64 = waited.iter().map(|(_, of)| of.gvl.ns).sum();
    for (at, (group, of)) in waited.into_iter().take(SHOWN_GC).enumerate() {
        let label = if at == 0 { "most GVL" } else { "" };
        let figures = format!("{:>8} ({}) waited: ", duration(of.gvl.ns), percent(of.gvl.ns, all));
        let room = width.saturating_sub(INDENT + figures.len());
        row(out, width, label, &format!("{figures}{}", clip(&group_name(group, services), room)))?;
    }
    let groups = requests.by_alloc();
    let all: u64 = groups.iter().map(|(_, of)| of.alloc.bytes).sum();
    for (at, (group, of)) in groups.into_iter().take(SHOWN_GC).enumerate() {
        let label = if at == 0 { "allocated" } else { "" };
        let (bytes, share) = (data_size(of.alloc.bytes), percent(of.alloc.bytes, all));
        let figures = format!("{bytes:>9} ({share}) for {}: ", plural(of.alloc.slots, "object"));
        let room = width.saturating_sub(INDENT + figures.len());
        row(out, width, label, &format!("{figures}{}", clip(&group_name(group, services), room)))?;
    }
    Ok(())
}

fn group_name(group: &Group, services: bool) -> String {
    clip(&group.title(services), LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        aggregate::{service_requests::tests::request, services::tests::process},
        model::{
            load::{AcceptQueue, ServerLoad},
            request::{Allocated, GcTime, Request, States},
        },
    };

    const MS: u64 = 1_000_000;

    fn some() -> Vec<Request> {
        let one = |path: &str, ms: u64, own_ms: u64, other_ms: u64| Request {
            gc_ns: Some(own_ms * MS),
            gc_other: Some(GcTime { pauses: 1, ns: other_ms * MS }),
            ..request(Some(path), Some(ms * MS), Some(200))
        };
        let unknown = Request { gcs: None, gc_ns: None, gc_other: None, ..one("/b", 300, 0, 0) };
        let failed = Request { status: Some(500), gcs: Some(1), ..one("/a", 200, 0, 100) };
        vec![one("/a", 600, 60, 20), failed, unknown, one("/a/path/that/is/long/:id", 100, 0, 0)]
    }

    fn text(width: usize) -> String {
        let mut summary = RequestSummary::default();
        for request in some() {
            summary.add(&request);
        }
        let mut out = Vec::new();
        write(&mut out, width, &summary).unwrap();
        String::from_utf8(out).unwrap()
    }

    /// All figures; an unknown figure is not shown as a number.
    #[test]
    fn figures() {
        let expected = "  requests  4 to 3 endpoints, those with most time first:
                                   count     p50     p95     p99     max    time  own GC other GC GCs/req  5xx
            GET /a                     2 200.3ms 600.0ms 600.0ms 600.0ms  66.7 %   7.5 %   15.0 %    1.50    1
            GET /b                     1 300.0ms 300.0ms 300.0ms 300.0ms  25.0 %       ?        ?       ?    0
            GET /a/path/that/is/long/:id
                                       1 100.0ms 100.0ms 100.0ms 100.0ms   8.3 %     0 %      0 %    2.00    0
  most GC    60.00ms own,  120.0ms of other threads: GET /a
";
        assert_eq!(text(110), expected);
    }

    /// If a figure is unknown for all requests of an endpoint, it is not shown.
    #[test]
    fn unknown_figures() {
        let text = |requests: &[Request]| {
            let mut summary = RequestSummary::default();
            for request in requests {
                summary.add(request);
            }
            let mut out = Vec::new();
            write(&mut out, 150, &summary).unwrap();
            String::from_utf8(out).unwrap()
        };
        let first = some().swap_remove(0);
        let own = text(&[Request { gc_other: None, ..first.clone() }]);
        assert!(own.contains("60.00ms own,        ? of other threads: GET /a"), "{own}");
        let other = text(&[Request { gc_ns: None, ..first.clone() }]);
        assert!(other.contains("       ? own,  20.00ms of other threads: GET /a"), "{other}");
        // A request whose end was not seen has neither a time nor a share of the total time.
        let endless =
            text(&[first.clone(), Request { end_ns: None, path: Some("/b".to_owned()), ..first.clone() }]);
        let cells = |endpoint: &str| -> Vec<String> {
            let line = endless.lines().find(|line| line.contains(endpoint)).unwrap();
            line.split_whitespace().skip(2).map(str::to_owned).collect()
        };
        assert_eq!(cells("GET /b")[..6], ["1", "?", "?", "?", "?", "?"], "{endless}");
        assert_eq!(cells("GET /a")[5..7], ["100.0", "%"], "{endless}");
        // Jobs have no status.
        let job = Request { status: None, path: Some("/b".to_owned()), ..first.clone() };
        assert!(!text(std::slice::from_ref(&job)).contains("5xx"));
        let both = text(&[first, job]);
        assert!(
            both.contains("5xx") && both.lines().any(|line| line.contains("GET /b") && line.ends_with('?')),
            "{both}"
        );
    }

    /// What was read about the load of a server.
    #[test]
    fn load_of_a_server() {
        let mut of = LoadSummary::default();
        assert!(load(&of, true).is_empty());
        let read = |busy, waiting| {
            let queues = vec![AcceptQueue { inode: 7, waiting }];
            ServerLoad { ts_ns: 1, busy, queues }
        };
        for waiting in [0, 3] {
            of.add(&read(None, waiting));
        }
        let queue = "accept queue 1.5, at most 3 (average of 2 readings)";
        assert_eq!(load(&of, false), [queue]);
        assert_eq!(load(&of, true), ["threads busy: not known (2 readings)", queue]);
        of.add(&ServerLoad { ts_ns: 2, busy: Some(5), queues: Vec::new() });
        assert_eq!(
            load(&of, true),
            [
                "5.0 threads busy (average of 1 of 3 readings; no figure in the rest)",
                "accept queue 1.5 (average of 2 of 3 readings; no figure in the rest)"
            ]
        );
        let mut of = LoadSummary::default();
        of.add(&read(Some(2), 0));
        of.add(&read(Some(5), 1));
        assert_eq!(
            load(&of, true),
            ["3.5 threads busy, at most 5; accept queue 0.5, at most 1 (average of 2 readings)"]
        );
        of.add(&read(None, 2));
        assert_eq!(
            load(&of, true),
            [
                "3.5 threads busy (average of 2 of 3 readings; no figure in the rest)",
                "accept queue 1.0, at most 2 (average of 3 readings)"
            ]
        );
    }

    /// Waits for the GVL have a column if they are known.
    #[test]
    fn of_the_gvl() {
        let mut summary = RequestSummary::default();
        let states = Some(States { cpu_ns: 150 * MS, runnable_ns: 0, blocked_ns: 450 * MS });
        summary.add(&Request { gvl_wait_ns: Some(60 * MS), states, ..some().remove(0) });
        summary.add(&some()[0]);
        let mut out = Vec::new();
        write(&mut out, 120, &summary).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(
            text.contains("    time     CPU  own GC other GC     GVL GCs/req")
                && text.contains(" 10.0 %    2.00 "),
            "{text}"
        );
        assert!(text.contains(" 100.0 %  25.0 %  10.0 %"), "{text}");
        assert!(text.contains("  most GVL   60.00ms (100.0 %) waited: GET /a\n"), "{text}");
    }

    /// Allocation has a column, too, and the endpoints that allocate most are named.
    #[test]
    fn of_allocation() {
        let mut summary = RequestSummary::default();
        let alloc = |slots| Some(Allocated { slots, bytes: 40 * slots });
        summary.add(&Request { alloc: alloc(75_000), ..some().remove(0) });
        summary.add(&Request { alloc: alloc(0), ..some().remove(1) });
        summary.add(&Request { alloc: alloc(25_000), ..some().remove(3) });
        summary.add(&some()[2]);
        let mut out = Vec::new();
        write(&mut out, 130, &summary).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("other GC  alloc/req GCs/req"), "{text}");
        assert!(
            text.contains("  15.0 %    1.4 MiB    1.50") && text.contains("       ?          ?       ?"),
            "{text}"
        );
        assert!(
            text.ends_with(
                "  allocated   2.9 MiB (75.0 %) for 75000 objects: GET /a
              977 KiB (25.0 %) for 25000 objects: GET /a/path/that/is/long/:id\n"
            ),
            "{text}"
        );
    }

    /// Waits for a thread have a column, too, for the requests for which they are known.
    #[test]
    fn of_the_queue() {
        let mut summary = RequestSummary::default();
        summary.add(&Request { queue_ns: Some(7 * MS), ..some().remove(0) });
        summary.add(&some()[0]);
        summary.add(&some()[2]);
        let mut out = Vec::new();
        write(&mut out, 120, &summary).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("     max queue95    time "), "{text}");
        assert!(
            text.contains(" 600.0ms  7.00ms  80.0 %") && text.contains(" 300.0ms       ?  20.0 %"),
            "{text}"
        );
    }

    /// What does not fit is left out by columns, and no line is longer than the width.
    #[test]
    fn narrow() {
        for width in [40, 60, 80, 100, 200] {
            let text = text(width);
            assert!(text.lines().all(|line| line.chars().count() <= width), "{width}\n{text}");
            assert!(text.contains("count"), "{text}");
            assert_eq!(text.contains("GCs/req"), width >= 100, "{text}");
        }
        assert!(text(80).contains("own GC other GC"), "{}", text(80));
        // One request has failed.
        assert!(text(80).contains("5xx") && text(60).contains("5xx"), "{}", text(60));
    }

    /// Columns are left out one by one, in the documented order.
    #[test]
    fn left_out_in_order() {
        let mut summary = RequestSummary::default();
        let states = Some(States { cpu_ns: 150 * MS, runnable_ns: 0, blocked_ns: 450 * MS });
        let all = Request {
            queue_ns: Some(MS),
            gvl_wait_ns: Some(60 * MS),
            alloc: Some(Allocated { slots: 1, bytes: 40 }),
            states,
            ..some().remove(0)
        };
        summary.add(&all);
        let heads = |summary: &RequestSummary, room| -> Vec<&str> {
            columns(room, summary).iter().map(|column| column.head).collect()
        };
        let order = |summary: &RequestSummary| {
            let mut left_out = Vec::new();
            let mut before = heads(summary, 200);
            for room in (0..200).rev() {
                let now = heads(summary, room);
                let gone: Vec<&str> = before.iter().filter(|head| !now.contains(head)).copied().collect();
                assert!(gone.len() <= 1, "{gone:?} at once, for {room} columns");
                left_out.extend(gone);
                before = now;
            }
            left_out.join(", ")
        };
        let known = "max, time, p95, queue95, CPU, other GC, GVL, alloc/req, own GC";
        assert_eq!(order(&summary), format!("GCs/req, 5xx, {known}, p99, p50, count"));
        summary.add(&Request { status: Some(500), ..all });
        assert_eq!(order(&summary), format!("GCs/req, {known}, 5xx, p99, p50, count"));
        // Everything that was requested (--gvl, --alloc) fits if the output is not a terminal.
        let expected = ["count", "p50", "p99", "CPU", "own GC", "other GC", "GVL", "alloc/req", "5xx"];
        assert_eq!(heads(&summary, 100 - INDENT - NAMES.0), expected);
    }

    /// All processes together; services are named if there are several.
    #[test]
    fn of_all() {
        let all = |by, services: &[&str]| {
            let mut summary = RequestSummary::default();
            for (pid, service) in services.iter().enumerate() {
                summary.add_by(by, &process(pid as u32 + 1, service), &some()[0]);
            }
            let mut out = Vec::new();
            write_all(&mut out, 100, &summary, by).unwrap();
            String::from_utf8(out).unwrap()
        };
        let text = all(By::Endpoint, &["web", "web"]);
        assert!(text.starts_with("\nRequests of all processes by endpoint\n"), "{text}");
        assert!(text.contains("  2 to 1 endpoint,") && text.contains("\n            GET /a  "), "{text}");
        assert!(all(By::Endpoint, &["web", "api"]).contains("\n            api: GET /a  "));
        assert!(all(By::Service, &["web", "web"]).contains("\n            web  "));
        let text = all(By::Thread, &["web", "web"]);
        assert!(
            text.contains("  2 on 2 threads,") && text.contains("\n            pid 1 thread 1"),
            "{text}"
        );
        assert_eq!(all(By::Thread, &[]), "\nRequests of all processes by thread\n  requests  none\n");
    }
}
