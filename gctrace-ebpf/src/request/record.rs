//! The record of an HTTP request that a thread has served.

use gctrace_common::{
    event::{Header, Kind},
    request::{GVL_UNKNOWN, LINE_BYTES, ParserKey, RequestEnd, RequestEvent, SENT_UNKNOWN, Serving},
    stats::Counter,
    traceparent::{Traceparent, VALUE_WORDS},
};

use super::{memory, own_times_since, sees_gvl, verified_once_sent_bytes};
use crate::{
    maps::{PARSERS, PROCESSES, REQUEST_RING, count},
    ring::NO_WAKEUP,
    rubies,
};

/// Emits the request that a thread serves.
#[inline(always)]
pub fn emit(tgid: u32, tid: u32, serving: &Serving, how: RequestEnd, now: u64) {
    if serving.parser == 0 {
        return count(Counter::RequestNotHttp);
    }
    if serving.phase == Serving::CALLED || serving.phase == Serving::RETURNED {
        return count(Counter::RequestUnanswered);
    }
    // SAFETY: map values, read at once.
    let (image, execs) =
        rubies::known(tgid).map_or((u32::MAX, 0), |ruby| unsafe { ((*ruby).image, (*ruby).execs) });
    let Some(mut slot) = REQUEST_RING.reserve::<RequestEvent>(0) else {
        return count(Counter::RequestRingFull);
    };
    let record: *mut RequestEvent = slot.as_mut_ptr();
    let key = ParserKey { parser: serving.parser, tgid, reserved: 0 };
    let mut trace = Traceparent::Unread as u32;
    // SAFETY: the ring reserved a whole record, 8-byte aligned; what has been parsed is a map value, valid while the
    // program runs.
    unsafe {
        (*record).header = Header {
            kind: Kind::Request as u32,
            point: how as u32,
            tgid,
            tid,
            ts_ns: now,
            seq: 0,
            image,
            execs,
        };
        (*record).begin_ns = serving.begin_ns;
        (*record).first_write_ns =
            if serving.first_write_ns == Serving::UNKNOWN_NS { 0 } else { serving.first_write_ns };
        (*record).last_write_ns = serving.last_write_ns;
        (*record).arrival_ns = serving.arrival_ns;
        (*record).status = serving.status;
        (*record).gvl_ns = if sees_gvl(serving) { serving.gvl_ns } else { GVL_UNKNOWN };
        own_times_since(tid, serving, now, &raw mut (*record).times);
        ((*record).alloc_slots, (*record).alloc_bytes) = (serving.alloc_slots, serving.alloc_bytes);
        (*record).memory = memory::of(serving, how);
        // In the other cases other threads may write on its connection, too.
        (*record).sent_bytes = match how {
            RequestEnd::Kept | RequestEnd::Closed => verified_once_sent_bytes(u64::from(serving.fd)),
            RequestEnd::Left | RequestEnd::Gone | RequestEnd::Returned => SENT_UNKNOWN,
        };
        (*record).pause_ns = PROCESSES.get(&tgid).map_or(0, |process| process.pause_ns);
        (*record).first_ns = 0;
        (*record).parsed_ns = 0;
        (*record).len = 0;
        (*record).traceparent = Traceparent::Unread as u32;
        (*record).reserved = 0;
        // Bytes parsed later belong to another request: after a connection was handed over, the memory of its parser may be that of a new parser.
        if let Some(parsed) = PARSERS.get_ptr(&key)
            && (*parsed).first_ns != 0
            && (*parsed).first_ns <= serving.begin_ns
        {
            (*record).first_ns = (*parsed).first_ns;
            (*record).parsed_ns = (*parsed).last_ns;
            (*record).len = (*parsed).len;
            let from: *const u64 = (&raw const (*parsed).line).cast();
            let to: *mut u64 = (&raw mut (*record).line).cast();
            for word in 0..LINE_BYTES / 8 {
                // Volatile, or LLVM turns it into a call of memcpy, which BPF lacks.
                to.add(word).write_volatile(from.add(word).read_volatile());
            }
            trace = (*parsed).traceparent;
            (*record).traceparent = trace;
            let from: *const u64 = (&raw const (*parsed).value).cast();
            let to: *mut u64 = (&raw mut (*record).value).cast();
            for word in 0..VALUE_WORDS {
                to.add(word).write_volatile(from.add(word).read_volatile());
            }
        }
    }
    slot.submit(NO_WAKEUP);
    count(Counter::RequestSubmitted);
    if trace == Traceparent::Invalid as u32 {
        count(Counter::TraceparentInvalid);
    } else if trace == Traceparent::Unread as u32 {
        count(Counter::TraceparentUnread);
    }
}
