//! Layout of the screen, for drawing and for finding what was clicked. Pure.

use ratatui::layout::{Constraint, Layout, Rect};

use super::{
    rows::{Column, Traced},
    view::{Panel, Spot, View},
};

/// Text columns that are shown if there is room besides all numbers, with their widths, most important first.
pub(super) const TEXTS: [(&str, u16); 4] =
    [("SERVICE", 16), ("CONTAINER", 14), ("RUBY", 7), ("PAUSES, LAST 30 s", 30)];
/// Minimum width of the name, with the gap before it, that text columns leave.
const NAME: u16 = 16;
/// Width of the histogram of pauses, with one spare column.
const HISTOGRAM: u16 = 50;
/// Minimum number of lines of a panel of a process, including its title, for several panels to be shown.
const PANEL: u16 = 7;

/// The screen: first line, body, last line.
pub(super) fn page(screen: Rect) -> [Rect; 3] {
    Layout::vertical([Constraint::Length(1), Constraint::Min(1), Constraint::Length(1)]).areas(screen)
}

/// The columns of the table.
pub(super) struct Columns {
    /// Columns by which rows can be sorted.
    pub sortable: Vec<Column>,
    /// Number of [`TEXTS`] that follow them.
    pub texts: usize,
    /// Width of the name.
    pub name: u16,
    /// Widths of all cells.
    pub widths: Vec<Constraint>,
}

/// Columns of a table of this width: numbers first, then texts as far as they fit. A wider table has all columns of a narrower one.
pub(super) fn columns(width: u16, view: &View) -> Columns {
    let sortable = Column::shown(width, view.group, view.traced, view.sort);
    let numbers: u16 = sortable.iter().filter(|&&column| column != Column::Name).map(|c| c.width()).sum();
    let mut room = width.saturating_sub(numbers);
    let mut texts = 0;
    if sortable.len() == view.sortable().len() {
        let fits = |&&(_, text): &&(&str, u16)| {
            let fits = room > NAME + text;
            room -= if fits { text + 1 } else { 0 };
            fits
        };
        texts = TEXTS.iter().take_while(fits).count();
    }
    let width = |column: &Column| match column {
        Column::Name => Constraint::Fill(1),
        _ => Constraint::Length(column.width() - 1),
    };
    let beside = TEXTS[..texts].iter().map(|&(_, text)| Constraint::Length(text));
    let widths = sortable.iter().map(width).chain(beside).collect();
    Columns { sortable, texts, name: room, widths }
}

/// Number of rows above the first visible one, such that the row under the cursor is visible.
pub(super) fn skipped(body: Rect, cursor: usize) -> usize {
    let room = usize::from(body.height.saturating_sub(1)).max(1);
    (cursor + 1).saturating_sub(room)
}

/// Areas of the page of one process.
pub(super) struct Process {
    /// Its figures.
    pub facts: Rect,
    /// Its last minute.
    pub sparks: Rect,
    /// Its methods.
    pub methods: Rect,
    /// Its last cycles.
    pub cycles: Rect,
    /// Its pauses by length.
    pub histogram: Rect,
    /// Its visible panels.
    pub panels: Vec<(Panel, Rect)>,
}

/// The page of one process.
pub(super) fn process(body: Rect, view: &View) -> Process {
    let [facts, sparks, middle, rest] = Layout::vertical([
        Constraint::Length(3),
        Constraint::Length(2),
        Constraint::Percentage(40),
        Constraint::Fill(1),
    ])
    .areas(body);
    let methods = (middle.width * 9 / 20).min(middle.width.saturating_sub(HISTOGRAM));
    let [methods, right] =
        Layout::horizontal([Constraint::Length(methods), Constraint::Fill(1)]).areas(middle);
    let [cycles, histogram] = Layout::vertical([Constraint::Fill(1), Constraint::Length(3)]).areas(right);
    let all = Panel::of(view.traced);
    let panels = if rest.height >= PANEL * all.len() as u16 {
        let areas = Layout::vertical(all.iter().map(|_| Constraint::Fill(1))).split(rest);
        all.into_iter().zip(areas.iter().copied()).collect()
    } else {
        vec![(view.panel, rest)]
    };
    Process { facts, sparks, methods, cycles, histogram, panels }
}

/// What is at a position of a screen with this number of rows.
pub(super) fn spot(screen: Rect, view: &View, rows: usize, (x, y): (u16, u16)) -> Spot {
    let [_, body, _] = page(screen);
    let inside = |area: Rect| area.contains((x, y).into());
    if view.help || !inside(body) {
        return Spot::Other;
    }
    if view.detail.is_some() {
        let shown = process(body, view).panels;
        let hidden = shown.len() < Panel::of(view.traced).len();
        return match shown.first() {
            Some((_, area)) if hidden && inside(Rect { height: 1, ..*area }) => Spot::Panels,
            _ => Spot::Other,
        };
    }
    if y == body.y {
        let Columns { sortable: columns, widths, .. } = columns(body.width, view);
        let areas = Layout::horizontal(widths).spacing(1).split(Rect { height: 1, ..body });
        // The gap in front of a column belongs to it.
        let at = areas.iter().position(|area| x < area.x + area.width);
        return at.and_then(|at| columns.get(at)).map_or(Spot::Other, |&column| Spot::Heading(column));
    }
    let row = usize::from(y - body.y - 1) + skipped(body, view.cursor.min(rows.saturating_sub(1)));
    if row < rows { Spot::Row(row) } else { Spot::Other }
}

impl Panel {
    /// The panels that exist, depending on what is traced.
    pub(super) fn of(traced: Traced) -> Vec<Self> {
        let is_there = |panel: &Self| match panel {
            Self::Threads => true,
            Self::Requests => traced.requests,
            Self::Blocked => traced.gvl,
        };
        [Self::Threads, Self::Requests, Self::Blocked].into_iter().filter(is_there).collect()
    }
}
