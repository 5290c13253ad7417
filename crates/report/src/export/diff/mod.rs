//! Comparisons: an exporter that gathers one side, and the output of a comparison as text and as JSON.

mod json;
mod text;

use std::{
    cell::RefCell,
    io::{self, Write},
    path::Path,
    rc::Rc,
};

use super::{
    ExportError, Exporter, file,
    profile::{Comparable, differential},
};
use crate::{
    diff::{Chosen, Comparison, Judged, Looked, Side},
    ledger::Ledger,
    model::{
        Process,
        gvl::GvlGap,
        seen::{Observer as _, Seen},
    },
};

pub use json::write as write_json;
pub use text::{change, method_name, value, write as write_text};

/// What is known about a recording apart from its contents.
#[derive(Clone, Debug)]
pub struct About {
    /// Its file.
    pub file: String,
    /// The time from which everything was traced, epoch seconds.
    pub began: Option<f64>,
    /// For how long everything was traced, seconds.
    pub seconds: f64,
    /// Whether the recording was cut off.
    pub cut_off: bool,
}

/// The data of a comparison to write.
#[derive(Debug)]
pub struct Compared<'a> {
    /// Both recordings.
    pub about: [About; 2],
    /// Both sides.
    pub sides: [&'a Side; 2],
    /// The differences found.
    pub comparison: &'a Comparison,
    /// The requested conditions, with their verdicts.
    pub judged: &'a [Judged],
}

/// One side, during and after its replay.
#[derive(Clone)]
pub struct Gathered {
    side: Rc<RefCell<Side>>,
    stacks: Option<Rc<RefCell<Comparable>>>,
    chosen: Chosen,
}

impl Gathered {
    /// An empty side of a recording with these sources; with stacks for a graph if `graph`.
    pub fn new(name: &'static str, looked: Looked, chosen: Chosen, graph: bool) -> Self {
        let side = Rc::new(RefCell::new(Side::new(name, looked, chosen.clone())));
        Self { side, stacks: graph.then(|| Rc::new(RefCell::new(Comparable::default()))), chosen }
    }

    /// The exporter to replay the recording to.
    pub fn exporter(&self) -> Box<dyn Exporter> {
        Box::new(self.clone())
    }

    /// Calls `of` with the side.
    pub fn with<T>(&self, of: impl FnOnce(&mut Side) -> T) -> T {
        of(&mut self.side.borrow_mut())
    }
}

impl Exporter for Gathered {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        self.side.borrow_mut().see(process, seen);
        if let Some(stacks) = self.stacks.as_ref().filter(|_| self.chosen.has(process)) {
            stacks.borrow_mut().see(process, seen);
        }
        Ok(())
    }

    fn began(&mut self, ts_ns: u64) {
        self.side.borrow_mut().began(ts_ns);
        if let Some(stacks) = &self.stacks {
            stacks.borrow_mut().began(ts_ns);
        }
    }

    fn closed(&mut self, ts_ns: u64) {
        self.side.borrow_mut().closed(ts_ns);
    }

    fn gvl_gap(&mut self, gap: GvlGap) {
        self.side.borrow_mut().gvl_gap(gap);
    }

    fn flush(&mut self, now_ns: u64) -> Result<(), ExportError> {
        self.side.borrow_mut().now(now_ns);
        Ok(())
    }

    fn settled(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.side.borrow_mut().account(ledger);
        Ok(())
    }
}

/// Compares the two sides.
pub fn compare(a: &Gathered, b: &Gathered) -> Comparison {
    Comparison::of(&mut a.side.borrow_mut(), &mut b.side.borrow_mut())
}

/// Draws the changes as a flame graph of CPU time, if both sides were gathered with stacks; its roots are at the top or at the bottom.
///
/// # Errors
///
/// Writing fails.
pub fn draw_graph(a: &Gathered, b: &Gathered, roots_on_top: bool, out: &mut dyn Write) -> io::Result<()> {
    let (Some(a), Some(b)) = (&a.stacks, &b.stacks) else { return Ok(()) };
    differential(&a.borrow(), &b.borrow(), roots_on_top, out)
}

/// Like [`draw_graph`], but writes to a file.
///
/// # Errors
///
/// The file cannot be written.
pub fn write_graph(path: &Path, a: &Gathered, b: &Gathered) -> Result<(), ExportError> {
    if a.stacks.is_none() || b.stacks.is_none() {
        return Ok(());
    }
    file::write_atomically(path, |out| draw_graph(a, b, false, out))
        .map_err(|source| ExportError::File { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests;
