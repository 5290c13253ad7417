//! Draws the page of one process. It makes no decisions.

use std::sync::Arc;

use gctrace_tunemygc::printable::printable;
use ratatui::{
    Frame,
    layout::{Alignment, Constraint, Layout, Rect},
    text::Line,
    widgets::Paragraph,
};

use super::{Shown, bars, cut, filled, strong};
use crate::{
    model::gvl::GvlWho,
    top::{
        board::{BARS, Detail, SECOND, WINDOW, last_cycle::LastCycle, requests::Figures},
        place,
        rows::{Column, Row, count, rate, share, time},
        view::Panel,
    },
    words::plural,
};

/// Draws the page.
pub(in crate::top) fn page(frame: &mut Frame<'_>, area: Rect, shown: &Shown<'_>, detail: &Detail) {
    let areas = place::process(area, shown.view);
    frame.render_widget(Paragraph::new(facts_of(shown, &detail.row, area.width)), areas.facts);
    sparks(frame, areas.sparks, detail);
    frame.render_widget(Paragraph::new(methods_of(detail, areas.methods)), areas.methods);
    frame.render_widget(Paragraph::new(cycles_of(detail, areas.cycles, shown.now_ns)), areas.cycles);
    frame.render_widget(Paragraph::new(histogram_of(detail)), areas.histogram);
    let hidden = Panel::of(shown.view.traced).len() - areas.panels.len();
    for (panel, area) in areas.panels {
        let (title, mut lines) = match panel {
            Panel::Threads => threads_of(shown, area),
            Panel::Requests => requests_of(detail, area),
            Panel::Blocked => blocked_of(detail, area),
        };
        let more = if hidden > 0 { format!("   (Tab: {hidden} more)") } else { String::new() };
        let room = usize::from(area.height).saturating_sub(1);
        let skipped = if panel == shown.view.panel { shown.view.scroll } else { 0 };
        let skipped = skipped.min(lines.len().saturating_sub(room));
        lines.truncate(skipped + room);
        lines.drain(..skipped);
        lines.insert(0, Line::styled(title + &more, strong()));
        frame.render_widget(Paragraph::new(lines), area);
    }
}

/// The last minute, as far as there is room, with the value of the highest bar.
fn sparks(frame: &mut Frame<'_>, area: Rect, detail: &Detail) {
    // There is a column between the two.
    let areas = Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).spacing(1).areas::<2>(area);
    let pauses = |us: u64| format!("{}/s", time(us * 1_000));
    let cpu = |hundredths: u64| format!("{}%", share(hundredths as f64 / 100.0));
    let both: [(_, _, &dyn Fn(u64) -> String); 2] =
        [("GC pauses", &detail.row.spark, &pauses), ("CPU", &detail.cpu_history, &cpu)];
    for (area, (title, data, scale)) in areas.into_iter().zip(both) {
        let [label, line] = Layout::vertical([Constraint::Length(1), Constraint::Length(1)]).areas(area);
        let width = usize::from(line.width);
        let shown = &data[data.len().saturating_sub(width)..];
        let of = if width < WINDOW { format!("last {width} s") } else { "last minute".to_owned() };
        let most = shown.iter().copied().max().filter(|&most| most > 0);
        let most = most.map(|most| format!(" (█ {})", scale(most))).unwrap_or_default();
        let title = cut(&format!("{title}, {of}{most}"), label.width);
        frame.render_widget(Paragraph::new(title).style(strong()), label);
        frame.render_widget(Paragraph::new(bars(shown, width)).alignment(Alignment::Right), line);
    }
}

fn facts_of(shown: &Shown<'_>, row: &Row, width: u16) -> Vec<Line<'static>> {
    let value = |column: Column| format!("{} {}", column.heading(), column.text(row));
    let values =
        |columns: &[Column]| columns.iter().map(|column| value(*column)).collect::<Vec<_>>().join("  ");
    let pid = row.pid.map(|pid| pid.to_string()).unwrap_or_default();
    let container = row.container.as_deref().map(|name| format!("  container {name}")).unwrap_or_default();
    let rest = format!("  pid {pid}  Ruby {}  service {}{container}", row.ruby, row.service);
    // A long name leaves room for pid and version, and for the rest if possible.
    let taken = Line::from(printable(&rest)).width().try_into().unwrap_or(u16::MAX);
    let name = cut(&row.name, width.saturating_sub(taken).max(width / 3));
    let mut first = vec![Column::Cpu, Column::Gc, Column::P99, Column::Max];
    if shown.view.traced.requests {
        first.extend([Column::Requests, Column::RequestP99]);
    }
    vec![
        Line::styled(cut(&format!("{name}{rest}"), width), strong()),
        Line::from(values(&first)),
        Line::from(format!(
            "{}  {} seen",
            values(&[Column::Gvl, Column::Alloc, Column::Rss, Column::Live, Column::Free]),
            row.cycles.map_or_else(|| "- GCs".to_owned(), |cycles| plural(cycles, "GC"))
        )),
    ]
}

fn methods_of(detail: &Detail, area: Rect) -> Vec<Line<'static>> {
    let all: u64 = detail.methods.iter().map(|(_, ns)| ns).sum();
    if all == 0 {
        return vec![Line::styled("HOTTEST METHODS", strong()), Line::from("   - no CPU time was sampled")];
    }
    let (samples, ns) = detail.sampled;
    let head = format!("  % OF {} CPU SAMPLES, {:.0} s", count(samples as f64), ns as f64 / SECOND as f64);
    let mut lines = vec![Line::styled(cut(&head, area.width), strong())];
    let room = usize::from(area.height).saturating_sub(1);
    for (name, ns) in detail.methods.iter().take(room) {
        let line = format!("{:>4.0} {name}", *ns as f64 * 100.0 / all as f64);
        lines.push(Line::from(cut(&line, area.width.saturating_sub(1))));
    }
    lines
}

fn cycles_of(detail: &Detail, area: Rect, now_ns: u64) -> Vec<Line<'static>> {
    let mut lines = vec![Line::styled("LAST GCs   AGE    STOP REASON     LINE", strong())];
    if detail.cycles.is_empty() {
        let seen = detail.row.cycles.is_some();
        lines.push(Line::from(if seen {
            "none since gctrace top started"
        } else {
            "- not seen of this Ruby"
        }));
    }
    let room = usize::from(area.height).saturating_sub(1);
    for LastCycle { count, kind, reason, ts_ns, pause_ns, line, .. } in detail.cycles.iter().take(room) {
        let age = now_ns.saturating_sub(*ts_ns) / 1_000_000_000;
        let kind = kind.get(..3).unwrap_or(kind);
        let at = line.as_deref().unwrap_or("-");
        let text =
            format!("{kind} {count:<6}{age:>4}s {:>7} {:<10} {at}", time(*pause_ns), reason.unwrap_or("-"));
        lines.push(Line::from(cut(&text, area.width)));
    }
    lines
}

fn histogram_of(detail: &Detail) -> Vec<Line<'static>> {
    let names =
        BARS.map(|end| if end == u64::MAX { "more".to_owned() } else { format!("<{}", time_bound(end)) });
    let right = |texts: &[String]| texts.iter().fold(String::new(), |line, text| format!("{line}{text:>7}"));
    let head = right(&names);
    let counts =
        detail.bars.map_or_else(|| BARS.map(|_| "-".to_owned()), |bars| bars.map(|n| count(n as f64)));
    let counts = right(&counts);
    vec![Line::styled("PAUSES, LAST MINUTE", strong()), Line::from(head), Line::from(counts)]
}

fn time_bound(ns: u64) -> String {
    if ns < 1_000_000 { format!("{}us", ns / 1_000) } else { format!("{}ms", ns / 1_000_000) }
}

/// A title, and a line for each thread.
fn threads_of(shown: &Shown<'_>, area: Rect) -> (String, Vec<Line<'static>>) {
    let dump = match shown.threads {
        None => return ("THREADS".to_owned(), vec![Line::from("reading …")]),
        Some(Err(why)) => return ("THREADS".to_owned(), vec![Line::from(printable(why).into_owned())]),
        Some(Ok(dump)) => dump,
    };
    let threads: Vec<_> = dump.threads.iter().filter(|thread| thread.ruby.is_some()).collect();
    let title = format!("{} AND WHAT EACH DOES", plural(threads.len() as u64, "THREAD").to_uppercase());
    let mut lines = Vec::new();
    for thread in threads {
        let frames = thread.ruby.iter().flat_map(|ruby| &ruby.frames);
        let at = frames
            .clone()
            .next()
            .map(|leaf| {
                let place =
                    frames.clone().find_map(|frame| Some((frame.file.as_deref()?, frame.colon_line())));
                let place =
                    place.map(|(file, line)| format!(" {}{line}", file.rsplit('/').next().unwrap_or(file)));
                format!("{}{}", leaf.name, place.unwrap_or_default())
            })
            .unwrap_or_default();
        // On a wide screen the state is described in full.
        let doing = if area.width >= 120 { crate::dump::doing(dump, thread) } else { String::new() };
        let unnamed = thread.tid.is_none() && thread.name().is_empty();
        let name = if unnamed { thread.id() } else { thread.name().to_owned() };
        let text = format!(
            "{:>8} {} {:<10} {at}  {doing}",
            thread.tid.map_or_else(|| "-".to_owned(), |tid| tid.to_string()),
            filled(&name, 16),
            thread.state().name(),
        );
        lines.push(Line::from(cut(&text, area.width)));
    }
    (title, lines)
}

/// A title, and a line for each endpoint.
fn requests_of(detail: &Detail, area: Rect) -> (String, Vec<Line<'static>>) {
    let mut title = "REQUESTS, LAST MINUTE".to_owned();
    let (unended, no_room) = detail.uncounted;
    if unended > 0 {
        title.extend([", ", &unended.to_string(), " without an end"]);
    }
    if no_room > 0 {
        title.extend([", ", &no_room.to_string(), " of more endpoints"]);
    }
    if detail.endpoints.is_empty() {
        return (title, vec![Line::from("none")]);
    }
    let line = |cells: [String; 6], name: &str| {
        let cells = cells.iter().fold(String::new(), |line, cell| format!("{line}{cell:>8}"));
        Line::from(cut(&format!("{cells}  {name}"), area.width))
    };
    let heading = line(["REQ/s", "P50", "P99", "MAX", "GC%", "GVL%"].map(str::to_owned), "ENDPOINT");
    let known = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let endpoint = |(name, figures): &(Arc<str>, Figures)| {
        let Figures { rate: number, p50_ns, p99_ns, max_ns, gc, gvl, .. } = figures;
        let times = [p50_ns, p99_ns, max_ns].map(|ns| known(ns.map(time)));
        let [p50, p99, max] = times;
        line([known(number.map(rate)), p50, p99, max, known(gc.map(share)), known(gvl.map(share))], name)
    };
    (title, std::iter::once(heading).chain(detail.endpoints.iter().map(endpoint)).collect())
}

/// A title, and a line for each pair of threads.
fn blocked_of(detail: &Detail, area: Rect) -> (String, Vec<Line<'static>>) {
    let of =
        detail.blocked_most.map_or_else(|| "LAST MINUTE".to_owned(), |most| format!("LAST {most} WAITS"));
    let title = format!("WHO WAITED LONG FOR THE GVL, AND FOR WHOM, {of}");
    if detail.blocked.is_empty() {
        return (title, vec![Line::from("nobody")]);
    }
    let (narrow, who) = (area.width < 120, |who: &GvlWho| format!("{} {}", who.tid, who.comm));
    let room = if narrow { 17 } else { 24 };
    let line = |[time, waits, max, waited, held, place]: [&str; 6]| {
        let max = if narrow { String::new() } else { format!("{max:>8}") };
        let (waited, held) = (filled(waited, room), filled(held, room));
        let text = format!("{time:>8}{waits:>7}{max}  {waited} {held} {place}");
        Line::from(cut(&text, area.width))
    };
    let mut lines = vec![line(["TIME", "WAITS", "MAX", "WAITED", "FOR", "WHERE"])];
    for (pair, waited) in &detail.blocked {
        let holder = pair.holder.as_ref().map_or_else(|| "an unknown thread".to_owned(), who);
        let (waits, place) = (count(waited.count as f64), pair.place.as_deref().unwrap_or("-"));
        let (total, max) = (time(waited.ns), time(waited.max_ns));
        lines.push(line([&total, &waits, &max, &who(&pair.waiter), &holder, place]));
    }
    (title, lines)
}
