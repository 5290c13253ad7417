//! Reading a recording.

use std::{
    fs::File,
    io::{BufReader, Read, Seek},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use prost::Message as _;

use super::{
    Dump, Header, Host, Invalid, ReadError, Subjects, Volume,
    chunk::{ChunkError, Chunks, Ending, Expander, Next, Stored},
    kinds::{
        decode::{self, Known, Recorded, Tables},
        wire,
    },
};
use crate::clock::WallClock;

/// A recording that is being read: one chunk is in memory at a time.
#[derive(Debug)]
pub struct Recording<R = BufReader<File>> {
    path: PathBuf,
    chunks: Chunks<R>,
    header: Header,
    reader: ChunkReader,
}

/// Decodes chunks with entries.
#[derive(Debug, Default)]
pub(super) struct ChunkReader {
    expander: Expander,
    known: Known,
}

impl ChunkReader {
    /// The contents of a chunk.
    pub(super) fn read(&mut self, chunk: &Stored) -> Result<(Tables, Vec<Recorded>), Invalid> {
        let content = self.expander.expand(chunk).map_err(Invalid::new)?;
        decode::chunk(&content, &mut self.known)
    }
}

/// Opens a recording that is read more than once. Opening does not wait for the writer of a named pipe.
///
/// # Errors
///
/// It cannot be read, or is not a regular file.
pub fn open_regular(path: &Path) -> Result<File, ReadError> {
    let failed = |source| ReadError::Io { path: path.to_owned(), source };
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = File::options().read(true).custom_flags(nonblocking).open(path).map_err(failed)?;
    if file.metadata().map_err(failed)?.is_file() {
        return Ok(file);
    }
    let why = "it is not a regular file; write the recording to one first".to_owned();
    Err(ReadError::Unreadable { path: path.to_owned(), why })
}

impl Recording {
    /// Opens a recording and reads its header.
    ///
    /// # Errors
    ///
    /// It cannot be read, or is not a recording.
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        let file = File::open(path).map_err(|source| ReadError::Io { path: path.to_owned(), source })?;
        Self::read(BufReader::new(file), path)
    }
}

impl<R: Read> Recording<R> {
    /// Reads the header of a recording; `path` is its name in errors.
    ///
    /// # Errors
    ///
    /// It cannot be read, or is not a recording.
    pub fn read(from: R, path: &Path) -> Result<Self, ReadError> {
        let unreadable = |why| ReadError::Unreadable { path: path.to_owned(), why };
        let failed = |error| match error {
            ChunkError::Io(source) => ReadError::Io { path: path.to_owned(), source },
            ChunkError::Damaged(why) => unreadable(why),
        };
        let mut chunks = Chunks::open(from).map_err(failed)?;
        let failed = |error| match error {
            ChunkError::Damaged(why) => unreadable(format!("its header is damaged: {why}")),
            error @ ChunkError::Io(_) => failed(error),
        };
        let head = match chunks.next().map_err(failed)? {
            Next::Header(head) => head,
            Next::Entries(_) | Next::Ended(_) => {
                return Err(unreadable("the recording has no header".to_owned()));
            }
        };
        let head = wire::Header::decode(&head[..]).map_err(|error| unreadable(error.to_string()))?;
        let wire::Header { samples, wall, gvl, requests, alloc, host, kernel, machine, cpus, boot, .. } =
            head;
        let header = Header {
            gctrace: head.gctrace,
            clock: WallClock::with_offsets(head.realtime_offset_ns, head.boottime_offset_ns),
            begun_ns: head.begun_ns,
            subjects: Subjects { samples, wall, gvl, requests, alloc },
            host: Host { name: host, kernel, machine, cpus, boot },
            dump: head.dump.map(|wire::Dump { why, at_ns, from_ns, carried, open }| Dump {
                why,
                at_ns,
                from_ns,
                carried,
                open,
            }),
        };
        Ok(Self { path: path.to_owned(), chunks, header, reader: ChunkReader::default() })
    }

    /// The header of the recording.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// How much of it was read so far.
    pub fn volume(&self) -> Volume {
        self.chunks.volume()
    }

    /// Its name in errors.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Offset of the next chunk.
    pub(super) fn offset(&self) -> u64 {
        self.chunks.offset()
    }

    /// Skips a whole chunk of this length in bytes, which was read before.
    pub(super) fn skip(&mut self, bytes: u64) -> Result<(), ReadError>
    where
        R: Seek,
    {
        self.chunks.skip(bytes).map_err(|source| ReadError::Io { path: self.path.clone(), source })
    }

    /// The next chunk with entries, or how the recording ends.
    pub(super) fn next(&mut self) -> Result<Result<(Tables, Vec<Recorded>), Ending>, ReadError> {
        let before = self.volume();
        match self.stored()? {
            Err(ending) => Ok(Err(ending)),
            Ok(chunk) => self.reader.read(&chunk).map(Ok).map_err(|invalid| {
                self.chunks.read_only(before);
                damaged(&self.path, &self.header.gctrace, before.stored, invalid)
            }),
        }
    }

    /// The next chunk with entries in its stored form, or how the recording ends.
    pub(super) fn stored(&mut self) -> Result<Result<Stored, Ending>, ReadError> {
        let offset = self.chunks.offset();
        let next = self.chunks.next().map_err(|error| match error {
            ChunkError::Io(source) => ReadError::Io { path: self.path.clone(), source },
            ChunkError::Damaged(why) => damaged(&self.path, &self.header.gctrace, offset, Invalid::new(why)),
        })?;
        match next {
            Next::Entries(chunk) => Ok(Ok(chunk)),
            Next::Header(_) => {
                let second = Invalid::new("it is a second header".to_owned());
                Err(damaged(&self.path, &self.header.gctrace, offset, second))
            }
            Next::Ended(ending) => Ok(Err(ending)),
        }
    }

    /// Sets what counts as read.
    pub(super) fn read_only(&mut self, volume: Volume) {
        self.chunks.read_only(volume);
    }
}

/// The error for the chunk at this offset of a recording that this version of gctrace wrote.
pub(super) fn damaged(path: &Path, by: &str, offset: u64, Invalid { why, is_unknown }: Invalid) -> ReadError {
    let path = path.to_owned();
    if is_unknown {
        return ReadError::Unknown { path, offset, what: why, by: by.to_owned() };
    }
    ReadError::Damaged { path, offset, why }
}
