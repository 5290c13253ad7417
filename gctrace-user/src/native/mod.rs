//! Native stacks: unwind tables for the kernel side, names for what it walked.
//!
//! [`Tables`] belongs to the thread that watches mappings: it compiles the unwind table of each image once and gives the
//! kernel side the mappings of each process. [`NativeNamer`] belongs to the thread that handles stacks. [`Sleepers`]
//! walks in user space, without the kernel side, what does not run meanwhile.

mod arena;
mod asleep;
mod code;
mod context;
mod kernel;
mod layout;
mod names;
mod tables;

pub use asleep::{Sleepers, missing};
pub use kernel::KernelNamer;
pub use names::NativeNamer;
pub use tables::Tables;
