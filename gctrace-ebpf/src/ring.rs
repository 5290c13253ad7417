//! Whether a record wakes the reader of its ring buffer (`include/uapi/linux/bpf.h`).

use aya_ebpf::bindings::{BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP};

/// It does not: the reader drains on its own timer, or the record that follows wakes it.
pub const NO_WAKEUP: u64 = BPF_RB_NO_WAKEUP as u64;
/// It does. Without it the kernel wakes only a reader that has read everything before, which is never the case for the native frames of
/// the same stack.
pub const FORCE_WAKEUP: u64 = BPF_RB_FORCE_WAKEUP as u64;
