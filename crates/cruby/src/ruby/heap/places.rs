//! The places at which objects were allocated, from the table of a program that traces its allocations.
//!
//! Source: `newobj_i` and `freeobj_i` (`ext/objspace/object_tracing.c`), `struct allocation_info` (ext/objspace/objspace.h), the same from 2.7
//! to 4.0. 24 bytes are kept per entry; files, lines and methods are kept once.

use std::{collections::HashMap, sync::Arc};

use super::{
    ObjectType, Slot,
    table::{ENTRY, Pair, Table},
    tracing::{NoPlaces, Tracing},
    walk::word,
    window::Window,
};
use crate::ruby::frames::Memory;

/// `struct allocation_info`: byte offsets of `living`, `flags`, `klass`, `path`, `line`, `mid`, `generation`.
const LIVING: usize = 0;
const FLAGS: usize = 8;
const CLASS: usize = 16;
const PATH: usize = 24;
const LINE: usize = 32;
const METHOD: usize = 48;
const GENERATION: usize = 56;
const INFO: usize = 64;
/// Number of entries read at once.
const CHUNK: u64 = 2048;
/// Maximum number of attempts to read a table that changes meanwhile.
const TRIES: u32 = 4;
/// Maximum number of entries, of distinct places and classes, and of bytes of all paths that are kept.
const MOST_ENTRIES: u64 = 1 << 24;
const MOST_PLACES: usize = 1 << 20;
const MOST_TEXT: usize = 64 << 20;
/// Maximum number of slots of the table, in use or not, that are read.
const MOST_SLOTS: u64 = 1 << 28;
/// Maximum bytes of a path (`PATH_MAX` of Linux).
const LONGEST: usize = 4096;
/// Masks of the flags for the type and, for internal objects, the kind (`imemo_type`, internal/imemo.h).
const T_MASK: u64 = 0x1f;
const KIND_MASK: u64 = 0xf000;

/// A place in Ruby code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    file: u32,
    /// Line number, 0 if unknown.
    pub line: u32,
    /// The `Symbol` of the method, or a value that is not a `Symbol`.
    pub method: u64,
}

/// The table's entry for an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) address: u64,
    /// Index of the entry in the table.
    pub(super) index: u32,
    place: u32,
    class: u32,
    generation: u32,
}

/// Properties of an object when it was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Made {
    flags: u64,
    class: u64,
}

/// Where and when an object was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Number of the place, for [`Places::place`].
    pub place: u32,
    /// `GC.count` at that time.
    pub generation: u64,
}

/// Places of objects, as they were when the table was read.
#[derive(Debug)]
pub struct Places {
    tracing: Tracing,
    pub(super) table: Table,
    /// By address.
    entries: Vec<Entry>,
    lines: Vec<Place>,
    made: Vec<Made>,
    files: Vec<Option<Arc<str>>>,
}

impl Places {
    /// Reads the table. Bounded: it ends however much the table changes meanwhile.
    ///
    /// # Errors
    ///
    /// The table no longer exists, is not plausible, is too large, or changed during every attempt.
    pub fn read<M: Memory>(memory: &M, tracing: &Tracing) -> Result<Self, NoPlaces> {
        let mut found = Err(NoPlaces::Changed);
        for _ in 0..TRIES {
            found = Reader::new(memory).read(tracing);
            if !matches!(found, Err(NoPlaces::Changed)) {
                break;
            }
        }
        found
    }

    /// Number of objects in it.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it contains no objects, as after `trace_object_allocations_clear`.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether the program was tracing; otherwise it has stopped.
    pub fn running(&self) -> bool {
        self.tracing.running
    }

    /// A place.
    pub fn place(&self, place: u32) -> Option<Place> {
        self.lines.get(place as usize).copied()
    }

    /// The file of a place; `None` if it was not in Ruby code.
    pub fn file(&self, place: Place) -> Option<&Arc<str>> {
        self.files.get(place.file as usize)?.as_ref()
    }

    /// Entries of objects with addresses from `start` up to, but not including, `end`, by address.
    pub(super) fn between(&self, start: u64, end: u64) -> &[Entry] {
        let at = |limit: u64| self.entries.partition_point(|entry| entry.address < limit);
        self.entries.get(at(start)..at(end)).unwrap_or_default()
    }

    /// Where the object in a slot was allocated, if the entry belongs to it. `count` is `GC.count` from before the slot was read.
    pub(super) fn origin(
        &self,
        entry: &Entry,
        slot: &Slot<'_>,
        count: u64,
        is_same_class: impl FnOnce(u64, u64) -> bool,
    ) -> Option<Origin> {
        let made = self.made.get(entry.class as usize)?;
        let kind = slot.kind();
        if ObjectType::of_flags(made.flags) != kind || u64::from(entry.generation) > count {
            return None;
        }
        let same = if kind.is_internal() {
            made.flags == of_flags(slot.flags())
        } else {
            // An object that was or is hidden (`rb_obj_hide`, object.c) has no class.
            [made.class, slot.class()].contains(&0)
                || made.class == slot.class()
                || is_same_class(made.class, slot.class())
        };
        // `gc_aging` (gc.c; gc/default/default.c from 3.4 on): each collection that an object with a write barrier survives ages it. A
        // collection may still be marking, so the last one does not count.
        let survived = count.saturating_sub(u64::from(entry.generation)).saturating_sub(1);
        let too_young =
            slot.marks.is_some_and(|marks| !marks.unprotected && u64::from(marks.age) < survived.min(3));
        (same && !too_young).then(|| Origin { place: entry.place, generation: u64::from(entry.generation) })
    }
}

/// The part of an object's flags that is compared.
fn of_flags(flags: u64) -> u64 {
    let mask = if ObjectType::of_flags(flags).is_internal() { T_MASK | KIND_MASK } else { T_MASK };
    flags & mask
}

/// Reads a table once.
struct Reader<'m, M> {
    memory: &'m M,
    window: Window,
    places: HashMap<Place, u32>,
    made: HashMap<Made, u32>,
    /// By address.
    files: HashMap<u64, Option<u32>>,
    /// Address of the name of each file.
    addresses: Vec<u64>,
    text: usize,
}

/// An entry with its data.
struct Info {
    pair: Pair,
    made: Made,
    path: u64,
    line: u32,
    method: u64,
    generation: u32,
}

impl<'m, M: Memory> Reader<'m, M> {
    fn new(memory: &'m M) -> Self {
        Self {
            memory,
            window: Window::new(),
            places: HashMap::new(),
            made: HashMap::new(),
            files: HashMap::new(),
            addresses: Vec::new(),
            text: 0,
        }
    }

    fn read(mut self, tracing: &Tracing) -> Result<Places, NoPlaces> {
        let memory = self.memory;
        let address = tracing.table(memory).ok_or(NoPlaces::Implausible)?;
        let table = Table::at(memory, address).ok_or(NoPlaces::Implausible)?;
        if table.bound > MOST_SLOTS {
            return Err(NoPlaces::TooLarge);
        }
        let mut found = Places {
            tracing: *tracing,
            table,
            entries: Vec::new(),
            lines: Vec::new(),
            made: Vec::new(),
            // The file of places outside Ruby code.
            files: vec![None],
        };
        self.addresses.push(0);
        self.files.insert(0, Some(0));
        let mut first = table.start;
        while first < table.bound {
            let count = CHUNK.min(table.bound - first);
            for info in self.chunk(&table, first, count)? {
                self.add(&mut found, &info)?;
            }
            first += count;
        }
        // A table that was rebuilt meanwhile has its entries elsewhere.
        if tracing.table(memory) != Some(address) || !table.is_same(memory) {
            return Err(NoPlaces::Changed);
        }
        self.confirm_files(&mut found);
        found.entries.sort_unstable_by_key(|entry| entry.address);
        // Keys are unique. Of duplicate keys, the valid entry is not known.
        let mut twice: Vec<u64> = Vec::new();
        for pair in found.entries.windows(2) {
            if pair[0].address == pair[1].address {
                twice.push(pair[0].address);
            }
        }
        found.entries.retain(|entry| twice.binary_search(&entry.address).is_err());
        found.entries.shrink_to_fit();
        Ok(found)
    }

    /// Entries from `first` on, with their data. Entries that changed while the data was read are skipped.
    fn chunk(&mut self, table: &Table, first: u64, count: u64) -> Result<Vec<Info>, NoPlaces> {
        let at = table.entry(first).ok_or(NoPlaces::Implausible)?;
        let mut bytes = vec![0; count as usize * ENTRY];
        let memory = self.memory;
        let read = |bytes: &mut [u8]| memory.read(at, bytes);
        if !read(&mut bytes) {
            return Err(NoPlaces::Changed);
        }
        let pair = |index: usize, bytes: &[u8]| {
            bytes
                .get(index * ENTRY..(index + 1) * ENTRY)
                .and_then(|entry| Table::pair(first + index as u64, entry))
        };
        let mut pairs: Vec<Pair> = (0..count as usize).filter_map(|index| pair(index, &bytes)).collect();
        pairs.retain(|pair| pair.key.is_multiple_of(8) && pair.key != 0 && pair.record.is_multiple_of(8));
        pairs.sort_unstable_by_key(|pair| pair.record);
        self.window.forget();
        let mut infos: Vec<Info> = pairs.into_iter().filter_map(|pair| self.info(pair)).collect();
        if !read(&mut bytes) {
            return Err(NoPlaces::Changed);
        }
        infos.retain(|info| pair((info.pair.index - first) as usize, &bytes) == Some(info.pair));
        Ok(infos)
    }

    /// The `struct allocation_info` of an entry; `None` if it is not plausible.
    fn info(&mut self, pair: Pair) -> Option<Info> {
        let mut info = [0; INFO];
        if !self.window.read(self.memory, pair.record, &mut info) {
            return None;
        }
        let of = |at| word(&info, at);
        // NUM2INT.
        let line = u32::try_from(of(LINE)).ok().filter(|line| i32::try_from(*line).is_ok())?;
        let generation = u32::try_from(of(GENERATION)).ok()?;
        (of(LIVING) & 0xffff_ffff == 1).then(|| Info {
            pair,
            made: Made { flags: of_flags(of(FLAGS)), class: of(CLASS) },
            path: of(PATH),
            line,
            method: of(METHOD),
            generation,
        })
    }

    fn add(&mut self, found: &mut Places, info: &Info) -> Result<(), NoPlaces> {
        let Some(file) = self.file(found, info.path)? else { return Ok(()) };
        if found.entries.len() as u64 >= MOST_ENTRIES {
            return Err(NoPlaces::TooLarge);
        }
        let made = if ObjectType::of_flags(info.made.flags).is_internal() {
            Made { class: 0, ..info.made }
        } else {
            info.made
        };
        let place = Place { file, line: info.line, method: info.method };
        let place = number(&mut self.places, &mut found.lines, place)?;
        let class = number(&mut self.made, &mut found.made, made)?;
        let index = u32::try_from(info.pair.index).map_err(|_| NoPlaces::TooLarge)?;
        let (address, generation) = (info.pair.key, info.generation);
        found.entries.push(Entry { address, index, place, class, generation });
        Ok(())
    }

    /// The number of the file whose name is at an address; `None` if no name is there.
    fn file(&mut self, found: &mut Places, address: u64) -> Result<Option<u32>, NoPlaces> {
        if let Some(&known) = self.files.get(&address) {
            return Ok(known);
        }
        if self.files.len() >= MOST_PLACES {
            return Err(NoPlaces::TooLarge);
        }
        let text = self.path(address);
        let file = match text {
            Some(text) => {
                self.text += text.len();
                let next = u32::try_from(found.files.len()).map_err(|_| NoPlaces::TooLarge)?;
                found.files.push(Some(text));
                self.addresses.push(address);
                Some(next)
            }
            None => None,
        };
        self.files.insert(address, file);
        if self.text > MOST_TEXT { Err(NoPlaces::TooLarge) } else { Ok(file) }
    }

    /// The NUL-terminated text at an address.
    fn path(&mut self, address: u64) -> Option<Arc<str>> {
        const STEP: u64 = 64;
        let mut bytes = Vec::new();
        let mut at = address;
        while bytes.len() < LONGEST {
            // Not past the end of a page; the next one may not be mapped.
            let len = STEP.min(4096 - at % 4096) as usize;
            let mut piece = [0; STEP as usize];
            let piece = piece.get_mut(..len)?;
            if !self.window.read(self.memory, at, piece) {
                return None;
            }
            if let Some(end) = piece.iter().position(|byte| *byte == 0) {
                bytes.extend_from_slice(&piece[..end]);
                let text = String::from_utf8_lossy(&bytes);
                return (!text.is_empty()).then(|| Arc::from(&*text));
            }
            bytes.extend_from_slice(piece);
            at = at.checked_add(len as u64)?;
        }
        None
    }

    /// Drops objects of files whose names have changed: another text may have been there temporarily.
    fn confirm_files(&mut self, found: &mut Places) {
        self.window.forget();
        let files: Vec<bool> = (found.files.iter().zip(std::mem::take(&mut self.addresses)))
            .map(|(name, address)| name.as_ref().is_none_or(|name| self.path(address).as_ref() == Some(name)))
            .collect();
        let Places { entries, lines, .. } = found;
        let confirmed = |place: &Place| files.get(place.file as usize).copied().unwrap_or(false);
        entries.retain(|entry| lines.get(entry.place as usize).is_some_and(confirmed));
    }
}

/// The number of a value; each distinct value is stored once.
fn number<T: Copy + Eq + std::hash::Hash>(
    known: &mut HashMap<T, u32>,
    all: &mut Vec<T>,
    value: T,
) -> Result<u32, NoPlaces> {
    if let Some(&known) = known.get(&value) {
        return Ok(known);
    }
    if all.len() >= MOST_PLACES {
        return Err(NoPlaces::TooLarge);
    }
    let next = all.len() as u32;
    all.push(value);
    known.insert(value, next);
    Ok(next)
}
