//! `gctrace top`: what every Ruby process does right now, on a terminal or as one table.
//!
//! [`board`] folds events, [`rows`] and [`view`] decide what is shown, [`place`] decides where, and [`draw`] draws it; all of these are pure.
//! [`screen`] owns the terminal.

mod board;
mod draw;
mod looker;
mod once;
mod place;
mod rows;
mod screen;
#[cfg(test)]
mod tests;
mod view;

use std::{
    io::{self, BufWriter, Write as _},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use gctrace_common::stats::Family;

pub use self::rows::Traced;
use self::{board::Board, looker::Looker, rows::Group, screen::Screen, view::View};
use crate::{
    cli::Show,
    clock::monotonic_ns,
    export::{ExportError, Exporter},
    ledger::Ledger,
    model::{
        Process,
        seen::{Observer as _, Seen},
    },
};

/// The output of a run that is a `gctrace top`.
pub struct Top {
    board: Arc<Mutex<Board>>,
    show: Show,
    traced: Traced,
    cache_dir: Option<PathBuf>,
    screen: Option<Screen>,
}

impl Top {
    /// An output without any data. `cache_dir`: directory of cached analyses.
    pub fn new(show: Show, traced: Traced, cache_dir: Option<PathBuf>) -> Self {
        Self { board: Arc::default(), show, traced, cache_dir, screen: None }
    }

    fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_screen(&self) -> bool {
        matches!(self.show, Show::Screen { .. })
    }

    fn table(&self) -> io::Result<()> {
        let rows = View::default().arranged(self.board().rows(monotonic_ns(), Group::Process));
        let mut out = BufWriter::new(io::stdout());
        match self.show {
            Show::Jsonl => once::jsonl(&mut out, &rows, self.traced)?,
            Show::Text | Show::Screen { .. } => once::text(&mut out, &rows)?,
        }
        out.flush()
    }
}

impl Exporter for Top {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        // The end of tracing is not the end of the processes, which are shown at the end.
        if !matches!(seen, Seen::Ended(end) if end.reason == crate::model::EndReason::Detached) {
            let mut board = self.board();
            board.see(process, seen);
            if matches!(seen, Seen::Process { .. }) {
                board.start(process.pid, monotonic_ns(), screen::sample(process.pid));
            }
        }
        Ok(())
    }

    fn began(&mut self, ts_ns: u64) {
        self.board().began(ts_ns);
        let Show::Screen { mouse } = self.show else { return };
        let view = View { traced: self.traced, ..View::default() };
        let screen = Looker::start(self.cache_dir.clone())
            .and_then(|looker| Screen::start(self.board.clone(), looker, view, mouse));
        match screen {
            Ok(screen) => self.screen = Some(screen),
            Err(error) => {
                log::error!("the terminal cannot be used: {error}; `gctrace top --once` prints one table");
                let _ends = signal_hook::low_level::raise(signal_hook::consts::SIGTERM);
            }
        }
    }

    fn account(&mut self, ledger: &Ledger) {
        let user = &ledger.user.requests;
        let lost = ledger.lost_of(Family::Requests) + user.requests_no_room + user.undecodable_requests;
        let (now_ns, mut board) = (monotonic_ns(), self.board());
        board.requests_lost(lost, now_ns);
        // The screen reads by itself; in a table CPU shares cover the whole run.
        if !self.is_screen() {
            board.now(now_ns);
        }
    }

    fn closed(&mut self, _ts_ns: u64) {
        // The rest of the end takes a moment, and may print messages.
        self.screen = None;
        if !self.is_screen() {
            self.board().tick(monotonic_ns(), true, screen::sample);
        }
    }

    fn finish(&mut self, _ledger: &Ledger) -> Result<(), ExportError> {
        self.screen = None;
        if self.is_screen() {
            return Ok(());
        }
        self.table().map_err(ExportError::Stdout)
    }
}
