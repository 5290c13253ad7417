//! The `traceparent` header of a request, looked for where its head is parsed: pieces of it pass over the BPF stack, and nothing but a valid
//! value is kept.

use gctrace_common::{
    request::{Parsed, ParserKey},
    traceparent::{
        CHUNK_BYTES, CHUNK_WORDS, Found, MAX_HEAD_BYTES, NAME_BYTES, SEARCHED_BYTES, Traceparent,
        VALUE_BYTES, VALUE_WORDS, is_valid, passed, search,
    },
};

use crate::{filter::tgid_tid, maps::PARSERS, usermem};

/// Chunks of the longest head, and one for each of its first headers.
const MAX_CHUNKS: u32 = MAX_HEAD_BYTES / SEARCHED_BYTES as u32 + 16;
/// Blanks that are skipped before and behind a value.
const MAX_BLANKS: u32 = 8;

/// Results of a chunk, beside the byte at which a line ends whose successor is the header.
const NOTHING: u64 = 1 << 8;
const END: u64 = 1 << 9;
const FAULT: u64 = 1 << 10;

/// Goes on with the search in a head that a parser receives: `there` bytes at `head` have come. To be called once per parse.
#[inline(always)]
pub fn look(parser: u64, parsed: &Parsed, head: u64, there: u64) {
    if parsed.traceparent == Traceparent::Unread as u32 && parsed.searched < MAX_HEAD_BYTES {
        let _told_by_the_entry = verified_once_3_search_head(parser, head, there);
    }
}

/// Global functions are walked once, and not for each way to them. They can be given numbers only. Returns 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_3_search_head(parser: u64, head: u64, there: u64) -> u64 {
    let (tgid, _) = tgid_tid();
    let key = ParserKey { parser, tgid, reserved: 0 };
    let Some(entry) = PARSERS.get_ptr_mut(&key) else { return 0 };
    // SAFETY: a map value pointer, valid while the program runs; Puma gives a connection to one thread at a time.
    let parsed = unsafe { &mut *entry };
    for _ in 0..MAX_CHUNKS {
        let at = parsed.searched;
        let left = there.wrapping_sub(u64::from(at));
        if u64::from(at) >= there || at >= MAX_HEAD_BYTES {
            break;
        }
        let len = if left < CHUNK_BYTES as u64 { left } else { CHUNK_BYTES as u64 };
        let found = verified_once_2_search_chunk(head.wrapping_add(u64::from(at)), len);
        if found & FAULT != 0 {
            parsed.searched = MAX_HEAD_BYTES;
            break;
        }
        if found & END != 0 {
            let value = head.wrapping_add(u64::from(parsed.value_at));
            parsed.traceparent = match parsed.headers {
                0 => Traceparent::Absent,
                1 if verified_once_2_copy_value(parser, value) != 0 => Traceparent::Valid,
                _ => Traceparent::Invalid,
            } as u32;
            break;
        }
        if found & NOTHING != 0 {
            let done = passed(len as u32);
            if done == 0 {
                break;
            }
            parsed.searched = at.wrapping_add(done);
            continue;
        }
        let line = at.wrapping_add(found as u32 & 0xff).wrapping_add(1);
        if parsed.headers == 0 {
            parsed.value_at = line.wrapping_add(NAME_BYTES as u32);
        }
        parsed.headers = parsed.headers.wrapping_add(1);
        parsed.searched = line;
    }
    0
}

/// Looks at `len` bytes, 128 at most.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_2_search_chunk(from: u64, len: u64) -> u64 {
    let mut chunk = [0_u64; CHUNK_WORDS];
    // SAFETY: the copy is bounded by the size of the array.
    let copied =
        unsafe { usermem::copy::<{ CHUNK_BYTES as u32 }>(from, len as u32, chunk.as_mut_ptr().cast()) };
    if copied.is_err() {
        return FAULT;
    }
    match search(&chunk) {
        Found::Nothing => NOTHING,
        Found::End => END,
        Found::Header(at) => u64::from(at),
    }
}

/// Copies the value that begins at an address of the process, behind blanks, into the entry of its parser, if it is valid. Returns whether
/// it is. Behind it are two ends of lines at least, or it is too short.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_2_copy_value(parser: u64, from: u64) -> u64 {
    let (tgid, _) = tgid_tid();
    let key = ParserKey { parser, tgid, reserved: 0 };
    let Some(entry) = PARSERS.get_ptr_mut(&key) else { return 0 };
    let begin = skip_blanks(from);
    let Some(mut value) = usermem::read::<[u64; VALUE_WORDS]>(begin) else { return 0 };
    let more = value[VALUE_WORDS - 1] >> 56 == u64::from(b'-');
    // What follows it is none of it.
    value[VALUE_WORDS - 1] &= u64::MAX >> 8;
    if !is_valid(&value, more) || !(more || ends_line(skip_blanks(begin.wrapping_add(VALUE_BYTES as u64)))) {
        return 0;
    }
    // SAFETY: as above.
    unsafe { (*entry).value = value };
    1
}

/// The address of the first byte that is no blank (RFC 9110, 5.5).
#[inline(always)]
fn skip_blanks(mut from: u64) -> u64 {
    for _ in 0..MAX_BLANKS {
        if !matches!(usermem::read::<u8>(from), Some(b' ' | b'\t')) {
            break;
        }
        from = from.wrapping_add(1);
    }
    from
}

#[inline(always)]
fn ends_line(at: u64) -> bool {
    usermem::read::<u16>(at) == Some(u16::from_le_bytes(*b"\r\n"))
}
