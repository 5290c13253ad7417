//! Faults injected on request, so that tests can show that the live checks catch them on real processes. Each could be in a
//! plan if the static checks missed it. Only gctrace's view is changed, never the traced process.

use gctrace_common::{config::Span, event::Point};

use crate::{
    address::FileOffset,
    ruby::{fallback::FallbackProbes, plan::AttachPlan},
};

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Fault {
    /// Every member of the objspace is read one word further.
    Layout,
    /// The sites of `GC_START` and `GC_END_SWEEP` are exchanged.
    Starts,
    /// The sites of `GC_START` and `GC_END_MARK` are exchanged.
    Marks,
    /// The sites of `GC_ENTER` and `GC_EXIT` are exchanged.
    Enters,
    /// The probe that is attached last has a place where the file has nothing.
    Attach,
}

/// An offset beyond the end of any file.
const NOWHERE: FileOffset = FileOffset(1 << 50);

impl Fault {
    /// Injects the fault into a plan.
    pub fn inject(self, plan: &mut AttachPlan) {
        let mut exchange = |one: Point, two: Point| {
            for site in &mut plan.sites {
                if site.point == one {
                    site.point = two;
                } else if site.point == two {
                    site.point = one;
                }
            }
        };
        match self {
            Self::Layout => {
                for span in &mut plan.config.span {
                    if span.via == Span::DIRECT {
                        span.offset += 8;
                    }
                }
                plan.layout.spans = plan.config.span[..plan.config.spans as usize].to_vec();
            }
            Self::Starts => exchange(Point::GcStart, Point::GcEndSweep),
            Self::Marks => exchange(Point::GcStart, Point::GcEndMark),
            Self::Enters => exchange(Point::GcEnter, Point::GcExit),
            Self::Attach => {
                if let Some(last) = plan.sites.iter_mut().find(|site| site.point == Point::GcStart) {
                    last.file_offset = NOWHERE;
                }
            }
        }
    }

    /// The same for fallback probes, to which only [`Fault::Attach`] applies.
    pub fn inject_last(self, last: &mut FallbackProbes) {
        if self == Self::Attach
            && let Some(last) = last.probes.last_mut()
        {
            last.file_offset = NOWHERE;
        }
    }
}
