//! Files that are written to in place while they are probed: their probes are detached before the writer proceeds (see [`Lease`]), and files
//! with changed content are not probed again. Processes that were probed keep the old code where a probe was, so probes of the new code do not fit.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Read as _},
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use signal_hook::{consts::SIGIO, low_level::pipe};

use super::{
    super::identity::ImageKey,
    Control, ControlEvent, ProbedImage, Verdict,
    retries::NotOpened,
    select::due,
    unused::{Probed, is_any, mapped},
};
use crate::{
    bpf::{Content, Lease, Scope},
    cache,
    console::say,
};

/// Interval at which files without a lease are compared.
const LOOK: Duration = Duration::from_secs(5);
/// Maximum number of remembered files; the oldest are evicted above it.
const REMEMBERED: usize = 1024;

/// State of written files.
#[derive(Default)]
pub(super) struct Writers {
    /// Readable when a writer is waiting.
    wakes: Option<UnixStream>,
    looked: Option<Instant>,
    /// Files that were opened for writing while they were probed, with their state of that time.
    opened: Vec<(ImageKey, Arc<Lease>)>,
}

impl Writers {
    /// Handles the signal that the kernel sends for each writer: by default it terminates the program.
    pub(super) fn watch() -> io::Result<Self> {
        let (wakes, wake) = UnixStream::pair()?;
        wakes.set_nonblocking(true)?;
        pipe::register(SIGIO, wake)?;
        Ok(Self { wakes: Some(wakes), ..Self::default() })
    }

    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.wakes.as_ref().map(|wakes| wakes.as_fd())
    }

    /// Whether files must be checked now.
    fn is_time(&mut self) -> bool {
        let mut bytes = [0; 64];
        let mut woken = false;
        while self.wakes.as_ref().is_some_and(|mut wakes| wakes.read(&mut bytes).is_ok_and(|n| n > 0)) {
            woken = true;
        }
        due(&mut self.looked, LOOK) || woken
    }

    /// Why a file with this content is not probed again. If only its times have changed (`touch`), the file counts as unchanged.
    fn refuses(&self, key: &ImageKey, content: Option<Content>) -> Option<&'static str> {
        let changed = |(known, lease): &(ImageKey, Arc<Lease>)| {
            known.may_have_been(key) && (known != key || lease.is_changed()) && !lease.has_held(content)
        };
        self.opened.iter().any(changed).then_some(
            "the file was written to in place while it was probed, and processes that ran it then have a mixture of both. \
             Restart these, then gctrace (package managers and `make install` replace files instead)",
        )
    }

    fn remember(&mut self, keys: &[ImageKey], lease: &Arc<Lease>) {
        // A deleted file cannot be mapped again, and its inode number may be reused for another file.
        self.opened.retain(|(key, lease)| !keys.contains(key) && !lease.is_deleted());
        if self.opened.len() >= REMEMBERED {
            self.opened.remove(0);
        }
        self.opened.extend(keys.iter().map(|key| (*key, Arc::clone(lease))));
    }
}

impl Control {
    /// Blocks writers of a file from now on. The file must still be the one that was analysed: `key` is its identity from before.
    pub(super) fn lease(
        &self,
        key: &ImageKey,
        file: &std::fs::File,
        scope: Scope,
    ) -> Result<Arc<Lease>, NotOpened> {
        let lease = file.try_clone().and_then(|file| match scope {
            Scope::All => Lease::take(file),
            // Only this process has the probes, and it has already mapped the file.
            Scope::One(_) => Lease::without(file),
        });
        let lease = lease.map_err(|error| {
            let open = error.raw_os_error() == Some(libc::EAGAIN);
            let reason = if open {
                "a process has the file open for writing".to_owned()
            } else {
                format!("its file: {error}")
            };
            NotOpened::by(&error, reason)
        })?;
        // With the lease held, nobody is writing to the file.
        let content = cache::content(file);
        if let Some(reason) = self.writers.refuses(key, content) {
            return Err(reason.to_owned().into());
        }
        let lease = lease.with(content);
        let now = ImageKey::of(&super::images::reopened(file));
        if now.is_ok_and(|now| now == *key) {
            return Ok(Arc::new(lease));
        }
        Err(NotOpened { reason: "the file was written to while it was analysed".to_owned(), passes: true })
    }

    /// Detaches the probes of files that are being written to or that a writer is waiting for.
    pub(super) fn make_way(&mut self) {
        if !self.writers.is_time() {
            return;
        }
        self.leave_written();
    }

    /// The same without the check of the time.
    pub(super) fn leave_written(&mut self) {
        let is_over = |lease: &Lease| lease.is_awaited() || lease.is_written(cache::content);
        let images = self.verdicts.iter().map(|(key, verdict)| (*key, verdict));
        let libraries = self.libraries.iter().map(|((_, ruby), verdict)| (*ruby, verdict));
        let mut written: BTreeMap<ImageKey, Arc<ProbedImage>> = BTreeMap::new();
        for (key, verdict) in images.chain(libraries) {
            if let Verdict::Traced(image) = verdict
                && is_over(&image.lease)
            {
                written.insert(key, Arc::clone(image));
            }
        }
        for (key, image) in written {
            // The image may have been handled already through another identity of the same file.
            if let Some(Verdict::Traced(ruby)) = self.verdicts.get(&key).cloned() {
                self.leave(&ruby, &image);
            }
        }
        let libraries = self.servers.libraries();
        let written: BTreeSet<ImageKey> =
            libraries.filter(|(_, lease)| is_over(lease)).map(|(key, _)| key).collect();
        for key in written {
            self.leave_library(&key);
        }
    }

    /// Detaches a Ruby whose file, or that of its GC, is written to. It is inspected again when no process has the file open for writing.
    fn leave(&mut self, ruby: &ProbedImage, written: &ProbedImage) {
        let keys = self.keys_of(ruby.index);
        let parts: Vec<u32> = self.libraries_of(&keys).into_iter().chain([ruby.index]).collect();
        let path_of =
            |index| self.images.get(index).map(|known| known.image.path.clone()).unwrap_or_default();
        let (shown, path) = (path_of(ruby.index), path_of(written.index));
        let mut users = Vec::new();
        for index in parts {
            users.extend(self.probes.rubies_with(index).into_iter().map(|(pid, bias)| (pid, index, bias)));
        }
        let awaited = written.lease.is_awaited();
        self.retire_image(ruby.index, "it is written to in place");
        for (pid, index, bias) in &users {
            // The index will be reused for another image.
            self.probes.unset_ruby(*pid, *index, *bias);
        }
        self.probes.await_detached();
        written.lease.end();
        let (said, reason) = if awaited {
            (
                "a process opens it for writing, in place; its probes were detached before",
                "its file was opened for writing, so that its probes had to be detached",
            )
        } else {
            (
                "it was written to in place; its probes were detached",
                "its file was written to, so that its probes had to be detached",
            )
        };
        say(&format!("gctrace: {}: {said}", path.display()));
        self.writers.remember(&keys, &written.lease);
        for key in &keys {
            let tried_again = self.retries.failed(*key, &shown, reason, Instant::now());
            self.verdicts
                .insert(*key, if tried_again { Verdict::Waiting } else { Verdict::Refused(reason.into()) });
        }
        for (pid, image, _) in users {
            self.retries.wait_for(&keys[0], pid);
            if self.wants(pid) {
                let (path, reason) = (shown.clone(), reason.to_owned());
                self.tell(ControlEvent::Left { pid, image, path, reason });
            }
        }
    }

    /// The same for a library of servers, whose requests are then no longer traced.
    fn leave_library(&mut self, key: &ImageKey) {
        let servers: Vec<u32> = self.servers.processes.keys().copied().collect();
        for pid in servers {
            if mapped(pid).is_ok_and(|mapped| is_any(&mapped, &[*key])) {
                self.probes.remove_server(pid);
                self.detach_server(pid);
                say(&format!(
                    "gctrace: pid {pid}: its requests are not seen any more: a library of its server is written to in place"
                ));
            }
        }
        self.unused.forget(Probed::Library(*key));
        for lease in self.retire_library(key) {
            lease.end();
            self.writers.remember(&[*key], &lease);
        }
    }

    /// Takes a lease on the library of a server; `Err`: why the library is not probed.
    pub(super) fn lease_library(
        &self,
        key: &ImageKey,
        file: &std::fs::File,
        shown: &Path,
    ) -> Result<Arc<Lease>, String> {
        self.lease(key, file, Scope::All)
            .map_err(|NotOpened { reason, .. }| format!("{}: {reason}", shown.display()))
    }
}
