//! Where the VM's tables of global variables (`rb_global_tbl`, variable.c) and of instance variables of objects of C code
//! (`generic_iv_tbl_`) can be. No library exports them: they are `static` pointers, so they lie among the zero-initialised data, unless
//! symbols say where. What a table contains proves which pointer it is. Of global variables these are functions that are exported, since
//! extensions define global variables, too (include/ruby/internal/variable.h).

use serde::{Deserialize, Serialize};

use super::NotDerived;
use crate::{address::Svma, elf::ElfImage};

const GLOBALS: &[&str] = &["rb_global_tbl"];
const VARIABLES: &[&str] = &["generic_iv_tbl_", "generic_iv_tbl"];
/// Bytes of data that are searched at most; CRuby has 0.1 MB of it.
const MOST: u64 = 8 << 20;

/// Data of the image that a pointer is among.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataRange {
    /// The first address at which it can be.
    pub from: Svma,
    /// The one behind the last.
    pub to: Svma,
}

/// Where the table of global variables can be, and what proves that it is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GlobalTable {
    /// Where the pointer to it is.
    pub data: DataRange,
    /// `rb_gvar_undef_marker`: the variable was never set.
    pub unset: Svma,
    /// The functions of a variable that has a value.
    pub own: Functions,
    /// Those of one that has the address of a value, as C code defines them.
    pub pointed: Functions,
}

/// The functions that CRuby calls for the variables of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Functions {
    /// For its value.
    pub getter: Svma,
    /// To mark its value.
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

/// The variable with one of these names, or the data that it is among.
fn data(image: &ElfImage, names: &'static [&'static str]) -> Result<DataRange, NotDerived> {
    let bss = || DataRange { from: Svma(image.bss().start.0.next_multiple_of(8)), to: image.bss().end };
    let one = |at: Svma| DataRange { from: at, to: Svma(at.0.saturating_add(8)) };
    let variable = names.iter().find_map(|name| image.symbol(name));
    let range = variable.map_or_else(bss, |symbol| one(symbol.address));
    let len = range.to.0.checked_sub(range.from.0);
    let plausible = len.is_some_and(|len| (8..=MOST).contains(&len));
    if plausible { Ok(range) } else { Err(NotDerived::Missing(names[0].into())) }
}
