//! Finds the instructions at which CRuby tests for its internal GC events.
//!
//! The VM guards each event with `if (flags & RUBY_INTERNAL_EVENT_…)` (gc.c, `gc_event_hook`). The five constants,
//! 1 << 22 to 1 << 26 (include/ruby/internal/event.h), survive stripping, inlining and link-time optimisation, so the
//! tests are found in the machine code itself, once per inlined copy. There are three forms:
//!
//! - up to 3.3 the flags are `objspace->hook_events`, the word after `objspace->flags`;
//! - 3.4 calls `rb_gc_event_hook` with the constant, and the callee does the test;
//! - from 4.0 on the flags are the global `ruby_vm_event_flags`, and the call after the test is out of line.

mod aarch64;
mod callers;
mod emulated;
mod facts;
mod finder;
mod flow;
mod guard;
pub(super) mod gvl;
mod pause;
mod point;
pub(super) mod refill;
pub(super) mod thread;
mod unit;

use std::collections::BTreeSet;

use gctrace_common::event::Point;
use serde::{Deserialize, Serialize};

use crate::address::Svma;

pub use gvl::{GvlEvent, GvlFields, GvlSite, GvlSites};
pub use refill::{PageFields, RefillSite, RefillSites};
pub use thread::{ThreadEvent, ThreadOperand, ThreadSite, ThreadSites};

pub(super) use aarch64::increments as increments_aarch64;
pub(super) use callers::{MAX_SITES, base_name, hook_events};
pub(super) use finder::find;

/// How a site was recognised, and the kind of instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SiteForm {
    /// The conditional jump after a test, found from the hook call that it guards.
    Guard,
    /// The conditional jump after a test, found by the test alone (the hook is inlined after it).
    Scan,
    /// The call of `rb_gc_event_hook`, which does the test (3.4).
    Call,
}

/// The kind of pause that a `GC_ENTER` site begins (`enum gc_enter_event`, gc.c).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PauseKind {
    /// A new cycle: the code continues to the `GC_START` site.
    Start,
    /// A step of incremental marking or lazy sweeping.
    Continue,
    /// The rest of a cycle at once.
    Rest,
    /// Running all finalizers at exit.
    Finalizer,
}

impl PauseKind {
    /// The word used on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Continue => "continue",
            Self::Rest => "rest",
            Self::Finalizer => "finalizer",
        }
    }
}

/// One instruction to probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Site {
    /// The event.
    #[serde(with = "point")]
    pub point: Point,
    /// The instruction to probe: the conditional jump after the test, or the call.
    pub address: Svma,
    /// Whether the kernel emulates that instruction instead of single-stepping it.
    pub emulated: bool,
    /// The instruction that reads the tested flags; equal to `address` for a call.
    pub guard: Svma,
    /// Hardware number (0 rax … 15 r15) of the register that holds the objspace pointer when `address` is reached.
    pub register: Option<u8>,
    /// First address of the function that contains the site (of the hot part, if the site is in the cold one).
    pub owner: Svma,
    /// Name of that function, if symbols give it.
    pub owner_name: Option<String>,
    /// How it was recognised.
    pub form: SiteForm,
    /// For a `GC_ENTER` site, the kind of pause that it begins; `None` if the code does not prove it.
    pub pause: Option<PauseKind>,
}

/// Where the tested flags live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Field {
    /// In the object space, at this byte offset.
    Objspace(i64),
    /// In a global 32-bit variable at this address.
    Global(u64),
}

/// The findings of the finder, for the acceptance checks.
#[derive(Debug)]
pub(super) struct Findings {
    pub(super) sites: Vec<Site>,
    /// The flags that the guards test; `None` if the callee does the test.
    pub(super) field: Option<Field>,
    /// Guards found from a hook call that test other flags than `field`, or that the scan did not find.
    pub(super) disputed: Vec<Svma>,
    /// Hook calls with an event constant whose guard was not found.
    pub(super) unguarded: Vec<Svma>,
    /// Guards with a branch target between the test and the jump.
    pub(super) entered_midway: Vec<Svma>,
    /// Functions with a `GC_ENTER` site such that neither they nor all their callers contain or call a `GC_EXIT` site.
    pub(super) endless: BTreeSet<Svma>,
    /// Owners of references to the string `"during_gc != 0"` (`gc_enter`, gc.c from 3.0 on); `None` if it is absent.
    pub(super) enter_string_owners: Option<BTreeSet<Svma>>,
    /// The extents that were searched: gc.c with its cold parts, and all callers of the hook.
    pub(super) searched: BTreeSet<usize>,
}

impl Findings {
    /// The functions that hold sites of an event.
    pub(super) fn owners(&self, point: Point) -> BTreeSet<Svma> {
        self.sites.iter().filter(|site| site.point == point).map(|site| site.owner).collect()
    }
}

/// The event whose constant is `1 << bit`.
fn point_of_bit(bit: u32) -> Option<Point> {
    Point::from_raw(bit.checked_sub(FIRST_EVENT_BIT)?)
}

/// Bit of `RUBY_INTERNAL_EVENT_GC_START`; the other events follow in the order of [`Point`].
const FIRST_EVENT_BIT: u32 = 22;
