//! The requests' part of the data path: records become units of work, which events name.

use gctrace_common::request::{RequestEnd, RequestEvent};

use super::Pipeline;
use crate::{
    aggregate::{
        endpoint,
        units::{Facts, UnitKey},
    },
    bpf::RequestReader,
    decode::{self, Event},
    model::{request::Request, seen::Seen},
};

/// Records taken in one go.
const BATCH: usize = 4096;

impl Pipeline {
    /// The same, seeing requests.
    #[must_use]
    pub fn with_requests(self, requests: Option<RequestReader>) -> Self {
        Self { requests, ..self }
    }

    /// Takes the requests that have ended. Before the GC records of the same moment are taken: then none of a request that has
    /// ended comes later.
    pub(super) fn take_requests(&mut self) {
        let Some(mut reader) = self.requests.take() else { return };
        reader.drain(BATCH, |bytes| match decode::decode(bytes) {
            Ok(Event::Request(end, event)) => {
                self.counts.decoded_requests += 1;
                self.request(end, event);
            }
            Ok(_) => self.counts.undecodable += 1,
            Err(error) => {
                self.counts.undecodable += 1;
                log::warn!("a request record could not be decoded: {error}");
            }
        });
        self.requests = Some(reader);
    }

    fn request(&mut self, end: RequestEnd, event: &RequestEvent) {
        let header = &event.header;
        let (pid, tid, begin_ns) = (header.tgid, header.tid, event.begin_ns);
        self.trace_known(pid, header.image, "", begin_ns);
        if !self.traced.contains_key(&pid) {
            self.counts.requests_refused += 1;
            return;
        }
        let line = event.line.get(..event.len as usize).unwrap_or_default();
        let (method, path) = endpoint::request_line(line);
        let since = |ns: u64| (ns != 0).then(|| ns.saturating_sub(begin_ns));
        let facts = Facts {
            end_ns: matches!(end, RequestEnd::Kept | RequestEnd::Closed).then_some(header.ts_ns),
            method,
            path,
            status: endpoint::status(&event.status),
            first_byte_ns: since(event.first_write_ns),
            last_byte_ns: since(event.last_write_ns),
        };
        let room = self.units.counts().no_room;
        self.units.seal(UnitKey { pid, tid, begin_ns }, facts);
        self.counts.requests_no_room += self.units.counts().no_room - room;
    }

    /// Hands out the requests that have ended. All GC records of them must have been taken.
    pub(super) fn report_requests(&mut self) {
        let taken = self.units.take();
        self.export_requests(&taken);
    }

    /// A process has ended, or tracing of it has.
    pub(super) fn end_requests(&mut self, pid: u32) {
        let taken = self.units.end(pid);
        self.export_requests(&taken);
    }

    fn export_requests(&mut self, taken: &[(u32, Request)]) {
        for (pid, request) in taken {
            let Some(process) = self.traced.get(pid).map(|traced| traced.process.clone()) else {
                self.counts.requests_refused += 1;
                continue;
            };
            self.counts.requests_reported += 1;
            self.export(|exporter| exporter.see(&process, Seen::Request(request)));
        }
        self.counts.requests_unknown = self.units.counts().unknown;
    }

    /// The id of the request in which a cycle was started.
    pub(super) fn request_of_cycle(&mut self, pid: u32, tid: u32, begin_ns: u64) -> Option<u64> {
        (begin_ns != 0).then(|| self.units.cycle(UnitKey { pid, tid, begin_ns })).flatten()
    }

    /// A pause of a thread that serves a request.
    pub(super) fn request_pause(&mut self, pid: u32, tid: u32, begin_ns: u64, ns: u64) {
        if begin_ns != 0 {
            self.units.pause(UnitKey { pid, tid, begin_ns }, ns);
        }
    }

    /// Requests that were being served when the gate was closed.
    pub fn requests_still_open(&mut self) {
        self.counts.requests_open = self.requests.as_ref().map_or(0, RequestReader::open);
    }
}
