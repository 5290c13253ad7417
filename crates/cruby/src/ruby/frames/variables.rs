//! Instance variables of classes and modules, and their class variables: both are kept in one place (variable.c).

use super::{
    Memory,
    class::{MAX_VARIABLES, table_entries},
    layout::{ShapeLayout, VariablesAt},
    read::{Failure, Reader, Result, is_object, u32_at, u64_at},
};
use crate::ruby::derive::ShapeList;

/// Up to 3.4 a shape's id is the upper half of the flags (`SHAPE_FLAG_SHIFT`, shape.h).
const SHAPE_SHIFT: u32 = 32;
/// `SHAPE_ROOT` and `SHAPE_IVAR` (`enum shape_type`, shape.h, 3.2 to 3.4).
const ROOT: u8 = 0;
const VARIABLE: u8 = 1;

/// The ids of the variables of a class or module whose values are wanted. `None`: where they are is not known.
pub(super) fn find<M: Memory>(
    reader: &Reader<M>,
    class: u64,
    bias: u64,
    at: Option<VariablesAt>,
    is_wanted: &mut dyn FnMut(u64) -> bool,
) -> Result<Option<Vec<u64>>> {
    match at {
        None => Ok(None),
        Some(VariablesAt::Table { extension, table }) => {
            let extension = reader.word(class.wrapping_add(extension.into()))?;
            let table = reader.word(extension.wrapping_add(table.into()))?;
            if table == 0 {
                return Ok(Some(Vec::new()));
            }
            let entries = table_entries(reader, table)?.into_iter();
            Ok(Some(entries.filter(|(_, value)| is_wanted(*value)).map(|(id, _)| id).collect()))
        }
        Some(VariablesAt::Shapes { values, list, shape }) => {
            let id = (reader.word(class)? >> SHAPE_SHIFT) as u32;
            let shapes = Shapes { reader, first: first_shape(reader, list, bias)?, layout: shape };
            let (own, count) = shapes.read(id)?;
            if u64::from(count) > MAX_VARIABLES {
                return Err(Failure::Stale);
            }
            if count == 0 {
                return Ok(Some(Vec::new()));
            }
            let values = reader.word(class.wrapping_add(values.into()))?;
            let values = reader.vec(values, count as usize * 8)?;
            let wanted: Vec<bool> = values.chunks_exact(8).map(|value| is_wanted(u64_at(value, 0))).collect();
            if wanted.contains(&true) { shapes.names(own, &wanted).map(Some) } else { Ok(Some(Vec::new())) }
        }
    }
}

/// The ids of the instance variables of an object, from its values and its shape (3.2 to 3.4), that are wanted.
pub(super) fn of_shape<M: Memory>(
    reader: &Reader<M>,
    flags: u64,
    values: &[u64],
    bias: u64,
    (list, shape): (ShapeList, ShapeLayout),
    is_wanted: &mut dyn FnMut(u64) -> bool,
) -> Result<Vec<u64>> {
    let shapes = Shapes { reader, first: first_shape(reader, list, bias)?, layout: shape };
    let (own, count) = shapes.read((flags >> SHAPE_SHIFT) as u32)?;
    let values = values.get(..count as usize).ok_or(Failure::Stale)?;
    let wanted: Vec<bool> = values.iter().map(|value| is_wanted(*value)).collect();
    shapes.names(own, &wanted)
}

/// The address of the first shape.
fn first_shape<M: Memory>(reader: &Reader<M>, list: ShapeList, bias: u64) -> Result<u64> {
    let first = reader.word(list.variable.0.wrapping_add(bias))?;
    match list.field {
        Some(field) => reader.word(first.wrapping_add(field.into())),
        None => Ok(first),
    }
}

struct Shapes<'a, M> {
    reader: &'a Reader<M>,
    first: u64,
    layout: ShapeLayout,
}

impl<M: Memory> Shapes<'_, M> {
    /// A shape, and how many variables it has (`next_iv_index`).
    fn read(&self, id: u32) -> Result<(Vec<u8>, u32)> {
        let at = self.first.wrapping_add(u64::from(id) * u64::from(self.layout.size));
        if !is_object(self.first) {
            return Err(Failure::Stale);
        }
        let shape = self.reader.vec(at, self.layout.size as usize)?;
        let count = u32_at(&shape, self.layout.next_index);
        Ok((shape, count))
    }

    /// The ids of the wanted variables, from a shape and those that it grew from. Each that adds a variable has one more than its parent,
    /// the others have as many, and the root has none.
    fn names(&self, mut shape: Vec<u8>, wanted: &[bool]) -> Result<Vec<u64>> {
        let mut found = Vec::new();
        let mut count = wanted.len() as u32;
        for _ in 0..MAX_VARIABLES {
            let kind = *shape.get(self.layout.kind as usize).ok_or(Failure::Stale)?;
            if kind == ROOT {
                return if count == 0 { Ok(found) } else { Err(Failure::Stale) };
            }
            let (parent, parents) = self.read(u32_at(&shape, self.layout.parent))?;
            if count != parents + u32::from(kind == VARIABLE) {
                return Err(Failure::Stale);
            }
            if kind == VARIABLE && wanted.get(parents as usize) == Some(&true) {
                found.push(u64_at(&shape, self.layout.name));
            }
            (shape, count) = (parent, parents);
        }
        Err(Failure::Stale)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{address::Svma, ruby::frames::words::Words};

    const LIST: ShapeList = ShapeList { variable: Svma(0), field: None, size: 32 };
    const SHAPE: ShapeLayout = ShapeLayout { size: 32, name: 8, next_index: 16, kind: 24, parent: 28 };
    const TABLE: VariablesAt = VariablesAt::Table { extension: 24, table: 8 };
    const SHAPES: VariablesAt = VariablesAt::Shapes { values: 16, list: LIST, shape: SHAPE };

    fn read(words: &[u64], at: VariablesAt, wanted: u64) -> Result<Vec<u64>> {
        let reader = Reader { memory: Words(words.to_vec()), alive: 0x10000 };
        let found = find(&reader, 0x10008, 0x10000, Some(at), &mut |value| value == wanted)?;
        Ok(found.unwrap_or_default())
    }

    /// Up to 3.1: the class, its extension, the table, entries of which one is deleted.
    #[test]
    fn tables() {
        let mut words = vec![0; 24];
        words[4] = 0x10000 + 5 * 8;
        words[6] = 0x10000 + 7 * 8;
        // entries_start, entries_bound and entries of the table.
        (words[11], words[12], words[13]) = (0, 3, 0x10000 + 14 * 8);
        words[14..23].copy_from_slice(&[1, 77, 0x5000, u64::MAX, 78, 0x5000, 9, 79, 0x6000]);
        assert_eq!(read(&words, TABLE, 0x5000).ok(), Some(vec![77]), "without what is deleted");
        assert_eq!(read(&words, TABLE, 0x6000).ok(), Some(vec![79]));
        assert_eq!(read(&words, TABLE, 0x7000).ok(), Some(Vec::new()));
        words[6] = 0;
        assert_eq!(read(&words, TABLE, 0x5000).ok(), Some(Vec::new()), "no table");
        words[6] = 0x10000 + 7 * 8;
        (words[11], words[12]) = (4, 3);
        assert!(read(&words, TABLE, 0x5000).is_err(), "ends before it begins");
    }

    /// From 3.2 on: shapes 0 (root), 1 and 3 (variables), 2 (frozen).
    #[test]
    fn shapes() {
        let mut words = vec![0; 24];
        words[0] = 0x10000 + 4 * 8;
        // The class: its shape, and its values.
        (words[1], words[3]) = (3 << 32 | 2, 0x10000 + 20 * 8);
        let shape = |name: u64, count: u64, kind: u64, parent: u64| [0, name, count, parent << 32 | kind];
        words[4..8].copy_from_slice(&shape(0, 0, 0, 0));
        words[8..12].copy_from_slice(&shape(77, 1, 1, 0));
        words[12..16].copy_from_slice(&shape(0, 1, 2, 1));
        words[16..20].copy_from_slice(&shape(78, 2, 1, 2));
        (words[20], words[21]) = (0x5000, 0x6000);
        assert_eq!(read(&words, SHAPES, 0x5000).ok(), Some(vec![77]));
        assert_eq!(read(&words, SHAPES, 0x6000).ok(), Some(vec![78]));
        assert_eq!(read(&words, SHAPES, 0x7000).ok(), Some(Vec::new()));
        // Of another object, whose values are known.
        let of_values = |values: &[u64]| {
            let reader = Reader { memory: Words(words.clone()), alive: 0x10000 };
            of_shape(&reader, 3 << 32 | 0xc, values, 0x10000, (LIST, SHAPE), &mut |value| value == 5)
        };
        assert_eq!(of_values(&[4, 5]).ok(), Some(vec![78]));
        assert_eq!(of_values(&[4, 3, 5]).ok(), Some(Vec::new()), "not one that it has");
        assert!(of_values(&[5]).is_err(), "more than there are");
        words[1] = 2;
        assert_eq!(read(&words, SHAPES, 0x5000).ok(), Some(Vec::new()), "no variables");
        words[1] = 3 << 32 | 2;
        // The counts must agree, and the way must end.
        words[14] = 7;
        assert!(read(&words, SHAPES, 0x6000).is_err(), "more than what grew from it");
        words[14] = 1;
        words[11] = 1 << 32 | 2;
        assert!(read(&words, SHAPES, 0x6000).is_err(), "its own parent");
        words[18] = MAX_VARIABLES + 1;
        assert!(read(&words, SHAPES, 0x6000).is_err(), "too many");
    }

    proptest! {
        /// Whatever lies there, reading ends.
        #[test]
        fn anything(
            words in prop::collection::vec(
                prop_oneof![any::<u64>(), (0_u64..40).prop_map(|at| 0x10000 + at * 8), 0_u64..9], 1..40),
        ) {
            for at in [TABLE, SHAPES] {
                prop_assert!(read(&words, at, 5).unwrap_or_default().len() <= 1024);
            }
        }
    }
}
