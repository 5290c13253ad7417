//! Whether a program traces its allocations (`ObjectSpace.trace_object_allocations_start`), and the table that it keeps of them.
//!
//! Nothing exports that table. What leads to it are the two `TracePoint`s of the extension, which are objects of the heap: both have the
//! same data, a `struct traceobj_arg` (`ext/objspace/object_tracing.c`, the same from 2.7 to 4.0), and that refers to both of them.

use std::collections::HashMap;

use super::{Slot, walk::word};
use crate::ruby::{RubyVersion, frames::Memory};

/// Byte offset of `type` in `struct RTypedData` (include/ruby/internal/core/rtypeddata.h; ruby/ruby.h in 2.7); another from 4.0 on.
const TYPE: [usize; 2] = [16, 24];
/// Of `typed_flag`, up to 3.4.
const TYPED: usize = 24;
/// Of `data`, or of what is embedded in the slot (3.3 and later).
const DATA: usize = 32;
/// `TYPED_DATA_EMBEDDED`: in `typed_flag`, from 4.0 on in `type`.
const EMBEDDED: [u64; 2] = [2, 1];
/// `wrap_struct_name` of `tp_data_type` (`vm_trace.c`).
const NAME: &[u8; 11] = b"tracepoint\0";
/// `rb_tp_t` (`vm_trace.c`): byte offsets of `events`, `tracing` and `data`; of `self` up to 2.7, and from 3.0 on.
const EVENTS: usize = 0;
const ENABLED: usize = 4;
const ARGUMENT: usize = 32;
const OWN_SELF: [usize; 2] = [48, 56];
const TRACEPOINT: usize = 64;
/// `RUBY_INTERNAL_EVENT_NEWOBJ` and `_FREEOBJ` (include/ruby/internal/event.h; ruby/ruby.h in 2.7).
const NEW: u64 = 0x10_0000;
const FREE: u64 = 0x20_0000;
/// `struct traceobj_arg`: `newobj_trace`, `freeobj_trace` and `object_table`; bytes.
const NEW_TRACE: usize = 8;
const FREE_TRACE: usize = 16;
const TABLE: usize = 24;
const ARGUMENT_SIZE: usize = 48;
/// Types of data that are remembered.
const MOST_TYPES: usize = 4096;
/// Tracepoints of these events that are looked at. The extension has one of each.
const MOST_TRACEPOINTS: usize = 256;

/// Why it is not said where objects were allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum NoPlaces {
    /// It is not known where this release keeps them.
    #[error("it is not known where this Ruby keeps the places of objects")]
    Release,
    /// The program does not trace its allocations, and has not done so.
    #[error("not traced")]
    NotTraced,
    /// More than one table proves itself.
    #[error("more than one table of places was found")]
    Several,
    /// What should be the table is none.
    #[error("the table of places is not plausible")]
    Implausible,
    /// The table changed each time.
    #[error("the table was changed while it was read")]
    Changed,
    /// Objects were moved, and the table of this release keeps their old addresses.
    #[error("the heap was compacted, and this Ruby does not follow that in its table")]
    Compacted,
    /// It has more entries, places or text than are read.
    #[error("the table of places is too large")]
    TooLarge,
}

/// A tracepoint that may be one of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tracepoint {
    address: u64,
    is_new: bool,
    enabled: bool,
    argument: u64,
}

/// Finds the tracepoints of one process.
#[derive(Debug)]
pub struct Tracepoints {
    is_4: bool,
    embeds: bool,
    own_self: usize,
    /// Which types of data are those of tracepoints.
    types: HashMap<u64, bool>,
    found: Vec<Tracepoint>,
}

/// What the extension keeps of the allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tracing {
    /// Address of the `struct traceobj_arg`.
    argument: u64,
    /// Addresses of the two tracepoints.
    tracepoints: [u64; 2],
    /// Whether both were enabled: the program traces now. Else it has stopped.
    pub running: bool,
}

impl Tracepoints {
    /// For a release; `None`: it is not known how it keeps them (2.7 to 4.0 are).
    pub fn of(version: RubyVersion) -> Option<Self> {
        let known = version.at_least(2, 7) && !version.at_least(4, 1);
        known.then(|| Self {
            is_4: version.at_least(3, 5),
            embeds: version.at_least(3, 3),
            own_self: OWN_SELF[usize::from(version.at_least(3, 0))],
            types: HashMap::new(),
            found: Vec::new(),
        })
    }

    /// Remembers the object in a slot if it is a tracepoint of objects that are allocated or freed. What says that it is one: the name of its
    /// type, and that its data points back to it.
    pub fn look<M: Memory>(&mut self, memory: &M, slot: &Slot<'_>) {
        if slot.kind().name() != "T_DATA" || self.found.len() >= MOST_TRACEPOINTS {
            return;
        }
        if let Some(found) = self.tracepoint(memory, slot) {
            self.found.push(found);
        }
    }

    fn tracepoint<M: Memory>(&mut self, memory: &M, slot: &Slot<'_>) -> Option<Tracepoint> {
        let release = usize::from(self.is_4);
        let flag = EMBEDDED[release];
        let kind = slot.word(TYPE[release]);
        let typed = if self.is_4 { kind } else { slot.word(TYPED) };
        let embedded = self.embeds && typed & flag != 0;
        if !self.is_4 && typed & !flag != 1 {
            return None;
        }
        let kind = if self.is_4 { kind & !flag } else { kind };
        if !self.is_tracepoint(memory, kind) {
            return None;
        }
        let mut data = [0; TRACEPOINT];
        let size = self.own_self + 8;
        if embedded {
            data[..size].copy_from_slice(slot.bytes.get(DATA..DATA + size)?);
        } else if !memory.read(slot.word(DATA), &mut data[..size]) {
            return None;
        }
        let half = |at: usize| word(&data, at) & 0xffff_ffff;
        let is_new = match half(EVENTS) {
            NEW => true,
            FREE => false,
            _ => return None,
        };
        let (argument, own_self) = (word(&data, ARGUMENT), word(&data, self.own_self));
        (own_self == slot.address && argument.is_multiple_of(8) && argument != 0).then_some(Tracepoint {
            address: slot.address,
            is_new,
            enabled: half(ENABLED) != 0,
            argument,
        })
    }

    fn is_tracepoint<M: Memory>(&mut self, memory: &M, kind: u64) -> bool {
        if let Some(&known) = self.types.get(&kind) {
            return known;
        }
        let mut pointer = [0; 8];
        let mut name = [0; NAME.len()];
        let read = memory.read(kind, &mut pointer) && memory.read(u64::from_le_bytes(pointer), &mut name);
        let found = read && &name == NAME;
        if read && self.types.len() < MOST_TYPES {
            self.types.insert(kind, found);
        }
        found
    }

    /// What two of the tracepoints that were seen prove.
    ///
    /// # Errors
    ///
    /// No two of them do, or more than two.
    pub fn tracing<M: Memory>(&self, memory: &M) -> Result<Tracing, NoPlaces> {
        let mut proven = None;
        for new in self.found.iter().filter(|found| found.is_new) {
            let same = |found: &&Tracepoint| !found.is_new && found.argument == new.argument;
            for free in self.found.iter().filter(same) {
                let tracing = Tracing {
                    argument: new.argument,
                    tracepoints: [new.address, free.address],
                    running: new.enabled && free.enabled,
                };
                if tracing.table(memory).is_some() && proven.replace(tracing).is_some() {
                    return Err(NoPlaces::Several);
                }
            }
        }
        proven.ok_or(NoPlaces::NotTraced)
    }
}

impl Tracing {
    /// Address of the `st_table` of objects; `None`: what is there does not refer to both tracepoints.
    pub(super) fn table<M: Memory>(&self, memory: &M) -> Option<u64> {
        let mut argument = [0; ARGUMENT_SIZE];
        if !memory.read(self.argument, &mut argument) {
            return None;
        }
        let [new, free, table] = [NEW_TRACE, FREE_TRACE, TABLE].map(|at| word(&argument, at));
        let proven = [new, free] == self.tracepoints && table.is_multiple_of(8) && table != 0;
        proven.then_some(table)
    }
}
