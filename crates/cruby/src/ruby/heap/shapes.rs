//! Instance variables of objects from 3.2 on: the shape of an object gives their number (`ROBJECT_FIELDS_COUNT`, shape.h).

use std::collections::HashMap;

use super::{Slot, walk::USER1};
use crate::ruby::{RubyVersion, derive::ShapeList, frames::Memory};

/// Maximum number of cached counts; there are at most 2^19 shapes in 4.0.
const MOST_KEPT: usize = 1 << 20;
/// `ROBJECT_HEAP` (include/ruby/internal/core/robject.h, 4.0): `FL_USER4`.
const HEAP: u64 = 1 << 16;

/// Where the instance variables of an object are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variables {
    /// In its slot: their number.
    Embedded(u64),
    /// The address of the first one, and their number.
    At(u64, u64),
    /// In a hash table at this address (`rb_shape_obj_too_complex`).
    Table(u64),
    /// Unknown.
    Unknown,
}

/// The shapes of one process.
#[derive(Debug)]
pub struct Shapes {
    list: ShapeList,
    bias: u64,
    start: Option<u64>,
    counts: HashMap<u32, u64>,
}

impl Shapes {
    /// For the process whose image has this load bias.
    pub fn new(list: ShapeList, bias: u64) -> Self {
        Self { list, bias, start: None, counts: HashMap::new() }
    }

    /// The variables of an object; `None`: its shape cannot be read.
    pub(super) fn variables<M: Memory>(
        &mut self,
        memory: &M,
        slot: &Slot<'_>,
        version: RubyVersion,
    ) -> Option<Variables> {
        /// `OBJ_TOO_COMPLEX_SHAPE_ID` of 3.2 and 3.3 (`SIZE_POOL_COUNT * 2 + 1`), and of 3.4.
        const COMPLEX: [u32; 2] = [11, 2];
        /// `SHAPE_ID_FL_TOO_COMPLEX` and `SHAPE_ID_OFFSET_MASK` of 4.0.
        const COMPLEX_FLAG: u32 = 1 << 27;
        const INDEX: u32 = (1 << 19) - 1;
        let id = (slot.flags() >> 32) as u32;
        let (complex, embedded, index) = if version.at_least(4, 0) {
            (id & COMPLEX_FLAG != 0, slot.flags() & HEAP == 0, id & INDEX)
        } else {
            let complex = COMPLEX[usize::from(version.at_least(3, 4))];
            (id == complex, slot.flags() & USER1 != 0, id)
        };
        if complex {
            // In 3.2 the table is of another kind (`rb_id_table`).
            let known = version.at_least(3, 3);
            return Some(if known { Variables::Table(slot.word(16)) } else { Variables::Unknown });
        }
        let count = self.count(memory, index, version)?;
        Some(if embedded { Variables::Embedded(count) } else { Variables::At(slot.word(16), count) })
    }

    /// `next_iv_index` of a shape, from 4.0 on `next_field_index`. It never changes for a given shape.
    fn count<M: Memory>(&mut self, memory: &M, index: u32, version: RubyVersion) -> Option<u64> {
        if let Some(&count) = self.counts.get(&index) {
            return Some(count);
        }
        // Four bytes after two pointers; from 4.0 on two bytes after another pointer and four bytes (`struct rb_shape`, shape.h).
        let (at, bytes) = if version.at_least(4, 0) { (28, 2) } else { (16, 4) };
        let start = self.start(memory)?;
        let shape = start.checked_add(u64::from(index) * u64::from(self.list.size))?;
        let mut count = [0; 8];
        if !memory.read(shape.checked_add(at)?, &mut count[..bytes]) {
            return None;
        }
        let count = u64::from_le_bytes(count);
        if self.counts.len() < MOST_KEPT {
            self.counts.insert(index, count);
        }
        Some(count)
    }

    /// The address of the first shape. The list is mapped once and never moves.
    fn start<M: Memory>(&mut self, memory: &M) -> Option<u64> {
        if self.start.is_none() {
            let pointer = |at: u64| {
                let mut bytes = [0; 8];
                memory.read(at, &mut bytes).then(|| u64::from_le_bytes(bytes)).filter(|at| *at != 0)
            };
            let first = pointer(self.list.variable.0.wrapping_add(self.bias))?;
            self.start = match self.list.field {
                Some(field) => Some(pointer(first.checked_add(field.into())?)?),
                None => Some(first),
            };
        }
        self.start
    }
}
