//! What the loader passes to the BPF programs: read-only configuration and the per-image entries of the `IMAGES` map.

#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    event::{SLOT_BYTES, SLOTS},
    gvl::GvlPath,
};

/// Entries of the `IMAGES` map.
pub const MAX_IMAGES: u32 = 256;
/// Entries of the `PROCESSES` map: maximum number of followed processes at one time.
pub const MAX_PROCESSES: u32 = 65_536;
/// Entries of the `SCOPES` map, at least: number of threads that have had a GC pause and whose entries are kept.
pub const MAX_SCOPES: u32 = 16_384;
/// Entries of the map of programs that processes started by an exec. The least recently used entries are evicted.
pub const MAX_EXECS: u32 = 16_384;
/// Default size of the GC ring, bytes (a power of two and a multiple of the page size).
pub const GC_RING_BYTES: u32 = 4 << 20;
/// Default size of the ring of stacks, bytes.
pub const STACK_RING_BYTES: u32 = 4 << 20;
/// Default size of the lifecycle ring, bytes.
pub const LIFE_RING_BYTES: u32 = 256 << 10;

/// Entries of the `CGROUPS` map: maximum number of selected cgroups at one time.
pub const MAX_CGROUPS: u32 = 4096;
/// Deepest level below the root of the cgroup v2 hierarchy on which a cgroup can be selected.
pub const MAX_CGROUP_LEVEL: u32 = 32;

/// [`Config::select`]: every process that hits a probe is selected. Otherwise the selection is the union of the bits below.
pub const SELECT_ALL: u32 = 0;
/// Bit of [`Config::select`]: processes whose entry in `PROCESSES` has [`ProcessEntry::SELECTED`].
pub const SELECT_LISTED: u32 = 1;
/// Bit of [`Config::select`]: processes in a cgroup (v2) whose id is in `CGROUPS`, or below such a cgroup.
pub const SELECT_CGROUPS: u32 = 2;
/// Bit of [`Config::select`]: processes in a cgroup (v2) whose id is in `CGROUPS`; user space also enters the cgroups below it.
/// For kernels whose uprobes cannot query ancestors (before Linux 5.15).
pub const SELECT_CGROUP_IDS: u32 = 4;
/// Bit of [`Config::select`]: with [`SELECT_LISTED`], also processes whose main thread has a name in `NAMES` when their program starts.
pub const SELECT_NAMES: u32 = 8;

/// Entries of the `NAMES` map.
pub const MAX_NAMES: u32 = 256;
/// Value of the `ASKED` map: a Ruby process that is not selected and whose name user space has not read yet.
pub const NAME_UNREAD: u32 = 0;
/// Value of the `ASKED` map: a process whose name user space has read.
pub const NAME_READ: u32 = 1;

/// Number of stacks that uprobes of one CPU can take at once (one may be preempted by another).
pub const PROBE_SLOTS: u32 = 2;

/// Read-only configuration, frozen before the programs are verified, so that the verifier removes dead branches.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct Config {
    /// [`SELECT_ALL`], or bits of the other `SELECT_` constants.
    pub select: u32,
    /// The tgid of gctrace itself, never traced.
    pub own_tgid: u32,
    /// 1 if `bpf_get_attach_cookie` exists for uprobes (Linux 5.15); otherwise image and bias come from `PROCESSES`.
    pub has_cookie: u32,
    /// Byte offset of `pid` in the `task:task_newtask` tracepoint record (from its `format` file).
    pub newtask_pid: u32,
    /// Byte offset of `clone_flags` in the same record.
    pub newtask_clone_flags: u32,
    /// Byte offset of the user thread pointer in the kernel's `task_struct` (`thread.fsbase` on x86-64; from the
    /// kernel's BTF), or 0 if unknown: then no image may use [`Span::CACHE`] or [`Span::LOCAL`].
    pub task_thread_pointer: u32,
    /// CPU time that one tick of the sampling clock stands for, nanoseconds; 0: only stacks of threads that hold the GVL while another thread
    /// waits for it are taken.
    pub tick_ns: u64,
    /// Byte offset of `stack` in the kernel's `task_struct`, for kernels without `bpf_task_pt_regs` (before Linux 5.15,
    /// which have no cookies either); 0 if unknown.
    pub task_stack: u32,
    /// Quota of off-CPU stacks: about this many per [`OFF_CPU_WINDOW_NS`] and CPU, and never more than twice as many; 0: threads off their
    /// CPU are not watched.
    pub off_cpu_stacks: u32,
    /// 1 if the GVL is watched.
    pub gvl: u32,
    /// Zero.
    pub reserved: u32,
    /// Shortest time off the CPU that is reported, nanoseconds.
    pub off_cpu_min_ns: u64,
    /// Shortest wait for the GVL that is reported, nanoseconds.
    pub gvl_threshold_ns: u64,
    /// Shortest hold of the GVL, or time without it, that is reported, nanoseconds.
    pub gvl_span_ns: u64,
    /// Byte offset of `uaddr` in the `syscalls:sys_enter_futex` tracepoint record.
    pub futex_address: u32,
    /// Byte offset of `op` in the same record.
    pub futex_op: u32,
    /// Byte offset of `pid` in the kernel's `task_struct`; 0 if unknown.
    pub task_pid: u32,
    /// Byte offset of `__state` (`state` before Linux 5.14) in the `task_struct`.
    pub task_state: u32,
    /// Byte offset of `se.sum_exec_runtime` in the `task_struct`; 0: the scheduler's treatment of watched threads is not followed.
    pub task_charged: u32,
    /// 1: a thread's stack is taken when the thread is back on a CPU (`sched_exit_tp`, Linux 6.15), so that short times need no stack. 0: it
    /// is taken when the thread leaves its CPU.
    pub at_return: u32,
}

/// The period of the quota [`Config::off_cpu_stacks`], nanoseconds.
pub const OFF_CPU_WINDOW_NS: u64 = 100_000_000;
/// Entries of the `AWAY` map: maximum number of threads of followed processes that are off their CPU at one time.
pub const MAX_AWAY: u32 = 65_536;

/// One piece of the objspace that a snapshot copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct Span {
    /// Byte offset inside `rb_objspace_t`, or inside the memory that `via` points to.
    pub offset: u16,
    /// Length in bytes, 1..=[`SLOT_BYTES`].
    pub len: u16,
    /// [`Span::DIRECT`], [`Span::CACHE`], [`Span::LOCAL`], or the byte offset in `rb_objspace_t` of a pointer to
    /// follow first. A null pointer yields zero bytes (CRuby's own readers of such fields treat null as empty).
    pub via: u16,
    /// Zero.
    pub reserved: u16,
}

impl Span {
    /// [`Span::via`] of a span of the objspace itself.
    pub const DIRECT: u16 = u16::MAX;
    /// [`Span::via`] of a span of the object cache (`rb_ractor_newobj_cache_t`) of the Ractor that the thread runs.
    pub const CACHE: u16 = u16::MAX - 1;
    /// [`Span::via`] of a thread-local variable of the thread: the address is [`ThreadPath::local`], plus `offset`.
    pub const LOCAL: u16 = u16::MAX - 2;
}

/// How to get from the thread at a probe to the data that the VM keeps per thread and per Ractor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct ThreadPath {
    /// Stated address of the word that holds the image's TLS module id (a `DTPMOD64` GOT slot); the module's block is found
    /// in the thread's dynamic thread vector. 0: the offsets below count from the thread pointer (static executables).
    pub module: u64,
    /// Byte offset of `ruby_current_ec` in the TLS block.
    pub ec: i64,
    /// Byte offset, in the same block, of the variable that [`Span::LOCAL`] copies (`malloc_increase_local`, gc.c ≥ 4.0).
    pub local: i64,
    /// Byte offset of `thread_ptr` in `rb_execution_context_t`.
    pub ec_thread: u32,
    /// Byte offset of `ractor` in `rb_thread_t`.
    pub thread_ractor: u32,
    /// Byte offset of `newobj_cache` in `rb_ractor_t`.
    pub ractor_cache: u32,
    /// Size of an entry of the dynamic thread vector, bytes: 16 with glibc, 8 with musl.
    pub dtv_entry: u32,
}

/// How to walk the Ruby stack of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct StackPath {
    /// Where the pointer to the thread's execution context is: one of the constants below.
    pub place: u32,
    /// Size of an entry of the dynamic thread vector, bytes: 16 with glibc, 8 with musl.
    pub dtv_entry: u32,
    /// [`StackPath::TLS`]: stated address of the word that holds the image's TLS module id.
    pub module: u64,
    /// Byte offset of the pointer in the TLS block or from the thread pointer; or its stated address ([`StackPath::GLOBAL`]).
    pub context: i64,
    /// Byte offset of `vm_stack` in `rb_execution_context_t`.
    pub ec_stack: u32,
    /// Byte offset of `vm_stack_size` (in words) in `rb_execution_context_t`.
    pub ec_stack_size: u32,
    /// Byte offset of `cfp` in `rb_execution_context_t`.
    pub ec_frame: u32,
    /// Byte offset of `thread_ptr` in `rb_execution_context_t`.
    pub ec_thread: u32,
    /// Byte offset of `ec` in `rb_thread_t`.
    pub thread_ec: u32,
    /// [`StackPath::GLOBAL`]: byte offset of `thread_id` (a `pthread_t`) in `rb_thread_t`.
    pub thread_id: u32,
    /// `sizeof(rb_control_frame_t)`.
    pub frame_size: u32,
    /// Byte offset of `pc` in it.
    pub frame_pc: u32,
    /// Byte offset of `iseq` in it.
    pub frame_iseq: u32,
    /// Byte offset of `ep` in it.
    pub frame_ep: u32,
    /// Byte offset of `jit_return` in it, 0 if it does not exist.
    pub frame_jit: u32,
    /// First bit of the GC mode in the objspace's `flags`.
    pub mode_shift: u32,
    /// Mask of `during_compacting` in the objspace's `flags`, 0 if it does not exist.
    pub compacting_mask: u32,
    /// Byte offset of `body` in `rb_iseq_t`.
    pub iseq_body: u32,
    /// Byte offset of `location.base_label`, the name of the method, in the body.
    pub body_base_label: u32,
    /// Byte offset of the pointer to the bytes in `RString`.
    pub string_pointer: u32,
    /// Byte offset of the bytes themselves if they are embedded.
    pub string_embedded: u32,
    /// Byte offset of `profile.latest_gc_info` in the objspace (32 bits, gc.c `enum gpr_flag`); 0 if unknown.
    pub gc_info: u32,
}

impl StackPath {
    /// The reasons for a major GC in `profile.latest_gc_info` (`GPR_FLAG_MAJOR_MASK`, gc.c, 2.2 and later); a cycle with none of them
    /// is minor.
    pub const MAJOR_MASK: u32 = 0xff;
    /// [`StackPath::place`]: stacks of this image cannot be walked.
    pub const NONE: u32 = 0;
    /// A thread-local variable in the image's TLS block, which is found through the thread's dynamic thread vector.
    pub const TLS: u32 = 1;
    /// A thread-local variable at a fixed distance from the thread pointer (static executables).
    pub const THREAD_POINTER: u32 = 2;
    /// A global variable: the context of the thread that holds the GVL (up to 2.7).
    pub const GLOBAL: u32 = 3;
    /// The largest `sizeof(rb_control_frame_t)` of any release.
    pub const MAX_FRAME_SIZE: u32 = 64;
}

/// What the programs need to know about one Ruby image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct ImageConfig {
    /// Stated virtual address of the global VM pointer (`ruby_current_vm_ptr`).
    pub vm_ptr: u64,
    /// Byte offset of the objspace pointer in `rb_vm_t`.
    pub vm_objspace: u32,
    /// Byte offset of `profile.count` in `rb_objspace_t`.
    pub count: u32,
    /// Byte offset of the `flags` word in `rb_objspace_t`.
    pub flags: u32,
    /// Mask of the GC mode inside `flags` (all bits 0: no cycle is running).
    pub mode_mask: u32,
    /// Mask of `dont_gc` inside `flags`.
    pub dont_gc_mask: u32,
    /// Number of spans used.
    pub spans: u32,
    /// 0: the entry is closed, and no hit of the image is an event. (Its stacks can still be walked.)
    pub open: u32,
    /// Byte offset of `free_slots` in `struct heap_page`; 0: refills are not counted.
    pub page_free_slots: u16,
    /// Byte offset of `slot_size` in `struct heap_page`, or [`ImageConfig::RVALUE_SLOTS`].
    pub page_slot_size: u16,
    /// How to find per-thread data; used only if a span needs it.
    pub thread: ThreadPath,
    /// How to find and walk the Ruby stack of a thread.
    pub stack: StackPath,
    /// How its GVL is watched.
    pub gvl: GvlPath,
    /// The spans, in the order of the snapshot's slots.
    pub span: [Span; SLOTS],
    /// For a GC library (`librubygc`, CRuby built `--with-modular-gc`), whose VM is in another image: stated address of
    /// a word of the library that holds an address of that image, which relates the two. `vm_ptr` and
    /// [`ThreadPath::module`] are then distances from that address. 0: they are addresses of this image.
    pub anchor: u64,
    /// For a GC library: stated address of the word with the library's own TLS module id; [`ThreadPath::local`] counts from
    /// the block of that module. 0: it counts from the same block as [`ThreadPath::ec`].
    pub local_module: u64,
}

impl ImageConfig {
    /// [`ImageConfig::page_slot_size`]: all slots have the size of an `RVALUE`, 40 bytes (up to 3.0, gc.c).
    pub const RVALUE_SLOTS: u16 = u16::MAX;
    /// The size of an `RVALUE`, bytes.
    pub const RVALUE_BYTES: u32 = 40;
}

/// Entry of the `PROCESSES` map, keyed by tgid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct ProcessEntry {
    /// Number of GC records emitted or lost so far.
    pub seq: u64,
    /// Load bias of the image; used if there are no cookies.
    pub bias: u64,
    /// Image index; used if there are no cookies.
    pub image: u32,
    /// [`ProcessEntry::SELECTED`] and the other flags.
    pub flags: u32,
    /// Start of the GC pause that a thread of the process is in, nanoseconds; 0: in none. The start of a pause that an exception has left
    /// stays until the next pause ends.
    pub pause_ns: u64,
}

impl ProcessEntry {
    /// The user selected this process (or an ancestor it was forked from).
    pub const SELECTED: u32 = 1;
    /// `image` and `bias` are set.
    pub const IMAGE_KNOWN: u32 = 2;
    /// At least one probe hit of the process has passed selection.
    pub const RUBY: u32 = 4;
    /// The user selected this process alone: its children do not inherit the selection.
    pub const ALONE: u32 = 8;
    /// The process is selected because its main thread had one of the selected names when the program started. If the program is not a Ruby,
    /// that ends with it.
    pub const NAMED: u32 = 16;
}

/// Entry of the `SHARES` map: how much of its quota of off-CPU stacks a CPU has used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StackShare {
    /// Start of the current window, nanoseconds.
    pub begin_ns: u64,
    /// Number of stacks wanted in it.
    pub wanted: u64,
    /// Number of stacks taken in it.
    pub taken: u64,
    /// Number of stacks wanted in the previous window.
    pub wanted_before: u64,
}

impl StackShare {
    /// Whether one more stack is taken. If more than `quota` were wanted in the previous window, each stack has the same chance: taking the
    /// first ones of each window would prefer threads that wake together with whatever starts it.
    #[inline]
    pub const fn takes(&mut self, now_ns: u64, quota: u64, random: u32) -> bool {
        let age = now_ns.wrapping_sub(self.begin_ns);
        if age >= OFF_CPU_WINDOW_NS {
            // A window further back says nothing about this one.
            self.wanted_before = if age < 2 * OFF_CPU_WINDOW_NS { self.wanted } else { 0 };
            self.begin_ns = now_ns;
            self.wanted = 0;
            self.taken = 0;
        }
        self.wanted += 1;
        let chosen =
            self.wanted_before <= quota || (random as u64).wrapping_mul(self.wanted_before) < quota << 32;
        let takes = chosen && self.taken < quota * 2;
        if takes {
            self.taken += 1;
        }
        takes
    }
}

/// Entry of the `RETURNING` map, one per CPU: the thread that has just been switched to, whose stack is to be taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Returning {
    /// Tid of the thread; 0: none.
    pub tid: u32,
    /// Tgid of its process.
    pub tgid: u32,
    /// When it had left its CPU, nanoseconds; this is the time of the stack.
    pub begin_ns: u64,
    /// As in [`AwayEntry`].
    pub thread: u64,
}

/// Entry of the `AWAY` map, keyed by tid: a thread of a followed process that has left its CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct AwayEntry {
    /// When it left its CPU, nanoseconds.
    pub begin_ns: u64,
    /// When it became runnable, nanoseconds, or 0.
    pub wakeup_ns: u64,
    /// Tgid of its process.
    pub tgid: u32,
    /// Image index of the process.
    pub image: u32,
    /// How often the process had replaced its program.
    pub execs: u32,
    /// One of the constants of [`OffCpuEvent`](crate::stack::OffCpuEvent).
    pub why: u32,
    /// Its `rb_thread_t *` if that is known only while it holds the GVL ([`StackPath::GLOBAL`]), otherwise 0.
    pub thread: u64,
    /// Name of the thread, NUL padded.
    pub comm: [u8; 16],
}

/// Entry of the `RUBIES` map, keyed by tgid: a followed process that runs a known image. Separate from
/// [`ProcessEntry`], so that a tick in any other process costs one lookup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct RubyEntry {
    /// Number of stack records emitted or lost so far.
    pub seq: u64,
    /// Number of events so far after which the VM may have freed or moved objects; see [`epoch_step`](crate::stack::epoch_step).
    pub epoch: u64,
    /// What watching its GVL has cost the process so far, nanoseconds: each hit plus [`TRAP_NS`](crate::gvl::TRAP_NS), and each stack as
    /// [`STACK_NS`](crate::gvl::STACK_NS).
    pub gvl_ns: u64,
    /// Number of refills of the program so far.
    pub refills: u64,
    /// Bytes of slots that are still to be handed out before a stack is taken at a refill ([`alloc_interval`]).
    pub alloc_left: u64,
    /// Load bias of the image.
    pub bias: u64,
    /// Image index.
    pub image: u32,
    /// How often the process has replaced its program.
    pub execs: u32,
    /// 1: `image` and `bias` are valid. 0 since the last exec.
    pub known: u32,
    /// Zero.
    pub reserved: u32,
}

/// Where the threads of a process keep the variable through which a tracing library publishes the active span: `otel_thread_ctx_v1`, a
/// pointer to a [`ThreadContextRecord`] (OTEP 4947).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct ThreadContext {
    /// Number of the TLS module; 0: the offset counts from the thread pointer.
    pub module: u64,
    /// Byte offset in the module's TLS block, or from the thread pointer.
    pub offset: i64,
    /// Size of an entry of the dynamic thread vector, bytes: 16 with glibc, 8 with musl.
    pub dtv_entry: u32,
    /// Zero.
    pub reserved: u32,
}

/// The fixed-size part of the record that the variable points to (OTEP 4947, "Thread Local Context Record"). Attributes follow; they are not read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ThreadContextRecord {
    /// Trace id; zeros: no trace.
    pub trace_id: [u32; 4],
    /// Span id; zeros: no span.
    pub span_id: [u32; 2],
    /// The first byte is 1 if the record is complete, 0 while it is being written. Flags and the size of the attributes follow.
    pub valid: u32,
}

impl ThreadContextRecord {
    /// Trace id and span id, as words in memory order, if the record is complete and has both.
    #[inline]
    pub const fn span(&self) -> Option<([u64; 2], u64)> {
        let trace = [word(self.trace_id[0], self.trace_id[1]), word(self.trace_id[2], self.trace_id[3])];
        let span = word(self.span_id[0], self.span_id[1]);
        let complete = self.valid & 0xff == 1;
        if complete && trace[0] | trace[1] != 0 && span != 0 { Some((trace, span)) } else { None }
    }
}

const fn word(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

const _: () = assert!(size_of::<ThreadContext>() == 24);
const _: () = assert!(size_of::<ThreadContextRecord>() == 28);

impl RubyEntry {
    /// Updates the bias from a probe hit that shows where the image is. A hit in another image, such as a GC library beside the VM's image,
    /// changes nothing.
    #[inline]
    pub const fn place(&mut self, image: u32, bias: u64) {
        if self.image == image {
            self.bias = bias;
        }
    }

    /// The entry of a forked child: it has the same image at the same place, and its counts start at zero.
    #[inline]
    #[must_use]
    pub const fn forked(&self) -> Self {
        Self { seq: 0, epoch: 0, gvl_ns: 0, refills: 0, ..*self }
    }
}

/// Average number of bytes of slots between two stacks taken at refills.
pub const ALLOC_INTERVAL: u64 = 512 << 10;

/// An interval from a random number. Intervals are uniformly distributed, so that a periodic pattern of the program is not always sampled
/// at the same place.
#[inline]
pub const fn alloc_interval(random: u32) -> u64 {
    random as u64 & (2 * ALLOC_INTERVAL - 1)
}

const _: () = assert!(ALLOC_INTERVAL.is_power_of_two());
const _: () = assert!(size_of::<Config>() == 96);
const _: () = assert!(size_of::<Span>() == 8);
const _: () = assert!(size_of::<ThreadPath>() == 40);
const _: () = assert!(size_of::<StackPath>() == 96);
const _: () = assert!(size_of::<RubyEntry>() == 64);
const _: () = assert!(size_of::<StackShare>() == 32);
const _: () = assert!(size_of::<Returning>() == 24);
const _: () = assert!(size_of::<AwayEntry>() == 56);
const _: () = assert!(size_of::<ImageConfig>() == 232 + 8 * SLOTS);
const _: () = assert!(size_of::<ProcessEntry>() == 32);
const _: () = assert!(SLOT_BYTES <= 256 && SLOTS <= 64);

#[cfg(test)]
mod tests {
    use super::*;

    /// A pseudorandom generator.
    fn randoms() -> impl FnMut() -> u32 {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u32
        }
    }

    /// A probe of the same image shows where it is now; a probe of another image says nothing about it.
    #[test]
    fn place_of_an_image() {
        let mut entry = RubyEntry { image: 1, bias: 0x1000, known: 1, ..RubyEntry::default() };
        entry.place(2, 0x2000);
        assert_eq!(entry.bias, 0x1000);
        entry.place(1, 0x3000);
        assert_eq!((entry.image, entry.bias), (1, 0x3000));
    }

    /// All stacks are taken as long as there are no more than the quota.
    #[test]
    fn few_stacks() {
        let (mut share, mut random) = (StackShare::default(), randoms());
        for at in 0..1_000 {
            assert!(share.takes(at * OFF_CPU_WINDOW_NS / 100, 100, random()));
        }
    }

    /// If there are more, each has the same chance, wherever in a window it comes, and the quota holds.
    #[test]
    fn many_stacks() {
        const WANTED: u64 = 1_000;
        const WINDOWS: u64 = 400;
        let (mut share, mut random) = (StackShare::default(), randoms());
        let mut taken = [0_u64; 10];
        for at in 0..WANTED * (WINDOWS + 1) {
            let chosen = share.takes(1 + at * OFF_CPU_WINDOW_NS / WANTED, 100, random());
            // Nothing is known before the first window is over.
            if at >= WANTED {
                taken[(at % WANTED / 100) as usize] += u64::from(chosen);
            }
        }
        let expected = WINDOWS * 10;
        for (tenth, taken) in taken.into_iter().enumerate() {
            assert!(taken.abs_diff(expected) < expected / 10, "{taken} in tenth {tenth} of {expected}");
        }
    }

    /// A burst after an idle time is limited, too.
    #[test]
    fn burst() {
        let (mut share, mut random) = (StackShare::default(), randoms());
        let taken = (0..10_000).filter(|_| share.takes(1, 100, random())).count();
        assert_eq!(taken, 200);
    }
}
