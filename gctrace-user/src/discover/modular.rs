//! Processes of a Ruby built `--with-modular-gc`: which GC each runs, and with which image it is traced.
//!
//! The GC that is compiled into the Ruby has its event sites there; a GC library has its own. A process has one of them,
//! chosen before its VM is set up, and only the chosen one's sites are ever reached.

use std::{cell::Cell, fs::File, path::Path, sync::Arc};

use super::{
    control::{Control, Sure, Traced, Verdict},
    debuginfo::Around,
    identity::ImageKey,
    installed,
    mappings::{self, ExecutableMapping, load_bias},
    place::Place,
    planned::{Choice, Way, choose_library},
    state::{VmState, has_loaded_library, is_linked_with},
};

/// A Ruby or a GC library in a process.
struct Mapped {
    key: ImageKey,
    mapping: ExecutableMapping,
}

impl Control {
    /// Finds out which GC the process runs, and has it traced with the image that holds it.
    pub(super) fn inspect_modular(&mut self, pid: u32) {
        let mappings = match mappings::of_process(pid) {
            Ok(mappings) => mappings,
            Err(error) => return log::debug!("pid {pid}: {error}"),
        };
        let mut ruby = None;
        let mut library = None;
        let mut coarse = false;
        for mapping in mappings {
            match self.verdict(pid, &mapping) {
                Some((key, Verdict::Traced(traced))) if traced.modular().is_some() && ruby.is_none() => {
                    let place = load_bias(&mapping, &traced.segments);
                    ruby = place.map(|bias| (Mapped { key, mapping }, bias, traced));
                }
                Some((_, Verdict::Traced(traced))) => coarse |= traced.plan.is_none(),
                Some((key, Verdict::GcLibrary)) => library = Some(Mapped { key, mapping }),
                _ => {}
            }
        }
        let Some((ruby, ruby_bias, traced)) = ruby else {
            // Where its Ruby is refused, that has been told.
            if let Some(library) = library.filter(|_| coarse) {
                let reason = "modular GC: the process runs the GC of this library, and its Ruby is not traced by event \
                              sites, so that nothing is known of it";
                self.refuse(pid, library.key, &library.mapping, reason);
            }
            return;
        };
        let Some(modular) = traced.modular() else { return };
        let Some(library) = library else {
            // It may choose a library later, as long as its VM is not set up.
            return self.found_at(pid, &ruby.mapping, ruby_bias, &traced, |state| match state {
                Ok(VmState::NotSetUp | VmState::Unreadable(_)) => Sure::NotYet,
                _ if has_loaded_library(pid, ruby_bias, modular) == Some(false) => Sure::Yes,
                _ => Sure::NotYet,
            });
        };
        let file = library.mapping.file(pid);
        let shown = library.mapping.path.clone();
        match self.library(&library.key, &file, &shown, (ruby.key, &traced), &Place::of_process(pid, &shown))
        {
            Verdict::Traced(found) => {
                let Some(plan) = found.plan.as_ref() else { return };
                let Some(bias) = load_bias(&library.mapping, &found.segments) else { return };
                self.found_at(pid, &library.mapping, bias, &found, |state| {
                    let linked = || is_linked_with(pid, (bias, plan), (ruby_bias, modular));
                    match state {
                        Ok(VmState::NotSetUp | VmState::Unreadable(_)) => Sure::Yes,
                        _ if linked() == Some(false) => Sure::No(
                            "its GC library does not refer to the VM of its Ruby; nothing is reported for it",
                        ),
                        _ => Sure::Yes,
                    }
                });
            }
            Verdict::Refused(reason) => self.refuse(pid, library.key, &library.mapping, &reason),
            Verdict::NotRuby | Verdict::GcLibrary | Verdict::Waiting => {}
        }
    }

    /// Has the GC libraries probed that processes of a Ruby may choose, where they are installed.
    pub(super) fn add_gc_libraries(&mut self, key: ImageKey, ruby: &Arc<Traced>, place: &Place) {
        let Some(directory) = ruby.modular().and_then(|modular| modular.directory.as_deref()) else { return };
        for root in &place.roots {
            for path in installed::gc_libraries(root, directory) {
                let Ok(library) = ImageKey::of(&path) else { continue };
                let shown = Path::new("/").join(path.strip_prefix(root).unwrap_or(&path));
                if let Verdict::Refused(reason) = self.library(&library, &path, &shown, (key, ruby), place) {
                    // Nobody runs it yet; it is told when somebody does.
                    log::info!("{} is installed and would not be traced: {reason}", shown.display());
                }
            }
        }
    }

    /// What is known of a GC library in processes of that Ruby.
    fn library(
        &mut self,
        key: &ImageKey,
        path: &Path,
        shown: &Path,
        (ruby_key, ruby): (ImageKey, &Arc<Traced>),
        place: &Place,
    ) -> Verdict {
        if let Some(verdict) = self.libraries.get(&(*key, ruby_key)) {
            return verdict.clone();
        }
        // Its probes find the VM at the place where it is in that Ruby.
        let other = |(library, _): &(ImageKey, ImageKey), verdict: &Verdict| {
            library == key && matches!(verdict, Verdict::Traced(_))
        };
        let verdict = if self.libraries.iter().any(|(pair, verdict)| other(pair, verdict)) {
            Verdict::Refused(
                "modular GC: this GC library is already traced together with another build of its Ruby"
                    .into(),
            )
        } else {
            match self.open_library(path, shown, ruby, place) {
                Ok(verdict) => verdict,
                Err(reason) => Verdict::Refused(reason.into()),
            }
        };
        self.libraries.insert((*key, ruby_key), verdict.clone());
        verdict
    }

    fn open_library(
        &mut self,
        path: &Path,
        shown: &Path,
        ruby: &Arc<Traced>,
        place: &Place,
    ) -> Result<Verdict, String> {
        let Some(plan) = ruby.plan.as_ref() else { return Ok(Verdict::NotRuby) };
        let file =
            File::open(path).map_err(|error| format!("{} cannot be opened: {error}", path.display()))?;
        // Its symbols are only a witness: servers are not asked for them.
        let never = Cell::new(false);
        let around = Around { info: &self.debug, place, later: Some(&never) };
        let abilities = self.abilities();
        let Choice { way, refusals } =
            choose_library(&file, shown, &plan.analysis, self.methods, abilities, around);
        match way {
            Some(Way::Sites(planned)) => self.open_sites(&file, shown, *planned),
            _ => Err(refusals.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")),
        }
    }
}
