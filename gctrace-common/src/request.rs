//! HTTP requests of a server: where they begin and end on the thread that serves them.

#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    event::{Header, SNAPSHOT_BYTES},
    gvl::OwnTimes,
    memory::MemoryPages,
    traceparent::{VALUE_WORDS, pieces::TAIL_WORDS},
};

/// Bytes of a request that are looked at: its first line, as far as it fits.
pub const LINE_BYTES: usize = 256;
/// Bytes of a response that are looked at: `HTTP/1.1 200`.
pub const STATUS_BYTES: usize = 12;
/// Entries of the map of threads that serve requests.
pub const MAX_SERVING: u32 = 16_384;
/// Entries of the map of connections and of that of their parsers. Those not used for longest go first.
pub const MAX_CONNECTIONS: u32 = 16_384;
/// Entries of the map of arrivals: sockets on which data came, in the cgroups of servers. Those not used for longest go first.
pub const MAX_ARRIVALS: u32 = 16_384;
/// Entries of the map of servers.
pub const MAX_SERVERS: u32 = 8192;
/// Entries of the map of programs that processes became by an exec. Those not used for longest go first.
pub const MAX_EXECS: u32 = 16_384;
/// Size of the ring of requests, bytes.
pub const REQUEST_RING_BYTES: u32 = 1 << 20;
/// The same where the state of the VM is copied at the begin and end of each, bytes.
pub const UNIT_RING_BYTES: u32 = 8 << 20;

/// Value of the map of servers: its HTTP requests are seen.
pub const SERVES_HTTP: u32 = 1;
/// The same: its jobs are seen.
pub const RUNS_JOBS: u32 = 2;

/// What a probe of a server is at; the attach cookie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RequestPoint {
    /// A call of `puma_parser_execute(parser, buffer, length, offset)`.
    Parse = 0,
    /// A call of `puma_parser_init(parser)`: for a new connection, or behind a request.
    Reset = 1,
    /// A call of `getsockopt(fd, level, name)`: with `TCP_INFO`, Puma's look whether the client is still there, the first thing
    /// that the thread does which serves a request (`Puma::Server#closed_socket?`).
    Take = 2,
    /// A call of `accept4`.
    Accept = 3,
    /// A call of `rb_update_max_fd(fd)`: with every new descriptor.
    Open = 4,
    /// A call of `write(fd, buffer, length)` or of a function with the same arguments; the end of the system call `sendfile(fd, file, …)`.
    Write = 5,
    /// A call of `writev(fd, vectors, count)`.
    WriteVector = 6,
    /// A call of `sendmsg(fd, message)`.
    SendMessage = 7,
    /// A call of `close(fd)`.
    Close = 8,
    /// A call of `rb_thread_local_aset(thread, id, value)` by `Thread#[]=`: Puma's, before it calls the application (`true`) and behind
    /// that (`false`), in `ThreadPool#with_force_shutdown`.
    Local = 9,
    /// A call of `SSL_write(connection, buffer, length)` by Puma: the plain text of what it then writes to a connection with TLS
    /// (`engine_write`, `ext/puma_http11/mini_ssl.c`).
    Encrypt = 10,
}

impl RequestPoint {
    /// All, in the order of their numbers.
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
    /// Its connection is ready for the next one.
    Kept = 0,
    /// Its connection was closed.
    Closed = 1,
    /// The thread serves another one; when this one ended was not seen (its connection was handed to somebody else).
    Left = 2,
    /// The thread ended.
    Gone = 3,
    /// A job was put back into its queue: it was not run.
    Returned = 4,
}

impl RequestEnd {
    /// Reads an end; unknown numbers are `None`.
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

/// Where in a unit of work, which is a request or a job, the state of the VM was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum UnitPoint {
    /// Its thread took it.
    Begin = 0,
    /// Its thread was done with it.
    End = 1,
}

impl UnitPoint {
    /// Reads a point; unknown numbers are `None`.
    pub const fn from_raw(raw: u32) -> Option<Self> {
        Some(match raw {
            0 => Self::Begin,
            1 => Self::End,
            _ => return None,
        })
    }
}

/// Byte offsets that lead from a task and a descriptor to the number of a TCP socket. All zero: not known.
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
    /// `fd` there.
    pub table_entries: u32,
    /// `f_inode` in `file`.
    pub file_inode: u32,
    /// `private_data` there: of a socket its `struct socket`.
    pub file_private: u32,
    /// `i_mode` in `inode`.
    pub inode_mode: u32,
    /// `i_ino` there, which no other socket gets while 2^32 others are made.
    pub inode_number: u32,
    /// `sk` in `socket`.
    pub socket_sock: u32,
    /// `sk_protocol` (16 bits) in `sock`.
    pub sock_protocol: u32,
    /// `__sk_common.skc_cookie` there: the socket's number, which no other socket gets; 0 as long as nobody asked for it.
    pub sock_cookie: u32,
    /// `__sk_common.skc_state` (8 bits) there: the state of a TCP connection.
    pub sock_state: u32,
    /// `__sk_common.skc_dport` there: the peer's port, in network byte order. Zero: not known.
    pub sock_port: u32,
    /// `write_seq` in `tcp_sock`, which begins with the `sock`: the number behind the last byte that the process has written. Zero: not known.
    pub tcp_written: u32,
    /// `bytes_acked` there: bytes that the peer has acknowledged.
    pub tcp_acked: u32,
}

/// What had been written on a connection at some time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct Written {
    /// Kernel address of its `sock`; 0: not known, and then nothing else is.
    pub sock: u64,
    /// The number of its inode: with another one it is another socket in the same place.
    pub inode: u64,
    /// Bytes that the peer had acknowledged.
    pub acked: u64,
    /// The number behind the last byte, which wraps.
    pub sequence: u32,
    /// The state of the connection.
    pub state: u32,
}

impl Written {
    /// Bytes that were written since then; [`SENT_UNKNOWN`]: the number may have wrapped, or the connection is gone, with or without a FIN. What is
    /// written and not acknowledged is at most a window (1 GiB, RFC 7323 section 2.3), so the number has not wrapped if less than half of its range
    /// was acknowledged.
    #[inline]
    pub const fn since(self, earlier: Self) -> u64 {
        let (Some(fins), Some(fins_then)) = (self.fins(), earlier.fins()) else { return SENT_UNKNOWN };
        if self.acked.wrapping_sub(earlier.acked) >= 1 << 31 {
            return SENT_UNKNOWN;
        }
        let (end, begin) = (self.sequence.wrapping_sub(fins), earlier.sequence.wrapping_sub(fins_then));
        end.wrapping_sub(begin) as u64
    }

    /// How many numbers a FIN has, which is behind the data once the process has shut the connection down (`tcp_states.h`).
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
    /// Since when it serves one, nanoseconds; 0: it serves none. With the thread, what names the request.
    pub begin_ns: u64,
    /// The parser of its connection; 0: not known.
    pub parser: u64,
    /// First bytes of the response, nanoseconds; 0: none yet.
    pub first_write_ns: u64,
    /// Last bytes of it so far.
    pub last_write_ns: u64,
    /// See [`RequestEvent::arrival_ns`].
    pub arrival_ns: u64,
    /// The descriptor of its connection.
    pub fd: u32,
    /// 1: a connection is being accepted.
    pub accepting: u32,
    /// The descriptor of a connection that was accepted, plus 1; 0: none.
    pub accepted: u32,
    /// Thread group id.
    pub tgid: u32,
    /// Begin of the first status line that is not of an interim response.
    pub status: [u8; STATUS_BYTES],
    /// [`GvlGate::epoch`](crate::gvl::GvlGate::epoch) plus 1 in which the thread was last seen to get the GVL; 0: never.
    pub gvl_epoch: u32,
    /// For how long it has waited for the GVL since it took the request, nanoseconds; [`GVL_UNKNOWN`]: not all was seen.
    pub gvl_ns: u64,
    /// The times of the thread up to when it took the request.
    pub times: OwnTimes,
    /// [`GvlTask::epoch`](crate::gvl::GvlTask::epoch) plus 1 of these times; 0: there are none.
    pub times_epoch: u32,
    /// What a hit has left to be done at its end: one of the constants. Passed in here, so that the verifier walks the rest once, and not
    /// once for each way to it.
    pub step: u32,
    /// Where a call puts what it reads; 0: there is none ([`BlockingPoint::Read`](crate::blocking::BlockingPoint::Read)).
    pub buffer: u64,
    /// The descriptor from which it reads.
    pub reading: u32,
    /// The descriptor of the connection on which it takes the next request as soon as it has read the begin of it, plus 1; 0: none
    /// ([`blocking`](crate::blocking)).
    pub announced: u32,
    /// Where a request is of which Puma did not look at the connection before it called the application: one of the constants from
    /// [`Serving::LOOKED_AT`] on.
    pub phase: u32,
    /// The descriptor of an accepted connection on which it wrote a response while the application ran, plus 1; 0: none.
    pub early: u32,
    /// Slots of heap pages that it has taken since then to allocate objects in them; [`ALLOC_UNKNOWN`]: not all was seen.
    pub alloc_slots: u64,
    /// Their bytes.
    pub alloc_bytes: u64,
    /// What had been written on its connection when it took the request.
    pub written: Written,
}

impl Serving {
    /// [`Serving::step`]: nothing.
    pub const NOTHING: u32 = 0;
    /// It has taken a unit, whose state is to be copied.
    pub const TAKEN: u32 = 1;
    /// The unit has ended as [`RequestEnd::Kept`].
    pub const KEPT: u32 = 2;
    /// The unit has ended as [`RequestEnd::Closed`].
    pub const CLOSED: u32 = 3;
    /// The unit has ended as [`RequestEnd::Returned`].
    pub const PUT_BACK: u32 = 4;

    /// [`Serving::phase`]: Puma did look, so its connection is known.
    pub const LOOKED_AT: u32 = 0;
    /// The application runs. The connection is not known.
    pub const CALLED: u32 = 1;
    /// It has returned, and no response was written yet. What is written next shows the connection.
    pub const RETURNED: u32 = 2;
    /// The response is being written.
    pub const ANSWERED: u32 = 3;
    /// Puma did look, and has called the application. (Only seen where it listens on a Unix socket, too.)
    pub const ENTERED: u32 = 4;

    /// [`Serving::parser`]: that of a connection that will be known later. No address has this bit.
    pub const UNBOUND: u64 = 1 << 61;
    /// [`Serving::first_write_ns`]: not known.
    pub const UNKNOWN_NS: u64 = u64::MAX;
}

/// Not all waits for the GVL were seen.
pub const GVL_UNKNOWN: u64 = u64::MAX;
/// Not all slots that were taken were seen.
pub const ALLOC_UNKNOWN: u64 = u64::MAX;
/// It is not known how many bytes were written.
pub const SENT_UNKNOWN: u64 = u64::MAX;

/// What the parser of a connection has been given last.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct Parsed {
    /// When it got the first bytes of a request, nanoseconds; 0: none since the last one.
    pub first_ns: u64,
    /// When it got the last.
    pub last_ns: u64,
    /// Bytes of `line`.
    pub len: u32,
    /// The thread that gave it the last.
    pub tid: u32,
    /// Bytes of the head that have been searched for the header `traceparent`.
    pub searched: u32,
    /// How many there are in them, two at most.
    pub headers: u32,
    /// Where the value of the first begins, in bytes from that of the head. Of a head that comes in pieces: what the first is, a
    /// [`Traceparent`](crate::traceparent::Traceparent).
    pub value_at: u32,
    /// A [`Traceparent`](crate::traceparent::Traceparent).
    pub traceparent: u32,
    /// Its value and a zero byte, if it is valid; else undefined.
    pub value: [u64; VALUE_WORDS],
    /// Of a head that comes in pieces: the last bytes that have been searched ([`pieces`](crate::traceparent::pieces)).
    pub tail: [u64; TAIL_WORDS],
    /// The first bytes of the request, up to the end of its target. What lies beyond `len` is undefined, but no header and no query.
    pub line: [u8; LINE_BYTES],
}

/// In eight bytes of a request, as they lie in memory: a mask of those up to the end of its target, and how many these are; 0: it is not
/// there. A target ends with its query, or with the line.
#[inline(always)]
pub const fn end_of_target(word: u64) -> (u64, u32) {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGHEST: u64 = 0x80 * ONES;
    const QUERY: u64 = b'?' as u64 * ONES;
    const RETURN: u64 = b'\r' as u64 * ONES;
    const LINE_FEED: u64 = b'\n' as u64 * ONES;
    // The lowest of the bits is that of a byte that is zero; higher ones may not be.
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
    /// Its address.
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
    /// Common head; `point` is a [`RequestEnd`], `ts_ns` when it ended.
    pub header: Header,
    /// When its thread took it, nanoseconds as in the header.
    pub begin_ns: u64,
    /// When its first bytes were parsed; 0: not seen.
    pub first_ns: u64,
    /// When the last of its head were parsed.
    pub parsed_ns: u64,
    /// When the kernel had received the last bytes that had come on its connection at `begin_ns`; 0: not seen.
    pub arrival_ns: u64,
    /// First bytes of the response; 0: none.
    pub first_write_ns: u64,
    /// Last bytes of it.
    pub last_write_ns: u64,
    /// Begin of the GC pause in which a thread of its process was when it ended; 0: in none.
    pub pause_ns: u64,
    /// For how long its thread waited for the GVL, nanoseconds; [`GVL_UNKNOWN`]: not all was seen.
    pub gvl_ns: u64,
    /// The times of its thread in it: for how long its native thread had a CPU, could have run, and could not, and how much of that belongs to waits
    /// for the GVL and to times without it.
    pub times: OwnTimes,
    /// Slots of heap pages that its thread took to allocate objects in them; [`ALLOC_UNKNOWN`]: not all was seen.
    pub alloc_slots: u64,
    /// Their bytes.
    pub alloc_bytes: u64,
    /// Bytes that were written on its connection while it was served; [`SENT_UNKNOWN`]: not known.
    pub sent_bytes: u64,
    /// Begin of its status line, or zeros.
    pub status: [u8; STATUS_BYTES],
    /// Bytes of `line`; 0: the request was not seen when it was parsed.
    pub len: u32,
    /// The first bytes of the request; undefined beyond `len`.
    pub line: [u8; LINE_BYTES],
    /// A [`Traceparent`](crate::traceparent::Traceparent).
    pub traceparent: u32,
    /// Zero.
    pub reserved: u32,
    /// Its value and a zero byte, if it is valid; else undefined.
    pub value: [u64; VALUE_WORDS],
}

/// Two copies of the objspace, one after the other, where a unit of work begins or ends. The thread is stopped there, but it need not hold
/// the GVL (it does not where it closes a connection), and other Ractors have GVLs of their own: only where both copies are the same,
/// nobody changed anything meanwhile.
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
    /// The same again.
    pub again: [u8; SNAPSHOT_BYTES],
}

const _: () = assert!(size_of::<UnitEvent>() == 48 + size_of::<MemoryPages>() + 2 * SNAPSHOT_BYTES);
const _: () =
    assert!(size_of::<Serving>() == 32 + 24 + 12 + 4 + 8 + 32 + 24 + 16 + 48 + size_of::<Written>());
const _: () = assert!(size_of::<Parsed>() == 24 + 16 + 56 + 16 + LINE_BYTES);
const _: () = assert!(size_of::<ParserKey>() == 16);
const _: () = assert!(size_of::<RequestEvent>() == 40 + 64 + 72 + 16 + 8 + 16 + LINE_BYTES + 8 + 56);

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers wrap at 4 GiB. A response that large is not known to be small.
    #[test]
    fn written_bytes() {
        let at = |acked: u64, sequence: u32| Written { acked, sequence, state: 1, ..Written::default() };
        assert_eq!(at(7, 107).since(at(7, 7)), 100);
        assert_eq!(at(1 << 30, 50).since(at(0, u32::MAX - 49)), 100);
        assert_eq!(at(1 << 32, 107).since(at(7, 7)), SENT_UNKNOWN);
        let in_state = |state| Written { state, ..at(0, 108) }.since(at(0, 8));
        assert_eq!([1, 4, 5, 8, 9, 11].map(in_state), [100, 99, 99, 100, 99, 99]);
        // TCP_CLOSE: nobody knows whether it had a FIN.
        assert_eq!([0, 7, 12].map(in_state), [SENT_UNKNOWN; 3]);
    }

    /// A target ends with its query or its line, and all bytes behind that are left out, whatever they are.
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
        // Bytes of which the bits are near those that end it.
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
