//! Stacks as exporters see them.

use std::sync::Arc;

pub use gctrace_common::stack::GcActivity;

use super::trace::Span;
pub use crate::ruby::frames::{Frame, FrameKind};

/// A stack, leaf first.
pub type Stack = Arc<[Arc<Frame>]>;

/// What a thread was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ThreadState {
    /// On a CPU.
    Running,
    /// Runnable, without a CPU.
    Runnable,
    /// Sleeping or waiting; whether for the GVL is unknown.
    Blocked,
    /// Waiting for the GVL.
    GvlWait,
    /// Sleeping or waiting, but not for the GVL.
    OtherWait,
}

impl ThreadState {
    /// The word used in labels.
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Runnable => "runnable",
            Self::Blocked | Self::OtherWait => "blocked",
            Self::GvlWait => "gvl-wait",
        }
    }
}

/// A stack and the time it represents.
#[derive(Clone, Debug)]
pub struct StackSample {
    /// `CLOCK_MONOTONIC` nanoseconds: on a CPU, the tick of the sampling clock; off the CPU, the time at which the thread left it.
    pub ts_ns: u64,
    /// Thread, host pid namespace.
    pub tid: u32,
    /// Name of the thread.
    pub comm: Arc<str>,
    /// What the thread was doing.
    pub state: ThreadState,
    /// CPU time it represents, nanoseconds; 0 off the CPU.
    pub cpu_ns: u64,
    /// Wall time it represents, nanoseconds.
    pub wall_ns: u64,
    /// What the garbage collector was doing on the thread. If it was active, the stack begins with frames that show it.
    pub gc: GcActivity,
    /// Number of the request that the thread was serving; 0: its number is unknown. `None`: it served none, or that is unknown.
    pub request: Option<u64>,
    /// The span that was active on the thread, if its program publishes spans.
    pub span: Option<Span>,
    /// Kernel, native and Ruby frames, leaf first. The root end of an incomplete stack is a [`FrameKind::Missing`] frame.
    pub stack: Stack,
}

impl StackSample {
    /// End of the off-CPU time that the sample represents, `CLOCK_MONOTONIC` nanoseconds; `None` for a sample on a CPU.
    pub fn off_cpu_end_ns(&self) -> Option<u64> {
        (self.state != ThreadState::Running).then(|| self.ts_ns.saturating_add(self.wall_ns))
    }

    /// Start and wall time, nanoseconds, of the part of the sample after `began_ns`: an off-CPU time is clipped to it. `None`: the sample is older.
    pub fn since(&self, began_ns: u64) -> Option<(u64, u64)> {
        let off_cpu_end_ns = self.off_cpu_end_ns().filter(|end_ns| *end_ns > began_ns);
        match (self.ts_ns < began_ns, off_cpu_end_ns) {
            (false, _) => Some((self.ts_ns, self.wall_ns)),
            (true, Some(end_ns)) => Some((began_ns, end_ns - began_ns)),
            (true, None) => None,
        }
    }
}

/// The word for a kind of GC work in labels and frames.
pub fn gc_name(activity: GcActivity) -> &'static str {
    match activity {
        GcActivity::None => "none",
        GcActivity::Other => "other",
        GcActivity::Marking => "marking",
        GcActivity::Sweeping => "sweeping",
        GcActivity::Compacting => "compacting",
    }
}
