//! Records of a program started by an exec, while the end of the previous program has not been handled: that end waits for the last
//! GC records of the old program.

use gctrace_common::{
    event::{Header, Kind},
    job::JobEvent,
    request::{RequestEnd, RequestEvent, UnitEvent, UnitPoint},
};

use super::Pipeline;
use crate::stacks::Record;

/// Maximum number of waiting records. Above it the exec is handled at once, and the remaining records of the old program are lost for it.
pub(super) const MOST: usize = 1 << 14;

/// A record that waits for an exec.
pub(super) enum Early {
    /// A stack, or an event of its ring.
    Stack(Record),
    /// A request that ended.
    Request(RequestEnd, Box<RequestEvent>),
    /// A job that ended.
    Job(RequestEnd, Box<JobEvent>),
    /// A VM state at the beginning or the end of a unit of work.
    Unit(UnitPoint, Box<UnitEvent>),
}

impl Early {
    fn header(&self) -> &Header {
        match self {
            Self::Stack(record) => record.header(),
            Self::Request(_, event) => &event.header,
            Self::Job(_, event) => &event.header,
            Self::Unit(_, event) => &event.header,
        }
    }
}

impl Pipeline {
    /// Whether a record is of a program that was started by an exec which has not been handled yet.
    pub(super) fn is_early(&self, header: &Header) -> bool {
        self.lives.iter().any(|(kind, life)| {
            *kind == Kind::Exec && life.header.tgid == header.tgid && life.header.execs < header.execs
        })
    }

    /// Keeps such a record until the exec is handled.
    pub(super) fn wait_for_exec(&mut self, record: Early) {
        self.early.push(record);
    }

    /// Handles the records that waited for an exec of this process.
    pub(super) fn no_longer_early(&mut self, pid: u32) {
        if self.early.is_empty() {
            return;
        }
        for record in std::mem::take(&mut self.early) {
            let header = record.header();
            if header.tgid != pid || self.is_early(header) {
                self.early.push(record);
                continue;
            }
            match record {
                Early::Stack(record) => self.stack_record(record),
                Early::Request(end, event) => self.request(end, &event),
                Early::Job(end, event) => self.job(end, &event),
                Early::Unit(point, event) => self.unit_state(point, &event),
            }
        }
        self.number_requests();
    }

    /// Handles pending execs if too many records wait for them.
    pub(super) fn bound_early(&mut self) {
        if self.early.len() <= MOST {
            return;
        }
        log::warn!(
            "too many records ({MOST}) wait for an exec: it is handled before the last GC records of the program that it replaced"
        );
        self.lives_until(u64::MAX);
    }
}
