//! Processes of a Ruby built `--with-modular-gc`: which GC each runs, and by which image it is traced.
//!
//! The GC that is compiled into the Ruby has its event sites there; a GC library has its own. A process has one of them,
//! chosen before its VM is set up, and only the chosen one's sites are ever reached.

use std::{cell::Cell, io, path::Path, sync::Arc};

use super::{
    control::{Control, NotOpened, ProbedImage, Verdict, has_probes, role},
    debuginfo::Around,
    decision::{self, Chosen, NO_SITES},
    identity::ImageKey,
    image_file::ImageFile,
    installed,
    mappings::{self, ExecutableMapping, load_bias},
    state::{has_loaded_library, is_linked_with},
    tracing_method::{Choice, TracingMethod, choose_library},
};
use crate::{host::root_file, images::GcOf};

impl Control {
    /// Finds out which GC the process runs, and traces it by the image that contains that GC.
    pub(super) fn inspect_modular(&mut self, pid: u32) {
        let mappings = match mappings::of_process(pid) {
            Ok(mappings) => mappings,
            Err(error) => return log::debug!("pid {pid}: {error}"),
        };
        let verdicts = self.verdicts_of(pid, &mappings);
        let (library, ruby, ruby_bias) = match decision::gcs(
            mappings.iter().zip(verdicts.iter().map(|known| role(known.as_ref()))),
        )
        .chosen
        {
            None => return,
            Some(Chosen::BuiltIn { ruby, bias }) => (None, ruby, bias),
            Some(Chosen::Library { library, ruby, bias }) => (Some(library), ruby, bias),
            Some(Chosen::Unknown { library }) => {
                if let Some((key, _)) = &verdicts[library] {
                    self.refuse(pid, Some(*key), &mappings[library].path, NO_SITES);
                }
                return;
            }
        };
        let Some((ruby_key, Verdict::Traced(traced))) = &verdicts[ruby] else { return };
        let Some(modular) = traced.modular() else { return };
        self.used(traced, pid);
        let Some(library) = library else {
            return self.found_at(pid, &mappings[ruby], ruby_bias, traced, |state| {
                decision::built_in(state, || has_loaded_library(pid, ruby_bias, modular))
            });
        };
        let Some((key, _)) = &verdicts[library] else { return };
        let mapping = &mappings[library];
        let image = ImageFile::of_process(pid, &mapping.file(pid), &mapping.path);
        match self.library(key, &image, (*ruby_key, traced), Some((pid, mapping))) {
            Verdict::Traced(found) => {
                let Some(plan) = found.plan.as_ref() else { return };
                let Some(bias) = load_bias(mapping, &found.segments) else { return };
                self.found_at(pid, mapping, bias, &found, |state| {
                    decision::linked_library(state, || {
                        is_linked_with(pid, (bias, plan), (ruby_bias, modular))
                    })
                });
            }
            Verdict::Refused(reason) => self.refuse(pid, Some(*key), &mapping.path, &reason),
            Verdict::NotRuby | Verdict::GcLibrary | Verdict::Waiting => {}
        }
    }

    /// Probes the installed GC libraries that processes of a Ruby may choose.
    pub(super) fn add_gc_libraries(&mut self, key: ImageKey, ruby: &Arc<ProbedImage>, image: &ImageFile) {
        let Some(directory) = ruby.modular().and_then(|modular| modular.directory.as_deref()) else { return };
        for root in &image.roots {
            for path in installed::gc_libraries(root, directory) {
                let Ok(library) = ImageKey::of(&path) else { continue };
                let shown = Path::new("/").join(path.strip_prefix(root).unwrap_or(&path));
                let roots = image.roots.clone();
                let file = ImageFile { open: path, roots, ..ImageFile::on_host(&shown) };
                if let Verdict::Refused(reason) = self.library(&library, &file, (key, ruby), None) {
                    // No process runs it yet; it is reported when one does.
                    log::info!("{} is installed and would not be traced: {reason}", shown.display());
                }
            }
        }
    }

    /// The verdict on a GC library in processes of that Ruby. `mapped`: a process that has mapped it.
    fn library(
        &mut self,
        key: &ImageKey,
        image: &ImageFile,
        (ruby_key, ruby): (ImageKey, &Arc<ProbedImage>),
        mapped: Option<(u32, &ExecutableMapping)>,
    ) -> Verdict {
        if let Some(verdict) = self.libraries.get(&(*key, ruby_key)) {
            return verdict.clone();
        }
        let verdict = match self.probed_gc_library(key, mapped) {
            // Under another identity of the library or of the Ruby.
            Some((of, verdict)) if self.keys_of(ruby.index).contains(&of) => verdict,
            // Its probes find the VM at its location in that Ruby only.
            Some(_) => Verdict::Refused(
                "modular GC: this GC library is already traced together with another build of its Ruby"
                    .into(),
            ),
            None => match self.open_library(*key, image, ruby) {
                Ok(verdict) => verdict,
                // Retried when the next process maps it.
                Err(NotOpened { reason, passes: true }) => return Verdict::Refused(reason.into()),
                Err(NotOpened { reason, .. }) => Verdict::Refused(reason.into()),
            },
        };
        self.libraries.insert((*key, ruby_key), verdict.clone());
        verdict
    }

    /// The verdict on a GC library that is probed, and the Ruby that it belongs to.
    fn probed_gc_library(
        &self,
        key: &ImageKey,
        mapped: Option<(u32, &ExecutableMapping)>,
    ) -> Option<(ImageKey, Verdict)> {
        let same = |other: &ImageKey, library: &ProbedImage| {
            key == other
                || key.is_same_file(other)
                || key.may_have_been(other)
                    && match mapped {
                        Some((pid, mapping)) => has_probes(pid, mapping, &library.probes) != Some(false),
                        None => key.may_be(other),
                    }
        };
        self.libraries.iter().find_map(|((other, ruby), verdict)| match verdict {
            Verdict::Traced(library) if same(other, library) => Some((*ruby, verdict.clone())),
            _ => None,
        })
    }

    fn open_library(
        &mut self,
        key: ImageKey,
        image: &ImageFile,
        ruby: &Arc<ProbedImage>,
    ) -> Result<Verdict, NotOpened> {
        let Some(plan) = ruby.plan.as_ref() else { return Ok(Verdict::NotRuby) };
        let file = root_file::open(&image.open).map_err(|error| NotOpened {
            // The process is gone, or gctrace has run out of descriptors. That says nothing about the library.
            passes: error.kind() != io::ErrorKind::Other,
            reason: format!("{} cannot be opened: {error}", image.shown.display()),
        })?;
        // Its symbols only confirm the sites: servers are not queried for them.
        let never = Cell::new(false);
        let around = Around { info: &self.debug, image, later: Some(&never) };
        let abilities = self.abilities();
        let Choice { method, refusals } =
            choose_library(&file, &plan.analysis, self.methods, abilities, around);
        match method {
            Some(TracingMethod::Sites(planned)) => {
                let gc = GcOf::LibraryOf(ruby.index);
                self.open_sites(key, &file, &image.shown, *planned, gc)
            }
            _ => Err(refusals.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ").into()),
        }
    }
}
