//! Chunks of a recording (docs/recording.md), handled manually: they are split and assembled with any content.

use std::io::{Read as _, Write as _};

use flate2::{Compression, read::ZlibDecoder, write::ZlibEncoder};

/// Bytes before the first chunk (`BEGIN`), and before the stored bytes of each chunk (`HEAD`).
const BEGIN: usize = 12;
const HEAD: usize = 16;

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// Start and end of each chunk; the header's chunk is the first.
pub(super) fn places(bytes: &[u8]) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let mut at = BEGIN;
    while at < bytes.len() {
        let end = at + HEAD + word(bytes, at + 4) as usize;
        found.push((at, end));
        at = end;
    }
    assert!(found.len() >= 3, "a header, entries and an end: {found:?}");
    found
}

/// The decompressed content of a chunk.
pub(super) fn content(chunk: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    ZlibDecoder::new(&chunk[HEAD..]).read_to_end(&mut bytes).unwrap();
    bytes
}

/// A chunk of entries with this content and a valid checksum.
pub(super) fn entries(content: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(vec![0; HEAD], Compression::fast());
    encoder.write_all(content).unwrap();
    let mut bytes = encoder.finish().unwrap();
    let words = [2, (bytes.len() - HEAD) as u32, content.len() as u32];
    for (at, word) in words.into_iter().enumerate() {
        bytes[at * 4..at * 4 + 4].copy_from_slice(&word.to_le_bytes());
    }
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&bytes[..12]);
    hasher.update(&bytes[HEAD..]);
    let sum = hasher.finalize();
    bytes[12..HEAD].copy_from_slice(&sum.to_le_bytes());
    bytes
}
