//! Overlapping dumps of one run: a flight recorder writes the chunks that it keeps unchanged, so the common part of
//! two dumps has the same bytes, and can be read once.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, BufReader, Read, Seek as _, SeekFrom},
    ops::Range,
    path::{Path, PathBuf},
};

use ring::digest::{SHA256, digest};

use crate::trace_file::{
    Header, Invalid, ReadError, Recording,
    chunk::{ChunkError, Chunks, Ending, Expander, Next},
    kinds::decode,
    recording::{damaged, open_regular},
};

/// A part of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    path: PathBuf,
    range: Range<u64>,
}

/// Reads pieces one after another.
pub(super) struct Reader {
    left: VecDeque<Piece>,
    open: Option<io::Take<BufReader<File>>>,
}

impl Reader {
    pub(super) fn open(pieces: &[Piece]) -> Result<Self, ReadError> {
        for Piece { path, .. } in pieces {
            File::open(path).map_err(|source| ReadError::Io { path: path.clone(), source })?;
        }
        Ok(Self { left: pieces.iter().cloned().collect(), open: None })
    }
}

impl Read for Reader {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(open) = &mut self.open {
                let read = open.read(to)?;
                if read > 0 || to.is_empty() {
                    return Ok(read);
                }
            }
            let Some(Piece { path, range }) = self.left.pop_front() else { return Ok(0) };
            let mut file = BufReader::new(File::open(path)?);
            file.seek(SeekFrom::Start(range.start))?;
            self.open = Some(file.take(range.end.saturating_sub(range.start)));
        }
    }
}

/// A recording, or several dumps joined into one.
#[derive(Clone, Debug)]
pub(super) struct Whole {
    /// The first file.
    pub(super) path: PathBuf,
    pub(super) header: Header,
    /// Start and end of the time that it covers: the start is that of its header, the end is the time of its last flush or
    /// of the end of tracing.
    pub(super) from_ns: u64,
    pub(super) to_ns: u64,
    pub(super) pieces: Vec<Piece>,
    /// SHA-256 of the content of each chunk after the initial state of a dump.
    chunks: Vec<[u8; 32]>,
    /// Offset of each of these chunks in its file.
    begins: Vec<u64>,
}

impl Whole {
    /// Reads from a file what must be known before merging.
    pub(super) fn read(path: &Path) -> Result<Self, ReadError> {
        let file = open_regular(path)?;
        let header = Recording::open(path)?.header().clone();
        let failed = |offset| {
            move |error| match error {
                ChunkError::Io(source) => ReadError::Io { path: path.to_owned(), source },
                ChunkError::Damaged(why) => ReadError::Damaged { path: path.to_owned(), offset, why },
            }
        };
        let by = header.gctrace.clone();
        let mut all = Chunks::open(BufReader::new(file)).map_err(failed(0))?;
        let mut carried = header.dump.as_ref().map_or(0, |dump| dump.carried);
        let mut whole = Self {
            path: path.to_owned(),
            from_ns: header.dump.as_ref().map_or(header.begun_ns, |dump| dump.from_ns),
            to_ns: header.begun_ns,
            header,
            pieces: Vec::new(),
            chunks: Vec::new(),
            begins: Vec::new(),
        };
        let mut entries_of = Vec::new();
        let (mut expander, mut known) = (Expander::default(), decode::Known::default());
        loop {
            let begin = all.offset();
            match all.next().map_err(failed(begin))? {
                Next::Header(_) => {}
                Next::Entries(chunk) => {
                    let damaged = |invalid| damaged(path, &by, begin, invalid);
                    let content = expander.expand(&chunk).map_err(|why| damaged(Invalid::new(why)))?;
                    let (_, entries) = decode::chunk(&content, &mut known).map_err(damaged)?;
                    for entry in &entries {
                        if let decode::Recorded::Flushed(ns) | decode::Recorded::Closed(ns) = entry {
                            whole.to_ns = whole.to_ns.max(*ns);
                        }
                    }
                    if carried > 0 {
                        carried = carried.saturating_sub(entries.len() as u64);
                        continue;
                    }
                    let mut sum = [0; 32];
                    sum.copy_from_slice(digest(&SHA256, &content).as_ref());
                    whole.chunks.push(sum);
                    whole.begins.push(begin);
                    entries_of.push(entries.len() as u64);
                }
                Next::Ended(ending) => {
                    if ending == Ending::Complete {
                        whole.without_open(&entries_of);
                    }
                    let range = 0..all.offset();
                    whole.pieces.push(Piece { path: path.to_owned(), range });
                    return Ok(whole);
                }
            }
        }
    }

    /// Leaves out the chunks at the end with times that had not ended: no other dump has them. They stay in the file's
    /// piece, which is cut before them when a later dump is joined. `entries_of`: number of entries of each chunk.
    fn without_open(&mut self, entries_of: &[u64]) {
        let mut open = self.header.dump.as_ref().map_or(0, |dump| dump.open);
        for entries in entries_of.iter().rev() {
            if *entries > open || open == 0 {
                return;
            }
            open -= entries;
            self.chunks.pop();
            self.begins.pop();
        }
    }

    /// Whether both are dumps of one flight recorder, judging by their clocks, which each run measures for itself.
    pub(super) fn is_same_run(&self, other: &Self) -> bool {
        let (one, another) = (&self.header, &other.header);
        one.clock == another.clock
            && one.host == another.host
            && one.gctrace == another.gctrace
            && one.subjects == another.subjects
    }

    /// Whether the two overlap in time.
    pub(super) fn overlaps(&self, later: &Self) -> bool {
        later.from_ns < self.to_ns
    }

    /// Appends what a later dump of the same run has after this one. Returns `false` if the common time of both differs.
    pub(super) fn join(&mut self, later: &Self) -> bool {
        let Some(first) = later.chunks.first() else { return false };
        let Some(at) = self.chunks.iter().position(|chunk| chunk == first) else { return false };
        let common = self.chunks.len() - at;
        if later.chunks.len() <= common {
            return self.chunks[at..].starts_with(&later.chunks);
        }
        if !later.chunks.starts_with(&self.chunks[at..]) {
            return false;
        }
        let next = later.begins[common];
        // Without the end marker of this one, if it has one.
        self.end_before_end();
        let end = later.pieces.last().map_or(next, |piece| piece.range.end);
        self.pieces.push(Piece { path: later.path.clone(), range: next..end });
        self.begins.extend(&later.begins[common..]);
        self.chunks.extend(&later.chunks[common..]);
        self.to_ns = self.to_ns.max(later.to_ns);
        true
    }

    /// Cuts off what follows the last chunk with entries.
    fn end_before_end(&mut self) {
        let (Some(piece), Some(last)) = (self.pieces.last_mut(), self.begins.last()) else { return };
        let mut head = [0; 16];
        let length = File::open(&piece.path).and_then(|mut file| {
            file.seek(SeekFrom::Start(*last))?;
            file.read_exact(&mut head)
        });
        if length.is_ok() {
            let stored = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
            piece.range.end = last + 16 + u64::from(stored);
        }
    }
}
