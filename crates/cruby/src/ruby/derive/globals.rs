//! Where the VM's tables of global variables (`rb_global_tbl`, variable.c) and of instance variables of objects of C code
//! (`generic_iv_tbl_`) can be. No library exports them: they are `static` pointers, so they lie in the zero-initialised data, unless
//! symbols locate them. The contents of a table prove which pointer it is. For global variables the proof is exported functions, because
//! extensions define global variables, too (include/ruby/internal/variable.h).

use serde::{Deserialize, Serialize};

use super::NotDerived;
use crate::{address::Svma, elf::ElfImage};

const GLOBALS: &[&str] = &["rb_global_tbl"];
const VARIABLES: &[&str] = &["generic_iv_tbl_", "generic_iv_tbl"];
/// Maximum bytes of data that are searched; CRuby has 0.1 MB of it.
const MOST: u64 = 8 << 20;

/// A range of the image's data that contains a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataRange {
    /// First address at which the pointer can be.
    pub from: Svma,
    /// First address after the range.
    pub to: Svma,
}

/// Where the table of global variables can be, and the functions that prove its identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GlobalTable {
    /// Where the pointer to the table can be.
    pub data: DataRange,
    /// `rb_gvar_undef_marker`: the variable was never set.
    pub unset: Svma,
    /// The functions of a variable that holds a value.
    pub own: Functions,
    /// The functions of a variable that holds the address of a value, as C code defines them.
    pub pointed: Functions,
}

/// The functions that CRuby calls for the variables of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Functions {
    /// Returns the variable's value.
    pub getter: Svma,
    /// Marks the variable's value.
    pub marker: Svma,
}

pub(super) fn globals(image: &ElfImage) -> Result<GlobalTable, NotDerived> {
    let symbol = |name: &'static str| {
        image.symbol(name).map(|symbol| symbol.address).ok_or(NotDerived::Missing(name.into()))
    };
    Ok(GlobalTable {
        data: data(image, GLOBALS)?,
        unset: symbol("rb_gvar_undef_marker")?,
        own: Functions { getter: symbol("rb_gvar_val_getter")?, marker: symbol("rb_gvar_val_marker")? },
        pointed: Functions { getter: symbol("rb_gvar_var_getter")?, marker: symbol("rb_gvar_var_marker")? },
    })
}

pub(super) fn other_variables(image: &ElfImage) -> Result<DataRange, NotDerived> {
    data(image, VARIABLES)
}

/// The range of the variable with one of these names, or the data in which it must be.
fn data(image: &ElfImage, names: &'static [&'static str]) -> Result<DataRange, NotDerived> {
    let bss = || DataRange { from: Svma(image.bss().start.0.next_multiple_of(8)), to: image.bss().end };
    let one = |at: Svma| DataRange { from: at, to: Svma(at.0.saturating_add(8)) };
    let variable = names.iter().find_map(|name| image.symbol(name));
    let range = variable.map_or_else(bss, |symbol| one(symbol.address));
    let len = range.to.0.checked_sub(range.from.0);
    let plausible = len.is_some_and(|len| (8..=MOST).contains(&len));
    if plausible { Ok(range) } else { Err(NotDerived::Missing(names[0].into())) }
}
