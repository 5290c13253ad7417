//! Every map and every piece of read-only data, with typed accessors.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use aya_ebpf::{
    Global,
    macros::map,
    maps::{Array, HashMap, LruHashMap, RingBuf},
};
use gctrace_common::{
    ABI_HASH,
    config::{
        Config, GC_RING_BYTES, ImageConfig, LIFE_RING_BYTES, MAX_IMAGES, MAX_PROCESSES, MAX_SCOPES,
        ProcessEntry,
    },
    event::Phase,
    scope::Scope,
    stats::Counter,
};

/// Read by the loader from the object file before it loads anything.
#[unsafe(no_mangle)]
#[used]
static GCTRACE_ABI: u64 = ABI_HASH;

#[unsafe(no_mangle)]
static CONFIG: Global<Config> = Global::new(Config {
    select: 0,
    own_tgid: 0,
    has_cookie: 1,
    newtask_pid: 0,
    newtask_clone_flags: 0,
    task_thread_pointer: 0,
});

/// GC records. A ring of their own, so that no other family's storm can lose them.
#[map]
pub static GC_RING: RingBuf = RingBuf::with_byte_size(GC_RING_BYTES, 0);

/// Fork, exec and exit records.
#[map]
pub static LIFE_RING: RingBuf = RingBuf::with_byte_size(LIFE_RING_BYTES, 0);

#[map]
static COUNTERS: Array<u64> = Array::with_max_entries(Counter::ALL.len() as u32, 0);

#[map]
static IMAGES: Array<ImageConfig> = Array::with_max_entries(MAX_IMAGES, 0);

/// One word: 1 once the run is over. From then on nothing is counted or emitted, although detaching takes a while, so
/// that the counters can be read while they stand still.
#[map]
static GATE: Array<u32> = Array::with_max_entries(1, 0);

/// Keyed by tgid. Not an LRU map: an evicted entry would silently unselect a process.
#[map]
pub static PROCESSES: HashMap<u32, ProcessEntry> = HashMap::with_max_entries(MAX_PROCESSES, 0);

/// Keyed by `tgid << 32 | tid`. LRU, because entries stay when their threads are gone.
#[map]
pub static SCOPES: LruHashMap<u64, Scope> = LruHashMap::with_max_entries(MAX_SCOPES, 0);

/// Keyed by `tgid << 32 | tid`: when each phase began on the thread, nanoseconds, by number; 0 where it is not running.
#[map]
pub static PHASES: LruHashMap<u64, [u64; Phase::ALL.len()]> = LruHashMap::with_max_entries(MAX_SCOPES, 0);

/// The configuration, as constants for the verifier.
#[inline(always)]
pub fn config() -> Config {
    CONFIG.load()
}

/// Adds one to a counter. Atomic, because a uprobe program can be preempted on its CPU by another one.
#[inline(always)]
pub fn count(counter: Counter) {
    if let Some(cell) = COUNTERS.get_ptr_mut(counter as u32) {
        // SAFETY: a map value is 8-byte aligned and lives as long as the program runs.
        unsafe { add_one(cell) };
    }
}

/// Atomically adds one. The result is not used on purpose: the fetching form needs BPF ISA v3, which Linux 5.10
/// lacks. (`AtomicU64::fetch_add` does not exist on the BPF target, which has no compare-and-swap.)
///
/// # Safety
/// `cell` must point to an aligned `u64` in a map value.
#[inline(always)]
pub unsafe fn add_one(cell: *mut u64) {
    // SAFETY: the caller's promise.
    unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(cell, 1) };
}

/// Whether the run is over.
#[inline(always)]
pub fn closed() -> bool {
    GATE.get(0).is_none_or(|&closed| closed != 0)
}

/// The image with this index, if it is configured.
#[inline(always)]
pub fn image(index: u32) -> Option<&'static ImageConfig> {
    IMAGES.get(index).filter(|image| image.open != 0)
}
