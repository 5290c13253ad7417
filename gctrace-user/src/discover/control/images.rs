//! Images: each is judged once, looked up on servers if these may know more, and opened to events.

use std::{
    cell::Cell,
    collections::BTreeSet,
    fs::File,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use gctrace_common::config::ImageConfig;

use super::{
    super::{
        debuginfo::Around,
        debuginfod::{Context, Lookup, Request, Response},
        decision::Content,
        identity::ImageKey,
        image_file::ImageFile,
        tracing_method::{
            Abilities, Choice, ImageFacts, Later, Planned, TracingMethod, choose_first, reading, site_image,
        },
    },
    Control, ControlEvent, ProbedImage, Verdict, Waiting,
    retries::{NotOpened, passes},
};
use crate::{
    bpf::{AttachError, brief},
    cache::Cache,
    clock::monotonic_ns,
    console::say,
    host::root_file,
    images::{GcOf, KnownImage},
    model::{Image, gvl::GvlCoverage},
    ruby::{RubyAnalysis, fallback::FallbackProbes, plan::AttachPlan},
};

/// Maximum number of images that wait to be finished; the oldest is finished above it. Each holds its code, some megabytes.
const MAX_PUT_OFF: usize = 4;

impl Control {
    pub(super) fn judge(&mut self, key: ImageKey, image: &ImageFile) -> Verdict {
        if let Some(reason) = self.retries.refused(&key) {
            return Verdict::Refused(reason.into());
        }
        let read = root_file::open(&image.open)
            .and_then(|file| Content::of(&file, &image.shown).map(|content| (file, content)));
        let (judged, is_read) = match read {
            Ok((file, content)) => (self.judge_file(key, &file, content, image), true),
            Err(error) => {
                let Some(why) = NotOpened::unread(&error, &image.shown) else {
                    log::debug!("{}: {error}", image.shown.display());
                    return Verdict::NotRuby;
                };
                (Err(why), false)
            }
        };
        let verdict = self.settle(key, &image.shown, judged);
        // A file that could not be read is judged again when another process maps it.
        if is_read || matches!(verdict, Verdict::Waiting) {
            self.verdicts.insert(key, verdict.clone());
        }
        if let Verdict::Traced(traced) = &verdict {
            if let Some(native) = &mut self.native {
                native.prepare(key, &image.open, &image.shown);
            }
            self.add_gc_libraries(key, traced, image);
        }
        verdict
    }

    /// The verdict after an attempt to open an image. If the failure may be temporary, the image waits for a retry.
    fn settle(&mut self, key: ImageKey, shown: &Path, opened: Result<Verdict, NotOpened>) -> Verdict {
        match opened {
            Ok(Verdict::Waiting) => Verdict::Waiting,
            Ok(verdict) => {
                self.retries.opened(&key);
                verdict
            }
            Err(NotOpened { reason, passes: true })
                if self.retries.failed(key, shown, &reason, Instant::now()) =>
            {
                log::info!("{}: {reason}; it is tried again", shown.display());
                Verdict::Waiting
            }
            Err(NotOpened { reason, .. }) => Verdict::Refused(reason.into()),
        }
    }

    /// Retries the images that are due, for the processes that map them.
    pub(super) fn try_again(&mut self) {
        for (key, pids) in self.retries.due(Instant::now()) {
            self.verdicts.remove(&key);
            for pid in pids {
                self.inspect(pid);
            }
            self.retries.round_is_over(&key);
        }
    }

    fn judge_file(
        &mut self,
        key: ImageKey,
        file: &File,
        content: Content,
        image: &ImageFile,
    ) -> Result<Verdict, NotOpened> {
        match content {
            Content::Interpreter => {}
            Content::GcLibrary => return Ok(Verdict::GcLibrary),
            Content::Other => return Ok(Verdict::NotRuby),
            Content::Damaged(reason) => return Err(reason.into()),
        }
        let later = Cell::new(false);
        let around = Around { info: &self.debug, image, later: Some(&later) };
        let choice = choose_first(file, self.methods, self.abilities(), &mut self.cache, around);
        if later.get() {
            let kept = file.try_clone();
            let file = kept.map_err(|error| NotOpened::by(&error, format!("keeping it open: {error}")))?;
            let request = Request { key, file, image: image.clone() };
            return self.ask(request).map(|()| Verdict::Waiting);
        }
        self.open(key, file, &image.shown, choice)
    }

    pub(in crate::discover) fn abilities(&self) -> Abilities {
        Abilities { reads_threads: self.probes.reads_threads(), cookies: self.probes.has_cookie() }
    }

    /// Queues a server lookup for an image.
    pub(super) fn ask(&mut self, request: Request) -> Result<(), NotOpened> {
        let lookup = if let Some(lookup) = self.lookup.take() {
            lookup
        } else {
            let context = Context {
                info: Arc::clone(&self.debug),
                cache: self.cache.path().map_or_else(Cache::none, Cache::at),
                methods: self.methods,
                abilities: self.abilities(),
            };
            Lookup::start(context).map_err(|error| {
                let what = "starting a thread that asks the servers in DEBUGINFOD_URLS";
                NotOpened::by(&error, format!("{what}: {error}"))
            })?
        };
        let lookup = self.lookup.insert(lookup);
        let (key, shown) = (request.key, request.image.shown.clone());
        if !lookup.request(request) {
            let reason = "too many images wait for the servers in DEBUGINFOD_URLS; unset it".to_owned();
            return Err(NotOpened { reason, passes: true });
        }
        say(&format!(
            "gctrace: {}: the servers in DEBUGINFOD_URLS are asked for its symbols; it is traced when they have \
             answered",
            shown.display()
        ));
        self.waiting.insert(key, Waiting { shown, pids: BTreeSet::new() });
        Ok(())
    }

    /// Handles the responses that have arrived.
    pub(super) fn take_responses(&mut self) {
        while let Some(lookup) = &self.lookup {
            match lookup.response() {
                Ok(Some(Response { request, choice })) => {
                    let verdict = self.open(request.key, &request.file, &request.image.shown, choice);
                    self.conclude(request.key, verdict);
                    if let Some(Verdict::Traced(traced)) = self.verdicts.get(&request.key).cloned() {
                        self.add_gc_libraries(request.key, &traced, &request.image);
                    }
                }
                Ok(None) => return,
                Err(()) => {
                    self.lookup = None;
                    let keys: Vec<ImageKey> = self.waiting.keys().copied().collect();
                    for key in keys {
                        let reason = "the thread that asks the servers in DEBUGINFOD_URLS has ended; please \
                                      report this, and unset it until then";
                        self.conclude(key, Err(reason.to_owned().into()));
                    }
                }
            }
        }
    }

    /// Stores the verdict on an image and inspects the processes that waited for it.
    pub(super) fn conclude(&mut self, key: ImageKey, opened: Result<Verdict, NotOpened>) {
        let Some(Waiting { shown, pids }) = self.waiting.remove(&key) else { return };
        let verdict = self.settle(key, &shown, opened);
        self.verdicts.insert(key, verdict);
        for pid in pids {
            self.inspect(pid);
        }
    }

    /// The run ends before the servers have responded, or before a retry: reports the waiting processes as not traced.
    pub(super) fn give_up_waiting(&mut self) {
        for Waiting { shown, pids } in std::mem::take(&mut self.waiting).into_values() {
            for pid in pids.into_iter().filter(|&pid| self.wants(pid)) {
                let reason =
                    "the servers in DEBUGINFOD_URLS had not answered when the run ended; unset it, or \
                              install the debug package"
                        .to_owned();
                self.tell(ControlEvent::Refused { pid: Some(pid), path: shown.clone(), reason });
            }
        }
        for (path, reason, pids) in self.retries.left() {
            for pid in pids.into_iter().filter(|&pid| self.wants(pid)) {
                let (path, reason) = (path.clone(), reason.clone());
                self.tell(ControlEvent::Refused { pid: Some(pid), path, reason });
            }
        }
    }

    /// Attaches the chosen probes.
    pub(super) fn open(
        &mut self,
        key: ImageKey,
        file: &File,
        shown: &Path,
        choice: Choice,
    ) -> Result<Verdict, NotOpened> {
        let Choice { method, refusals } = choice;
        match method {
            Some(TracingMethod::Sites(planned)) => {
                let gc = if planned.plan.analysis.modular.is_some() { GcOf::Chosen } else { GcOf::Itself };
                self.open_sites(key, file, shown, *planned, gc)
            }
            Some(TracingMethod::Fallback(head, mut last)) => {
                if let Some(fault) = self.fault {
                    fault.inject_last(&mut last);
                }
                let refusals = refusals.iter().map(ToString::to_string).collect::<Vec<_>>();
                let verdict = self.open_fallback(key, file, shown, head, &last).map_err(
                    |NotOpened { reason, passes }| {
                        let reason = [vec![reason], refusals.clone()].concat().join("; ");
                        NotOpened { reason, passes }
                    },
                )?;
                let misses = last.method.misses().unwrap_or_default();
                let path = shown.display();
                say(&format!("gctrace: {path} is probed by {}: {misses}", last.method.name()));
                for reason in refusals {
                    say(&format!("gctrace: {path}: better probes are not possible: {reason}"));
                }
                Ok(verdict)
            }
            None => {
                let reason = refusals.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
                Err(NotOpened { reason, passes: refusals.iter().any(|why| passes(why)) })
            }
        }
    }

    /// Registers an image, attaches its event sites and opens it.
    pub(in crate::discover) fn open_sites(
        &mut self,
        key: ImageKey,
        file: &File,
        shown: &Path,
        mut planned: Planned,
        gc: GcOf,
    ) -> Result<Verdict, NotOpened> {
        if self.gvl.is_some() || !self.optional.is_empty() {
            planned.complete();
        }
        // The analysis describes the image even if attaching fails.
        let later = planned.later.take().map(|later| (later, planned.plan.analysis.clone()));
        let verdict = self.attach_sites(key, file, shown, planned, gc);
        if let Some((later, analysis)) = later {
            self.put_off(file, later, analysis);
        }
        verdict
    }

    fn attach_sites(
        &mut self,
        key: ImageKey,
        file: &File,
        shown: &Path,
        planned: Planned,
        gc: GcOf,
    ) -> Result<Verdict, NotOpened> {
        let begun = Instant::now();
        let Planned { mut plan, segments, took, .. } = planned;
        if let Some(fault) = self.fault {
            fault.inject(&mut plan);
        }
        if let Err(why) = &plan.frames {
            let path = shown.display();
            if self.stacks {
                say(&format!("gctrace: {path}: its Ruby stacks are not read: {why}"));
            } else {
                log::info!("{path}: its Ruby stacks are not read: {why}");
            }
        }
        let kept = match gc {
            GcOf::LibraryOf(ruby) => Some(ruby),
            GcOf::Itself | GcOf::Chosen => None,
        };
        let lease = self.lease(&key, file, self.scope())?;
        let index = self.reserve_image(kept).map_err(|error| full(&error))?;
        let watched = self.watch_gvl(index, file, shown, &mut plan);
        self.images.add(KnownImage {
            image: Arc::new(Image { gvl: watched, ..site_image(index, shown, &plan) }),
            reading: Some(reading(&plan)),
            frames: plan.frames.as_ref().ok().cloned(),
            threads: plan.threads.clone(),
            gc,
        });
        self.probes.add_image(index, &plan.config).map_err(|e| e.to_string())?;
        let attached = self.probes.attach(index, &plan.sites, &reopened(file), self.scope());
        if let Err(error) = attached {
            // A retry attaches its own probes; with both, threads would be counted twice.
            self.probes.retire_image(index);
            let error = error.of_file(shown);
            return Err(NotOpened::by(&error, brief(&error)));
        }
        self.attach_optional(index, file, shown, &plan);
        self.probes.open_image(index, &plan.config).map_err(|e| e.to_string())?;
        self.images.opened(index, monotonic_ns());
        self.attached += 1;
        log::debug!(
            "{}: planned in {:.1} ms, attached in {:.1} ms",
            shown.display(),
            took.as_secs_f64() * 1e3,
            begun.elapsed().as_secs_f64() * 1e3
        );
        let probes = plan.sites.iter().map(|site| site.file_offset).collect();
        Ok(Verdict::Traced(Arc::new(ProbedImage { index, plan: Some(plan), probes, segments, lease })))
    }

    /// Defers the rest of an image's analysis until the thread is idle.
    fn put_off(&mut self, file: &File, later: Later, analysis: RubyAnalysis) {
        while self.put_off.len() >= MAX_PUT_OFF {
            self.finish_one();
        }
        match file.try_clone() {
            Ok(file) => self.put_off.push_back((file, later, analysis)),
            // Not stored, so the next run analyses it again.
            Err(error) => log::debug!("{error}; the analysis of an image is not stored"),
        }
    }

    /// Finishes the image that has waited longest. Returns whether there was one.
    pub(super) fn finish_one(&mut self) -> bool {
        let next = self.put_off.pop_front();
        if let Some((file, later, analysis)) = next {
            later.keep(analysis, &file, &mut self.cache);
            return true;
        }
        false
    }

    /// Attaches the GVL probes of an image, if enabled. A failure is reported and affects nothing else.
    fn watch_gvl(
        &mut self,
        index: u32,
        file: &File,
        shown: &Path,
        plan: &mut AttachPlan,
    ) -> Option<GvlCoverage> {
        let futex = self.gvl?.futex;
        let path = shown.display();
        let gvl = match if futex { &plan.gvl_futex } else { &plan.gvl } {
            Ok(gvl) => gvl,
            Err(why) => {
                say(&format!("gctrace: {path}: its GVL is not watched: {why}"));
                return None;
            }
        };
        let attached = match file.try_clone() {
            Ok(file) => self
                .probes
                .attach_gvl(index, gvl, file, self.scope())
                .map_err(|error| brief(&error.of_file(shown))),
            Err(error) => Err(format!("keeping the file open: {error}")),
        };
        if let Err(why) = attached {
            say(&format!("gctrace: {path}: its GVL is not watched: {why}"));
            return None;
        }
        plan.config.gvl = gvl.path;
        let lacks = gvl.coverage.lacks();
        if !lacks.is_empty() {
            say(&format!("gctrace: {path}: GVL coverage is partial: {lacks}"));
        }
        Some(gvl.coverage)
    }

    /// Attaches the probes of the enabled optional events. A failure is reported and affects nothing else.
    fn attach_optional(&mut self, index: u32, file: &File, shown: &Path, plan: &AttachPlan) {
        let scope = self.scope();
        for &event in &self.optional {
            let attached = match plan.optional(event) {
                Err(why) => Err(why.to_owned()),
                Ok(_) if !self.probes.has_cookie() => {
                    Err("the kernel has no attach cookies; use Linux 5.15 or later".to_owned())
                }
                Ok(probes) => self
                    .probes
                    .attach_optional(index, (event, probes), &reopened(file), scope)
                    .map_err(|error| brief(&error.of_file(shown))),
            };
            if let Err(why) = attached {
                say(&format!("gctrace: {}: {}: {why}", shown.display(), event.lack()));
            }
        }
    }

    /// Like [`Control::open_sites`], with fallback probes.
    pub(super) fn open_fallback(
        &mut self,
        key: ImageKey,
        file: &File,
        shown: &Path,
        head: ImageFacts,
        last: &FallbackProbes,
    ) -> Result<Verdict, NotOpened> {
        let lease = self.lease(&key, file, self.scope())?;
        let index = self.reserve_image(None).map_err(|error| full(&error))?;
        let image = Image {
            index,
            path: shown.to_owned(),
            version: head.version,
            build_id: head.build_id,
            stat_keys: Vec::new(),
            heap_keys: Vec::new(),
            method: last.method,
            probes: last.probes.len(),
            gvl: None,
            has_symbols: head.has_symbols,
        };
        self.images.add(KnownImage {
            image: Arc::new(image),
            reading: None,
            frames: None,
            threads: None,
            gc: GcOf::Itself,
        });
        let scope = self.scope();
        let attached = self.probes.attach_phases(index, &last.probes, &reopened(file), scope);
        if let Err(error) = attached {
            self.probes.retire_image(index);
            let error = error.of_file(shown);
            return Err(NotOpened::by(&error, brief(&error)));
        }
        let config = ImageConfig { open: 1, ..ImageConfig::default() };
        self.probes.open_image(index, &config).map_err(|e| e.to_string())?;
        self.images.opened(index, monotonic_ns());
        self.attached += 1;
        let probes = last.probes.iter().map(|probe| probe.file_offset).collect();
        let segments = head.segments;
        Ok(Verdict::Traced(Arc::new(ProbedImage { index, plan: None, probes, segments, lease })))
    }
}

/// The error of attaching an image. If no index was available, a retry may succeed, when other images are no longer used.
fn full(error: &AttachError) -> NotOpened {
    NotOpened { passes: matches!(error, AttachError::TooManyImages), reason: error.to_string() }
}

/// A path to the file through gctrace's own descriptor: the process that maps it may exit at any moment.
pub(super) fn reopened(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}
