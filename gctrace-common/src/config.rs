//! What the loader tells the BPF programs: read-only configuration and the per-image entries of the `IMAGES` map.

#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    event::{SLOT_BYTES, SLOTS},
    gvl::GvlPath,
};

/// Entries of the `IMAGES` map.
pub const MAX_IMAGES: u32 = 256;
/// Entries of the `PROCESSES` map: followed processes at one time.
pub const MAX_PROCESSES: u32 = 65_536;
/// Entries of the `SCOPES` map: threads inside a GC pause at one time.
pub const MAX_SCOPES: u32 = 16_384;
/// Default size of the GC ring, bytes (a power of two and a multiple of the page size).
pub const GC_RING_BYTES: u32 = 4 << 20;
/// Default size of the ring of stacks, bytes.
pub const STACK_RING_BYTES: u32 = 4 << 20;
/// Default size of the lifecycle ring, bytes.
pub const LIFE_RING_BYTES: u32 = 256 << 10;

/// Entries of the `CGROUPS` map: selected cgroups at one time.
pub const MAX_CGROUPS: u32 = 4096;
/// Levels below the root of the cgroup v2 hierarchy on which a cgroup can be selected.
pub const MAX_CGROUP_LEVEL: u32 = 32;

/// [`Config::select`]: every process that hits a probe. Else it is the union of what the bits below say.
pub const SELECT_ALL: u32 = 0;
/// Bit of [`Config::select`]: processes whose entry in `PROCESSES` carries [`ProcessEntry::SELECTED`].
pub const SELECT_LISTED: u32 = 1;
/// Bit of [`Config::select`]: processes in a cgroup (v2) of which `CGROUPS` has the id, or below one.
pub const SELECT_CGROUPS: u32 = 2;
/// Bit of [`Config::select`]: processes in a cgroup (v2) of which `CGROUPS` has the id; user space enters those below it.
/// For kernels whose uprobes cannot ask for ancestors (before Linux 5.15).
pub const SELECT_CGROUP_IDS: u32 = 4;

/// Stacks that uprobes of one CPU can be taking at once (one may be preempted by another).
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
    /// 1 where `bpf_get_attach_cookie` exists for uprobes (Linux 5.15); else image and bias come from `PROCESSES`.
    pub has_cookie: u32,
    /// Byte offset of `pid` in the `task:task_newtask` tracepoint record (from its `format` file).
    pub newtask_pid: u32,
    /// Byte offset of `clone_flags` there.
    pub newtask_clone_flags: u32,
    /// Byte offset of the user thread pointer in the kernel's `task_struct` (`thread.fsbase` on x86-64; from the
    /// kernel's BTF), or 0 where it is not known: then no image may use [`Span::CACHE`] or [`Span::LOCAL`].
    pub task_thread_pointer: u32,
    /// CPU time that one tick of the sampling clock stands for, nanoseconds; 0: only stacks of threads are taken that hold the GVL while
    /// another one waits for it.
    pub tick_ns: u64,
    /// Byte offset of `stack` in the kernel's `task_struct`, for kernels without `bpf_task_pt_regs` (before Linux 5.15,
    /// where there are no cookies either); 0 where it is not known.
    pub task_stack: u32,
    /// Stacks of threads off their CPU, about this many per [`OFF_CPU_WINDOW_NS`] and CPU, and never more than twice as many; 0: threads off
    /// their CPU are not looked at.
    pub off_cpu_stacks: u32,
    /// 1 where the GVL is watched.
    pub gvl: u32,
    /// Zero.
    pub reserved: u32,
    /// A thread that is off its CPU for less is not reported, nanoseconds.
    pub off_cpu_min_ns: u64,
    /// A wait for the GVL that takes at least this long is reported, nanoseconds.
    pub gvl_threshold_ns: u64,
    /// So is a time for which a thread holds it or does without it, if it takes at least this long, nanoseconds.
    pub gvl_span_ns: u64,
    /// Byte offset of `uaddr` in the `syscalls:sys_enter_futex` tracepoint record.
    pub futex_address: u32,
    /// Byte offset of `op` there.
    pub futex_op: u32,
    /// Byte offset of `pid` in the kernel's `task_struct`; 0: not known.
    pub task_pid: u32,
    /// Byte offset of `__state` (`state` before Linux 5.14) there.
    pub task_state: u32,
    /// Byte offset of `se.sum_exec_runtime` there; 0: what the scheduler does with threads that watch the GVL is not seen.
    pub task_charged: u32,
    /// 1: a thread's stack is taken when it is back on a CPU (`sched_exit_tp`, Linux 6.15), so that short times cost none. 0: when it
    /// leaves it.
    pub at_return: u32,
}

/// What [`Config::off_cpu_stacks`] is counted over.
pub const OFF_CPU_WINDOW_NS: u64 = 100_000_000;
/// Entries of the `AWAY` map: threads of followed processes that are off their CPU at one time.
pub const MAX_AWAY: u32 = 65_536;

/// One piece of the objspace that a snapshot copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct Span {
    /// Byte offset inside `rb_objspace_t`, or inside what `via` points to.
    pub offset: u16,
    /// Bytes, 1..=[`SLOT_BYTES`].
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

/// How to get from the thread at a probe to what the VM keeps per thread and per Ractor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct ThreadPath {
    /// Stated address of the word that holds the image's TLS module id (a `DTPMOD64` GOT slot), whose block is found
    /// in the thread's dynamic thread vector; 0: the offsets below count from the thread pointer (static executables).
    pub module: u64,
    /// Byte offset of `ruby_current_ec` in the TLS block.
    pub ec: i64,
    /// Byte offset there of the variable that [`Span::LOCAL`] copies (`malloc_increase_local`, gc.c ≥ 4.0).
    pub local: i64,
    /// Byte offset of `thread_ptr` in `rb_execution_context_t`.
    pub ec_thread: u32,
    /// Byte offset of `ractor` in `rb_thread_t`.
    pub thread_ractor: u32,
    /// Byte offset of `newobj_cache` in `rb_ractor_t`.
    pub ractor_cache: u32,
    /// Bytes from entry to entry of the dynamic thread vector: 16 with glibc, 8 with musl.
    pub dtv_entry: u32,
}

/// How to walk the Ruby stack of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct StackPath {
    /// Where the pointer to the thread's execution context is: one of the constants.
    pub place: u32,
    /// Bytes from entry to entry of the dynamic thread vector: 16 with glibc, 8 with musl.
    pub dtv_entry: u32,
    /// [`StackPath::TLS`]: stated address of the word that holds the image's TLS module id.
    pub module: u64,
    /// Byte offset of the pointer in the TLS block or from the thread pointer; its stated address.
    pub context: i64,
    /// Byte offset of `vm_stack` in `rb_execution_context_t`.
    pub ec_stack: u32,
    /// Byte offset of `vm_stack_size` (in words) there.
    pub ec_stack_size: u32,
    /// Byte offset of `cfp` there.
    pub ec_frame: u32,
    /// Byte offset of `thread_ptr` there.
    pub ec_thread: u32,
    /// Byte offset of `ec` in `rb_thread_t`.
    pub thread_ec: u32,
    /// [`StackPath::GLOBAL`]: byte offset of `thread_id` (a `pthread_t`) there.
    pub thread_id: u32,
    /// `sizeof(rb_control_frame_t)`.
    pub frame_size: u32,
    /// Byte offset of `pc` in it.
    pub frame_pc: u32,
    /// Byte offset of `iseq` in it.
    pub frame_iseq: u32,
    /// Byte offset of `ep` in it.
    pub frame_ep: u32,
    /// Byte offset of `jit_return` in it, 0 where there is none.
    pub frame_jit: u32,
    /// First bit of the GC mode in the objspace's `flags`.
    pub mode_shift: u32,
    /// Mask of `during_compacting` there, 0 where there is none.
    pub compacting_mask: u32,
    /// Byte offset of `body` in `rb_iseq_t`.
    pub iseq_body: u32,
    /// Byte offset of `location.base_label`, the name of the method, in it.
    pub body_base_label: u32,
    /// Byte offset of the pointer to the bytes in `RString`.
    pub string_pointer: u32,
    /// Byte offset of the bytes themselves, where they are embedded.
    pub string_embedded: u32,
    /// Byte offset of `profile.latest_gc_info` in the objspace (32 bits, gc.c `enum gpr_flag`); 0: not known.
    pub gc_info: u32,
}

impl StackPath {
    /// The reasons for a major GC in `profile.latest_gc_info` (`GPR_FLAG_MAJOR_MASK`, gc.c, 2.2 and later); a cycle with none of them
    /// is minor.
    pub const MAJOR_MASK: u32 = 0xff;
    /// [`StackPath::place`]: stacks of this image cannot be walked.
    pub const NONE: u32 = 0;
    /// A thread-local variable in the image's TLS block, which the thread's dynamic thread vector leads to.
    pub const TLS: u32 = 1;
    /// A thread-local variable at a fixed distance from the thread pointer (static executables).
    pub const THREAD_POINTER: u32 = 2;
    /// A global variable: the context of the thread that holds the GVL (up to 2.7).
    pub const GLOBAL: u32 = 3;
    /// The largest `sizeof(rb_control_frame_t)` of any release.
    pub const MAX_FRAME_SIZE: u32 = 64;
}

/// What the programs must know of one Ruby image.
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
    /// Mask of the GC mode inside `flags` (0 under it: no cycle is running).
    pub mode_mask: u32,
    /// Mask of `dont_gc` inside `flags`.
    pub dont_gc_mask: u32,
    /// Number of spans used.
    pub spans: u32,
    /// 0 marks an entry that is closed: no hit of the image is an event. (Its stacks can be walked all the same.)
    pub open: u32,
    /// Byte offset of `free_slots` in `struct heap_page`; 0: refills are not counted.
    pub page_free_slots: u16,
    /// Byte offset of `slot_size` there, or [`ImageConfig::RVALUE_SLOTS`].
    pub page_slot_size: u16,
    /// The way to per-thread data; used only where a span asks for it.
    pub thread: ThreadPath,
    /// The way to the Ruby stack of a thread.
    pub stack: StackPath,
    /// How its GVL is watched.
    pub gvl: GvlPath,
    /// The spans, in the order of the snapshot's slots.
    pub span: [Span; SLOTS],
    /// For a GC library (`librubygc`, CRuby built `--with-modular-gc`), whose VM is in another image: stated address of
    /// a word of the library that holds an address of that image, by which both are known. `vm_ptr` and
    /// [`ThreadPath::module`] are then distances from that address. 0: they are addresses of this image.
    pub anchor: u64,
    /// For a GC library: stated address of the word with the library's own TLS module id, whose block
    /// [`ThreadPath::local`] counts from. 0: it counts from where [`ThreadPath::ec`] does.
    pub local_module: u64,
}

impl ImageConfig {
    /// [`ImageConfig::page_slot_size`]: all slots have the size of an `RVALUE`, 40 bytes (up to 3.0, gc.c).
    pub const RVALUE_SLOTS: u16 = u16::MAX;
    /// That size.
    pub const RVALUE_BYTES: u32 = 40;
}

/// Entry of the `PROCESSES` map, keyed by tgid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct ProcessEntry {
    /// GC records emitted or lost so far.
    pub seq: u64,
    /// Load bias of the image; used where there are no cookies.
    pub bias: u64,
    /// Image index; used where there are no cookies.
    pub image: u32,
    /// [`ProcessEntry::SELECTED`] and friends.
    pub flags: u32,
    /// Begin of the GC pause in which a thread of it is, nanoseconds; 0: in none. That of a pause that an exception has left stays
    /// until the next one ends.
    pub pause_ns: u64,
}

impl ProcessEntry {
    /// The user selected this process (or an ancestor it was forked from).
    pub const SELECTED: u32 = 1;
    /// `image` and `bias` are set.
    pub const IMAGE_KNOWN: u32 = 2;
    /// At least one GC record has been emitted for it.
    pub const RUBY: u32 = 4;
    /// The user selected this process alone: its children do not inherit the selection.
    pub const ALONE: u32 = 8;
}

/// Entry of the `SHARES` map: what a CPU has taken of its share of off-CPU stacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StackShare {
    /// When the present window began, nanoseconds.
    pub begin_ns: u64,
    /// Stacks wanted in it.
    pub wanted: u64,
    /// Of them, taken.
    pub taken: u64,
    /// Stacks wanted in the window before.
    pub wanted_before: u64,
}

impl StackShare {
    /// Whether one more stack is taken. Where there were more than `quota` in the window before, each has the same chance: taking the first
    /// ones of each window would prefer threads that wake together with whatever begins it.
    #[inline]
    pub const fn takes(&mut self, now_ns: u64, quota: u64, random: u32) -> bool {
        let age = now_ns.wrapping_sub(self.begin_ns);
        if age >= OFF_CPU_WINDOW_NS {
            // An older window tells nothing of this one.
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

/// Entry of the `RETURNING` map, of each CPU: the thread that has just got it, whose stack is to be taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Returning {
    /// The thread; 0: none.
    pub tid: u32,
    /// Its process.
    pub tgid: u32,
    /// When it had left its CPU, which is the time of the stack.
    pub begin_ns: u64,
    /// As in [`AwayEntry`].
    pub thread: u64,
}

/// Entry of the `AWAY` map, keyed by tid: a thread of a followed process that has left its CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct AwayEntry {
    /// When, nanoseconds.
    pub begin_ns: u64,
    /// When it became runnable, or 0.
    pub wakeup_ns: u64,
    /// Its process.
    pub tgid: u32,
    /// Image of that.
    pub image: u32,
    /// How often that had replaced its program.
    pub execs: u32,
    /// One of the constants of [`OffCpuEvent`](crate::stack::OffCpuEvent).
    pub why: u32,
    /// Its `rb_thread_t *`, where that is known only while it holds the GVL ([`StackPath::GLOBAL`]), else 0.
    pub thread: u64,
    /// Name of the thread, NUL padded.
    pub comm: [u8; 16],
}

/// Entry of the `RUBIES` map, keyed by tgid: a followed process that runs a known image. Kept apart from
/// [`ProcessEntry`], so that a tick in a process that is not one of them costs one look-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct RubyEntry {
    /// Stack records emitted or lost so far.
    pub seq: u64,
    /// Events so far after which the VM may have freed or moved objects.
    pub epoch: u64,
    /// What watching its GVL has cost it so far, nanoseconds: its hits with [`TRAP_NS`](crate::gvl::TRAP_NS) each, and its stacks with
    /// [`STACK_NS`](crate::gvl::STACK_NS).
    pub gvl_ns: u64,
    /// Refills of the program so far.
    pub refills: u64,
    /// Bytes of slots that are handed out before a stack is taken at a refill ([`alloc_interval`]).
    pub alloc_left: u64,
    /// Load bias of the image.
    pub bias: u64,
    /// Image index.
    pub image: u32,
    /// How often the process has replaced its program.
    pub execs: u32,
    /// 1: `image` and `bias` hold. 0 since the last exec.
    pub known: u32,
    /// Zero.
    pub reserved: u32,
}

/// Where the threads of a process keep the variable by which a tracing library publishes the active span: `otel_thread_ctx_v1`, a pointer
/// to a [`ThreadContextRecord`] (OTEP 4947).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct ThreadContext {
    /// Number of the TLS module; 0: the offset counts from the thread pointer.
    pub module: u64,
    /// Byte offset in the module's TLS block, or from the thread pointer.
    pub offset: i64,
    /// Bytes from entry to entry of the dynamic thread vector: 16 with glibc, 8 with musl.
    pub dtv_entry: u32,
    /// Zero.
    pub reserved: u32,
}

/// The part of fixed size of what the variable points to (OTEP 4947, "Thread Local Context Record"). Attributes follow, which are not read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ThreadContextRecord {
    /// Zeros: no trace.
    pub trace_id: [u32; 4],
    /// Zeros: no span.
    pub span_id: [u32; 2],
    /// The first byte is 1 if the record is complete, 0 while it is being written. Flags and the size of the attributes follow.
    pub valid: u32,
}

impl ThreadContextRecord {
    /// Trace and span, as words in the order of their bytes, if the record is complete and has both.
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
    /// The image is there, as one of its probes has shown. Of another image, such as the library of a GC beside that of the VM, nothing is
    /// known here.
    #[inline]
    pub const fn place(&mut self, image: u32, bias: u64) {
        if self.image == image {
            self.bias = bias;
        }
    }

    /// The entry of a child that was forked: it has the same image at the same place, and has counted nothing.
    #[inline]
    #[must_use]
    pub const fn forked(&self) -> Self {
        Self { seq: 0, epoch: 0, gvl_ns: 0, refills: 0, ..*self }
    }
}

/// Bytes of slots between two stacks that are taken at refills, on average.
pub const ALLOC_INTERVAL: u64 = 512 << 10;

/// An interval from a random number. Intervals are of all lengths, so that a pattern of the program does not come at the same place
/// each time.
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

    /// Numbers that are as good as random.
    fn randoms() -> impl FnMut() -> u32 {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u32
        }
    }

    /// A probe of the same image shows where it is now; one of another image says nothing of it.
    #[test]
    fn place_of_an_image() {
        let mut entry = RubyEntry { image: 1, bias: 0x1000, known: 1, ..RubyEntry::default() };
        entry.place(2, 0x2000);
        assert_eq!(entry.bias, 0x1000);
        entry.place(1, 0x3000);
        assert_eq!((entry.image, entry.bias), (1, 0x3000));
    }

    /// As long as there are no more than the quota, all are taken.
    #[test]
    fn few_stacks() {
        let (mut share, mut random) = (StackShare::default(), randoms());
        for at in 0..1_000 {
            assert!(share.takes(at * OFF_CPU_WINDOW_NS / 100, 100, random()));
        }
    }

    /// Where there are more, each has the same chance, wherever in a window it comes, and the quota holds.
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

    /// A burst after a time of rest is bounded, too.
    #[test]
    fn burst() {
        let (mut share, mut random) = (StackShare::default(), randoms());
        let taken = (0..10_000).filter(|_| share.takes(1, 100, random())).count();
        assert_eq!(taken, 200);
    }
}
