//! Maintains the kernel side's unwind tables: one per image file, and one list of mappings per process. Used by the thread that
//! watches mappings.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gctrace_common::unwind::{CHUNK_MAPPINGS, UnwindMapping};

use super::arena::{Arena, Run};
use super::code::{Book, CodeImage, CodeMap, Ended, Mapped, of_file, of_vdso};
use super::{NativeNamer, context::Contexts, layout};
use crate::bpf::{ExecMapping, NativeMaps, UnwindMaps};
use crate::clock::monotonic_ns;
use crate::elf::{ElfError, LoadSegment};
use crate::host::{
    identity::ImageKey,
    mappings::{CodeMapping, code_of, load_bias},
};

/// Minimum time until a retry for processes for which there was no room.
const AGAIN: Duration = Duration::from_secs(5);

/// Identifies the image of a code mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Key {
    File(ImageKey),
    /// The vDSO, the same in every process, by its size.
    Vdso(u64),
}

#[derive(Debug)]
struct Image {
    /// The chunks of its table; an empty run: it has no table.
    run: Run,
    pages: u32,
    /// Number of chunks that could not be allocated; 0: it has all that it needs.
    lacks: u32,
    /// Stated address to which the table's offsets are relative.
    base: u64,
    segments: Vec<LoadSegment>,
    code: Arc<CodeImage>,
}

/// The mappings of a process, shared by forked processes.
struct Shared {
    run: Run,
    mappings: Vec<UnwindMapping>,
    code: Arc<CodeMap>,
    /// Keeps the tables alive that the list refers to.
    _images: Vec<Arc<Image>>,
}

/// All unwind tables.
pub struct Tables {
    maps: UnwindMaps,
    arena: Arena,
    images: HashMap<Key, Arc<Image>>,
    processes: HashMap<u32, Arc<Shared>>,
    ended: Ended,
    /// Processes for which something did not fit, and the number of chunks needed.
    starved: HashMap<u32, u32>,
    /// When it was last checked whether there is room for them.
    looked: Option<Instant>,
    book: Book,
    contexts: Contexts,
}

impl Tables {
    /// Starts without any tables.
    pub fn new(maps: NativeMaps) -> Self {
        let NativeMaps { unwind: maps, contexts } = maps;
        Self {
            contexts: Contexts::new(contexts),
            arena: Arena::new(maps.chunks()),
            maps,
            images: HashMap::new(),
            processes: HashMap::new(),
            ended: Ended::default(),
            starved: HashMap::new(),
            looked: None,
            book: Book::default(),
        }
    }

    /// Creates the namer for the mappings of these tables; for the thread that handles stacks.
    pub fn namer(&self) -> NativeNamer {
        NativeNamer::new(self.book.clone())
    }

    /// Handles new executable mappings: reads the processes concerned again. Each process is read once,
    /// however many mappings it has, and not for code without a file at an address where no file was mapped: just-in-time compilers
    /// create such code all the time.
    pub fn mapped<'a>(&mut self, mappings: impl Iterator<Item = &'a ExecMapping>) {
        let concerns = |new: &&ExecMapping| {
            let file = new.file.first() == Some(&b'/') && new.file.get(1) != Some(&b'/');
            let over =
                |known: &Mapped| known.start < new.address.saturating_add(new.len) && new.address < known.end;
            let shared = self.processes.get(&new.pid);
            shared.is_some_and(|shared| file || shared.code.mappings.iter().any(over))
        };
        let mut pids: Vec<u32> = mappings.filter(concerns).map(|new| new.pid).collect();
        pids.sort_unstable();
        pids.dedup();
        for pid in pids {
            self.refresh(pid);
        }
        self.try_again();
        self.contexts.try_again();
    }

    /// Time until [`Tables::mapped`] must be called, even without new mappings.
    pub fn wait(&self) -> Option<Duration> {
        self.contexts.wait()
    }

    /// Reads the processes again for which there was no room, if there is now.
    fn try_again(&mut self) {
        let now = Instant::now();
        let lately = self.looked.is_some_and(|looked| now.duration_since(looked) < AGAIN);
        if self.starved.is_empty() || lately {
            return;
        }
        self.looked = Some(now);
        let starved: Vec<(u32, u32)> = self.starved.iter().map(|(&pid, &chunks)| (pid, chunks)).collect();
        for (pid, chunks) in starved {
            if self.arena.has(chunks, now) {
                self.refresh(pid);
            } else {
                self.give_up_unmapped(now, |_, _| true);
            }
        }
    }

    /// Reads all processes again, after mapping records were lost.
    pub fn refresh_all(&mut self) {
        let pids: Vec<u32> = self.processes.keys().copied().collect();
        for pid in pids {
            self.refresh(pid);
        }
    }

    /// Compiles the table of an image before any process that maps it is seen.
    pub fn prepare(&mut self, key: ImageKey, path: &Path, shown: &Path) {
        // A failure is retried later. The interpreter loop is located here, so that the naming thread does not have to.
        if let Some(image) = self.image(Key::File(key), || of_file(None, path, shown)) {
            image.code.interpreter();
        }
    }

    /// Reads the mappings of a process and passes them to the kernel side, with the tables of the mapped images.
    pub fn refresh(&mut self, pid: u32) {
        let read_ns = monotonic_ns();
        let code = match code_of(pid) {
            Ok(code) => code,
            Err(error) => {
                log::debug!("native stacks of pid {pid}: {error}");
                return self.forget(pid);
            }
        };
        let found: Vec<_> = code.iter().filter_map(|code| self.mapping(pid, code)).collect();
        let mut mappings: Vec<UnwindMapping> = found.iter().filter_map(|(_, _, unwind)| *unwind).collect();
        if mappings.len() > CHUNK_MAPPINGS {
            self.book.count(|counts| &mut counts.mappings_dropped, (mappings.len() - CHUNK_MAPPINGS) as u64);
            mappings.truncate(CHUNK_MAPPINGS);
        }
        let (images, mapped): (Vec<_>, Vec<_>) =
            found.into_iter().map(|(image, mapped, _)| (image, mapped)).unzip();
        // If several images lack chunks, room for any of them is worth a retry.
        match images.iter().map(|image| image.lacks).filter(|&lacks| lacks > 0).min() {
            Some(lacks) => self.starved.insert(pid, lacks),
            None => self.starved.remove(&pid),
        };
        // Read the names here, so that the naming thread does not spend the time on it while further processes exit.
        for code in &mapped {
            code.image.names();
        }
        self.contexts.mapped(pid, &mapped);
        let code = Arc::new(CodeMap { read_ns, mappings: mapped });
        self.book.set(pid, Arc::clone(&code));
        if self.processes.get(&pid).is_some_and(|shared| shared.mappings == mappings) && self.maps.has(pid) {
            return;
        }
        let Some(run) = self.room(1) else {
            self.book.count(|counts| &mut counts.full, 1);
            self.starved.insert(pid, 1);
            return self.drop_table(pid);
        };
        let shared = Arc::new(Shared { run, mappings, code, _images: images });
        let written = self
            .maps
            .write(run.first, &layout::mappings(&shared.mappings))
            .and_then(|()| self.maps.set(pid, run.first));
        if let Err(error) = written {
            log::debug!("native stacks of pid {pid}: {error}");
            self.book.count(|counts| &mut counts.full, 1);
            self.arena.give_back(run, Instant::now());
            return self.drop_table(pid);
        }
        let before = self.processes.insert(pid, shared);
        self.release(before);
    }

    /// Handles a fork of a known process: the child has the same mappings.
    pub fn forked(&mut self, parent: u32, child: u32) {
        self.contexts.forked(parent, child);
        let Some(shared) = self.processes.get(&parent).map(Arc::clone) else { return };
        self.book.set(child, Arc::clone(&shared.code));
        if let Err(error) = self.maps.set(child, shared.run.first) {
            log::debug!("native stacks of pid {child}: {error}");
            self.book.count(|counts| &mut counts.full, 1);
            return;
        }
        if let Some(&chunks) = self.starved.get(&parent) {
            self.starved.insert(child, chunks);
        }
        let before = self.processes.insert(child, shared);
        self.release(before);
    }

    /// Handles a process that ended or is no longer traced. Its frames can still be named for a while.
    pub fn forget(&mut self, pid: u32) {
        let now = Instant::now();
        self.starved.remove(&pid);
        self.contexts.forget(pid);
        // Also if there was no room for its mappings: its code is in the book.
        self.ended.left(pid, &self.book, now);
        self.drop_table(pid);
        self.ended.expire(&self.book, now, |pid| self.processes.contains_key(&pid));
    }

    fn drop_table(&mut self, pid: u32) {
        if let Err(error) = self.maps.forget(pid) {
            log::debug!("native stacks of pid {pid}: {error}");
        }
        let before = self.processes.remove(&pid);
        self.release(before);
    }

    fn release(&mut self, shared: Option<Arc<Shared>>) {
        if let Some(Shared { run, .. }) = shared.and_then(Arc::into_inner) {
            self.arena.give_back(run, Instant::now());
        }
    }

    /// The image of an executable mapping, and the entry for the kernel side, if the image has a table.
    fn mapping(
        &mut self,
        pid: u32,
        code: &CodeMapping,
    ) -> Option<(Arc<Image>, Mapped, Option<UnwindMapping>)> {
        let (start, end, image, bias) = match code {
            &CodeMapping::Vdso(start, end) => {
                let image =
                    self.image(Key::Vdso(end - start), || Ok((Vec::new(), of_vdso(pid, start, end)?)))?;
                (start, end, image, start)
            }
            CodeMapping::File(mapping) => {
                let path = mapping.open_path(pid).ok()?;
                let key = Key::File(ImageKey::of(&path).ok()?);
                let image = self.image(key, || of_file(Some(pid), &path, &mapping.path))?;
                let bias = load_bias(mapping, &image.segments)?;
                (mapping.start, mapping.end, image, bias)
            }
        };
        let mapped = Mapped { start, end, bias, image: Arc::clone(&image.code) };
        let unwind = (image.pages > 0).then(|| UnwindMapping {
            start,
            end,
            base: bias.wrapping_add(image.base),
            chunk: image.run.first,
            pages: image.pages,
        });
        Some((image, mapped, unwind))
    }

    /// The image with this key, read if it is new.
    fn image(
        &mut self,
        key: Key,
        read: impl FnOnce() -> Result<(Vec<LoadSegment>, CodeImage), ElfError>,
    ) -> Option<Arc<Image>> {
        let known = self.images.get(&key).map(Arc::clone);
        let (segments, code) = match known {
            Some(image) if image.lacks == 0 || !self.arena.has(image.lacks, Instant::now()) => {
                return Some(image);
            }
            // Reuse what was read earlier.
            Some(image) => (image.segments.clone(), Arc::clone(&image.code)),
            None => {
                // A failure is not remembered: another process may be able to read it.
                let read = read().inspect_err(|error| log::debug!("unwind table: {error}")).ok()?;
                (read.0, Arc::new(read.1))
            }
        };
        let table = code.table();
        let mut image = Image { run: Run::default(), pages: 0, lacks: 0, base: 0, segments, code };
        let table = table
            .inspect_err(|error| log::debug!("unwind table of {}: {error}", image.code.path))
            .ok()
            .and_then(|table| Some((table.base.0, layout::table(&table.rows)?)));
        if let Some((base, layout)) = table {
            let chunks = layout.chunks.len() as u32;
            let Some(run) = self.room(chunks) else {
                self.book.count(|counts| &mut counts.full, 1);
                image.lacks = chunks;
                let image = Arc::new(image);
                self.images.insert(key, Arc::clone(&image));
                return Some(image);
            };
            for (number, chunk) in (run.first..).zip(&layout.chunks) {
                if let Err(error) = self.maps.write(number, chunk) {
                    log::debug!("unwind table of {}: {error}", image.code.path);
                    self.arena.give_back(run, Instant::now());
                    return Some(Arc::new(image));
                }
            }
            (image.base, image.run, image.pages) = (base, run, layout.pages);
            self.book.count(|counts| &mut counts.images, 1);
        } else {
            self.book.count(|counts| &mut counts.images_without, 1);
        }
        let image = Arc::new(image);
        self.images.insert(key, Arc::clone(&image));
        Some(image)
    }

    /// Allocates chunks. If none are left, images that no process maps any more release theirs, for the next attempt.
    fn room(&mut self, count: u32) -> Option<Run> {
        let now = Instant::now();
        let taken = self.arena.take(count, now);
        if taken.is_none() {
            self.give_up_unmapped(now, |_, _| true);
        }
        taken
    }

    /// Forgets images that no process maps any more: those that no process can map again, because their file was deleted, and those that `kept`
    /// does not accept. Each image keeps its file open.
    pub fn give_back_unused(&mut self, kept: impl Fn(&ImageKey) -> bool) {
        let now = Instant::now();
        self.ended.expire(&self.book, now, |pid| self.processes.contains_key(&pid));
        self.give_up_unmapped(now, |key, code| match key {
            Key::File(file) => !kept(file) || code.is_deleted(),
            Key::Vdso(_) => false,
        });
    }

    /// Releases the chunks of images that no process maps any more, if `may` accepts them.
    fn give_up_unmapped(&mut self, now: Instant, may: impl Fn(&Key, &CodeImage) -> bool) {
        let arena = &mut self.arena;
        self.images.retain(|key, image| {
            let kept = Arc::strong_count(image) > 1 || !may(key, &image.code);
            if !kept && image.run.count > 0 {
                arena.give_back(image.run, now);
            }
            kept
        });
    }
}
