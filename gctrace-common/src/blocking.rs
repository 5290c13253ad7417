//! HTTP servers in which one thread reads a request, serves it and answers it with blocking calls: Unicorn and WEBrick.

/// Value of the map of servers: a Unicorn. A thread that has accepted a connection and reads a request on it serves that request.
pub const SERVES_UNICORN: u32 = 4;
/// Value of the map of servers: a process that listens and may run WEBrick. A thread that has read from a connection and queries its own
/// address serves a request (`WEBrick::HTTPRequest#parse` does that before it reads on).
pub const MAY_BE_WEBRICK: u32 = 8;
/// Value of the map of servers: a process in which a thread has done so.
pub const IS_WEBRICK: u32 = 16;
/// In the upper half of that value: number of connections accepted so far, see [`TRIED`].
pub const ACCEPTED: u32 = 1 << 16;
/// A process that has accepted this many connections and never queried its own address is not a WEBrick.
pub const TRIED: u32 = 16;

/// Flag in the number that stands for the parser of a connection; the lower half is the connection's descriptor. No address has this bit.
pub const DESCRIPTOR: u64 = 1 << 62;
/// Size of the ring of processes that begin to listen, bytes: the smallest possible size.
pub const LISTEN_RING_BYTES: u32 = 4096;

/// Where a probe of such a server is; the attach cookie. The points that [`RequestPoint`](crate::request::RequestPoint) has, too, have the
/// same numbers there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum BlockingPoint {
    /// A call of `getsockname(fd)`.
    Announce = 0,
    /// The jump that tests the result of `listen`.
    Listen = 1,
    /// A call of `poll(fds, count)` or `ppoll`.
    Wait = 2,
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
    /// The jump that tests the result of `accept` or `accept4`.
    Accepted = 9,
    /// A call of `read(fd, buffer, length)` or `recv`.
    Read = 10,
    /// The jump after that call that tests its result.
    HasRead = 11,
    /// The same inside the called function, after the system call: descriptor and buffer are still in their registers.
    Received = 12,
}

impl BlockingPoint {
    /// All points, in the order of their numbers.
    pub const ALL: [Self; 13] = [
        Self::Announce,
        Self::Listen,
        Self::Wait,
        Self::Accept,
        Self::Open,
        Self::Write,
        Self::WriteVector,
        Self::SendMessage,
        Self::Close,
        Self::Accepted,
        Self::Read,
        Self::HasRead,
        Self::Received,
    ];
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::RequestPoint;

    /// Points that both enumerations have share a number, and the numbers of the other points do not collide.
    #[test]
    fn numbers() {
        use BlockingPoint as B;
        use RequestPoint as R;
        let both = [
            (B::Accept, R::Accept),
            (B::Open, R::Open),
            (B::Write, R::Write),
            (B::WriteVector, R::WriteVector),
            (B::SendMessage, R::SendMessage),
            (B::Close, R::Close),
        ];
        assert!(both.iter().all(|&(blocking, request)| blocking as u8 == request as u8));
        assert!(B::ALL.iter().enumerate().all(|(number, &point)| number == point as usize));
        assert_eq!((SERVES_UNICORN | MAY_BE_WEBRICK | IS_WEBRICK) & (ACCEPTED * TRIED), 0);
    }
}
