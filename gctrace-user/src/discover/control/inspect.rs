//! Processes: which of their mappings contain a Ruby, and whether it is traced.

use std::{
    fs::{File, Metadata},
    io,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    sync::Arc,
};

use super::{
    super::{
        decision::{self, Role, Sure, Unopened, is_gone},
        identity::ImageKey,
        image_file::ImageFile,
        mappings::{self, ExecutableMapping},
    },
    Control, ProbedImage, Verdict, still_maps,
};
use crate::{
    address::FileOffset,
    cache,
    host::{proc::is_running, proc_root, root_file},
};

/// What is known of a file with a new identity.
enum Alias {
    /// It is probed under another identity.
    Probed(Arc<ProbedImage>),
    /// It is not probed.
    New,
    /// The process is gone, or has unmapped it.
    Gone,
}

/// Whether the code that a process has mapped of a file has the probes of a known file; `None` if the process is gone or has unmapped it.
pub(in crate::discover) fn has_probes(
    pid: u32,
    mapping: &ExecutableMapping,
    probes: &[FileOffset],
) -> Option<bool> {
    match all_differ(pid, mapping, probes) {
        Ok(differ) => Some(differ),
        Err(error) if is_running(pid) && still_maps(pid, mapping) => {
            log::debug!("pid {pid}: {}: {error}", mapping.path.display());
            Some(false)
        }
        Err(_) => None,
    }
}

/// Whether mapped code differs from its file at each of these offsets.
fn all_differ(pid: u32, mapping: &ExecutableMapping, offsets: &[FileOffset]) -> io::Result<bool> {
    let addresses: Option<Vec<u64>> = offsets
        .iter()
        .map(|offset| {
            let address = mapping.start.checked_add(offset.0.checked_sub(mapping.offset)?)?;
            (address < mapping.end).then_some(address)
        })
        .collect();
    let Some(addresses) = addresses.filter(|addresses| !addresses.is_empty()) else { return Ok(false) };
    let memory = File::open(proc_root::path(pid, "mem"))?;
    let file = root_file::open(&mapping.file(pid))?;
    for (address, offset) in addresses.into_iter().zip(offsets) {
        let (mut now, mut stated) = ([0; 4], [0; 4]);
        memory.read_exact_at(&mut now, address)?;
        file.read_exact_at(&mut stated, offset.0)?;
        if now == stated {
            return Ok(false);
        }
    }
    Ok(true)
}

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
                if let Err(Some(unopened)) = self.inspect_mappings(pid, &mappings) {
                    log::debug!("pid {pid}: {unopened}");
                }
            }
            Err(error) => log::debug!("pid {pid}: {error}"),
        }
    }

    /// Inspects all executable mappings; returns whether one is a Ruby (traced or refused). If none is, `Err` has the file that could not be
    /// opened, if there is one (of several, [`Unopened::decisive`]).
    pub(super) fn inspect_mappings(
        &mut self,
        pid: u32,
        mappings: &[ExecutableMapping],
    ) -> Result<(), Option<Unopened>> {
        let mut unopened = Vec::new();
        let mut verdicts = Vec::new();
        for mapping in mappings {
            verdicts.push(self.verdict(pid, mapping).unwrap_or_else(|error| {
                unopened.push(Unopened { path: mapping.path.clone(), error });
                None
            }));
        }
        let unopened = Unopened::decisive(unopened);
        let gcs = decision::gcs(mappings.iter().zip(verdicts.iter().map(|known| role(known.as_ref()))));
        let mut ruby = gcs.ruby;
        if let Some(unopened) = &unopened
            && !ruby
            && let Some(reason) = unopened.refusal()
        {
            ruby = true;
            self.consider_name(pid);
            self.refuse(pid, None, &unopened.path, &reason);
        }
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
                self.refuse(pid, Some(*key), &mappings[index].path, reason);
            }
        }
        // Which GC such a process runs depends on all its mappings.
        if chosen && self.wants(pid) {
            self.inspect_modular(pid);
        }
        // Only after its Ruby is probed: otherwise its requests would be those of a process that is not traced.
        self.look_for_server(pid, mappings);
        if ruby { Ok(()) } else { Err(unopened) }
    }

    /// The verdicts on the files of these mappings.
    pub(in crate::discover) fn verdicts_of(
        &mut self,
        pid: u32,
        mappings: &[ExecutableMapping],
    ) -> Vec<Option<(ImageKey, Verdict)>> {
        mappings.iter().map(|mapping| self.verdict(pid, mapping).ok().flatten()).collect()
    }

    /// The verdict on the file of a mapping; `None` if the process is gone. `Err`: the file cannot be opened, not even by root, as on a FUSE file
    /// system of another user.
    pub(in crate::discover) fn verdict(
        &mut self,
        pid: u32,
        mapping: &ExecutableMapping,
    ) -> io::Result<Option<(ImageKey, Verdict)>> {
        let file = mapping.file(pid);
        let key = match ImageKey::of(&file) {
            Ok(key) => key,
            Err(error) if is_gone(&error) => return Ok(None),
            Err(error) => return Err(error),
        };
        let verdict = match self.verdicts.get(&key) {
            Some(verdict) => verdict.clone(),
            None => match self.alias(pid, mapping, &key) {
                Alias::Probed(image) if image.lease.is_written(cache::content) => {
                    self.leave_written();
                    self.judge(key, &ImageFile::of_process(pid, &file, &mapping.path))
                }
                Alias::Probed(image) => {
                    log::info!("{} is a file that has probes already", mapping.path.display());
                    let verdict = Verdict::Traced(image);
                    self.verdicts.insert(key, verdict.clone());
                    verdict
                }
                Alias::New => self.judge(key, &ImageFile::of_process(pid, &file, &mapping.path)),
                Alias::Gone => return Ok(None),
            },
        };
        Ok(Some((key, verdict)))
    }

    /// Whether a file is already probed under another identity. The times of a file may change while it is probed. On overlayfs only the code
    /// of a process shows whether it is the same file: there it already has the probes.
    fn alias(&self, pid: u32, mapping: &ExecutableMapping, key: &ImageKey) -> Alias {
        let probed = || {
            let known = self.verdicts.iter().filter(|(other, _)| key.may_have_been(other));
            known.filter_map(|(other, verdict)| match verdict {
                Verdict::Traced(image) => Some((other, image)),
                _ => None,
            })
        };
        // The file of a probed image is open.
        if let Some((_, image)) = probed().find(|(other, _)| key.is_same_file(other)) {
            return Alias::Probed(Arc::clone(image));
        }
        let file = std::fs::metadata(mapping.file(pid)).ok();
        let changed = |file: &Metadata| (file.ctime(), file.ctime_nsec());
        let mut found = None;
        for (other, image) in probed() {
            match has_probes(pid, mapping, &image.probes) {
                Some(true) => {
                    // A container that changes its file gets a copy with the same inode number, and so with the same sites, but with
                    // another change time. Of those that were opened in this mount it is the latest: the file in it does not become the
                    // original again.
                    let opened = self.images.opened_ns(image.index);
                    let of = file.as_ref().zip(image.lease.metadata());
                    let same =
                        of.map(|(file, its)| (changed(file) == changed(&its), file.dev() == its.dev()));
                    let rank = (same, key.may_be(other), opened);
                    if found.as_ref().is_none_or(|(best, _)| *best < rank) {
                        found = Some((rank, image));
                    }
                }
                Some(false) => {}
                None => return Alias::Gone,
            }
        }
        if let Some((_, image)) = found {
            return Alias::Probed(Arc::clone(image));
        }
        Alias::New
    }
}
