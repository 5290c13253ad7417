//! Images that no process uses any more: their probes are detached and their indices released.
//!
//! A probe keeps its file in use: the kernel holds a reference to the inode (`uprobe_register`, kernel/events/uprobes.c) and to the mount
//! (`bpf_uprobe_multi_link_attach`, `kernel/trace/bpf_trace.c`). While the file of a removed program is probed, its disk space is not freed and
//! its file system stays busy; and a host that is watched for months sees more images come and go than there are indices.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, ErrorKind},
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use procfs::ProcError;
use rustix::io::Errno;

use super::{super::identity::ImageKey, Control, ProbedImage, Verdict, select::due};
use crate::{bpf::AttachError, discover::mappings, host::proc_root};

/// Interval between checks of all images.
const LOOK: Duration = Duration::from_secs(5);
/// Interval at which the mappings of a process that used an image are read again: it may run another program by then.
const CHECKED: Duration = Duration::from_mins(1);
/// Minimum time without a user before an image is retired: a program started every minute stays traced from its start.
const UNUSED: Duration = Duration::from_mins(5);
/// With fewer spare indices than this, unused images are retired without waiting.
const SPARE: usize = 32;
/// Maximum number of images retired at a time: attaching probes has to wait while theirs are being detached.
const GIVEN_BACK: usize = 8;
/// Maximum number of remembered verdicts; above it, those on files without a Ruby are forgotten.
const OTHERS_REMEMBERED: usize = 65_536;

/// Usage of an image.
#[derive(Default)]
struct Use {
    /// A process that is known to use it.
    user: Option<u32>,
    /// When that process was last checked to use it still.
    checked: Option<Instant>,
    /// Since when it has no known user.
    since: Option<Instant>,
    /// Found where programs are installed, and probed for future processes.
    installed: bool,
    /// The earliest time to search the mappings of all processes for it.
    not_before: Option<Instant>,
    /// Searches since it had a user that failed because some process could not be inspected.
    failed: u32,
}

impl Use {
    /// Whether the known user may still use it.
    fn still_has_user(&mut self, keys: &[ImageKey], now: Instant) -> bool {
        let Some(pid) = self.user.filter(|&pid| !proc_root::is_gone(pid)) else { return false };
        if self.checked.is_some_and(|checked| now.saturating_duration_since(checked) < CHECKED) {
            return true;
        }
        self.checked = Some(now);
        mapped(pid).map_or(true, |mapped| is_any(&mapped, keys))
    }

    /// Whether all processes must be searched for an image without a known user; it is retired if none uses it.
    fn is_over(&self, deleted: bool, wait: Duration, now: Instant) -> bool {
        let Some(since) = self.since else { return false };
        let waited = deleted || !self.installed && now.saturating_duration_since(since) >= wait;
        waited && self.not_before.is_none_or(|not_before| now >= not_before)
    }

    /// A search has failed: most often because of a process that was ending, seldom because of one that never can be inspected.
    fn search_failed(&mut self, now: Instant) {
        self.not_before = Some(now + LOOK.saturating_mul(2_u32.saturating_pow(self.failed)).min(UNUSED));
        self.failed = self.failed.saturating_add(1);
    }
}

/// A file that is probed for all processes that map it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Probed {
    /// An image. A GC library is handled together with its Ruby, because its users use that, too.
    Image(u32),
    /// A library that servers map.
    Library(ImageKey),
}

/// The probed files, each with all its identities.
type Files = Vec<(Probed, Vec<ImageKey>)>;
/// One user of each probed file that has any; `None`: some process could not be inspected.
type Users = Option<HashMap<Probed, u32>>;

/// Usage of all probed files.
#[derive(Default)]
pub(super) struct Unused {
    probed: HashMap<Probed, Use>,
    looked: Option<Instant>,
    search: Option<(Vec<Probed>, JoinHandle<Users>)>,
}

impl Unused {
    /// Records that a process uses an image.
    pub(super) fn used(&mut self, image: u32, pid: u32) {
        self.has_user(Probed::Image(image), pid);
    }

    /// Records that a process maps a probed file.
    pub(super) fn has_user(&mut self, probed: Probed, pid: u32) {
        let known = self.probed.entry(probed).or_default();
        *known = Use { user: Some(pid), installed: known.installed, ..Use::default() };
    }

    /// Forgets a file that is no longer probed.
    pub(super) fn forget(&mut self, probed: Probed) {
        self.probed.remove(&probed);
        if let Some((all, _)) = &mut self.search {
            // Another image may have this index when the running search ends.
            all.retain(|other| *other != probed);
        }
    }

    /// Records that an image is installed and probed, possibly before any process uses it.
    pub(super) fn is_installed(&mut self, image: u32) {
        self.probed.entry(Probed::Image(image)).or_default().installed = true;
    }
}

impl Control {
    /// Records that a process uses an image.
    pub(in crate::discover) fn used(&mut self, traced: &ProbedImage, pid: u32) {
        self.unused.used(traced.index, pid);
    }

    /// Reserves an index for an image; if all are taken, some unused images are retired first, except `kept`, which is
    /// about to be used.
    pub(super) fn reserve_image(&mut self, kept: Option<u32>) -> Result<u32, AttachError> {
        let reserved = self.probes.reserve_image();
        let Err(AttachError::TooManyImages) = reserved else { return reserved };
        let files: Files =
            self.probed_images().into_iter().map(|(probed, (_, keys))| (probed, keys)).collect();
        let Some(users) = users(&files, &self.probes.followed()) else { return reserved };
        let mut unused = Vec::new();
        for (probed, _) in files {
            match users.get(&probed) {
                Some(&pid) => self.unused.has_user(probed, pid),
                None if kept.map(Probed::Image) == Some(probed) => {}
                None => unused.push(probed),
            }
        }
        // Installed images last; the other ones in order of how long they have been unused, longest first.
        unused.sort_by_key(|probed| {
            let known = self.unused.probed.get(probed);
            known.map(|known| (known.installed, known.since.is_none(), known.since))
        });
        for probed in unused.into_iter().take(GIVEN_BACK) {
            self.retire(probed);
        }
        self.probes.reserve_image()
    }

    /// Retires images that no process has used for a while, and at once those that cannot be used again because their file was deleted.
    pub(super) fn give_back_unused(&mut self) {
        // A mapping whose process is not known yet may be of such an image.
        if self.unattributed.as_ref().is_some_and(|records| records.wait().is_some()) {
            return;
        }
        if let Some((all, search)) = self.unused.search.take_if(|(_, search)| search.is_finished()) {
            let users = search.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            self.conclude_search(all, &users);
        }
        if self.unused.search.is_some() || !due(&mut self.unused.looked, LOOK) {
            return;
        }
        if self.verdicts.len() > OTHERS_REMEMBERED {
            self.verdicts.retain(|_, verdict| !matches!(verdict, Verdict::NotRuby));
        }
        self.give_back_tables(|_| true);
        let now = Instant::now();
        let few = self.probes.spare_images() < SPARE;
        let mut files = Files::new();
        let images = self.probed_images().into_iter();
        let images = images.map(|(probed, (image, keys))| (probed, image.lease.is_deleted(), keys));
        let libraries = self.servers.libraries();
        let libraries = libraries.map(|(key, lease)| (Probed::Library(key), lease.is_deleted(), vec![key]));
        for (probed, deleted, keys) in images.chain(libraries).collect::<Vec<_>>() {
            let known = self.unused.probed.entry(probed).or_default();
            if known.still_has_user(&keys, now) {
                continue;
            }
            known.user = None;
            known.since.get_or_insert(now);
            let waits = !few || matches!(probed, Probed::Library(_));
            if known.is_over(deleted, if waits { UNUSED } else { Duration::ZERO }, now) {
                files.push((probed, keys));
            }
        }
        if files.is_empty() {
            return;
        }
        let all = files.iter().map(|(probed, _)| *probed).collect();
        let followed = self.probes.followed();
        // In a separate thread: a host may have thousands of processes, and new ones must not wait for their probes meanwhile.
        let search = std::thread::Builder::new().name("gctrace-unused".to_owned());
        match search.spawn(move || users(&files, &followed)) {
            Ok(search) => self.unused.search = Some((all, search)),
            Err(error) => log::debug!("starting a thread that looks for processes: {error}"),
        }
    }

    fn conclude_search(&mut self, all: Vec<Probed>, users: &Users) {
        let mut unused = Vec::new();
        for probed in all {
            let Some(known) = self.unused.probed.get_mut(&probed) else { continue };
            match users {
                None => known.search_failed(Instant::now()),
                Some(users) => match users.get(&probed) {
                    Some(&pid) => self.unused.has_user(probed, pid),
                    // It may have been used since the search.
                    None if known.user.is_none() => unused.push(probed),
                    None => {}
                },
            }
        }
        // The remaining ones are retired next time.
        for probed in unused.into_iter().take(GIVEN_BACK) {
            self.retire(probed);
        }
    }

    /// The images that are probed on their own (not GC libraries), with all their identities.
    fn probed_images(&self) -> BTreeMap<Probed, (Arc<ProbedImage>, Vec<ImageKey>)> {
        let mut found = BTreeMap::new();
        for (key, verdict) in &self.verdicts {
            if let Verdict::Traced(image) = verdict {
                let probed = Probed::Image(image.index);
                let (_, keys) = found.entry(probed).or_insert_with(|| (Arc::clone(image), Vec::new()));
                keys.push(*key);
            }
        }
        found
    }

    fn retire(&mut self, probed: Probed) {
        if let Probed::Image(index) = probed
            && self.has_hits(index)
        {
            return;
        }
        self.unused.forget(probed);
        match probed {
            Probed::Image(index) => self.retire_image(index, "no process uses it"),
            Probed::Library(key) => drop(self.retire_library(&key)),
        }
        self.give_back_tables(|verdict| matches!(verdict, Some(Verdict::Traced(_))));
    }

    /// Whether a process that has hit a probe of an image, or was forked by such a process, still uses the image. It may have started after
    /// the search, or have been forked during it.
    fn has_hits(&mut self, index: u32) -> bool {
        let keys = self.keys_of(index);
        for own in [self.libraries_of(&keys), vec![index]].concat() {
            for (pid, bias) in self.probes.rubies_with(own) {
                if mapped(pid).map_or(true, |mapped| is_any(&mapped, &keys)) {
                    self.unused.used(index, pid);
                    return true;
                }
                // The index will be reused for another image.
                self.probes.unset_ruby(pid, own, bias);
            }
        }
        false
    }

    /// The identities of a probed image.
    pub(in crate::discover) fn keys_of(&self, index: u32) -> Vec<ImageKey> {
        self.probed_images().remove(&Probed::Image(index)).map(|(_, keys)| keys).unwrap_or_default()
    }

    /// The probed GC libraries of a Ruby.
    pub(super) fn libraries_of(&self, ruby: &[ImageKey]) -> Vec<u32> {
        let its = self.libraries.iter().filter(|((_, of), _)| ruby.contains(of));
        its.filter_map(|(_, verdict)| match verdict {
            Verdict::Traced(library) => Some(library.index),
            _ => None,
        })
        .collect()
    }

    /// Unwind tables keep their files in use as well. Those of files whose verdict `kept` accepts remain while the files exist.
    fn give_back_tables(&mut self, kept: impl Fn(Option<&Verdict>) -> bool) {
        if let Some(native) = &mut self.native {
            native.give_back_unused(|key| kept(self.verdicts.get(key)));
        }
    }

    pub(super) fn retire_image(&mut self, index: u32, why: &str) {
        let keys = self.keys_of(index);
        let libraries = self.libraries_of(&keys);
        self.libraries.retain(|(_, ruby), _| !keys.contains(ruby));
        self.verdicts.retain(|key, _| !keys.contains(key));
        for index in libraries.into_iter().chain([index]) {
            if let Some(known) = self.images.get(index) {
                log::info!("{}: it is not probed any more: {why}", known.image.path.display());
            }
            self.unused.forget(Probed::Image(index));
            self.probes.retire_image(index);
            self.attached -= 1;
        }
    }
}

/// Searches the mappings of all processes for these images. Some processes may be inaccessible to gctrace, in part or as a whole; those whose probes
/// were hit are among the `followed` ones.
fn users(files: &Files, followed: &[u32]) -> Users {
    let mut found = HashMap::new();
    for pid in proc_root::listed().ok()? {
        let mapped = match mapped(pid) {
            Ok(mapped) => mapped,
            Err(failed) if failed.shortage || followed.contains(&pid) => return None,
            Err(failed) => failed.mapped,
        };
        let its = files.iter().filter(|(_, keys)| is_any(&mapped, keys));
        found.extend(its.map(|(probed, _)| (*probed, pid)));
    }
    Some(found)
}

/// The mappings of a process, or some of its files, cannot be read.
#[derive(Default)]
pub(super) struct Unreadable {
    /// Whether gctrace lacks some resource. Otherwise access is denied, or a file system does not answer: that may never change.
    shortage: bool,
    /// The identities of the other files that it maps.
    mapped: Vec<ImageKey>,
}

/// The identities of the files that a process maps; empty if it is gone.
pub(super) fn mapped(pid: u32) -> Result<Vec<ImageKey>, Unreadable> {
    let mappings = match mappings::of_process(pid) {
        Ok(mappings) => mappings,
        Err(_) if proc_root::is_gone(pid) => return Ok(Vec::new()),
        Err(error) => {
            let shortage = matches!(error, ProcError::Io(error, _) if mappings::is_shortage(&error));
            return Err(Unreadable { shortage, ..Unreadable::default() });
        }
    };
    if mappings.is_empty() {
        return without_memory(pid);
    }
    identities(pid, mappings.iter().map(|mapping| ImageKey::of(&mapping.file(pid))))
}

/// The identities of all files of a process.
fn identities(
    pid: u32,
    files: impl Iterator<Item = io::Result<ImageKey>>,
) -> Result<Vec<ImageKey>, Unreadable> {
    let mut mapped = Vec::new();
    let mut failed = None;
    for file in files {
        match file {
            Ok(key) => mapped.push(key),
            // The mapping has been removed.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            // The process is ending (`mm_access`, kernel/fork.c).
            Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {
                return without_memory(pid);
            }
            Err(error) => *failed.get_or_insert(false) |= mappings::is_shortage(&error),
        }
    }
    match failed {
        None => Ok(mapped),
        Some(shortage) => Err(Unreadable { shortage, mapped }),
    }
}

/// The first thread of a process has ended: others may continue, with their memory.
fn without_memory(pid: u32) -> Result<Vec<ImageKey>, Unreadable> {
    if proc_root::is_single(pid) { Ok(Vec::new()) } else { Err(Unreadable::default()) }
}

pub(super) fn is_any(mapped: &[ImageKey], keys: &[ImageKey]) -> bool {
    mapped.iter().any(|key| keys.iter().any(|known| known.may_have_been(key)))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A deleted file is retired at once, an installed one never, and others after a wait; a file with a user is not retired.
    #[test]
    fn what_is_over() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let unused = Use { since: Some(begin), ..Use::default() };
        assert!(!unused.is_over(false, UNUSED, at(299)) && unused.is_over(false, UNUSED, at(300)));
        assert!(unused.is_over(true, UNUSED, begin) && unused.is_over(false, Duration::ZERO, begin));
        let installed = Use { installed: true, since: Some(begin), ..Use::default() };
        assert!(
            !installed.is_over(false, Duration::ZERO, at(100_000)) && installed.is_over(true, UNUSED, begin)
        );
        let refused = Use { not_before: Some(at(400)), since: Some(begin), ..Use::default() };
        assert!(!refused.is_over(true, UNUSED, at(399)) && refused.is_over(true, UNUSED, at(400)));
        assert!(!Use { user: Some(1), ..Use::default() }.is_over(true, UNUSED, at(100_000)));
    }

    /// After a search that failed, the next one follows soon; if they continue to fail, less and less often.
    #[test]
    fn searches_that_fail() {
        let begin = Instant::now();
        let mut unused = Use { since: Some(begin), ..Use::default() };
        for seconds in [5, 10, 20, 40, 80, 160, 300, 300] {
            unused.search_failed(begin);
            let before = begin + Duration::from_millis(seconds * 1000 - 1);
            assert!(!unused.is_over(true, UNUSED, before));
            assert!(unused.is_over(true, UNUSED, begin + Duration::from_secs(seconds)));
        }
    }

    /// Processes that end while they are inspected do not make a search fail, not even one for those whose probes were hit.
    #[test]
    fn processes_that_end() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id();
        let no_memory = || identities(pid, [Err(io::Error::from_raw_os_error(libc::ESRCH))].into_iter());
        let running = no_memory();
        child.kill().unwrap();
        child.wait().unwrap();
        for empty in [running, no_memory()] {
            assert!(empty.is_ok_and(|mapped| mapped.is_empty()));
        }

        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        std::process::Command::new("true").status().unwrap();
                    }
                });
            }
            let own = ImageKey::of(&std::env::current_exe().unwrap()).unwrap();
            let files = vec![(Probed::Image(3), vec![own])];
            let begin = Instant::now();
            let mut failed = 0;
            let mut inspected = 0;
            while begin.elapsed() < Duration::from_secs(2) {
                let mut child = std::process::Command::new("true").spawn().unwrap();
                let ends = begin.elapsed() + Duration::from_millis(5);
                while begin.elapsed() < ends {
                    inspected += 1;
                    failed += u32::from(mapped(child.id()).is_err());
                }
                child.wait().unwrap();
                failed += u32::from(users(&files, &[]).is_none());
            }
            assert!(inspected > 0);
            over.store(true, Ordering::Relaxed);
            assert_eq!(failed, 0);
        });
    }

    /// What one process maps never makes a search fail, whatever its name is and however its file system fails; a lack of descriptors does.
    #[test]
    fn files_that_fail() {
        // Other users cannot open files by their mapping, and the odd name leads to none.
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let mut child = mappings::child_with_odd_name();
        let own = ImageKey::of(&std::env::current_exe().unwrap()).unwrap();
        let files = vec![(Probed::Image(3), vec![own])];
        let found = users(&files, &[]).zip(users(&files, &[child.id()]));
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
        assert!(found.unwrap().1.contains_key(&Probed::Image(3)));

        let with = |code: i32| {
            let files = [Err(io::Error::from_raw_os_error(code)), Ok(own)];
            identities(std::process::id(), files.into_iter())
        };
        for code in [libc::ESTALE, libc::ENOTCONN, libc::EIO, libc::EACCES] {
            assert!(with(code).is_err_and(|failed| !failed.shortage && failed.mapped == [own]), "{code}");
        }
        for code in [libc::EMFILE, libc::ENFILE, libc::ENOMEM] {
            assert!(with(code).is_err_and(|failed| failed.shortage), "{code}");
        }
        assert!(with(libc::ENOENT).is_ok_and(|mapped| mapped == [own]));
    }

    /// This test's own program is found in its process; another file is not, and a process that is gone has no files.
    #[test]
    fn own_program() {
        let own = std::process::id();
        let key = ImageKey::of(&std::env::current_exe().unwrap()).unwrap();
        let other = ImageKey::of("/etc/passwd".as_ref()).unwrap();
        let its = mapped(own).ok().unwrap();
        assert!(is_any(&its, &[other, key]) && !is_any(&its, &[other]));
        let files = vec![(Probed::Image(3), vec![other]), (Probed::Library(key), vec![key])];
        let found = users(&files, &[]).unwrap();
        assert!(found.contains_key(&Probed::Library(key)) && !found.contains_key(&Probed::Image(3)));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        assert!(mapped(pid).is_ok_and(|mapped| mapped.is_empty()));
    }
}
