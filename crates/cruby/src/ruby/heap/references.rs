//! The references of objects, where they can be read exactly.
//!
//! The references reported for an object are those of `ObjectSpace.reachable_objects_from` (`gc_mark_children`, gc.c;
//! `rb_gc_mark_children` from 3.4 on), without its class. Supported are objects with their instance variables, arrays, strings, hashes,
//! structs, numbers, matches and regular expressions of 2.7 to 4.0, and sets, which are objects with a hash up to 3.4. Of all these except objects
//! and sets, instance variables are unknown. Reported as unknown: classes, code, and what C extensions mark. Symbols are reported as Ruby does: up
//! to 3.4 without their strings.

use super::{
    HeapLayout, Shapes, Slot,
    sets::{self, Sets},
    shapes::Variables,
    table::{BOUND, DELETED, ENTRIES, ENTRY, SIZE, START},
    walk::{USER1, is_still, unchanged, word},
};
use crate::ruby::{RubyVersion, frames::Memory};

/// `FL_USHIFT`.
const USER: u32 = 12;
/// `RHASH_ST_TABLE_FLAG` (internal/hash.h): `FL_USER3`.
const HASH_IN_TABLE: u64 = 1 << 15;
/// `RHASH_AR_TABLE_BOUND_SHIFT`.
const HASH_BOUND: u32 = USER + 8;
/// `Qundef` up to 3.1, and later (`include/ruby/internal/special_consts.h`): the key of a deleted entry.
const UNDEF: [u64; 2] = [0x34, 0x24];
/// Number of bytes read at once, a multiple of all strides.
const CHUNK: usize = 48 << 10;
/// Maximum plausible number of elements.
const MOST: u64 = 1 << 36;

/// Whether the references of an object were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Referred {
    /// All of them.
    Exactly,
    /// Only those of its own structure, such as the elements of an array: it also has instance variables, which are stored elsewhere.
    Partly,
    /// References of objects of this kind cannot be read in this release.
    Unknown,
    /// It has changed meanwhile: the memory it points to is gone, or it points elsewhere now. The visited references may belong to another
    /// object that reuses the memory.
    Changed,
}

/// Reads references of objects of one release.
#[derive(Debug)]
pub struct References {
    version: RubyVersion,
    release: Release,
    layout: HeapLayout,
    shapes: Option<Shapes>,
    sets: Option<Sets>,
    shared: u64,
    array_embedded: u64,
    buffer: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Release {
    /// 2.7 to 3.1.
    Variables,
    /// 3.2.
    Pointers,
    /// From 3.3 on: hashes contain their tables.
    Embedded,
}

impl References {
    /// For a release; `None` if none of its objects can be read. Without `shapes`, objects of 3.2 and later that have instance variables
    /// are unknown.
    pub fn of(version: RubyVersion, layout: &HeapLayout, shapes: Option<Shapes>) -> Option<Self> {
        if !version.at_least(2, 7) || version.at_least(4, 1) {
            return None;
        }
        let release = match () {
            () if version.at_least(3, 3) => Release::Embedded,
            () if version.at_least(3, 2) => Release::Pointers,
            () => Release::Variables,
        };
        Some(Self {
            version,
            release,
            layout: *layout,
            shapes,
            sets: Sets::of(version),
            shared: layout.owned.shared,
            // RARRAY_EMBED_LEN_MASK (include/ruby/internal/core/rarray.h): two bits, from 3.2 on seven.
            array_embedded: if release == Release::Variables { 3 } else { 0x7f },
            buffer: vec![0; CHUNK],
        })
    }

    /// Passes each object that `slot` refers to to `visit`; duplicate references are passed each time.
    pub fn each<M: Memory>(&mut self, memory: &M, slot: &Slot<'_>, visit: &mut dyn FnMut(u64)) -> Referred {
        let flags = slot.flags();
        let class = slot.class();
        let mut found = |value: u64| {
            if value.is_multiple_of(8) && value > 0x1000 && value != class {
                visit(value);
            }
        };
        let read = match slot.kind().name() {
            "T_FLOAT" | "T_BIGNUM" => Some(()),
            "T_SYMBOL" => {
                if self.version.at_least(4, 0) {
                    found(slot.word(24));
                }
                Some(())
            }
            "T_STRING" => {
                if flags & USER1 != 0 && flags & self.shared != 0 {
                    found(slot.word(32));
                }
                Some(())
            }
            "T_REGEXP" => {
                found(slot.word(24));
                Some(())
            }
            "T_MATCH" => {
                found(slot.word(16));
                found(slot.word(if self.release == Release::Embedded { 24 } else { 32 }));
                Some(())
            }
            "T_RATIONAL" | "T_COMPLEX" => {
                found(slot.word(16));
                found(slot.word(24));
                Some(())
            }
            "T_ARRAY" if flags & USER1 != 0 => {
                embedded(slot, flags >> (USER + 3) & self.array_embedded, &mut found)
            }
            "T_ARRAY" if flags & self.shared != 0 => {
                found(slot.word(24));
                Some(())
            }
            "T_ARRAY" => self
                .values(memory, slot.word(32), slot.word(16), &mut found)
                .and_then(|()| unchanged(memory, slot, 32)),
            "T_STRUCT" => {
                let mask = if self.release == Release::Embedded { 0x7f } else { 3 };
                match flags >> (USER + 1) & mask {
                    0 => self
                        .values(memory, slot.word(24), slot.word(16), &mut found)
                        .and_then(|()| unchanged(memory, slot, 24)),
                    len => embedded(slot, len, &mut found),
                }
            }
            "T_HASH" => self.hash(memory, slot, &mut found).and_then(|()| unchanged(memory, slot, 16)),
            "T_OBJECT" if self.release == Release::Variables => {
                if flags & USER1 != 0 {
                    embedded(slot, 3, &mut found)
                } else {
                    self.values(memory, slot.word(24), slot.word(16) & 0xffff_ffff, &mut found)
                        .and_then(|()| unchanged(memory, slot, 24))
                }
            }
            "T_OBJECT" => {
                let Some(shapes) = &mut self.shapes else { return Referred::Unknown };
                match shapes.variables(memory, slot, self.version) {
                    Some(Variables::Unknown) => return Referred::Unknown,
                    Some(Variables::Embedded(count)) => embedded(slot, count, &mut found),
                    Some(Variables::At(first, count)) => self
                        .values(memory, first, count, &mut found)
                        .and_then(|()| unchanged(memory, slot, 16)),
                    Some(Variables::Table(table)) => {
                        self.variables(memory, table, &mut found).and_then(|()| unchanged(memory, slot, 16))
                    }
                    None => None,
                }
            }
            "T_DATA" => {
                let Some(set) = self.sets.as_mut().and_then(|sets| sets.elements(memory, slot)) else {
                    return Referred::Unknown;
                };
                found(set.fields);
                self.entries::<_, { sets::ENTRY }>(memory, set.first, set.count, &mut |entry| {
                    if entry[0] != DELETED {
                        found(entry[1]);
                    }
                })
                .and_then(|()| set.are_there(memory))
            }
            _ => return Referred::Unknown,
        };
        match read {
            // The object with the variables of a set is among its references.
            Some(()) if slot.kind().name() == "T_DATA" => Referred::Exactly,
            Some(()) if slot.has_other_variables(&self.layout) => Referred::Partly,
            Some(()) => Referred::Exactly,
            None => Referred::Changed,
        }
    }

    /// Passes the keys and the values of a `Hash` to `visit`.
    pub fn pairs<M: Memory>(
        &mut self,
        memory: &M,
        slot: &Slot<'_>,
        visit: &mut dyn FnMut(u64, u64),
    ) -> Referred {
        if slot.kind().name() != "T_HASH" {
            return Referred::Unknown;
        }
        let read = self.hash_pairs(memory, slot, visit).and_then(|()| unchanged(memory, slot, 16));
        if read.is_some() { Referred::Exactly } else { Referred::Changed }
    }

    fn hash<M: Memory>(&mut self, memory: &M, slot: &Slot<'_>, found: &mut dyn FnMut(u64)) -> Option<()> {
        found(slot.word(if self.release == Release::Embedded { 16 } else { 24 }));
        self.hash_pairs(memory, slot, &mut |key, value| {
            found(key);
            found(value);
        })
    }

    fn hash_pairs<M: Memory>(
        &mut self,
        memory: &M,
        slot: &Slot<'_>,
        visit: &mut dyn FnMut(u64, u64),
    ) -> Option<()> {
        let flags = slot.flags();
        let inside = self.release == Release::Embedded;
        let table = slot.word(16);
        if flags & HASH_IN_TABLE != 0 {
            let at = if inside { slot.address.checked_add(24)? } else { table };
            return self.table(memory, at, visit);
        }
        let bound = flags >> HASH_BOUND & 0xf;
        let mut pair = |key: u64, value: u64| {
            if !UNDEF.contains(&key) {
                visit(key, value);
            }
        };
        if inside {
            for index in 0..bound as usize {
                pair(slot.word(32 + index * 16), slot.word(40 + index * 16));
            }
            return Some(());
        }
        if bound == 0 {
            return Some(());
        }
        self.entries::<_, 16>(memory, table, bound, &mut |entry| pair(entry[0], entry[1]))
    }

    /// Instance variables in a `struct st_table`, whose keys are ids.
    fn variables<M: Memory>(&mut self, memory: &M, table: u64, found: &mut dyn FnMut(u64)) -> Option<()> {
        self.table(memory, table, &mut |_, value| found(value))
    }

    /// The pairs of a `struct st_table` at this address.
    fn table<M: Memory>(&mut self, memory: &M, at: u64, pair: &mut dyn FnMut(u64, u64)) -> Option<()> {
        let mut table = [0; SIZE];
        if !memory.read(at, &mut table) {
            return None;
        }
        let word = |at| word(&table, at);
        let count = word(BOUND).checked_sub(word(START))?;
        let first = word(ENTRIES).checked_add(word(START).checked_mul(ENTRY as u64)?)?;
        self.entries::<_, ENTRY>(memory, first, count, &mut |entry| {
            if entry[0] != DELETED {
                pair(entry[1], entry[2]);
            }
        })?;
        is_still(memory, at.checked_add(ENTRIES as u64)?, word(ENTRIES))
    }

    fn values<M: Memory>(
        &mut self,
        memory: &M,
        first: u64,
        count: u64,
        found: &mut dyn FnMut(u64),
    ) -> Option<()> {
        self.entries::<_, 8>(memory, first, count, &mut |entry| found(entry[0]))
    }

    /// Entries of `BYTES` bytes, read in chunks.
    fn entries<M: Memory, const BYTES: usize>(
        &mut self,
        memory: &M,
        first: u64,
        count: u64,
        visit: &mut dyn FnMut([u64; 3]),
    ) -> Option<()> {
        if count > MOST {
            return None;
        }
        let (mut at, mut left) = (first, count * BYTES as u64);
        while left > 0 {
            let len = left.min(CHUNK as u64) as usize;
            let bytes = &mut self.buffer[..len];
            if !memory.read(at, bytes) {
                return None;
            }
            for entry in bytes.chunks_exact(BYTES) {
                visit([0, 8, 16].map(|at| word(entry, at)));
            }
            at = at.checked_add(len as u64)?;
            left -= len as u64;
        }
        Some(())
    }
}

/// Values after the header of a slot.
fn embedded(slot: &Slot<'_>, count: u64, found: &mut dyn FnMut(u64)) -> Option<()> {
    let end = 16 + usize::try_from(count).ok()? * 8;
    slot.bytes.get(16..end)?.chunks_exact(8).for_each(|value| found(word(value, 0)));
    Some(())
}
