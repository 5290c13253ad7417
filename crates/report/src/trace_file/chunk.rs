//! Chunks: the contents of a recording after its first 12 bytes.
//!
//! A chunk consists of its kind, its stored and its expanded length, a CRC-32 of these and of the stored bytes (four little-endian
//! `u32`), and the stored bytes: a zlib stream. A chunk with missing bytes at its end is the end of a recording that was cut off.

use std::io::{self, Read, Seek, Write};

use flate2::{Compression, Decompress, FlushDecompress, Status, write::ZlibEncoder};

use super::{FORMAT, MAGIC, MAX_CHUNK_BYTES, Volume};

/// Length of the head, which precedes the stored bytes.
const HEAD: usize = 16;

/// The contents of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The header; always the first chunk.
    Header = 1,
    /// Entries.
    Entries = 2,
    /// Nothing; the recording is complete.
    End = 3,
}

/// How a recording ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It ends with its last chunk.
    Complete,
    /// It was cut off. The value is the number of bytes of the incomplete chunk after the last whole one.
    CutOff(u64),
}

/// Why a chunk cannot be read.
#[derive(Debug)]
pub(super) enum ChunkError {
    Io(io::Error),
    /// What was expected and what was found.
    Damaged(String),
}

/// The first bytes of a recording.
pub(super) fn beginning() -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(FORMAT.to_le_bytes());
    bytes
}

/// Encodes a chunk.
pub(super) fn stored(kind: Kind, content: &[u8]) -> io::Result<Vec<u8>> {
    if content.len() > MAX_CHUNK_BYTES {
        return Err(io::Error::other(format!("{} bytes are more than a chunk may have", content.len())));
    }
    let mut encoder = ZlibEncoder::new(vec![0; HEAD], Compression::fast());
    encoder.write_all(content)?;
    let mut bytes = encoder.finish()?;
    let stored = (bytes.len() - HEAD) as u32;
    for (at, word) in [kind as u32, stored, content.len() as u32].into_iter().enumerate() {
        bytes[at * 4..at * 4 + 4].copy_from_slice(&word.to_le_bytes());
    }
    let sum = checksum(&bytes);
    bytes[12..HEAD].copy_from_slice(&sum.to_le_bytes());
    Ok(bytes)
}

/// CRC-32 of a chunk without the field of the CRC itself.
fn checksum(chunk: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&chunk[..12]);
    hasher.update(&chunk[HEAD..]);
    hasher.finalize()
}

/// The content of a chunk of entries made by [`stored`].
pub(super) fn entries_of(stored: &[u8]) -> Option<Vec<u8>> {
    let beginning = beginning();
    let mut chunks = Chunks::open((&beginning[..]).chain(stored)).ok()?;
    match chunks.next().ok()? {
        Next::Entries(chunk) => Expander::default().expand(&chunk).ok(),
        Next::Header(_) | Next::Ended(_) => None,
    }
}

/// A chunk in its stored form.
#[derive(Debug)]
pub(super) struct Stored {
    bytes: Vec<u8>,
    /// Length of its content.
    content: usize,
}

/// Checks and expands chunks.
#[derive(Debug)]
pub(super) struct Expander(Decompress);

impl Default for Expander {
    fn default() -> Self {
        Self(Decompress::new(true))
    }
}

impl Expander {
    /// Expands a chunk. An error says what is wrong with it.
    pub(super) fn expand(&mut self, chunk: &Stored) -> Result<Vec<u8>, String> {
        let Stored { bytes, content } = chunk;
        let (found, sum) = (checksum(bytes), word(bytes, 12));
        if found != sum {
            return Err(format!("its checksum is {found:08x}, not {sum:08x}"));
        }
        let Self(decoder) = self;
        decoder.reset(true);
        // One additional byte reveals content that is too long.
        let mut expanded = Vec::with_capacity(content + 1);
        let cannot = |why: String| Err(format!("it cannot be expanded: {why}"));
        match decoder.decompress_vec(&bytes[HEAD..], &mut expanded, FlushDecompress::Finish) {
            Ok(_) if expanded.len() > *content => {}
            Ok(Status::StreamEnd) => {}
            Ok(Status::Ok | Status::BufError) => return cannot("it is cut off".to_owned()),
            Err(error) => return cannot(error.to_string()),
        }
        if expanded.len() != *content {
            return Err(format!("it does not expand to the {content} bytes that its head states"));
        }
        Ok(expanded)
    }
}

/// A number in the head of a chunk.
fn word(chunk: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([chunk[at], chunk[at + 1], chunk[at + 2], chunk[at + 3]])
}

/// Reads chunks.
#[derive(Debug)]
pub(super) struct Chunks<R> {
    from: R,
    /// Offset of the next chunk.
    offset: u64,
    /// Number of whole chunks so far.
    whole: u64,
    /// Expanded bytes of these chunks.
    expanded: u64,
    expander: Expander,
}

/// The next item.
pub(super) enum Next {
    Header(Vec<u8>),
    /// Neither checked nor expanded.
    Entries(Stored),
    Ended(Ending),
}

impl<R: Read> Chunks<R> {
    /// Checks the first bytes.
    pub(super) fn open(mut from: R) -> Result<Self, ChunkError> {
        let mut bytes = Vec::new();
        let expected = beginning();
        let read = (&mut from).take(expected.len() as u64).read_to_end(&mut bytes);
        read.map_err(ChunkError::Io)?;
        if bytes.len() < expected.len() || bytes[..MAGIC.len()] != MAGIC {
            return Err(ChunkError::Damaged("it is not a gctrace recording".to_owned()));
        }
        if bytes != expected {
            let version = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
            let why = format!("it has version {version} of the format; this gctrace reads version {FORMAT}");
            return Err(ChunkError::Damaged(why));
        }
        Ok(Self { from, offset: expected.len() as u64, whole: 0, expanded: 0, expander: Expander::default() })
    }

    /// Offset of the next chunk.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// How much was read.
    pub(super) fn volume(&self) -> Volume {
        Volume { chunks: self.whole, stored: self.offset, expanded: self.expanded }
    }

    /// The next chunk: entries in their stored form, others expanded.
    pub(super) fn next(&mut self) -> Result<Next, ChunkError> {
        let mut bytes = Vec::new();
        self.read(HEAD, &mut bytes)?;
        if bytes.len() < HEAD {
            return Ok(Next::Ended(Ending::CutOff(bytes.len() as u64)));
        }
        let (kind, stored, content) = (word(&bytes, 0), word(&bytes, 4) as usize, word(&bytes, 8) as usize);
        // zlib adds at most a few bytes to incompressible data.
        let most = MAX_CHUNK_BYTES + MAX_CHUNK_BYTES / 1024 + 64;
        if stored > most || content > MAX_CHUNK_BYTES {
            let why = format!("its lengths, {stored} and {content}, exceed {MAX_CHUNK_BYTES} bytes");
            return Err(ChunkError::Damaged(why));
        }
        self.read(stored, &mut bytes)?;
        if bytes.len() < HEAD + stored {
            return Ok(Next::Ended(Ending::CutOff(bytes.len() as u64)));
        }
        let chunk = Stored { bytes, content };
        let length = chunk.bytes.len();
        if kind == Kind::Entries as u32 {
            self.pass(length, content);
            return Ok(Next::Entries(chunk));
        }
        let expanded = self.expander.expand(&chunk).map_err(ChunkError::Damaged)?;
        if kind == Kind::End as u32 {
            let ended = self.ended()?;
            self.pass(length, 0);
            return Ok(ended);
        }
        if kind != Kind::Header as u32 {
            return Err(ChunkError::Damaged(format!("chunks of kind {kind} are not known")));
        }
        self.pass(length, content);
        Ok(Next::Header(expanded))
    }

    /// Sets what counts as read: everything after it turned out to be unusable.
    pub(super) fn read_only(&mut self, volume: Volume) {
        (self.whole, self.offset, self.expanded) = (volume.chunks, volume.stored, volume.expanded);
    }

    fn pass(&mut self, stored: usize, expanded: usize) {
        self.offset += stored as u64;
        self.expanded += expanded as u64;
        self.whole += 1;
    }

    /// Checks that nothing follows the end.
    fn ended(&mut self) -> Result<Next, ChunkError> {
        let mut more = Vec::new();
        self.read(1, &mut more)?;
        if more.is_empty() {
            return Ok(Next::Ended(Ending::Complete));
        }
        Err(ChunkError::Damaged("bytes follow the end".to_owned()))
    }

    /// Skips a whole chunk of this length in bytes, which was read before.
    pub(super) fn skip(&mut self, bytes: u64) -> io::Result<()>
    where
        R: Seek,
    {
        self.from.seek_relative(i64::try_from(bytes).map_err(io::Error::other)?)?;
        self.offset += bytes;
        Ok(())
    }

    /// Reads this many bytes, or as many as exist.
    fn read(&mut self, bytes: usize, to: &mut Vec<u8>) -> Result<(), ChunkError> {
        (&mut self.from).take(bytes as u64).read_to_end(to).map(drop).map_err(ChunkError::Io)
    }
}
