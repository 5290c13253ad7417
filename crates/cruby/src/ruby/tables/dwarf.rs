//! Converts the structures in DWARF to a [`Table`].

use super::schema::SCHEMA;
use super::{Array, BitField, Field, OBJSPACE, Struct, Table};
use crate::elf::dwarf::{Member, MemberKind, StructLayout, Structs};
use crate::ruby::RubyVersion;

/// The C files that define the structures.
pub const UNITS: &[&str] = &["gc.c", "default.c", "vm.c", "iseq.c", "cont.c"];

/// Why debug information gives no table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FromDwarfError {
    /// A structure is not described.
    #[error("the debug information does not describe `struct {0}`")]
    MissingStruct(&'static str),
    /// A member is not described, or is not a bit-field where one is expected.
    #[error("the debug information does not describe `{0}` of `struct rb_objspace`")]
    MissingMember(&'static str),
    /// A number is out of range for its use.
    #[error("`{name}` of `struct {tag}` has an impossible place or size")]
    Impossible {
        /// The structure.
        tag: &'static str,
        /// The member.
        name: &'static str,
    },
}

/// Tags of the structures in a table.
pub fn tags() -> Vec<&'static str> {
    SCHEMA.iter().map(|wanted| wanted.tag).collect()
}

/// The parts of the structures found that a table needs.
pub fn structs_of(found: &Structs) -> Result<Vec<Struct>, FromDwarfError> {
    let present = SCHEMA.iter().filter_map(|wanted| Some((wanted, found.by_tag.get(wanted.tag)?)));
    present.map(|(wanted, layout)| structure(wanted.tag, wanted.members, layout)).collect()
}

impl Table {
    /// The table of one build of one release, from its own debug information.
    pub fn from_dwarf(version: RubyVersion, source: String, found: &Structs) -> Result<Self, FromDwarfError> {
        let mut structs = structs_of(found)?;
        let objspace = structs.iter().position(|structure| structure.name == OBJSPACE);
        let objspace = structs.remove(objspace.ok_or(FromDwarfError::MissingStruct(OBJSPACE))?);
        let release = (version.major, version.minor, version.teeny);
        Self::assemble((release, release), source, &objspace, structs)
            .ok_or(FromDwarfError::MissingMember("flags.mode"))
    }
}

fn structure(
    tag: &'static str,
    wanted: &[&'static str],
    layout: &StructLayout,
) -> Result<Struct, FromDwarfError> {
    let impossible = |name| FromDwarfError::Impossible { tag, name };
    let size = u32::try_from(layout.size).map_err(|_| impossible("sizeof"))?;
    let mut found = Struct { name: tag, size, fields: Vec::new(), bits: Vec::new(), arrays: Vec::new() };
    for &path in wanted {
        if let Some(member) = layout.member(path) {
            place(&mut found, path, member, layout.size).ok_or_else(|| impossible(path))?;
        }
    }
    Ok(found)
}

/// Adds a member to its list; `None` if it does not fit into its structure or array.
fn place(found: &mut Struct, path: &'static str, member: &Member, whole: u64) -> Option<()> {
    let offset = u32::try_from(member.offset).ok()?;
    if member.offset.checked_add(member.size)? > whole {
        return None;
    }
    if let Some((array, name)) = path.split_once("[].") {
        let array = found.arrays.iter_mut().find(|known| known.name == array)?;
        let field = Field { name, offset: offset.checked_sub(array.offset)?, size: scalar(member)? };
        array.fields.push(field);
        return (field.offset.checked_add(field.size.into())? <= array.stride).then_some(());
    }
    match member.kind {
        MemberKind::Scalar | MemberKind::Aggregate => {
            found.fields.push(Field { name: path, offset, size: u8::try_from(member.size).ok()? });
        }
        MemberKind::Bits { first, bits } => {
            let size = u8::try_from(member.size).ok()?;
            let (first, bits) = (u8::try_from(first).ok()?, u8::try_from(bits).ok()?);
            // Bit-fields are read from a 32-bit word.
            if u64::from(first) + u64::from(bits) > (u64::from(size) * 8).min(32) {
                return None;
            }
            found.bits.push(BitField { name: path, offset, size, first, bits });
        }
        MemberKind::Array { stride, count } => {
            let (stride, count) = (u32::try_from(stride).ok()?, u32::try_from(count).ok()?);
            if u64::from(stride) * u64::from(count) > member.size {
                return None;
            }
            found.arrays.push(Array { name: path, offset, stride, count, fields: Vec::new() });
        }
    }
    Some(())
}

fn scalar(member: &Member) -> Option<u8> {
    match member.kind {
        MemberKind::Scalar | MemberKind::Aggregate => u8::try_from(member.size).ok(),
        MemberKind::Bits { .. } | MemberKind::Array { .. } => None,
    }
}
