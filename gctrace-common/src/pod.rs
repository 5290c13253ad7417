//! Plain-data marks for the loader's map API.

use crate::config::{Config, ImageConfig, ProcessEntry, Span};

// SAFETY: `repr(C)`, only integers, no padding (sizes are asserted beside the definitions), any bit pattern valid.
unsafe impl aya::Pod for Config {}
// SAFETY: as above.
unsafe impl aya::Pod for ImageConfig {}
// SAFETY: as above.
unsafe impl aya::Pod for ProcessEntry {}
// SAFETY: as above.
unsafe impl aya::Pod for Span {}
