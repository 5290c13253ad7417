//! The same header for a head that is read in pieces ([`gctrace_common::traceparent::pieces`]): each piece is searched when it has been read, and
//! what is known about the header is kept until the head has ended.

use gctrace_common::{
    request::{Parsed, ParserKey},
    traceparent::{
        END, MAX_HEAD_BYTES, NAME_BYTES, NOTHING, Traceparent, VALUE_BYTES, VALUE_WORDS, is_valid_by_word,
        pieces::{
            CHUNK_BYTES, CHUNK_WORDS, LONE, MAX_WEBRICK_HEAD, SEARCHED_BYTES, TAIL_BYTES, TAIL_WORDS,
            VALUE_BEFORE, VERSION_BYTES, first_line_end, is_version, passed, search, search_boundary,
            search_word, tail_after,
        },
    },
};

use super::{
    ENDED, FAULT, HEADERS, HEADERS_AT, MOST_HEADERS, OFFSET, OFFSET_BITS, STOP, verified_once_skip_blanks,
};
use crate::{filter::tgid_tid, maps::PARSERS, usermem};

/// Number of chunks of the longest head, plus one for each of the first headers found in it.
const MAX_CHUNKS: u32 = MAX_HEAD_BYTES / (SEARCHED_BYTES as u32 - 1) + 16;
/// In the state of a search, in addition to the bits of the [parent](super): the first line has not ended.
const FIRST_LINE: u64 = 1 << 42;
/// In the state of a search: what follows cannot be determined.
const GIVEN_UP: u64 = 1 << 43;
/// [`Parsed::searched`] of a head that is not searched any further.
pub const DONE: u32 = u32::MAX;

/// Continues the search in a head of which `len` bytes at `piece` have been read.
#[inline(always)]
pub fn look(parser: u64, parsed: &Parsed, piece: u64, len: u64, is_webrick: bool) {
    let longest = if is_webrick { MAX_WEBRICK_HEAD } else { MAX_HEAD_BYTES };
    if parsed.searched < longest {
        let _in_the_entry = verified_once_4_search_piece(parser, piece, len, u64::from(longest));
    }
}

/// See [`super::verified_once_3_search_head`] for why these functions are global. Returns 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_4_search_piece(parser: u64, piece: u64, len: u64, longest: u64) -> u64 {
    let (tgid, _) = tgid_tid();
    let key = ParserKey { parser, tgid, reserved: 0 };
    let Some(entry) = PARSERS.get_ptr_mut(&key) else { return 0 };
    // SAFETY: a map value pointer, valid while the program runs; a connection is read by one thread at a time.
    let parsed = unsafe { &mut *entry };
    let before = u64::from(parsed.searched);
    let headers_before = u64::from(parsed.headers) & HEADERS;
    let room = longest.wrapping_sub(before);
    let there = if len < room { len } else { room };
    let mut state = headers_before << HEADERS_AT;
    state = if before == 0 {
        state | FIRST_LINE
    } else {
        verified_once_5_search_boundary(state, parsed.tail[0], parsed.tail[1], piece, there)
    };
    for _ in 0..MAX_CHUNKS {
        state = verified_once_3_search_piece_step(state, piece, there);
        if state & STOP != 0 {
            break;
        }
    }
    let headers = state >> HEADERS_AT & HEADERS;
    parsed.headers = headers as u32;
    if headers_before == 0 && headers == 1 {
        let value_at = state >> OFFSET_BITS & OFFSET;
        // If the head has ended, enough bytes follow the value in any case.
        let end = if state & ENDED == 0 { piece.wrapping_add(there) } else { u64::MAX };
        parsed.value_at = verified_once_3_copy_value(parser, piece.wrapping_add(value_at), end) as u32;
    }
    if state & ENDED != 0 {
        parsed.traceparent = match headers {
            0 => Traceparent::Absent as u32,
            1 => parsed.value_at,
            _ => Traceparent::Invalid as u32,
        };
    }
    if state & (ENDED | GIVEN_UP | FIRST_LINE) != 0 || there != len {
        parsed.searched = DONE;
    } else {
        parsed.searched = before.wrapping_add(there) as u32;
        let _in_the_entry = verified_once_3_keep_tail(parser, piece, there);
    }
    0
}

/// Searches the boundary between two pieces. Returns the state in which the search of the second piece begins.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_5_search_boundary(
    state: u64,
    first: u64,
    second: u64,
    piece: u64,
    there: u64,
) -> u64 {
    let mut next = [0_u64; TAIL_WORDS];
    let len = if there < TAIL_BYTES as u64 { there } else { TAIL_BYTES as u64 };
    // SAFETY: the copy is bounded by the size of the array.
    let copied =
        unsafe { usermem::copy::<{ TAIL_BYTES as u32 }>(piece, len as u32, next.as_mut_ptr().cast()) };
    if copied.is_err() {
        return state | GIVEN_UP | STOP;
    }
    match search_boundary([first, second], next) {
        NOTHING => state,
        END => state | ENDED | STOP,
        LONE => state | GIVEN_UP | STOP,
        found => header(state, 0, found.wrapping_sub(VALUE_BEFORE)),
    }
}

/// The state after a header was found: the search continues at `offset`, and the value begins at `value_at`.
#[inline(always)]
fn header(state: u64, offset: u64, value_at: u64) -> u64 {
    let headers = state >> HEADERS_AT & HEADERS;
    match headers {
        0 => 1 << HEADERS_AT | (value_at & OFFSET) << OFFSET_BITS | offset,
        MOST_HEADERS.. => state & !OFFSET | offset,
        _ => (state & !OFFSET | offset).wrapping_add(1 << HEADERS_AT),
    }
}

/// Searches one chunk of a piece of which `there` bytes count. Returns the new state.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_3_search_piece_step(state: u64, piece: u64, there: u64) -> u64 {
    let at = state & OFFSET;
    if state & STOP != 0 || at >= there || at >= u64::from(MAX_HEAD_BYTES) {
        return state | STOP;
    }
    let left = there.wrapping_sub(at);
    let len = if left < CHUNK_BYTES as u64 { left } else { CHUNK_BYTES as u64 };
    let is_first = state & FIRST_LINE;
    let found = verified_once_3_search_lines(piece.wrapping_add(at), len, is_first);
    if found == FAULT || found == LONE {
        return state | GIVEN_UP | STOP;
    }
    if found == END {
        return state | ENDED | STOP;
    }
    if found == NOTHING {
        let done = if is_first == 0 { u64::from(passed(len as u32)) } else { len };
        return if done == 0 { state | STOP } else { state.wrapping_add(done) };
    }
    let end = at.wrapping_add(found);
    if is_first == 0 {
        let line = end.wrapping_add(1);
        return header(state, line, line.wrapping_add(NAME_BYTES as u64));
    }
    let version = piece.wrapping_add(end).wrapping_sub(VERSION_BYTES as u64);
    let is_known = end > VERSION_BYTES as u64
        && usermem::read::<u64>(version).is_some_and(is_version)
        && usermem::read::<u8>(version.wrapping_add(8)) == Some(b'\r');
    if is_known { state & !(OFFSET | FIRST_LINE) | end.wrapping_sub(1) } else { state | GIVEN_UP | STOP }
}

/// Searches `len` bytes, at most 64: for the end of the line if `is_first` is not 0, otherwise for the end of the head or the header.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_3_search_lines(from: u64, len: u64, is_first: u64) -> u64 {
    let mut chunk = [0_u64; CHUNK_WORDS];
    // SAFETY: the copy is bounded by the size of the array.
    let copied =
        unsafe { usermem::copy::<{ CHUNK_BYTES as u32 }>(from, len as u32, chunk.as_mut_ptr().cast()) };
    if copied.is_err() {
        return FAULT;
    }
    if is_first != 0 {
        return first_line_end(&chunk);
    }
    search(&chunk, |before, word, next, last| verified_once_4_search_line(before, word, next, last))
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_4_search_line(before: u64, word: u64, next: u64, last: u64) -> u64 {
    search_word(before, word, next, last)
}

/// Keeps the last bytes of a piece. Returns 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_3_keep_tail(parser: u64, piece: u64, there: u64) -> u64 {
    let (tgid, _) = tgid_tid();
    let key = ParserKey { parser, tgid, reserved: 0 };
    let Some(entry) = PARSERS.get_ptr_mut(&key) else { return 0 };
    // SAFETY: as above.
    let parsed = unsafe { &mut *entry };
    let mut last = [0_u64; TAIL_WORDS];
    let len = if there < TAIL_BYTES as u64 { there } else { TAIL_BYTES as u64 };
    let from = piece.wrapping_add(there).wrapping_sub(len);
    // SAFETY: the copy is bounded by the size of the array.
    let copied =
        unsafe { usermem::copy::<{ TAIL_BYTES as u32 }>(from, len as u32, last.as_mut_ptr().cast()) };
    if copied.is_err() {
        parsed.searched = DONE;
    }
    parsed.tail = tail_after(parsed.tail, last, len);
    0
}

/// Copies the value that follows the blanks at an address of the process into the entry of its connection, if the value is valid. Returns its
/// state as a [`Traceparent`]: unread unless all of it, and what ends it, comes before `end`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_3_copy_value(parser: u64, from: u64, end: u64) -> u64 {
    let (tgid, _) = tgid_tid();
    let key = ParserKey { parser, tgid, reserved: 0 };
    let Some(entry) = PARSERS.get_ptr_mut(&key) else { return Traceparent::Unread as u64 };
    let begin = verified_once_skip_blanks(from);
    let behind = begin.wrapping_add(VALUE_BYTES as u64);
    if behind >= end {
        return Traceparent::Unread as u64;
    }
    let mut value = [0_u64; VALUE_WORDS];
    // SAFETY: the copy is bounded by the size of the array.
    let copied = unsafe {
        usermem::copy::<{ VALUE_WORDS as u32 * 8 }>(begin, VALUE_WORDS as u32 * 8, value.as_mut_ptr().cast())
    };
    if copied.is_err() {
        return Traceparent::Unread as u64;
    }
    let more = value[VALUE_WORDS - 1] >> 56 == u64::from(b'-');
    // The byte after the value does not belong to it.
    value[VALUE_WORDS - 1] &= u64::MAX >> 8;
    if !is_valid_by_word(&value, more, usermem::opaque_after) {
        return Traceparent::Invalid as u64;
    }
    if !more {
        let ends = verified_once_2_ends_value(verified_once_skip_blanks(behind), end);
        if ends != Traceparent::Valid as u64 {
            return ends;
        }
    }
    // SAFETY: as above.
    unsafe { (*entry).value = value };
    Traceparent::Valid as u64
}

/// Whether the line of a value ends at this address and the next line does not continue it, as a line that begins with a blank does (RFC 9112, 5.2).
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_2_ends_value(at: u64, end: u64) -> u64 {
    /// CR, LF, and the two bytes that may be the end of the head.
    const NEEDED: u64 = 4;
    if at.wrapping_add(NEEDED) > end {
        return Traceparent::Unread as u64;
    }
    let Some([cr, lf, next, last]) = usermem::read::<[u8; NEEDED as usize]>(at) else {
        return Traceparent::Unread as u64;
    };
    let goes_on = next <= b' ' && !(next == b'\r' && last == b'\n');
    if cr == b'\r' && lf == b'\n' && !goes_on {
        Traceparent::Valid as u64
    } else {
        Traceparent::Invalid as u64
    }
}
