//! Knowledge about CRuby: versions, event sites, layouts.

mod aarch64;
mod accept;
mod analyse;
pub mod blocking;
mod code;
pub mod derive;
#[cfg(test)]
mod dwarf_oracle;
mod emulation;
mod eval;
pub mod fallback;
mod formula;
pub mod frames;
pub mod gvl_plan;
pub mod heap;
pub mod interpreter;
pub mod jobs;
pub mod layout;
pub mod live_check;
pub mod malloc;
mod modular;
mod outcome;
pub mod plan;
pub mod reconcile;
mod reference;
mod references;
pub mod requests;
#[cfg(test)]
mod shape_tests;
mod sites;
pub mod stack_layout;
pub mod stat;
mod symbol_check;
pub mod tables;
#[cfg(test)]
mod tests;
pub mod threads;
mod typed_data;
mod version;
mod vm_path;
mod x86;

pub use accept::{Check, may_be_probed};
pub use analyse::{Refusal, Rest, RubyAnalysis, analyse, analyse_gc, analyse_library};
pub use formula::{Formula, Piece};
pub use modular::Modular;
pub use outcome::Outcome;
pub use sites::{
    GvlEvent, GvlFields, GvlSite, GvlSites, PageFields, PauseKind, RefillSite, RefillSites, Site, SiteForm,
    ThreadEvent, ThreadOperand, ThreadSite, ThreadSites,
};
pub use symbol_check::{Disagreement, Witness, witness};
pub use version::{InvalidVersion, RubyVersion};
pub use vm_path::{VmPath, VmPathError};
