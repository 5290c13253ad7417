//! What the user has chosen to see, and what keys do. Pure.

use crossterm::event::{KeyCode, KeyModifiers};

use super::rows::{Column, Group, Row, matches, sort};

/// Characters of a filter at most.
const MOST_FILTER: usize = 64;

/// What the user has chosen.
#[derive(Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a separate switch")]
pub(super) struct View {
    /// What the rows are sorted by.
    pub sort: Column,
    /// The other way round.
    pub reversed: bool,
    /// What a row represents.
    pub group: Group,
    /// Only rows that have this.
    pub filter: String,
    /// Whether keys go into the filter.
    pub editing: bool,
    /// Whether the screen is held.
    pub paused: bool,
    /// Whether the keys are explained.
    pub help: bool,
    /// Row under the cursor.
    pub cursor: usize,
    /// The process that is shown in detail.
    pub detail: Option<u32>,
    /// Lines of its threads that are above the screen.
    pub scroll: usize,
}

/// What a key leads to, besides what it changes here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The screen is drawn again.
    Draw,
    /// The program ends.
    Quit,
}

impl View {
    /// The rows as they are shown.
    pub(super) fn arranged(&self, rows: Vec<Row>) -> Vec<Row> {
        let mut rows: Vec<Row> = rows.into_iter().filter(|row| matches(row, &self.filter)).collect();
        sort(&mut rows, self.sort, self.reversed);
        rows
    }

    /// A key was pressed, while these rows were shown.
    pub(super) fn key(&mut self, code: KeyCode, modifiers: KeyModifiers, rows: &[Row]) -> Answer {
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
            KeyCode::Char('q') if self.detail.is_none() => return Answer::Quit,
            KeyCode::Char('q' | 'h') | KeyCode::Esc | KeyCode::Left | KeyCode::Backspace
                if self.detail.is_some() =>
            {
                self.detail = None;
            }
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.help = true,
            KeyCode::Char('p' | ' ') => self.paused = !self.paused,
            KeyCode::Down | KeyCode::Char('j') => self.moved(1, rows.len()),
            KeyCode::Up | KeyCode::Char('k') => self.moved(-1, rows.len()),
            KeyCode::PageDown => self.moved(10, rows.len()),
            KeyCode::PageUp => self.moved(-10, rows.len()),
            KeyCode::Home => self.moved(isize::MIN / 2, rows.len()),
            KeyCode::End => self.moved(isize::MAX / 2, rows.len()),
            _ if self.detail.is_some() => {}
            KeyCode::Enter | KeyCode::Right => self.open(rows),
            KeyCode::Char('>' | '.') => self.sort = self.sort.moved(1),
            KeyCode::Char('<' | ',') => self.sort = self.sort.moved(-1),
            KeyCode::Char('r') => self.reversed = !self.reversed,
            KeyCode::Char('g') => self.group = self.group.next(),
            KeyCode::Char('/') => self.editing = true,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('c') => self.sort = Column::Cpu,
            KeyCode::Char('x') => self.sort = Column::Max,
            KeyCode::Char('m') => self.sort = Column::Rss,
            KeyCode::Char('a') => self.sort = Column::Alloc,
            _ => {}
        }
        Answer::Draw
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

    fn moved(&mut self, by: isize, rows: usize) {
        if self.detail.is_some() {
            self.scroll = self.scroll.saturating_add_signed(by).min(1 << 16);
        } else {
            self.cursor = self.cursor.saturating_add_signed(by).min(rows.saturating_sub(1));
        }
    }

    /// Into a process; of a group, its processes.
    fn open(&mut self, rows: &[Row]) {
        let Some(row) = rows.get(self.cursor) else { return };
        self.scroll = 0;
        if let Some(pid) = row.pid {
            self.detail = Some(pid);
        } else {
            self.filter.clone_from(&row.name);
            self.group = Group::Process;
            self.cursor = 0;
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

    /// Keys move, sort, filter, open and close; Ctrl-C ends from everywhere.
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
        // There it closes the process, and not the program.
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
        // Nothing is there to be opened.
        let mut empty = View::default();
        empty.key(KeyCode::Enter, none, &[]);
        empty.key(KeyCode::End, none, &[]);
        assert_eq!((empty.detail, empty.cursor), (None, 0));
    }

    /// A group opens into its processes.
    #[test]
    fn groups() {
        let mut view = View::default();
        view.key(KeyCode::Char('g'), KeyModifiers::NONE, &[]);
        assert_eq!(view.group, Group::Service);
        let rows = [Row { name: "shop".into(), processes: 3, ..Row::default() }];
        view.key(KeyCode::Enter, KeyModifiers::NONE, &rows);
        assert_eq!((view.group, view.filter.as_str()), (Group::Process, "shop"));
    }
}
