//! A hit of a program that watches the GVL, and its cost.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use gctrace_common::{
    config::{ImageConfig, RubyEntry},
    gvl::{GvlGate, GvlKey},
    stats::Counter,
};

use crate::maps::{add, count_many};

/// A hit in a process that is watched.
pub struct Hit {
    pub tgid: u32,
    /// Tid of the running thread, which need not be the thread that the event is about.
    pub tid: u32,
    pub execs: u32,
    pub index: u32,
    pub image: &'static ImageConfig,
    pub bias: u64,
    pub ruby: *mut RubyEntry,
    /// The thread that the event is about.
    pub key: GvlKey,
    /// Its `rb_thread_t *`, or 0.
    pub thread: u64,
    /// [`GvlKey::at`] of its GVL, or 0.
    pub lock: u64,
    pub gate: GvlGate,
}

/// Adds up the cost of the programs, from the start of a hit until now; `more_ns` are added for the watched process only.
#[inline(always)]
pub fn charge(since_ns: u64, ruby: Option<*mut RubyEntry>, more_ns: u64) {
    // SAFETY: a plain helper call.
    let ns = unsafe { bpf_ktime_get_ns() }.wrapping_sub(since_ns);
    count_many(Counter::GvlNs, ns);
    if let Some(ruby) = ruby {
        // SAFETY: a map value pointer, valid while the program runs.
        unsafe { add(&raw mut (*ruby).gvl_ns, ns + more_ns) };
    }
}
