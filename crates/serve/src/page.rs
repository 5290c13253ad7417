//! The page of a recording, or of a part of it.

pub(crate) mod charts;
mod diff;
mod live;
pub(crate) mod tables;
mod threads;

use gctrace_pages::{
    Head, encoded, facts, page_with,
    timeline::{Kind, Mark, Span, after, timeline_with},
    words::{bytes, count, percent},
};
use gctrace_report::{
    export::{text::duration, window::Window},
    ledger::{Extent, Ledger},
    trace_file::{Ending, Header, Subjects},
    words::{plural, span, utc},
};
use gctrace_tunemygc::printable::{printable, printable_part};
use maud::{Markup, html};

use crate::{
    Asked,
    compare::Compared,
    figures::{Figures, OneProcess},
    graph::{Drawn, MEASURES, is_recorded, word},
    live::Now,
    source::{Source, View, Whole},
    wanted::Wanted,
};

pub(crate) use live::section as now;

/// Maximum number of characters shown of a text from outside.
const TEXT: usize = 300;
/// Maximum height of a flame graph's frame, pixels; a taller graph scrolls.
const TALLEST: u32 = 900;

/// A text from outside, without anything that moves, hides or reorders other text.
pub(super) fn name(text: &str) -> Markup {
    html! { bdi { (printable_part(text, TEXT)) } }
}

/// Formats a time, with a space before its unit.
pub(super) fn time(ns: u64) -> String {
    let text = duration(ns);
    match text.find(|c: char| !c.is_ascii_digit() && c != '.') {
        Some(at) => format!("{} {}", &text[..at], &text[at..]),
        None => text,
    }
}

/// The query string of a part: the parameters of the request, and the measure of the graph.
fn query(asked: &Asked, of: Option<&str>) -> String {
    let pids = asked.pids.iter().map(|pid| ("pid", pid.as_str()));
    let from = asked.from.iter().map(|from| ("from", from.as_str()));
    let to = asked.to.iter().map(|to| ("to", to.as_str()));
    let last = asked.last.iter().map(|last| ("last", last.as_str()));
    let a_from = asked.a_from.iter().map(|from| ("afrom", from.as_str()));
    let a_to = asked.a_to.iter().map(|to| ("ato", to.as_str()));
    let pairs =
        from.chain(to).chain(last).chain(a_from).chain(a_to).chain(pids).chain(of.map(|of| ("of", of)));
    let text: Vec<String> = pairs.map(|(key, value)| format!("{key}={}", encoded(value))).collect();
    if text.is_empty() { "?".to_owned() } else { format!("?{}", text.join("&")) }
}

/// The data from which the links of a page are built.
pub(super) struct Links<'a> {
    pub(super) header: &'a Header,
    wanted: &'a Wanted,
}

impl Links<'_> {
    /// A link to the same page with another time, seconds after the start.
    pub(super) fn at(&self, from: f64, to: f64) -> String {
        // The time 0 is written as `0`; other forms of it are refused.
        let seconds = |at: f64| Some(if at < 1e-6 { "0".to_owned() } else { format!("{at:.6}s") });
        query(
            &Asked { from: seconds(from), to: seconds(to), last: None, ..self.wanted.asked.clone() },
            Some(word(self.wanted.of)),
        )
    }

    /// A link with the given parameters and the same measure, for comparisons.
    fn compared(&self, asked: &Asked) -> String {
        query(asked, Some(word(self.wanted.of)))
    }

    /// A link to the same page for one process.
    pub(super) fn pid(&self, pid: u32) -> String {
        query(&Asked { pids: vec![pid.to_string()], ..self.wanted.asked.clone() }, Some(word(self.wanted.of)))
    }

    /// Seconds after the start of the recording, from which `--from` counts as well.
    pub(super) fn seconds(&self, ns: u64) -> f64 {
        if ns >= self.header.begun_ns {
            (ns - self.header.begun_ns) as f64 / 1e9
        } else {
            -((self.header.begun_ns - ns) as f64) / 1e9
        }
    }
}

fn head() -> Head<'static> {
    Head { style: "style.css", scripts: &["brush.js"], ..Head::default() }
}

/// The title of a page.
fn title(source: &Source, live: bool) -> String {
    if !live {
        return printable(&source.name()).into_owned();
    }
    let host = source.header.host.name.as_deref().map(|host| format!(" on {}", printable_part(host, TEXT)));
    format!("Live{}", host.unwrap_or_default())
}

/// The page while the recording is being read.
pub(crate) fn reading(source: &Source) -> String {
    let content = html! {
        p.note { "gctrace is reading this recording: " (percent(source.progress())) ". This page loads itself again, and has what was read so far." }
        progress max="1" value=(format!("{:.3}", source.progress())) {}
        (about(source))
        @if let Some(figures) = source.so_far().filter(|figures| !figures.is_empty()) {
            @let subjects = source.header.subjects;
            @let columns = &figures.lanes.columns;
            @let length = columns.width_ns as f64 * columns.cells.len() as f64 / 1e9;
            (glance(&figures, figures.processes.len() as u64, subjects, length))
            (charts::over_time(&figures, subjects, (0.0, length), &[]))
            (charts::latencies(&figures, subjects, (0.0, length)))
        }
    };
    let head = Head { scripts: &[], again: true, ..head() };
    page_with(head, &printable(&source.name()), &[], &content)
}

/// The page for a request that cannot be understood.
pub(crate) fn refused(source: &Source, why: &str) -> String {
    let content = html! {
        p role="alert" { (printable_part(why, TEXT)) }
        p { a href="./" { "The whole recording" } }
    };
    page_with(head(), &printable(&source.name()), &[], &content)
}

/// The page if the recording cannot be shown at all.
pub(crate) fn failed(source: &Source, why: &str) -> String {
    let content =
        html! { p.note role="alert" { "This recording cannot be shown: " (printable_part(why, TEXT)) "." } };
    page_with(head(), &printable(&source.name()), &[], &content)
}

/// The facts in the recording's header.
fn about(source: &Source) -> Markup {
    let Header { gctrace, clock, subjects, host, .. } = &source.header;
    let begun = utc(clock.epoch_nanos(source.begins_ns()).div_euclid(1_000_000_000));
    let on: Vec<String> = [&host.kernel, &host.machine].into_iter().flatten().cloned().collect();
    let cpus = host.cpus.map(|cpus| plural(u64::from(cpus), "CPU"));
    let on = [on.join(" "), cpus.unwrap_or_default()].into_iter().filter(|text| !text.is_empty());
    let Subjects { samples, wall, gvl, requests, alloc } = *subjects;
    let looked = [
        (true, "GC"),
        (samples, "CPU samples"),
        (wall, "off-CPU time"),
        (gvl, "GVL"),
        (requests, "requests"),
        (alloc, "allocation"),
    ];
    let looked: Vec<&str> = looked.into_iter().filter_map(|(is, name)| is.then_some(name)).collect();
    html! {
        p.soft {
            "Begun " (begun)
            @if let Some(host) = &host.name { " on " (name(host)) }
            @let on = on.collect::<Vec<_>>().join(", ");
            @if !on.is_empty() { " (" (name(&on)) ")" }
            ". Recorded by gctrace " (name(gctrace)) ": " (looked.join(", ")) "."
        }
    }
}

/// Notes about the whole recording that must be known before its figures.
fn notes(source: &Source, whole: &Whole, view: &View, live: bool) -> Markup {
    let length = span(whole.last_ns.saturating_sub(source.begins_ns()));
    html! {
        @if let Some(why) = &whole.damage {
            p.note role="alert" {
                "This recording cannot be read to its end: " (name(why)) ". Before that it has " (length) ", which is shown."
            }
        } @else if let Ending::CutOff(left) = whole.ending {
            p.note role="note" {
                "This recording was cut off: it ends after " (length)
                @if left > 0 { ". " (plural(left, "byte")) " of an incomplete chunk were not read" }
                "."
            }
        }
        @if let Some(why) = &view.damage {
            p.note role="alert" {
                "The file has changed since it was first read: " (name(why)) ". The data before that point is shown."
            }
        }
        @if let Some(dump) = source.header.dump.as_ref().filter(|_| !live) {
            p.note role="note" { "A flight recorder wrote it because of " (name(&dump.why)) "; it has the " (length) " before that." }
        }
    }
}

/// The event counts of the whole recording, including losses by kind.
fn account(ledger: &Ledger) -> Markup {
    html! { p { "Account of the whole recording: " (name(&ledger.summary())) "." } }
}

/// The form that selects a part, and links to neighbouring parts.
fn chooser(links: &Links<'_>, view: &View, whole: &Whole, (from, to): (f64, f64)) -> Markup {
    let asked = &links.wanted.asked;
    let length = to - from;
    let end = links.seconds(whole.last_ns);
    let cut = view.window.cuts_time();
    let pids = (!asked.pids.is_empty()).then(|| printable(&asked.pids.join(",")).into_owned());
    html! {
        form.part method="get" action="./" {
            label { "From " br; input name="from" size="14" placeholder="0s" value=[asked.from.as_deref().map(printable)]; }
            label { "To " br; input name="to" size="14" placeholder=(format!("{end:.3}s")) value=[asked.to.as_deref().map(printable)]; }
            label { "Process " br; input name="pid" size="8" inputmode="numeric" placeholder="all" value=[pids]; }
            input type="hidden" name="of" value=(word(links.wanted.of));
            @for (key, value) in [("afrom", &asked.a_from), ("ato", &asked.a_to)] {
                @if let Some(value) = value { input type="hidden" name=(key) value=(printable(value)); }
            }
            button { "Show" }
        }
        p.links {
            @if !links.wanted.window.is_all() { a href="./" { "Whole recording" } }
            @if cut {
                @if from > 0.0 { a href=(links.at(from - length, from)) { "Earlier" } }
                @if to < end { a href=(links.at(to, to + length)) { "Later" } }
                a href=(links.at(from - length / 2.0, to + length / 2.0)) { "Twice as long" }
            }
            @if length > 1e-3 { a href=(links.at(from + length / 4.0, to - length / 4.0)) { "Middle half" } }
        }
        (comparing(links, view, (from, to)))
        p.soft { "Drag over the time line, or give times after the begin (10s, 1m30s) or dates (2026-11-23T14:00:00Z)." }
    }
}

/// Links to comparisons with this part.
fn comparing(links: &Links<'_>, view: &View, (from, to): (f64, f64)) -> Markup {
    let asked = &links.wanted.asked;
    let length = to - from;
    let seconds = |at: f64| Some(if at < 1e-6 { "0".to_owned() } else { format!("{at:.6}s") });
    let marked = asked.a_from.is_some() || asked.a_to.is_some();
    let chosen = view.window.cuts_time();
    let here = |asked: &Asked| Asked { from: seconds(from), to: seconds(to), last: None, ..asked.clone() };
    let with = |a: (f64, f64)| Asked { a_from: seconds(a.0), a_to: seconds(a.1), ..here(asked) };
    let mark =
        Asked { from: None, to: None, last: None, a_from: seconds(from), a_to: seconds(to), ..asked.clone() };
    let swapped = Asked {
        from: asked.a_from.clone(),
        to: asked.a_to.clone(),
        a_from: seconds(from),
        a_to: seconds(to),
        ..asked.clone()
    };
    let none = Asked { a_from: None, a_to: None, ..asked.clone() };
    html! {
        @if marked && !chosen {
            p.note role="status" { "A is marked: drag over the time line, or give times, to choose B." }
        }
        p.links {
            @if chosen && !marked {
                @if from >= length { a href=(links.compared(&with((from - length, from)))) { "Compare with the time before" } }
                a href=(links.compared(&mark)) { "Mark as A, and choose B" }
            }
            @if chosen && marked { a href=(links.compared(&swapped)) { "Swap A and B" } }
            @if marked { a href=(links.compared(&none)) { "Do not compare" } }
        }
    }
}

/// The parts of a comparison, to highlight on a time line.
fn marks<'a>(links: &Links<'_>, wanted: &Wanted, ends: (u64, u64), b: &'a str) -> Vec<Mark<'a>> {
    let span = |window: &Window| Span {
        from: links.seconds(window.from_ns.unwrap_or(ends.0)),
        to: links.seconds(window.to_ns.unwrap_or(ends.1)),
    };
    let chosen =
        wanted.window.cuts_time().then(|| Mark { span: span(&wanted.window), name: b, class: "chosen" });
    let marked = wanted.asked.a_from.is_some() || wanted.asked.a_to.is_some();
    let other = wanted.other.as_ref().filter(|_| marked);
    let other = other.map(|window| Mark { span: span(window), name: "A", class: "other" });
    chosen.into_iter().chain(other).collect()
}

/// The whole recording with both parts of a comparison: the next part selected there is B.
fn both(links: &Links<'_>, whole: &Whole, wanted: &Wanted, ends: (u64, u64)) -> Markup {
    let figures = &whole.view.figures;
    let columns = &figures.lanes.columns;
    let from = links.seconds(columns.from_ns);
    let to = from + columns.width_ns as f64 * columns.cells.len() as f64 / 1e9;
    let subjects = links.header.subjects;
    let lanes =
        charts::lanes(columns, subjects, figures.times_pauses(), Kind::Shape, ends.1, charts::Counted::Begun);
    timeline_with(
        "All of the recording, with A and B",
        Span { from, to },
        &lanes,
        &marks(links, wanted, ends, "B"),
    )
}

/// Figures at a glance.
fn glance(figures: &Figures, processes: u64, subjects: Subjects, length: f64) -> Markup {
    let mut all: Vec<(&str, Markup)> = Vec::new();
    all.push(("Time", html! { (after(round(length))) }));
    if let [one] = figures.processes.as_slice() {
        all.push(("Program", html! { (name(&one.program)) ", Ruby " (name(&one.ruby)) ", pid " (one.pid) }));
    } else {
        all.push(("Processes", html! { (count(processes)) }));
    }
    all.push((
        "GC",
        html! {
            @if figures.sees_cycles() || figures.processes.is_empty() {
                (plural(figures.cycles, "cycle")) ", " (count(figures.majors)) " major"
            } @else {
                "cycles not seen"
            }
            @if let [one] = figures.processes.as_slice() {
                "; " (time(one.gc_ns()))
                @if let Some(span_ns) = one.span_ns { ", " (percent(one.gc_ns() as f64 / span_ns.max(1) as f64)) " of " (time(span_ns)) }
            } @else {
                "; " (time(figures.processes.iter().map(OneProcess::gc_ns).sum())) " in all processes"
            }
        },
    ));
    if figures.stops.count() > 0 {
        all.push((
            "GC pauses",
            html! {
                "longest " (time(figures.stops.max_ns())) ", p99 " (time(figures.stops.quantile_ns(0.99)))
                ", p50 " (time(figures.stops.quantile_ns(0.5)))
            },
        ));
    }
    if subjects.samples {
        all.push(("CPU time", html! { (time(figures.cpu_ns)) " in " (plural(figures.samples, "sample")) }));
    }
    if subjects.gvl {
        let from_ns = figures.lanes.columns.from_ns;
        let unreported = figures.gvl_unreported_ns(from_ns.saturating_add((length * 1e9) as u64));
        all.push((
            "Long waits for the GVL",
            html! {
                // Individual waits are shown if any were reported: what was not reported is not zero.
                @if figures.waits.count > 0 || unreported == 0 {
                    (count(figures.waits.count)) ", " (time(figures.waits.ns)) " in all"
                    @if figures.waits.count > 0 { ", longest " (time(figures.waits.max_ns)) }
                    @if unreported > 0 { "; " }
                }
                @if unreported > 0 { "not reported one by one for " (time(unreported)) " (--gvl-budget)" }
            },
        ));
    }
    if subjects.requests {
        all.push(("Requests", html! { (count(figures.requests.count())) }));
    }
    if subjects.alloc {
        // Allocations are summed about once a second; sums not wholly within the chosen time are not counted.
        all.push((
            "Allocated (complete seconds)",
            html! {
                @if let Some(allocated) = figures.allocated { (bytes(allocated)) }
                @else { "unknown: no complete second in this part" }
            },
        ));
    }
    facts(&all)
}

fn round(seconds: f64) -> f64 {
    (seconds * 1e3).round() / 1e3
}

/// The flame graph, links to its other measures, and the methods as a table.
fn graphs(view: &View, wanted: &Wanted, subjects: Subjects, drawn: &Drawn) -> Markup {
    let here = query(&wanted.asked, Some(word(wanted.of)));
    let title = MEASURES.iter().find(|(of, ..)| *of == wanted.of).map_or("", |(.., title)| title);
    html! {
        section aria-labelledby="graph" {
            h2 #graph { "Flame graph: " (title) }
            nav aria-label="What the flame graph is of" {
                @for (of, word, title) in MEASURES {
                    @if is_recorded(of, subjects) {
                        a href=(format!("{}#graph", query(&wanted.asked, Some(word)))) aria-current=[(of == wanted.of).then_some("true")] { (title) }
                    }
                }
                a href=(format!("flamegraph.svg{here}")) { "On its own" }
            }
            // Nothing in it can have the focus, so browsers do not scroll to it: for the keyboard there is the link to it on its own.
            iframe.graph src=(format!("flamegraph.svg{here}")) title=(format!("Flame graph: {title}"))
                height=(drawn.height.min(TALLEST)) loading="lazy" tabindex="-1" {}
            @if subjects.samples { (tables::methods(&view.kept, view.figures.cpu_ns)) }
        }
    }
}

/// Links to the files of this part.
fn saves(wanted: &Wanted) -> Markup {
    let here = query(&wanted.asked, None);
    let graph = query(&wanted.asked, Some(word(wanted.of)));
    html! {
        section aria-labelledby="save" {
            h2 #save { "Save this part as" }
            ul {
                li { a href=(format!("save/pprof{here}")) { "pprof" } " – " code { "go tool pprof" } ", and other tools that read its format" }
                li { a href=(format!("save/firefox{here}")) { "Firefox Profiler" } " – a timeline of all threads with GC markers and memory" }
                li { a href=(format!("save/speedscope{here}")) { "speedscope" } " – each thread's stacks at their time" }
                li { a href=(format!("save/perfetto{here}")) { "Perfetto" } " – threads, GC, who blocks whom" }
                li { a href=(format!("save/flamegraph{graph}")) { "This flame graph" } " as SVG, or as "
                    a href=(format!("save/folded{graph}")) { "collapsed stacks" } }
            }
            p.soft { "The same files as " code { "gctrace report" } " writes with the same " code { "--from" } ", " code { "--to" } " and " code { "--pid" } "." }
        }
    }
}

/// The page of a part. `live` is set for a run in progress.
pub(crate) fn page(
    source: &Source,
    whole: &Whole,
    view: &View,
    wanted: &Wanted,
    drawn: &Drawn,
    (live, compared): (Option<&Now>, Option<&Compared>),
) -> String {
    let subjects = source.header.subjects;
    let links = Links { header: &source.header, wanted };
    let columns = &view.figures.lanes.columns;
    let from = links.seconds(columns.from_ns);
    let end_ns = view.window.to_ns.map_or(whole.last_ns, |to_ns| to_ns.min(whole.last_ns));
    let to = links.seconds(end_ns.max(columns.from_ns));
    let empty = view.figures.is_empty();
    // If no part is chosen, all of it is B.
    let marked: Vec<_> = marks(&links, wanted, (source.begins_ns(), end_ns), "")
        .into_iter()
        .filter(|mark| mark.class == "other")
        .collect();
    let part = html! {
        (notes(source, whole, view, live.is_some()))
        @if let Some(now) = live { (live::lacks(&source.header, now, wanted)) }
        @if empty {
            p.note role="alert" {
                @if live.is_some() { "No activity of a process in this time." }
                @else if view.window.is_all() && view.processes > 0 {
                    "No activity of " (plural(view.processes, "process")) " was recorded: no GC, no sample, no wait."
                }
                @else if view.window.is_all() { "This recording contains no activity of a process." }
                @else { "This part of the recording contains nothing." }
            }
        } @else {
            (glance(&view.figures, view.processes, subjects, to - from))
        }
        section aria-labelledby="time" {
            h2 #time { "Over time" }
            @if live.is_none() && compared.is_some() && !marked.is_empty() {
                (both(&links, whole, wanted, (source.begins_ns(), whole.last_ns)))
            }
            @if !empty { (charts::over_time(&view.figures, subjects, (from, to), &marked)) }
            (chooser(&links, view, whole, (from, to)))
        }
        @if let Some(compared) = compared { (diff::section(compared, wanted)) }
        @if !empty {
            (graphs(view, wanted, subjects, drawn))
            (threads::over_time(&links, view, subjects, end_ns))
            (charts::memory(&view.figures, (from, to)))
            (charts::latencies(&view.figures, subjects, (from, to)))
            (tables::worst(&links, view))
            (tables::threads(&view.figures, subjects))
            @if subjects.gvl { (tables::blocked(view)) }
            @if subjects.requests { (tables::requests(&view.figures.requests)) }
            (tables::processes(&links, view, subjects))
            (saves(wanted))
        }
        footer {
            h2 { "What is missing" }
            (account(&whole.ledger))
            @if subjects.wall && whole.ledger.extent == Extent::CutOff {
                p.soft { "Off-CPU time is recorded when it ends: threads still off the CPU at the end of the file are not included." }
            }
            @if view.window.cuts_time() {
                p.soft {
                    "A cycle, a sample or a request belongs to the time at which it began. GVL sums cover whole lives of threads; \
                     a part of the recording has none."
                }
            }
        }
    };
    // If the end is in the future, the page still changes.
    let moves = live.is_some_and(|now| !now.state.ended)
        && wanted.window.to_ns.is_none_or(|to_ns| to_ns > whole.last_ns);
    let content = html! {
        (about(source))
        @if let Some(now) = live {
            (live::controls(wanted))
            (live::section(&source.header, now, wanted))
            div #part data-moves=[moves.then_some("yes")] data-cycles=(view.figures.cycles) { (part) }
        } @else {
            (part)
        }
    };
    let head = match live {
        None => head(),
        Some(now) => {
            Head { scripts: &["brush.js", "live.js"], again_without_scripts: !now.state.ended, ..head() }
        }
    };
    page_with(head, &title(source, live.is_some()), &[], &content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gctrace_report::model::gvl::GvlTimes;

    use crate::columns::Columns;

    /// Waits that were not reported individually are not shown as "0".
    #[test]
    fn waits_that_were_not_reported() {
        const S: u64 = 1_000_000_000;
        let subjects = Subjects { samples: false, wall: false, gvl: true, requests: false, alloc: false };
        let said = |gaps: &[(u64, u64)], waits: GvlTimes| {
            let mut figures = Figures::new(Columns::new(10 * S, Some(12 * S)));
            (figures.gvl_gaps, figures.waits) = (gaps.to_vec(), waits);
            glance(&figures, 0, subjects, 2.0).into_string()
        };
        let (none, one) = (GvlTimes::default(), GvlTimes { count: 1, ns: 5_000_000, max_ns: 5_000_000 });
        assert!(said(&[], none).contains("0, 0 in all"));
        let whole = said(&[(0, 20 * S)], none);
        assert!(whole.contains("<dd>not reported one by one for 2.00 s (--gvl-budget)<"), "{whole}");
        let part = said(&[(0, 11 * S)], one);
        assert!(
            part.contains("1, 5.00 ms in all, longest 5.00 ms; not reported one by one for 1.00 s"),
            "{part}"
        );
    }
}
