//! Sidekiq jobs: a thread sends `BRPOP`, receives a reply with a job, runs it, and sends the next `BRPOP`.
//!
//! A job begins when the first bytes of its reply have arrived. User space reads class and queue from the bytes that are kept, and decides
//! whether it was a job. A thread that is about to end puts a job that it is still receiving back into its queue, with `RPUSH` (`requeue`,
//! lib/sidekiq/fetch.rb): the job was not run.

use aya_ebpf::{
    EbpfContext as _,
    helpers::{bpf_get_attach_cookie, bpf_ktime_get_ns, bpf_probe_read_kernel_buf},
    programs::ProbeContext,
};
use gctrace_common::{
    event::{Header, Kind},
    job::{COMMAND_BYTES, FetchState, Fetcher, HEAD_BYTES, JOB, JobEvent, JobPoint, NO_PORT, TAIL_BYTES},
    memory::MemoryUse,
    request::{GVL_UNKNOWN, RUNS_JOBS, RequestEnd, Serving},
    stats::Counter,
};

use super::{
    FIRST, SECOND, THIRD, end, entry, is_server, keep_times, memory, no_slots_yet, own_times_since, sees_gvl,
    serving, unit,
};
use crate::{
    filter::tgid_tid,
    maps::{BLANK_FETCHER, FETCHERS, NO_EXIST, PROCESSES, REQUEST_RING, closed, count},
    ring::NO_WAKEUP,
    rubies, socket, usermem,
};

/// Number of bytes from the end of the first line of a `BRPOP` to its arguments: `\r\n$5\r\nbrpop\r\n`.
const ARGUMENTS: u64 = 13;
/// Maximum number of words of eight bytes of its arguments that are checked.
const KEY_PIECES: u64 = 8;
/// Hardware number of the register that holds the result of a function.
const RESULT: u8 = 0;

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
    if !is_server(tgid, RUNS_JOBS) || closed() {
        return;
    }
    // SAFETY: a plain helper call with the program's own context.
    let cookie = unsafe { bpf_get_attach_cookie(ctx.as_ptr()) };
    // SAFETY: a plain helper call.
    let at = At { ctx, tgid, tid, now: unsafe { bpf_ktime_get_ns() } };
    let mut unsettled = false;
    match cookie {
        p if p == JobPoint::Send as u64 => unsettled = send(&at),
        p if p == JobPoint::Receive as u64 => receive(&at),
        p if p == JobPoint::Received as u64 => unsettled = received(&at),
        p if p == JobPoint::Connect as u64 => {
            connect(&at);
        }
        _ => named(&at),
    }
    if unsettled {
        unit::settle(tgid, tid, at.now);
    }
}

/// The entry of the current thread.
#[inline(always)]
fn fetcher(at: &At<'_>) -> Option<&'static mut Fetcher> {
    let entry = FETCHERS.get_ptr_mut(&at.tid)?;
    // SAFETY: a map value pointer, valid while the program runs; only this thread uses this key.
    let fetcher = unsafe { &mut *entry };
    if fetcher.tgid == at.tgid { Some(fetcher) } else { None }
}

/// The same, created if missing; `None` if the map is full.
#[inline(always)]
fn new_fetcher(at: &At<'_>) -> Option<&'static mut Fetcher> {
    if let Some(fetcher) = fetcher(at) {
        return Some(fetcher);
    }
    let _another_process = FETCHERS.remove(&at.tid);
    let blank = BLANK_FETCHER.get(0)?;
    if FETCHERS.insert(&at.tid, blank, NO_EXIST).is_err() {
        count(Counter::RequestMapFull);
    }
    let entry = FETCHERS.get_ptr_mut(&at.tid)?;
    // SAFETY: as above.
    let fetcher = unsafe { &mut *entry };
    fetcher.tgid = at.tgid;
    Some(fetcher)
}

/// A thread sends something on a socket. Returns whether its job ends.
#[inline(always)]
fn send(at: &At<'_>) -> bool {
    let fd = usermem::register(at.ctx, FIRST) as u32;
    let command = usermem::register(at.ctx, SECOND);
    let len = usermem::register(at.ctx, THIRD);
    let fetched = fetch(command, len);
    // A job may itself wait for something else in Redis.
    let fetches = fetched != 0 && (!runs_job(at) || names_queue(command.wrapping_add(fetched)));
    if !fetches {
        if let Some(fetcher) = fetcher(at)
            && fetcher.fd == fd
        {
            // The next reply is the reply to this command.
            if fetcher.state == FetchState::Receiving as u32 {
                fetcher.state = FetchState::Running as u32;
            } else if fetcher.state == FetchState::Asked as u32 {
                fetcher.state = FetchState::Idle as u32;
            }
        }
        return runs_job(at) && verified_once_2_put_back(command, len) != 0;
    }
    let Some(fetcher) = new_fetcher(at) else { return false };
    let Some(serving) = entry(at.tgid, at.tid) else { return false };
    let runs = serving.begin_ns != 0;
    if runs {
        let to_redis = match socket::peer_port(fd) {
            Some(port) => fetcher.connected == u32::from(port) + 1 || fetcher.connected == NO_PORT,
            None => fetcher.connected != 0,
        };
        fetcher.reconnected = u32::from(to_redis);
    }
    fetcher.state = FetchState::Asked as u32;
    fetcher.fd = fd;
    fetcher.buffer = 0;
    if runs {
        serving.step = Serving::KEPT;
    }
    runs
}

/// A thread connects to something. If it is Redis and the connection fails, Sidekiq waits for a second and retries: then the thread's job
/// ended long before the thread requests the next one.
#[inline(always)]
fn connect(at: &At<'_>) {
    /// Address families (include/linux/socket.h), the first field of an address; the port follows.
    const INET: u16 = 2;
    const INET6: u16 = 10;
    let Some(fetcher) = fetcher(at) else { return };
    let address = usermem::register(at.ctx, SECOND);
    fetcher.connected = match usermem::read::<[u16; 2]>(address) {
        Some([INET | INET6, port]) => u32::from(port) + 1,
        _ => NO_PORT,
    };
}

/// A thread sets a thread name. It may be another Ruby thread that has just started on the same native thread; then the job of the
/// previous one ended at an unknown time.
#[inline(always)]
fn named(at: &At<'_>) {
    let Some(fetcher) = fetcher(at) else { return };
    fetcher.state = FetchState::Idle as u32;
    fetcher.buffer = 0;
    if let Some(serving) = entry(at.tgid, at.tid)
        && serving.begin_ns != 0
    {
        end(at.tgid, at.tid, serving, RequestEnd::Left, at.now);
    }
}

/// Whether the current thread runs a job.
#[inline(always)]
fn runs_job(at: &At<'_>) -> bool {
    serving(at.tgid, at.tid).is_some_and(|serving| serving.begin_ns != 0)
}

/// Whether a command puts the job of the current thread back into its queue; if so, its job ends. The arguments of `RPUSH` are then the
/// elements of the reply that brought the job. A global function, which the verifier walks once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn verified_once_2_put_back(command: u64, len: u64) -> u64 {
    /// How much later the elements begin in the command, after `*3\r\n$5\r\nrpush\r\n`, than in the reply, after `*2\r\n`.
    const FURTHER: u64 = 11;
    /// With fewer bytes of the reply there is nothing to compare.
    const LEAST: u32 = 16;
    let (tgid, tid) = tgid_tid();
    let Some(fetcher) = FETCHERS.get_ptr(&tid) else { return 0 };
    // SAFETY: a map value pointer, valid while the program runs; only this thread uses this key.
    let fetcher = unsafe { &*fetcher };
    if fetcher.tgid != tgid || fetcher.head_len < LEAST || len != fetcher.total.wrapping_add(FURTHER) {
        return 0;
    }
    let Some(bytes) = usermem::read::<[u8; COMMAND_BYTES]>(command) else { return 0 };
    if bytes[0] != b'*' || !is_command_at(&bytes, 2, *b"rpush") {
        return 0;
    }
    let words: *const u64 = fetcher.head.as_ptr().cast();
    // The first word contains the lines that differ.
    let mut at = 1;
    while at < HEAD_BYTES / 8 {
        if (at as u32 + 1) * 8 > fetcher.head_len {
            break;
        }
        // SAFETY: `at` is less than the number of words; the array is at a multiple of eight bytes.
        let word = unsafe { words.add(at).read() };
        if usermem::read::<u64>(command.wrapping_add(FURTHER + at as u64 * 8)) != Some(word) {
            return 0;
        }
        at += 1;
    }
    let Some(serving) = entry(tgid, tid) else { return 0 };
    serving.step = Serving::PUT_BACK;
    1
}

/// Offset of the arguments of a command if it is `BRPOP`: `*3\r\n$5\r\nbrpop\r\n` with one to three digits in the first line. 0 if it
/// is another command.
#[inline(always)]
fn fetch(command: u64, len: u64) -> u64 {
    const FETCH: [u8; 5] = *b"brpop";
    if len < COMMAND_BYTES as u64 + 2 {
        return 0;
    }
    let Some(bytes) = usermem::read::<[u8; COMMAND_BYTES]>(command) else { return 0 };
    match bytes[0] {
        b'*' if is_command_at(&bytes, 2, FETCH) => 2 + ARGUMENTS,
        b'*' if is_command_at(&bytes, 3, FETCH) => 3 + ARGUMENTS,
        b'*' if is_command_at(&bytes, 4, FETCH) => 4 + ARGUMENTS,
        _ => 0,
    }
}

/// Whether the first key of a `BRPOP` is that of a Sidekiq queue: `$13\r\nqueue:default\r\n`, possibly with a namespace before it. A key
/// whose end is not found counts as one.
#[inline(always)]
fn names_queue(arguments: u64) -> bool {
    /// `queue:`.
    const QUEUE: u64 = u64::from_be_bytes(*b"\0\0queue:");
    let (mut window, mut ends, mut piece) = (0_u64, 0_u32, 0_u64);
    // In pieces, because of the stack limit: "combined stack size of 2 calls is 544. Too large" (Linux 6.1).
    while piece < KEY_PIECES {
        let Some(mut bytes) = usermem::read::<u64>(arguments.wrapping_add(8 * piece)) else { return true };
        let mut left = 8;
        while left > 0 {
            let byte = bytes & 0xff;
            window = (window << 8 | byte) & 0xffff_ffff_ffff;
            if window == QUEUE {
                return true;
            }
            if byte == u64::from(b'\r') {
                // The first end is that of the key's length, the second one that of the key.
                ends += 1;
                if ends == 2 {
                    return false;
                }
            }
            bytes >>= 8;
            left -= 1;
        }
        piece += 1;
    }
    true
}

/// Whether a command has this name, if its first line has `at` bytes.
#[inline(always)]
fn is_command_at(bytes: &[u8; COMMAND_BYTES], at: usize, name: [u8; 5]) -> bool {
    let lower = |offset: usize| bytes[at + offset] | 0x20;
    bytes[at] == b'\r'
        && bytes[at + 2] == b'$'
        && bytes[at + 3] == b'5'
        && bytes[at + 4] == b'\r'
        && lower(6) == name[0]
        && lower(7) == name[1]
        && lower(8) == name[2]
        && lower(9) == name[3]
        && lower(10) == name[4]
}

/// A thread is about to receive something.
#[inline(always)]
fn receive(at: &At<'_>) {
    let Some(fetcher) = fetcher(at) else { return };
    fetcher.buffer = 0;
    let waits = fetcher.state == FetchState::Asked as u32 || fetcher.state == FetchState::Receiving as u32;
    if waits && fetcher.fd == usermem::register(at.ctx, FIRST) as u32 {
        fetcher.buffer = usermem::register(at.ctx, SECOND);
    }
}

/// A thread has received something. Returns whether a job begins.
#[inline(always)]
fn received(at: &At<'_>) -> bool {
    let Some(fetcher) = fetcher(at) else { return false };
    let buffer = fetcher.buffer;
    if buffer == 0 {
        return false;
    }
    fetcher.buffer = 0;
    let result = usermem::register(at.ctx, RESULT) as i64;
    if result < 0 {
        // In most cases nothing has arrived yet. After an error no further call follows.
        return false;
    }
    let len = result as u64;
    let asked = fetcher.state == FetchState::Asked as u32;
    if len == 0 || (asked && !begin(at, fetcher, buffer, len)) {
        if asked {
            fetcher.state = FetchState::Idle as u32;
        }
        return false;
    }
    if asked {
        let kept = if len > HEAD_BYTES as u64 { HEAD_BYTES as u32 } else { len as u32 };
        // SAFETY: the copy is bounded by the size of the array.
        let copied =
            unsafe { usermem::copy::<{ HEAD_BYTES as u32 }>(buffer, kept, (&raw mut fetcher.head).cast()) };
        fetcher.head_len = if copied.is_ok() { kept } else { 0 };
    }
    if !asked || len > HEAD_BYTES as u64 {
        fetcher.before_len = 0;
        if len < TAIL_BYTES as u64 {
            keep_tail(fetcher);
        }
        let kept = if len > TAIL_BYTES as u64 { TAIL_BYTES as u32 } else { len as u32 };
        let from = buffer.wrapping_add(len - u64::from(kept));
        // SAFETY: as above.
        let copied =
            unsafe { usermem::copy::<{ TAIL_BYTES as u32 }>(from, kept, (&raw mut fetcher.tail).cast()) };
        fetcher.tail_len = if copied.is_ok() { kept } else { 0 };
    }
    fetcher.total = fetcher.total.wrapping_add(len);
    asked
}

/// Keeps the end of the previous piece, because the new piece is short.
#[inline(always)]
fn keep_tail(fetcher: &mut Fetcher) {
    // SAFETY: both are arrays of the same size in a map value.
    let copied = unsafe { bpf_probe_read_kernel_buf((&raw const fetcher.tail).cast(), &mut fetcher.before) };
    if copied.is_ok() {
        fetcher.before_len = fetcher.tail_len;
    }
}

/// The first bytes of a reply have arrived. Begins a job if the reply can be one: `*2`.
#[inline(always)]
fn begin(at: &At<'_>, fetcher: &mut Fetcher, reply: u64, len: u64) -> bool {
    let is_array = match usermem::read::<u8>(reply) {
        Some(b'*') => len == 1 || usermem::read::<u8>(reply.wrapping_add(1)) == Some(b'2'),
        _ => false,
    };
    if !is_array {
        return false;
    }
    let Some(serving) = entry(at.tgid, at.tid) else { return false };
    if serving.begin_ns != 0 {
        end(at.tgid, at.tid, serving, RequestEnd::Left, at.now);
    }
    serving.parser = JOB;
    serving.gvl_ns = if sees_gvl(serving) { 0 } else { GVL_UNKNOWN };
    (serving.alloc_slots, serving.alloc_bytes) = (no_slots_yet(at.tgid), 0);
    serving.memory = MemoryUse::UNKNOWN;
    keep_times(at.tid, serving, at.now);
    serving.begin_ns = at.now;
    serving.step = Serving::TAKEN;
    fetcher.state = FetchState::Receiving as u32;
    fetcher.reconnected = 0;
    fetcher.connected = 0;
    fetcher.total = 0;
    fetcher.head_len = 0;
    fetcher.tail_len = 0;
    fetcher.before_len = 0;
    count(Counter::Requests);
    true
}

/// Emits the job that a thread runs.
#[inline(always)]
pub fn emit(tgid: u32, tid: u32, serving: &Serving, how: RequestEnd, now: u64) {
    // SAFETY: map values, read at once.
    let (image, execs) =
        rubies::known(tgid).map_or((u32::MAX, 0), |ruby| unsafe { ((*ruby).image, (*ruby).execs) });
    let Some(fetcher) = FETCHERS.get_ptr(&tid) else { return count(Counter::RequestNotHttp) };
    let Some(mut slot) = REQUEST_RING.reserve::<JobEvent>(0) else {
        return count(Counter::RequestRingFull);
    };
    let record: *mut JobEvent = slot.as_mut_ptr();
    // SAFETY: the ring reserved a whole record, 8-byte aligned; the fetcher is a map value, valid while the program runs. Each
    // copy has the size of an array that both have.
    unsafe {
        (*record).header =
            Header { kind: Kind::Job as u32, point: how as u32, tgid, tid, ts_ns: now, seq: 0, image, execs };
        (*record).begin_ns = serving.begin_ns;
        (*record).pause_ns = PROCESSES.get(&tgid).map_or(0, |process| process.pause_ns);
        (*record).gvl_ns = if sees_gvl(serving) { serving.gvl_ns } else { GVL_UNKNOWN };
        own_times_since(tid, serving, now, &raw mut (*record).times);
        ((*record).alloc_slots, (*record).alloc_bytes) = (serving.alloc_slots, serving.alloc_bytes);
        (*record).memory = memory::of(serving, how);
        (*record).total = (*fetcher).total;
        (*record).reconnected = (*fetcher).reconnected;
        let head = bpf_probe_read_kernel_buf((*fetcher).head.as_ptr(), &mut (*record).head);
        let tail = bpf_probe_read_kernel_buf((*fetcher).tail.as_ptr(), &mut (*record).tail);
        (*record).head_len = if head.is_ok() { (*fetcher).head_len } else { 0 };
        let before = bpf_probe_read_kernel_buf((*fetcher).before.as_ptr(), &mut (*record).before);
        (*record).before_len = if before.is_ok() { (*fetcher).before_len } else { 0 };
        (*record).tail_len = if tail.is_ok() { (*fetcher).tail_len } else { 0 };
    }
    slot.submit(NO_WAKEUP);
    count(Counter::RequestSubmitted);
}
