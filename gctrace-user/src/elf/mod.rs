//! Reading ELF images.
//!
//! Everything here treats the file as hostile: sizes are capped before memory is allocated for them, arithmetic on
//! header fields is checked, and a broken part is an [`ElfError`] that names it.

pub mod debug;
pub mod dwarf;
mod error;
mod frames;
#[cfg(test)]
mod fuzz;
mod head;
mod headers;
mod image;
mod names;
mod notes;
mod plt;
mod probe;
mod raw;
mod sectionless;
mod source;
mod symbols;
#[cfg(test)]
pub(crate) mod tests;
mod unwind;
mod usdt;

pub use error::ElfError;
pub use frames::FunctionRange;
pub use head::{ImageHead, code_offset};
#[cfg(test)]
pub(crate) use headers::Headers;
pub use headers::Machine;
pub use image::{BuildId, ElfImage};
pub use names::FunctionNames;
pub use plt::Relocation;
pub use probe::{RubyPresence, probe_ruby, read_symbol_u64};
pub use raw::LoadSegment;
pub use source::ReadAt;
pub use symbols::{Symbol, SymbolTable};
pub use unwind::UnwindTable;
pub use usdt::UsdtProbe;
