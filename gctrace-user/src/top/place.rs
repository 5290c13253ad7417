//! Where things are on the screen: for those who draw, and for those who ask what was clicked. Pure.

use ratatui::layout::{Constraint, Layout, Rect};

use super::{
    rows::{Column, Traced},
    view::{Panel, Spot, View},
};

/// Columns from which on a table has more than numbers.
const WIDE: u16 = 120;
/// Widths of the texts of a wide table: service, container, Ruby, and pauses second by second.
pub(super) const TEXTS: [u16; 4] = [16, 14, 7, 30];
/// Columns of the histogram of pauses, with one to spare.
const HISTOGRAM: u16 = 50;
/// Lines that a panel of a process needs, with its title, to be shown beside others.
const PANEL: u16 = 7;

/// The screen: first line, body, last line.
pub(super) fn page(screen: Rect) -> [Rect; 3] {
    Layout::vertical([Constraint::Length(1), Constraint::Min(1), Constraint::Length(1)]).areas(screen)
}

/// Whether the table has service, container, Ruby and pauses second by second.
pub(super) fn is_wide(width: u16) -> bool {
    width >= WIDE
}

/// Columns of the table in so much room, and the widths of all its cells.
pub(super) fn columns(width: u16, view: &View) -> (Vec<Column>, Vec<Constraint>) {
    let texts = if is_wide(width) { &TEXTS[..] } else { &[] };
    let room = width.saturating_sub(texts.iter().map(|text| text + 1).sum());
    let columns = Column::shown(room, view.group, view.traced);
    let width = |column: &Column| match column {
        Column::Name => Constraint::Fill(1),
        _ => Constraint::Length(column.width() - 1),
    };
    let widths = columns.iter().map(width).chain(texts.iter().map(|&text| Constraint::Length(text)));
    let widths = widths.collect();
    (columns, widths)
}

/// Rows above the first that is shown, so that the one under the cursor is.
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
    /// Its panels, those that are shown.
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

/// What is at this place of a screen with this number of rows.
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
        let (columns, widths) = columns(body.width, view);
        let areas = Layout::horizontal(widths).spacing(1).split(Rect { height: 1, ..body });
        // The gap before a column belongs to it.
        let at = areas.iter().position(|area| x < area.x + area.width);
        return at.and_then(|at| columns.get(at)).map_or(Spot::Other, |&column| Spot::Heading(column));
    }
    let row = usize::from(y - body.y - 1) + skipped(body, view.cursor.min(rows.saturating_sub(1)));
    if row < rows { Spot::Row(row) } else { Spot::Other }
}

impl Panel {
    /// Those that there are, by what is traced.
    pub(super) fn of(traced: Traced) -> Vec<Self> {
        let is_there = |panel: &Self| match panel {
            Self::Threads => true,
            Self::Requests => traced.requests,
            Self::Blocked => traced.gvl,
        };
        [Self::Threads, Self::Requests, Self::Blocked].into_iter().filter(is_there).collect()
    }
}
