//! Attaching the probes of the GVL.

use std::{
    fs::File,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
};

use gctrace_common::gvl::{GvlCookie, GvlPath};

use super::{
    Probes,
    uprobes::{Scope, Uprobe},
};
use crate::{
    bpf::{
        errors::AttachError,
        gvl::{AT_RETURN, FUTEX_PROGRAMS, PROGRAMS, TASK_PROGRAMS},
        links::{self, Link},
    },
    ruby::{
        ThreadOperand,
        gvl_plan::{GvlPlan, GvlProbe},
    },
};

/// The GVL probes of an image.
pub(super) struct GvlAttached {
    image: u32,
    plan: GvlPlan,
    file: File,
    scope: Scope,
    pub(super) links: Vec<Link>,
}

impl Probes {
    /// Attaches the GVL probes of an image, or none: on failure, those already attached are detached. While GVL probes are
    /// paused ([`Probes::pause_gvl`]), the probes are only recorded; [`Probes::resume_gvl`] attaches them.
    pub fn attach_gvl(
        &mut self,
        image: u32,
        plan: &GvlPlan,
        file: File,
        scope: Scope,
    ) -> Result<(), AttachError> {
        let mut links = Vec::new();
        if !self.gvl_paused {
            links = self.attach_gvl_plan(image, plan, &file, scope)?;
            if let Err(error) = self.attach_gvl_tracepoints(plan.path.by == GvlPath::BY_FUTEX) {
                links::detach(links);
                return Err(error);
            }
        }
        self.attached += plan.probes.len();
        self.gvl.push(GvlAttached { image, plan: plan.clone(), file, scope, links });
        Ok(())
    }

    /// Removes and returns the links of an image's GVL probes.
    pub(super) fn take_gvl(&mut self, image: u32) -> Vec<Link> {
        let (own, others) = std::mem::take(&mut self.gvl).into_iter().partition(|gvl| gvl.image == image);
        self.gvl = others;
        let own: Vec<GvlAttached> = own;
        self.attached -= own.iter().map(|gvl| gvl.plan.probes.len()).sum::<usize>();
        own.into_iter().flat_map(|gvl| gvl.links).collect()
    }

    /// Detaches the GVL probes of all images.
    pub fn pause_gvl(&mut self) {
        self.gvl_paused = true;
        let mut all = std::mem::take(&mut self.tracepoints);
        all.extend(self.gvl.iter_mut().flat_map(|gvl| std::mem::take(&mut gvl.links)));
        links::detach(all);
    }

    /// Attaches the futex tracepoints of all processes, or those of the scheduler, unless already attached. (A tracepoint of a system
    /// call makes every system call of this host a little slower, so this is deferred until there is a Ruby to watch.)
    fn attach_gvl_tracepoints(&mut self, futex: bool) -> Result<(), AttachError> {
        if !self.tracepoints.is_empty() {
            return Ok(());
        }
        let (category, programs) =
            if futex { ("syscalls", FUTEX_PROGRAMS) } else { ("sched", TASK_PROGRAMS) };
        // One of them alone would show states that are wrong: if one fails, the others are detached again.
        let mut attached = Vec::new();
        for (name, tracepoint) in programs {
            let program = self.ebpf.program_mut(name).ok_or(AttachError::NoProgram(name))?;
            let link = Link::to_tracepoint(program, category, tracepoint).map_err(|source| {
                AttachError::Tracepoint { category, tracepoint, source: Box::new(source) }
            })?;
            attached.push(link);
        }
        self.tracepoints = attached;
        Ok(())
    }

    /// Reattaches the GVL probes of all images, or none.
    pub fn resume_gvl(&mut self) -> Result<(), AttachError> {
        self.gvl_paused = false;
        let mut all = std::mem::take(&mut self.gvl);
        let attached = self.attach_all_gvl(&mut all);
        self.gvl = all;
        // Without probes, the processes of an image would appear never to wait.
        attached.inspect_err(|_| self.pause_gvl())
    }

    fn attach_all_gvl(&mut self, all: &mut [GvlAttached]) -> Result<(), AttachError> {
        for gvl in all.iter_mut() {
            gvl.links = self.attach_gvl_plan(gvl.image, &gvl.plan, &gvl.file, gvl.scope)?;
        }
        if all.is_empty() {
            return Ok(());
        }
        self.attach_gvl_tracepoints(all.iter().any(|gvl| gvl.plan.path.by == GvlPath::BY_FUTEX))
    }

    fn attach_gvl_plan(
        &mut self,
        image: u32,
        plan: &GvlPlan,
        file: &File,
        scope: Scope,
    ) -> Result<Vec<Link>, AttachError> {
        // The process that owns the mapping may exit at any moment.
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let path = path.as_path();
        let mut probes = plan
            .probes
            .iter()
            .map(|probe| uprobe(image, probe, path))
            .collect::<Result<Vec<_>, AttachError>>()?;
        probes.sort_by_key(|probe| probe.program);
        self.attach_uprobes(&probes, path, scope)
    }
}

fn uprobe(image: u32, probe: &GvlProbe, path: &Path) -> Result<Uprobe, AttachError> {
    let point = probe.point.name();
    let cookie = cookie(image, probe).ok_or_else(|| AttachError::Cookie {
        point,
        address: probe.address.0,
        path: path.to_owned(),
    })?;
    Ok(Uprobe {
        program: if probe.at_return { AT_RETURN } else { PROGRAMS[probe.point as usize] },
        point,
        offset: probe.file_offset.0,
        cookie: Some(cookie.pack()),
        at_return: probe.at_return,
    })
}

/// The attach cookie of a probe; `None` if a value does not fit into it.
fn cookie(image: u32, probe: &GvlProbe) -> Option<GvlCookie> {
    let (register, in_memory, displacement) = match probe.place {
        Some(ThreadOperand::Register(register)) => (register, false, 0),
        Some(ThreadOperand::Memory(register, displacement)) => (register, true, displacement),
        None => (0, false, 0),
    };
    // At a return, the instruction pointer is not in the image.
    let address = if probe.at_return { 0 } else { probe.address.0 };
    let image = u8::try_from(image).ok()?;
    let cookie = GvlCookie { image, register, in_memory, displacement, address };
    cookie.fits().then_some(cookie)
}
