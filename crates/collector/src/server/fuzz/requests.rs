//! What clients send: contents, framing with wrong lengths, and ways of sending.

use std::io::Write as _;

use flate2::{Compression, write::GzEncoder};
use proptest::{prelude::*, sample::select};

use super::{
    super::{LARGE, MAX_BODY},
    world::{TOKEN, Then},
};

/// hyper's limit on the total size of all chunk extensions of a body (16 KiB) is slightly above this.
const EXTENSIONS: usize = 16_000;

pub(super) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// A request with a correct length.
pub(super) fn request(headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!("POST /ruby HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {}\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}

/// The body, before its length is falsified.
#[derive(Clone, Debug)]
pub(super) enum Content {
    Good {
        gzipped: bool,
    },
    /// The good set with one text replaced by another, and the expected code.
    Other(&'static str, &'static str, u16),
    /// The first `part` thousandths of the good set.
    Cut {
        gzipped: bool,
        part: usize,
    },
    Twice {
        gzipped: bool,
    },
    Garbage {
        gzipped: bool,
        bytes: Vec<u8>,
    },
    Flipped {
        at: usize,
        bit: u8,
    },
    /// The good set, with this as the size at the end of the gzip file.
    Size(u32),
    Behind(Vec<u8>),
    /// `size` MiB of blanks; with `lies`, the file states a small size.
    Bomb {
        size: usize,
        lies: bool,
    },
}

impl Content {
    /// The bytes, whether they are declared as gzip, and the expected codes.
    pub(super) fn make(&self, set: &[u8]) -> (Vec<u8>, bool, &'static [u16]) {
        let form = |gzipped: bool| if gzipped { gzip(set) } else { set.to_vec() };
        match self {
            Self::Good { gzipped } => (form(*gzipped), *gzipped, &[200]),
            Self::Other(from, to, code) => {
                let text = std::str::from_utf8(set).unwrap();
                assert!(text.contains(from), "{from}");
                let code: &[u16] = match code {
                    404 => &[404],
                    426 => &[426],
                    501 => &[501],
                    _ => &[400],
                };
                (text.replacen(from, to, 1).into_bytes(), false, code)
            }
            Self::Cut { gzipped, part } => {
                let mut bytes = form(*gzipped);
                bytes.truncate(bytes.len() * part / 1000);
                (bytes, *gzipped, &[400])
            }
            Self::Twice { gzipped } => (form(*gzipped).repeat(2), *gzipped, &[400]),
            Self::Garbage { gzipped, bytes } => (bytes.clone(), *gzipped, &[400]),
            Self::Flipped { at, bit } => {
                let mut bytes = gzip(set);
                let at = at % bytes.len();
                bytes[at] ^= 1 << bit;
                // Some bits of a gzip header have no meaning. Sets are judged as they are read, before the checksum is known.
                (bytes, true, &[200, 400, 404, 426, 501])
            }
            Self::Size(size) => {
                let mut bytes = gzip(set);
                let end = bytes.len() - 4;
                bytes[end..].copy_from_slice(&size.to_le_bytes());
                (bytes, true, if *size as usize == set.len() { &[200] } else { &[400] })
            }
            Self::Behind(more) => ([gzip(set), more.clone()].concat(), true, &[400]),
            Self::Bomb { size, lies } => {
                let mut bytes = gzip(&vec![b' '; size << 20]);
                if *lies {
                    let end = bytes.len() - 4;
                    bytes[end..].copy_from_slice(&1000_u32.to_le_bytes());
                }
                (bytes, true, &[400])
            }
        }
    }
}

/// How the end of the body is marked.
#[derive(Clone, Debug)]
pub(super) enum Framing {
    Length,
    /// A `Content-Length` that is too small by this many bytes (but not below 0).
    Short(usize),
    Long(usize),
    /// This text as the `Content-Length`.
    LengthText(&'static str),
    /// Chunks of these sizes, with extensions of this many bytes.
    Chunked {
        sizes: Vec<usize>,
        extension: usize,
    },
    /// Chunked with both headers: the `Content-Length` must be ignored.
    Both,
    /// One chunk whose stated size is wrong by this much.
    WrongChunk(i64),
    ChunkText(&'static str),
    /// Chunked with a longer extension than is accepted.
    LongExtension,
    Unended,
}

impl Framing {
    /// The headers, the body, and whether they are consistent.
    pub(super) fn make(&self, body: &[u8]) -> (String, Vec<u8>, bool) {
        let length = |length: &str| format!("Content-Length: {length}\r\n");
        let chunked = || "Transfer-Encoding: chunked\r\n".to_owned();
        let one = |size: &str, end: &str| [size.as_bytes(), b"\r\n", body, end.as_bytes()].concat();
        match self {
            Self::Length => (length(&body.len().to_string()), body.to_vec(), true),
            Self::Short(by) => {
                let said = body.len().saturating_sub(*by);
                (length(&said.to_string()), body.to_vec(), said == body.len())
            }
            Self::Long(by) => (length(&(body.len() + by).to_string()), body.to_vec(), false),
            Self::LengthText(text) => (length(text), body.to_vec(), false),
            Self::Chunked { sizes, extension } => {
                let smallest = sizes.iter().copied().min().unwrap_or(1).max(1);
                let (mut wire, mut left, mut sizes) = (Vec::new(), body, sizes.iter().cycle());
                // The limit applies to the sum of all extensions.
                let most = body.len() / smallest + 1;
                let extension = match (*extension).min(EXTENSIONS / most) {
                    0 => String::new(),
                    length => format!(";{}", "x".repeat(length)),
                };
                while !left.is_empty() {
                    let size = sizes.next().map_or(left.len(), |size| (*size).clamp(1, left.len()));
                    write!(wire, "{size:x}{extension}\r\n").unwrap();
                    wire.extend_from_slice(&left[..size]);
                    wire.extend_from_slice(b"\r\n");
                    left = &left[size..];
                }
                wire.extend_from_slice(b"0\r\n\r\n");
                (chunked(), wire, true)
            }
            Self::Both => {
                let headers = length("3") + &chunked();
                (headers, one(&format!("{:X}", body.len()), "\r\n0\r\n\r\n"), !body.is_empty())
            }
            Self::WrongChunk(by) => {
                let size = (body.len() as i64 + by).max(0);
                (chunked(), one(&format!("{size:x}"), "\r\n0\r\n\r\n"), false)
            }
            Self::ChunkText(size) => (chunked(), one(size, "\r\n0\r\n\r\n"), false),
            Self::LongExtension => {
                let size = format!("{:x};{}", body.len(), "x".repeat(2 * EXTENSIONS));
                (chunked(), one(&size, "\r\n0\r\n\r\n"), false)
            }
            Self::Unended => (chunked(), one(&format!("{:x}", body.len()), "\r\n"), false),
        }
    }
}

pub(super) fn content() -> impl Strategy<Value = Content> {
    use Content::*;
    let bytes = || prop::collection::vec(any::<u8>(), 0..300);
    let others = select(vec![
        Other(TOKEN, "0000", 404),
        Other("\"1.0.15\"", "\"1.0.14\"", 426),
        Other("\"2.2.0\"", "\"1.9.3\"", 501),
        Other("null]", "null", 400),
        Other("[[", "[", 400),
    ]);
    let sizes =
        select(vec![0, 1, 1000, 3926, LARGE as u32 + 1, MAX_BODY as u32, MAX_BODY as u32 + 1, u32::MAX]);
    prop_oneof![
        4 => any::<bool>().prop_map(|gzipped| Good { gzipped }),
        2 => others,
        2 => (any::<bool>(), 0..1000_usize).prop_map(|(gzipped, part)| Cut { gzipped, part }),
        1 => any::<bool>().prop_map(|gzipped| Twice { gzipped }),
        1 => (any::<bool>(), bytes()).prop_map(|(gzipped, bytes)| Garbage { gzipped, bytes }),
        4 => (any::<usize>(), 0..8_u8).prop_map(|(at, bit)| Flipped { at, bit }),
        2 => sizes.prop_map(Size),
        1 => prop::collection::vec(any::<u8>(), 1..20).prop_map(Behind),
        1 => (1..6_usize, any::<bool>()).prop_map(|(size, lies)| Bomb { size, lies }),
    ]
}

pub(super) fn framing() -> impl Strategy<Value = Framing> {
    use Framing::*;
    let lengths = vec![
        "-1",
        "+10",
        "0x10",
        "1e3",
        "10, 11",
        "18446744073709551615",
        "18446744073709551616",
        "50000001",
        "1 0",
        "",
        "10\r\nContent-Length: 11",
        "\u{fffd}",
    ];
    let sizes = vec![
        "",
        "-1",
        "+1",
        "0x10",
        "g",
        "ffffffffffffffff",
        "10000000000000000",
        "7fffffffffffffff",
        "fffffffff",
        " ",
        ";",
        "0",
        "00000000000000000000000000000000",
    ];
    let chunks = prop::collection::vec(prop_oneof![1..20_usize, 1..5000_usize], 1..6);
    prop_oneof![
        6 => Just(Length),
        1 => (1..2000_usize).prop_map(Short),
        1 => prop_oneof![1..2000_usize, Just(40_000_000_usize)].prop_map(Long),
        1 => select(lengths).prop_map(LengthText),
        4 => (chunks, prop_oneof![Just(0_usize), 0..40_usize]).prop_map(|(sizes, extension)| Chunked { sizes, extension }),
        1 => Just(Both),
        1 => prop_oneof![-20..0_i64, 1..20_i64, -5000..-1_i64, 1..5000_i64].prop_map(WrongChunk),
        1 => select(sizes).prop_map(ChunkText),
        1 => Just(Unended),
        1 => Just(LongExtension),
    ]
}

/// How a request is sent.
#[derive(Clone, Debug)]
pub(super) struct Manner {
    pub(super) pieces: Vec<usize>,
    pub(super) buffer: usize,
    pub(super) then: Then,
}

pub(super) fn manner() -> impl Strategy<Value = Manner> {
    let pieces = prop::collection::vec(prop_oneof![1..50_usize, 1..5000_usize, Just(1_usize << 20)], 1..5);
    let buffer = prop_oneof![16..200_usize, 200..70_000_usize];
    // A client that waits for the answer receives the most.
    let then = prop_oneof![3 => Just(Then::Wait), 1 => Just(Then::HalfClose), 1 => Just(Then::Leave)];
    (pieces, buffer, then).prop_map(|(pieces, buffer, then)| Manner { pieces, buffer, then })
}
