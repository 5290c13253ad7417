//! Fills figures with what an exporter receives.

use std::{cell::RefCell, rc::Rc};

use gctrace_report::{
    export::{ExportError, Exporter},
    model::{Process, gvl::GvlGap, seen::Seen},
};

use super::Figures;

/// Maximum number of kept times in which individual waits for the GVL were not reported.
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
        let mut figures = self.0.borrow_mut();
        if let Some(last) = figures.gvl_gaps.last_mut().filter(|last| last.1 == gap.from_ns) {
            last.1 = gap.to_ns;
        } else if figures.gvl_gaps.len() < GAPS {
            figures.gvl_gaps.push((gap.from_ns, gap.to_ns));
        } else {
            let ns = gap.to_ns.saturating_sub(gap.from_ns.max(figures.lanes.columns.from_ns));
            figures.gvl_more_gaps_ns = figures.gvl_more_gaps_ns.saturating_add(ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::columns::Columns;

    /// Memory is bounded, and the time is exact, however many gaps there are.
    #[test]
    fn gaps() {
        let figures = Rc::new(RefCell::new(Figures::new(Columns::new(5, None))));
        let mut filler = Filler(Rc::clone(&figures));
        for at in 0..GAPS as u64 + 10 {
            let from_ns = at * 10;
            // In two parts.
            for (from_ns, to_ns) in [(from_ns, from_ns + 4), (from_ns + 4, from_ns + 6)] {
                filler.gvl_gap(GvlGap { from_ns, to_ns, summed: true });
            }
        }
        let figures = figures.borrow();
        assert_eq!(figures.gvl_gaps.len(), GAPS);
        // The first one lies before the start, except for its end.
        assert_eq!(figures.gvl_unreported_ns(u64::MAX), 6 * (GAPS as u64 + 10) - 5);
    }
}
