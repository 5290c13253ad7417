//! Additional parts of a Ruby built `--with-modular-gc` (3.4 and later): a choice of GCs.
//!
//! The GC compiled into such a Ruby is one implementation of an interface (`gc/gc_impl.h`); another may come from
//! a library, `librubygc.<name>.so`, that the process names in `RUBY_GC_LIBRARY`. At startup `ruby_modular_gc_init` (gc.c)
//! fills a table of pointers with the functions of one of them, and all calls go through that table.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use super::code::Code;
use super::eval::{Assumptions, Limits, Machine, Program, Value};
use super::reference::Kind;
use crate::address::Svma;
use crate::elf::ElfImage;

/// The environment variable that selects the GC. Only `ruby_modular_gc_init` refers to its name.
const VARIABLE: &str = "RUBY_GC_LIBRARY";
/// Prefix of the file name of every GC library, after the directory configured at build time.
const PREFIX: &str = "librubygc.";
/// An exported variable of the VM (gc.c) that every GC library refers to, since it defines methods of `GC`.
pub(super) const LANDMARK: &str = "rb_mGC";
/// Exported since the first release with modular GCs (gc.c): returns the byte after the table.
const LOADED: &str = "rb_gc_modular_gc_loaded_p";
/// The table has about 60 functions (`rb_gc_function_map_t`, gc.c).
const MIN_FUNCTIONS: usize = 40;
/// Maximum number of functions that refer to the variable's name; builds have one. Bounds the work on hostile code.
const MAX_OWNERS: usize = 8;
/// Filling the table takes about 400 instructions.
const LIMITS: Limits = Limits { steps: 8_000, depth: 0, function: 0x10000, callee: 0, exported: |_| false };

/// Facts about the selection of the GC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Modular {
    /// Stated address of `rb_mGC`, from which the VM is found in processes that use a GC library.
    pub landmark: Svma,
    /// Stated address of the byte that is 1 in a process that has loaded a GC library, and 0 in a process that uses the
    /// compiled-in GC or has not selected one yet.
    pub loaded: Svma,
    /// The directory of GC libraries configured at build time; `None` if it is not in the file.
    pub directory: Option<String>,
}

/// Whether the image is such a Ruby.
pub(super) fn is_modular(image: &ElfImage) -> bool {
    !image.find_c_string(VARIABLE).is_empty()
}

impl Modular {
    /// Finds these facts, and makes `code` resolve calls as in a process that has not selected a GC library. The error names
    /// what was not found.
    pub(super) fn of(code: &mut Code<'_>) -> Result<Self, &'static str> {
        let image = code.image;
        let landmark = image.dynamic_symbols().find(LANDMARK).ok_or("the exported variable rb_mGC")?.address;
        let table = table(code).ok_or("the table of GC functions")?;
        let accessor = image.symbol(LOADED).ok_or("the function rb_gc_modular_gc_loaded_p")?.address;
        let loaded = loaded(code, accessor).ok_or("the mark of a loaded GC library")?;
        // The mark is the last member of the struct.
        if table.last_key_value().is_none_or(|(last, _)| last.0.wrapping_add(8) != loaded.0) {
            return Err("the end of the table of GC functions");
        }
        code.set_dispatch(table);
        Ok(Self { landmark, loaded, directory: directory(image) })
    }
}

/// The table as `ruby_modular_gc_init` fills it if the variable is not set: slot → function of this image.
fn table(code: &mut Code<'_>) -> Option<BTreeMap<Svma, Svma>> {
    let wanted: Vec<_> = code.image.find_c_string(VARIABLE).into_iter().map(|Svma(at)| at..at + 1).collect();
    let referring: BTreeSet<usize> =
        code.references(&wanted, Kind::Any).into_iter().map(|found| found.function).collect();
    code.resolve_cold_parts(referring.iter().copied());
    let owners: BTreeSet<usize> = referring.into_iter().map(|extent| code.owner(extent)).collect();
    if owners.len() > MAX_OWNERS {
        return None;
    }
    let mut tables = owners.into_iter().filter_map(|owner| filled_by(code, code.start(owner)));
    let table = tables.next()?;
    tables.next().is_none().then_some(table)
}

fn filled_by(code: &Code<'_>, function: Svma) -> Option<BTreeMap<Svma, Svma>> {
    let program = Rc::new(Program::new(code, LIMITS.steps));
    let nothing = Assumptions {
        object: Value::Unknown,
        words: BTreeMap::new(),
        field: 0,
        global: 0,
        other: 0,
        narrow: 0,
    };
    let mut machine = Machine::assuming(&program, &Rc::new(nothing), None, LIMITS);
    // How it ends does not matter: the function may have been inlined into a larger one.
    machine.run_to_end(function);
    let begins_function = |address: Svma| {
        let index = code.image.function_index(address)?;
        (code.image.functions()[index].start == address).then_some(address)
    };
    let pointers = machine.globals().filter_map(|(slot, value)| match *value {
        Value::Image(function) => Some((slot, begins_function(Svma(function))?)),
        _ => None,
    });
    let table: BTreeMap<Svma, Svma> = pointers.collect();
    let mut neighbours = table.keys().zip(table.keys().skip(1));
    let dense = neighbours.all(|(one, next)| one.0.wrapping_add(8) == next.0);
    (dense && table.len() >= MIN_FUNCTIONS).then_some(table)
}

/// The byte that the accessor returns.
fn loaded(code: &Code<'_>, accessor: Svma) -> Option<Svma> {
    match Machine::new(code, 0).run(accessor) {
        Value::Load { base, offset: 0, size: 1 } => match *base {
            Value::Image(address) => Some(Svma(address)),
            _ => None,
        },
        _ => None,
    }
}

/// The directory in the only string constant that ends with the prefix of a GC library's file name.
fn directory(image: &ElfImage) -> Option<String> {
    let found: BTreeSet<&str> = image.find_c_strings_ending(PREFIX).into_iter().collect();
    let mut absolute = found.into_iter().filter_map(|path| path.strip_suffix(PREFIX)).filter(|dir| {
        // Relative directories depend on the location of the Ruby (`LOAD_RELATIVE`).
        dir.starts_with('/')
    });
    let directory = absolute.next()?;
    absolute.next().is_none().then(|| directory.to_owned())
}

/// The name of CRuby's own GC (gc/default/default.c).
pub(super) const DEFAULT: &str = "default";

/// Whether the file is a GC library.
pub(super) fn is_library(image: &ElfImage) -> bool {
    ["rb_gc_impl_objspace_alloc", "rb_gc_impl_start"]
        .iter()
        .all(|name| image.dynamic_symbols().find(name).is_some())
}

/// The name of a GC library (`rb_gc_impl_active_gc_name`): `default`, `mmtk`.
pub(super) fn library_name<'a>(code: &Code<'a>) -> Option<&'a str> {
    let accessor = code.image.symbol("rb_gc_impl_active_gc_name")?.address;
    match Machine::new(code, 0).run(accessor) {
        Value::Image(text) => code.image.c_string(Svma(text)),
        _ => None,
    }
}

/// The word of a GC library that holds the address of [`LANDMARK`] once the library is loaded.
pub(super) fn anchor(image: &ElfImage) -> Option<Svma> {
    let imported = |at: &Svma| image.slot_symbol(*at) == Some(LANDMARK) && image.pointer(*at).is_none();
    image.imports(LANDMARK).filter(imported).min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::debian::{libruby_analysis, libruby_bytes, libruby_image};
    use crate::ruby::{Refusal, analyse_library};

    /// An ordinary Ruby has no selection of GCs and is not a GC library.
    #[test]
    fn ordinary_ruby() {
        let (image, analysis) = (libruby_image(), libruby_analysis());
        assert!(!is_modular(&image) && !is_library(&image) && analysis.modular.is_none());
        assert_eq!(Modular::of(&mut Code::new(&image)), Err("the table of GC functions"));
        assert_eq!(directory(&image), None);
        assert_eq!(library_name(&Code::new(&image)), None);
        assert_eq!(anchor(&image), None);
        assert_eq!(analyse_library(&image, analysis), Err(Refusal::Library("the interface of a GC")));
    }

    /// The directory of GC libraries is found in the one constant that ends with their prefix.
    #[test]
    fn directories() {
        let mut bytes = libruby_bytes().to_vec();
        let constant = b"object allocation during garbage collection phase\0";
        let at = bytes.windows(constant.len()).position(|window| window == constant).unwrap();
        let mut with = |text: &[u8]| {
            bytes[at..at + constant.len()].fill(0);
            bytes[at..at + text.len()].copy_from_slice(text);
            directory(&ElfImage::read(&bytes[..]).unwrap())
        };
        assert_eq!(with(b"/usr/lib/ruby/gc/librubygc."), Some("/usr/lib/ruby/gc/".to_owned()));
        assert_eq!(with(b"lib/gc/librubygc."), None);
        assert_eq!(with(b"/usr/lib/ruby/gc/librubygc.x"), None);
        assert_eq!(with(b"/a/librubygc.\0/b/librubygc."), None);
    }
}
