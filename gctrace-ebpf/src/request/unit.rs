//! The state of the VM when a thread takes a request or a job, and when the thread finishes it.

use core::ptr;

use gctrace_common::{
    cookie::NO_REGISTER,
    event::{Header, Kind, SNAPSHOT_BYTES},
    request::{RequestEnd, Serving, UnitEvent, UnitPoint},
    stats::Counter,
};

use super::{end, memory, serving};
use crate::{
    filter::{Admitted, tgid_tid},
    maps::{REQUEST_RING, any_image, copies_states, count},
    ring::NO_WAKEUP,
    rubies, spans,
};

/// The last step of a hit, if one remains: notes the use of memory and copies the state for a unit that has begun or ends; a unit that ends is
/// emitted after that.
#[inline(always)]
pub fn settle(tgid: u32, tid: u32, now: u64) {
    let Some(serving) = serving(tgid, tid) else { return };
    let step = serving.step;
    if serving.begin_ns == 0 || step == Serving::NOTHING {
        serving.step = Serving::NOTHING;
        return;
    }
    memory::note(tgid, tid, step != Serving::TAKEN);
    if copies_states() {
        let _counted = verified_once_unit_state(now);
    }
    serving.step = Serving::NOTHING;
    if step != Serving::TAKEN {
        let how = match step {
            Serving::KEPT => RequestEnd::Kept,
            Serving::PUT_BACK => RequestEnd::Returned,
            _ => RequestEnd::Closed,
        };
        end(tgid, tid, serving, how, now);
    }
}

/// Copies the state for the step of the current thread at this time: a global function, which the verifier walks once and not once per
/// path to it. It can take only numbers, so it looks up the thread's entry. Returns 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_unit_state(now: u64) -> u64 {
    let (tgid, tid) = tgid_tid();
    let Some(serving) = serving(tgid, tid) else { return 0 };
    let point = if serving.step == Serving::TAKEN { UnitPoint::Begin } else { UnitPoint::End };
    count(Counter::UnitStates);
    if emitted(tgid, tid, point as u32, serving.begin_ns, now).is_none() {
        count(Counter::UnitStateReadFailed);
    }
    0
}

/// Emits the state, or counts that the ring is full; `None`: it could not be read.
#[inline(always)]
fn emitted(tgid: u32, tid: u32, point: u32, begin_ns: u64, now: u64) -> Option<()> {
    let ruby = rubies::known(tgid)?;
    // SAFETY: a map value pointer, valid while the program runs.
    let (image_index, bias, execs) = unsafe { ((*ruby).image, (*ruby).bias, (*ruby).execs) };
    let image = any_image(image_index)?;
    let vm = Admitted {
        tgid,
        tid,
        image_index,
        image,
        bias,
        site: 0,
        register: 0,
        field: NO_REGISTER,
        process: ptr::null_mut(),
    };
    let objspace = vm.objspace()?;
    let Some(mut slot) = REQUEST_RING.reserve::<UnitEvent>(0) else {
        count(Counter::UnitStateRingFull);
        return Some(());
    };
    let record: *mut UnitEvent = slot.as_mut_ptr();
    // SAFETY: the ring reserved a whole record, 8-byte aligned; fields are written in place because the record is larger than the BPF
    // stack. Both arrays have room for all spans.
    let filled = unsafe {
        (*record).header = Header {
            kind: Kind::Unit as u32,
            point,
            tgid,
            tid,
            ts_ns: now,
            seq: 0,
            image: image_index,
            execs,
        };
        (*record).begin_ns = begin_ns;
        let data: *mut u8 = (&raw mut (*record).data).cast();
        memory::copy(tid, &raw mut (*record).memory);
        let mut filled = spans::fill(&vm, objspace, data);
        if filled.is_ok() {
            filled = spans::fill(&vm, objspace, data.add(SNAPSHOT_BYTES));
        }
        filled
    };
    if filled.is_err() {
        slot.discard(NO_WAKEUP);
        return None;
    }
    slot.submit(NO_WAKEUP);
    count(Counter::UnitStateSubmitted);
    Some(())
}
