//! Drawing: from what is known to a screen. It decides nothing.

use gctrace_tunemygc::printable::{printable, printable_part};
use ratatui::{
    Frame,
    layout::{Alignment, Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Cell, Clear, Paragraph, Row as TableRow, Sparkline, Table, TableState},
};

use super::{
    board::{BARS, Detail, LastCycle},
    rows::{Column, Row, count, time},
    view::View,
};
use crate::{dump::Dump, words::plural};

/// What is drawn.
pub(super) struct Shown<'a> {
    /// The rows, sorted and filtered.
    pub rows: &'a [Row],
    /// What the user has chosen.
    pub view: &'a View,
    /// Processes that are traced.
    pub processes: usize,
    /// Processes for which there was no room.
    pub dropped: u64,
    /// The last thing that gctrace had to say.
    pub message: Option<&'a str>,
    /// Now, `CLOCK_MONOTONIC` nanoseconds.
    pub now_ns: u64,
    /// The process that is looked at.
    pub detail: Option<&'a Detail>,
    /// Its threads, or why they are not known.
    pub threads: Option<&'a Result<Dump, String>>,
    /// Whether colours are wanted.
    pub colour: bool,
}

const KEYS: &str = " up down PgUp PgDn  move                  Enter  open a process or group
 < >                sort by a column      q Esc  back (Esc: clear the filter)
 c x m a            sort by CPU, longest pause, memory, allocation
 r                  reverse the order     /      filter by text
 g                  group by service, by container
 p Space            hold the screen       q      quit (or Ctrl-C)

 CPU%       of one CPU, last second       GC%    stopped for GC, last 10 s
 P99 MAX    GC pauses of the last minute  GVL%   threads waiting, last 10 s
 ALLOC/s    objects allocated between            (start with --gvl)
            GCs of the last 5 s           -      not known
 LIVE FREE  heap slots after the last GC";

/// Draws everything.
pub(super) fn draw(frame: &mut Frame<'_>, shown: &Shown<'_>) {
    let [head, body, foot] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(1), Constraint::Length(1)])
            .areas(frame.area());
    header(frame, head, shown);
    match shown.detail {
        Some(detail) => detail_page(frame, body, shown, detail),
        None if shown.view.detail.is_some() => {
            frame.render_widget(Paragraph::new("\n  the process has ended (q: back)"), body);
        }
        None if shown.rows.is_empty() => nothing(frame, body, shown),
        None => table(frame, body, shown),
    }
    footer(frame, foot, shown);
    if shown.view.help {
        let [_, middle, _] =
            Layout::vertical([Constraint::Fill(1), Constraint::Length(14), Constraint::Fill(1)]).areas(body);
        let [_, middle, _] =
            Layout::horizontal([Constraint::Fill(1), Constraint::Length(80), Constraint::Fill(1)])
                .areas(middle);
        frame.render_widget(Clear, middle);
        frame
            .render_widget(Paragraph::new(KEYS).block(Block::bordered().title(" keys and columns ")), middle);
    }
}

fn strong() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

fn header(frame: &mut Frame<'_>, area: Rect, shown: &Shown<'_>) {
    let mut text = format!("gctrace top  {}", plural(shown.processes as u64, "Ruby process"));
    if shown.dropped > 0 {
        text.extend([", ", &shown.dropped.to_string(), " more not shown"]);
    }
    let view = shown.view;
    if !view.filter.is_empty() || view.editing {
        text.extend(["  filter: ", &printable(&view.filter), if view.editing { "_" } else { "" }]);
    }
    if view.paused {
        text.push_str("  HELD (p: continue)");
    }
    frame.render_widget(Paragraph::new(text).style(strong()), area);
    let by = format!("{} by {} ", view.group.name(), view.sort.heading());
    frame.render_widget(Paragraph::new(by).alignment(Alignment::Right), area);
}

fn footer(frame: &mut Frame<'_>, area: Rect, shown: &Shown<'_>) {
    let keys = if shown.view.detail.is_some() {
        "q back  up/down threads  p hold  ? help"
    } else {
        "q quit  Enter open  < > sort  r reverse  / filter  g group  p hold  ? help"
    };
    let text = shown.message.map_or_else(|| keys.to_owned(), |said| printable(said).into_owned());
    frame.render_widget(Paragraph::new(text).style(Style::new().add_modifier(Modifier::DIM)), area);
}

fn nothing(frame: &mut Frame<'_>, area: Rect, shown: &Shown<'_>) {
    let text = if shown.processes == 0 {
        "\n  No selected Ruby process runs. New ones appear here."
    } else {
        "\n  No row matches the filter (Esc clears it)."
    };
    frame.render_widget(Paragraph::new(text), area);
}

fn table(frame: &mut Frame<'_>, area: Rect, shown: &Shown<'_>) {
    let wide = area.width >= 120;
    let heading = |column: Column| {
        let mark = if column == shown.view.sort { "▾" } else { "" };
        let text = format!("{}{mark}", column.heading());
        let line = if column == Column::Name { Line::from(text) } else { Line::from(text).right_aligned() };
        Cell::from(line)
    };
    let mut headings: Vec<Cell<'_>> = Column::ALL.into_iter().map(heading).collect();
    let mut widths: Vec<Constraint> = Column::ALL
        .into_iter()
        .map(|column| match column {
            Column::Name => Constraint::Fill(1),
            _ => Constraint::Length(column.width() - 1),
        })
        .collect();
    if wide {
        headings.extend(["SERVICE", "CONTAINER", "RUBY", "PAUSES, LAST MINUTE"].map(Cell::from));
        widths.extend([16, 14, 7, 30].map(Constraint::Length));
    }
    let rows = shown.rows.iter().map(|row| {
        let mut cells: Vec<Cell<'_>> =
            Column::ALL.into_iter().map(|column| cell(column, row, shown.colour)).collect();
        if wide {
            let container = row.container.as_deref().unwrap_or("-");
            cells.push(printable_part(&row.service, 16).into());
            cells.push(printable_part(container, 14).into());
            cells.push(row.ruby.clone().into());
            cells.push(bars(&row.spark, 30).into());
        }
        TableRow::new(cells)
    });
    let table = Table::new(rows, widths)
        .header(TableRow::new(headings).style(strong()))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let cursor = shown.view.cursor.min(shown.rows.len().saturating_sub(1));
    let mut state = TableState::new().with_selected(Some(cursor));
    frame.render_stateful_widget(table, area, &mut state);
}

fn cell(column: Column, row: &Row, colour: bool) -> Cell<'static> {
    let text = column.text(row);
    if column == Column::Name {
        return Cell::from(text);
    }
    let hot = match column {
        Column::Gc => row.gc.map(|gc| (gc >= 10.0, gc >= 25.0)),
        Column::Max => row.max_ns.map(|ns| (ns >= 50_000_000, ns >= 200_000_000)),
        Column::Gvl => row.gvl.map(|gvl| (gvl >= 25.0, gvl >= 100.0)),
        _ => None,
    };
    let style = match hot.filter(|_| colour) {
        Some((_, true)) => Style::new().fg(Color::Red),
        Some((true, _)) => Style::new().fg(Color::Yellow),
        _ => Style::new(),
    };
    Cell::from(Line::from(Span::styled(text, style)).right_aligned())
}

/// The last values as one line of bars.
fn bars(values: &[u64], width: usize) -> String {
    const STEPS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let last = values.get(values.len().saturating_sub(width)..).unwrap_or_default();
    let most = last.iter().copied().max().unwrap_or_default();
    let bar = |value: u64| match value {
        0 => ' ',
        _ => STEPS[((value * 8).div_ceil(most.max(1)) as usize).clamp(1, 8) - 1],
    };
    last.iter().map(|&value| bar(value)).collect()
}

fn detail_page(frame: &mut Frame<'_>, area: Rect, shown: &Shown<'_>, detail: &Detail) {
    let [facts, sparks, middle, threads] = Layout::vertical([
        Constraint::Length(3),
        Constraint::Length(2),
        Constraint::Percentage(40),
        Constraint::Fill(1),
    ])
    .areas(area);
    frame.render_widget(Paragraph::new(facts_of(&detail.row)), facts);
    let [pauses, cpu] = Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).areas(sparks);
    let row = &detail.row;
    for (area, data, title) in
        [(pauses, &row.spark, "GC pauses, last minute"), (cpu, &detail.cpu_history, "CPU, last minute")]
    {
        let [label, line] = Layout::vertical([Constraint::Length(1), Constraint::Length(1)]).areas(area);
        frame.render_widget(Paragraph::new(title).style(strong()), label);
        let width = usize::from(line.width);
        let from = data.len().saturating_sub(width);
        let padding = std::iter::repeat_n(0, width.saturating_sub(data.len()));
        frame.render_widget(Sparkline::default().data(padding.chain(data[from..].iter().copied())), line);
    }
    let [methods, right] =
        Layout::horizontal([Constraint::Percentage(45), Constraint::Percentage(55)]).areas(middle);
    frame.render_widget(Paragraph::new(methods_of(detail, methods)), methods);
    let [cycles, histogram] = Layout::vertical([Constraint::Fill(1), Constraint::Length(3)]).areas(right);
    frame.render_widget(Paragraph::new(cycles_of(detail, cycles, shown.now_ns)), cycles);
    frame.render_widget(Paragraph::new(histogram_of(detail)), histogram);
    frame.render_widget(Paragraph::new(threads_of(shown, threads)), threads);
}

fn facts_of(row: &Row) -> Vec<Line<'static>> {
    let value = |column: Column| format!("{} {}", column.heading(), column.text(row));
    let values =
        |columns: &[Column]| columns.iter().map(|column| value(*column)).collect::<Vec<_>>().join("   ");
    let pid = row.pid.map(|pid| pid.to_string()).unwrap_or_default();
    let container = row.container.as_deref().map(|name| format!("  container {name}")).unwrap_or_default();
    let who = format!("{}  pid {pid}  Ruby {}  service {}{container}", row.name, row.ruby, row.service);
    vec![
        Line::styled(printable(&who).into_owned(), strong()),
        Line::from(values(&[Column::Cpu, Column::Gc, Column::P99, Column::Max, Column::Gvl])),
        Line::from(format!(
            "{}   {} GCs seen",
            values(&[Column::Alloc, Column::Rss, Column::Live, Column::Free]),
            row.cycles
        )),
    ]
}

fn methods_of(detail: &Detail, area: Rect) -> Vec<Line<'static>> {
    let mut lines = vec![Line::styled("CPU% HOTTEST METHODS NOW", strong())];
    let all: u64 = detail.methods.iter().map(|(_, ns)| ns).sum();
    if all == 0 {
        lines.push(Line::from("   - no CPU time was sampled"));
    }
    let room = usize::from(area.height).saturating_sub(1);
    for (name, ns) in detail.methods.iter().take(room) {
        let name = printable_part(name, usize::from(area.width).saturating_sub(7));
        lines.push(Line::from(format!("{:>4.0} {name}", *ns as f64 * 100.0 / all as f64)));
    }
    lines
}

fn cycles_of(detail: &Detail, area: Rect, now_ns: u64) -> Vec<Line<'static>> {
    let mut lines = vec![Line::styled("LAST GCs   AGE    STOP REASON     LINE", strong())];
    if detail.cycles.is_empty() {
        lines.push(Line::from("none since gctrace top started"));
    }
    let room = usize::from(area.height).saturating_sub(1);
    for LastCycle { count, kind, reason, ts_ns, pause_ns, line, .. } in detail.cycles.iter().take(room) {
        let age = now_ns.saturating_sub(*ts_ns) / 1_000_000_000;
        let kind = kind.get(..3).unwrap_or(kind);
        let at = line.as_deref().unwrap_or("-");
        let text =
            format!("{kind} {count:<6}{age:>4}s {:>7} {:<10} {at}", time(*pause_ns), reason.unwrap_or("-"));
        lines.push(Line::from(printable_part(&text, usize::from(area.width))));
    }
    lines
}

fn histogram_of(detail: &Detail) -> Vec<Line<'static>> {
    let names =
        BARS.map(|end| if end == u64::MAX { "more".to_owned() } else { format!("<{}", time_bound(end)) });
    let right = |texts: &[String]| texts.iter().fold(String::new(), |line, text| format!("{line}{text:>7}"));
    let head = right(&names);
    let counts = right(&detail.bars.map(|n| count(n as f64)));
    vec![Line::styled("PAUSES, LAST MINUTE", strong()), Line::from(head), Line::from(counts)]
}

fn time_bound(ns: u64) -> String {
    if ns < 1_000_000 { format!("{}us", ns / 1_000) } else { format!("{}ms", ns / 1_000_000) }
}

fn threads_of(shown: &Shown<'_>, area: Rect) -> Vec<Line<'static>> {
    let dump = match shown.threads {
        None => return vec![Line::styled("THREADS", strong()), Line::from("reading …")],
        Some(Err(why)) => {
            return vec![Line::styled("THREADS", strong()), Line::from(printable(why).into_owned())];
        }
        Some(Ok(dump)) => dump,
    };
    let threads: Vec<_> = dump.threads.iter().filter(|thread| thread.ruby.is_some()).collect();
    let title = format!("{} AND WHAT EACH DOES", plural(threads.len() as u64, "THREAD").to_uppercase());
    let mut lines = vec![Line::styled(title, strong())];
    let room = usize::from(area.height).saturating_sub(1);
    let skipped = shown.view.scroll.min(threads.len().saturating_sub(room));
    for thread in threads.into_iter().skip(skipped).take(room) {
        let frames = thread.ruby.iter().flat_map(|ruby| &ruby.frames);
        let at = frames
            .clone()
            .next()
            .map(|leaf| {
                let place = frames.clone().find_map(|frame| Some((frame.file.as_deref()?, frame.line)));
                let place =
                    place.map(|(file, line)| format!(" {}:{line}", file.rsplit('/').next().unwrap_or(file)));
                format!("{}{}", leaf.name, place.unwrap_or_default())
            })
            .unwrap_or_default();
        // What does not fit is said in full where there is room.
        let doing = if area.width >= 120 { crate::dump::doing(dump, thread) } else { String::new() };
        let text = format!(
            "{:>8} {:<15} {:<10} {at}  {doing}",
            thread.tid.map_or_else(|| "-".to_owned(), |tid| tid.to_string()),
            printable_part(thread.name(), 14),
            thread.state().name(),
        );
        lines.push(Line::from(printable_part(&text, usize::from(area.width))));
    }
    lines
}
