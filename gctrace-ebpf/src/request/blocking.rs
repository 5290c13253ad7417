//! Requests of Unicorn and WEBrick: one thread reads a request from a connection, serves it, and answers it before it reads the next one.
//!
//! A connection is identified by its descriptor. [`gctrace_common::blocking`] describes which calls mean that a thread takes a request; a
//! request ends when its connection is closed, or when it has been answered and its thread waits for the next one.

use aya_ebpf::{
    EbpfContext as _,
    helpers::{bpf_get_attach_cookie, bpf_ktime_get_ns},
    programs::ProbeContext,
};
use gctrace_common::{
    blocking::{ACCEPTED, BlockingPoint, DESCRIPTOR, IS_WEBRICK, MAY_BE_WEBRICK, SERVES_UNICORN, TRIED},
    request::{LINE_BYTES, Parsed, ParserKey, RequestEnd, SERVES_HTTP, Serving},
    stats::Counter,
    traceparent::Traceparent,
};

use super::{
    At, FIRST, SECOND, accept, begin, close, connection, end, entry, first, line, memory, second, serving,
    traceparent::pieces, unit, write,
};
use crate::{
    filter::{still_selected, tgid_tid},
    maps::{BLANK_PARSER, CONNECTIONS, LISTEN_RING, NO_EXIST, PARSERS, SERVERS, closed, count},
    usermem,
};

/// Hardware number of the register that holds the result of a function.
const RESULT: u8 = 0;
/// Maximum number of bytes that are checked for a method and the space after it.
const METHOD: usize = 12;
/// Maximum bytes kept of a later piece of a request while half of the buffer is free.
const HALF: u32 = LINE_BYTES as u32 / 2;
/// The same while an eighth is free.
const EIGHTH: u32 = LINE_BYTES as u32 / 8;

/// One hit of a probe.
#[inline(always)]
pub fn hit(ctx: &ProbeContext) {
    if closed() {
        return;
    }
    let (tgid, tid) = tgid_tid();
    // SAFETY: the value is copied out at once.
    let kinds = unsafe { SERVERS.get(&tgid).copied() }.unwrap_or(0);
    // SAFETY: a plain helper call with the program's own context.
    let cookie = unsafe { bpf_get_attach_cookie(ctx.as_ptr()) };
    if cookie == BlockingPoint::Listen as u64 {
        // What is watched in a Puma depends on what it listens on.
        if kinds == 0 || kinds & SERVES_HTTP != 0 {
            listens(tgid);
        }
        return;
    }
    if kinds & (SERVES_UNICORN | MAY_BE_WEBRICK) == 0 || !still_selected(tgid) {
        return;
    }
    let unicorn = kinds & SERVES_UNICORN != 0;
    // SAFETY: a plain helper call.
    let at = At { ctx, tgid, tid, now: unsafe { bpf_ktime_get_ns() } };
    // The data that has been read, if the hit is after a read.
    let read = has_read(&at, cookie);
    let fd = match cookie {
        p if p == BlockingPoint::Accepted as u64 => usermem::register(ctx, RESULT) as u32,
        p if p == BlockingPoint::Received as u64 || p == BlockingPoint::HasRead as u64 => read.fd,
        _ => first(&at) as u32,
    };
    leave(&at, cookie, fd, unicorn);
    let mut unsettled = false;
    match cookie {
        p if p == BlockingPoint::Announce as u64 => unsettled = announce(&at, fd, unicorn),
        p if p == BlockingPoint::Wait as u64 => unsettled = wait(&at, unicorn),
        p if p == BlockingPoint::Accept as u64 => accept(&at),
        p if p == BlockingPoint::Open as u64 => open(&at, fd, kinds),
        p if p == BlockingPoint::Accepted as u64 => accepted(&at, fd, kinds),
        p if p == BlockingPoint::Read as u64 => reads(&at),
        p if p == BlockingPoint::Received as u64 || p == BlockingPoint::HasRead as u64 => {
            unsettled = received(&at, &read, unicorn);
        }
        p if p == BlockingPoint::Close as u64 => unsettled = close(&at),
        p => write::<false>(&at, p),
    }
    if unsettled {
        unit::settle(tgid, tid, at.now);
    }
    if cookie == BlockingPoint::Close as u64 {
        let _may_be_none = PARSERS.remove(&key(tgid, fd));
    } else if unsettled && cookie == BlockingPoint::Wait as u64 {
        forget(&at);
    }
}

/// Reports a process that begins to listen and is not a server yet, or is a Puma.
#[inline(always)]
fn listens(tgid: u32) {
    if LISTEN_RING.output::<u64>(u64::from(tgid), 0).is_err() {
        count(Counter::RequestMapFull);
    }
}

#[inline(always)]
fn key(tgid: u32, fd: u32) -> ParserKey {
    ParserKey { parser: DESCRIPTOR | u64::from(fd), tgid, reserved: 0 }
}

/// What has been read on a connection; created if missing.
#[inline(always)]
fn parsed(key: &ParserKey) -> Option<&'static mut Parsed> {
    if PARSERS.get_ptr(key).is_none() {
        let blank = BLANK_PARSER.get(0)?;
        let _may_be_full = PARSERS.insert(key, blank, NO_EXIST);
    }
    let entry = PARSERS.get_ptr_mut(key)?;
    // SAFETY: a map value pointer, valid while the program runs; a connection is read by one thread at a time.
    Some(unsafe { &mut *entry })
}

/// What a thread has read.
struct Read {
    fd: u32,
    buffer: u64,
    /// Number of bytes; 0: nothing was read.
    len: u64,
}

#[inline(always)]
fn has_read(at: &At<'_>, cookie: u64) -> Read {
    let mut read = Read { fd: u32::MAX, buffer: 0, len: 0 };
    let result = usermem::register(at.ctx, RESULT) as i64;
    let len = if result > 0 { result as u64 } else { 0 };
    if cookie == BlockingPoint::Received as u64 {
        read = Read { fd: first(at) as u32, buffer: second(at), len };
    } else if cookie == BlockingPoint::HasRead as u64
        && let Some(serving) = serving(at.tgid, at.tid)
        && serving.buffer != 0
    {
        read = Read { fd: serving.reading, buffer: serving.buffer, len };
        serving.buffer = 0;
    }
    read
}

/// A thread is about to read.
#[inline(always)]
fn reads(at: &At<'_>) {
    if let Some(serving) = entry(at.tgid, at.tid) {
        serving.reading = usermem::register(at.ctx, FIRST) as u32;
        serving.buffer = usermem::register(at.ctx, SECOND);
    }
}

/// Whether a final response has begun: interim ones are `1xx`.
#[inline(always)]
fn is_answered(serving: &Serving) -> bool {
    serving.status[9] > b'1'
}

/// Ends the request of a thread if this hit shows that the thread no longer serves it.
#[inline(always)]
fn leave(at: &At<'_>, cookie: u64, fd: u32, unicorn: bool) {
    let Some(serving) = serving(at.tgid, at.tid) else { return };
    if serving.begin_ns == 0 {
        return;
    }
    let how = match cookie {
        // The connection was handed over.
        p if p == BlockingPoint::Accepted as u64 || p == BlockingPoint::Accept as u64 => RequestEnd::Left,
        // A new connection with the same descriptor; the close of the previous one was not seen.
        p if p == BlockingPoint::HasRead as u64 || p == BlockingPoint::Received as u64 => {
            if unicorn || serving.fd != fd || !is_answered(serving) {
                return;
            }
            RequestEnd::Left
        }
        // The next request arrived together with this one.
        p if p == BlockingPoint::Announce as u64 => {
            if unicorn || serving.fd != fd || !is_answered(serving) {
                return;
            }
            serving.announced = fd.wrapping_add(1);
            RequestEnd::Kept
        }
        _ => return,
    };
    if matches!(how, RequestEnd::Kept) {
        memory::note(at.tgid, at.tid, true);
    }
    end(at.tgid, at.tid, serving, how, at.now);
    forget(at);
}

/// Discards what has been read on the connection of the thread's last request: it belongs to a request that is over.
#[inline(always)]
fn forget(at: &At<'_>) {
    let Some(serving) = serving(at.tgid, at.tid) else { return };
    if let Some(entry) = PARSERS.get_ptr_mut(&key(at.tgid, serving.fd)) {
        // SAFETY: a map value pointer, valid while the program runs; only this thread reads on the connection.
        unsafe {
            (*entry).first_ns = 0;
            (*entry).len = 0;
        }
    }
}

/// A process has a new connection.
#[inline(always)]
fn connected(at: &At<'_>, fd: u32, kinds: u32) {
    let key = key(at.tgid, fd);
    let _of_an_earlier_one = PARSERS.remove(&key);
    let _may_be_full = CONNECTIONS.insert(&connection(at.tgid, fd), &key.parser, 0);
    if kinds & SERVES_UNICORN != 0 {
        if let Some(serving) = entry(at.tgid, at.tid) {
            serving.announced = fd.wrapping_add(1);
        }
    } else if kinds & IS_WEBRICK == 0
        && kinds < ACCEPTED * TRIED
        && let Some(kinds) = SERVERS.get_ptr_mut(&at.tgid)
    {
        // SAFETY: as above. An increment by another thread may be lost: the number only limits the attempts.
        unsafe { *kinds = (*kinds).wrapping_add(ACCEPTED) };
    }
}

/// A thread has a new descriptor; the first after a call of `accept4` is that of the connection.
#[inline(always)]
fn open(at: &At<'_>, fd: u32, kinds: u32) {
    if let Some(serving) = serving(at.tgid, at.tid)
        && serving.accepting != 0
    {
        serving.accepting = 0;
        connected(at, fd, kinds);
    }
}

/// `accept` has returned `fd`; a negative number is an error.
#[inline(always)]
fn accepted(at: &At<'_>, fd: u32, kinds: u32) {
    if fd as i32 >= 0 {
        connected(at, fd, kinds);
    }
}

/// A thread queries the own address of a descriptor. Returns whether it takes a request.
#[inline(always)]
fn announce(at: &At<'_>, fd: u32, unicorn: bool) -> bool {
    if unicorn || CONNECTIONS.get_ptr(&connection(at.tgid, fd)).is_none() {
        return false;
    }
    let Some(serving) = entry(at.tgid, at.tid) else { return false };
    if serving.begin_ns != 0 {
        return false;
    }
    let next_of_pipeline = serving.announced == fd.wrapping_add(1);
    serving.announced = 0;
    let key = key(at.tgid, fd);
    let Some(parsed) = parsed(&key) else { return false };
    if parsed.first_ns != 0 {
        if !begins_request(parsed) {
            // There may be too few bytes yet to decide.
            serving.announced = if parsed.tid != 0 { fd.wrapping_add(1) } else { 0 };
            return false;
        }
    } else if next_of_pipeline {
        // What was read last also belonged to the previous request; where this request begins in it is unknown.
        parsed.first_ns = at.now;
        parsed.len = 0;
        parsed.tid = 0;
        parsed.traceparent = Traceparent::Unread as u32;
        parsed.searched = pieces::DONE;
    } else {
        return false;
    }
    if let Some(kinds) = SERVERS.get_ptr_mut(&at.tgid) {
        // SAFETY: as above; what another thread adds meanwhile is not needed any more.
        unsafe { *kinds |= IS_WEBRICK };
    }
    begin(at, serving, fd, key.parser);
    true
}

/// A thread has read something. Returns whether it takes a request.
#[inline(always)]
fn received(at: &At<'_>, read: &Read, unicorn: bool) -> bool {
    if read.len == 0 || CONNECTIONS.get_ptr(&connection(at.tgid, read.fd)).is_none() {
        return false;
    }
    let Some(serving) = entry(at.tgid, at.tid) else { return false };
    let serves = serving.begin_ns != 0;
    if serves && serving.fd != read.fd {
        return false;
    }
    let key = key(at.tgid, read.fd);
    let Some(parsed) = parsed(&key) else { return false };
    if serves && parsed.first_ns == 0 {
        // The entry of its request was lost; this is not the start of a request.
        return false;
    }
    keep(at, key.parser, parsed, read);
    pieces::look(key.parser, parsed, read.buffer, read.len, !unicorn);
    if serves || serving.announced != read.fd.wrapping_add(1) || !begins_request(parsed) {
        return false;
    }
    serving.announced = 0;
    begin(at, serving, read.fd, key.parser);
    true
}

/// Keeps the first bytes of a request, which may arrive in pieces. Sets `tid` to 0 if keeping later bytes would leave a gap.
#[inline(always)]
fn keep(at: &At<'_>, parser: u64, parsed: &mut Parsed, read: &Read) {
    let target: *mut u8 = (&raw mut parsed.line).cast();
    let whole;
    if parsed.first_ns == 0 {
        parsed.first_ns = at.now;
        (parsed.searched, parsed.headers) = (0, 0);
        parsed.traceparent = Traceparent::Unread as u32;
        line::copy(parser, parsed, read.buffer, read.len);
        let came = u64::from(parsed.len) == read.len || line::is_complete(parsed);
        whole = came && begins_with_letter(parsed);
    } else if parsed.tid == 0 {
        return;
    } else if line::is_complete(parsed) {
        whole = true;
    } else {
        let used = parsed.len;
        let mut len = 0;
        // A copy of the number that is only compared and added here: a value that is kept for later goes to the stack, and Linux 6.1 does not apply
        // the comparison to the value read back from there ("R1 unbounded memory access").
        let at = usermem::opaque(u64::from(used));
        if at <= u64::from(HALF) {
            len = at_most(read.len, HALF);
            // SAFETY: the used bytes and the copied bytes are at most half of the array each.
            let copied = unsafe { usermem::copy::<HALF>(read.buffer, len, target.add(at as usize)) };
            len = if copied.is_ok() { len } else { 0 };
        } else {
            let at = usermem::opaque(u64::from(used));
            if at <= (LINE_BYTES as u32 - EIGHTH) as u64 {
                len = at_most(read.len, EIGHTH);
                // SAFETY: an eighth is free.
                let copied = unsafe { usermem::copy::<EIGHTH>(read.buffer, len, target.add(at as usize)) };
                len = if copied.is_ok() { len } else { 0 };
            }
        }
        parsed.len = line::cut(parser, used + len);
        whole = u64::from(len) == read.len || line::is_complete(parsed);
    }
    parsed.last_ns = at.now;
    parsed.tid = if whole { at.tid } else { 0 };
}

#[inline(always)]
fn at_most(len: u64, most: u32) -> u32 {
    if len > u64::from(most) { most } else { len as u32 }
}

#[inline(always)]
fn begins_with_letter(parsed: &Parsed) -> bool {
    parsed.len > 0 && parsed.line[0].is_ascii_uppercase()
}

/// Whether what has been read is the start of a request: a method of at least three letters and a space.
#[inline(always)]
fn begins_request(parsed: &Parsed) -> bool {
    let mut at = 0;
    while at < METHOD {
        if at as u32 >= parsed.len {
            return false;
        }
        let byte = parsed.line[at];
        if byte == b' ' {
            return at >= 3;
        }
        if !byte.is_ascii_uppercase() {
            return false;
        }
        at += 1;
    }
    false
}

/// A thread waits for descriptors. Returns whether its request ends: it has been answered, and the thread waits for the next one.
#[inline(always)]
fn wait(at: &At<'_>, unicorn: bool) -> bool {
    /// `POLLIN` (include/uapi/asm-generic/poll.h).
    const POLLIN: u32 = 1;
    let Some(serving) = serving(at.tgid, at.tid) else { return false };
    // Up to 3.2 one of the waiting threads has a second descriptor, after its own, through which signals arrive (`rb_sigwait_fd_get` in
    // `rb_thread_wait_for_single_fd`, thread.c).
    let waits_for = second(at);
    if unicorn || serving.begin_ns == 0 || waits_for == 0 || waits_for > 2 || !is_answered(serving) {
        return false;
    }
    // `struct pollfd`: the descriptor, then the events, 16 bits.
    let Some([fd, events]) = usermem::read::<[u32; 2]>(first(at)) else { return false };
    if fd != serving.fd || events & POLLIN == 0 {
        return false;
    }
    serving.step = Serving::KEPT;
    true
}
