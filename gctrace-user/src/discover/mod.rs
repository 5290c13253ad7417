//! Finding Ruby processes and images, now and later, and having them probed. The slow path, on a thread of its own.

mod control;
mod identity;
mod installed;
mod mappings;
mod planned;
mod state;

pub use control::{Found, Selection, Start, run};
pub use identity::ImageKey;
pub use planned::Planned;
pub use state::VmState;
