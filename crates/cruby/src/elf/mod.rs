//! Reading ELF images.
//!
//! Everything here treats the file as hostile: sizes are capped before memory is allocated for them, arithmetic on
//! header fields is checked, and a malformed part is an [`ElfError`] that names it.

pub mod dwarf;
mod error;
mod frames;
#[cfg(test)]
mod fuzz;
mod head;
mod headers;
mod image;
mod notes;
mod plt;
mod probe;
mod raw;
mod sectionless;
mod source;
mod symbols;
#[cfg(test)]
pub(crate) mod tests;
mod thread_local;
mod unwind;
mod usdt;

pub use error::ElfError;
pub use frames::{FunctionRange, function_ranges};
pub use head::ImageHead;
pub use headers::{Headers, Machine};
pub use image::{ElfImage, build_id};
pub use notes::BuildId;
pub use plt::Relocation;
pub use probe::{RubyPresence, probe_ruby, read_symbol_u64};
pub use raw::{LoadSegment, Section, code_offset, string_at};
pub use source::ReadAt;
pub use symbols::{Symbol, SymbolTable};
pub use thread_local::{ThreadLocal, TlsSlot};
pub use unwind::UnwindTable;
pub use usdt::UsdtProbe;
