//! Jobs of Sidekiq: what a thread does with each that it fetches from Redis.

#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{event::Header, gvl::OwnTimes};

/// First bytes of a reply that are kept.
pub const HEAD_BYTES: usize = 1024;
/// Last bytes of a longer reply that are kept.
pub const TAIL_BYTES: usize = 512;
/// First bytes of a command that are looked at: `*3\r\n$5\r\nbrpop\r\n`, with up to three digits.
pub const COMMAND_BYTES: usize = 17;
/// Entries of the map of threads that fetch jobs.
pub const MAX_FETCHERS: u32 = 2048;
/// Stands for a port where there is none.
pub const NO_PORT: u32 = u32::MAX;
/// Stands for the parser in [`Serving`](crate::request::Serving) of a thread that runs a job.
pub const JOB: u64 = 1;

/// What a probe of a Sidekiq process is at; the attach cookie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum JobPoint {
    /// A call of `send(fd, buffer, length, flags)`.
    Send = 0,
    /// A call of `recv(fd, buffer, length, flags)`.
    Receive = 1,
    /// The jump behind it that tests what it has returned.
    Received = 2,
    /// A call of `connect(fd, address, length)`.
    Connect = 3,
    /// A call of `pthread_setname_np`: the first thing that a Ruby thread does. Up to 3.2 a native thread runs one after the other.
    Name = 4,
}

/// What a thread that fetches jobs is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum FetchState {
    /// Nothing that is known.
    Idle = 0,
    /// It has asked for a job.
    Asked = 1,
    /// It runs one, and may still receive the rest of the reply that brought it.
    Receiving = 2,
    /// It runs one.
    Running = 3,
}

/// A thread that fetches jobs.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct Fetcher {
    /// Where a call of `recv` puts what it receives of the reply; 0: there is no such call.
    pub buffer: u64,
    /// Bytes of the reply so far.
    pub total: u64,
    /// Thread group id.
    pub tgid: u32,
    /// A [`FetchState`].
    pub state: u32,
    /// The descriptor on which it has asked.
    pub fd: u32,
    /// The port to which it connected last since its job began, in network byte order, plus 1; of another address than one of TCP
    /// [`NO_PORT`]; 0: it did not.
    pub connected: u32,
    /// Bytes of `head`.
    pub head_len: u32,
    /// Bytes of `tail`.
    pub tail_len: u32,
    /// Bytes of `before`.
    pub before_len: u32,
    /// See [`JobEvent::reconnected`].
    pub reconnected: u32,
    /// First bytes of the reply. What lies beyond `head_len` is undefined.
    pub head: [u8; HEAD_BYTES],
    /// Last bytes of its last piece, if it is longer. What lies beyond `tail_len` is undefined.
    pub tail: [u8; TAIL_BYTES],
    /// Last bytes of the piece before. What lies beyond `before_len` is undefined.
    pub before: [u8; TAIL_BYTES],
}

/// A job that has ended.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct JobEvent {
    /// Common head; `point` is a [`RequestEnd`](crate::request::RequestEnd), `ts_ns` when it ended.
    pub header: Header,
    /// When its reply came, nanoseconds as in the header.
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
    /// Bytes of the reply.
    pub total: u64,
    /// 1: its thread connected to the port of Redis meanwhile, so it may have waited for Redis before it asked for the next one.
    pub reconnected: u32,
    /// Bytes of `head`.
    pub head_len: u32,
    /// Bytes of `tail`.
    pub tail_len: u32,
    /// Bytes of `before`.
    pub before_len: u32,
    /// First bytes of the reply; undefined beyond `head_len`.
    pub head: [u8; HEAD_BYTES],
    /// Last bytes of its last piece, if it is longer; undefined beyond `tail_len`.
    pub tail: [u8; TAIL_BYTES],
    /// Last bytes of the piece before, if the last one is shorter than `tail`; undefined beyond `before_len`.
    pub before: [u8; TAIL_BYTES],
}

const _: () = assert!(size_of::<Fetcher>() == 16 + 32 + HEAD_BYTES + 2 * TAIL_BYTES);
const _: () = assert!(size_of::<JobEvent>() == 40 + 56 + 48 + 16 + 16 + HEAD_BYTES + 2 * TAIL_BYTES);
