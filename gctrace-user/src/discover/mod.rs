//! Finding Ruby processes and images, now and later, and having them probed. The slow path, on a thread of its own.

mod asking;
mod cgroups;
mod control;
mod debuginfo;
mod fault;
mod identity;
mod installed;
mod mappings;
mod modular;
mod place;
mod planned;
mod selection;
mod state;
mod strangers;
mod survey;

pub use cgroups::lists_cgroups;
pub use control::{Found, GVL_ATTACH, GVL_DETACH, Start, run};
pub use debuginfo::{DebugInfo, Symbols};
pub use fault::Fault;
pub use identity::ImageKey;
pub use mappings::own_code;
pub(crate) use mappings::{CodeMapping, code_of};
pub use planned::{Abilities, Choice, Head, Planned, Way, WhyNot};
pub use selection::Selection;
pub use state::VmState;
pub(crate) use state::bias as load_bias;
pub use survey::{ImageFound, Miss, ProcessFound, Subject, Subjects, Survey, survey};
