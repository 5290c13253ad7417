//! Attaching uprobes to a file, individually or many by one link.

use std::{
    num::NonZeroU32,
    path::{Path, PathBuf},
};

use aya::programs::{
    Program,
    uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeScope},
};

use super::Probes;
use crate::bpf::{
    errors::AttachError,
    links::{self, Link},
    multi::Multi,
    programs::load_late,
};

/// Which processes a probe fires for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Every process that maps the image, now or later; the programs filter.
    All,
    /// One process, without its children.
    One(NonZeroU32),
}

impl Scope {
    pub(in crate::bpf) fn of_aya(self) -> UProbeScope {
        match self {
            Self::All => UProbeScope::AllProcesses,
            Self::One(pid) => UProbeScope::OneProcess(pid),
        }
    }

    pub(in crate::bpf) fn pid(self) -> Option<NonZeroU32> {
        match self {
            Self::All => None,
            Self::One(pid) => Some(pid),
        }
    }
}

/// A probe to attach.
pub(super) struct Uprobe {
    /// Its program.
    pub(super) program: &'static str,
    /// Name of the probed event, for messages.
    pub(super) point: &'static str,
    pub(super) offset: u64,
    pub(super) cookie: Option<u64>,
    /// Whether it fires when the function at the offset returns.
    pub(super) at_return: bool,
}

impl Probes {
    /// Attaches probes to a file in order, or none: on failure, those already attached are detached. Adjacent probes with the same
    /// program are attached by one link where the kernel supports it.
    pub(super) fn attach_uprobes(
        &mut self,
        probes: &[Uprobe],
        path: &Path,
        scope: Scope,
    ) -> Result<Vec<Link>, AttachError> {
        let mut done = Vec::new();
        for probes in probes.chunk_by(|a, b| a.program == b.program) {
            if let Err(error) = self.attach_to_program(probes, path, scope, &mut done) {
                links::detach(done);
                return Err(error);
            }
        }
        Ok(done)
    }

    fn attach_to_program(
        &mut self,
        probes: &[Uprobe],
        path: &Path,
        scope: Scope,
        done: &mut Vec<Link>,
    ) -> Result<(), AttachError> {
        let Some(first) = probes.first() else { return Ok(()) };
        let name = first.program;
        let failed = |probe: &Uprobe, source: Box<dyn std::error::Error + Send + Sync>| AttachError::Attach {
            point: probe.point,
            offset: probe.offset,
            path: PathBuf::from(path),
            source,
        };
        if let Some(program) = self.multi.as_ref().and_then(|multi| multi.program(name)) {
            let places: Vec<_> =
                probes.iter().map(|probe| (probe.offset, probe.cookie.unwrap_or(0))).collect();
            let link = Multi::attach(program, first.at_return, path, &places, scope.pid());
            done.push(Link::of(link.map_err(|source| failed(first, source.into()))?));
            return Ok(());
        }
        let program = self.ebpf.program_mut(name).ok_or(AttachError::NoProgram(name))?;
        load_late(program).map_err(|source| failed(first, source.into()))?;
        let Program::UProbe(program) = program else { return Err(AttachError::NoProgram(name)) };
        for probe in probes {
            let location = UProbeAttachLocation::AbsoluteOffset(probe.offset);
            let point = UProbeAttachPoint { location, cookie: probe.cookie };
            let link = program.attach(point, path, scope.of_aya());
            let link = link.and_then(|link| program.take_link(link));
            done.push(Link::of(link.map_err(|source| failed(probe, source.into()))?));
        }
        Ok(())
    }
}
