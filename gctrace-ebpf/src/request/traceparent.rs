//! The `traceparent` header of a request, searched for when the head is parsed: pieces of the head pass over the BPF stack, and only a valid
//! value is kept.

pub mod pieces;

use gctrace_common::{
    request::{Parsed, ParserKey},
    traceparent::{
        CHUNK_BYTES, CHUNK_WORDS, END, MAX_HEAD_BYTES, NAME_BYTES, NOTHING, SEARCHED_BYTES, Traceparent,
        VALUE_BYTES, VALUE_WORDS, is_valid_by_word, passed, search, search_word,
    },
};

use crate::{filter::tgid_tid, maps::PARSERS, usermem};

/// Number of chunks of the longest head, plus one for each of the first headers found in it.
const MAX_CHUNKS: u32 = MAX_HEAD_BYTES / SEARCHED_BYTES as u32 + 16;
/// Maximum number of blanks that are skipped before and after a value.
const MAX_BLANKS: u32 = 8;

/// Result of a chunk that could not be read.
const FAULT: u64 = 1 << 10;

/// The state of a search, in one number: how many bytes have been searched, where the value of the first header begins (see [`Parsed`]), and
/// how many headers there are, at most two. [`ENDED`] says that there are no more, [`STOP`] that nothing can be done before more bytes arrive.
///
/// A global function computes each state from the one before. The loop that calls it has a single path, which the verifier walks once per
/// round; if the branches of a step were in the loop, the verifier would walk all of their combinations.
const OFFSET_BITS: u32 = 16;
const OFFSET: u64 = (1 << OFFSET_BITS) - 1;
const HEADERS_AT: u32 = 2 * OFFSET_BITS;
const HEADERS: u64 = 3;
const MOST_HEADERS: u64 = 2;
const ENDED: u64 = 1 << 40;
const STOP: u64 = 1 << 41;

const _: () = assert!((MAX_HEAD_BYTES as usize + CHUNK_BYTES + NAME_BYTES) as u64 <= OFFSET);

/// Continues the search in a head that a parser receives: `there` bytes at `head` have arrived. To be called once per parse.
#[inline(always)]
pub fn look(parser: u64, parsed: &Parsed, head: u64, there: u64) {
    if parsed.traceparent == Traceparent::Unread as u32 && parsed.searched < MAX_HEAD_BYTES {
        let value = verified_once_3_search_head(parser, head, there);
        if value != 0 {
            let _in_the_entry = verified_once_2_copy_value(parser, value);
        }
    }
}

/// Global functions are walked once, and not once per path to them. They can take only numbers. Returns the address of the value if the
/// search ends with one header, otherwise 0.
///
/// Before Linux 6.13 the stacks of all functions in a call chain share 512 bytes, each rounded up to 32: so this chain has few calls and few
/// variables.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_3_search_head(parser: u64, head: u64, there: u64) -> u64 {
    let (tgid, _) = tgid_tid();
    let key = ParserKey { parser, tgid, reserved: 0 };
    let Some(entry) = PARSERS.get_ptr_mut(&key) else { return 0 };
    // SAFETY: a map value pointer, valid while the program runs; Puma gives a connection to one thread at a time.
    let parsed = unsafe { &mut *entry };
    let mut state = u64::from(parsed.searched) & OFFSET
        | (u64::from(parsed.value_at) & OFFSET) << OFFSET_BITS
        | (u64::from(parsed.headers) & HEADERS) << HEADERS_AT;
    for _ in 0..MAX_CHUNKS {
        state = verified_once_3_search_step(state, head, there);
        if state & STOP != 0 {
            break;
        }
    }
    let value_at = state >> OFFSET_BITS & OFFSET;
    let headers = state >> HEADERS_AT & HEADERS;
    parsed.searched = (state & OFFSET) as u32;
    parsed.value_at = value_at as u32;
    parsed.headers = headers as u32;
    if state & ENDED == 0 {
        return 0;
    }
    // Valid only if its value is copied.
    let (found, value) = match headers {
        0 => (Traceparent::Absent, 0),
        1 => (Traceparent::Invalid, head.wrapping_add(value_at)),
        _ => (Traceparent::Invalid, 0),
    };
    parsed.traceparent = found as u32;
    value
}

/// Searches one chunk of a head of which `there` bytes have arrived. Returns the new state.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_3_search_step(state: u64, head: u64, there: u64) -> u64 {
    let at = state & OFFSET;
    if at >= there || at >= u64::from(MAX_HEAD_BYTES) {
        return state | STOP;
    }
    let left = there.wrapping_sub(at);
    let len = if left < CHUNK_BYTES as u64 { left } else { CHUNK_BYTES as u64 };
    let found = verified_once_2_search_chunk(head.wrapping_add(at), len);
    if found == FAULT {
        return state & !OFFSET | u64::from(MAX_HEAD_BYTES) | STOP;
    }
    if found == END {
        return state | ENDED | STOP;
    }
    if found == NOTHING {
        let done = u64::from(passed(len as u32));
        return if done == 0 { state | STOP } else { state.wrapping_add(done) };
    }
    let line = at.wrapping_add(found).wrapping_add(1);
    let headers = state >> HEADERS_AT & HEADERS;
    match headers {
        0 => 1 << HEADERS_AT | line.wrapping_add(NAME_BYTES as u64) << OFFSET_BITS | line,
        MOST_HEADERS.. => state & !OFFSET | line,
        _ => (state & !OFFSET | line).wrapping_add(1 << HEADERS_AT),
    }
}

/// Searches `len` bytes, at most 128.
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
    search(&chunk, |word, next, last| verified_once_3_search_word(word, next, last))
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_3_search_word(word: u64, next: u64, last: u64) -> u64 {
    search_word(word, next, last)
}

/// Copies the value that follows the blanks at an address of the process into the entry of its parser, if the value is valid. At least two ends
/// of lines follow it, or it is too short. Returns 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_2_copy_value(parser: u64, from: u64) -> u64 {
    let (tgid, _) = tgid_tid();
    let key = ParserKey { parser, tgid, reserved: 0 };
    let Some(entry) = PARSERS.get_ptr_mut(&key) else { return 0 };
    let begin = verified_once_skip_blanks(from);
    let mut value = [0_u64; VALUE_WORDS];
    // SAFETY: the copy is bounded by the size of the array.
    let copied = unsafe {
        usermem::copy::<{ VALUE_WORDS as u32 * 8 }>(begin, VALUE_WORDS as u32 * 8, value.as_mut_ptr().cast())
    };
    if copied.is_err() {
        return 0;
    }
    let more = value[VALUE_WORDS - 1] >> 56 == u64::from(b'-');
    // The byte after the value does not belong to it.
    value[VALUE_WORDS - 1] &= u64::MAX >> 8;
    if is_valid_by_word(&value, more, usermem::opaque_after)
        && (more || ends_line(verified_once_skip_blanks(begin.wrapping_add(VALUE_BYTES as u64))))
    {
        // SAFETY: as above.
        unsafe {
            (*entry).value = value;
            (*entry).traceparent = Traceparent::Valid as u32;
        }
    }
    0
}

/// The address of the first byte that is not a blank (RFC 9110, 5.5).
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_skip_blanks(from: u64) -> u64 {
    let mut byte = 0_u8;
    let mut at = from;
    for _ in 0..MAX_BLANKS {
        // SAFETY: the copy is bounded by the size of the variable.
        let copied = unsafe { usermem::copy::<1>(at, 1, &raw mut byte) };
        if copied.is_err() || !matches!(byte, b' ' | b'\t') {
            break;
        }
        at = at.wrapping_add(1);
    }
    at
}

#[inline(always)]
fn ends_line(at: u64) -> bool {
    usermem::read::<u16>(at) == Some(u16::from_le_bytes(*b"\r\n"))
}
