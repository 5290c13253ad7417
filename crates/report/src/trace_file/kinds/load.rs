//! Loads of servers in recordings: messages, both directions, bounds and what a copy may change.

use super::{super::visit::Visit, decode::Bounds};
use crate::model::load::{AcceptQueue, ServerLoad};

/// [`ServerLoad`] as a message.
#[derive(Clone, PartialEq, prost::Message)]
pub(in crate::trace_file) struct LoadMessage {
    #[prost(uint64, tag = "1")]
    pub ts_ns: u64,
    #[prost(uint32, optional, tag = "2")]
    pub busy: Option<u32>,
    #[prost(message, repeated, tag = "3")]
    pub queues: Vec<QueueMessage>,
}

/// [`AcceptQueue`] as a message.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in crate::trace_file) struct QueueMessage {
    #[prost(uint64, tag = "1")]
    pub inode: u64,
    #[prost(uint32, tag = "2")]
    pub waiting: u32,
}

pub(in crate::trace_file) fn encode(load: &ServerLoad) -> LoadMessage {
    let ServerLoad { ts_ns, busy, queues } = load;
    let queues =
        queues.iter().map(|AcceptQueue { inode, waiting }| QueueMessage { inode: *inode, waiting: *waiting });
    LoadMessage { ts_ns: *ts_ns, busy: *busy, queues: queues.collect() }
}

pub(in crate::trace_file) fn decode(message: LoadMessage) -> ServerLoad {
    let LoadMessage { ts_ns, busy, queues } = message;
    let queues = queues.into_iter().map(|QueueMessage { inode, waiting }| AcceptQueue { inode, waiting });
    ServerLoad { ts_ns, busy, queues: queues.collect() }
}

impl Bounds {
    pub(in crate::trace_file) fn server_load(&mut self, load: &ServerLoad) {
        self.at([load.ts_ns]);
    }
}

pub(in crate::trace_file) fn visit(load: &mut ServerLoad, with: &mut impl Visit) {
    let ServerLoad { ts_ns, busy: _, queues: _ } = load;
    with.time(ts_ns);
}
