//! Converts entries to flat lists of members.

use std::collections::BTreeMap;

use gimli::DwTag;

use super::DwarfError;
use super::die::{Die, Dies, Position};

/// Maximum number of members of all structures of one query.
const MAX_MEMBERS: usize = 100_000;
/// Maximum nesting depth of structures.
const MAX_DEPTH: usize = 8;
/// Maximum number of qualifiers and typedefs around a type.
const MAX_WRAPPERS: usize = 32;

/// A member of a structure, or of a structure inside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Path from the structure: `profile.count`, `heaps[].slot_size`. Anonymous members do not appear in it.
    pub path: String,
    /// Bytes from the start of the structure. For a member inside an array: that of the first element. For a bit-field: that
    /// of the storage unit in which it starts.
    pub offset: u64,
    /// Size in bytes; that of the storage unit for a bit-field; 0 for a flexible array.
    pub size: u64,
    /// What it is.
    pub kind: MemberKind,
}

/// Kinds of members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberKind {
    /// A number, pointer or enumeration.
    Scalar,
    /// A structure or union; its members follow.
    Aggregate,
    /// A bit-field.
    Bits {
        /// First bit, counted from the least significant bit of the storage unit.
        first: u32,
        /// Number of bits.
        bits: u32,
    },
    /// An array; if the element is a structure, its members follow with `[]` in their paths.
    Array {
        /// Bytes from one element to the next.
        stride: u64,
        /// Number of elements, 0 for a flexible array.
        count: u64,
    },
}

/// A structure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StructLayout {
    /// `sizeof`.
    pub size: u64,
    /// All members, outer ones before inner ones.
    pub members: Vec<Member>,
}

impl StructLayout {
    /// The member with that path.
    pub fn member(&self, path: &str) -> Option<&Member> {
        self.members.iter().find(|member| member.path == path)
    }
}

/// The structures found, and the compiler that produced them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Structs {
    /// By tag.
    pub by_tag: BTreeMap<String, StructLayout>,
    /// `DW_AT_producer` of a unit that was read: the compiler and its options.
    pub producer: Option<String>,
}

/// Reads the wanted structures; see [`super::read_structs`].
pub(super) fn read(dies: &Dies<'_>, tags: &[&str], units: &[&str]) -> Result<Structs, DwarfError> {
    let mut roots = Vec::new();
    for (alt, unit) in dies.units() {
        let root = dies.root(alt, unit)?;
        let name = dies.name(&root)?.unwrap_or_default();
        let base = name.rsplit('/').next().unwrap_or_default();
        // Partial units have no file name; link-time optimisation moves everything to an artificial unit.
        let wanted = root.tag == gimli::DW_TAG_partial_unit || base == "<artificial>";
        let named = units.contains(&base);
        if named || wanted || alt {
            roots.push((named, root));
        }
    }
    let mut reader = Reader { dies, members: 0 };
    let mut found = Structs::default();
    for (named, root) in &roots {
        reader.scan(root, tags, &mut found)?;
        if *named && found.producer.is_none() {
            found.producer = dies.producer(root)?;
        }
    }
    Ok(found)
}

struct Reader<'d, 'a> {
    dies: &'d Dies<'a>,
    members: usize,
}

impl Reader<'_, '_> {
    fn scan(&mut self, root: &Die, tags: &[&str], found: &mut Structs) -> Result<(), DwarfError> {
        for die in self.dies.children(root.position)? {
            if die.tag != gimli::DW_TAG_structure_type || die.declaration || die.size.is_none() {
                continue;
            }
            let Some(name) = self.dies.name(&die)? else { continue };
            if !tags.contains(&name.as_str()) {
                continue;
            }
            let layout = self.layout(&die)?;
            match found.by_tag.get(&name) {
                None => {
                    found.by_tag.insert(name, layout);
                }
                Some(known) if *known == layout => {}
                Some(_) => return Err(DwarfError::Ambiguous(name)),
            }
        }
        Ok(())
    }

    fn layout(&mut self, die: &Die) -> Result<StructLayout, DwarfError> {
        let mut members = Vec::new();
        self.flatten(die.position, "", 0, 0, &mut members)?;
        Ok(StructLayout { size: die.size.unwrap_or_default(), members })
    }

    fn flatten(
        &mut self,
        at: Position,
        prefix: &str,
        base: u64,
        depth: usize,
        out: &mut Vec<Member>,
    ) -> Result<(), DwarfError> {
        for die in self.dies.children(at)? {
            if die.tag != gimli::DW_TAG_member {
                continue;
            }
            self.members += 1;
            if self.members > MAX_MEMBERS {
                return Err(DwarfError::TooMuch("the members"));
            }
            let name = self.dies.name(&die)?;
            let named = name.is_some();
            let path = match (prefix, name) {
                (prefix, None) => prefix.to_owned(),
                ("", Some(name)) => name,
                (prefix, Some(name)) => format!("{prefix}.{name}"),
            };
            self.member(&die, named.then_some(&path), &path, base, depth, out)?;
        }
        Ok(())
    }

    fn member(
        &mut self,
        die: &Die,
        name: Option<&String>,
        path: &str,
        base: u64,
        depth: usize,
        out: &mut Vec<Member>,
    ) -> Result<(), DwarfError> {
        let too_much = || DwarfError::TooMuch("the offsets of members");
        let ty = self.resolve(die.ty)?;
        let size = self.size_of(ty.as_ref(), 0)?;
        if let Some(bits) = die.bit_size {
            let field = bit_field(die, path, base, size, bits).ok_or_else(too_much)?;
            // An unnamed bit-field is padding.
            out.extend(name.map(|_| field));
            return Ok(());
        }
        let offset = base.checked_add(die.location.unwrap_or(0)).ok_or_else(too_much)?;
        let push = |out: &mut Vec<Member>, kind| {
            // An anonymous aggregate is not a member itself; its members belong to the enclosing structure.
            out.extend(name.map(|path| Member { path: path.clone(), offset, size, kind }));
        };
        let Some(ty) = ty else {
            push(out, MemberKind::Scalar);
            return Ok(());
        };
        match ty.tag {
            gimli::DW_TAG_structure_type | gimli::DW_TAG_union_type => {
                push(out, MemberKind::Aggregate);
                if depth < MAX_DEPTH {
                    self.flatten(ty.position, path, offset, depth + 1, out)?;
                }
            }
            gimli::DW_TAG_array_type => {
                let element = self.resolve(ty.ty)?;
                let stride = self.size_of(element.as_ref(), 0)?;
                let count = self.elements(&ty)?;
                push(out, MemberKind::Array { stride, count });
                let aggregate = element.filter(|element| is_aggregate(element.tag));
                if let Some(element) = aggregate.filter(|_| depth < MAX_DEPTH) {
                    self.flatten(element.position, &format!("{path}[]"), offset, depth + 1, out)?;
                }
            }
            _ => push(out, MemberKind::Scalar),
        }
        Ok(())
    }

    /// The type without typedefs and qualifiers; `None` for `void`.
    fn resolve(&self, ty: Option<Position>) -> Result<Option<Die>, DwarfError> {
        let Some(mut position) = ty else { return Ok(None) };
        for _ in 0..MAX_WRAPPERS {
            let die = self.dies.die(position)?;
            if !is_wrapper(die.tag) {
                return Ok(Some(die));
            }
            match die.ty {
                Some(next) => position = next,
                None => return Ok(None),
            }
        }
        Err(DwarfError::TooMuch("the typedefs around a type"))
    }

    /// `sizeof`; 0 for a type without a size.
    fn size_of(&self, ty: Option<&Die>, depth: usize) -> Result<u64, DwarfError> {
        const POINTER: u64 = 8;
        let Some(ty) = ty else { return Ok(0) };
        match ty.tag {
            gimli::DW_TAG_pointer_type => Ok(ty.size.unwrap_or(POINTER)),
            gimli::DW_TAG_array_type if ty.size.is_none() => {
                if depth >= MAX_DEPTH {
                    return Err(DwarfError::TooMuch("the arrays in arrays"));
                }
                let element = self.resolve(ty.ty)?;
                let stride = self.size_of(element.as_ref(), depth + 1)?;
                let size = stride.checked_mul(self.elements(ty)?);
                size.ok_or(DwarfError::TooMuch("the bytes of an array"))
            }
            _ => Ok(ty.size.unwrap_or(0)),
        }
    }

    /// Number of elements in all dimensions together.
    fn elements(&self, array: &Die) -> Result<u64, DwarfError> {
        let mut count = None;
        for dimension in self.dies.children(array.position)? {
            if dimension.tag == gimli::DW_TAG_subrange_type {
                let product = count.unwrap_or(1_u64).checked_mul(dimension.count.unwrap_or(0));
                count = Some(product.ok_or(DwarfError::TooMuch("the elements of an array"))?);
            }
        }
        Ok(count.unwrap_or(0))
    }
}

fn is_wrapper(tag: DwTag) -> bool {
    matches!(
        tag,
        gimli::DW_TAG_typedef
            | gimli::DW_TAG_const_type
            | gimli::DW_TAG_volatile_type
            | gimli::DW_TAG_restrict_type
            | gimli::DW_TAG_atomic_type
    )
}

fn is_aggregate(tag: DwTag) -> bool {
    matches!(tag, gimli::DW_TAG_structure_type | gimli::DW_TAG_union_type)
}

/// Converts both encodings of a bit-field to one: storage unit, and bits from its least significant bit.
fn bit_field(die: &Die, path: &str, base: u64, storage: u64, bits: u64) -> Option<Member> {
    let storage = die.size.unwrap_or(storage);
    let width = storage.checked_mul(8).filter(|&width| width > 0)?;
    let from_start = match (die.data_bit_offset, die.bit_offset) {
        (Some(bit), _) => bit,
        (None, Some(from_top)) => {
            let first = width.checked_sub(from_top.checked_add(bits)?)?;
            die.location.unwrap_or(0).checked_mul(8)?.checked_add(first)?
        }
        // In a union, at its start.
        (None, None) => die.location.unwrap_or(0).checked_mul(8)?,
    };
    let absolute = base.checked_mul(8)?.checked_add(from_start)?;
    let kind = MemberKind::Bits { first: (absolute % width) as u32, bits: u32::try_from(bits).ok()? };
    Some(Member { path: path.to_owned(), offset: absolute / width * storage, size: storage, kind })
}
