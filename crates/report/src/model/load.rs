//! The load of a server at one moment.

/// What was read of a server at one moment: about once a second, where requests are watched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerLoad {
    /// When, `CLOCK_MONOTONIC` nanoseconds.
    pub ts_ns: u64,
    /// Threads of a Puma's pool that were serving a request. `None`: it is no Puma, or one of these threads has not been seen to take a request
    /// yet.
    pub busy: Option<u32>,
    /// The accept queues of the TCP sockets on which it listens; none where it does not, or where that could not be read.
    pub queues: Vec<AcceptQueue>,
}

/// Connections of a listening socket that no process has accepted (`sk_ack_backlog`, include/net/sock.h; `Recv-Q` of `ss -ltn`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceptQueue {
    /// Inode of the socket, by which processes that share it are known to do so.
    pub inode: u64,
    /// How many connections.
    pub waiting: u32,
}

impl ServerLoad {
    /// Connections in all its accept queues; `None`: it is not known to have one.
    pub fn waiting(&self) -> Option<u64> {
        (!self.queues.is_empty()).then(|| self.queues.iter().map(|queue| u64::from(queue.waiting)).sum())
    }
}
