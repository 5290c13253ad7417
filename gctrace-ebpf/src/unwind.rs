//! Walking a native stack by unwind tables (x86-64). User space builds the tables; see `gctrace_common::unwind`.
//!
//! Searches do not branch on what they find: the verifier follows both sides of each branch, so sixteen of them in a row
//! would be 65 thousand paths. They add a masked half instead.

use aya_ebpf::{EbpfContext, helpers::generated::bpf_ringbuf_output};
use gctrace_common::{
    event::Kind,
    stack::{MAX_NATIVE_FRAMES, NativeEnd, NativeEvent, StackEvent, stage},
    stats::Counter,
    unwind::{CHUNK_MAPPINGS, CHUNK_WORDS, Chunk, MAPPING_WORDS, PAGE_BYTES, PageWord, UnwindRow},
};

use crate::{
    family::{Family, Probe, Tick},
    maps::{CHUNKS, PROBE_SCRATCH, STACK_RING, TICK_SCRATCH, UNWOUND, count},
    ring::NO_WAKEUP,
    scratch::{Native, UNWIND_WINDOW},
    usermem::{self, Registers, opaque},
};

/// Number of frames that one program walks before it calls the next one; together with the programs of the Ruby stack this stays below
/// the number of tail calls that the kernel allows.
const FRAMES_PER_PROGRAM: usize = 64;
/// Number of frames that one call of a function walks, which the verifier walks once.
const FRAMES_PER_CALL: usize = 8;

/// A family whose programs walk native stacks.
pub trait Unwinds: Family {
    /// Walks up to [`FRAMES_PER_CALL`] frames in the scratch of a slot. Returns [`MORE`] or how the walk ended ([`cut_by`]).
    fn native_frames(slot: u32) -> u64;
}

impl Unwinds for Tick {
    #[inline(always)]
    fn native_frames(slot: u32) -> u64 {
        verified_once_tick_native(slot.into())
    }
}

impl Unwinds for Probe {
    #[inline(always)]
    fn native_frames(slot: u32) -> u64 {
        verified_once_probe_native(slot.into())
    }
}

/// The stage: walks the native stack in as many programs as needed, emits its record, and continues with the Ruby stack.
#[inline(always)]
pub fn native<F: Unwinds, C: EbpfContext>(ctx: &C, registers: impl FnOnce() -> Option<Registers>) {
    let Some((slot, scratch)) = F::claimed() else { return count(Counter::StackNotWalked) };
    // SAFETY: the scratch is this program's until it is released.
    let (native, head) = unsafe { (&mut (*scratch).native, &mut (*scratch).head) };
    let (mine, stack) = (&native.event.header, &head.header);
    let under_way = mine.ts_ns == stack.ts_ns && mine.seq == stack.seq && mine.tgid == stack.tgid;
    let mut end = MORE;
    if under_way || begin(native, head, registers) {
        for _ in 0..FRAMES_PER_PROGRAM / FRAMES_PER_CALL {
            end = F::native_frames(slot);
            if end != MORE {
                break;
            }
        }
    } else {
        end = cut_by(NativeEnd::NoRegisters);
    }
    if end == MORE {
        // SAFETY: nothing is left to be dropped.
        unsafe { F::stages().tail_call(ctx, stage::NATIVE) };
        end = cut_by(NativeEnd::Truncated);
    }
    // SAFETY: the scratch is still this program's.
    let (native, head) = unsafe { (&mut (*scratch).native, &mut (*scratch).head) };
    emit(native, head, end);
    // SAFETY: as above.
    unsafe { F::stages().tail_call(ctx, stage::RUBY) };
    F::release(scratch);
    count(Counter::StackNotWalked);
}

/// Prepares the walk of the thread's stack; returns `false` if its registers are not known.
#[inline(always)]
fn begin(native: &mut Native, head: &StackEvent, registers: impl FnOnce() -> Option<Registers>) -> bool {
    count(Counter::NativeStacks);
    native.event.header = head.header;
    native.event.header.kind = Kind::Native as u32;
    native.event.count = 0;
    native.event.reserved = 0;
    let Some(Registers { ip, sp, bp }) = registers() else { return false };
    (native.ip, native.sp, native.bp) = (ip, sp, bp);
    (native.exact, native.bp_lost) = (1, 0);
    (native.start, native.end) = (0, 0);
    // SAFETY: the value is copied at once.
    native.mappings = unsafe { UNWOUND.get(&head.header.tgid) }.map_or(0, |chunk| u64::from(*chunk));
    true
}

/// Submits the record.
#[inline(always)]
fn emit(native: &mut Native, head: &mut StackEvent, end: u64) {
    native.event.header.point = end.wrapping_sub(1) as u32;
    // SAFETY: the length is bounded by what follows the head.
    let sent = unsafe {
        let mut frames = (&raw const native.event.count).read_volatile();
        if frames > MAX_NATIVE_FRAMES as u32 {
            frames = MAX_NATIVE_FRAMES as u32;
        }
        let bytes = size_of::<NativeEvent>() as u64 + u64::from(frames) * 8;
        let ring = (&raw const STACK_RING).cast_mut().cast();
        bpf_ringbuf_output(ring, (&raw mut native.event).cast(), bytes, NO_WAKEUP)
    };
    if sent == 0 {
        head.flags |= StackEvent::NATIVE;
        count(Counter::NativeSubmitted);
    } else {
        count(Counter::NativeRingFull);
    }
}

/// There may be more frames.
const MORE: u64 = 0;

/// Encodes how a walk ended; 0 means that it has not ended.
#[inline(always)]
fn cut_by(end: NativeEnd) -> u64 {
    end as u64 + 1
}

/// Walks some frames of a tick's stack: a global function, which the verifier walks once and not at each call.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_tick_native(slot: u64) -> u64 {
    let Some(scratch) = TICK_SCRATCH.get_ptr_mut(slot as u32) else { return cut_by(NativeEnd::NoRegisters) };
    // SAFETY: the caller has claimed it.
    some_frames(unsafe { &mut (*scratch).native })
}

/// The same for a stack at a probe.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_probe_native(slot: u64) -> u64 {
    let Some(scratch) = PROBE_SCRATCH.get_ptr_mut(slot as u32) else { return cut_by(NativeEnd::NoRegisters) };
    // SAFETY: the caller has claimed it.
    some_frames(unsafe { &mut (*scratch).native })
}

#[inline(always)]
fn some_frames(native: &mut Native) -> u64 {
    for _ in 0..FRAMES_PER_CALL {
        if let Some(end) = frame(native) {
            return cut_by(end);
        }
    }
    if native.event.count as usize >= MAX_NATIVE_FRAMES { cut_by(NativeEnd::Truncated) } else { MORE }
}

/// Records the frame and moves to its caller. Returns how the walk ended, if it did.
#[inline(always)]
fn frame(native: &mut Native) -> Option<NativeEnd> {
    let ip = native.ip;
    let count = native.event.count as usize;
    if count >= MAX_NATIVE_FRAMES {
        return Some(NativeEnd::Truncated);
    }
    native.frames[count] = ip;
    native.event.count = count as u32 + 1;

    // A return address may be the first one after a function that ends with a call.
    let pc = ip.wrapping_sub(1 - (native.exact & 1));
    if (pc < native.start || pc >= native.end) && !find_mapping(native, pc) {
        return Some(NativeEnd::NoTable);
    }
    match find_row(native.chunk, pc.wrapping_sub(native.base)) {
        Some(word) => apply(native, UnwindRow::from_word(word)),
        None => Some(NativeEnd::NoRow),
    }
}

/// Moves to the caller according to a row.
#[inline(always)]
fn apply(native: &mut Native, row: UnwindRow) -> Option<NativeEnd> {
    let kind = row.kind & UnwindRow::KIND_MASK;
    let offset = (i64::from(row.cfa) * 8) as u64;
    let uses_bp = kind == UnwindRow::RBP || kind == UnwindRow::DEREF_RBP;
    if uses_bp && native.bp_lost != 0 {
        return Some(NativeEnd::Unsupported);
    }
    let cfa = match kind {
        UnwindRow::RSP => native.sp.wrapping_add(offset),
        UnwindRow::RBP => native.bp.wrapping_add(offset),
        UnwindRow::PLT => {
            let second = u64::from(native.ip & 15 >= row.cfa as u16 as u64);
            native.sp.wrapping_add(8).wrapping_add(second << 3)
        }
        UnwindRow::DEREF_RSP | UnwindRow::DEREF_RBP => {
            let base = if kind == UnwindRow::DEREF_RSP { native.sp } else { native.bp };
            let Some(value) = usermem::read::<u64>(base.wrapping_add(offset)) else {
                return Some(NativeEnd::ReadFailed);
            };
            value.wrapping_add(u64::from(row.kind >> 4) << 3)
        }
        UnwindRow::SIGNAL => return signal(native),
        UnwindRow::OUTERMOST => return Some(NativeEnd::Complete),
        UnwindRow::NONE => return Some(NativeEnd::NoRow),
        _ => return Some(NativeEnd::Unsupported),
    };
    // The stack grows downwards: a caller's frame is at a higher address.
    if cfa <= native.sp {
        return Some(NativeEnd::ReadFailed);
    }
    // Return address and saved rbp are usually close together, and reading one costs as much as reading both.
    let near = row.rbp < 0 && row.rbp >= -(UNWIND_WINDOW as i8);
    if near && read_window(native, cfa.wrapping_sub(8 * UNWIND_WINDOW as u64)) {
        native.ip = native.window[UNWIND_WINDOW - 1];
        native.bp = native.window[(UNWIND_WINDOW as i64 + i64::from(row.rbp)) as usize & (UNWIND_WINDOW - 1)];
        native.bp_lost = 0;
    } else {
        let Some(ip) = usermem::read::<u64>(cfa.wrapping_sub(8)) else { return Some(NativeEnd::ReadFailed) };
        if row.rbp == UnwindRow::RBP_LOST {
            native.bp_lost = 1;
        } else if row.rbp != UnwindRow::RBP_SAME {
            let place = if row.rbp == UnwindRow::RBP_AT_RBP {
                native.bp
            } else {
                cfa.wrapping_add((i64::from(row.rbp) * 8) as u64)
            };
            let Some(bp) = usermem::read::<u64>(place) else { return Some(NativeEnd::ReadFailed) };
            native.bp = bp;
            native.bp_lost = 0;
        }
        native.ip = ip;
    }
    native.sp = cfa;
    native.exact = 0;
    // The first function of a coroutine's stack returns to address zero.
    if native.ip == 0 { Some(NativeEnd::Complete) } else { None }
}

/// Copies the words from an address on into the window.
#[inline(always)]
fn read_window(native: &mut Native, address: u64) -> bool {
    let window = (&raw mut native.window).cast();
    // SAFETY: the window has that many bytes.
    unsafe { usermem::copy::<{ 8 * UNWIND_WINDOW as u32 }>(address, 8 * UNWIND_WINDOW as u32, window) }
        .is_ok()
}

/// Moves to the code that a signal interrupted: its registers are in the `struct ucontext` that `rsp` points to
/// (arch/x86/include/uapi/asm/ucontext.h).
#[inline(always)]
fn signal(native: &mut Native) -> Option<NativeEnd> {
    const UC_RBP: u64 = 120;
    const UC_RSP: u64 = 160;
    const UC_RIP: u64 = 168;
    let context = native.sp;
    // One after the other: if three are tested together LLVM merges the results, and on a path that is never taken it then reads
    // uninitialised stack, which Linux 5.10 refuses ("invalid read from stack R10 off=-120 size=8").
    let word = |offset: u64| usermem::read::<u64>(context.wrapping_add(offset));
    let Some(bp) = word(UC_RBP) else { return Some(NativeEnd::ReadFailed) };
    let Some(sp) = word(UC_RSP) else { return Some(NativeEnd::ReadFailed) };
    let Some(ip) = word(UC_RIP) else { return Some(NativeEnd::ReadFailed) };
    (native.bp, native.sp, native.ip) = (bp, sp, ip);
    (native.exact, native.bp_lost) = (1, 0);
    None
}

/// Makes the mapping of an address the current one. Returns whether there is one.
#[inline(always)]
fn find_mapping(native: &mut Native, pc: u64) -> bool {
    let Some(chunk) = chunk(native.mappings as u32) else { return false };
    let mut base = 0_usize;
    let mut half = CHUNK_MAPPINGS / 2;
    while half > 0 {
        base += masked(chunk[within(base + half, CHUNK_MAPPINGS) * MAPPING_WORDS], pc, half);
        half /= 2;
    }
    let at = within(base, CHUNK_MAPPINGS) * MAPPING_WORDS;
    native.start = chunk[at];
    native.end = chunk[at + 1];
    native.base = chunk[at + 2];
    native.chunk = chunk[at + 3];
    native.start <= pc && pc < native.end
}

/// The row that applies at an offset from the base of a table.
#[inline(always)]
fn find_row(table: u64, offset: u64) -> Option<u64> {
    let first = table as u32;
    let page = offset / u64::from(PAGE_BYTES);
    if page >= table >> 32 {
        return None;
    }
    let words = chunk(first.wrapping_add(page as u32 / CHUNK_WORDS as u32))?;
    let page = PageWord::from_word(words[within(page as usize, CHUNK_WORDS)]);
    let rows = chunk(first.wrapping_add(page.first / CHUNK_WORDS as u32))?;
    let start = page.first as usize & (CHUNK_WORDS - 1);
    let mut base = 0_usize;
    let mut half = PAGE_BYTES as usize / 2;
    while half > 0 {
        let probe = base + half;
        let beyond = opaque((i64::from(page.more) - probe as i64) as u64) as i64 >> 63;
        let key = rows[within(start + probe, CHUNK_WORDS)] & 0xffff_ffff;
        base += masked(key, offset, half) & !(opaque(beyond as u64) as usize);
        half /= 2;
    }
    Some(rows[within(start + base, CHUNK_WORDS)])
}

#[inline(always)]
fn chunk(number: u32) -> Option<&'static Chunk> {
    if number == 0 { None } else { CHUNKS.get(number) }
}

/// The index within an array of `len` entries, a power of two. If LLVM can prove the bound by itself, it omits the mask, but
/// Linux 5.10 cannot prove it ("math between map_value pointer and register with unbounded min value is not allowed").
#[inline(always)]
fn within(index: usize, len: usize) -> usize {
    opaque(index as u64) as usize & (len - 1)
}

/// `half` if `key <= wanted`, otherwise 0, without a branch.
#[inline(always)]
fn masked(key: u64, wanted: u64, half: usize) -> usize {
    // LLVM must learn neither that this is a comparison nor that its sign is one of two values, or it turns it into a branch.
    let below = opaque(wanted.wrapping_sub(key)) as i64 >> 63;
    half & !(opaque(below as u64) as usize)
}
