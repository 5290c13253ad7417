//! `gctrace heap --leaks`: the program at refills, attached to one process, and the objects that it follows.

use std::path::Path;

use aya::maps::{Array, HashMap, MapData, PerCpuArray};
use gctrace_common::{
    config::ImageConfig,
    cookie::Cookie,
    leak::{LeakCount, LeakPage, LeakSlot, LeakTarget, MAX_LEAK_PAGES},
};

use super::{
    AttachError,
    alone::{Alone, Own, ProbeStacks, map, read, written},
    attach::uprobes::Scope,
    errors::LoadError,
    rings::StackRing,
};
use crate::ruby::plan::OptionalProbe;

/// The program at refills.
pub(super) const PROGRAM: &str = "leak_refill";
/// The program and its maps.
const OWN: Own = Own { program: PROGRAM, point: "refill", maps: &[("LEAK_PAGES", MAX_LEAK_PAGES)] };

/// The probes that follow objects. Dropping it detaches them.
pub struct LeakProbes {
    alone: Alone,
    target: Array<MapData, LeakTarget>,
    tallies: PerCpuArray<MapData, u64>,
    pages: HashMap<MapData, u64, LeakPage>,
}

impl LeakProbes {
    /// Loads the programs with their gate closed. They need attach cookies (Linux 5.15).
    ///
    /// # Errors
    ///
    /// The kernel refuses a program.
    pub fn load() -> Result<Self, LoadError> {
        let mut alone = Alone::load(OWN, ProbeStacks { stacks: true, native: false })?;
        let ebpf = &mut alone.programs.ebpf;
        Ok(Self {
            target: map(ebpf, "LEAK_TARGET")?,
            tallies: map(ebpf, "LEAK_TALLIES")?,
            pages: map(ebpf, "LEAK_PAGES")?,
            alone,
        })
    }

    /// The ring that stacks arrive in; `None` after the first call.
    pub fn take_stacks(&mut self) -> Option<StackRing> {
        self.alone.take_stacks().map(|(ring, _)| ring)
    }

    /// Attaches all sites of a file, restricted to one process where the kernel can filter by process, and opens the gate. `config`
    /// describes how to walk the Ruby stacks of the process.
    ///
    /// # Errors
    ///
    /// The kernel refuses a probe, or a map cannot be written.
    pub fn attach(
        &mut self,
        target: LeakTarget,
        (bias, config): (u64, &ImageConfig),
        probes: &[OptionalProbe],
        (path, scope): (&Path, Scope),
    ) -> Result<(), AttachError> {
        self.set(target)?;
        self.alone.set_ruby(target.tgid, bias, config)?;
        let cookie = |probe: &OptionalProbe| Cookie { image: 0, register: probe.register, address: 0 }.pack();
        let places: Vec<_> = probes.iter().map(|probe| (probe.file_offset.0, cookie(probe))).collect();
        self.alone.attach(&places, path, scope)?;
        self.alone.open()
    }

    /// Changes the sampling rate of refills.
    ///
    /// # Errors
    ///
    /// The map cannot be written.
    pub fn set(&mut self, target: LeakTarget) -> Result<(), AttachError> {
        self.target.set(0, target, 0).map_err(|source| written("LEAK_TARGET", source))
    }

    /// Whether the object allocated at this address and time is still followed. `page` is the address of its page.
    pub fn follows(&self, page: u64, address: u64, ts_ns: u64) -> bool {
        let wanted = LeakSlot { address, ts_ns };
        self.pages.get(&page, 0).is_ok_and(|page| page.slots.contains(&wanted))
    }

    /// Number of followed objects. Exact after [`LeakProbes::close`].
    ///
    /// # Errors
    ///
    /// The map cannot be read.
    pub fn followed(&self) -> Result<u64, AttachError> {
        let mut followed = 0;
        for entry in &self.pages {
            let (_, page) = entry.map_err(|source| read("LEAK_PAGES", source))?;
            followed += page.slots.iter().filter(|slot| slot.address != 0).count() as u64;
        }
        Ok(followed)
    }

    /// The current value of a counter.
    ///
    /// # Errors
    ///
    /// The map cannot be read.
    pub fn count(&self, count: LeakCount) -> Result<u64, AttachError> {
        let cells = self.tallies.get(&(count as u32), 0).map_err(|source| read("LEAK_TALLIES", source))?;
        Ok(cells.iter().sum())
    }

    /// Closes the gate: nothing counts from now on.
    ///
    /// # Errors
    ///
    /// The map cannot be written.
    pub fn close(&mut self) -> Result<(), AttachError> {
        self.alone.close()
    }
}
