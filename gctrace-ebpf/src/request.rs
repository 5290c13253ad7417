//! HTTP requests: which one each thread of a server serves, derived from calls that the server makes anyway.
//!
//! `parse` and `reset` are calls of Puma's parser, which is identified by its address; `take`, `write` and `close` are calls on a
//! descriptor. A connection's descriptor and parser are associated when the thread that accepted the connection creates both, or
//! when a thread that has taken a request on the descriptor resets the parser after it.

mod application;
pub mod blocking;
pub mod job;
mod line;
mod memory;
mod record;
mod traceparent;
mod unit;

use aya_ebpf::{
    EbpfContext as _,
    helpers::{bpf_get_attach_cookie, bpf_ktime_get_ns},
    programs::ProbeContext,
};
use gctrace_common::{
    gvl::{GvlGate, OwnTimes, Step},
    job::JOB,
    memory::MemoryUse,
    request::{
        ALLOC_UNKNOWN, GVL_UNKNOWN, ParserKey, RequestEnd, RequestPoint, SENT_UNKNOWN, SERVES_HTTP,
        STATUS_BYTES, Serving,
    },
    stats::Counter,
    traceparent::Traceparent,
};

use crate::{
    filter::{still_selected, tgid_tid},
    maps::{
        BLANK_PARSER, BLANK_SERVING, CONNECTIONS, FETCHERS, NO_EXIST, PARSERS, SERVERS, SERVING, closed,
        count, gvl_gate, watches_alloc, watches_requests,
    },
    rubies, socket, tasks, usermem,
};

/// `IPPROTO_TCP` (include/uapi/linux/in.h).
const IPPROTO_TCP: u32 = 6;
/// `TCP_INFO` (include/uapi/linux/tcp.h).
const TCP_INFO: u32 = 11;

/// Hardware numbers of the registers of the first arguments (System V ABI for x86-64; elsewhere nothing is attached).
pub const FIRST: u8 = 7;
pub const SECOND: u8 = 6;
pub const THIRD: u8 = 2;

/// A thread at a call.
struct At<'a> {
    ctx: &'a ProbeContext,
    tgid: u32,
    tid: u32,
    now: u64,
}

/// One hit of a probe.
#[inline(always)]
pub fn hit(ctx: &ProbeContext) {
    let (tgid, tid) = tgid_tid();
    if !is_server(tgid, SERVES_HTTP) || closed() {
        return;
    }
    // SAFETY: a plain helper call with the program's own context.
    let cookie = unsafe { bpf_get_attach_cookie(ctx.as_ptr()) };
    // SAFETY: a plain helper call.
    let at = At { ctx, tgid, tid, now: unsafe { bpf_ktime_get_ns() } };
    let mut unsettled = false;
    match cookie {
        p if p == RequestPoint::Parse as u64 => parse(&at),
        p if p == RequestPoint::Reset as u64 => unsettled = reset(&at),
        p if p == RequestPoint::Take as u64 => unsettled = take(&at),
        p if p == RequestPoint::Accept as u64 => accept(&at),
        p if p == RequestPoint::Open as u64 => open(&at),
        p if p == RequestPoint::Close as u64 => unsettled = close(&at),
        p if p == RequestPoint::Local as u64 => unsettled = application::local(&at),
        p if p == RequestPoint::Encrypt as u64 => encrypt(&at),
        p => write::<true>(&at, p),
    }
    if unsettled {
        unit::settle(tgid, tid, at.now);
    }
    if cookie == RequestPoint::Reset as u64 {
        forget_line(&at);
    }
}

/// Whether a process is a server of this kind, and selected: it may have left its cgroup since.
#[inline(always)]
pub fn is_server(tgid: u32, kind: u32) -> bool {
    // SAFETY: the value is copied out at once.
    unsafe { SERVERS.get(&tgid).copied() }.is_some_and(|kinds| kinds & kind != 0) && still_selected(tgid)
}

/// Time at which the current thread took its request, if its parser is known; 0 if it serves none.
#[inline(always)]
pub fn current(tgid: u32, tid: u32) -> u64 {
    if !watches_requests() {
        return 0;
    }
    match serving(tgid, tid) {
        Some(serving) if serving.parser != 0 => serving.begin_ns,
        _ => 0,
    }
}

/// The same, for programs in which the verifier would walk it once per path to it.
#[inline(always)]
pub fn current_once(tgid: u32, tid: u32) -> u64 {
    if !watches_requests() {
        return 0;
    }
    verified_once_1_request(u64::from(tgid) << 32 | u64::from(tid))
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_1_request(thread: u64) -> u64 {
    current((thread >> 32) as u32, thread as u32)
}

/// A thread acquired the GVL. Its wait counts towards the request that it serves, if any.
#[inline(always)]
pub fn gvl_acquired(tgid: u32, tid: u32, step: Step, epoch: u32) {
    if !watches_requests() || SERVERS.get_ptr(&tgid).is_none() {
        return;
    }
    let ns = match step {
        Step::Paired(ns) => ns,
        Step::Continued | Step::Orphan => GVL_UNKNOWN,
    };
    verified_once_3_gvl_acquired(
        u64::from(tgid) << 32 | u64::from(tid),
        ns,
        u64::from(epoch.wrapping_add(1)),
    );
}

/// The same as a global function, which the verifier walks once and not once per path to it. Returns 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_3_gvl_acquired(thread: u64, ns: u64, epoch: u64) -> u64 {
    let Some(serving) = entry((thread >> 32) as u32, thread as u32) else { return 0 };
    let goes_on = serving.gvl_epoch == epoch as u32;
    serving.gvl_epoch = epoch as u32;
    if serving.begin_ns == 0 || serving.gvl_ns == GVL_UNKNOWN {
        return 0;
    }
    // Otherwise the gate was closed meanwhile.
    serving.gvl_ns = if goes_on && ns != GVL_UNKNOWN { serving.gvl_ns.wrapping_add(ns) } else { GVL_UNKNOWN };
    0
}

/// A thread took free slots of the heap: their number and size in bytes, or `None` if they are unknown. They count towards the request that
/// the thread serves, if any.
#[inline(always)]
pub fn took_slots(tgid: u32, tid: u32, taken: Option<(u32, u32)>) {
    if !watches_requests() || SERVERS.get_ptr(&tgid).is_none() {
        return;
    }
    let Some(serving) = serving(tgid, tid) else { return };
    if serving.begin_ns == 0 || serving.alloc_slots == ALLOC_UNKNOWN {
        return;
    }
    match taken {
        Some((slots, size)) => {
            serving.alloc_slots = serving.alloc_slots.wrapping_add(u64::from(slots));
            serving.alloc_bytes = serving.alloc_bytes.wrapping_add(u64::from(slots) * u64::from(size));
        }
        None => serving.alloc_slots = ALLOC_UNKNOWN,
    }
}

/// The number of slots of a thread that takes a request: 0 if the refill probe is known to be attached, because a refill of the process
/// was seen; otherwise [`ALLOC_UNKNOWN`].
#[inline(always)]
pub fn no_slots_yet(tgid: u32) -> u64 {
    // SAFETY: a map value pointer, valid while the program runs.
    let seen = watches_alloc() && rubies::known(tgid).is_some_and(|ruby| unsafe { (*ruby).refills } != 0);
    if seen { 0 } else { ALLOC_UNKNOWN }
}

/// Whether the thread's waits for the GVL are added up: it was seen to acquire the GVL in the current epoch.
#[inline(always)]
pub fn sees_gvl(serving: &Serving) -> bool {
    let gate = gvl_gate();
    gate.level != GvlGate::CLOSED && serving.gvl_epoch == gate.epoch.wrapping_add(1)
}

/// Writes the times of the running thread since it took its request.
///
/// # Safety
/// `to` must be valid for writing and 8-byte aligned.
#[inline(always)]
pub unsafe fn own_times_since(tid: u32, serving: &Serving, now: u64, to: *mut OwnTimes) {
    // SAFETY: the caller's promise.
    unsafe {
        let epoch = tasks::own_times(tid, now, to);
        if epoch != 0 && epoch == serving.times_epoch {
            (*to).subtract(&serving.times);
        } else {
            *to = OwnTimes::UNKNOWN;
        }
    }
}

/// Stores the current times of a thread that takes a request or a job.
#[inline(always)]
fn keep_times(tid: u32, serving: &mut Serving, now: u64) {
    // SAFETY: a reference.
    serving.times_epoch = unsafe { tasks::own_times(tid, now, &raw mut serving.times) };
}

/// A thread ended.
#[inline(always)]
pub fn thread_ended(tgid: u32, tid: u32) {
    // Requests that are open when the run ends are counted by user space.
    if closed() {
        return;
    }
    if let Some(serving) = serving(tgid, tid) {
        if serving.begin_ns != 0 {
            memory::thread_ended(tgid, tid);
            // SAFETY: a plain helper call.
            end(tgid, tid, serving, RequestEnd::Gone, unsafe { bpf_ktime_get_ns() });
        }
        let _may_be_none = FETCHERS.remove(&tid);
        let _gone = SERVING.remove(&tid);
    }
    if tgid == tid {
        let _gone = SERVERS.remove(&tgid);
    }
}

/// A process replaced its program: the entries of its connections are no longer used. `tid`: the thread that did so, by the tid that it
/// had until then.
#[inline(always)]
pub fn execed(tgid: u32, tid: u32) {
    thread_ended(tgid, tid);
    let _gone = SERVERS.remove(&tgid);
}

/// The entry of the current thread.
#[inline(always)]
fn serving(tgid: u32, tid: u32) -> Option<&'static mut Serving> {
    let entry = SERVING.get_ptr_mut(&tid)?;
    // SAFETY: a map value pointer, valid while the program runs; only this thread uses this key.
    let serving = unsafe { &mut *entry };
    if serving.tgid == tgid { Some(serving) } else { None }
}

/// The same, created if missing; `None` if the map is full.
#[inline(always)]
pub fn entry(tgid: u32, tid: u32) -> Option<&'static mut Serving> {
    if let Some(serving) = serving(tgid, tid) {
        return Some(serving);
    }
    // On the stack it would take a third of what a call chain may use ("combined stack size of 3 calls is 544. Too large", Linux 6.1).
    let blank = BLANK_SERVING.get(0)?;
    if SERVING.insert(&tid, blank, 0).is_err() {
        count(Counter::RequestMapFull);
        return None;
    }
    let entry = SERVING.get_ptr_mut(&tid)?;
    // SAFETY: as above.
    let serving = unsafe { &mut *entry };
    serving.tgid = tgid;
    Some(serving)
}

#[inline(always)]
fn connection(tgid: u32, fd: u32) -> u64 {
    u64::from(tgid) << 32 | u64::from(fd)
}

#[inline(always)]
fn first(at: &At<'_>) -> u64 {
    usermem::register(at.ctx, FIRST)
}

#[inline(always)]
fn second(at: &At<'_>) -> u64 {
    usermem::register(at.ctx, SECOND)
}

#[inline(always)]
fn third(at: &At<'_>) -> u64 {
    usermem::register(at.ctx, THIRD)
}

/// A parser receives all bytes of a request that have arrived so far.
#[inline(always)]
fn parse(at: &At<'_>) {
    let parser = first(at);
    if let Some(serving) = serving(at.tgid, at.tid)
        && serving.begin_ns != 0
        && serving.parser != parser
        && serving.parser != 0
        && serving.phase != Serving::CALLED
    {
        // It no longer serves its request. (If the parser of its request is unknown, it may be this one.)
        end(at.tgid, at.tid, serving, RequestEnd::Left, at.now);
    }
    let key = ParserKey { parser, tgid: at.tgid, reserved: 0 };
    let mut entry = PARSERS.get_ptr_mut(&key);
    if entry.is_none() {
        let Some(blank) = BLANK_PARSER.get(0) else { return };
        let _may_be_full = PARSERS.insert(&key, blank, NO_EXIST);
        entry = PARSERS.get_ptr_mut(&key);
    }
    let Some(entry) = entry else { return };
    // SAFETY: a map value pointer, valid while the program runs; Puma gives a connection to one thread at a time.
    let parsed = unsafe { &mut *entry };
    if parsed.first_ns == 0 {
        parsed.first_ns = at.now;
        (parsed.searched, parsed.headers) = (0, 0);
        parsed.traceparent = Traceparent::Unread as u32;
    }
    parsed.last_ns = at.now;
    parsed.tid = at.tid;
    if !line::is_complete(parsed) {
        line::copy(parser, parsed, second(at), third(at));
    }
    traceparent::look(parser, parsed, second(at), third(at));
}

/// A parser is reset for the next request, or for the first one. Returns whether the request of the current thread ends.
#[inline(always)]
fn reset(at: &At<'_>) -> bool {
    let parser = first(at);
    let Some(serving) = serving(at.tgid, at.tid) else { return false };
    let accepted = serving.accepted;
    serving.accepted = 0;
    // If the thread serves a request, a connection that it accepted belongs to the application and not to the server.
    if accepted != 0 && serving.begin_ns == 0 {
        let fd = accepted - 1;
        let _may_be_full = CONNECTIONS.insert(&connection(at.tgid, fd), &parser, 0);
        return false;
    }
    if serving.begin_ns == 0 {
        return false;
    }
    let is_unbound = serving.parser == Serving::UNBOUND && serving.phase == Serving::ANSWERED;
    if serving.parser == 0 || is_unbound {
        serving.parser = parser;
        let _may_be_full = CONNECTIONS.insert(&connection(at.tgid, serving.fd), &parser, 0);
    }
    if serving.parser != parser {
        return false;
    }
    serving.step = Serving::KEPT;
    true
}

/// Discards what the parser was given: it belongs to a request that is over.
#[inline(always)]
fn forget_line(at: &At<'_>) {
    let key = ParserKey { parser: first(at), tgid: at.tgid, reserved: 0 };
    if let Some(entry) = PARSERS.get_ptr_mut(&key) {
        // SAFETY: as above.
        unsafe {
            (*entry).first_ns = 0;
            (*entry).len = 0;
        }
    }
}

/// A thread takes a request, if the call is a `getsockopt` for `TCP_INFO`. Returns whether it does.
#[inline(always)]
fn take(at: &At<'_>) -> bool {
    if second(at) as u32 != IPPROTO_TCP || third(at) as u32 != TCP_INFO {
        return false;
    }
    let fd = first(at) as u32;
    let Some(serving) = entry(at.tgid, at.tid) else { return false };
    // SAFETY: the value is copied out at once.
    let parser = unsafe { CONNECTIONS.get(&connection(at.tgid, fd)).copied() }.unwrap_or(0);
    if serving.begin_ns != 0 {
        if serving.fd == fd && !arrived_since(at.tgid, parser, serving.begin_ns) {
            // Puma 6 and later make the call again before they answer.
            return false;
        }
        let has_own = serving.parser != 0 && serving.parser != Serving::UNBOUND && serving.fd != fd;
        if parser == 0 && (has_own || serving.phase == Serving::CALLED) {
            // No parser has read from this connection: the application queries a connection of its own.
            return false;
        }
        end(at.tgid, at.tid, serving, RequestEnd::Left, at.now);
    }
    begin(at, serving, fd, parser);
    true
}

/// Whether a parser got the first bytes of what it has after `begin_ns`. A request is taken after it has been parsed, so these bytes belong to
/// another request: the previous connection was handed over to the application and closed by another thread, and its descriptor was reused.
#[inline(always)]
fn arrived_since(tgid: u32, parser: u64, begin_ns: u64) -> bool {
    let key = ParserKey { parser, tgid, reserved: 0 };
    // SAFETY: a map value pointer, valid while the program runs.
    PARSERS.get_ptr(&key).is_some_and(|parsed| unsafe { (*parsed).first_ns } > begin_ns)
}

/// A thread takes a request on a connection. What remains to be done is up to [`unit::settle`].
#[inline(always)]
fn begin(at: &At<'_>, serving: &mut Serving, fd: u32, parser: u64) {
    serving.fd = fd;
    serving.parser = parser;
    serving.first_write_ns = 0;
    serving.last_write_ns = 0;
    serving.status = [0; STATUS_BYTES];
    serving.gvl_ns = if sees_gvl(serving) { 0 } else { GVL_UNKNOWN };
    (serving.alloc_slots, serving.alloc_bytes) = (no_slots_yet(at.tgid), 0);
    serving.memory = MemoryUse::UNKNOWN;
    keep_times(at.tid, serving, at.now);
    let _in_the_entry = verified_once_look_at_connection(u64::from(fd));
    (serving.phase, serving.early) = (Serving::LOOKED_AT, 0);
    serving.begin_ns = at.now;
    serving.step = Serving::TAKEN;
    count(Counter::Requests);
}

/// Records when data arrived on the connection of the current thread, and how much was written on it: a global function, whose frame is not
/// part of the longest call chain ("combined stack size of 5 calls is 544. Too large", Linux 6.1). Returns 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_look_at_connection(fd: u64) -> u64 {
    let (tgid, tid) = tgid_tid();
    let Some(serving) = serving(tgid, tid) else { return 0 };
    serving.arrival_ns = socket::arrival_ns(fd as u32, &mut serving.written);
    0
}

/// Number of bytes written on the connection since then: a global function for the same reason.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_sent_bytes(fd: u64) -> u64 {
    let (tgid, tid) = tgid_tid();
    let Some(serving) = serving(tgid, tid) else { return SENT_UNKNOWN };
    socket::sent_bytes(fd as u32, &serving.written)
}

#[inline(always)]
fn accept(at: &At<'_>) {
    if let Some(serving) = entry(at.tgid, at.tid) {
        serving.accepting = 1;
        serving.accepted = 0;
    }
}

/// A thread has a new descriptor; the first after a call of `accept4` is that of the connection.
#[inline(always)]
fn open(at: &At<'_>) {
    if let Some(serving) = serving(at.tgid, at.tid)
        && serving.accepting != 0
    {
        serving.accepting = 0;
        serving.accepted = (first(at) as u32).wrapping_add(1);
        // The previous descriptor with this number is closed, seen or not.
        let _gone = CONNECTIONS.remove(&connection(at.tgid, first(at) as u32));
    }
}

/// A thread writes. `PUMA`: the connection of its request may be unknown.
#[inline(always)]
fn write<const PUMA: bool>(at: &At<'_>, point: u64) {
    let Some(serving) = serving(at.tgid, at.tid) else { return };
    if serving.begin_ns == 0 {
        return;
    }
    let is_unknown = PUMA && (serving.phase == Serving::CALLED || serving.phase == Serving::RETURNED);
    if !is_unknown && serving.fd != first(at) as u32 {
        return;
    }
    let begin = if is_unknown || is_status_wanted(serving) { written(at, point) } else { None };
    let begins_response = begin.is_some_and(|begin| begins_response(&begin));
    if is_unknown {
        application::bind(at, serving, begins_response);
        if serving.fd != first(at) as u32 {
            return;
        }
    }
    if serving.first_write_ns == 0 {
        serving.first_write_ns = at.now;
    }
    serving.last_write_ns = at.now;
    if begins_response && let Some(begin) = begin {
        serving.status = begin;
    }
}

/// A thread is about to encrypt a part of a response. Puma does so for the connection of its request only.
#[inline(always)]
fn encrypt(at: &At<'_>) {
    let Some(serving) = serving(at.tgid, at.tid) else { return };
    if serving.begin_ns == 0 || !is_status_wanted(serving) {
        return;
    }
    if let Some(begin) = usermem::read(second(at))
        && begins_response(&begin)
    {
        serving.status = begin;
    }
}

/// Whether bytes are the start of a response, such as `HTTP/1.1 200`.
#[inline(always)]
fn begins_response(begin: &[u8; STATUS_BYTES]) -> bool {
    begin[0] == b'H' && begin[1] == b'T' && begin[4] == b'/' && begin[8] == b' '
}

/// Whether no final response has begun. The byte after `HTTP/1.1 ` is `1` in interim responses (1xx), which come before it.
#[inline(always)]
fn is_status_wanted(serving: &Serving) -> bool {
    serving.status[9] == 0 || serving.status[9] == b'1'
}

/// The first bytes of what a thread writes.
#[inline(always)]
fn written(at: &At<'_>, point: u64) -> Option<[u8; STATUS_BYTES]> {
    let mut buffer = second(at);
    if point == RequestPoint::SendMessage as u64 {
        /// Offset of `msg_iov` in `struct msghdr`.
        const VECTORS: u64 = 16;
        buffer = usermem::read(buffer.wrapping_add(VECTORS)).unwrap_or(0);
    }
    if point != RequestPoint::Write as u64 {
        buffer = usermem::read(buffer).unwrap_or(0);
    }
    usermem::read(buffer)
}

/// A descriptor is closed. Returns whether the request of the current thread ends.
#[inline(always)]
fn close(at: &At<'_>) -> bool {
    let fd = first(at) as u32;
    let _gone = CONNECTIONS.remove(&connection(at.tgid, fd));
    let Some(serving) = serving(at.tgid, at.tid) else { return false };
    if serving.begin_ns == 0 || serving.fd != fd {
        return false;
    }
    serving.step = Serving::CLOSED;
    true
}

/// Emits the request that a thread serves.
#[inline(always)]
pub fn end(tgid: u32, tid: u32, serving: &mut Serving, how: RequestEnd, now: u64) {
    if serving.parser == JOB {
        job::emit(tgid, tid, serving, how, now);
    } else {
        record::emit(tgid, tid, serving, how, now);
    }
    serving.begin_ns = 0;
}
