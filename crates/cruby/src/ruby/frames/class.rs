//! Names of classes and modules, as `rb_gen_method_name` (`vm_backtrace.c`, 3.4 and later) prefixes them to methods.

use std::sync::Arc;

use super::{
    Memory,
    layout::{ClassPath, FrameLayout, ShapeLayout},
    read::{Failure, Reader, Result, T_CLASS, T_MODULE, is_object, object_type, u32_at, u64_at},
};

/// A class or module with a permanent name, and the separator between it and the name of its method.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) path: Arc<str>,
    /// `#`, or `.` for a singleton method.
    pub(super) separator: char,
}

/// Maximum number of instance variables of a class that are searched.
pub(super) const MAX_VARIABLES: u64 = 1024;
/// Maximum number of singleton classes and included modules that are skipped on the way to the class of an object.
const MAX_ANCESTORS: u32 = 4096;
/// `T_ICLASS`: represents a module among the ancestors of a class.
const T_ICLASS: u64 = 0x1c;
/// `struct st_table` (include/ruby/st.h, 2.6–4.0): byte offsets of `entries_start`, `entries_bound` and `entries`.
const TABLE_START: u32 = 32;
const TABLE_BOUND: u32 = 40;
const TABLE_ENTRIES: u32 = 48;
const TABLE_SIZE: usize = 56;
/// `struct st_table_entry` (st.c): hash, key, record.
const ENTRY_SIZE: usize = 24;
/// `RESERVED_HASH_VAL` (st.c): the entry was deleted.
const DELETED: u64 = u64::MAX;

/// Hidden instance variables with the name of a class (variable.c) and the attached object of a singleton class (class.c).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hidden {
    ClassPath,
    Attached,
}

impl Hidden {
    fn name(self) -> &'static str {
        match self {
            Self::ClassPath => "__classpath__",
            Self::Attached => "__attached__",
        }
    }
}

/// A class or module and the bytes read from it.
struct Class {
    address: u64,
    bytes: Vec<u8>,
    singleton: bool,
}

/// The class or module shown before the methods of `owner`; `None` if backtraces omit it: it is anonymous, or the
/// singleton class of something other than a class or module. `id_name` gives the name of an id.
pub(super) fn owner<M: Memory>(
    reader: &Reader<M>,
    owner: u64,
    layout: &FrameLayout,
    id_name: &mut impl FnMut(u64) -> Result<Option<Arc<str>>>,
) -> Result<Option<Owner>> {
    if matches!(layout.class.path, ClassPath::Unknown) {
        return Ok(None);
    }
    let Some(class) = Class::read(reader, owner, layout)? else { return Err(Failure::Stale) };
    if !class.singleton {
        let path = class.path(reader, layout, id_name)?;
        return Ok(path.map(|path| Owner { path, separator: '#' }));
    }
    let Some(attached) = class.attached(reader, layout, id_name)? else { return Ok(None) };
    if !is_object(attached) {
        return Ok(None);
    }
    let Some(attached) = Class::read(reader, attached, layout)? else { return Ok(None) };
    let path = attached.path(reader, layout, id_name)?;
    Ok(path.map(|path| Owner { path, separator: '.' }))
}

/// The name of the class that `rb_obj_class` (object.c) returns for an object with this class pointer; `None` if it has no
/// permanent name.
pub(super) fn real_name<M: Memory>(
    reader: &Reader<M>,
    class: u64,
    layout: &FrameLayout,
    id_name: &mut impl FnMut(u64) -> Result<Option<Arc<str>>>,
) -> Result<Option<Arc<str>>> {
    if matches!(layout.class.path, ClassPath::Unknown) {
        return Ok(None);
    }
    let Some(class) = real(reader, class, layout)? else { return Ok(None) };
    match Class::read(reader, class, layout)? {
        Some(class) => class.path(reader, layout, id_name),
        None => Err(Failure::Stale),
    }
}

/// The class that `rb_obj_class` (object.c) returns for an object with this class pointer; `None` if the place of superclasses in this
/// release is not known.
pub(super) fn real<M: Memory>(
    reader: &Reader<M>,
    mut class: u64,
    layout: &FrameLayout,
) -> Result<Option<u64>> {
    for _ in 0..MAX_ANCESTORS {
        let flags = u64_at(&reader.slot(class)?, 0);
        let singleton = object_type(flags) == T_CLASS && flags & layout.class.singleton != 0;
        if !singleton && object_type(flags) != T_ICLASS {
            return Ok(Some(class));
        }
        let Some(at) = layout.class.superclass else { return Ok(None) };
        class = reader.word(class.wrapping_add(at.into()))?;
    }
    Err(Failure::Stale)
}

impl Class {
    /// Reads the class or module at an address; `None` if another object is there.
    fn read<M: Memory>(reader: &Reader<M>, address: u64, layout: &FrameLayout) -> Result<Option<Self>> {
        let class_or_module = |flags| matches!(object_type(flags), T_CLASS | T_MODULE);
        let slot = reader.slot(address)?;
        let flags = u64_at(&slot, 0);
        if !class_or_module(flags) {
            return Ok(None);
        }
        let bytes = match layout.class.path {
            ClassPath::Member { span, .. } => reader.vec(address, span)?,
            ClassPath::Table { .. } | ClassPath::Shapes { .. } | ClassPath::Unknown => slot.to_vec(),
        };
        let singleton = object_type(flags) == T_CLASS && flags & layout.class.singleton != 0;
        Ok(Some(Self { address, bytes, singleton }))
    }

    /// Its permanent name.
    fn path<M: Memory>(
        &self,
        reader: &Reader<M>,
        layout: &FrameLayout,
        id_name: &mut impl FnMut(u64) -> Result<Option<Arc<str>>>,
    ) -> Result<Option<Arc<str>>> {
        let string = match layout.class.path {
            ClassPath::Member { path, permanent, permanent_bit, .. } => {
                let byte = self.bytes.get(permanent as usize).copied().unwrap_or(0);
                let path = u64_at(&self.bytes, path);
                (byte >> permanent_bit & 1 == 1 && path != 0).then_some(path)
            }
            _ => self.variable(reader, Hidden::ClassPath, layout, id_name)?,
        };
        string.map(|string| reader.string(string, layout)).transpose()
    }

    /// The attached object of a singleton class.
    fn attached<M: Memory>(
        &self,
        reader: &Reader<M>,
        layout: &FrameLayout,
        id_name: &mut impl FnMut(u64) -> Result<Option<Arc<str>>>,
    ) -> Result<Option<u64>> {
        match layout.class.path {
            ClassPath::Member { attached, .. } => Ok(Some(u64_at(&self.bytes, attached))),
            _ => self.variable(reader, Hidden::Attached, layout, id_name),
        }
    }

    /// A hidden instance variable, up to 3.2.
    fn variable<M: Memory>(
        &self,
        reader: &Reader<M>,
        wanted: Hidden,
        layout: &FrameLayout,
        id_name: &mut impl FnMut(u64) -> Result<Option<Arc<str>>>,
    ) -> Result<Option<u64>> {
        let mut is_wanted = |id| match id_name(id) {
            Ok(name) => Ok(name.as_deref() == Some(wanted.name())),
            // The ids of some hidden variables have no name.
            Err(Failure::Stale) => Ok(false),
            Err(failure) => Err(failure),
        };
        match layout.class.path {
            ClassPath::Table { extension, variables } => {
                let extension = u64_at(&self.bytes, extension);
                if !is_object(extension) {
                    return Err(Failure::Stale);
                }
                let table = reader.word(extension.wrapping_add(variables.into()))?;
                if table == 0 { Ok(None) } else { in_table(reader, table, &mut is_wanted) }
            }
            ClassPath::Shapes { variables, list, shape } => {
                let vm = reader.word(reader.alive)?;
                let shapes = reader.word(vm.wrapping_add(list.into()))?;
                // SHAPE_FLAG_SHIFT: the upper half of the flags.
                let id = (u64_at(&self.bytes, 0) >> 32) as u32;
                let Some(index) = in_shape(reader, shapes, id, &shape, &mut is_wanted)? else {
                    return Ok(None);
                };
                let values = reader.word(self.address.wrapping_add(variables.into()))?;
                reader.word(values.wrapping_add(u64::from(index) * 8)).map(Some)
            }
            ClassPath::Member { .. } | ClassPath::Unknown => Ok(None),
        }
    }
}

/// The value of a key in a hash table of instance variables (`st_lookup`, st.c).
fn in_table<M: Memory>(
    reader: &Reader<M>,
    table: u64,
    is_wanted: &mut impl FnMut(u64) -> Result<bool>,
) -> Result<Option<u64>> {
    for (key, record) in table_entries(reader, table)? {
        if is_wanted(key)? {
            return Ok(Some(record));
        }
    }
    Ok(None)
}

/// Keys and values of a hash table of instance variables, at most [`MAX_VARIABLES`].
pub(super) fn table_entries<M: Memory>(reader: &Reader<M>, table: u64) -> Result<Vec<(u64, u64)>> {
    let table = reader.bytes::<TABLE_SIZE>(table)?;
    let (start, bound) = (u64_at(&table, TABLE_START), u64_at(&table, TABLE_BOUND));
    let count = bound.checked_sub(start).ok_or(Failure::Stale)?.min(MAX_VARIABLES) as usize;
    let begin = start.checked_mul(ENTRY_SIZE as u64).ok_or(Failure::Stale)?;
    let first = u64_at(&table, TABLE_ENTRIES).wrapping_add(begin);
    let entries = reader.vec(first, count * ENTRY_SIZE)?;
    let entries = entries.chunks_exact(ENTRY_SIZE).filter(|entry| u64_at(entry, 0) != DELETED);
    Ok(entries.map(|entry| (u64_at(entry, 8), u64_at(entry, 16))).collect())
}

/// The index of an instance variable, by the shape and its ancestors (`rb_shape_get_iv_index`, shape.c).
fn in_shape<M: Memory>(
    reader: &Reader<M>,
    shapes: u64,
    mut id: u32,
    layout: &ShapeLayout,
    is_wanted: &mut impl FnMut(u64) -> Result<bool>,
) -> Result<Option<u32>> {
    /// `enum shape_type` (shape.h).
    const ROOT: u8 = 0;
    const VARIABLE: u8 = 1;
    const TOO_COMPLEX: u8 = 6;
    for _ in 0..MAX_VARIABLES {
        let at = shapes.wrapping_add(u64::from(id) * u64::from(layout.size));
        let shape = reader.vec(at, layout.size as usize)?;
        match shape.get(layout.kind as usize) {
            Some(&VARIABLE) if is_wanted(u64_at(&shape, layout.name))? => {
                let index = u32_at(&shape, layout.next_index).checked_sub(1);
                return index.map(Some).ok_or(Failure::Stale);
            }
            Some(&(ROOT | TOO_COMPLEX)) => return Ok(None),
            _ => {}
        }
        id = u32_at(&shape, layout.parent);
    }
    Err(Failure::Stale)
}
