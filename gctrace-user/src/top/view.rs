//! The user's choices, and the effects of keys and the mouse. Pure.

use crossterm::event::{KeyCode, KeyModifiers, MouseButton, MouseEventKind};

use super::rows::{Column, Group, Row, Traced, belongs, matches, sort};

/// Maximum number of characters of a filter.
const MOST_FILTER: usize = 64;

/// Number of rows that the wheel moves by.
const WHEEL: isize = 3;

/// A part of the page of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Panel {
    /// Its threads.
    #[default]
    Threads,
    /// Its requests by endpoint.
    Requests,
    /// Who waited for the GVL, and for whom.
    Blocked,
}

/// What is at a position of the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spot {
    /// The heading of a column.
    Heading(Column),
    /// The index of a row, visible or not.
    Row(usize),
    /// The titles of panels, if only one panel is shown.
    Panels,
    /// Anything else.
    Other,
}

/// The user's choices.
#[derive(Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a separate switch")]
pub(super) struct View {
    /// The column by which rows are sorted.
    pub sort: Column,
    /// Whether the order is reversed.
    pub reversed: bool,
    /// What a row represents.
    pub group: Group,
    /// If a group was opened: only its processes are shown.
    pub within: Option<(Group, String)>,
    /// Filter and cursor of the list of groups, restored when the group is left.
    pub outside: (String, usize),
    /// Only rows that contain this text are shown.
    pub filter: String,
    /// Whether keys edit the filter.
    pub editing: bool,
    /// Whether the screen is held.
    pub paused: bool,
    /// Whether the help is shown.
    pub help: bool,
    /// Index of the row under the cursor.
    pub cursor: usize,
    /// The process that is shown in detail.
    pub detail: Option<u32>,
    /// Its panel that is shown if there is room for only one.
    pub panel: Panel,
    /// Number of lines of that panel above the visible ones.
    pub scroll: usize,
    /// Which optional events are traced.
    pub traced: Traced,
}

/// What a key leads to, besides a change of the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The screen is drawn again.
    Draw,
    /// The program ends.
    Quit,
}

impl View {
    /// The rows as shown: filtered and sorted.
    pub(super) fn arranged(&self, rows: Vec<Row>) -> Vec<Row> {
        let shown = |row: &Row| {
            self.within.as_ref().is_none_or(|within| belongs(row, within)) && matches(row, &self.filter)
        };
        let mut rows: Vec<Row> = rows.into_iter().filter(shown).collect();
        sort(&mut rows, self.sort, self.reversed);
        rows
    }

    /// Handles a key that was pressed while these rows were shown.
    pub(super) fn key(&mut self, code: KeyCode, modifiers: KeyModifiers, rows: &[Row]) -> Answer {
        self.stay(rows.len());
        if modifiers.contains(KeyModifiers::CONTROL) {
            return if code == KeyCode::Char('c') { Answer::Quit } else { Answer::Draw };
        }
        if self.editing {
            self.edit(code);
            return Answer::Draw;
        }
        if self.help {
            self.help = false;
            return Answer::Draw;
        }
        match code {
            KeyCode::Char('q') if self.detail.is_none() && self.within.is_none() => return Answer::Quit,
            KeyCode::Char('q' | 'h') | KeyCode::Esc | KeyCode::Left | KeyCode::Backspace
                if self.detail.is_some() =>
            {
                self.detail = None;
            }
            KeyCode::Char('q') | KeyCode::Left | KeyCode::Backspace if self.within.is_some() => self.leave(),
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.help = true,
            KeyCode::Char('p' | ' ') => self.paused = !self.paused,
            KeyCode::Down | KeyCode::Char('j') => self.moved(1, rows.len()),
            KeyCode::Up | KeyCode::Char('k') => self.moved(-1, rows.len()),
            KeyCode::PageDown => self.moved(10, rows.len()),
            KeyCode::PageUp => self.moved(-10, rows.len()),
            KeyCode::Tab if self.detail.is_some() => self.next_panel(),
            KeyCode::Home => self.moved(isize::MIN / 2, rows.len()),
            KeyCode::End => self.moved(isize::MAX / 2, rows.len()),
            _ if self.detail.is_some() => {}
            KeyCode::Enter | KeyCode::Right => self.open(rows),
            KeyCode::Char('>' | '.') => self.sort = self.sort.moved(1, &self.sortable()),
            KeyCode::Char('<' | ',') => self.sort = self.sort.moved(-1, &self.sortable()),
            KeyCode::Char('r') => self.reversed = !self.reversed,
            KeyCode::Char('g') => self.regroup(),
            KeyCode::Char('/') => self.editing = true,
            KeyCode::Esc if self.filter.is_empty() => self.leave(),
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('c') => self.sort_by(Column::Cpu),
            KeyCode::Char('x') => self.sort_by(Column::Max),
            KeyCode::Char('m') => self.sort_by(Column::Rss),
            KeyCode::Char('a') => self.sort_by(Column::Alloc),
            KeyCode::Char('e') => self.sort_by(Column::RequestP99),
            _ => {}
        }
        Answer::Draw
    }

    /// Handles a mouse event at this position while these rows were shown. Returns whether there is something to draw.
    pub(super) fn mouse(&mut self, did: MouseEventKind, spot: Spot, rows: &[Row]) -> bool {
        self.stay(rows.len());
        match (did, spot) {
            (MouseEventKind::ScrollDown, _) => self.moved(WHEEL, rows.len()),
            (MouseEventKind::ScrollUp, _) => self.moved(-WHEEL, rows.len()),
            (MouseEventKind::Down(MouseButton::Left), _) if self.help => self.help = false,
            (MouseEventKind::Down(MouseButton::Left), Spot::Heading(column)) if self.sort == column => {
                self.reversed = !self.reversed;
            }
            (MouseEventKind::Down(MouseButton::Left), Spot::Heading(column)) => {
                (self.sort, self.reversed) = (column, false);
            }
            (MouseEventKind::Down(MouseButton::Left), Spot::Row(row)) if self.cursor == row => {
                self.open(rows);
            }
            (MouseEventKind::Down(MouseButton::Left), Spot::Row(row)) => self.cursor = row,
            (MouseEventKind::Down(MouseButton::Left), Spot::Panels) => self.next_panel(),
            (MouseEventKind::Down(MouseButton::Right), _) if self.detail.is_some() => self.detail = None,
            (MouseEventKind::Down(MouseButton::Right), _) => self.leave(),
            _ => return false,
        }
        true
    }

    /// The columns of the rows on a screen that is wide enough.
    pub(super) fn sortable(&self) -> Vec<Column> {
        Column::shown(u16::MAX, self.group, self.traced, self.sort)
    }

    /// Sorts by a column, if the rows have it.
    fn sort_by(&mut self, column: Column) {
        if self.sortable().contains(&column) {
            self.sort = column;
        }
    }

    fn regroup(&mut self) {
        self.within = None;
        self.group_by(self.group.next(self.traced));
    }

    fn group_by(&mut self, group: Group) {
        self.group = group;
        if !self.sortable().contains(&self.sort) {
            (self.sort, self.reversed) = (Column::Requests, false);
        }
    }

    /// Returns from the processes of a group to the groups.
    fn leave(&mut self) {
        let Some((group, _)) = self.within.take() else { return };
        (self.filter, self.cursor) = std::mem::take(&mut self.outside);
        self.group_by(group);
    }

    fn next_panel(&mut self) {
        let all = Panel::of(self.traced);
        let at = all.iter().position(|panel| *panel == self.panel).unwrap_or(0);
        self.panel = all.get((at + 1) % all.len().max(1)).copied().unwrap_or_default();
        self.scroll = 0;
    }

    fn edit(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.editing = false,
            KeyCode::Esc => {
                self.filter.clear();
                self.editing = false;
            }
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(c) if !c.is_control() && self.filter.chars().count() < MOST_FILTER => {
                self.filter.push(c);
            }
            _ => {}
        }
        self.cursor = 0;
    }

    /// Moves the cursor to the last row if there are fewer rows now, as it is drawn.
    fn stay(&mut self, rows: usize) {
        self.cursor = self.cursor.min(rows.saturating_sub(1));
    }

    fn moved(&mut self, by: isize, rows: usize) {
        if self.detail.is_some() {
            self.scroll = self.scroll.saturating_add_signed(by).min(1 << 16);
        } else {
            self.cursor = self.cursor.saturating_add_signed(by).min(rows.saturating_sub(1));
        }
    }

    /// Opens the row under the cursor: a process, the processes of a group, or those that serve an endpoint.
    fn open(&mut self, rows: &[Row]) {
        let Some(row) = rows.get(self.cursor) else { return };
        self.scroll = 0;
        if let Some(pid) = row.pid {
            self.detail = Some(pid);
        } else {
            self.within = Some((self.group, row.name.clone()));
            self.outside = (std::mem::take(&mut self.filter), std::mem::take(&mut self.cursor));
            self.group = Group::Process;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<Row> {
        let row =
            |pid, cpu| Row { pid: Some(pid), cpu: Some(cpu), name: format!("p{pid}"), ..Row::default() };
        vec![row(1, 5.0), row(2, 50.0), row(3, 0.5)]
    }

    /// Keys move, sort, filter, open and close; Ctrl-C quits everywhere.
    #[test]
    fn keys() {
        let mut view = View::default();
        let none = KeyModifiers::NONE;
        let shown = view.arranged(rows());
        assert_eq!(shown[0].pid, Some(2));
        for code in [KeyCode::Down, KeyCode::Char('j'), KeyCode::Char('j'), KeyCode::PageDown] {
            view.key(code, none, &shown);
        }
        assert_eq!(view.cursor, 2);
        view.key(KeyCode::Home, none, &shown);
        view.key(KeyCode::Enter, none, &shown);
        assert_eq!(view.detail, Some(2));
        // On the page of a process this key closes the page, and does not quit.
        assert_eq!(view.key(KeyCode::Char('q'), none, &shown), Answer::Draw);
        assert_eq!(view.detail, None);
        for code in ['/', 'p', '3', 'q'] {
            assert_eq!(view.key(KeyCode::Char(code), none, &shown), Answer::Draw);
        }
        view.key(KeyCode::Backspace, none, &shown);
        view.key(KeyCode::Enter, none, &shown);
        assert_eq!((view.filter.as_str(), view.editing), ("p3", false));
        let filtered = view.arranged(rows());
        assert_eq!(filtered.len(), 1);
        view.key(KeyCode::Esc, none, &filtered);
        view.key(KeyCode::Char('r'), none, &filtered);
        assert_eq!(view.arranged(rows())[0].pid, Some(3));
        view.key(KeyCode::Char('?'), none, &shown);
        assert!(view.help);
        assert_eq!(view.key(KeyCode::Char('q'), none, &shown), Answer::Draw);
        assert_eq!(view.key(KeyCode::Char('q'), none, &shown), Answer::Quit);
        view.editing = true;
        assert_eq!(view.key(KeyCode::Char('c'), KeyModifiers::CONTROL, &shown), Answer::Quit);
        // There is nothing to open.
        let mut empty = View::default();
        empty.key(KeyCode::Enter, none, &[]);
        empty.key(KeyCode::End, none, &[]);
        assert_eq!((empty.detail, empty.cursor), (None, 0));
    }

    /// A click selects a row, another one opens it; on a heading it sorts, then reverses the order; the wheel moves.
    #[test]
    fn mouse() {
        let mut view = View::default();
        let (left, shown) = (MouseEventKind::Down(MouseButton::Left), view.arranged(rows()));
        assert!(view.mouse(left, Spot::Row(2), &shown));
        assert_eq!((view.cursor, view.detail), (2, None));
        view.mouse(left, Spot::Row(2), &shown);
        assert_eq!(view.detail, Some(3));
        view.mouse(MouseEventKind::Down(MouseButton::Right), Spot::Other, &shown);
        assert_eq!(view.detail, None);
        view.mouse(left, Spot::Heading(Column::Rss), &shown);
        assert_eq!((view.sort, view.reversed), (Column::Rss, false));
        view.mouse(left, Spot::Heading(Column::Rss), &shown);
        assert!(view.reversed);
        view.mouse(MouseEventKind::ScrollUp, Spot::Other, &shown);
        assert_eq!(view.cursor, 0);
        view.mouse(MouseEventKind::ScrollDown, Spot::Other, &shown);
        assert_eq!(view.cursor, 2);
        assert!(!view.mouse(MouseEventKind::Moved, Spot::Row(1), &shown));
        assert!(!view.mouse(left, Spot::Other, &shown));
        view.help = true;
        view.mouse(left, Spot::Row(0), &shown);
        assert_eq!((view.help, view.cursor), (false, 2));
    }

    /// Tab cycles through the panels that exist; an endpoint opens into the processes that serve it.
    #[test]
    fn requests() {
        let none = KeyModifiers::NONE;
        let traced = Traced { requests: true, gvl: true };
        let mut view = View { detail: Some(1), scroll: 4, traced, ..View::default() };
        let panels = [0, 1, 2].map(|_| {
            view.key(KeyCode::Tab, none, &[]);
            view.panel
        });
        assert_eq!((panels, view.scroll), ([Panel::Requests, Panel::Blocked, Panel::Threads], 0));
        let mut only = View { detail: Some(1), ..View::default() };
        only.key(KeyCode::Tab, none, &[]);
        assert_eq!(only.panel, Panel::Threads);
        view.key(KeyCode::Esc, none, &[]);
        for _ in 0..3 {
            view.key(KeyCode::Char('g'), none, &[]);
        }
        assert_eq!((view.group, view.sort), (Group::Endpoint, Column::Requests));
        let row = Row { name: "GET /orders".into(), processes: 1, ..Row::default() };
        view.key(KeyCode::Enter, none, &[row]);
        assert_eq!(
            (view.group, view.within.clone()),
            (Group::Process, Some((Group::Endpoint, "GET /orders".into())))
        );
        let serving =
            |pid, endpoint: &str| Row { pid: Some(pid), endpoints: vec![endpoint.into()], ..Row::default() };
        let all = vec![
            serving(5, "GET /orders"),
            serving(7, "GET /orders/:id"),
            Row { pid: Some(6), ..Row::default() },
        ];
        let shown = view.arranged(all);
        assert_eq!(shown.iter().map(|row| row.pid).collect::<Vec<_>>(), [Some(5)]);
    }

    /// A group opens into its processes.
    #[test]
    fn groups() {
        let mut view = View::default();
        view.key(KeyCode::Char('g'), KeyModifiers::NONE, &[]);
        assert_eq!(view.group, Group::Service);
        let rows = [Row { name: "shop".into(), processes: 3, ..Row::default() }];
        view.key(KeyCode::Enter, KeyModifiers::NONE, &rows);
        assert_eq!(view.group, Group::Process);
        let of = |pid, service: &str| Row { pid: Some(pid), service: service.into(), ..Row::default() };
        let all = || vec![of(1, "shop-admin"), of(2, "shop"), Row { name: "shop".into(), ..of(3, "other") }];
        let pids = |view: &View| view.arranged(all()).iter().map(|row| row.pid).collect::<Vec<_>>();
        assert_eq!(pids(&view), [Some(2)]);
        // With a filter: Esc removes the filter first, then leaves the group.
        view.filter = "x".to_owned();
        assert!(pids(&view).is_empty());
        view.key(KeyCode::Esc, KeyModifiers::NONE, &[]);
        assert_eq!(pids(&view), [Some(2)]);
        view.key(KeyCode::Esc, KeyModifiers::NONE, &[]);
        assert_eq!((pids(&view).len(), view.group), (3, Group::Service));
        // Processes outside containers are a group, too.
        view.within = Some((Group::Container, "(host)".to_owned()));
        assert_eq!(pids(&view).len(), 3);
    }

    /// From an opened group every key to go back leads to the groups as they were; `q` quits only from there.
    #[test]
    fn back_to_groups() {
        let none = KeyModifiers::NONE;
        let row = |name: &str| Row { name: name.into(), processes: 1, ..Row::default() };
        let groups = [row("shop"), row("shopper")];
        let mut view = View { group: Group::Service, filter: "sho".into(), cursor: 1, ..View::default() };
        let process = Row { pid: Some(4), ..Row::default() };
        for code in [KeyCode::Char('q'), KeyCode::Esc, KeyCode::Left, KeyCode::Backspace] {
            view.key(KeyCode::Enter, none, &groups);
            assert_eq!((view.group, view.filter.as_str(), view.cursor), (Group::Process, "", 0));
            // The page of a process of the group leads back to the group.
            view.key(KeyCode::Enter, none, std::slice::from_ref(&process));
            view.key(code, none, std::slice::from_ref(&process));
            assert_eq!((view.detail, view.within.is_some()), (None, true));
            assert_eq!(view.key(code, none, &groups), Answer::Draw);
            assert_eq!((view.group, view.filter.as_str(), view.cursor), (Group::Service, "sho", 1));
        }
        view.key(KeyCode::Enter, none, &groups);
        view.mouse(MouseEventKind::Down(MouseButton::Right), Spot::Other, &groups);
        assert_eq!((view.group, view.filter.as_str()), (Group::Service, "sho"));
        assert_eq!(view.key(KeyCode::Char('q'), none, &groups), Answer::Quit);
        // A sort column that endpoints do not have is not kept.
        let traced = Traced { requests: true, gvl: false };
        let mut view = View { group: Group::Endpoint, sort: Column::Requests, traced, ..View::default() };
        view.key(KeyCode::Char('m'), none, &groups);
        assert_eq!(view.sort, Column::Requests, "endpoints have no memory");
        view.key(KeyCode::Enter, none, &groups);
        view.key(KeyCode::Char('m'), none, &groups);
        assert_eq!(view.sort, Column::Rss);
        view.key(KeyCode::Char('q'), none, &groups);
        assert_eq!((view.group, view.sort), (Group::Endpoint, Column::Requests));
    }

    /// If rows below the cursor have gone, the cursor is where it is drawn.
    #[test]
    fn fewer_rows() {
        let mut view = View { cursor: 29, ..View::default() };
        let shown = view.arranged(rows());
        view.key(KeyCode::Enter, KeyModifiers::NONE, &shown);
        assert_eq!((view.cursor, view.detail), (2, Some(3)));
    }
}
