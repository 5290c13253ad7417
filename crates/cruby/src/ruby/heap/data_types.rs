//! Objects with data of the VM: recognised by the name of the type of their data (`wrap_struct_name`).

use std::collections::HashMap;

use super::{Slot, walk::unchanged};
use crate::ruby::{
    RubyVersion,
    frames::Memory,
    typed_data::{DATA, HEAD, TypedData, TypedDataLayout},
};

/// Maximum number of cached types of data.
const MOST_TYPES: usize = 4096;

/// The wanted types of data, each read once.
#[derive(Debug)]
pub(super) struct DataTypes<T: 'static> {
    layout: TypedDataLayout,
    /// The names, with their terminating NUL.
    names: &'static [(&'static [u8], T)],
    known: HashMap<u64, Option<T>>,
}

impl<T: Copy> DataTypes<T> {
    pub(super) fn new(version: RubyVersion, names: &'static [(&'static [u8], T)]) -> Self {
        Self { layout: TypedDataLayout::of(version), names, known: HashMap::new() }
    }

    /// Which of the wanted types the data of an object has, and where the data is. `None`: it is another object.
    pub(super) fn look<M: Memory>(&mut self, memory: &M, slot: &Slot<'_>) -> Option<(T, TypedData)> {
        if slot.kind().name() != "T_DATA" {
            return None;
        }
        let typed = self.layout.read(slot.flags(), [slot.word(HEAD), slot.word(HEAD + 8)])?;
        Some((self.named(memory, typed.kind)?, typed))
    }

    fn named<M: Memory>(&mut self, memory: &M, kind: u64) -> Option<T> {
        if let Some(&known) = self.known.get(&kind) {
            return known;
        }
        let mut pointer = [0; 8];
        if !memory.read(kind, &mut pointer) {
            return None;
        }
        let is = |name: &[u8]| {
            let mut bytes = vec![0; name.len()];
            memory.read(u64::from_le_bytes(pointer), &mut bytes) && bytes == name
        };
        let found = self.names.iter().find(|(name, _)| is(name)).map(|(_, of)| *of);
        if self.known.len() < MOST_TYPES {
            self.known.insert(kind, found);
        }
        found
    }
}

/// Fills the buffer from the beginning of the data of an object; `None`: it is not there, or it is that of another object by now.
pub(super) fn fill<M: Memory>(
    memory: &M,
    slot: &Slot<'_>,
    typed: TypedData,
    buffer: &mut [u8],
) -> Option<()> {
    if typed.embedded {
        let first = DATA as usize;
        buffer.copy_from_slice(slot.bytes.get(first..first + buffer.len())?);
        return Some(());
    }
    if !memory.read(address(slot, typed)?, buffer) {
        return None;
    }
    unchanged(memory, slot, DATA.into())
}

/// The address of the data of an object.
pub(super) fn address(slot: &Slot<'_>, typed: TypedData) -> Option<u64> {
    if typed.embedded { slot.address.checked_add(DATA.into()) } else { Some(slot.word(DATA as usize)) }
}
