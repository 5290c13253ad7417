//! Processes: which of their mappings contain a Ruby, and whether it is traced.

use std::{fs::File, os::unix::fs::FileExt as _, path::Path, sync::Arc};

use super::{
    super::{
        decision::{self, Role, Sure},
        identity::ImageKey,
        image_file::ImageFile,
        mappings::{self, ExecutableMapping},
    },
    Control, Verdict,
};
use crate::{
    address::FileOffset,
    host::{proc_root, root_file},
};

/// The role of an image in a process that maps it.
pub(in crate::discover) fn role(known: Option<&(ImageKey, Verdict)>) -> Role<'_> {
    match known {
        None | Some((_, Verdict::NotRuby | Verdict::Waiting)) => Role::Other,
        Some((_, Verdict::GcLibrary)) => Role::GcLibrary,
        Some((_, Verdict::Refused(_))) => Role::Refused,
        Some((_, Verdict::Traced(traced))) => Role::Ruby {
            segments: &traced.segments,
            sites: traced.plan.is_some(),
            modular: traced.modular().is_some(),
        },
    }
}

impl Control {
    pub(super) fn inspect(&mut self, pid: u32) {
        match mappings::of_process(pid) {
            Ok(mappings) => {
                self.inspect_mappings(pid, &mappings);
            }
            Err(error) => log::debug!("pid {pid}: {error}"),
        }
    }

    /// Inspects all executable mappings; returns whether one is a Ruby (traced or refused).
    pub(super) fn inspect_mappings(&mut self, pid: u32, mappings: &[ExecutableMapping]) -> bool {
        let verdicts = self.verdicts_of(pid, mappings);
        let gcs = decision::gcs(mappings.iter().zip(verdicts.iter().map(|known| role(known.as_ref()))));
        let mut ruby = gcs.ruby;
        let mut chosen = false;
        for (key, verdict) in verdicts.iter().flatten() {
            match verdict {
                Verdict::NotRuby => continue,
                Verdict::Waiting => {
                    ruby = true;
                    if let Some(waiting) = self.waiting.get_mut(key) {
                        waiting.pids.insert(pid);
                    }
                    self.retries.wait_for(key, pid);
                }
                Verdict::GcLibrary => chosen = true,
                Verdict::Traced(traced) => chosen |= traced.modular().is_some(),
                Verdict::Refused(_) => {}
            }
            self.consider_name(pid);
        }
        for (index, bias) in gcs.own {
            if let Some((_, Verdict::Traced(traced))) = &verdicts[index] {
                self.found_at(pid, &mappings[index], bias, traced, |_| Sure::Yes);
            }
        }
        for index in gcs.refused {
            if let Some((key, Verdict::Refused(reason))) = &verdicts[index] {
                self.refuse(pid, *key, &mappings[index], reason);
            }
        }
        // Which GC such a process runs depends on all its mappings.
        if chosen && self.wants(pid) {
            self.inspect_modular(pid);
        }
        // Only after its Ruby is probed: otherwise its requests would be those of a process that is not traced.
        self.look_for_server(pid, mappings);
        ruby
    }

    /// The verdicts on the files of these mappings.
    pub(in crate::discover) fn verdicts_of(
        &mut self,
        pid: u32,
        mappings: &[ExecutableMapping],
    ) -> Vec<Option<(ImageKey, Verdict)>> {
        mappings.iter().map(|mapping| self.verdict(pid, mapping)).collect()
    }

    /// The verdict on the file of a mapping; `None` if the process is gone.
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
                None => self.judge(key, &ImageFile::of_process(pid, &file, &mapping.path)),
            },
        };
        Some((key, verdict))
    }

    /// The verdict on a file already traced under another identity: this process's code already contains its probes.
    fn alias(&self, pid: u32, mapping: &ExecutableMapping, file: &Path, key: &ImageKey) -> Option<Verdict> {
        let known = self.verdicts.iter().filter(|(other, _)| key.may_be(other));
        let mut probed = known.filter_map(|(_, verdict)| match verdict {
            Verdict::Traced(traced) => Some(traced),
            _ => None,
        });
        let has_probes = |probes: &[FileOffset]| {
            let memory = File::open(proc_root::path(pid, "mem")).ok()?;
            let file = root_file::open(file).ok()?;
            let differs = |offset: u64| {
                let address = mapping.start.checked_add(offset.checked_sub(mapping.offset)?)?;
                let (mut now, mut stated) = ([0; 4], [0; 4]);
                memory.read_exact_at(&mut now, address).ok()?;
                file.read_exact_at(&mut stated, offset).ok()?;
                (address < mapping.end).then_some(now != stated)
            };
            Some(!probes.is_empty() && probes.iter().all(|offset| differs(offset.0) == Some(true)))
        };
        let traced = probed.find(|traced| has_probes(&traced.probes) == Some(true))?;
        log::info!("{} is a file that has probes already", mapping.path.display());
        Some(Verdict::Traced(Arc::clone(traced)))
    }
}
