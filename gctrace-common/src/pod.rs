//! Plain-data marks for the loader's map API.

use crate::{
    config::{AwayEntry, Config, ImageConfig, ProcessEntry, RubyEntry, Span},
    gvl::{GvlEdge, GvlEdgeKey, GvlKey, GvlLock, GvlTask, GvlThread},
    memory::MemoryLayout,
};

// SAFETY: `repr(C)`, only integers, no padding (sizes are asserted beside the definitions), any bit pattern valid.
unsafe impl aya::Pod for Config {}
// SAFETY: as above.
unsafe impl aya::Pod for MemoryLayout {}
// SAFETY: as above.
unsafe impl aya::Pod for ImageConfig {}
// SAFETY: as above.
unsafe impl aya::Pod for ProcessEntry {}
// SAFETY: as above.
unsafe impl aya::Pod for Span {}
// SAFETY: as above.
unsafe impl aya::Pod for RubyEntry {}
// SAFETY: as above.
unsafe impl aya::Pod for AwayEntry {}
// SAFETY: as above.
unsafe impl aya::Pod for GvlKey {}
// SAFETY: as above.
unsafe impl aya::Pod for GvlThread {}
// SAFETY: as above.
unsafe impl aya::Pod for GvlLock {}
// SAFETY: as above.
unsafe impl aya::Pod for GvlEdgeKey {}
// SAFETY: as above.
unsafe impl aya::Pod for GvlEdge {}
// SAFETY: as above.
unsafe impl aya::Pod for GvlTask {}
