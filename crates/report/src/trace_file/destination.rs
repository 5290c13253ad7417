//! The destination of a recorder's chunks: a file, or a stream on standard output.

use std::{
    cmp::Ordering,
    fs::{self, File, Metadata},
    io::{self, Write},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, poll};

use crate::export::{
    ExportError, Links, Named, check_path, note_begun, note_whole, open_or_make_alone, replace_alone,
};

/// Maximum bytes queued for a slow reader: some minutes of a busy program.
const WAITING: u64 = 64 << 20;
/// Mode of a recording: command lines are in it.
const MODE: u32 = 0o600;
/// How long a reader may read nothing at the end of a run.
const PATIENCE: Duration = Duration::from_secs(10);

/// The destination of chunks.
#[derive(Debug)]
pub(super) enum Destination {
    /// A regular file.
    File(RegularFile),
    /// A pipe, or any other standard output.
    Stream(Stream),
}

/// Bytes of whole chunks, and number of the entries in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Amount {
    pub(super) bytes: u64,
    pub(super) entries: u64,
}

impl Amount {
    fn add(&mut self, bytes: u64, entries: u64) {
        self.bytes += bytes;
        self.entries += entries;
    }
}

/// What happened to the file of a recording during the run, so that it no longer holds the recording, or not all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Disturbed {
    #[error("it was removed during the run, and the recording is lost")]
    Removed,
    #[error("it was replaced by another file during the run, and the recording is lost")]
    Replaced,
    #[error("it was moved during the run: the recording is no longer at that path")]
    Moved,
    #[error("somebody has truncated it during the run, and the recording is lost")]
    Truncated,
    #[error("somebody else has written to it during the run, and the recording ends before this")]
    WrittenTo,
}

impl From<Disturbed> for io::Error {
    fn from(what: Disturbed) -> Self {
        Self::other(what)
    }
}

/// A regular file and the amount written to it.
#[derive(Debug)]
pub(super) struct RegularFile {
    path: PathBuf,
    file: File,
    /// Whether the file had a name that it can lose.
    named: Named,
    /// The amount written as whole chunks.
    written: Amount,
    /// Whether it was created for this recording.
    is_new: bool,
    /// The start of the recording, while the file is still an older one: a run that fails before it sees anything leaves the older one.
    beginning: Option<Vec<u8>>,
    /// The older recording that was replaced. It stays locked: who has opened it must not take it for the file at the path.
    older: Option<File>,
}

impl RegularFile {
    fn append(&mut self, bytes: &[u8], entries: u64) -> io::Result<()> {
        self.begin()?;
        self.check(self.written.bytes)?;
        let length = bytes.len() as u64;
        // This appends: had the file been truncated in between, it would now be shorter.
        self.file.write_all(bytes)?;
        self.check(self.written.bytes + length)?;
        self.written.add(length, entries);
        if entries > 0 && self.written.entries == entries {
            note_begun(&self.path);
        }
        Ok(())
    }

    /// Checks that the file still has a name, and this length.
    fn check(&self, bytes: u64) -> io::Result<()> {
        let now = self.file.metadata()?;
        if self.named.is_lost(&now) {
            return Err(self.gone(&now).unwrap_or(Disturbed::Removed).into());
        }
        match now.len().cmp(&bytes) {
            Ordering::Less => Err(Disturbed::Truncated.into()),
            Ordering::Equal => Ok(()),
            Ordering::Greater => Err(Disturbed::WrittenTo.into()),
        }
    }

    /// Why the path no longer names this file; `None` if it does.
    fn gone(&self, now: &Metadata) -> Option<Disturbed> {
        let (found, lost) = (fs::metadata(&self.path), self.named.is_lost(now));
        match found {
            Ok(found) if (found.dev(), found.ino()) == (now.dev(), now.ino()) => None,
            Ok(_) if lost => Some(Disturbed::Replaced),
            Err(_) if lost => Some(Disturbed::Removed),
            Ok(_) => Some(Disturbed::Moved),
            Err(error) => matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
                .then_some(Disturbed::Moved),
        }
    }

    /// Checks that a reader will find the whole recording.
    fn finish(&mut self) -> io::Result<()> {
        self.begin()?;
        self.check(self.written.bytes)?;
        let gone = self.gone(&self.file.metadata()?);
        drop(self.older.take());
        if gone.is_none() {
            note_whole(&self.path);
        }
        gone.map_or(Ok(()), |what| Err(what.into()))
    }

    /// Removes a partial chunk. A file that is shorter than what was recorded is left alone.
    fn undo(&self) -> io::Result<()> {
        if self.file.metadata()?.len() > self.written.bytes {
            self.file.set_len(self.written.bytes)?;
        }
        Ok(())
    }

    /// Replaces an older recording by a new file, as all outputs do: it has the owner and the mode of a new one.
    fn begin(&mut self) -> io::Result<()> {
        let Some(beginning) = self.beginning.take() else { return Ok(()) };
        if let Some(what) = self.gone(&self.file.metadata()?) {
            return Err(what.into());
        }
        match replace_alone(&self.path, MODE, &beginning) {
            Ok(file) => {
                self.named = Named::now(&file);
                self.older = Some(std::mem::replace(&mut self.file, file));
                self.written.add(beginning.len() as u64, 0);
                Ok(())
            }
            // The file itself is mounted there, as in a container.
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                self.file.set_len(0)?;
                self.append(&beginning, 0)
            }
            Err(error) => Err(error),
        }
    }
}

impl Destination {
    /// A regular file. It is locked (`flock`) until the recording ends. An existing file keeps its content until the first
    /// chunk of entries, or the end; the new file is readable only by its owner.
    pub(super) fn file(path: &Path) -> Result<Self, ExportError> {
        check_path(path)?;
        let (file, is_new) = open_or_make_alone(path, MODE, Links::Replace, "another gctrace records to it")?;
        let (path, named) = (path.to_owned(), Named::now(&file));
        Ok(Self::File(RegularFile {
            path,
            file,
            named,
            written: Amount::default(),
            is_new,
            beginning: None,
            older: None,
        }))
    }

    /// Starts with these chunks, which have no entries.
    pub(super) fn begin(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        match self {
            // An empty one is replaced, too: others may be able to read it.
            Self::File(recorded) if !recorded.is_new => {
                recorded.beginning = Some(bytes);
                Ok(())
            }
            _ => self.append(bytes, 0),
        }
    }

    /// Adds whole chunks with this number of entries.
    pub(super) fn append(&mut self, bytes: Vec<u8>, entries: u64) -> io::Result<()> {
        match self {
            Self::File(recorded) => recorded.append(&bytes, entries),
            Self::Stream(stream) => stream.append(bytes, entries),
        }
    }

    /// Removes what was written of a chunk that could not be written in full. In a stream it remains at the end, where readers stop.
    pub(super) fn undo(&self) -> io::Result<()> {
        match self {
            // Readers stop at a partial chunk anyway.
            Self::File(recorded) => recorded.undo(),
            Self::Stream(_) => Ok(()),
        }
    }

    /// Waits until everything is written, and checks that the file is still at its path.
    pub(super) fn finish(&mut self) -> io::Result<()> {
        match self {
            Self::File(recorded) => recorded.finish(),
            Self::Stream(stream) => stream.finish(PATIENCE),
        }
    }

    /// Whether an older recording is still in the file.
    pub(super) fn keeps_older(&self) -> bool {
        matches!(self, Self::File(RegularFile { beginning: Some(_), .. }))
    }

    /// The amount added so far.
    pub(super) fn added(&self) -> Amount {
        match self {
            Self::File(recorded) => recorded.written,
            Self::Stream(stream) => stream.accepted,
        }
    }

    /// Number of entries in chunks that have been written in full. Those of a stream may still be queued for its reader.
    pub(super) fn written_entries(&self) -> u64 {
        match self {
            Self::File(recorded) => recorded.written.entries,
            Self::Stream(stream) => stream.progress.entries.load(Relaxed),
        }
    }
}

/// A file that may be in non-blocking mode, as one inherited from another program may be (`ssh` with a terminal does this).
#[derive(Debug)]
pub(super) struct Blocking(pub(super) File);

impl Write for Blocking {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match self.0.write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    poll(&mut [PollFd::new(&self.0, PollFlags::OUT)], None)?;
                }
                result => return result,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Chunks on their way to a reader that may be slow: a thread writes them, so that tracing does not block.
#[derive(Debug)]
pub(super) struct Stream {
    /// `None` once everything has been handed over.
    chunks: Option<Sender<(Vec<u8>, u64)>>,
    /// Disconnected when the thread has ended.
    gone: Receiver<()>,
    thread: Option<JoinHandle<io::Result<()>>>,
    accepted: Amount,
    progress: Arc<Progress>,
    /// Maximum queued bytes.
    most: u64,
}

/// What the reader has taken so far.
#[derive(Debug, Default)]
struct Progress {
    bytes: AtomicU64,
    /// Number of entries in chunks taken in full.
    entries: AtomicU64,
}

impl Stream {
    /// A stream that writes chunks to `out`.
    pub(super) fn to(out: impl Write + Send + 'static) -> io::Result<Self> {
        Self::with(out, WAITING)
    }

    fn with(mut out: impl Write + Send + 'static, most: u64) -> io::Result<Self> {
        let (chunks, next) = channel::<(Vec<u8>, u64)>();
        let (here, gone) = channel();
        let progress = Arc::new(Progress::default());
        let taken = progress.clone();
        let thread = std::thread::Builder::new().name("recording".to_owned()).spawn(move || {
            let _here: Sender<()> = here;
            for (chunk, entries) in next {
                // In parts, so that a slow reader is seen to make progress.
                for part in chunk.chunks(64 << 10) {
                    out.write_all(part)?;
                    taken.bytes.fetch_add(part.len() as u64, Relaxed);
                }
                out.flush()?;
                taken.entries.fetch_add(entries, Relaxed);
            }
            Ok(())
        })?;
        let accepted = Amount::default();
        Ok(Self { chunks: Some(chunks), gone, thread: Some(thread), accepted, progress, most })
    }

    fn append(&mut self, bytes: Vec<u8>, entries: u64) -> io::Result<()> {
        let length = bytes.len() as u64;
        if self.accepted.bytes - self.progress.bytes.load(Relaxed) + length > self.most {
            let why = format!("its reader is too slow: {} MiB wait for it", self.most >> 20);
            return Err(io::Error::other(why));
        }
        let sent = self.chunks.as_ref().is_some_and(|chunks| chunks.send((bytes, entries)).is_ok());
        if !sent {
            // The thread has ended; before the end it does so only because of an error.
            return Err(self.join().err().unwrap_or_else(|| io::ErrorKind::BrokenPipe.into()));
        }
        self.accepted.add(length, entries);
        Ok(())
    }

    fn join(&mut self) -> io::Result<()> {
        let ended = self.thread.take().map(JoinHandle::join);
        ended
            .unwrap_or(Ok(Ok(())))
            .unwrap_or_else(|_| Err(io::Error::other("the thread that writes it panicked")))
    }

    /// Waits until everything is read, or until nothing was read for `patience`.
    fn finish(&mut self, patience: Duration) -> io::Result<()> {
        self.chunks = None;
        let taken = || self.progress.bytes.load(Relaxed);
        let (mut read, mut since) = (taken(), Instant::now());
        // Nothing is ever sent: the thread has ended when the channel is disconnected.
        while self.gone.recv_timeout(Duration::from_millis(100))
            == Err(std::sync::mpsc::RecvTimeoutError::Timeout)
        {
            let now = taken();
            if now != read {
                (read, since) = (now, Instant::now());
            }
            if since.elapsed() >= patience {
                let why = format!("its reader has read nothing for {} s", patience.as_secs());
                return Err(io::Error::other(why));
            }
        }
        self.join()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::{
        io::Read as _,
        sync::mpsc::{SyncSender, sync_channel},
    };

    use super::*;

    /// A pipe with room for as many writes as its channel.
    pub(in crate::trace_file) struct Narrow(pub(in crate::trace_file) SyncSender<Vec<u8>>);

    impl Write for Narrow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.send(bytes.to_vec()).map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Everything arrives in order.
    #[test]
    fn arrives() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut stream = Stream::to(writer).unwrap();
        for at in 0..50_u8 {
            stream.append(vec![at; 1000], 3).unwrap();
        }
        stream.finish(PATIENCE).unwrap();
        assert_eq!(Destination::Stream(stream).written_entries(), 150);
        let mut read = Vec::new();
        reader.read_to_end(&mut read).unwrap();
        let expected: Vec<u8> = (0..50).flat_map(|at| [at; 1000]).collect();
        assert_eq!(read, expected);
    }

    /// An output in non-blocking mode is waited for like any other.
    #[test]
    fn nonblocking() {
        let (mut reader, writer) = io::pipe().unwrap();
        let out = File::from(std::os::fd::OwnedFd::from(writer));
        rustix::io::ioctl_fionbio(&out, true).unwrap();
        let refused = (&out).write_all(&vec![7; 1 << 20]).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock, "the pipe is full now");
        let mut stream = Stream::to(Blocking(out)).unwrap();
        stream.append(vec![9; 1 << 20], 1).unwrap();
        let read = std::thread::spawn(move || {
            let mut read = Vec::new();
            reader.read_to_end(&mut read).map(|_| read)
        });
        stream.finish(PATIENCE).unwrap();
        drop(stream);
        let read = read.join().unwrap().unwrap();
        assert!(read.ends_with(&vec![9; 1 << 20]), "{} bytes", read.len());
    }

    /// A slow reader is waited for, up to a limit, and at the end not forever.
    #[test]
    fn slow() {
        let (to, reader) = sync_channel(1);
        let mut stream = Stream::with(Narrow(to), 3 << 20).unwrap();
        for _ in 0..3 {
            stream.append(vec![0; 1 << 20], 5).unwrap();
        }
        let refused = stream.append(vec![0; 1 << 20], 5).unwrap_err().to_string();
        assert!(refused.contains("too slow: 3 MiB wait"), "{refused}");
        assert_eq!(stream.accepted, Amount { bytes: 3 << 20, entries: 15 });
        let given_up = stream.finish(Duration::from_millis(300)).unwrap_err().to_string();
        assert!(given_up.contains("read nothing"), "{given_up}");
        // Two parts fit, so no chunk was taken in full.
        assert_eq!(stream.progress.entries.load(Relaxed), 0);
        let read: usize = reader.iter().map(|bytes| bytes.len()).sum();
        assert_eq!(read, 3 << 20);
    }

    /// A reader that disconnects is a broken pipe.
    #[test]
    fn gone() {
        let (to, reader) = sync_channel(1);
        drop(reader);
        let mut stream = Stream::to(Narrow(to)).unwrap();
        let error = (0..1000).find_map(|_| {
            std::thread::sleep(Duration::from_millis(1));
            stream.append(vec![0], 1).err()
        });
        assert_eq!(error.unwrap().kind(), io::ErrorKind::BrokenPipe);
        let (to, reader) = sync_channel(1);
        drop(reader);
        let mut stream = Stream::to(Narrow(to)).unwrap();
        stream.append(vec![0], 1).unwrap();
        assert_eq!(stream.finish(PATIENCE).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
