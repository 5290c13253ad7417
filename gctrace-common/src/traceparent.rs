//! The `traceparent` header in the head of a request (W3C Trace Context, Level 1 and 2, sections 3.2 and 4): the search for it, and the check of
//! its value. The kernel side does both, so that no other header leaves the server's memory for this purpose.
//!
//! Lines end with CR LF, as in Puma since 5.5.1: a lone LF is part of a value, and what follows it is not a header, even if it looks like one.
//! Heads that arrive in pieces, and other servers, are handled in [`pieces`].

#![allow(clippy::inline_always, reason = "a call costs a BPF program a frame of its stack")]

pub mod pieces;

/// Number of bytes of a head that are searched at a time.
pub const CHUNK_BYTES: usize = CHUNK_WORDS * 8;
/// The same in words of 8 bytes, little-endian.
pub const CHUNK_WORDS: usize = 16;
/// Number of these bytes at which the end of a line can be decided, because enough bytes follow.
pub const SEARCHED_BYTES: usize = SEARCHED_WORDS * 8;
const SEARCHED_WORDS: usize = CHUNK_WORDS - 2;
/// Number of bytes after the CR of a line that decide whether the next line is the header: LF, `traceparent:`.
pub const NAME_BYTES: usize = 13;
/// Longest head that is searched to its end.
pub const MAX_HEAD_BYTES: u32 = 8 << 10;
/// `00-` trace id `-` parent id `-` flags: 2, 32, 16 and 2 hexadecimal digits.
pub const VALUE_BYTES: usize = 55;
/// The same in words, including one more byte.
pub const VALUE_WORDS: usize = 7;

/// What is known about the header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Traceparent {
    /// The end of the head has not arrived, or was not searched for.
    Unread = 0,
    /// The request has no such header.
    Absent = 1,
    /// It has one, which is valid.
    Valid = 2,
    /// It has one that is not valid, or more than one.
    Invalid = 3,
}

/// Result of a search: neither the header nor the end of the head was found.
pub const NOTHING: u64 = 1 << 8;
/// Result of a search: the end of the last line was found. Any other result is the byte of the CR that precedes LF and `traceparent:`.
pub const END: u64 = 1 << 9;

const ONES: u64 = 0x0101_0101_0101_0101;
const HIGHEST: u64 = 0x80 * ONES;
const RETURN: u64 = b'\r' as u64;

/// Mask with 0x80 in each byte that is zero.
#[inline(always)]
const fn zeros(word: u64) -> u64 {
    const LOW: u64 = !HIGHEST;
    !(((word & LOW) + LOW) | word | LOW)
}

/// Searches [`SEARCHED_BYTES`] of a chunk for the ends of lines. Bytes that have not arrived are zeros. `search_word` is [`search_word`], or
/// calls it.
#[inline(always)]
pub fn search(chunk: &[u64; CHUNK_WORDS], search_word: impl Fn(u64, u64, u64) -> u64) -> u64 {
    let mut at = 0;
    while at < SEARCHED_WORDS {
        if zeros(chunk[at] ^ (ONES * RETURN)) != 0 {
            let found = search_word(chunk[at], chunk[at + 1], chunk[at + 2]);
            if found == END {
                return END;
            }
            if found != NOTHING {
                return (at * 8) as u64 + found;
            }
        }
        at += 1;
    }
    NOTHING
}

/// The same for one word, which `next` and `last` follow.
#[inline(always)]
pub fn search_word(word: u64, next: u64, last: u64) -> u64 {
    const FIRST: u64 = u64::from_le_bytes(*b"\ntracepa");
    const SECOND: u64 = u64::from_le_bytes(*b"rent:\0\0\0");
    /// Bytes of the second word that are compared.
    const SECOND_BYTES: u64 = 0x00ff_ffff_ffff;
    /// Bits in which upper and lower case letters differ.
    const FIRST_CASE: u64 = 0x2020_2020_2020_2000;
    const SECOND_CASE: u64 = 0x2020_2020;
    /// The bytes after the CR of the last line: LF, and an empty line.
    const EMPTY: u64 = u32::from_le_bytes(*b"\n\r\n\0") as u64;

    let mut byte = 0;
    while byte < 8 {
        if word >> (byte * 8) & 0xff == RETURN {
            // The bytes after it, at most 16. (A shift by 64 bits would shift nothing.)
            let (right, left) = (byte * 8 + 8, 56 - byte * 8);
            let (follows, rest) = if byte == 7 {
                (next, last)
            } else {
                (word >> right | next << left, next >> right | last << left)
            };
            if follows & 0x00ff_ffff == EMPTY {
                return END;
            }
            if follows | FIRST_CASE == FIRST && (rest & SECOND_BYTES) | SECOND_CASE == SECOND {
                return byte;
            }
        }
        byte += 1;
    }
    NOTHING
}

/// Number of bytes of a chunk that need not be searched again, if `there` bytes have arrived and nothing was found.
#[inline]
pub const fn passed(there: u32) -> u32 {
    let whole = there.saturating_sub(NAME_BYTES as u32);
    if whole > SEARCHED_BYTES as u32 { SEARCHED_BYTES as u32 } else { whole }
}

/// Mask with 0x80 in each byte of word number `word` of the value whose byte number in the value is in `from..to`.
const fn highest(word: usize, from: usize, to: usize) -> u64 {
    let mut mask = 0;
    let mut byte = 0;
    while byte < 8 {
        if word * 8 + byte >= from && word * 8 + byte < to {
            mask |= 0x80 << (byte * 8);
        }
        byte += 1;
    }
    mask
}

/// Mask with 0x80 in each byte that is at least `least`; the highest bit of each byte is ignored.
const fn at_least(word: u64, least: u8) -> u64 {
    ((word | HIGHEST) - ONES * least as u64) & HIGHEST
}

/// Whether a value, given as its words, is valid; the last byte, which follows the value, is ignored. `more`: the value continues with a
/// dash, which is allowed from version 01 on.
///
/// Digits must be lower case; the version must not be `ff`; neither id may be all zeros. There are no branches per byte, because the verifier
/// would walk their paths one by one.
pub fn is_valid(value: &[u64; VALUE_WORDS], more: bool) -> bool {
    is_valid_by_word(value, more, |word, _| word)
}

/// The same. `after` returns its first argument; if the BPF stack is small, it makes the compiler believe that the result depends on the second
/// argument, which is what is known from all words before: otherwise the compiler processes all words at once.
#[inline]
pub fn is_valid_by_word(value: &[u64; VALUE_WORDS], more: bool, after: impl Fn(u64, u64) -> u64) -> bool {
    let seen = Seen { wrong: 0, trace: 0, parent: 0 };
    let seen = seen.with::<0>(value[0], &after);
    let seen = seen.with::<1>(value[1], &after);
    let seen = seen.with::<2>(value[2], &after);
    let seen = seen.with::<3>(value[3], &after);
    let seen = seen.with::<4>(value[4], &after);
    let seen = seen.with::<5>(value[5], &after);
    let seen = seen.with::<6>(value[6], &after);
    let version = value[0] & 0xffff;
    seen.wrong == 0
        && seen.trace != 0
        && seen.parent != 0
        && version != u64::from(u16::from_le_bytes(*b"ff"))
        && !(more && version == u64::from(u16::from_le_bytes(*b"00")))
}

/// Positions of the dashes in a value.
const DASHES: [usize; 3] = [2, 35, 52];

/// What is known from the first words of a value: bits that are wrong, and bits of digits of the two ids that differ from `0`.
struct Seen {
    wrong: u64,
    trace: u64,
    parent: u64,
}

/// Masks of the kinds of bytes in one word, with 0x80 for each; constants, because they are computed byte by byte.
struct Places<const AT: usize>;

impl<const AT: usize> Places<AT> {
    const DASHES: u64 = highest(AT, DASHES[0], DASHES[0] + 1)
        | highest(AT, DASHES[1], DASHES[1] + 1)
        | highest(AT, DASHES[2], DASHES[2] + 1);
    const DIGITS: u64 = highest(AT, 0, VALUE_BYTES) & !Self::DASHES;
    /// All bits of the bytes that are digits of an id.
    const TRACE: u64 = (highest(AT, DASHES[0] + 1, DASHES[1]) >> 7) * 0xff;
    const PARENT: u64 = (highest(AT, DASHES[1] + 1, DASHES[2]) >> 7) * 0xff;
}

impl Seen {
    #[inline(always)]
    fn with<const AT: usize>(self, word: u64, after: &impl Fn(u64, u64) -> u64) -> Self {
        const ZEROS: u64 = ONES * b'0' as u64;

        let word = after(word, self.wrong | self.trace | self.parent);
        let is_dash = zeros(word ^ (ONES * u64::from(b'-')));
        let is_digit = at_least(word, b'0') & !at_least(word, b'9' + 1);
        let is_letter = at_least(word, b'a') & !at_least(word, b'f' + 1);
        Self {
            wrong: self.wrong
                | (word | !(is_digit | is_letter)) & Places::<AT>::DIGITS
                | !is_dash & Places::<AT>::DASHES,
            trace: self.trace | (word ^ ZEROS) & Places::<AT>::TRACE,
            parent: self.parent | (word ^ ZEROS) & Places::<AT>::PARENT,
        }
    }
}

/// The words of a value, padded with a zero byte.
pub fn words(value: &[u8; VALUE_BYTES]) -> [u64; VALUE_WORDS] {
    let mut words = [0; VALUE_WORDS];
    let mut at = 0;
    while at < VALUE_BYTES {
        words[at / 8] |= u64::from(value[at]) << (at % 8 * 8);
        at += 1;
    }
    words
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::{format, string::String, vec::Vec};

    use super::*;

    const VALUE: &[u8; VALUE_BYTES] = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn chunk(bytes: &[u8]) -> [u64; CHUNK_WORDS] {
        let mut padded = [0; CHUNK_BYTES];
        let len = bytes.len().min(CHUNK_BYTES);
        padded[..len].copy_from_slice(&bytes[..len]);
        core::array::from_fn(|at| u64::from_le_bytes(padded[at * 8..at * 8 + 8].try_into().unwrap()))
    }

    /// Offsets of all values, and whether the end was found: the way the kernel side searches a head whose pieces end at these offsets.
    fn walk(head: &[u8], pieces: &[usize]) -> (Vec<usize>, bool) {
        let (mut at, mut values) = (0, Vec::new());
        for &there in pieces {
            let head = &head[..there];
            loop {
                let here = head.len() - at;
                match search(&chunk(&head[at..]), search_word) {
                    END => return (values, true),
                    NOTHING => {
                        let passed = passed(here.min(CHUNK_BYTES) as u32) as usize;
                        at += passed;
                        if passed == 0 {
                            break;
                        }
                    }
                    end => {
                        values.push(at + end as usize + 1 + NAME_BYTES);
                        at += end as usize + 1;
                    }
                }
            }
        }
        (values, false)
    }

    /// The same without chunks and pieces.
    fn reference(head: &[u8]) -> (Vec<usize>, bool) {
        let mut values = Vec::new();
        for (at, _) in head.iter().enumerate().filter(|(_, byte)| **byte == b'\r') {
            let rest = &head[at + 1..];
            if rest.starts_with(b"\n\r\n") {
                return (values, true);
            }
            if rest.len() >= NAME_BYTES && rest[..NAME_BYTES].eq_ignore_ascii_case(b"\ntraceparent:") {
                values.push(at + 1 + NAME_BYTES);
            }
        }
        (values, false)
    }

    /// Wherever the header is in a head, and in whatever pieces the head arrives, it is found once; so is the end, and nothing after it.
    #[test]
    fn found_at_each_place() {
        for before in 0..300 {
            let filler = "x".repeat(before);
            for name in ["traceparent", "Traceparent", "TRACEPARENT"] {
                let mut head =
                    format!("GET /{filler} HTTP/1.1\r\nHost: a\r\n{name}: v\r\nx: y\r\n\r\n").into_bytes();
                let expected = reference(&head);
                assert_eq!((expected.0.len(), expected.1), (1, true));
                head.extend_from_slice(b"GET / HTTP/1.1\r\ntraceparent: other\r\n\r\n");
                assert_eq!(walk(&head, &[head.len()]), expected, "{before}");
                for piece in [1, 7, 16, 113, 128] {
                    let pieces: Vec<usize> =
                        (1..=head.len()).filter(|at| at % piece == 0 || *at == head.len()).collect();
                    assert_eq!(walk(&head, &pieces), expected, "{before} {piece}");
                }
            }
        }
    }

    /// Names that only look similar are not found.
    #[test]
    fn other_names() {
        for line in [
            "xtraceparent: v",
            "traceparent : v",
            "trace-parent: v",
            "traceparents: v",
            "Xtraceparent:",
            "tracestate: v",
            "traceparent\u{1a} v",
            "trac\u{45}parent",
            " traceparent: v",
            "tracepar\u{0}nt:",
            // A lone LF or CR does not end a line.
            "x: a\ntraceparent: v",
            "x: a\rtraceparent: v",
            "x: a\n\nb\r\r\n\nc",
        ] {
            let head = format!("GET / HTTP/1.1\r\n{line}\r\n\r\n");
            assert_eq!(walk(head.as_bytes(), &[head.len()]), (Vec::new(), true), "{line}");
        }
        let twice = b"GET / HTTP/1.1\r\ntraceparent:a\r\nTRACEPARENT:b\r\n\r\n";
        assert_eq!(walk(twice, &[twice.len()]).0.len(), 2);
    }

    /// For any bytes, in whatever pieces they arrive, the result is that of the plain search.
    #[test]
    fn hostile() {
        let alphabet: &[&[u8]] = &[
            b"\n",
            b"\r\n",
            b"traceparent:",
            b"TracePARENT:",
            b"trace",
            b"\0",
            b"\xff\x8a\x0b",
            b"x",
            b"abcdefghijklmnopqrstuvw",
            b"\n ",
        ];
        let mut state = 1_u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        for _ in 0..5000 {
            let parts = random(60);
            let head: Vec<u8> = (0..parts).flat_map(|_| alphabet[random(alphabet.len())]).copied().collect();
            let mut pieces: Vec<usize> = (0..random(6)).map(|_| random(head.len() + 1)).collect();
            pieces.push(head.len());
            pieces.sort_unstable();
            assert_eq!(
                walk(&head, &pieces),
                reference(&head),
                "{:?} {pieces:?}",
                String::from_utf8_lossy(&head)
            );
        }
    }

    /// Each rule of section 3.2.2.
    #[test]
    fn values() {
        let is_valid = |value: &[u8; VALUE_BYTES], more| {
            let (plain, mut words) = (is_valid(&words(value), more), words(value));
            // The byte after the value does not matter.
            words[VALUE_WORDS - 1] |= 0xfe << 56;
            assert_eq!(is_valid(&words, more), plain);
            plain
        };
        assert!(is_valid(VALUE, false) && !is_valid(VALUE, true));
        let with = |at: usize, text: &[u8]| {
            let mut value = *VALUE;
            value[at..at + text.len()].copy_from_slice(text);
            value
        };
        assert!(is_valid(&with(0, b"01"), true) && is_valid(&with(0, b"fe"), false));
        assert!(!is_valid(&with(0, b"ff"), false));
        assert!(!is_valid(&with(3, &[b'0'; 32]), false) && is_valid(&with(3, &[b'0'; 31]), false));
        assert!(
            !is_valid(&with(36, &[b'0'; 16]), false)
                && is_valid(&with(37, &[b'0'; 15]), false) == (VALUE[36] != b'0')
        );
        for at in 0..VALUE_BYTES {
            let digit = ![2, 35, 52].contains(&at);
            for byte in 0..=255_u8 {
                let fits = if digit { matches!(byte, b'0'..=b'9' | b'a'..=b'f') } else { byte == b'-' };
                assert_eq!(is_valid(&with(at, &[byte]), false), fits, "{at} {byte}");
            }
        }
    }
}
