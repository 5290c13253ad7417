//! The heap of a process, slot by slot: what `ObjectSpace.count_objects` counts, read from memory without stopping it.
//!
//! Sources: `struct heap_page` and `objspace_each_objects` (gc.c up to 3.3, gc/default/default.c from 3.4 on),
//! `count_objects` (gc.c). A slot whose flags are 0 is free, regardless of whose free list it is in.

mod census;
mod classes;
mod data_types;
mod environment;
mod kinds;
mod layout;
mod placed;
mod places;
mod procs;
mod references;
mod sets;
mod shapes;
mod table;
#[cfg(test)]
mod tests;
mod threads;
mod tracing;
#[cfg(test)]
mod tracing_tests;
mod walk;
mod window;

pub use census::{ByClass, Census, Keeper, Page, RealClass, Tally, census, census_with_places};
pub use classes::ClassNames;
pub use environment::Environment;
pub use kinds::ObjectType;
pub use layout::HeapLayout;
pub use placed::{Placed, each_placed};
pub use places::{Origin, Place, Places};
pub use procs::{Closure, Procs};
pub use references::{References, Referred};
pub use shapes::Shapes;
pub use threads::{FiberLocals, Threads};
pub use tracing::{NoPlaces, Tracepoints, Tracing};
pub use walk::{Marks, Slot, each_object};

/// Why the heap could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeapError {
    /// No table has the layout of pages of this release.
    #[error("the layout of heap pages of this Ruby is not known")]
    Layout,
    /// The process has exited, or its memory cannot be read.
    #[error("{what} at {address:#x} cannot be read")]
    Unreadable {
        /// What was being read.
        what: &'static str,
        /// The address.
        address: u64,
    },
    /// The data read cannot be a heap. In a running process this happens when pages are added or removed; retry.
    #[error("{0}")]
    Implausible(String),
}
