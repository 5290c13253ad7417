//! Draws the data on a screen. It makes no decisions.

use gctrace_tunemygc::printable::printable;
use ratatui::{
    Frame,
    layout::{Alignment, Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Cell, Clear, Paragraph, Row as TableRow, Table, TableState},
};
use unicode_truncate::UnicodeTruncateStr as _;

use super::{
    board::Detail,
    place::{self, Columns, TEXTS},
    rows::{Column, Row},
    view::View,
};
use crate::{dump::Dump, words::plural};

mod process;

/// What is drawn.
pub(super) struct Shown<'a> {
    /// The rows, sorted and filtered.
    pub rows: &'a [Row],
    /// The user's choices.
    pub view: &'a View,
    /// Number of traced processes.
    pub processes: usize,
    /// Number of processes dropped because of the limit.
    pub dropped: u64,
    /// The last message of gctrace.
    pub message: Option<&'a str>,
    /// The current time, `CLOCK_MONOTONIC` nanoseconds.
    pub now_ns: u64,
    /// The process that is shown in detail.
    pub detail: Option<&'a Detail>,
    /// Its threads, or why they are unknown.
    pub threads: Option<&'a Result<Dump, String>>,
    /// Whether to use colours.
    pub colour: bool,
}

const KEYS: &str = " up down PgUp PgDn  move                  Enter  open a process or group
 < >                sort by a column      q Esc  back (Esc: clear a filter first)
 c x m a e          sort by CPU, longest pause, memory, allocation, REQ99
 r                  reverse the order     /      filter by text
 g                  group by service, by container, by endpoint
 Tab                of a process: threads, requests, waits for the GVL
 p Space            hold the screen       q      quit (or Ctrl-C)
 mouse              click: select, open; a heading: sort; wheel: move
                    (Shift: select text)  right: back

 CPU%       of one CPU, last second       GC%    stopped for GC, last 10 s
 P99 MAX    GC pauses of the last minute  GVL%   threads waiting, last 10 s
 ALLOC/s    objects allocated between            (start with --gvl)
            GCs of the last 5 s           REQ/s  requests and jobs, last 10 s
 LIVE FREE  heap slots after the last GC  REQ99  99th percentile of their times,
 -          not known                            last minute (--requests)";

/// Draws everything.
pub(super) fn draw(frame: &mut Frame<'_>, shown: &Shown<'_>) {
    let [head, body, foot] = place::page(frame.area());
    header(frame, head, shown);
    match shown.detail {
        Some(detail) => process::page(frame, body, shown, detail),
        None if shown.view.detail.is_some() => {
            frame.render_widget(Paragraph::new("\n  the process has ended (q: back)"), body);
        }
        None if shown.rows.is_empty() => nothing(frame, body, shown),
        None => table(frame, body, shown),
    }
    footer(frame, foot, shown);
    if shown.view.help {
        let [_, middle, _] =
            Layout::vertical([Constraint::Fill(1), Constraint::Length(18), Constraint::Fill(1)]).areas(body);
        let [_, middle, _] =
            Layout::horizontal([Constraint::Fill(1), Constraint::Length(80), Constraint::Fill(1)])
                .areas(middle);
        frame.render_widget(Clear, middle);
        frame
            .render_widget(Paragraph::new(KEYS).block(Block::bordered().title(" keys and columns ")), middle);
    }
}

/// Style of headings.
pub(super) fn strong() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

fn header(frame: &mut Frame<'_>, area: Rect, shown: &Shown<'_>) {
    let mut text = format!("gctrace top  {}", plural(shown.processes as u64, "Ruby process"));
    if shown.dropped > 0 {
        text.extend([", ", &shown.dropped.to_string(), " more not shown"]);
    }
    let view = shown.view;
    if let Some((group, name)) = &view.within {
        text.extend(["  ", group.singular(), ": ", &printable(name)]);
    }
    if !view.filter.is_empty() || view.editing {
        text.extend(["  filter: ", &printable(&view.filter), if view.editing { "_" } else { "" }]);
    }
    if view.paused {
        text.push_str("  HELD (p: continue)");
    }
    let text = Line::styled(text, strong());
    let order = if view.reversed { ", reversed" } else { "" };
    let by = Line::from(format!("{} by {}{order} ", view.group.name(), view.sort.heading()));
    let has_room = text.width() + 2 + by.width() <= area.width.into();
    frame.render_widget(text, area);
    // Without room it is omitted: the heading of the column is marked, too.
    if has_room {
        frame.render_widget(by.alignment(Alignment::Right), area);
    }
}

fn footer(frame: &mut Frame<'_>, area: Rect, shown: &Shown<'_>) {
    let keys = if shown.view.detail.is_some() {
        "q back  up/down scroll  Tab next panel  p hold  ? help"
    } else if shown.view.within.is_some() {
        "q back  Enter open  < > sort  r reverse  / filter  g group  p hold  ? help"
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
        "\n  No row matches (Esc shows all)."
    };
    frame.render_widget(Paragraph::new(text), area);
}

fn table(frame: &mut Frame<'_>, area: Rect, shown: &Shown<'_>) {
    let Columns { sortable, texts, name, widths } = place::columns(area.width, shown.view);
    let texts = &TEXTS[..texts];
    let heading = |column: Column| {
        let mark = match shown.view.reversed {
            _ if column != shown.view.sort => "",
            false => "▾",
            true => "▴",
        };
        let text = format!("{}{mark}", column.heading());
        let line = if column == Column::Name { Line::from(text) } else { Line::from(text).right_aligned() };
        Cell::from(line)
    };
    let headings = sortable.iter().map(|&column| heading(column));
    let headings: Vec<Cell<'_>> = headings.chain(texts.iter().map(|&(head, _)| Cell::from(head))).collect();
    let rows = shown.rows.iter().map(|row| {
        let cells = sortable.iter().map(|&column| cell(column, row, name, shown.colour));
        let container = row.container.as_deref().unwrap_or("-");
        let beside = texts.iter().zip(0..).map(|(&(_, width), at)| {
            let text = match at {
                0 => cut(&row.service, width),
                1 => cut(container, width),
                2 => cut(&row.ruby, width),
                _ => bars(&row.spark, width.into()),
            };
            Cell::from(text)
        });
        TableRow::new(cells.chain(beside))
    });
    let table = Table::new(rows, widths)
        .header(TableRow::new(headings).style(strong()))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let cursor = shown.view.cursor.min(shown.rows.len().saturating_sub(1));
    let mut state = TableState::new().with_selected(Some(cursor)).with_offset(place::skipped(area, cursor));
    frame.render_stateful_widget(table, area, &mut state);
}

/// A text on one line of visible characters, of at most this many columns. A text that is cut ends with a mark, because the beginning of a
/// number would be another number.
fn cut(text: &str, width: u16) -> String {
    let (text, width) = (printable(text), usize::from(width));
    if text.unicode_truncate(width).0.len() == text.len() {
        return text.into_owned();
    }
    match width.checked_sub(1) {
        Some(before) => format!("{}…", text.unicode_truncate(before).0),
        None => String::new(),
    }
}

/// The same, padded with spaces to that width.
fn filled(text: &str, width: u16) -> String {
    let mut text = cut(text, width);
    let taken = text.unicode_truncate(usize::MAX).1;
    text.extend(std::iter::repeat_n(' ', usize::from(width).saturating_sub(taken)));
    text
}

fn cell(column: Column, row: &Row, name: u16, colour: bool) -> Cell<'static> {
    if column == Column::Name {
        return Cell::from(cut(&row.name, name));
    }
    let text = column.text(row);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A cut text is marked and takes at most its columns: escaped and wide characters count as shown.
    #[test]
    fn cut_texts() {
        for (text, width, shown) in [
            ("shop.rb:134", 11, "shop.rb:134"),
            ("shop.rb:134", 10, "shop.rb:1…"),
            ("a\u{1b}b", 9, "a\\u{1b}b"),
            ("a\u{1b}b", 7, "a\\u{1b…"),
            ("日本語", 6, "日本語"),
            ("日本語", 5, "日本…"),
            ("日本語", 4, "日…"),
            ("e\u{301}te\u{301}", 3, "e\u{301}te\u{301}"),
            ("", 0, ""),
            ("a", 0, ""),
            ("ab", 1, "…"),
        ] {
            assert_eq!(cut(text, width), shown, "{text:?} in {width}");
        }
        assert_eq!((filled("日本", 6), filled("日本語", 4)), ("日本  ".to_owned(), "日… ".to_owned()));
    }
}
