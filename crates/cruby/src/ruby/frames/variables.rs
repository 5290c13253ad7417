//! Instance variables of classes and modules, and their class variables: both are stored together (variable.c).

use super::{
    Memory,
    class::{MAX_VARIABLES, table_entries},
    layout::{ShapeLayout, VariablesAt},
    read::{Failure, IMEMO_FIELDS, Reader, Result, is_imemo, is_object, u32_at, u64_at},
};
use crate::ruby::derive::ShapeList;

/// A shape's id is the upper half of the flags (`SHAPE_FLAG_SHIFT`, shape.h, 3.2 to 4.0).
const SHAPE_SHIFT: u32 = 32;
/// `SHAPE_ID_OFFSET_MASK` and `SHAPE_ID_FL_TOO_COMPLEX` (shape.h, v4.0.0): the index of the shape in the list, and whether a hash table
/// holds the variables, because there were too many shapes.
const SHAPE_INDEX: u32 = (1 << 19) - 1;
const COMPLEX: u32 = 1 << 27;
/// `SHAPE_ROOT` and `SHAPE_IVAR` (`enum shape_type`, shape.h, 3.2 to 4.0).
const ROOT: u8 = 0;
const VARIABLE: u8 = 1;
/// `SHAPE_OBJ_ID` of 4.0; up to 3.4 this value is another kind.
const OBJECT_ID: u8 = 2;
/// `RCLASS_BOXABLE` (internal/class.h, v4.0.0): `FL_USER4`.
const BOXABLE: u64 = 1 << 16;
/// Byte offset of `fields_obj` in `struct RTypedData` (include/ruby/internal/core/rtypeddata.h, v4.0.0).
pub(super) const FIELDS_OF_DATA: u64 = 16;
/// `struct rb_fields` (internal/imemo.h, v4.0.0): byte offsets of the owner, which takes the place of the class, and of the first value,
/// or of the pointer to it if the flags say so (`OBJ_FIELD_HEAP`), or of the pointer to the table.
const OWNER: u32 = 8;
const FIRST: u32 = 16;
const FIELDS_HEAD: usize = 24;
const FIELDS_ELSEWHERE: u64 = 1 << 16;

/// The ids of the variables of a class or module that have a wanted value. `None`: the place of the variables is not known.
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
        Some(VariablesAt::Fields { object, extension, boxes, list, shape }) => {
            let own = class.wrapping_add(extension.into());
            let mut found = Vec::new();
            for extension in std::iter::once(own).chain(in_boxes(reader, class, boxes)?) {
                let at = extension.wrapping_add(object.into());
                found.extend(of_fields(reader, (class, at), bias, (list, shape), is_wanted)?);
            }
            Ok(Some(found))
        }
    }
}

/// The extensions of a built-in class in boxes that have changed it (`RCLASS_CLASSEXT_TBL`, internal/class.h, v4.0.0).
fn in_boxes<M: Memory>(reader: &Reader<M>, class: u64, boxes: u32) -> Result<Vec<u64>> {
    if reader.word(class)? & BOXABLE == 0 {
        return Ok(Vec::new());
    }
    let table = reader.word(class.wrapping_add(boxes.into()))?;
    if table == 0 {
        return Ok(Vec::new());
    }
    Ok(table_entries(reader, table)?.into_iter().map(|(_, extension)| extension).collect())
}

/// The ids of the wanted instance variables of an object or class (the owner) that stores them in a separate object (4.0); `at` is the
/// address of the pointer to it. That object names its owner, and it is checked again after the variables were read: the running program may
/// replace it, and another object may then take its place.
pub(super) fn of_fields<M: Memory>(
    reader: &Reader<M>,
    (owner, at): (u64, u64),
    bias: u64,
    (list, shape): (ShapeList, ShapeLayout),
    is_wanted: &mut dyn FnMut(u64) -> bool,
) -> Result<Vec<u64>> {
    let fields = reader.word(at)?;
    if fields == 0 {
        return Ok(Vec::new());
    }
    if !is_object(fields) {
        return Err(Failure::Stale);
    }
    let head = |reader: &Reader<M>| {
        let head = reader.bytes::<FIELDS_HEAD>(fields)?;
        let flags = u64_at(&head, 0);
        let elsewhere = (flags & FIELDS_ELSEWHERE != 0).then(|| u64_at(&head, FIRST));
        let is_of_owner = is_imemo(flags, IMEMO_FIELDS) && u64_at(&head, OWNER) == owner;
        if is_of_owner { Ok(((flags >> SHAPE_SHIFT) as u32, elsewhere)) } else { Err(Failure::Stale) }
    };
    let (id, elsewhere) = head(reader)?;
    let found = if id & COMPLEX != 0 {
        let entries = table_entries(reader, elsewhere.ok_or(Failure::Stale)?)?.into_iter();
        entries.filter(|(_, value)| is_wanted(*value)).map(|(id, _)| id).collect()
    } else {
        let shapes = Shapes { reader, first: first_shape(reader, list, bias)?, layout: shape };
        let (own, count) = shapes.read(id)?;
        if u64::from(count) > MAX_VARIABLES {
            return Err(Failure::Stale);
        }
        let first = elsewhere.unwrap_or(fields.wrapping_add(FIRST.into()));
        let values = reader.vec(first, count as usize * 8)?;
        let wanted: Vec<bool> = values.chunks_exact(8).map(|value| is_wanted(u64_at(value, 0))).collect();
        if wanted.contains(&true) { shapes.names(own, &wanted)? } else { Vec::new() }
    };
    if head(reader)? == (id, elsewhere) { Ok(found) } else { Err(Failure::Stale) }
}

/// The ids of the wanted instance variables of an object, from its values and its shape (3.2 to 3.4).
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
    /// A shape, and its number of variables (`next_iv_index`, from 4.0 on `next_field_index`).
    fn read(&self, id: u32) -> Result<(Vec<u8>, u32)> {
        let fields = self.layout.counts_fields;
        let id = if fields { id & SHAPE_INDEX } else { id };
        let at = self.first.wrapping_add(u64::from(id) * u64::from(self.layout.size));
        if !is_object(self.first) {
            return Err(Failure::Stale);
        }
        let shape = self.reader.vec(at, self.layout.size as usize)?;
        let count = u32_at(&shape, self.layout.next_index);
        Ok((shape, if fields { count & 0xffff } else { count }))
    }

    /// The ids of the wanted variables, from a shape and its ancestors. A shape that adds a variable (or in 4.0 an object id) has one more
    /// than its parent, any other shape has as many, and the root has none.
    fn names(&self, mut shape: Vec<u8>, wanted: &[bool]) -> Result<Vec<u64>> {
        let mut found = Vec::new();
        let mut count = wanted.len() as u32;
        for _ in 0..MAX_VARIABLES {
            let kind = *shape.get(self.layout.kind as usize).ok_or(Failure::Stale)?;
            if kind == ROOT {
                return if count == 0 { Ok(found) } else { Err(Failure::Stale) };
            }
            let (parent, parents) = self.read(u32_at(&shape, self.layout.parent))?;
            let adds = kind == VARIABLE || kind == OBJECT_ID && self.layout.counts_fields;
            if count != parents + u32::from(adds) {
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
    const SHAPE: ShapeLayout =
        ShapeLayout { size: 32, name: 8, next_index: 16, counts_fields: false, kind: 24, parent: 28 };
    /// As in 4.0.
    const FIELD_LIST: ShapeList = ShapeList { variable: Svma(0), field: None, size: 40 };
    const FIELD: ShapeLayout =
        ShapeLayout { size: 40, name: 8, next_index: 28, counts_fields: true, kind: 32, parent: 24 };
    const FIELDS: VariablesAt =
        VariablesAt::Fields { object: 8, extension: 8, boxes: 64, list: FIELD_LIST, shape: FIELD };
    const TABLE: VariablesAt = VariablesAt::Table { extension: 24, table: 8 };
    const SHAPES: VariablesAt = VariablesAt::Shapes { values: 16, list: LIST, shape: SHAPE };

    fn read(words: &[u64], at: VariablesAt, wanted: u64) -> Result<Vec<u64>> {
        let reader = Reader { memory: Words(words.to_vec()), alive: 0x10000 };
        let found = find(&reader, 0x10008, 0x10000, Some(at), &mut |value| value == wanted)?;
        Ok(found.unwrap_or_default())
    }

    /// Up to 3.1: the class, its extension, the table, and entries, one of them deleted.
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
        // Another object, whose values are known.
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
        // The counts must agree, and the chain of parents must end.
        words[14] = 7;
        assert!(read(&words, SHAPES, 0x6000).is_err(), "more than what grew from it");
        words[14] = 1;
        words[11] = 1 << 32 | 2;
        assert!(read(&words, SHAPES, 0x6000).is_err(), "its own parent");
        words[18] = MAX_VARIABLES + 1;
        assert!(read(&words, SHAPES, 0x6000).is_err(), "too many");
    }

    /// The list of shapes; a class; four shapes, the third for an object id and the fourth for another variable; the variables of the class.
    fn with_fields() -> Vec<u64> {
        let mut words = vec![0; 40];
        words[0] = 0x10000 + 4 * 8;
        (words[1], words[3]) = (2, 0x10000 + 24 * 8);
        // The capacity follows the count.
        let shape = |name: u64, count: u64, kind: u64, parent: u64| {
            [0, name, 0, parent | count << 32 | 9 << 48, 0xab00 | kind]
        };
        words[4..9].copy_from_slice(&shape(0, 0, 0, 0xffff_ffff));
        words[9..14].copy_from_slice(&shape(77, 1, 1, 0));
        words[14..19].copy_from_slice(&shape(5, 2, 2, 1));
        words[19..24].copy_from_slice(&shape(78, 3, 1, 2));
        // Frozen, and with an object id.
        let id = 3 | 1 << 25 | 1 << 26;
        words[24..30].copy_from_slice(&[id << 32 | 13 << 12 | 0x1a, 0x10008, 0x5000, 8 << 1 | 1, 0x6000, 0]);
        words
    }

    /// From 4.0 on: in the object for the variables, behind a pointer in it, or in a hash table.
    #[test]
    fn fields() {
        let mut words = with_fields();
        let check = |words: &[u64]| {
            assert_eq!(read(words, FIELDS, 0x5000).ok(), Some(vec![77]));
            assert_eq!(read(words, FIELDS, 0x6000).ok(), Some(vec![78]));
            assert_eq!(read(words, FIELDS, 0x7000).ok(), Some(Vec::new()));
        };
        check(&words);
        words[24] |= FIELDS_ELSEWHERE;
        words[26..33].copy_from_slice(&[0x10000 + 30 * 8, 0, 0, 0, 0x5000, 17, 0x6000]);
        check(&words);
        let elsewhere = words.clone();
        // Entries of the table, one of them deleted.
        words[24] |= u64::from(COMPLEX) << 32;
        (words[26], words[31], words[32], words[33]) = (0x10000 + 27 * 8, 0, 3, 0x10000 + 40 * 8);
        words.extend([1, 77, 0x5000, u64::MAX, 79, 0x7000, 9, 78, 0x6000]);
        check(&words);
        words[24] &= !FIELDS_ELSEWHERE;
        assert!(read(&words, FIELDS, 0x5000).is_err(), "a table in the slot");

        let mut words = with_fields();
        words[3] = 0;
        assert_eq!(read(&words, FIELDS, 0x5000).ok(), Some(Vec::new()), "no variables");
        for (word, value, why) in [
            (3, 0x10001, "no object"),
            (24, 3 << 32 | 12 << 12 | 0x1a, "another internal object"),
            (24, 3 << 32 | 0xc, "another object"),
            (25, 0x10010, "variables of another class"),
            (22, 2 | 4 << 32, "more than what grew from it"),
            (22, 3 | 3 << 32, "its own parent"),
            (22, 2 | 2000 << 32, "too many"),
            (18, 3, "a shape that adds nothing"),
        ] {
            let mut words = with_fields();
            words[word] = value;
            assert!(read(&words, FIELDS, 0x5000).is_err(), "{why}");
        }
        let mut words = elsewhere;
        words[26] = 0x500;
        assert!(read(&words, FIELDS, 0x5000).is_err(), "values that are not there");
    }

    /// A built-in class has further variables in boxes.
    #[test]
    fn boxes() {
        // Before everything else, in the place of another shape: the pointer to the table, which follows the rest.
        let mut words = with_fields();
        words.truncate(30);
        words[9] = 0x10000 + 30 * 8;
        words.extend([0, 0, 0, 0, 0, 1, 0x10000 + 37 * 8]);
        words.extend([4, 0x9000, 0x10000 + 40 * 8, 0, 0x10000 + 42 * 8]);
        words.extend([words[24], 0x10008, 0x5500, 0, 0x6000, 0]);
        assert_eq!(read(&words, FIELDS, 0x5500).ok(), Some(Vec::new()), "not a class that can have any");
        words[1] |= BOXABLE;
        assert_eq!(read(&words, FIELDS, 0x5500).ok(), Some(vec![77]));
        assert_eq!(read(&words, FIELDS, 0x5000).ok(), Some(vec![77]));
        assert_eq!(read(&words, FIELDS, 0x6000).ok(), Some(vec![78, 78]));
        words[43] = 0x11000;
        assert!(read(&words, FIELDS, 0x5000).is_err(), "variables of another class");
        words[9] = 0;
        assert_eq!(read(&words, FIELDS, 0x5000).ok(), Some(vec![77]), "in no box");
    }

    /// A process whose memory changes while the variables of the class are read.
    struct Changing(std::cell::RefCell<(Vec<u64>, usize)>, (usize, u64));

    impl Memory for Changing {
        fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
            let (words, reads) = &mut *self.0.borrow_mut();
            // The class, the pointer, what it points to, the list, the shape, the values.
            if *reads == 6 {
                words[self.1.0] = self.1.1;
            }
            *reads += 1;
            Words(words.clone()).read(address, buffer)
        }
    }

    /// Objects that have taken the place of the variables since they were found are not reported as theirs.
    #[test]
    fn fields_that_change() {
        let read = |word: usize, value: u64| {
            let memory = Changing((with_fields(), 0).into(), (word, value));
            let reader = Reader { memory, alive: 0x10000 };
            find(&reader, 0x10008, 0x10000, Some(FIELDS), &mut |value| value == 0x9000)
        };
        let flags = with_fields()[24];
        assert_eq!(read(24, flags).ok(), Some(Some(Vec::new())));
        assert!(read(24, 0).is_err(), "swept");
        assert!(read(24, flags ^ 1 << 32).is_err(), "of another shape");
        assert!(read(24, flags | FIELDS_ELSEWHERE).is_err(), "elsewhere");
        assert!(read(25, 0x11000).is_err(), "of another class");
    }

    proptest! {
        /// Whatever the memory contains, reading ends.
        #[test]
        fn anything(
            words in prop::collection::vec(
                prop_oneof![any::<u64>(), (0_u64..40).prop_map(|at| 0x10000 + at * 8), 0_u64..9], 1..40),
        ) {
            for at in [TABLE, SHAPES, FIELDS] {
                prop_assert!(read(&words, at, 5).unwrap_or_default().len() <= 1024);
            }
        }
    }
}
