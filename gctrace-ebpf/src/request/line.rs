//! The first line of a request. Only the part up to the end of its target is kept: no header and no query.

use gctrace_common::request::{LINE_BYTES, Parsed, ParserKey, end_of_target};

use crate::{filter::tgid_tid, maps::PARSERS, usermem};

/// Copies the first bytes of a request, of which `there` bytes have arrived, up to the end of its target or of the array.
#[inline(always)]
pub fn copy(parser: u64, parsed: &mut Parsed, from: u64, there: u64) {
    let len = if there > LINE_BYTES as u64 { LINE_BYTES as u32 } else { there as u32 };
    // SAFETY: the copy is bounded by the size of the array.
    let copied = unsafe { usermem::copy::<{ LINE_BYTES as u32 }>(from, len, (&raw mut parsed.line).cast()) };
    parsed.len = if copied.is_ok() { cut(parser, len) } else { 0 };
}

/// Clears the copied bytes after the end of the target, if that is in the first `len` bytes. Returns how many bytes are left.
#[inline(always)]
pub fn cut(parser: u64, len: u32) -> u32 {
    verified_once_2_cut_line(parser, u64::from(len)) as u32
}

/// The same as a global function, which the verifier walks once and not once per path to it. The caller also has a reference to the entry;
/// only bytes that it does not read are changed.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_2_cut_line(parser: u64, len: u64) -> u64 {
    let (tgid, _) = tgid_tid();
    let key = ParserKey { parser, tgid, reserved: 0 };
    let Some(entry) = PARSERS.get_ptr_mut(&key) else { return 0 };
    // SAFETY: a map value pointer, valid while the program runs; Puma gives a connection to one thread at a time.
    let line: *mut u64 = unsafe { (&raw mut (*entry).line).cast() };
    let (mut kept, mut left) = (u64::MAX, len);
    for index in 0..LINE_BYTES / 8 {
        // SAFETY: inside the array, which is 8-byte aligned in the entry. Volatile, or LLVM turns it into a call of memset.
        unsafe {
            let word = line.add(index);
            if kept == 0 {
                word.write_volatile(0);
                continue;
            }
            let (mask, end) = end_of_target(word.read_volatile());
            if end != 0 {
                word.write_volatile(word.read_volatile() & mask);
                kept = 0;
                let end = (index * 8) as u64 + u64::from(end);
                left = if end < len { end } else { len };
            }
        }
    }
    left
}

/// Whether the end of the target has been copied: then later bytes do not belong to the target.
#[inline(always)]
pub fn is_complete(parsed: &Parsed) -> bool {
    let last = usermem::opaque(u64::from(parsed.len).wrapping_sub(1));
    last < LINE_BYTES as u64 && matches!(parsed.line[last as usize], b'?' | b'\r' | b'\n')
}
