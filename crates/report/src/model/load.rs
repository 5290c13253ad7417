//! The load of a server at one moment.

/// Measurements of a server at one moment, taken about once a second while requests are watched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerLoad {
    /// When, `CLOCK_MONOTONIC` nanoseconds.
    pub ts_ns: u64,
    /// Number of threads of a Puma's pool that were serving a request. `None`: it is not a Puma, or at least one thread of the pool has not been
    /// seen to take a request yet.
    pub busy: Option<u32>,
    /// Accept queues of the TCP sockets that it listens on; empty if it does not listen, or if they could not be read.
    pub queues: Vec<AcceptQueue>,
}

/// Connections of a listening socket that no process has accepted yet (`sk_ack_backlog`, include/net/sock.h; `Recv-Q` of `ss -ltn`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceptQueue {
    /// Inode of the socket; it identifies a socket that several processes share.
    pub inode: u64,
    /// Number of connections.
    pub waiting: u32,
}

impl ServerLoad {
    /// Number of connections in all its accept queues; `None` if no queue is known.
    pub fn waiting(&self) -> Option<u64> {
        (!self.queues.is_empty()).then(|| self.queues.iter().map(|queue| u64::from(queue.waiting)).sum())
    }
}
