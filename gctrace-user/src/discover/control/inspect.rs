//! Processes: which of their mappings hold a Ruby, and whether that is traced.

use std::{fs::File, os::unix::fs::FileExt as _, path::Path, sync::Arc};

use super::{
    super::{
        identity::ImageKey,
        mappings::{self, ExecutableMapping},
        place::Place,
    },
    Control, Verdict,
};
use crate::{host::proc_root, ruby::plan::AttachPlan};

impl Control {
    pub(super) fn inspect(&mut self, pid: u32) {
        match mappings::of_process(pid) {
            Ok(mappings) => {
                self.inspect_mappings(pid, &mappings);
            }
            Err(error) => log::debug!("pid {pid}: {error}"),
        }
    }

    /// Looks at every executable mapping; returns whether one is a Ruby (traced or refused).
    pub(super) fn inspect_mappings(&mut self, pid: u32, mappings: &[ExecutableMapping]) -> bool {
        let mut ruby = false;
        let mut modular = false;
        for mapping in mappings {
            let Some((key, verdict)) = self.verdict(pid, mapping) else { continue };
            if !matches!(verdict, Verdict::NotRuby) {
                self.consider_name(pid);
            }
            match verdict {
                Verdict::NotRuby => {}
                Verdict::Waiting => {
                    ruby = true;
                    if let Some(waiting) = self.waiting.get_mut(&key) {
                        waiting.pids.insert(pid);
                    }
                }
                Verdict::GcLibrary => modular = true,
                Verdict::Traced(traced) if traced.modular().is_some() => {
                    ruby = true;
                    modular = true;
                }
                Verdict::Traced(traced) => {
                    ruby = true;
                    self.found(pid, mapping, &traced);
                }
                Verdict::Refused(reason) => {
                    ruby = true;
                    self.refuse(pid, key, mapping, &reason);
                }
            }
        }
        // Which GC such a process runs is told by all of its mappings.
        if modular && self.wants(pid) {
            self.inspect_modular(pid);
        }
        ruby
    }

    /// What is known of the file of a mapping; `None` if the process is gone.
    pub(in crate::discover) fn verdict(
        &mut self,
        pid: u32,
        mapping: &ExecutableMapping,
    ) -> Option<(ImageKey, Verdict)> {
        let file = mapping.file(pid);
        let key = ImageKey::of(&file).ok()?;
        let verdict = match self.verdicts.get(&key) {
            Some(verdict) => verdict.clone(),
            None => match self.alias(pid, mapping, &file, &key) {
                Some(verdict) => {
                    self.verdicts.insert(key, verdict.clone());
                    verdict
                }
                None => self.judge(key, &file, &mapping.path, &Place::of_process(pid, &mapping.path)),
            },
        };
        Some((key, verdict))
    }

    /// The verdict on a file that is known by another identity: its probes are in this process's code already.
    fn alias(&self, pid: u32, mapping: &ExecutableMapping, file: &Path, key: &ImageKey) -> Option<Verdict> {
        let known = self.verdicts.iter().filter(|(other, _)| key.may_be(other));
        let mut probed = known.filter_map(|(_, verdict)| match verdict {
            Verdict::Traced(traced) => Some((traced, traced.plan.as_ref()?)),
            _ => None,
        });
        let has_probes = |plan: &AttachPlan| {
            let memory = File::open(proc_root::path(pid, "mem")).ok()?;
            let file = File::open(file).ok()?;
            let differs = |offset: u64| {
                let address = mapping.start.checked_add(offset.checked_sub(mapping.offset)?)?;
                let (mut now, mut stated) = ([0; 4], [0; 4]);
                memory.read_exact_at(&mut now, address).ok()?;
                file.read_exact_at(&mut stated, offset).ok()?;
                (address < mapping.end).then_some(now != stated)
            };
            Some(
                !plan.sites.is_empty()
                    && plan.sites.iter().all(|site| differs(site.file_offset.0) == Some(true)),
            )
        };
        let (traced, _) = probed.find(|(_, plan)| has_probes(plan) == Some(true))?;
        log::info!("{} is a file that has probes already", mapping.path.display());
        Some(Verdict::Traced(Arc::clone(traced)))
    }
}
