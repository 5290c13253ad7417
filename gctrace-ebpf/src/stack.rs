//! Taking the stack of the running thread, whatever the occasion.

use aya_ebpf::{
    EbpfContext,
    helpers::{bpf_get_current_comm, generated::bpf_get_stack},
};
use gctrace_common::{
    config::{ImageConfig, RubyEntry, StackPath},
    event::{Header, Kind},
    stack::{Cause, GcActivity, MAX_KERNEL_FRAMES, StackEvent, stage},
    stats::Counter,
};

use crate::{
    context,
    family::Family,
    maps::{SCOPES, add_one, any_image, count},
    request,
    scratch::Scratch,
    usermem, walk,
};

/// Why a stack is to be taken, and what is known about its thread.
pub struct Occasion {
    pub cause: Cause,
    pub ts_ns: u64,
    pub tgid: u32,
    pub tid: u32,
    pub ruby: *mut RubyEntry,
    pub weight_ns: u64,
    pub in_kernel: bool,
    /// It holds the GVL, and another thread waits for it.
    pub blocks: bool,
    /// The thread's `rb_thread_t *` if it is already known, otherwise 0.
    pub thread: u64,
}

/// Prepares the scratch and jumps to the stages. Returns only if that cannot be done.
#[inline(always)]
pub fn capture<F: Family, C: EbpfContext>(ctx: &C, occasion: &Occasion) {
    // SAFETY: a map value pointer, valid while the program runs, 8-byte aligned.
    let (seq, epoch, bias, index, execs) = unsafe {
        let entry = occasion.ruby;
        let cell = &raw mut (*entry).seq;
        add_one(cell);
        (cell.read_volatile(), (*entry).epoch, (*entry).bias, (*entry).image, (*entry).execs)
    };
    let Some(scratch) = F::claim() else { return count(Counter::StackBusy) };
    let Some(image) = any_image(index) else {
        F::release(scratch);
        return count(Counter::StackNotWalked);
    };
    // SAFETY: the scratch is this program's until it is released. Fields are written in place, because the record is
    // larger than the BPF stack.
    unsafe {
        let head = &raw mut (*scratch).head;
        (*head).header = Header {
            kind: Kind::Stack as u32,
            point: occasion.cause as u32,
            tgid: occasion.tgid,
            tid: occasion.tid,
            ts_ns: occasion.ts_ns,
            seq,
            image: index,
            execs,
        };
        (*head).bias = bias;
        (*head).weight_ns = occasion.weight_ns;
        (*head).epoch = epoch;
        (*head).request_ns = request::current(occasion.tgid, occasion.tid);
        (*head).comm = bpf_get_current_comm().unwrap_or_default();
        (*head).flags = if occasion.blocks { StackEvent::BLOCKS } else { 0 };
        (*head).ruby = 0;
        (*head).kernel = 0;
        let (gc, kind) = gc_activity(image, bias, occasion);
        (*head).gc = gc as u32;
        (*head).flags |= kind;
        // Profiles of malloc have no spans.
        if !matches!(occasion.cause, Cause::Malloc) {
            context::note(head, occasion.tgid);
        }
        if occasion.in_kernel {
            (*head).flags |= StackEvent::IN_KERNEL;
            kernel_frames(ctx, scratch);
        }
    }
    walk::prepare(scratch, image, bias, occasion.thread);
    // SAFETY: nothing is left to be dropped.
    unsafe {
        F::stages().tail_call(ctx, stage::NATIVE);
        F::stages().tail_call(ctx, stage::RUBY);
    }
    F::release(scratch);
    count(Counter::StackNotWalked);
}

/// # Safety
/// The scratch must be this program's.
#[inline(always)]
unsafe fn kernel_frames<C: EbpfContext>(ctx: &C, scratch: *mut Scratch) {
    const BYTES: u32 = (MAX_KERNEL_FRAMES * 8) as u32;
    // SAFETY: the helper writes at most that many bytes, which is what the field holds.
    unsafe {
        let frames = &raw mut (*scratch).head.kernel_frames;
        let bytes = bpf_get_stack(ctx.as_ptr(), frames.cast(), BYTES, 0);
        if bytes > 0 {
            (*scratch).head.kernel = (bytes as u32 / 8).min(MAX_KERNEL_FRAMES as u32);
        }
    }
}

/// What the collector is doing on the thread, and [`StackEvent::MAJOR`] or [`StackEvent::MINOR`] if the kind of cycle is known.
#[inline(always)]
fn gc_activity(image: &ImageConfig, bias: u64, occasion: &Occasion) -> (GcActivity, u32) {
    let key = u64::from(occasion.tgid) << 32 | u64::from(occasion.tid);
    // SAFETY: the value is read at once.
    let inside = unsafe { SCOPES.get(&key) }.is_some_and(|scope| scope.is_open());
    if !inside {
        return (GcActivity::None, 0);
    }
    if image.stack.place == StackPath::NONE {
        // The VM of a GC library is in another image, and without a path the phases cannot be distinguished.
        return (GcActivity::Other, 0);
    }
    let objspace = (|| {
        let vm: u64 = usermem::read(bias.wrapping_add(image.vm_ptr))?;
        usermem::read::<u64>(vm.wrapping_add(u64::from(image.vm_objspace)))
    })();
    let Some(objspace) = objspace else { return (GcActivity::Other, 0) };
    let Some(flags) = usermem::read::<u32>(objspace.wrapping_add(u64::from(image.flags))) else {
        return (GcActivity::Other, 0);
    };
    let mode = (flags & image.mode_mask) >> (image.stack.mode_shift & 31);
    // While no mode is set, the reasons may be those of the previous cycle: gc_start sets the reasons before the mode.
    let kind = if mode == 0 || image.stack.gc_info == 0 {
        0
    } else {
        match usermem::read::<u32>(objspace.wrapping_add(u64::from(image.stack.gc_info))) {
            Some(info) if info & StackPath::MAJOR_MASK != 0 => StackEvent::MAJOR,
            Some(_) => StackEvent::MINOR,
            None => 0,
        }
    };
    if flags & image.stack.compacting_mask != 0 {
        return (GcActivity::Compacting, kind);
    }
    let activity = match mode {
        1 => GcActivity::Marking,
        2 => GcActivity::Sweeping,
        3 => GcActivity::Compacting,
        _ => GcActivity::Other,
    };
    (activity, kind)
}
