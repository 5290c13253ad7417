//! Viewing bytes as a record.

use gctrace_common::{
    event::{LifeEvent, PauseEvent, PhaseEvent, SnapshotEvent},
    gvl::{GvlSpanEvent, GvlThread, GvlWaitEvent},
    stack::{NativeEvent, OffCpuEvent, RubyFrame, StackEvent},
};

/// Marks types of which any bit pattern is a valid value.
///
/// # Safety
/// The type must be `repr(C)` and consist of integers and byte arrays only.
pub(super) unsafe trait Plain {}

// SAFETY: `repr(C)`, integers and byte arrays only (see gctrace-common).
unsafe impl Plain for SnapshotEvent {}
// SAFETY: as above.
unsafe impl Plain for PauseEvent {}
// SAFETY: as above.
unsafe impl Plain for PhaseEvent {}
// SAFETY: as above.
unsafe impl Plain for LifeEvent {}
// SAFETY: as above.
unsafe impl Plain for StackEvent {}
// SAFETY: as above.
unsafe impl Plain for NativeEvent {}
// SAFETY: as above.
unsafe impl Plain for OffCpuEvent {}
// SAFETY: as above.
unsafe impl Plain for RubyFrame {}
// SAFETY: as above.
unsafe impl Plain for GvlWaitEvent {}
// SAFETY: as above.
unsafe impl Plain for GvlThread {}
// SAFETY: as above.
unsafe impl Plain for GvlSpanEvent {}
// SAFETY: as above.
unsafe impl Plain for u64 {}

/// The record at the start of `bytes`; `None` if they are too few or misaligned (the kernel aligns to 8 bytes).
pub(super) fn view<T: Plain>(bytes: &[u8]) -> Option<&T> {
    if bytes.len() < size_of::<T>() || !bytes.as_ptr().cast::<T>().is_aligned() {
        return None;
    }
    // SAFETY: length and alignment were checked, any bit pattern is valid, and the borrow is kept.
    Some(unsafe { &*bytes.as_ptr().cast::<T>() })
}

/// The `count` values that follow the first `skip` bytes; `None` if they are too few or misaligned.
pub(super) fn list<T: Plain>(bytes: &[u8], skip: usize, count: usize) -> Option<&[T]> {
    let bytes = bytes.get(skip..)?.get(..count.checked_mul(size_of::<T>())?)?;
    if !bytes.as_ptr().cast::<T>().is_aligned() {
        return None;
    }
    // SAFETY: length and alignment were checked, any bit pattern is valid, and the borrow is kept.
    Some(unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), count) })
}
