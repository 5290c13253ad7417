//! Plain-data marks for the loader's map API.

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::{
    config::{AwayEntry, Config, ImageConfig, ProcessEntry, RubyEntry, Span, ThreadContext},
    gvl::{GvlEdge, GvlEdgeKey, GvlKey, GvlLock, GvlTask, GvlThread},
    leak::{LeakPage, LeakTarget},
    malloc::{MallocBlock, MallocPending, MallocTally, MallocTarget},
    memory::MemoryLayout,
    request::{Serving, SocketLayout},
};

/// Marks types as plain data, if the compiler agrees: any bit pattern is a value, there is no padding and no interior mutability.
macro_rules! pod {
    ($($name:ty),* $(,)?) => {$(
        const _: () = {
            const fn proven<T: FromBytes + Immutable + IntoBytes + Copy>() {}
            proven::<$name>();
        };
        // SAFETY: the lines above do not compile unless the type is plain data.
        unsafe impl aya::Pod for $name {}
    )*};
}

pod!(
    Config,
    MemoryLayout,
    ImageConfig,
    ProcessEntry,
    Span,
    RubyEntry,
    ThreadContext,
    AwayEntry,
    GvlKey,
    GvlThread,
    GvlLock,
    GvlEdgeKey,
    GvlEdge,
    GvlTask,
    LeakPage,
    LeakTarget,
    MallocBlock,
    MallocPending,
    MallocTally,
    MallocTarget,
    Serving,
    SocketLayout,
);
