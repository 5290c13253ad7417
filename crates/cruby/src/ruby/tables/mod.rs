//! Layouts of CRuby's structures by exact version range.
//!
//! The committed data is `layouts.txt`: one entry per structure and range of releases over which it did not change,
//! written by `cargo xtask layouts` from DWARF with the same reader that reads a user's debug file at run time
//! ([`Table::from_dwarf`]). Each entry names the release, build and compiler from which it was read.

mod dwarf;
mod schema;
#[cfg(test)]
mod tests;
mod text;

use std::sync::LazyLock;

pub use dwarf::{FromDwarfError, UNITS, structs_of, tags};
pub use text::{Variant, print};

use super::RubyVersion;

/// Major, minor and teeny of a release.
pub type Release = (u16, u16, u16);

/// A field of a C structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Path of the member, as in the C source: `profile.count`.
    pub name: &'static str,
    /// Byte offset.
    pub offset: u32,
    /// Size in bytes; 1, 2, 4 or 8 for numbers and pointers.
    pub size: u8,
}

/// A bit-field of a C structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitField {
    /// Path of the member: `flags.mode`.
    pub name: &'static str,
    /// Byte offset of its storage unit.
    pub offset: u32,
    /// Bytes of the storage unit.
    pub size: u8,
    /// First bit, counted from the least significant bit of the storage unit.
    pub first: u8,
    /// Number of bits.
    pub bits: u8,
}

/// An array inside a C structure, such as the size pools (`size_pools`, 3.1–3.3) or heaps (`heaps`, 3.4 and later) of
/// the objspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    /// Path of the member.
    pub name: &'static str,
    /// Byte offset of the first element.
    pub offset: u32,
    /// Bytes from one element to the next.
    pub stride: u32,
    /// Number of elements, 0 for a flexible array.
    pub count: u32,
    /// Members of an element, relative to it; empty if elements are numbers.
    pub fields: Vec<Field>,
}

/// A C structure, reduced to what gctrace needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Struct {
    /// Its tag in the C source: `rb_vm_struct`.
    pub name: &'static str,
    /// `sizeof`.
    pub size: u32,
    /// Members that are numbers, pointers or small structures.
    pub fields: Vec<Field>,
    /// Members that are bit-fields.
    pub bits: Vec<BitField>,
    /// Members that are arrays.
    pub arrays: Vec<Array>,
}

impl Struct {
    /// The field with this path.
    pub fn field(&self, name: &str) -> Option<Field> {
        self.fields.iter().find(|field| field.name == name).copied()
    }

    /// The bit-field with this path.
    pub fn bit_field(&self, name: &str) -> Option<BitField> {
        self.bits.iter().find(|field| field.name == name).copied()
    }

    /// The array with this path.
    pub fn array(&self, name: &str) -> Option<&Array> {
        self.arrays.iter().find(|array| array.name == name)
    }

    /// The differences between two layouts of the same structure, as text; a member that only one of them has counts.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let mut found = Vec::new();
        let mut compare = |what: &str, one: Option<String>, two: Option<String>| {
            if one != two {
                let show = |value: Option<String>| value.unwrap_or_else(|| "absent".to_owned());
                found.push(format!("{}.{what}: {} or {}", self.name, show(one), show(two)));
            }
        };
        if !SIZE_VARIES.contains(&self.name) {
            compare("sizeof", Some(self.size.to_string()), Some(other.size.to_string()));
        }
        for (one, two) in text::members(self, other) {
            let name = one.as_ref().or(two.as_ref()).map_or("", |(name, _)| *name).to_owned();
            compare(&name, one.map(|(_, place)| place), two.map(|(_, place)| place));
        }
        found
    }
}

/// Layouts for a range of releases; the objspace's members are fields of this struct, other structures are in `extra`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// First release to which it applies.
    pub from: Release,
    /// Last release to which it applies.
    pub to: Release,
    /// Where it was read from.
    pub source: String,
    /// `sizeof(rb_objspace_t)`.
    pub size: u32,
    /// Byte offset of the objspace's `flags` word.
    pub flags: u32,
    /// First bit and number of bits of `flags.mode`.
    pub mode_bits: (u32, u32),
    /// Members of the objspace.
    pub fields: Vec<Field>,
    /// Bit-fields of the objspace.
    pub bits: Vec<BitField>,
    /// The objspace's size pools or heaps, if the series has them.
    pub pools: Option<Array>,
    /// Further structures. A missing one is not known for these releases.
    pub extra: Vec<Struct>,
}

/// Structures whose end depends on whether a JIT compiler was built in; the members before it do not.
const SIZE_VARIES: &[&str] = &["rb_iseq_constant_body"];

/// Tag of the objspace's structure.
const OBJSPACE: &str = "rb_objspace";

static VARIANTS: LazyLock<Vec<Variant>> = LazyLock::new(|| {
    text::parse(include_str!("layouts.txt")).unwrap_or_else(|error| {
        // A test parses the same text, so a broken one cannot be released.
        log::error!("the layouts inside gctrace are broken: {error}");
        Vec::new()
    })
});

static TABLES: LazyLock<Vec<Table>> = LazyLock::new(|| compose(&VARIANTS));

/// The committed layouts, one entry per structure and range.
pub fn variants() -> &'static [Variant] {
    &VARIANTS
}

/// The committed tables, oldest first; ranges do not overlap.
pub fn tables() -> &'static [Table] {
    &TABLES
}

impl Table {
    /// The structure with this tag, other than the objspace.
    pub fn structure(&self, tag: &str) -> Option<&Struct> {
        self.extra.iter().find(|structure| structure.name == tag)
    }

    /// The objspace's bit-field with this path: `flags.during_gc`.
    pub fn bit_field(&self, name: &str) -> Option<BitField> {
        self.bits.iter().find(|field| field.name == name).copied()
    }

    /// Assembles a table.
    fn assemble(
        (from, to): (Release, Release),
        source: String,
        objspace: &Struct,
        extra: Vec<Struct>,
    ) -> Option<Self> {
        let mode = objspace.bit_field("flags.mode")?;
        Some(Self {
            from,
            to,
            source,
            size: objspace.size,
            flags: mode.offset,
            mode_bits: (mode.first.into(), mode.bits.into()),
            fields: objspace.fields.clone(),
            bits: objspace.bits.clone(),
            pools: objspace.array("size_pools").or_else(|| objspace.array("heaps")).cloned(),
            extra,
        })
    }

    /// The objspace's layout in the form of the other structures.
    pub fn objspace(&self) -> Struct {
        Struct {
            name: OBJSPACE,
            size: self.size,
            fields: self.fields.clone(),
            bits: self.bits.clone(),
            arrays: self.pools.iter().cloned().collect(),
        }
    }

    /// The differences between two tables, as text. Structures that only one of them has are skipped.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let mut found = self.objspace().differences(&other.objspace());
        for structure in &self.extra {
            if let Some(theirs) = other.structure(structure.name) {
                found.extend(structure.differences(theirs));
            }
        }
        found
    }
}

/// Splits the ranges of the objspace wherever another structure changes.
fn compose(variants: &[Variant]) -> Vec<Table> {
    let mut tables = Vec::new();
    for objspace in variants.iter().filter(|variant| variant.layout.name == OBJSPACE) {
        let after = |(major, minor, teeny): Release| (major, minor, teeny + 1);
        let end = after(objspace.to);
        let mut cuts: Vec<Release> =
            variants.iter().flat_map(|variant| [variant.from, after(variant.to)]).collect();
        cuts.retain(|&cut| objspace.from < cut && cut < end);
        cuts.extend([objspace.from, end]);
        cuts.sort_unstable();
        cuts.dedup();
        for pair in cuts.windows(2) {
            let (from, to) = (pair[0], (pair[1].0, pair[1].1, pair[1].2 - 1));
            let covering = variants
                .iter()
                .filter(|other| other.layout.name != OBJSPACE && other.from <= from && to <= other.to);
            let extra = covering.map(|variant| variant.layout.clone()).collect();
            tables.extend(Table::assemble((from, to), objspace.source.clone(), &objspace.layout, extra));
        }
    }
    tables.sort_by_key(|table| table.from);
    tables
}

/// Whether a release of the same series has a table: then its `GC.stat` keys and their formulas are known too.
pub fn knows_series(version: RubyVersion) -> bool {
    tables().iter().any(|table| (table.from.0, table.from.1) == (version.major, version.minor))
}

/// The structure in the newest release of the series for which it is known.
pub(super) fn newest_structure(version: RubyVersion, tag: &str) -> Option<&'static Struct> {
    let same = |table: &&Table| (table.to.0, table.to.1) == (version.major, version.minor);
    let knowing = tables().iter().filter(same).filter(|table| table.structure(tag).is_some());
    knowing.max_by_key(|table| table.to)?.structure(tag)
}

/// The releases that have a table, for messages: `2.7.0–2.7.8, 3.0.0–3.0.7`.
pub(super) fn known() -> String {
    let mut ranges: Vec<(Release, Release)> = Vec::new();
    for table in tables() {
        match ranges.last_mut() {
            Some((_, to)) if (to.0, to.1, to.2 + 1) == table.from => *to = table.to,
            _ => ranges.push((table.from, table.to)),
        }
    }
    let show = |r: Release| RubyVersion::new(r.0, r.1, r.2).to_string();
    ranges.iter().map(|&(from, to)| format!("{}–{}", show(from), show(to))).collect::<Vec<_>>().join(", ")
}
