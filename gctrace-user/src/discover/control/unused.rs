//! Images that no process uses any more: their probes are detached, and their indices given back.
//!
//! A probe holds on to its file: the kernel has a reference to the inode (`uprobe_register`, kernel/events/uprobes.c) and to the mount
//! (`bpf_uprobe_multi_link_attach`, `kernel/trace/bpf_trace.c`). While that of a program that is gone is probed, its disk space is not freed and
//! its file system stays in use; and a host that is watched for months sees more images come and go than there are indices.

use std::{
    collections::{BTreeMap, HashMap},
    os::unix::fs::MetadataExt as _,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use super::{super::identity::ImageKey, Control, ProbedImage, Verdict, select::due};
use crate::{
    bpf::AttachError,
    discover::mappings,
    host::{proc::is_running, proc_root},
};

/// How often images are looked at.
const LOOK: Duration = Duration::from_secs(5);
/// How long no process must have used an image: a program that is started every minute is seen from its beginning.
const UNUSED: Duration = Duration::from_mins(5);
/// With fewer spare indices, images do not wait to be given back.
const SPARE: usize = 32;
/// How many images are given back at once: probes that are attached at that time wait for theirs to be detached.
const GIVEN_BACK: usize = 8;
/// Files without a Ruby that are remembered; all are forgotten when there are more.
const OTHERS_REMEMBERED: usize = 65_536;

/// What is known of the use of an image.
#[derive(Default)]
struct Use {
    /// A process that uses it.
    user: Option<u32>,
    /// Since when no process is known that does.
    since: Option<Instant>,
    /// Found where programs are installed, and probed for those that will run it.
    installed: bool,
    /// Not looked for in the memory of all processes before.
    not_before: Option<Instant>,
}

impl Use {
    /// Whether an image without a known user is to be looked for in all processes, and given back if none uses it.
    fn is_over(&self, deleted: bool, wait: Duration, now: Instant) -> bool {
        let Some(since) = self.since else { return false };
        let waited = deleted || !self.installed && now.saturating_duration_since(since) >= wait;
        waited && self.not_before.is_none_or(|not_before| now >= not_before)
    }
}

/// Images, each with all identities of its file.
type Files = Vec<(u32, Vec<ImageKey>)>;
/// A process that uses each image, where there is one; `None`: not all processes could be looked at.
type Users = Option<HashMap<u32, u32>>;

/// What is known of the use of images.
#[derive(Default)]
pub(super) struct Unused {
    images: HashMap<u32, Use>,
    looked: Option<Instant>,
    search: Option<(Vec<u32>, JoinHandle<Users>)>,
}

impl Unused {
    /// A process uses an image.
    pub(super) fn used(&mut self, image: u32, pid: u32) {
        let known = self.images.entry(image).or_default();
        (known.user, known.since) = (Some(pid), None);
    }

    /// An image is probed although no process may use it yet.
    pub(super) fn is_installed(&mut self, image: u32) {
        self.images.entry(image).or_default().installed = true;
    }
}

impl Control {
    /// Reserves an index for an image; where all are taken, some images that nobody uses give theirs back first. `kept` does not: it is
    /// about to be used.
    pub(super) fn reserve_image(&mut self, kept: Option<u32>) -> Result<u32, AttachError> {
        let reserved = self.probes.reserve_image();
        let Err(AttachError::TooManyImages) = reserved else { return reserved };
        let files: Files = self.probed_files().into_iter().map(|(index, (_, keys))| (index, keys)).collect();
        let Some(users) = users(&files, &self.probes.followed()) else { return reserved };
        let mut unused = Vec::new();
        for (index, _) in files {
            match users.get(&index) {
                Some(&pid) => self.unused.used(index, pid),
                None if Some(index) == kept => {}
                None => unused.push(index),
            }
        }
        // Those that are installed last, and of the others first what has not been used for longest.
        unused.sort_by_key(|index| {
            let known = self.unused.images.get(index);
            known.map(|known| (known.installed, known.since.is_none(), known.since))
        });
        for index in unused.into_iter().take(GIVEN_BACK) {
            self.retire(index);
        }
        self.probes.reserve_image()
    }

    /// Gives back what no process has used for a while, and at once what cannot be used again because its file was deleted.
    pub(super) fn give_back_unused(&mut self) {
        if !self.watches_others() {
            return;
        }
        if let Some((images, search)) = self.unused.search.take_if(|(_, search)| search.is_finished()) {
            let users = search.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            self.conclude_search(images, &users);
        }
        if self.unused.search.is_some() || !due(&mut self.unused.looked, LOOK) {
            return;
        }
        if self.verdicts.len() > OTHERS_REMEMBERED {
            self.verdicts.retain(|_, verdict| !matches!(verdict, Verdict::NotRuby));
        }
        if let Some(native) = &mut self.native {
            native.give_back_unused(true);
        }
        let now = Instant::now();
        let wait = if self.probes.spare_images() < SPARE { Duration::ZERO } else { UNUSED };
        let mut files = Files::new();
        for (index, (image, keys)) in self.probed_files() {
            let known = self.unused.images.entry(index).or_default();
            if known.user.is_some_and(|pid| is_running(pid) && maps(pid, &keys) != Some(false)) {
                continue;
            }
            known.user = None;
            known.since.get_or_insert(now);
            let deleted = image.file.metadata().is_ok_and(|file| file.nlink() == 0);
            if known.is_over(deleted, wait, now) {
                files.push((index, keys));
            }
        }
        if files.is_empty() {
            return;
        }
        let images = files.iter().map(|(index, _)| *index).collect();
        let followed = self.probes.followed();
        // A host may have thousands of processes, and new ones must not wait for their probes meanwhile.
        let search = std::thread::Builder::new().name("gctrace-unused".to_owned());
        match search.spawn(move || users(&files, &followed)) {
            Ok(search) => self.unused.search = Some((images, search)),
            Err(error) => log::debug!("starting a thread that looks for processes: {error}"),
        }
    }

    fn conclude_search(&mut self, images: Vec<u32>, users: &Users) {
        let mut unused = Vec::new();
        for index in images {
            let Some(known) = self.unused.images.get_mut(&index) else { continue };
            match users {
                None => known.not_before = Some(Instant::now() + UNUSED),
                Some(users) => match users.get(&index) {
                    Some(&pid) => self.unused.used(index, pid),
                    // It may have been used since.
                    None if known.user.is_none() => unused.push(index),
                    None => {}
                },
            }
        }
        // The rest next time.
        for index in unused.into_iter().take(GIVEN_BACK) {
            self.retire(index);
        }
    }

    /// The images that are probed by themselves. Libraries with a GC go with their Ruby, which those who use them use, too.
    fn probed_files(&self) -> BTreeMap<u32, (Arc<ProbedImage>, Vec<ImageKey>)> {
        let mut found = BTreeMap::new();
        for (key, verdict) in &self.verdicts {
            if let Verdict::Traced(image) = verdict {
                let (_, keys) = found.entry(image.index).or_insert_with(|| (Arc::clone(image), Vec::new()));
                keys.push(*key);
            }
        }
        found
    }

    fn retire(&mut self, index: u32) {
        let is_it = |verdict: &Verdict| matches!(verdict, Verdict::Traced(image) if image.index == index);
        let keys: Vec<ImageKey> =
            self.verdicts.iter().filter(|(_, verdict)| is_it(verdict)).map(|(key, _)| *key).collect();
        self.verdicts.retain(|_, verdict| !is_it(verdict));
        let libraries = self.libraries.extract_if(|(_, ruby), _| keys.contains(ruby));
        let libraries: Vec<u32> = libraries
            .filter_map(|(_, verdict)| match verdict {
                Verdict::Traced(library) => Some(library.index),
                _ => None,
            })
            .collect();
        for index in libraries.into_iter().chain([index]) {
            if let Some(known) = self.images.get(index) {
                log::info!("{}: no process uses it; it is not probed any more", known.image.path.display());
            }
            self.unused.images.remove(&index);
            self.probes.retire_image(index);
            self.attached -= 1;
        }
        // They hold on to their files, too.
        if let Some(native) = &mut self.native {
            native.give_back_unused(false);
        }
    }
}

/// Looks for these images in the memory of all processes. Not all of them may be open to gctrace; one whose probes were hit is among those that
/// are followed.
fn users(files: &Files, followed: &[u32]) -> Users {
    let mut found = HashMap::new();
    for pid in proc_root::pids().ok()? {
        for (index, keys) in files {
            if found.contains_key(index) {
                continue;
            }
            match maps(pid, keys) {
                Some(true) => _ = found.insert(*index, pid),
                None if followed.contains(&pid) => return None,
                Some(false) | None => {}
            }
        }
    }
    Some(found)
}

/// Whether a process maps a file; `None`: it runs, and its memory cannot be looked at.
fn maps(pid: u32, keys: &[ImageKey]) -> Option<bool> {
    let or_gone = |known: Option<bool>| known.or_else(|| (!is_running(pid)).then_some(false));
    let Ok(mappings) = mappings::of_process(pid) else { return or_gone(None) };
    let mut all_known = true;
    for mapping in mappings {
        let file = mapping.file(pid);
        match ImageKey::of(&file) {
            Ok(key) if keys.iter().any(|known| known.may_have_been(&key)) => return Some(true),
            Ok(_) => {}
            // The mapping is gone.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(_) => all_known = false,
        }
    }
    or_gone(all_known.then_some(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A deleted file goes at once, an installed one stays, and others wait; none goes that has a user.
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

    /// This test's own program is found in its process; another file is not, nor any in a process that is gone.
    #[test]
    fn own_program() {
        let own = std::process::id();
        let key = ImageKey::of(&std::env::current_exe().unwrap()).unwrap();
        let other = ImageKey::of("/etc/passwd".as_ref()).unwrap();
        assert_eq!(maps(own, &[other, key]), Some(true));
        assert_eq!(maps(own, &[other]), Some(false));
        assert_eq!(
            users(&vec![(3, vec![other]), (5, vec![key])], &[]).map(|users| users.contains_key(&3)),
            Some(false)
        );
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        assert_eq!(maps(pid, &[key]), Some(false));
    }
}
