//! Fills figures with what an exporter receives.

use std::{cell::RefCell, rc::Rc};

use gctrace_report::{
    export::{ExportError, Exporter},
    model::{Process, gvl::GvlGap, seen::Seen},
};

use super::Figures;

/// Maximum number of kept times in which the GVL was not traced.
const GAPS: usize = 10_000;

/// An exporter that fills figures.
pub(crate) struct Filler(pub(crate) Rc<RefCell<Figures>>);

impl Exporter for Filler {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        self.0.borrow_mut().see(process, seen);
        Ok(())
    }

    fn began(&mut self, ts_ns: u64) {
        self.0.borrow_mut().began(ts_ns);
    }

    fn closed(&mut self, ts_ns: u64) {
        self.0.borrow_mut().closed_ns = ts_ns;
    }

    fn gvl_gap(&mut self, gap: GvlGap) {
        let gaps = &mut self.0.borrow_mut().gvl_gaps;
        if gaps.len() < GAPS {
            gaps.push((gap.from_ns, gap.to_ns));
        }
    }
}
