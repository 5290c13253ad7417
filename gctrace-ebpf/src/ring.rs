//! Whether a record wakes the reader of its ring buffer (`include/uapi/linux/bpf.h`).

use aya_ebpf::bindings::{BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP};

/// It does not wake the reader: the reader drains on its own timer, or a later record wakes it.
pub const NO_WAKEUP: u64 = BPF_RB_NO_WAKEUP as u64;
/// It wakes the reader. Without this flag the kernel wakes only a reader that has read everything before, which it never has if native
/// frames of the same stack precede the record.
pub const FORCE_WAKEUP: u64 = BPF_RB_FORCE_WAKEUP as u64;
