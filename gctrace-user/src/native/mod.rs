//! Native stacks: unwind tables for the kernel side, names for the frames that it walks.
//!
//! [`Tables`] belongs to the thread that watches mappings: it compiles the unwind table of each image once and passes the
//! mappings of each process to the kernel side. [`NativeNamer`] belongs to the thread that handles stacks. [`Sleepers`]
//! walks stacks of sleeping threads in user space, without the kernel side.

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
