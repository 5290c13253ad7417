//! HTTP servers in which one thread reads a request, serves it and answers it by blocking calls: Unicorn and WEBrick.

/// Value of the map of servers: a Unicorn. A thread that has accepted a connection and reads a request there serves it.
pub const SERVES_UNICORN: u32 = 4;
/// The same: a process that listens and may run WEBrick. A thread that has read of a connection and asks for its own address serves a
/// request (`WEBrick::HTTPRequest#parse` does that before it reads on).
pub const MAY_BE_WEBRICK: u32 = 8;
/// The same: a thread of it has.
pub const IS_WEBRICK: u32 = 16;
/// In the upper half of that value: connections that were accepted before, see [`TRIED`].
pub const ACCEPTED: u32 = 1 << 16;
/// A process that has accepted so many connections, and never asked for its own address, is no WEBrick.
pub const TRIED: u32 = 16;

/// In the number that stands for the parser of a connection: the lower half is its descriptor. No address has this bit.
pub const DESCRIPTOR: u64 = 1 << 62;
/// Size of the ring of processes that begin to listen, bytes: the smallest that there is.
pub const LISTEN_RING_BYTES: u32 = 4096;

/// What a probe of such a server is at; the attach cookie. Those of [`RequestPoint`](crate::request::RequestPoint) have the same numbers
/// there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum BlockingPoint {
    /// A call of `getsockname(fd)`.
    Announce = 0,
    /// The jump that tests what `listen` has returned.
    Listen = 1,
    /// A call of `poll(fds, count)` or `ppoll`.
    Wait = 2,
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
    /// The jump that tests what `accept` or `accept4` has returned.
    Accepted = 9,
    /// A call of `read(fd, buffer, length)` or `recv`.
    Read = 10,
    /// The jump behind it that tests what it has returned.
    HasRead = 11,
    /// The same, in the function itself behind the system call: descriptor and buffer are still in their registers.
    Received = 12,
}

impl BlockingPoint {
    /// All, in the order of their numbers.
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

    /// Points of both have the same number, and the numbers of the others are free.
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
