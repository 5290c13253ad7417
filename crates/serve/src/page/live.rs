//! The part of a live page that is reloaded each second.

use gctrace_pages::{
    facts,
    timeline::{Kind, Span, timeline_with},
    words::{bytes, count, percent},
};
use gctrace_report::{
    trace_file::{Header, Subjects},
    words::{plural, span, utc},
};
use maud::{Markup, html};

use super::{Links, charts, marks, query, time};
use crate::{Asked, graph::word, held::Held, live::Now, wanted::Wanted};

/// Lengths of time up to now that are one click away.
const LATEST: [(&str, &str); 3] = [("10s", "Last 10 s"), ("1m", "Last minute"), ("5m", "Last 5 minutes")];

fn clock(header: &Header, ns: u64) -> String {
    utc(header.clock.epoch_nanos(ns).div_euclid(1_000_000_000))
}

/// What is kept, and what was dropped.
fn kept(header: &Header, now: &Now) -> Markup {
    let state = &now.state;
    let dropped = state.expired + state.displaced;
    html! {
        p.soft {
            "Traced since " (clock(header, now.begun_ns)) ", shown up to " (clock(header, now.at_ns)) ". "
            @if dropped == 0 {
                "All of it is kept; from " (span(now.keep_ns)) " on (" code { "--keep" } ") the oldest is dropped."
            } @else {
                "Events since " (clock(header, state.from_ns)) " are kept: the last "
                (span(state.until_ns.saturating_sub(state.from_ns)))
                @if state.is_short { ", less than " code { "--keep" } " (" (span(now.keep_ns)) ") because of " code { "--keep-size" } }
                ". " (plural(dropped, "older record")) " " @if dropped == 1 { "was" } @else { "were" } " dropped."
            }
        }
    }
}

/// The figures of the last seconds.
fn glance(now: &Now, subjects: Subjects) -> Markup {
    let last = &now.last;
    let length = now.last_ns.max(1) as f64;
    let mut all: Vec<(&str, Markup)> = vec![
        ("Running processes", html! { (count(now.processes)) }),
        ("GC", html! { (plural(last.cycles, "cycle")) ", " (count(last.majors)) " major" }),
        ("GC, share of the time", html! { (percent(last.pause_ns as f64 / length)) }),
    ];
    if now.times_pauses {
        all.push(("Longest GC pause", html! { (time(last.longest_ns)) }));
    }
    if subjects.samples {
        all.push(("CPUs in use", html! { (format!("{:.2}", last.cpu_ns as f64 / length)) }));
    }
    if let Some(rss) = last.held[Held::RSS] {
        all.push(("Resident memory", html! { (bytes(rss)) }));
    }
    if subjects.gvl {
        all.push(("Long waits for the GVL", html! { (count(last.waits.iter().sum())) }));
    }
    if subjects.requests {
        all.push(("Requests per second", html! { (format!("{:.1}", last.served as f64 * 1e9 / length)) }));
    }
    if subjects.alloc {
        all.push(("Allocated per second", html! { (bytes((last.allocated as f64 * 1e9 / length) as u64)) }));
    }
    html! {
        @if now.last_ns == 0 { p.soft { "The first figures come after a second." } }
        @else {
            p.soft { "The last " (span(now.last_ns)) " of all processes:" }
            (facts(&all))
        }
    }
}

/// The current state. Data attributes contain it for scripts: nanoseconds after the start.
pub(crate) fn section(header: &Header, now: &Now, wanted: &Wanted) -> Markup {
    let links = Links { header, wanted };
    let subjects = header.subjects;
    let columns = &now.columns;
    let from = links.seconds(columns.from_ns);
    let to = from + columns.width_ns as f64 * columns.cells.len() as f64 / 1e9;
    let since = |ns: u64| ns.saturating_sub(now.begun_ns);
    let shown = if wanted.other.is_some() { "B" } else { "shown below" };
    let marks = marks(&links, wanted, (now.begun_ns, now.at_ns), shown);
    let lanes =
        charts::lanes(columns, subjects, now.times_pauses, Kind::Shape, now.at_ns, charts::Counted::Ended);
    html! {
        section.now #live aria-labelledby="now" data-state=(if now.state.ended { "ended" } else { "live" })
            data-kept-from=(since(now.state.from_ns)) data-until=(since(now.at_ns)) data-dropped=(now.state.expired + now.state.displaced)
            data-cycles=(now.cycles) data-majors=(now.majors) {
            h2 #now { @if now.state.ended { "At the end" } @else { "Now" } }
            @if now.state.ended {
                p.note role="status" { "Tracing has ended. The kept data can be viewed until gctrace is stopped (Ctrl-C)." }
            }
            (kept(header, now))
            (glance(now, subjects))
            @if !columns.cells.is_empty() {
                (timeline_with("All processes, as far as is kept", Span { from, to }, &lanes, &marks))
            }
        }
    }
}

/// The message that scripts show if gctrace does not answer, the control that stops them, and links to times up to now.
pub(super) fn controls(wanted: &Wanted) -> Markup {
    let latest = |last: &str| {
        let asked = Asked { last: Some(last.to_owned()), from: None, to: None, ..wanted.asked.clone() };
        query(&asked, Some(word(wanted.of)))
    };
    let current = wanted.asked.last.as_deref();
    html! {
        p.note #stale role="alert" hidden {
            "gctrace does not answer any more: it has ended, or cannot be reached. What follows is what it saw last."
        }
        nav aria-label="Times up to now" {
            a href="./" aria-current=[(!wanted.window.cuts_time()).then_some("true")] { "All that is kept" }
            @for (last, name) in LATEST {
                a href=(latest(last)) aria-current=[(current == Some(last)).then_some("true")] { (name) }
            }
            button #hold type="button" aria-pressed="false" hidden { "Pause" }
        }
    }
}

/// A note about the time of the chosen part that is no longer kept.
pub(super) fn lacks(header: &Header, now: &Now, wanted: &Wanted) -> Markup {
    let from_ns = header.dump.as_ref().map_or(now.state.from_ns, |dump| dump.from_ns);
    let older =
        wanted.window.from_ns.is_some_and(|chosen_ns| chosen_ns < from_ns && chosen_ns >= now.begun_ns);
    let gone = wanted.window.to_ns.is_some_and(|to_ns| to_ns <= from_ns);
    html! {
        @if from_ns > now.begun_ns && (older || gone) {
            p.note role="alert" {
                @if gone { "This part is no longer kept: events before " (clock(header, from_ns)) " were dropped (" code { "--keep" } ")." }
                @else { "The beginning of this part is no longer kept: events since " (clock(header, from_ns)) " are shown." }
            }
        }
    }
}
