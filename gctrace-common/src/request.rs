//! HTTP requests of a server: where they begin and end on the thread that serves them.

#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    event::{Header, SNAPSHOT_BYTES},
    gvl::OwnTimes,
    memory::{MemoryPages, MemoryUse},
    traceparent::{VALUE_WORDS, pieces::TAIL_WORDS},
};

/// Maximum number of bytes kept of a request: its first line, as far as it fits.
pub const LINE_BYTES: usize = 256;
/// Number of bytes of a response that are checked: `HTTP/1.1 200`.
pub const STATUS_BYTES: usize = 12;
/// Entries of the map of threads that serve requests.
pub const MAX_SERVING: u32 = 16_384;
/// Entries of the map of connections and of the map of their parsers. The least recently used entries are evicted.
pub const MAX_CONNECTIONS: u32 = 16_384;
/// Entries of the map of arrivals: sockets in the cgroups of servers that received data. The least recently used entries are evicted.
pub const MAX_ARRIVALS: u32 = 16_384;
/// Entries of the map of servers.
pub const MAX_SERVERS: u32 = 8192;
/// Size of the ring of requests, bytes.
pub const REQUEST_RING_BYTES: u32 = 1 << 20;
/// The same if the state of the VM is copied at the start and end of each request, bytes.
pub const UNIT_RING_BYTES: u32 = 8 << 20;

/// Value of the map of servers: the HTTP requests of the process are traced.
pub const SERVES_HTTP: u32 = 1;
/// Value of the map of servers: the jobs of the process are traced.
pub const RUNS_JOBS: u32 = 2;

/// Where a probe of a server is; the attach cookie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RequestPoint {
    /// A call of `puma_parser_execute(parser, buffer, length, offset)`.
    Parse = 0,
    /// A call of `puma_parser_init(parser)`: for a new connection, or after a request.
    Reset = 1,
    /// A call of `getsockopt(fd, level, name)`: with `TCP_INFO`, Puma's check whether the client is still connected, the first action
    /// of the thread that serves a request (`Puma::Server#closed_socket?`).
    Take = 2,
    /// A call of `accept4`.
    Accept = 3,
    /// A call of `rb_update_max_fd(fd)`: once for every new descriptor.
    Open = 4,
    /// A call of `write(fd, buffer, length)` or of a function with the same arguments; the end of the system call `sendfile(fd, file, …)`.
    Write = 5,
    /// A call of `writev(fd, vectors, count)`.
    WriteVector = 6,
    /// A call of `sendmsg(fd, message)`.
    SendMessage = 7,
    /// A call of `close(fd)`.
    Close = 8,
    /// A call of `rb_thread_local_aset(thread, id, value)` by `Thread#[]=`: Puma makes it before it calls the application (`true`) and
    /// after that (`false`), in `ThreadPool#with_force_shutdown`.
    Local = 9,
    /// A call of `SSL_write(connection, buffer, length)` by Puma, with the plain text of what it then writes to a TLS connection
    /// (`engine_write`, `ext/puma_http11/mini_ssl.c`).
    Encrypt = 10,
}

impl RequestPoint {
    /// All points, in the order of their numbers.
    pub const ALL: [Self; 11] = [
        Self::Parse,
        Self::Reset,
        Self::Take,
        Self::Accept,
        Self::Open,
        Self::Write,
        Self::WriteVector,
        Self::SendMessage,
        Self::Close,
        Self::Local,
        Self::Encrypt,
    ];
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum RequestEnd {
    /// Its connection is ready for the next request.
    Kept = 0,
    /// Its connection was closed.
    Closed = 1,
    /// The thread serves another request; the end of this one was not seen (its connection was handed over).
    Left = 2,
    /// The thread ended.
    Gone = 3,
    /// A job was put back into its queue: it was not run.
    Returned = 4,
}

impl RequestEnd {
    /// Decodes an end; unknown numbers are `None`.
    pub const fn from_raw(raw: u32) -> Option<Self> {
        Some(match raw {
            0 => Self::Kept,
            1 => Self::Closed,
            2 => Self::Left,
            3 => Self::Gone,
            4 => Self::Returned,
            _ => return None,
        })
    }
}

/// Where in a unit of work (a request or a job) the state of the VM was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum UnitPoint {
    /// Its thread took it.
    Begin = 0,
    /// Its thread finished it.
    End = 1,
}

impl UnitPoint {
    /// Decodes a point; unknown numbers are `None`.
    pub const fn from_raw(raw: u32) -> Option<Self> {
        Some(match raw {
            0 => Self::Begin,
            1 => Self::End,
            _ => return None,
        })
    }
}

/// Byte offsets that lead from a task and a descriptor to the data of a TCP socket. All zero: unknown.
///
/// Sources: include/linux/sched.h, fdtable.h, fs.h, net.h; include/net/sock.h.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct SocketLayout {
    /// `files` in `task_struct`.
    pub task_files: u32,
    /// `fdt` in `files_struct`.
    pub files_table: u32,
    /// `max_fds` in `fdtable`.
    pub table_len: u32,
    /// `fd` in `fdtable`.
    pub table_entries: u32,
    /// `f_inode` in `file`.
    pub file_inode: u32,
    /// `private_data` in `file`: for a socket, its `struct socket`.
    pub file_private: u32,
    /// `i_mode` in `inode`.
    pub inode_mode: u32,
    /// `i_ino` in `inode`, which no other socket gets until 2^32 others have been created.
    pub inode_number: u32,
    /// `sk` in `socket`.
    pub socket_sock: u32,
    /// `sk_protocol` (16 bits) in `sock`.
    pub sock_protocol: u32,
    /// `__sk_common.skc_cookie` in `sock`: the socket's unique number; 0 until somebody has requested it.
    pub sock_cookie: u32,
    /// `__sk_common.skc_state` (8 bits) in `sock`: the state of a TCP connection.
    pub sock_state: u32,
    /// `__sk_common.skc_dport` in `sock`: the peer's port, in network byte order. Zero: unknown.
    pub sock_port: u32,
    /// `write_seq` in `tcp_sock`, which begins with the `sock`: the sequence number after the last byte that the process has written. Zero: unknown.
    pub tcp_written: u32,
    /// `bytes_acked` in `tcp_sock`: number of bytes that the peer has acknowledged. Zero: unknown.
    pub tcp_acked: u32,
}

/// How much had been written on a connection at some time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct Written {
    /// Kernel address of its `sock`; 0: the other fields are unknown, too.
    pub sock: u64,
    /// Its inode number; if it differs, another socket is at the same address.
    pub inode: u64,
    /// Number of bytes that the peer had acknowledged.
    pub acked: u64,
    /// The sequence number after the last byte written; it wraps.
    pub sequence: u32,
    /// The state of the TCP connection.
    pub state: u32,
}

impl Written {
    /// Number of bytes written since `earlier`; [`SENT_UNKNOWN`] if the sequence number may have wrapped, or the connection is gone, with or
    /// without a FIN. Data that is written and not acknowledged is at most a window (1 GiB, RFC 7323 section 2.3), so the sequence number has
    /// not wrapped if less than half of its range was acknowledged.
    #[inline]
    pub const fn since(self, earlier: Self) -> u64 {
        let (Some(fins), Some(fins_then)) = (self.fins(), earlier.fins()) else { return SENT_UNKNOWN };
        if self.acked.wrapping_sub(earlier.acked) >= 1 << 31 {
            return SENT_UNKNOWN;
        }
        let (end, begin) = (self.sequence.wrapping_sub(fins), earlier.sequence.wrapping_sub(fins_then));
        end.wrapping_sub(begin) as u64
    }

    /// Number of sequence numbers that a FIN takes up after the data, once the process has shut the connection down (`tcp_states.h`).
    const fn fins(self) -> Option<u32> {
        match self.state {
            // TCP_ESTABLISHED, TCP_CLOSE_WAIT
            1 | 8 => Some(0),
            // TCP_FIN_WAIT1, TCP_FIN_WAIT2, TCP_LAST_ACK, TCP_CLOSING
            4 | 5 | 9 | 11 => Some(1),
            _ => None,
        }
    }
}

/// A thread that serves requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct Serving {
    /// When it took its current request, nanoseconds; 0: it serves none. Together with the thread, this identifies the request.
    pub begin_ns: u64,
    /// The parser of its connection: its address, or a number that stands for it; 0: unknown.
    pub parser: u64,
    /// When the first bytes of the response were written, nanoseconds; 0: none yet.
    pub first_write_ns: u64,
    /// When the last bytes of the response so far were written, nanoseconds.
    pub last_write_ns: u64,
    /// See [`RequestEvent::arrival_ns`].
    pub arrival_ns: u64,
    /// The descriptor of its connection.
    pub fd: u32,
    /// 1: it is accepting a connection.
    pub accepting: u32,
    /// The descriptor of a connection that it has accepted, plus 1; 0: none.
    pub accepted: u32,
    /// Thread group id.
    pub tgid: u32,
    /// Start of the first final status line; before that, of the latest interim response.
    pub status: [u8; STATUS_BYTES],
    /// [`GvlGate::epoch`](crate::gvl::GvlGate::epoch), plus 1, in which the thread was last seen to acquire the GVL; 0: never.
    pub gvl_epoch: u32,
    /// How long it has waited for the GVL since it took the request, nanoseconds; [`GVL_UNKNOWN`]: not all waits were seen.
    pub gvl_ns: u64,
    /// The times of the thread up to the moment at which it took the request.
    pub times: OwnTimes,
    /// [`GvlTask::epoch`](crate::gvl::GvlTask::epoch), plus 1, of these times; 0: there are none.
    pub times_epoch: u32,
    /// What remains to be done at the end of a hit: one of the constants below. Passed through this field, so that the verifier walks the
    /// rest once, and not once per path to it.
    pub step: u32,
    /// Buffer of the call that is about to read, address in the process; 0: none ([`BlockingPoint::Read`](crate::blocking::BlockingPoint::Read)).
    pub buffer: u64,
    /// The descriptor that this call reads from.
    pub reading: u32,
    /// The descriptor, plus 1, of the connection on which it takes the next request as soon as it has read the start of it; 0: none
    /// ([`blocking`](crate::blocking)).
    pub announced: u32,
    /// Progress of a request whose connection Puma does not check before it calls the application: one of the constants from
    /// [`Serving::LOOKED_AT`] on.
    pub phase: u32,
    /// The descriptor, plus 1, of an accepted connection on which it wrote a response while the application ran; 0: none.
    pub early: u32,
    /// Number of heap slots that it has taken for allocation since it took the request; [`ALLOC_UNKNOWN`]: not all were seen.
    pub alloc_slots: u64,
    /// Total size of these slots, bytes.
    pub alloc_bytes: u64,
    /// How much had been written on its connection when it took the request.
    pub written: Written,
    /// What the thread and its process had used of memory when it took the request; at its end, what they have used since then.
    pub memory: MemoryUse,
}

impl Serving {
    /// [`Serving::step`]: nothing remains to be done.
    pub const NOTHING: u32 = 0;
    /// It has taken a unit; the unit's state is to be copied.
    pub const TAKEN: u32 = 1;
    /// The unit has ended as [`RequestEnd::Kept`].
    pub const KEPT: u32 = 2;
    /// The unit has ended as [`RequestEnd::Closed`].
    pub const CLOSED: u32 = 3;
    /// The unit has ended as [`RequestEnd::Returned`].
    pub const PUT_BACK: u32 = 4;

    /// [`Serving::phase`]: Puma did check the connection, so it is known.
    pub const LOOKED_AT: u32 = 0;
    /// The application runs. The connection is unknown.
    pub const CALLED: u32 = 1;
    /// The application has returned, and no response was written yet. The next write shows the connection.
    pub const RETURNED: u32 = 2;
    /// The response is being written.
    pub const ANSWERED: u32 = 3;
    /// Puma did check the connection, and has called the application. (Only seen if it also listens on a Unix socket.)
    pub const ENTERED: u32 = 4;

    /// [`Serving::parser`]: the parser of a connection that is not known yet. No address has this bit.
    pub const UNBOUND: u64 = 1 << 61;
    /// [`Serving::first_write_ns`]: unknown.
    pub const UNKNOWN_NS: u64 = u64::MAX;
}

/// Value of a waiting time for the GVL if not all waits were seen.
pub const GVL_UNKNOWN: u64 = u64::MAX;
/// Value of a number of slots if not all of them were seen.
pub const ALLOC_UNKNOWN: u64 = u64::MAX;
/// Value of an unknown number of bytes written.
pub const SENT_UNKNOWN: u64 = u64::MAX;

/// What the parser of a connection was last given.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct Parsed {
    /// When it received the first bytes of a request, nanoseconds; 0: none since the previous request.
    pub first_ns: u64,
    /// When it received the last bytes, nanoseconds.
    pub last_ns: u64,
    /// Number of valid bytes in `line`.
    pub len: u32,
    /// The thread that gave it the last bytes; 0 in a server of [`blocking`](crate::blocking) if `line` cannot be continued.
    pub tid: u32,
    /// Number of bytes of the head that have been searched for the header `traceparent`.
    pub searched: u32,
    /// Number of such headers found in them, at most two.
    pub headers: u32,
    /// Byte offset of the first header's value from the start of the head. For a head that comes in pieces: the state of the first header, a
    /// [`Traceparent`](crate::traceparent::Traceparent).
    pub value_at: u32,
    /// A [`Traceparent`](crate::traceparent::Traceparent).
    pub traceparent: u32,
    /// The header's value and a zero byte, if it is valid; otherwise undefined.
    pub value: [u64; VALUE_WORDS],
    /// For a head that comes in pieces: the last bytes that have been searched ([`pieces`](crate::traceparent::pieces)).
    pub tail: [u64; TAIL_WORDS],
    /// The first bytes of the request, up to the end of its target. Undefined beyond `len`, but without headers or query.
    pub line: [u8; LINE_BYTES],
}

/// Finds the end of the target in eight bytes of a request, in memory order. Returns a mask of the bytes up to and including the end, and
/// their number; 0: the target does not end in these bytes. A target ends with `?` or with the line.
#[inline(always)]
pub const fn end_of_target(word: u64) -> (u64, u32) {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGHEST: u64 = 0x80 * ONES;
    const QUERY: u64 = b'?' as u64 * ONES;
    const RETURN: u64 = b'\r' as u64 * ONES;
    const LINE_FEED: u64 = b'\n' as u64 * ONES;
    // The lowest bit set belongs to a zero byte; higher ones may not.
    const fn zeros(word: u64) -> u64 {
        word.wrapping_sub(ONES) & !word
    }
    let ends = (zeros(word ^ QUERY) | zeros(word ^ RETURN) | zeros(word ^ LINE_FEED)) & HIGHEST;
    if ends == 0 {
        return (u64::MAX, 0);
    }
    let mask = ends ^ ends.wrapping_sub(1);
    // BPF has no instruction that counts bits.
    let bytes = (mask & 1) + (mask >> 8 & 1) + (mask >> 16 & 1) + (mask >> 24 & 1);
    let more = (mask >> 32 & 1) + (mask >> 40 & 1) + (mask >> 48 & 1) + (mask >> 56 & 1);
    (mask, (bytes + more) as u32)
}

/// Key of [`Parsed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct ParserKey {
    /// Its address, or a number that stands for it.
    pub parser: u64,
    /// Thread group id.
    pub tgid: u32,
    /// Zero.
    pub reserved: u32,
}

/// A request that has been served.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct RequestEvent {
    /// Common head; `point` is a [`RequestEnd`], `ts_ns` the end of the request.
    pub header: Header,
    /// When its thread took it, nanoseconds as in the header.
    pub begin_ns: u64,
    /// When its first bytes were parsed; 0: not seen.
    pub first_ns: u64,
    /// When the last bytes of its head were parsed.
    pub parsed_ns: u64,
    /// When the kernel had received the last bytes that had arrived on its connection before `begin_ns`; 0: not seen.
    pub arrival_ns: u64,
    /// When the first bytes of the response were written; 0: none, or unknown.
    pub first_write_ns: u64,
    /// When the last bytes of the response were written.
    pub last_write_ns: u64,
    /// Start of the GC pause that a thread of its process was in when it ended; 0: in none.
    pub pause_ns: u64,
    /// How long its thread waited for the GVL, nanoseconds; [`GVL_UNKNOWN`]: not all waits were seen.
    pub gvl_ns: u64,
    /// The times of its thread during the request: how long its native thread was on a CPU, runnable, and blocked, and how much of that belongs
    /// to waits for the GVL and to times without it.
    pub times: OwnTimes,
    /// Number of heap slots that its thread took for allocation; [`ALLOC_UNKNOWN`]: not all were seen.
    pub alloc_slots: u64,
    /// Total size of these slots, bytes.
    pub alloc_bytes: u64,
    /// Number of bytes written on its connection while it was served; [`SENT_UNKNOWN`]: unknown.
    pub sent_bytes: u64,
    /// Page faults of its thread while it was served, and the pages by which its process grew meanwhile.
    pub memory: MemoryUse,
    /// Start of its status line, or zeros.
    pub status: [u8; STATUS_BYTES],
    /// Number of valid bytes in `line`; 0: the parsing of the request was not seen.
    pub len: u32,
    /// The first bytes of the request; undefined beyond `len`.
    pub line: [u8; LINE_BYTES],
    /// A [`Traceparent`](crate::traceparent::Traceparent).
    pub traceparent: u32,
    /// Zero.
    pub reserved: u32,
    /// The value of that header and a zero byte, if it is valid; otherwise undefined.
    pub value: [u64; VALUE_WORDS],
}

/// Two consecutive copies of the objspace at the start or end of a unit of work. The thread is stopped there, but it need not hold
/// the GVL (it does not when it closes a connection), and other Ractors have GVLs of their own: nothing changed meanwhile only if both
/// copies are equal.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct UnitEvent {
    /// Common head; `point` is a [`UnitPoint`].
    pub header: Header,
    /// When the thread took the unit, nanoseconds as in the header.
    pub begin_ns: u64,
    /// The memory counters of the process at this moment.
    pub memory: MemoryPages,
    /// The spans, as in [`SnapshotEvent::data`](crate::event::SnapshotEvent::data).
    pub data: [u8; SNAPSHOT_BYTES],
    /// The second copy.
    pub again: [u8; SNAPSHOT_BYTES],
}

const _: () = assert!(size_of::<UnitEvent>() == 48 + size_of::<MemoryPages>() + 2 * SNAPSHOT_BYTES);
const _: () =
    assert!(size_of::<Serving>() == 32 + 24 + 12 + 4 + 8 + 32 + 24 + 16 + 48 + size_of::<Written>() + 24);
const _: () = assert!(size_of::<Parsed>() == 24 + 16 + 56 + 16 + LINE_BYTES);
const _: () = assert!(size_of::<ParserKey>() == 16);
const _: () = assert!(size_of::<RequestEvent>() == 40 + 64 + 72 + 16 + 8 + 24 + 16 + LINE_BYTES + 8 + 56);

#[cfg(test)]
mod tests {
    use super::*;

    /// Sequence numbers wrap at 4 GiB. A response that large is not mistaken for a small one.
    #[test]
    fn written_bytes() {
        let at = |acked: u64, sequence: u32| Written { acked, sequence, state: 1, ..Written::default() };
        assert_eq!(at(7, 107).since(at(7, 7)), 100);
        assert_eq!(at(1 << 30, 50).since(at(0, u32::MAX - 49)), 100);
        assert_eq!(at(1 << 32, 107).since(at(7, 7)), SENT_UNKNOWN);
        let in_state = |state| Written { state, ..at(0, 108) }.since(at(0, 8));
        assert_eq!([1, 4, 5, 8, 9, 11].map(in_state), [100, 99, 99, 100, 99, 99]);
        // TCP_CLOSE and others: it is unknown whether there was a FIN.
        assert_eq!([0, 7, 12].map(in_state), [SENT_UNKNOWN; 3]);
    }

    /// A target ends with its query or its line, and all bytes after that are left out, whatever they are.
    #[test]
    fn targets() {
        let cut = |text: &[u8; 8]| {
            let word = u64::from_le_bytes(*text);
            let (mask, end) = end_of_target(word);
            ((word & mask).to_le_bytes(), end)
        };
        assert_eq!(cut(b"GET /abc"), (*b"GET /abc", 0));
        assert_eq!(cut(b"/a?token"), (*b"/a?\0\0\0\0\0", 3));
        assert_eq!(cut(b"/1.1\r\nHo"), (*b"/1.1\r\0\0\0", 5));
        assert_eq!(cut(b"\nSECRET?"), (*b"\n\0\0\0\0\0\0\0", 1));
        assert_eq!(cut(b"SECRET7?"), (*b"SECRET7?", 8));
        // Bytes whose bits are similar to those of the terminators.
        assert_eq!(cut(b"?>@\x0c\x0e\x0b\xbf\x8d"), (*b"?\0\0\0\0\0\0\0", 1));
        assert_eq!(cut(b">@\x0c\x0e\x0b\xbf\x8d\xff"), (*b">@\x0c\x0e\x0b\xbf\x8d\xff", 0));
        for at in 0..8 {
            for end in *b"?\r\n" {
                let mut text = *b"aaaaaaaa";
                text[at] = end;
                assert_eq!(cut(&text).1 as usize, at + 1);
            }
        }
    }
}
