//! Attaching the fallback probes.

use std::{
    ffi::CString,
    fs, io,
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
    sync::Arc,
};

use aya::programs::{
    Program,
    uprobe::{UProbeAttachLocation, UProbeAttachPoint},
};
use gctrace_common::cookie::Cookie;
use perf_event::{
    Builder, Counter,
    events::{Event, EventData},
};
use perf_event_open_sys::bindings::perf_event_attr;

use super::{Probes, uprobes::Scope};
use crate::{
    bpf::{
        errors::AttachError,
        links::{self, Link},
        programs::load_late,
        raw,
    },
    ruby::fallback::PhaseProbe,
};

/// Programs of the phases, by [`Edge`](crate::ruby::fallback::Edge).
pub(in crate::bpf) const PHASE_PROGRAMS: [&str; 3] = ["phase_begin", "phase_end", "phase_return"];

/// A probe attached without Aya, which cannot attach to probes that count their users in a semaphore.
struct Semaphore {
    _link: OwnedFd,
    _event: Counter,
}

impl Probes {
    /// Attaches the phases of an image through `path`, or none: on failure, those already attached are detached. Needs attach
    /// cookies (Linux 5.15).
    pub fn attach_phases(
        &mut self,
        image: u32,
        probes: &[PhaseProbe],
        path: &Path,
        scope: Scope,
    ) -> Result<(), AttachError> {
        let mut done = Vec::with_capacity(probes.len());
        for probe in probes {
            match self.attach_phase(image, probe, path, scope) {
                Ok(attached) => done.push(attached),
                Err(error) => {
                    links::detach(done);
                    return Err(error);
                }
            }
        }
        self.keep(image, probes.len(), done);
        Ok(())
    }

    fn attach_phase(
        &mut self,
        image: u32,
        probe: &PhaseProbe,
        path: &Path,
        scope: Scope,
    ) -> Result<Link, AttachError> {
        let cookie =
            Cookie { image: image as u16, register: probe.phase as u8, address: probe.address.0 }.pack();
        let name = PHASE_PROGRAMS[probe.edge as usize];
        let Some(program @ Program::UProbe(_)) = self.ebpf.program_mut(name) else {
            return Err(AttachError::NoProgram(name));
        };
        let offset = probe.file_offset.0;
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| AttachError::Phase {
            phase: probe.phase.name(),
            offset,
            path: path.to_owned(),
            source,
        };
        load_late(program).map_err(|source| failed(source.into()))?;
        if let Some(semaphore) = probe.semaphore {
            let fd = program.fd().map_err(|error| failed(error.into()))?.as_fd();
            let counted = (|| {
                let mut builder = Builder::new(CountedUprobe::new(path, offset, semaphore.0)?);
                match scope {
                    Scope::All => builder.any_pid().one_cpu(0),
                    Scope::One(pid) => builder.observe_pid(pid.get() as i32),
                };
                let mut event = builder.build()?;
                let link = raw::link_perf_event(fd, event.as_raw_fd(), cookie)?;
                event.enable()?;
                Ok(Semaphore { _link: link, _event: event })
            })();
            return counted.map(Link::of).map_err(|error: io::Error| failed(error.into()));
        }
        let Program::UProbe(program) = program else { return Err(AttachError::NoProgram(name)) };
        let point = UProbeAttachPoint {
            location: UProbeAttachLocation::AbsoluteOffset(offset),
            cookie: Some(cookie),
        };
        let link = program.attach(point, path, scope.of_aya()).and_then(|link| program.take_link(link));
        link.map(Link::of).map_err(|error| failed(error.into()))
    }
}

/// A uprobe whose users the kernel counts in a word of the traced program (a USDT semaphore).
struct CountedUprobe {
    kind: u32,
    path: CString,
    offset: u64,
    semaphore: u64,
}

impl CountedUprobe {
    fn new(path: &Path, offset: u64, semaphore: u64) -> io::Result<Self> {
        let kind = fs::read_to_string("/sys/bus/event_source/devices/uprobe/type")?;
        let kind = kind.trim().parse().map_err(io::Error::other)?;
        Ok(Self { kind, path: CString::new(path.as_os_str().as_bytes())?, offset, semaphore })
    }
}

impl Event for CountedUprobe {
    fn update_attrs(self, attributes: &mut perf_event_attr) {
        self.update_attrs_with_data(attributes);
    }

    /// The kernel reads the path when it opens the event, so the builder keeps the path alive until then.
    fn update_attrs_with_data(self, attributes: &mut perf_event_attr) -> Option<Arc<dyn EventData>> {
        let path = Arc::new(self.path);
        attributes.type_ = self.kind;
        // The file offset of the semaphore is the upper half of `config` (the event source's `format/ref_ctr_offset`,
        // Linux 4.20).
        attributes.config = self.semaphore << 32;
        attributes.config1 = path.as_ptr() as u64;
        attributes.config2 = self.offset;
        Some(path)
    }
}
