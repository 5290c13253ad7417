//! The `traceparent` header in the head of a request (W3C Trace Context, Level 1 and 2, sections 3.2 and 4): the search for it, and whether its
//! value is valid. The kernel side does both, so that for this no other header leaves the server's memory.
//!
//! Lines end by CR LF, as Puma has it since 5.5.1: a lone LF is a part of a value, where what looks like a header is none. What comes in pieces, and
//! other servers, are in [`pieces`].

#![allow(clippy::inline_always, reason = "a call costs a BPF program a frame of its stack")]

pub mod pieces;

/// Bytes of a head that are looked at in one go.
pub const CHUNK_BYTES: usize = CHUNK_WORDS * 8;
/// The same in words of 8 bytes, little-endian.
pub const CHUNK_WORDS: usize = 16;
/// Of those, bytes at which a line can end whose successor is known: enough bytes follow each.
pub const SEARCHED_BYTES: usize = SEARCHED_WORDS * 8;
const SEARCHED_WORDS: usize = CHUNK_WORDS - 2;
/// Bytes behind the CR of a line that are needed to tell whether the next one is the header: LF, `traceparent:`.
pub const NAME_BYTES: usize = 13;
/// Heads that are longer are not searched to their end.
pub const MAX_HEAD_BYTES: u32 = 8 << 10;
/// `00-` trace id `-` parent id `-` flags: 2, 32, 16 and 2 hexadecimal digits.
pub const VALUE_BYTES: usize = 55;
/// The same in words, with one byte more.
pub const VALUE_WORDS: usize = 7;

/// What is known of the header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Traceparent {
    /// The end of the head has not come, or was not looked for.
    Unread = 0,
    /// It has none.
    Absent = 1,
    /// It has one, which is valid.
    Valid = 2,
    /// It has one that is not valid, or more than one.
    Invalid = 3,
}

/// What a part of a head has first: nothing that is looked for,
pub const NOTHING: u64 = 1 << 8;
/// or the end of the last line; else the header behind a line whose CR is at this byte, with LF and `traceparent:` behind it.
pub const END: u64 = 1 << 9;

const ONES: u64 = 0x0101_0101_0101_0101;
const HIGHEST: u64 = 0x80 * ONES;
const RETURN: u64 = b'\r' as u64;

/// Which bytes are zeros, each as 0x80.
#[inline(always)]
const fn zeros(word: u64) -> u64 {
    const LOW: u64 = !HIGHEST;
    !(((word & LOW) + LOW) | word | LOW)
}

/// Looks for the ends of lines in [`SEARCHED_BYTES`] of a chunk. Bytes that have not come are zeros. `search_word` is [`search_word`], or calls it.
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

/// The same in one word that two others follow.
#[inline(always)]
pub fn search_word(word: u64, next: u64, last: u64) -> u64 {
    const FIRST: u64 = u64::from_le_bytes(*b"\ntracepa");
    const SECOND: u64 = u64::from_le_bytes(*b"rent:\0\0\0");
    /// Bytes of the second word that count.
    const SECOND_BYTES: u64 = 0x00ff_ffff_ffff;
    /// Bits by which letters differ in case.
    const FIRST_CASE: u64 = 0x2020_2020_2020_2000;
    const SECOND_CASE: u64 = 0x2020_2020;
    /// What follows the CR of the last line: LF, and an empty line.
    const EMPTY: u64 = u32::from_le_bytes(*b"\n\r\n\0") as u64;

    let mut byte = 0;
    while byte < 8 {
        if word >> (byte * 8) & 0xff == RETURN {
            // What follows it, 16 bytes of it at most. A shift by 64 bits is none.
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

/// Bytes of a chunk that need not be looked at again, if `there` have come and it has nothing.
#[inline]
pub const fn passed(there: u32) -> u32 {
    let whole = there.saturating_sub(NAME_BYTES as u32);
    if whole > SEARCHED_BYTES as u32 { SEARCHED_BYTES as u32 } else { whole }
}

/// Bytes of a word that lie in these of the value, each as 0x80.
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

/// Which bytes are at least this one, each as 0x80; their highest bit is ignored.
const fn at_least(word: u64, least: u8) -> u64 {
    ((word | HIGHEST) - ONES * least as u64) & HIGHEST
}

/// Whether a value is valid, of which these are the words; the last byte is what follows it. `more`: it goes on with a dash, which it may
/// from version 01 on.
///
/// Digits are lower case; the version is not `ff`; neither id is zeros. Without branches for each byte, whose ways the verifier would walk
/// one by one.
pub fn is_valid(value: &[u64; VALUE_WORDS], more: bool) -> bool {
    is_valid_by_word(value, more, |word, _| word)
}

/// The same. `after` returns its first number; where the stack is small it makes the compiler believe that this takes the second one, which
/// is what is known of all words before: else it works at all words at once.
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

/// Where the dashes of a value are.
const DASHES: [usize; 3] = [2, 35, 52];

/// What is known of the first words of a value: bits of what is wrong, and of digits of the two ids that are not `0`.
struct Seen {
    wrong: u64,
    trace: u64,
    parent: u64,
}

/// Which bytes of one word are what, each as 0x80; constants, because they are computed byte by byte.
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

/// The words of a value, and a zero.
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

    /// Offsets of all values, and whether the end was found: as the kernel side goes through a head whose pieces end here.
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

    /// Wherever the header is in a head, in whatever pieces it comes, it is found once; so is the end, and nothing behind it.
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

    /// Names that only look like it are none.
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
            // A lone LF or CR ends no line.
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

    /// Any bytes give what the plain search gives, in whatever pieces they come.
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
            // What follows does not matter.
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
