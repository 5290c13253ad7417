//! The code mappings of processes. Written by the thread that watches mappings, read by the one that names frames.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::address::Svma;
use crate::debuginfo::FunctionNames;
use crate::elf::{ElfError, ElfImage, ImageHead, LoadSegment, ThreadLocal, UnwindTable};
use crate::host::{proc_root, root_file};
use crate::ruby::interpreter;

/// The variable exported by a library that publishes spans (OTEP 4947, "Thread Local Variable").
pub(super) const VARIABLE: &str = "otel_thread_ctx_v1";

/// An image whose functions can be named. Its file stays open: the process may be gone when a name is needed.
#[derive(Debug)]
pub(super) struct CodeImage {
    /// Its path, as the process saw it.
    pub path: Arc<str>,
    pub source: Source,
    /// Root folders to search for debug files.
    pub roots: Vec<PathBuf>,
    /// The variable through which it publishes spans, if any.
    pub published: Option<ThreadLocal>,
    names: OnceLock<Option<FunctionNames>>,
    interpreter: OnceLock<Option<Range<Svma>>>,
}

#[derive(Debug)]
pub(super) enum Source {
    File(File),
    Bytes(Vec<u8>),
}

impl CodeImage {
    pub(super) fn new(path: &Path, source: Source, roots: Vec<PathBuf>) -> Self {
        Self {
            path: path.to_string_lossy().into(),
            source,
            roots,
            published: None,
            names: OnceLock::new(),
            interpreter: OnceLock::new(),
        }
    }

    /// Whether its file was deleted: no new process can map it then.
    pub(super) fn is_deleted(&self) -> bool {
        matches!(&self.source, Source::File(file) if file.metadata().is_ok_and(|file| file.nlink() == 0))
    }

    /// Its unwind table.
    pub(super) fn table(&self) -> Result<UnwindTable, ElfError> {
        match &self.source {
            Source::File(file) => UnwindTable::read(file),
            Source::Bytes(bytes) => UnwindTable::read(&bytes[..]),
        }
    }

    /// The address range of the interpreter loop in a Ruby image; searched for at the first call.
    pub(super) fn interpreter(&self) -> Option<&Range<Svma>> {
        let find = || {
            let Source::File(file) = &self.source else { return None };
            let image =
                ElfImage::read(file).inspect_err(|error| log::info!("{}: {error}", self.path)).ok()?;
            let found = interpreter::find(&image);
            found
                .inspect_err(|why| {
                    log::warn!("{}: native frames are not mixed with Ruby frames: {why}", self.path);
                })
                .ok()
        };
        self.interpreter.get_or_init(find).as_ref()
    }

    /// The names of its functions; read at the first call.
    pub(super) fn names(&self) -> Option<&FunctionNames> {
        let read = || {
            let path = Path::new(&*self.path);
            let read = match &self.source {
                Source::File(file) => {
                    let owner = file.metadata().ok().map(|file| file.uid());
                    FunctionNames::read(file, path, owner, &self.roots)
                }
                Source::Bytes(bytes) => FunctionNames::read(&bytes.as_slice(), path, None, &[]),
            };
            read.inspect_err(|error| log::debug!("names of {}: {error}", self.path)).ok()
        };
        self.names.get_or_init(read).as_ref()
    }
}

/// Maximum size of a vDSO in bytes; a real one has two pages.
const MAX_VDSO: u64 = 1 << 20;

/// The image in a file that a process has mapped (`None`: no process is known to have mapped it), and its segments.
pub(super) fn of_file(
    pid: Option<u32>,
    path: &Path,
    shown: &Path,
) -> Result<(Vec<LoadSegment>, CodeImage), ElfError> {
    let file = root_file::open(path).map_err(|source| ElfError::Io { what: "a mapped file", source })?;
    let head = ImageHead::read(&file)?;
    let of_process = pid.map(|pid| proc_root::path(pid, "root"));
    let roots = of_process.into_iter().chain([PathBuf::from("/")]).collect();
    let published = ThreadLocal::find(&file, VARIABLE)
        .inspect_err(|error| log::debug!("thread-local variables of {}: {error}", shown.display()))
        .unwrap_or_default();
    let code = CodeImage::new(shown, Source::File(file), roots);
    Ok((head.segments, CodeImage { published, ..code }))
}

/// The vDSO of a process.
pub(super) fn of_vdso(pid: u32, start: u64, end: u64) -> Result<CodeImage, ElfError> {
    let io = |source| ElfError::Io { what: "the vDSO", source };
    let mut bytes = vec![0; (end - start).min(MAX_VDSO) as usize];
    let memory = File::open(proc_root::path(pid, "mem")).map_err(io)?;
    memory.read_exact_at(&mut bytes, start).map_err(io)?;
    Ok(CodeImage::new(Path::new("[vdso]"), Source::Bytes(bytes), Vec::new()))
}

/// A mapping of an image's code.
#[derive(Clone, Debug)]
pub(super) struct Mapped {
    pub start: u64,
    pub end: u64,
    /// Actual minus stated addresses.
    pub bias: u64,
    pub image: Arc<CodeImage>,
}

/// The code of a process.
#[derive(Debug)]
pub(super) struct CodeMap {
    /// When it was read, in `CLOCK_MONOTONIC` nanoseconds.
    pub read_ns: u64,
    /// Sorted by address.
    pub mappings: Vec<Mapped>,
}

impl CodeMap {
    pub(super) fn find(&self, address: u64) -> Option<&Mapped> {
        let index = self.mappings.partition_point(|mapped| mapped.start <= address).checked_sub(1)?;
        Some(&self.mappings[index]).filter(|mapped| address < mapped.end)
    }
}

/// Counts of images and mappings by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TableCounts {
    /// Number of images whose table the kernel side has or had.
    pub images: u64,
    /// Number of images without a usable table (no `.eh_frame`, damaged, too large).
    pub images_without: u64,
    /// Number of times there was no room for the table of an image or the mappings of a process.
    pub full: u64,
    /// Number of mappings dropped because the kernel side cannot hold more for one process.
    pub mappings_dropped: u64,
}

/// The code of all processes, and its counts: written by the thread that manages the tables, read by the one that names frames.
#[derive(Clone, Debug, Default)]
pub(super) struct Book(Arc<Mutex<Pages>>);

#[derive(Debug, Default)]
struct Pages {
    processes: HashMap<u32, Arc<CodeMap>>,
    counts: TableCounts,
}

impl Book {
    fn lock(&self) -> MutexGuard<'_, Pages> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set(&self, pid: u32, map: Arc<CodeMap>) {
        self.lock().processes.insert(pid, map);
    }

    pub(super) fn get(&self, pid: u32) -> Option<Arc<CodeMap>> {
        self.lock().processes.get(&pid).map(Arc::clone)
    }

    pub(super) fn forget(&self, pid: u32) {
        self.lock().processes.remove(&pid);
    }

    pub(super) fn count(&self, counter: impl FnOnce(&mut TableCounts) -> &mut u64, by: u64) {
        *counter(&mut self.lock().counts) += by;
    }

    pub(super) fn counts(&self) -> TableCounts {
        self.lock().counts
    }
}

/// How long the code of an ended process is kept: its stacks may still be waiting to be named.
const REMEMBERED: Duration = Duration::from_secs(10);

/// Ended processes whose code is still in the book, oldest first.
#[derive(Debug, Default)]
pub(super) struct Ended(VecDeque<(Instant, u32, Arc<CodeMap>)>);

impl Ended {
    /// Records that a process ended.
    pub(super) fn left(&mut self, pid: u32, book: &Book, now: Instant) {
        if let Some(map) = book.get(pid) {
            self.0.push_back((now, pid, map));
        }
    }

    /// Forgets the code of processes that ended long ago. `lives`: whether a process with this pid has a table.
    pub(super) fn expire(&mut self, book: &Book, now: Instant, lives: impl Fn(u32) -> bool) {
        while let Some((since, ..)) = self.0.front()
            && now.duration_since(*since) > REMEMBERED
            && let Some((_, pid, map)) = self.0.pop_front()
        {
            // The pid may have been reused, by a process with other code or with its parent's.
            if !lives(pid) && book.get(pid).is_some_and(|now| Arc::ptr_eq(&now, &map)) {
                book.forget(pid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The code of a process is forgotten some time after its end, whether it had a table or not; that of another process with
    /// the same pid is not.
    #[test]
    fn code_of_ended_processes() {
        let (book, mut ended) = (Book::default(), Ended::default());
        let map = || Arc::new(CodeMap { read_ns: 1, mappings: Vec::new() });
        for pid in [1, 2, 3] {
            book.set(pid, map());
        }
        let begin = Instant::now();
        for pid in [1, 1, 2, 3, 4] {
            ended.left(pid, &book, begin);
        }
        book.set(2, map());
        let known = |book: &Book| [1, 2, 3].map(|pid| book.get(pid).is_some());
        ended.expire(&book, begin + REMEMBERED, |_| false);
        assert_eq!(known(&book), [true; 3]);
        ended.expire(&book, begin + REMEMBERED + Duration::from_millis(1), |pid| pid == 3);
        assert_eq!((known(&book), ended.0.len()), ([false, true, true], 0));
    }
}
