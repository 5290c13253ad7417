//! Requests of a Puma on a Unix socket, for which it does not check whether the client is still connected. The sign that a thread takes one is
//! that Puma calls the application, in `ThreadPool#with_force_shutdown`, which `Server#handle_request` calls (Puma 5 to 8):
//!
//! ```ruby
//! def with_force_shutdown
//!   t = Thread.current
//!   @shutdown_mutex.synchronize do
//!     raise ForceShutdown if @force_shutdown
//!     t[:with_force_shutdown] = true
//!   end
//!   yield
//! ensure
//!   t[:with_force_shutdown] = false
//! end
//! ```
//!
//! There is no call on the connection before the response, so the response's first bytes show the connection: the first `HTTP/` that the
//! thread writes after the application has returned. Until then the request is [`Serving::UNBOUND`].

use gctrace_common::{
    config::StackPath,
    request::{RequestEnd, Serving},
    stats::Counter,
};

use super::{At, begin, connection, end, entry, first, serving, third};
use crate::{
    filter::tgid_tid,
    maps::{CONNECTIONS, any_image, count},
    rubies, usermem, walk,
};

/// `Qfalse` and `Qtrue` (include/ruby/internal/special_consts.h, with flonums, which 64-bit builds have).
const FALSE: u64 = 0;
const TRUE: u64 = 0x14;
/// `RSTRING_NOEMBED` (include/ruby/internal/core/rstring.h).
const NO_EMBED: u64 = 1 << 13;
const SHUTDOWN: Name = Name::of(b"with_force_shutdown\0", 8);
const HANDLE: Name = Name::of(b"handle_request\0", 4);

/// The name of a method and a zero byte, as words that overlap: comparing bytes would double the number of paths with each byte ("BPF program
/// is too large. Processed 1000001 insn", Linux 6.18).
struct Name {
    first: u64,
    middle: u64,
    middle_at: u64,
    last: u64,
    last_at: u64,
}

impl Name {
    /// `middle_at`: offset of the second word.
    const fn of(name: &[u8], middle_at: usize) -> Self {
        let last_at = name.len() - 8;
        assert!(middle_at <= 8 && last_at <= middle_at + 8);
        Self {
            first: word(name, 0),
            middle: word(name, middle_at),
            middle_at: middle_at as u64,
            last: word(name, last_at),
            last_at: last_at as u64,
        }
    }
}

const fn word(name: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes([
        name[at],
        name[at + 1],
        name[at + 2],
        name[at + 3],
        name[at + 4],
        name[at + 5],
        name[at + 6],
        name[at + 7],
    ])
}

/// What a `Thread#[]=` was for.
const OTHER: u64 = 0;
/// `with_force_shutdown`, called by `handle_request`: its block is the application.
const APPLICATION: u64 = 1;
/// `with_force_shutdown`, called by something else; or, if `false` is set, by anything: the caller is not checked then.
const SHUTDOWN_ONLY: u64 = 2;

/// A thread sets a thread-local variable. Returns whether it thereby takes a request.
#[inline(always)]
pub fn local(at: &At<'_>) -> bool {
    let value = third(at);
    let phase = match serving(at.tgid, at.tid) {
        Some(serving) if serving.begin_ns != 0 => serving.phase,
        _ => Serving::ANSWERED,
    };
    if value != TRUE && !(value == FALSE && phase == Serving::CALLED) {
        return false;
    }
    let what = verified_once_puma_local(value);
    if what == OTHER {
        return false;
    }
    if value == FALSE {
        if let Some(serving) = serving(at.tgid, at.tid) {
            serving.phase = Serving::RETURNED;
        }
        return false;
    }
    let Some(serving) = entry(at.tgid, at.tid) else { return false };
    if serving.begin_ns != 0 {
        if serving.phase == Serving::LOOKED_AT {
            if what == APPLICATION {
                serving.phase = Serving::ENTERED;
            }
            return false;
        }
        // (Up to Puma 6 a thread that has answered its request sets `true` once more, before its parser is reset.)
        let may_go_on = serving.phase == Serving::ANSWERED || serving.phase == Serving::ENTERED;
        if what == APPLICATION || !may_go_on {
            // The connection of the previous request was handed over.
            end(at.tgid, at.tid, serving, RequestEnd::Left, at.now);
        }
    }
    if what != APPLICATION {
        return false;
    }
    begin(at, serving, u32::MAX, Serving::UNBOUND);
    serving.phase = Serving::CALLED;
    true
}

/// What a `Thread#[]=` with this value was for: one of the constants above. A global function, which the verifier walks once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_puma_local(value: u64) -> u64 {
    match who_sets(value == TRUE) {
        Some(what) => what,
        None => {
            count(Counter::RequestFramesUnread);
            OTHER
        }
    }
}

/// The same; `None` if memory could not be read.
#[inline(always)]
fn who_sets(to_true: bool) -> Option<u64> {
    let (tgid, _) = tgid_tid();
    let ruby = rubies::known(tgid)?;
    // SAFETY: a map value pointer, valid while the program runs.
    let (index, bias) = unsafe { ((*ruby).image, (*ruby).bias) };
    let path = &any_image(index)?.stack;
    let (frame, last) = walk::current_frames(path, bias)?;
    let size = u64::from(path.frame_size);
    let caller = frame.wrapping_add(size.wrapping_mul(4));
    // The first frame is that of `Thread#[]=`. `true` is set in a block of the method, which `Mutex#synchronize` calls: their frames are
    // the next three, and that of the method's caller comes after them.
    if caller >= last {
        return Some(OTHER);
    }
    if !is_named(path, frame.wrapping_add(size), &SHUTDOWN)? {
        return Some(OTHER);
    }
    if to_true && is_named(path, caller, &HANDLE)? {
        return Some(APPLICATION);
    }
    Some(SHUTDOWN_ONLY)
}

/// Whether a control frame is Ruby code in a method of this name.
#[inline(always)]
fn is_named(path: &StackPath, frame: u64, name: &Name) -> Option<bool> {
    let member = |base: u64, offset: u32| usermem::read::<u64>(base.wrapping_add(u64::from(offset)));
    let iseq = member(frame, path.frame_iseq)?;
    if iseq == 0 {
        return Some(false);
    }
    let label = member(member(iseq, path.iseq_body)?, path.body_base_label)?;
    let text = if usermem::read::<u64>(label)? & NO_EMBED == 0 {
        label.wrapping_add(u64::from(path.string_embedded))
    } else {
        member(label, path.string_pointer)?
    };
    // A short name may end where its page ends, so later bytes are read only if the first word matches.
    if usermem::read::<u64>(text)? != name.first {
        return Some(false);
    }
    let word = |at: u64| usermem::read::<u64>(text.wrapping_add(at));
    Some(word(name.middle_at)? == name.middle && word(name.last_at)? == name.last)
}

/// A thread that serves a request of an unknown connection writes. `begins_response`: the bytes are the start of a response.
#[inline(always)]
pub fn bind(at: &At<'_>, serving: &mut Serving, begins_response: bool) {
    let fd = first(at) as u32;
    if !begins_response {
        return;
    }
    // SAFETY: the value is copied out at once.
    let parser = unsafe { CONNECTIONS.get(&connection(at.tgid, fd)).copied() };
    if serving.phase == Serving::CALLED {
        // An interim response (early hints), or one on a connection that was handed over to the application.
        if parser.is_some() {
            if serving.early == 0 {
                serving.early = fd.wrapping_add(1);
                serving.first_write_ns = at.now;
            } else if serving.early != fd.wrapping_add(1) {
                serving.first_write_ns = Serving::UNKNOWN_NS;
            }
        }
        return;
    }
    serving.phase = Serving::ANSWERED;
    serving.fd = fd;
    // The parser of a connection that is older than the tracing becomes known when it is reset.
    serving.parser = parser.unwrap_or(Serving::UNBOUND);
    if serving.first_write_ns != Serving::UNKNOWN_NS && serving.early != fd.wrapping_add(1) {
        serving.first_write_ns = 0;
    }
}
