//! Whether a program traces its allocations (`ObjectSpace.trace_object_allocations_start`), and the table in which it records them.
//!
//! That table is not exported. It is reached through the two `TracePoint`s of the extension, which are objects of the heap: both have the
//! same data, a `struct traceobj_arg` (`ext/objspace/object_tracing.c`, the same from 2.7 to 4.0), which refers to both of them.

use super::{
    Slot,
    data_types::{DataTypes, fill},
    walk::word,
};
use crate::ruby::{RubyVersion, frames::Memory};

/// `wrap_struct_name` of `tp_data_type` (`vm_trace.c`).
const NAMES: &[(&[u8], ())] = &[(b"tracepoint\0", ())];
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
/// Maximum number of tracepoints for these events that are collected. The extension has one for each event.
const MOST_TRACEPOINTS: usize = 256;

/// Why the places of allocations are not reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum NoPlaces {
    /// The layout of these data in this release is not known.
    #[error("the layout of the table of places in this Ruby is unknown")]
    Release,
    /// The program does not trace its allocations, and has not traced them before.
    #[error("not traced")]
    NotTraced,
    /// More than one table passes the checks.
    #[error("more than one table of places was found")]
    Several,
    /// The data at the table's address is not a table.
    #[error("the table of places is not plausible")]
    Implausible,
    /// The table changed during every attempt.
    #[error("the table was changed while it was read")]
    Changed,
    /// Objects were moved, and the table of this release still has their old addresses.
    #[error("the heap was compacted, and this Ruby does not update its table")]
    Compacted,
    /// It has more entries, places or text than the limits allow.
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
    own_self: usize,
    types: DataTypes<()>,
    found: Vec<Tracepoint>,
}

/// The extension's record of allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tracing {
    /// Address of the `struct traceobj_arg`.
    argument: u64,
    /// Addresses of the two tracepoints.
    tracepoints: [u64; 2],
    /// Whether both were enabled: the program is tracing now. Otherwise it has stopped.
    pub running: bool,
}

impl Tracepoints {
    /// For a release; `None` if its layout of tracepoints is not known (2.7 to 4.0 are).
    pub fn of(version: RubyVersion) -> Option<Self> {
        let known = version.at_least(2, 7) && !version.at_least(4, 1);
        known.then(|| Self {
            own_self: OWN_SELF[usize::from(version.at_least(3, 0))],
            types: DataTypes::new(version, NAMES),
            found: Vec::new(),
        })
    }

    /// Records the object in a slot if it is a tracepoint for objects that are allocated or freed. Two facts identify it: the name of its
    /// type, and that its data points back to it.
    pub fn look<M: Memory>(&mut self, memory: &M, slot: &Slot<'_>) {
        if self.found.len() >= MOST_TRACEPOINTS {
            return;
        }
        if let Some(found) = self.tracepoint(memory, slot) {
            self.found.push(found);
        }
    }

    fn tracepoint<M: Memory>(&mut self, memory: &M, slot: &Slot<'_>) -> Option<Tracepoint> {
        let ((), typed) = self.types.look(memory, slot)?;
        let mut data = [0; TRACEPOINT];
        fill(memory, slot, typed, &mut data[..self.own_self + 8])?;
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

    /// The tracing data that is proven by two of the tracepoints seen.
    ///
    /// # Errors
    ///
    /// No pair of tracepoints proves it, or more than one pair does.
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
    /// Address of the `st_table` of objects; `None` if the data does not refer to both tracepoints.
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
