//! Finding Ruby processes and images, at start and later, and having them probed. Not time-critical; runs on its own thread.

mod cgroups;
mod control;
mod debuginfo;
mod debuginfod;
mod decision;
mod fault;
mod image_file;
mod installed;
mod modular;
mod places;
mod present;
mod resolve;
mod selection;
mod state;
mod survey;
mod tracing_method;
mod unattributed;

use crate::host::{identity, mappings};

pub use cgroups::lists_cgroups;
pub(crate) use control::descendants;
pub use control::{ControlEvent, GVL_ATTACH, GVL_DETACH, Start, run};
pub use debuginfo::{DebugInfo, Symbols};
pub use fault::Fault;
pub(crate) use present::present;
pub use selection::Selection;
pub use state::VmState;
pub(crate) use state::objspace_of;
pub use survey::{Denied, ImageFound, Miss, ProcessFound, Subject, Subjects, Survey, survey};
pub(crate) use tracing_method::site_image;
pub use tracing_method::{Abilities, Choice, ImageFacts, Planned, Rejection, TracingMethod};
