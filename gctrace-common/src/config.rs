//! What the loader tells the BPF programs: read-only configuration and the per-image entries of the `IMAGES` map.

use crate::event::{SLOT_BYTES, SLOTS};

/// Entries of the `IMAGES` map.
pub const MAX_IMAGES: u32 = 256;
/// Entries of the `PROCESSES` map: followed processes at one time.
pub const MAX_PROCESSES: u32 = 65_536;
/// Entries of the `SCOPES` map: threads inside a GC pause at one time.
pub const MAX_SCOPES: u32 = 16_384;
/// Default size of the GC ring, bytes (a power of two and a multiple of the page size).
pub const GC_RING_BYTES: u32 = 4 << 20;
/// Default size of the lifecycle ring, bytes.
pub const LIFE_RING_BYTES: u32 = 256 << 10;

/// [`Config::select`]: every process that hits a probe.
pub const SELECT_ALL: u32 = 0;
/// [`Config::select`]: only processes whose entry in `PROCESSES` carries [`ProcessEntry::SELECTED`].
pub const SELECT_LISTED: u32 = 1;

/// Read-only configuration, frozen before the programs are verified, so that the verifier removes dead branches.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Config {
    /// One of the `SELECT_` constants.
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
}

/// One piece of the objspace that a snapshot copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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

/// What the programs must know of one Ruby image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
    /// 0 marks an entry that is closed: no hit of the image is an event.
    pub open: u32,
    /// The way to per-thread data; used only where a span asks for it.
    pub thread: ThreadPath,
    /// The spans, in the order of the snapshot's slots.
    pub span: [Span; SLOTS],
}

/// Entry of the `PROCESSES` map, keyed by tgid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
}

impl ProcessEntry {
    /// The user selected this process (or an ancestor it was forked from).
    pub const SELECTED: u32 = 1;
    /// `image` and `bias` are set.
    pub const IMAGE_KNOWN: u32 = 2;
    /// At least one GC record has been emitted for it.
    pub const RUBY: u32 = 4;
}

const _: () = assert!(size_of::<Config>() == 24);
const _: () = assert!(size_of::<Span>() == 8);
const _: () = assert!(size_of::<ThreadPath>() == 40);
const _: () = assert!(size_of::<ImageConfig>() == 80 + 8 * SLOTS);
const _: () = assert!(size_of::<ProcessEntry>() == 24);
const _: () = assert!(SLOT_BYTES <= 256 && SLOTS <= 64);
