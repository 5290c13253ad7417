//! The kernel side: loading the object, attaching it, reading its rings. The only module that names aya.

mod alone;
mod attach;
mod check;
mod cpus;
mod errors;
mod execs;
mod gvl;
mod kernel_types;
mod leak;
mod lease;
#[cfg(feature = "bpf-log")]
mod lines;
mod links;
mod load;
mod lru;
mod malloc;
mod mmaps;
mod multi;
mod parallel;
mod programs;
#[expect(unsafe_code, reason = "system calls that no library wraps safely")]
mod raw;
mod requests;
mod rings;
mod sample;
mod tracepoint;
mod unwind;

use std::io::ErrorKind;

use aya::maps::MapError;

pub use alone::ProbeStacks;
pub use attach::{
    Probes,
    requests::{ArrivalsLink, RequestLinks},
    uprobes::Scope,
};
pub use check::{CheckResult, KernelCheck, check};
pub use errors::{AttachError, LoadError, brief};
pub use execs::ExecReader;
pub use gvl::{GvlOptions, GvlRead, GvlReader};
pub use leak::LeakProbes;
pub use lease::{Content, Lease};
pub use load::{LoadOptions, Loaded, Select, load};
pub use malloc::{MallocCost, MallocProbes, MallocRead};
pub use mmaps::{ExecMapping, FileId, MappingWatch, WatchError, Watched};
pub use raw::give_back_memory;
pub use requests::{RequestOptions, RequestReader};
pub use rings::{AwayMap, CounterReader, LifeRing, Rings, StackRing};
pub use sample::StackOptions;
pub use unwind::{NativeMaps, ThreadContexts, UnwindMaps};

/// The result of removing a map entry that the programs may already have removed.
fn gone(removed: Result<(), MapError>) -> Result<(), MapError> {
    match removed {
        Err(MapError::KeyNotFound) => Ok(()),
        // Aya's `HashMap::remove` does not distinguish a missing entry from other errors.
        Err(MapError::SyscallError(error)) if error.io_error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
