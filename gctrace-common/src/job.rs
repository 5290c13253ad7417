//! Sidekiq jobs: what a thread does with each job that it fetches from Redis.

#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{event::Header, gvl::OwnTimes, memory::MemoryUse};

/// Maximum number of bytes kept from the start of a reply.
pub const HEAD_BYTES: usize = 1024;
/// Maximum number of bytes kept from the end of a longer reply.
pub const TAIL_BYTES: usize = 512;
/// Number of bytes of a command that are checked: `*3\r\n$5\r\nbrpop\r\n`, with up to three digits.
pub const COMMAND_BYTES: usize = 17;
/// Entries of the map of threads that fetch jobs.
pub const MAX_FETCHERS: u32 = 2048;
/// Stands for the port of an address that has none.
pub const NO_PORT: u32 = u32::MAX;
/// Value of the parser in [`Serving`](crate::request::Serving) for a thread that runs a job.
pub const JOB: u64 = 1;

/// Where a probe of a Sidekiq process is; the attach cookie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum JobPoint {
    /// A call of `send(fd, buffer, length, flags)`.
    Send = 0,
    /// A call of `recv(fd, buffer, length, flags)`.
    Receive = 1,
    /// The jump after that call that tests its result.
    Received = 2,
    /// A call of `connect(fd, address, length)`.
    Connect = 3,
    /// A call of `pthread_setname_np`: the first action of a Ruby thread. Up to 3.2 a native thread runs several Ruby threads in succession.
    Name = 4,
}

/// The state of a thread that fetches jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum FetchState {
    /// Nothing known.
    Idle = 0,
    /// It has requested a job.
    Asked = 1,
    /// It runs a job, and may still receive the rest of the reply that brought it.
    Receiving = 2,
    /// It runs a job.
    Running = 3,
}

/// A thread that fetches jobs.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct Fetcher {
    /// Buffer of the current call of `recv` that receives part of the reply, address in the process; 0: there is no such call.
    pub buffer: u64,
    /// Number of bytes of the reply received so far.
    pub total: u64,
    /// Thread group id.
    pub tgid: u32,
    /// A [`FetchState`].
    pub state: u32,
    /// The descriptor on which it requested the job.
    pub fd: u32,
    /// The port to which it last connected since its job began, in network byte order, plus 1; [`NO_PORT`] if the address was not a TCP
    /// address; 0: it has not connected.
    pub connected: u32,
    /// Number of valid bytes in `head`.
    pub head_len: u32,
    /// Number of valid bytes in `tail`.
    pub tail_len: u32,
    /// Number of valid bytes in `before`.
    pub before_len: u32,
    /// See [`JobEvent::reconnected`].
    pub reconnected: u32,
    /// First bytes of the reply; undefined beyond `head_len`.
    pub head: [u8; HEAD_BYTES],
    /// Last bytes of the reply's last piece, if `head` does not hold the whole reply; undefined beyond `tail_len`.
    pub tail: [u8; TAIL_BYTES],
    /// Last bytes of the piece before; undefined beyond `before_len`.
    pub before: [u8; TAIL_BYTES],
}

/// A job that has ended.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct JobEvent {
    /// Common head; `point` is a [`RequestEnd`](crate::request::RequestEnd), `ts_ns` the end of the job.
    pub header: Header,
    /// When the job's reply arrived, nanoseconds as in the header.
    pub begin_ns: u64,
    /// See [`RequestEvent::pause_ns`](crate::request::RequestEvent::pause_ns).
    pub pause_ns: u64,
    /// See [`RequestEvent::gvl_ns`](crate::request::RequestEvent::gvl_ns).
    pub gvl_ns: u64,
    /// See [`RequestEvent::times`](crate::request::RequestEvent::times).
    pub times: OwnTimes,
    /// See [`RequestEvent::alloc_slots`](crate::request::RequestEvent::alloc_slots).
    pub alloc_slots: u64,
    /// See [`RequestEvent::alloc_bytes`](crate::request::RequestEvent::alloc_bytes).
    pub alloc_bytes: u64,
    /// See [`RequestEvent::memory`](crate::request::RequestEvent::memory).
    pub memory: MemoryUse,
    /// Number of bytes of the reply.
    pub total: u64,
    /// 1: the thread connected to the port of Redis during the job, so it may have waited for Redis before it requested the next job.
    pub reconnected: u32,
    /// Number of valid bytes in `head`.
    pub head_len: u32,
    /// Number of valid bytes in `tail`.
    pub tail_len: u32,
    /// Number of valid bytes in `before`.
    pub before_len: u32,
    /// First bytes of the reply; undefined beyond `head_len`.
    pub head: [u8; HEAD_BYTES],
    /// Last bytes of the reply's last piece, if `head` does not hold the whole reply; undefined beyond `tail_len`.
    pub tail: [u8; TAIL_BYTES],
    /// Last bytes of the piece before, if the last piece is shorter than `tail`; undefined beyond `before_len`.
    pub before: [u8; TAIL_BYTES],
}

const _: () = assert!(size_of::<Fetcher>() == 16 + 32 + HEAD_BYTES + 2 * TAIL_BYTES);
const _: () = assert!(size_of::<JobEvent>() == 40 + 56 + 48 + 16 + 24 + 16 + HEAD_BYTES + 2 * TAIL_BYTES);
