//! Copies the parts of the objspace that an image's configuration lists.

use gctrace_common::{
    config::Span,
    event::{SLOT_BYTES, SLOTS},
};

use crate::{filter::Admitted, thread, usermem};

/// Copies the spans of the objspace. Fails if one could not be read.
///
/// # Safety
/// `data` must be valid for `SLOTS * SLOT_BYTES` bytes of writing.
#[inline(always)]
pub unsafe fn fill(admitted: &Admitted, objspace: u64, data: *mut u8) -> Result<(), ()> {
    let used = admitted.image.spans as usize;
    let mut block = 0;
    for slot in 0..SLOTS {
        if slot >= used {
            break;
        }
        let span = admitted.image.span[slot];
        // SAFETY: the slot is inside `data`.
        let target = unsafe { data.add(slot * SLOT_BYTES) };
        let base = match span.via {
            Span::DIRECT => objspace,
            Span::CACHE | Span::LOCAL => {
                if block == 0 {
                    block = thread::block(admitted).ok_or(())?;
                }
                if span.via == Span::LOCAL {
                    thread::local(admitted, block).ok_or(())?
                } else {
                    thread::object_cache(admitted, block).ok_or(())?
                }
            }
            pointer => usermem::read(objspace.wrapping_add(u64::from(pointer))).ok_or(())?,
        };
        if base == 0 {
            // SAFETY: as above; a slot is SLOT_BYTES long and 8-byte aligned.
            unsafe { zero(target) };
            continue;
        }
        // SAFETY: the copy is bounded by the size of the slot.
        unsafe {
            usermem::copy::<{ SLOT_BYTES as u32 }>(
                base.wrapping_add(u64::from(span.offset)),
                u32::from(span.len),
                target,
            )?;
        }
    }
    Ok(())
}

/// # Safety
/// `slot` must be valid for [`SLOT_BYTES`] bytes of writing and 8-byte aligned.
#[inline(always)]
unsafe fn zero(slot: *mut u8) {
    for word in 0..SLOT_BYTES / 8 {
        // SAFETY: the caller's promise. Volatile, or LLVM turns it into a call of memset, which BPF lacks.
        unsafe { slot.cast::<u64>().add(word).write_volatile(0) };
    }
}
