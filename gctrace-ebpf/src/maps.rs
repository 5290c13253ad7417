//! All maps and all read-only data, with typed accessors.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use aya_ebpf::{
    Global,
    macros::map,
    maps::{Array, HashMap, LruHashMap, PerCpuArray, ProgramArray, RingBuf},
};
use gctrace_common::{
    ABI_HASH,
    blocking::LISTEN_RING_BYTES,
    config::{
        AwayEntry, Config, GC_RING_BYTES, ImageConfig, LIFE_RING_BYTES, MAX_CGROUPS, MAX_EXECS, MAX_IMAGES,
        MAX_NAMES, MAX_PROCESSES, MAX_SCOPES, ProcessEntry, Returning, RubyEntry, STACK_RING_BYTES,
        StackShare, ThreadContext,
    },
    event::WorkPhase,
    gvl::{
        GvlEdge, GvlEdgeKey, GvlGate, GvlKey, GvlLock, GvlTask, GvlThread, MAX_GVL_EDGES, MAX_GVL_EPOCHS,
        MAX_GVL_LOCKS, MAX_GVL_TASKS, MAX_GVL_THREADS, MAX_OWN_TIMES, OwnTimes,
    },
    job::{Fetcher, MAX_FETCHERS},
    leak::{LEAK_COUNTS, LeakPage, LeakTarget},
    malloc::{MALLOC_TALLIES as TALLIES, MallocBlock, MallocPending, MallocTally, MallocTarget},
    memory::{MemoryLayout, MemoryScratch},
    request::{
        MAX_ARRIVALS, MAX_CONNECTIONS, MAX_SERVERS, MAX_SERVING, Parsed, ParserKey, REQUEST_RING_BYTES,
        Serving, SocketLayout,
    },
    scope::Scope,
    stack::stage,
    stats::Counter,
    unwind::{Chunk, MAX_CHUNKS, MAX_UNWOUND},
};

use crate::scratch::Scratch;

/// `BPF_NOEXIST` (include/uapi/linux/bpf.h): an insertion fails where the key exists.
pub const NO_EXIST: u64 = 1;

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
    tick_ns: 0,
    task_stack: 0,
    gvl: 0,
    reserved: 0,
    off_cpu_min_ns: 0,
    gvl_threshold_ns: 0,
    gvl_span_ns: 0,
    futex_address: 0,
    futex_op: 0,
    task_pid: 0,
    task_state: 0,
    task_charged: 0,
    at_return: 0,
    off_cpu_stacks: 0,
});

/// Separate from [`CONFIG`]: any access to that reads all of it.
#[unsafe(no_mangle)]
static MEMORY: Global<MemoryLayout> = Global::new(MemoryLayout {
    shape: MemoryLayout::NONE,
    task_mm: 0,
    counters: 0,
    peak: 0,
    pending: 0,
    stride: 0,
    count: 0,
    parts: 0,
    array_parts: 0,
    cpus: 0,
});

/// 1 if requests are traced.
#[unsafe(no_mangle)]
static REQUESTS: Global<u32> = Global::new(0);

/// 1 if the state of the VM is copied at the start and end of each request and job.
#[unsafe(no_mangle)]
static UNIT_STATES: Global<u32> = Global::new(0);

/// 1 if refills are watched.
#[unsafe(no_mangle)]
static ALLOC: Global<u32> = Global::new(0);

/// 1 if stacks are taken at refills.
#[unsafe(no_mangle)]
static ALLOC_STACKS: Global<u32> = Global::new(0);

/// Byte offsets of `signal` in the kernel's `task_struct`, and of `live` (the number of threads) in the structure it points to; 0: unknown.
#[unsafe(no_mangle)]
static SIGNAL: Global<[u32; 2]> = Global::new([0; 2]);

/// Byte offset of `min_flt` in the kernel's `task_struct`, which `maj_flt` follows; 0: unknown, or requests are not traced.
#[unsafe(no_mangle)]
static FAULTS: Global<u32> = Global::new(0);

/// How to get from a descriptor to the socket's state; zeros if that is unknown or requests are not traced.
#[unsafe(no_mangle)]
static SOCKET: Global<SocketLayout> = Global::new(SocketLayout {
    task_files: 0,
    files_table: 0,
    table_len: 0,
    table_entries: 0,
    file_inode: 0,
    file_private: 0,
    inode_mode: 0,
    inode_number: 0,
    socket_sock: 0,
    sock_protocol: 0,
    sock_cookie: 0,
    sock_state: 0,
    sock_port: 0,
    tcp_written: 0,
    tcp_acked: 0,
});

/// GC records. A ring of their own, so that no burst of other records can lose them.
#[map]
pub static GC_RING: RingBuf = RingBuf::with_byte_size(GC_RING_BYTES, 0);

/// Stack records.
#[map]
pub static STACK_RING: RingBuf = RingBuf::with_byte_size(STACK_RING_BYTES, 0);

/// Fork, exec and exit records.
#[map]
pub static LIFE_RING: RingBuf = RingBuf::with_byte_size(LIFE_RING_BYTES, 0);

/// Each CPU has its own: on a shared one, CPUs that count at the same time would wait for each other's cache line.
#[map]
static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(Counter::ALL.len() as u32, 0);

#[map]
static IMAGES: Array<ImageConfig> = Array::with_max_entries(MAX_IMAGES, 0);

/// One word: 1 once the run is over. After that nothing is counted or emitted, although detaching takes a while, so
/// that the counters do not change while they are read.
#[map]
static GATE: Array<u32> = Array::with_max_entries(1, 0);

/// Keyed by tgid. Not an LRU map: an evicted entry would silently unselect a process.
#[map]
pub static PROCESSES: HashMap<u32, ProcessEntry> = HashMap::with_max_entries(MAX_PROCESSES, 0);

/// Selected names of programs, cut to 15 bytes and NUL padded, as the kernel keeps them.
#[map]
pub static NAMES: HashMap<[u8; 16], u32> = HashMap::with_max_entries(MAX_NAMES, 0);

/// Keyed by tgid: [`NAME_READ`](gctrace_common::config::NAME_READ), or that it is not. The loader makes it small if no names are selected.
#[map]
pub static ASKED: HashMap<u32, u32> = HashMap::with_max_entries(MAX_PROCESSES, 0);

/// Ids of selected cgroups (v2).
#[map]
pub static CGROUPS: HashMap<u64, u32> = HashMap::with_max_entries(MAX_CGROUPS, 0);

/// One word: bit n is set if a cgroup on level n of the hierarchy is in [`CGROUPS`].
#[map]
pub static CGROUP_LEVELS: Array<u64> = Array::with_max_entries(1, 0);

/// Keyed by tgid. Not an LRU map, as above.
#[map]
pub static RUBIES: HashMap<u32, RubyEntry> = HashMap::with_max_entries(MAX_PROCESSES, 0);

/// Unwind tables and lists of mappings. The loader makes it small if native stacks are not walked.
#[map]
pub static CHUNKS: Array<Chunk> = Array::with_max_entries(MAX_CHUNKS, 0);

/// Keyed by tgid: the chunk with the mappings of the process.
#[map]
pub static UNWOUND: HashMap<u32, u32> = HashMap::with_max_entries(MAX_UNWOUND, 0);

/// Keyed by tgid: where the threads of the process publish the active span. Only processes with a library that does so have an entry.
#[map]
pub static THREAD_CONTEXTS: HashMap<u32, ThreadContext> = HashMap::with_max_entries(MAX_UNWOUND, 0);

/// Buffer in which the stack of a tick is put together: one entry per CPU (the loader sets the number). Families of programs that
/// can interrupt each other on a CPU have separate scratches. An array, because the values of per-CPU maps are
/// limited to 32 KiB.
#[map]
pub static TICK_SCRATCH: Array<Scratch> = Array::with_max_entries(1, 0);

/// The same for uprobes, which can be preempted by one another: [`PROBE_SLOTS`](gctrace_common::config::PROBE_SLOTS) per CPU.
#[map]
pub static PROBE_SCRATCH: Array<Scratch> = Array::with_max_entries(1, 0);

/// The same for tracepoints, of which one runs at a time on a CPU. Empty unless they take stacks.
#[map]
pub static SWITCH_SCRATCH: Array<Scratch> = Array::with_max_entries(1, 0);

/// Keyed by tid: threads that are off their CPU. LRU, because a thread that replaces its program returns under another tid.
#[map]
pub static AWAY: LruHashMap<u32, AwayEntry> = LruHashMap::with_max_entries(1, 0);

/// How much of its quota of off-CPU stacks each CPU has used.
#[map]
pub static SHARES: PerCpuArray<StackShare> = PerCpuArray::with_max_entries(1, 0);

/// The thread that was just switched to on each CPU, if its stack is to be taken.
#[map]
pub static RETURNING: PerCpuArray<Returning> = PerCpuArray::with_max_entries(1, 0);

/// The stages of taking a stack at a tick. A program array holds programs of one type only, so each family has one.
#[map]
pub static TICK_STAGES: ProgramArray = ProgramArray::with_max_entries(stage::COUNT, 0);

/// The same for tracepoints.
#[map]
pub static SWITCH_STAGES: ProgramArray = ProgramArray::with_max_entries(stage::COUNT, 0);

/// The same for raw tracepoints.
#[map]
pub static RETURN_STAGES: ProgramArray = ProgramArray::with_max_entries(stage::COUNT, 0);

/// The same for uprobes.
#[map]
pub static PROBE_STAGES: ProgramArray = ProgramArray::with_max_entries(stage::COUNT, 0);

/// Keyed by `tgid << 32 | tid`. LRU, because entries of threads whose end is not seen remain.
#[map]
pub static SCOPES: LruHashMap<u64, Scope> = LruHashMap::with_max_entries(MAX_SCOPES, 0);

/// Keyed by `tgid << 32 | tid`: when each phase began on the thread, nanoseconds, by the phase's number; 0 if the phase is not running.
#[map]
pub static PHASES: LruHashMap<u64, [u64; WorkPhase::ALL.len()]> = LruHashMap::with_max_entries(MAX_SCOPES, 0);

/// Threads and what they did with the GVL. The loader makes it and the following small if the GVL is not watched.
#[map]
pub static GVL_THREADS: HashMap<GvlKey, GvlThread> = HashMap::with_max_entries(MAX_GVL_THREADS, 0);

/// Their native threads, as the scheduler sees them.
#[map]
pub static GVL_TASKS: HashMap<u32, GvlTask> = HashMap::with_max_entries(MAX_GVL_TASKS, 0);

/// Keyed by tid: buffer in which a thread that begins or ends a request stores its own times. It reads them at once, so others may be evicted.
#[map]
pub static OWN_TIMES: LruHashMap<u32, OwnTimes> = LruHashMap::with_max_entries(MAX_OWN_TIMES, 0);

/// Initial value of an entry of [`OWN_TIMES`].
#[map]
pub static BLANK_TIMES: Array<OwnTimes> = Array::with_max_entries(1, 0);

/// Keyed by tid: buffer in which a thread that begins or ends a request reads the memory counters of its process. It uses them at once, so others
/// may be evicted.
#[map]
pub static MEMORY_SCRATCH: LruHashMap<u32, MemoryScratch> = LruHashMap::with_max_entries(MAX_OWN_TIMES, 0);

/// Initial value of an entry of [`MEMORY_SCRATCH`].
#[map]
pub static BLANK_MEMORY: Array<MemoryScratch> = Array::with_max_entries(1, 0);

/// Who holds and has held each GVL.
#[map]
pub static GVL_LOCKS: HashMap<GvlKey, GvlLock> = HashMap::with_max_entries(MAX_GVL_LOCKS, 0);

/// Which thread waited for which.
#[map]
pub static GVL_EDGES: HashMap<GvlEdgeKey, GvlEdge> = HashMap::with_max_entries(MAX_GVL_EDGES, 0);

/// Initial value of an entry of [`GVL_THREADS`], which is larger than the BPF stack.
#[map]
pub static GVL_BLANK: Array<GvlThread> = Array::with_max_entries(1, 0);

/// Initial value of an entry of [`GVL_LOCKS`].
#[map]
pub static GVL_BLANK_LOCK: Array<GvlLock> = Array::with_max_entries(1, 0);

/// One word, a [`GvlGate`]: what the GVL probes do.
#[map]
static GVL_GATE: Array<u64> = Array::with_max_entries(1, 0);

/// Request records. The loader makes it and the following small if requests are not traced.
#[map]
pub static REQUEST_RING: RingBuf = RingBuf::with_byte_size(REQUEST_RING_BYTES, 0);

/// Tgids of processes that begin to listen and are not servers yet, or are Pumas.
#[map]
pub static LISTEN_RING: RingBuf = RingBuf::with_byte_size(LISTEN_RING_BYTES, 0);

/// Keyed by tgid: the processes whose requests or jobs are traced. User space enters them when all their probes are attached.
#[map]
pub static SERVERS: HashMap<u32, u32> = HashMap::with_max_entries(MAX_SERVERS, 0);

/// Keyed by tid. Not an LRU map: a request whose entry is gone has no end.
#[map]
pub static SERVING: HashMap<u32, Serving> = HashMap::with_max_entries(MAX_SERVING, 0);

/// Keyed by tgid: when a process, followed or not, started its program by an exec, nanoseconds. LRU: it covers
/// the processes of the whole host, and a program whose entry is gone merely has no known start.
#[map]
pub static EXECS: LruHashMap<u32, u64> = LruHashMap::with_max_entries(MAX_EXECS, 0);

/// Keyed by `tgid << 32 | fd`: the parser of a connection.
#[map]
pub static CONNECTIONS: LruHashMap<u64, u64> = LruHashMap::with_max_entries(MAX_CONNECTIONS, 0);

/// The bytes that each parser has received.
#[map]
pub static PARSERS: LruHashMap<ParserKey, Parsed> = LruHashMap::with_max_entries(MAX_CONNECTIONS, 0);

/// Keyed by socket cookie: when the last packet with data arrived, nanoseconds.
#[map]
pub static ARRIVALS: LruHashMap<u64, u64> = LruHashMap::with_max_entries(MAX_ARRIVALS, 0);

/// Keyed by tid: what threads that fetch jobs have received.
#[map]
pub static FETCHERS: HashMap<u32, Fetcher> = HashMap::with_max_entries(MAX_FETCHERS, 0);

/// Initial value of an entry of [`FETCHERS`], which is larger than the BPF stack.
#[map]
pub static BLANK_FETCHER: Array<Fetcher> = Array::with_max_entries(1, 0);

/// Initial value of an entry of [`SERVING`]: too large for the BPF stack beside other data.
#[map]
pub static BLANK_SERVING: Array<Serving> = Array::with_max_entries(1, 0);

/// Initial value of an entry of [`PARSERS`]: too large for the BPF stack beside other data.
#[map]
pub static BLANK_PARSER: Array<Parsed> = Array::with_max_entries(1, 0);

/// Its elements show where the per-CPU data of each CPU is ([`crate::memory`]); nothing is stored in it.
#[map]
pub static CPU_PROBE: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);

/// The process that `gctrace malloc` watches.
#[map]
pub static MALLOC_TARGET: Array<MallocTarget> = Array::with_max_entries(1, 0);

/// Calls and bytes by function and size class, then by size class and age, then the other counters.
#[map]
pub static MALLOC_TALLIES: PerCpuArray<MallocTally> = PerCpuArray::with_max_entries(TALLIES, 0);

/// Keyed by address: followed memory. `gctrace malloc` makes it and the following large. Not an LRU map: evicted memory
/// would be missing in the ages without being counted.
#[map]
pub static MALLOC_LIVE: HashMap<u64, MallocBlock> = HashMap::with_max_entries(1, 0);

/// Keyed by tid: threads in `realloc`.
#[map]
pub static MALLOC_PENDING: HashMap<u32, MallocPending> = HashMap::with_max_entries(1, 0);

/// The process that `gctrace heap --leaks` watches.
#[map]
pub static LEAK_TARGET: Array<LeakTarget> = Array::with_max_entries(1, 0);

/// Indexed by the number of a [`LeakCount`](gctrace_common::leak::LeakCount).
#[map]
pub static LEAK_TALLIES: PerCpuArray<u64> = PerCpuArray::with_max_entries(LEAK_COUNTS, 0);

/// Keyed by the aligned address of a heap page: its followed objects. `gctrace heap --leaks` makes it large. Not an LRU map:
/// evicted objects would be missing without being counted.
#[map]
pub static LEAK_PAGES: HashMap<u64, LeakPage> = HashMap::with_max_entries(1, 0);

/// When each epoch of the gate ended, nanoseconds.
#[map]
static GVL_CLOSED: Array<u64> = Array::with_max_entries(MAX_GVL_EPOCHS, 0);

/// What the GVL probes do at this moment.
#[inline(always)]
pub fn gvl_gate() -> GvlGate {
    GVL_GATE.get(0).map_or(GvlGate::default(), |&raw| GvlGate::unpack(raw))
}

/// When an epoch of the gate ended, nanoseconds; 0 if unknown.
#[inline(always)]
pub fn gvl_closed(epoch: u32) -> u64 {
    GVL_CLOSED.get(epoch).copied().unwrap_or(0)
}

/// The configuration, as constants for the verifier.
#[inline(always)]
pub fn config() -> Config {
    CONFIG.load()
}

/// Whether requests are traced, as a constant for the verifier.
#[inline(always)]
pub fn watches_requests() -> bool {
    REQUESTS.load() != 0
}

/// Whether the state of the VM is copied at the start and end of each request and job, as a constant for the verifier.
#[inline(always)]
pub fn copies_states() -> bool {
    UNIT_STATES.load() != 0
}

/// Whether refills are watched, as a constant for the verifier.
#[inline(always)]
pub fn watches_alloc() -> bool {
    ALLOC.load() != 0
}

/// Whether stacks are taken at refills, as a constant for the verifier.
#[inline(always)]
pub fn takes_alloc_stacks() -> bool {
    ALLOC_STACKS.load() != 0
}

/// Offsets that lead to the number of living threads of a process; see [`SIGNAL`].
#[inline(always)]
pub fn signal_offsets() -> [u32; 2] {
    SIGNAL.load()
}

/// Where the kernel counts the page faults of a thread; see [`FAULTS`].
#[inline(always)]
pub fn faults_offset() -> u32 {
    FAULTS.load()
}

/// How to get from a descriptor to the socket's state; see [`SOCKET`].
#[inline(always)]
pub fn socket_layout() -> SocketLayout {
    SOCKET.load()
}

/// Where the kernel keeps memory counters, as constants for the verifier.
#[inline(always)]
pub fn memory_layout() -> MemoryLayout {
    MEMORY.load()
}

/// Adds one to a counter. Atomic, because a uprobe program can be interrupted on its CPU by another program.
#[inline(always)]
pub fn count(counter: Counter) {
    if let Some(cell) = COUNTERS.get_ptr_mut(counter as u32) {
        // SAFETY: a map value is 8-byte aligned and lives as long as the program runs.
        unsafe { add_one(cell) };
    }
}

/// Adds to a counter.
#[inline(always)]
pub fn count_many(counter: Counter, number: u64) {
    if let Some(cell) = COUNTERS.get_ptr_mut(counter as u32) {
        // SAFETY: as above.
        unsafe { add(cell, number) };
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

/// Atomically adds.
///
/// # Safety
/// As [`add_one`].
#[inline(always)]
pub unsafe fn add(cell: *mut u64, number: u64) {
    // SAFETY: the caller's promise.
    unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(cell, number) };
}

/// Atomically subtracts one.
///
/// # Safety
/// As [`add_one`].
#[inline(always)]
pub unsafe fn take_one(cell: *mut u64) {
    // SAFETY: the caller's promise.
    unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(cell, u64::MAX) };
}

/// Whether the run is over.
#[inline(always)]
pub fn closed() -> bool {
    GATE.get(0).is_none_or(|&closed| closed != 0)
}

/// The image with this index, if it is open.
#[inline(always)]
pub fn image(index: u32) -> Option<&'static ImageConfig> {
    IMAGES.get(index).filter(|image| image.open != 0)
}

/// The same, open or not.
#[inline(always)]
pub fn any_image(index: u32) -> Option<&'static ImageConfig> {
    IMAGES.get(index)
}
