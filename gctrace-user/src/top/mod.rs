//! `gctrace top`: what every Ruby process does right now, on a terminal or as one table.
//!
//! [`board`] folds what is seen, [`rows`] and [`view`] decide what is shown, [`draw`] draws it; all four are pure. [`screen`] has the
//! terminal.

mod board;
mod draw;
mod looker;
mod once;
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
    cache_dir: Option<PathBuf>,
    screen: Option<Screen>,
}

impl Top {
    /// Nothing has been seen yet. `cache_dir`: where analyses are kept.
    pub fn new(show: Show, cache_dir: Option<PathBuf>) -> Self {
        Self { board: Arc::default(), show, cache_dir, screen: None }
    }

    fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn table(&self) -> io::Result<()> {
        let rows = View::default().arranged(self.board().rows(monotonic_ns(), Group::Process));
        let mut out = BufWriter::new(io::stdout());
        match self.show {
            Show::Jsonl => once::jsonl(&mut out, &rows)?,
            Show::Text | Show::Screen => once::text(&mut out, &rows)?,
        }
        out.flush()
    }
}

impl Exporter for Top {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        // The end of tracing is not that of the processes, which are shown at the end.
        if !matches!(seen, Seen::Ended(end) if end.reason == crate::model::EndReason::Detached) {
            let mut board = self.board();
            board.see(process, seen);
            if matches!(seen, Seen::Process { .. }) {
                board.start(process.pid, monotonic_ns(), screen::sample(process.pid));
            }
        }
        Ok(())
    }

    fn began(&mut self, _ts_ns: u64) {
        if self.show != Show::Screen {
            return;
        }
        let screen = Looker::start(self.cache_dir.clone())
            .and_then(|looker| Screen::start(self.board.clone(), looker));
        match screen {
            Ok(screen) => self.screen = Some(screen),
            Err(error) => {
                log::error!("the terminal cannot be used: {error}; `gctrace top --once` prints one table");
                let _ends = signal_hook::low_level::raise(signal_hook::consts::SIGTERM);
            }
        }
    }

    fn account(&mut self, _ledger: &Ledger) {
        // The screen reads by itself; of a table CPU shares are of the whole time.
        if self.show != Show::Screen {
            self.board().now(monotonic_ns());
        }
    }

    fn closed(&mut self, _ts_ns: u64) {
        // What follows takes a moment, and has something to say.
        self.screen = None;
        if self.show != Show::Screen {
            self.board().tick(monotonic_ns(), true, screen::sample);
        }
    }

    fn finish(&mut self, _ledger: &Ledger) -> Result<(), ExportError> {
        self.screen = None;
        if self.show == Show::Screen {
            return Ok(());
        }
        self.table().map_err(ExportError::Stdout)
    }
}
