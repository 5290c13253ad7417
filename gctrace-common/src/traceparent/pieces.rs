//! The search in a head that arrives in pieces, each of which is seen once, when it has been read: a later piece does not contain the earlier
//! ones. The last 16 bytes of what arrived before are kept for it.
//!
//! All servers that read like this accept CR LF as the end of a line. Some accept a lone LF, too (WEBrick up to 1.8), others treat it as part
//! of a value: if one is seen, the search gives up. It also gives up if the request line does not end with `HTTP/1.0` or `HTTP/1.1`: a
//! request of HTTP/0.9 has no headers, and what follows it does not belong to it.

use super::{END, NAME_BYTES, NOTHING, ONES, RETURN, zeros};

/// Number of bytes of a piece searched at a time: half of the [parent's](super), because the longest call chain on the BPF stack is here.
pub const CHUNK_BYTES: usize = CHUNK_WORDS * 8;
/// The same in words of 8 bytes, little-endian.
pub const CHUNK_WORDS: usize = 8;
/// Number of these bytes at which the end of a line can be decided, because enough bytes follow.
pub const SEARCHED_BYTES: usize = CHUNK_BYTES - 16;

/// Result of a search, in addition to those of the [parent](super): an LF that does not end a line.
pub const LONE: u64 = 1 << 11;
/// Number of words kept from the end of what arrived before.
pub const TAIL_WORDS: usize = 2;
/// The same in bytes.
pub const TAIL_BYTES: usize = TAIL_WORDS * 8;
/// Longest head of a WEBrick that is searched: its `read_line` cuts lines after 4096 bytes (`WEBrick::HTTPRequest`), so that the end of a
/// longer one can be taken for the end of the head.
pub const MAX_WEBRICK_HEAD: u32 = 4096;
/// Length of `HTTP/1.1` and CR, the end of the request line.
pub const VERSION_BYTES: usize = 9;

const LINE_FEED: u64 = b'\n' as u64;
/// A word whose last byte is CR.
const AFTER_RETURN: u64 = RETURN << 56;

/// Searches a chunk of a head for the ends of lines. The first byte of the chunk must have been searched before, or not be a lone LF.
/// `search_word` is [`search_word`], or calls it.
#[inline(always)]
pub fn search(chunk: &[u64; CHUNK_WORDS], search_word: impl Fn(u64, u64, u64, u64) -> u64) -> u64 {
    let mut at = 0;
    let mut before = AFTER_RETURN;
    while at < SEARCHED_BYTES / 8 {
        let word = chunk[at];
        if zeros(word ^ (ONES * RETURN)) | zeros(word ^ (ONES * LINE_FEED)) != 0 {
            let found = search_word(before, word, chunk[at + 1], chunk[at + 2]);
            if found == END || found == LONE {
                return found;
            }
            if found != NOTHING {
                return (at * 8) as u64 + found;
            }
        }
        before = word;
        at += 1;
    }
    NOTHING
}

/// The same for one word, which follows `before`, and which `next` and `last` follow.
#[inline(always)]
pub fn search_word(before: u64, word: u64, next: u64, last: u64) -> u64 {
    let returns = zeros(word ^ (ONES * RETURN));
    let is_first = zeros(before ^ (ONES * RETURN)) >> 56;
    let lone = zeros(word ^ (ONES * LINE_FEED)) & !(returns << 8 | is_first);
    // Mask of the bytes before the first lone LF, or of all bytes.
    let good = (lone & lone.wrapping_neg()).wrapping_sub(1);
    let found = super::search_word(word & good, next, last);
    if found == NOTHING && lone != 0 { LONE } else { found }
}

/// Number of bytes of a chunk that need not be searched again, if `there` bytes have arrived and nothing was found. Less than
/// [`SEARCHED_BYTES`], because the first byte of the next chunk must be one that has been searched.
#[inline]
pub const fn passed(there: u32) -> u32 {
    let whole = there.saturating_sub(NAME_BYTES as u32);
    if whole < SEARCHED_BYTES as u32 { whole } else { SEARCHED_BYTES as u32 - 1 }
}

/// Position of the first LF in a chunk, or [`NOTHING`].
#[inline(always)]
pub fn first_line_end(chunk: &[u64; CHUNK_WORDS]) -> u64 {
    let mut at = 0;
    while at < CHUNK_WORDS {
        let ends = zeros(chunk[at] ^ (ONES * LINE_FEED));
        if ends != 0 {
            return (at * 8) as u64 + first_byte(ends);
        }
        at += 1;
    }
    NOTHING
}

/// The number of the first byte that is 0x80, in a word that has at least one.
#[inline(always)]
const fn first_byte(marks: u64) -> u64 {
    // Each byte below it becomes 0x01: their sum is their number.
    let below = (marks & marks.wrapping_neg()).wrapping_sub(1) >> 7 & ONES;
    below.wrapping_mul(ONES) >> 56
}

/// Whether this is a version with which a request line ends, before CR and LF.
#[inline(always)]
pub const fn is_version(word: u64) -> bool {
    word == u64::from_le_bytes(*b"HTTP/1.1") || word == u64::from_le_bytes(*b"HTTP/1.0")
}

/// Searches for the end of a line that lies in `tail`, the last bytes of what arrived before, and is decided by the first 16 bytes of a new
/// piece (zeros if fewer have arrived). Otherwise returns [`LONE`] if the piece begins with a lone LF. A header is returned as a number from 3
/// on: in the new piece, its value begins at that number minus [`VALUE_BEFORE`].
#[inline(always)]
pub fn search_boundary(tail: [u64; TAIL_WORDS], piece: [u64; 2]) -> u64 {
    // All LFs of the tail have been searched.
    let found = super::search_word(tail[0], tail[1], piece[0]);
    if found != NOTHING {
        return found;
    }
    let found = super::search_word(tail[1], piece[0], piece[1]);
    if found == NOTHING {
        let is_lone = piece[0] & 0xff == LINE_FEED && tail[1] >> 56 != RETURN;
        return if is_lone { LONE } else { NOTHING };
    }
    if found == END { END } else { found + 8 }
}

/// See [`search_boundary`].
pub const VALUE_BEFORE: u64 = (TAIL_BYTES - NAME_BYTES - 1) as u64;

/// The last 16 bytes after a piece of `len` bytes (at most 16) has arrived, without the bytes that have been decided.
#[inline(always)]
pub fn tail_after(tail: [u64; TAIL_WORDS], piece: [u64; 2], len: u64) -> [u64; TAIL_WORDS] {
    let [first, second] = if len >= 16 {
        piece
    } else if len >= 8 {
        [follows(tail[1], piece[0], len - 8), follows(piece[0], piece[1], len - 8)]
    } else {
        [follows(tail[0], tail[1], len), follows(tail[1], piece[0], len)]
    };
    [first & UNDECIDED, second]
}

/// Mask of the bytes of a tail's first word at which the end of a line cannot be decided yet.
const UNDECIDED: u64 = u64::MAX << (8 * (TAIL_BYTES - NAME_BYTES));

/// The eight bytes that begin at byte `byte` (0 to 7) of two words.
#[inline(always)]
const fn follows(word: u64, next: u64, byte: u64) -> u64 {
    // A shift by 64 bits would shift nothing.
    if byte == 0 { word } else { word >> (byte * 8) | next << (64 - byte * 8) }
}

const _: () = assert!(CHUNK_BYTES < NOTHING as usize);

#[cfg(test)]
mod tests {
    extern crate std;

    use std::{format, vec, vec::Vec};

    use super::*;

    /// How the search in a head ends. (What is found are the positions of the header's values in the whole head.)
    #[derive(Debug, PartialEq, Eq)]
    enum Ends {
        More,
        End,
        GivenUp,
    }

    fn words<const N: usize>(bytes: &[u8]) -> [u64; N] {
        let mut padded = vec![0; N * 8];
        let len = bytes.len().min(padded.len());
        padded[..len].copy_from_slice(&bytes[..len]);
        core::array::from_fn(|at| u64::from_le_bytes(padded[at * 8..at * 8 + 8].try_into().unwrap()))
    }

    /// Searches pieces the way the kernel side does.
    fn walk(pieces: &[&[u8]]) -> (Vec<usize>, Ends) {
        let (mut values, mut tail, mut before, mut is_first) = (Vec::new(), [0; TAIL_WORDS], 0, true);
        for piece in pieces {
            let mut at = 0;
            if !is_first {
                match search_boundary(tail, words(piece)) {
                    END => return (values, Ends::End),
                    LONE => return (values, Ends::GivenUp),
                    NOTHING => {}
                    found => values.push(before + (found - VALUE_BEFORE) as usize),
                }
            }
            while is_first {
                let chunk = words(&piece[at..]);
                let found = first_line_end(&chunk);
                if found == NOTHING {
                    at += CHUNK_BYTES;
                    if at >= piece.len() {
                        return (values, Ends::GivenUp);
                    }
                    continue;
                }
                at += found as usize;
                let version = at.checked_sub(VERSION_BYTES).map(|from| words::<1>(&piece[from..])[0]);
                if !version.is_some_and(is_version) || piece[at - 1] != b'\r' {
                    return (values, Ends::GivenUp);
                }
                at -= 1;
                is_first = false;
            }
            while at < piece.len() {
                match search(&words(&piece[at..]), search_word) {
                    END => return (values, Ends::End),
                    LONE => return (values, Ends::GivenUp),
                    NOTHING => {
                        let passed = passed((piece.len() - at).min(CHUNK_BYTES) as u32) as usize;
                        at += passed;
                        if passed == 0 {
                            break;
                        }
                    }
                    end => {
                        values.push(before + at + end as usize + 1 + NAME_BYTES);
                        at += end as usize + 1;
                    }
                }
            }
            let last: [u64; 2] =
                if piece.len() >= 16 { words(&piece[piece.len() - 16..]) } else { words(piece) };
            tail = tail_after(tail, last, piece.len() as u64);
            before += piece.len();
        }
        (values, Ends::More)
    }

    /// The same byte by byte, for a head whose request line has arrived.
    fn reference(head: &[u8]) -> (Vec<usize>, Ends) {
        let mut values = Vec::new();
        let first = head.iter().position(|byte| *byte == b'\n').unwrap();
        if !(head[..first].ends_with(b" HTTP/1.1\r") || head[..first].ends_with(b" HTTP/1.0\r")) {
            return (values, Ends::GivenUp);
        }
        for at in first..head.len() {
            if head[at] != b'\n' {
                continue;
            }
            if head[at - 1] != b'\r' {
                return (values, Ends::GivenUp);
            }
            let rest = &head[at + 1..];
            if rest.starts_with(b"\r\n") {
                return (values, Ends::End);
            }
            if rest.len() >= 12 && rest[..12].eq_ignore_ascii_case(b"traceparent:") {
                values.push(at + 13);
            }
        }
        (values, Ends::More)
    }

    fn cut(head: &[u8], first: usize, len: usize) -> Vec<&[u8]> {
        let (first, rest) = head.split_at(first);
        core::iter::once(first).chain(rest.chunks(len)).collect()
    }

    /// Wherever the header is, and in whatever pieces the head arrives, it is found once; so is the end, and nothing after it.
    #[test]
    fn found_at_each_place() {
        for before in 0..300 {
            let filler = "x".repeat(before);
            for name in ["traceparent", "Traceparent", "TRACEPARENT"] {
                let line = format!("GET /{filler} HTTP/1.1\r\n");
                let mut head = format!("{line}Host: a\r\n{name}: v\r\nx: y\r\n\r\n").into_bytes();
                let expected = reference(&head);
                assert_eq!((expected.0.len(), &expected.1), (1, &Ends::End));
                head.extend_from_slice(b"\nGET / HTTP/1.1\r\ntraceparent: other\r\n\r\n");
                assert_eq!(walk(&[&head]), expected, "{before}");
                for len in [1, 2, 7, 8, 12, 13, 14, 15, 16, 17, 113, 128] {
                    assert_eq!(walk(&cut(&head, line.len(), len)), expected, "{before} {len}");
                }
                for first in line.len()..head.len() {
                    assert_eq!(walk(&cut(&head, first, 1000)), expected, "{before} {first}");
                }
            }
        }
    }

    /// The search gives up if the first piece, or its line ends, leave the result open.
    #[test]
    fn given_up() {
        for head in [
            "GET /\r\ntraceparent: v\r\n\r\n",
            "GET / HTTP/0.9\r\ntraceparent: v\r\n\r\n",
            "GET / HTTP/1.1\ntraceparent: v\r\n\r\n",
            "GET / HTTP/1.1 \r\ntraceparent: v\r\n\r\n",
            "GET / HTTP/1.1\r\nx: y\ntraceparent: v\r\n\r\n",
            "GET / HTTP/1.1\r\nx: y\n\r\n\r\n",
            "GET / HTTP/1.1\r\n\n\r\n",
            "\n\r\n",
        ] {
            assert_eq!(walk(&[head.as_bytes()]), (Vec::new(), Ends::GivenUp), "{head}");
        }
        assert_eq!(walk(&[b"GET / HTTP/1", b".1\r\n\r\n"]), (Vec::new(), Ends::GivenUp));
        let twice: [&[u8]; 2] = [b"GET / HTTP/1.1\r\ntraceparent:a\r\nTRACE", b"PARENT:b\r\n\r\n"];
        assert_eq!(walk(&twice), (vec![28, 43], Ends::End));
    }

    /// For any bytes, in whatever pieces they arrive, the result is that of the plain search.
    #[test]
    fn hostile() {
        let alphabet: &[&[u8]] = &[
            b"\r\n",
            b"\r\n",
            b"\r\ntraceparent:",
            b"TracePARENT:",
            b"trace",
            b"\0",
            b"\xff\x8a\x0b\x0d",
            b"x",
            b"abcdefghijklmnopqrstuvw",
            b"\r\n ",
            b"\n",
            b"HTTP/1.1\r\n",
        ];
        let mut state = 1_u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        for _ in 0..20_000 {
            let mut head = b"GET / HTTP/1.1\r\n".to_vec();
            let (first, parts, of) = (head.len(), random(60), 9 + random(4));
            head.extend((0..parts).flat_map(|_| alphabet[random(of)]));
            let mut cuts: Vec<usize> =
                (0..random(9)).map(|_| first + random(head.len() - first + 1)).collect();
            cuts.extend([first + random(head.len() - first + 1), head.len()]);
            cuts.sort_unstable();
            cuts.dedup();
            let mut from = 0;
            let pieces: Vec<&[u8]> =
                cuts.iter().map(|to| &head[core::mem::replace(&mut from, *to)..*to]).collect();
            assert_eq!(walk(&pieces), reference(&head), "{:?}", std::string::String::from_utf8_lossy(&head));
        }
    }
}
