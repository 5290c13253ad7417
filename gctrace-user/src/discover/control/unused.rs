//! Images that no process uses any more: their probes are detached, and their indices given back.
//!
//! A probe holds on to its file: the kernel has a reference to the inode (`uprobe_register`, kernel/events/uprobes.c) and to the mount
//! (`bpf_uprobe_multi_link_attach`, `kernel/trace/bpf_trace.c`). While that of a program that is gone is probed, its disk space is not freed and
//! its file system stays in use; and a host that is watched for months sees more images come and go than there are indices.

use std::{
    collections::{BTreeMap, HashMap},
    io::ErrorKind,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use super::{super::identity::ImageKey, Control, ProbedImage, Verdict, select::due};
use crate::{bpf::AttachError, discover::mappings, host::proc_root};

/// How often images are looked at.
const LOOK: Duration = Duration::from_secs(5);
/// How often it is looked in the memory of a process that used an image, which may have become another program.
const CHECKED: Duration = Duration::from_mins(1);
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
    /// When it was last looked whether that process still does, if it is the same.
    checked: Option<Instant>,
    /// Since when no process is known that does.
    since: Option<Instant>,
    /// Found where programs are installed, and probed for those that will run it.
    installed: bool,
    /// Not looked for in the memory of all processes before.
    not_before: Option<Instant>,
}

impl Use {
    /// Whether the process that was known to use it may still do so.
    fn still_has_user(&mut self, keys: &[ImageKey], now: Instant) -> bool {
        let Some(pid) = self.user.filter(|&pid| !proc_root::is_gone(pid)) else { return false };
        if self.checked.is_some_and(|checked| now.saturating_duration_since(checked) < CHECKED) {
            return true;
        }
        self.checked = Some(now);
        mapped(pid).map_or(true, |mapped| is_any(&mapped, keys))
    }

    /// Whether an image without a known user is to be looked for in all processes, and given back if none uses it.
    fn is_over(&self, deleted: bool, wait: Duration, now: Instant) -> bool {
        let Some(since) = self.since else { return false };
        let waited = deleted || !self.installed && now.saturating_duration_since(since) >= wait;
        waited && self.not_before.is_none_or(|not_before| now >= not_before)
    }
}

/// What is probed for all processes that map it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Probed {
    /// An image. Libraries with a GC go with their Ruby, which those who use them use, too.
    Image(u32),
    /// A library of servers.
    Library(ImageKey),
}

/// What is probed, each with all identities of its file.
type Files = Vec<(Probed, Vec<ImageKey>)>;
/// A process that uses each, where there is one; `None`: not all processes could be looked at.
type Users = Option<HashMap<Probed, u32>>;

/// What is known of the use of images.
#[derive(Default)]
pub(super) struct Unused {
    probed: HashMap<Probed, Use>,
    looked: Option<Instant>,
    search: Option<(Vec<Probed>, JoinHandle<Users>)>,
}

impl Unused {
    /// A process uses an image.
    pub(super) fn used(&mut self, image: u32, pid: u32) {
        self.has_user(Probed::Image(image), pid);
    }

    /// A process maps what is probed.
    pub(super) fn has_user(&mut self, probed: Probed, pid: u32) {
        let known = self.probed.entry(probed).or_default();
        (known.user, known.checked, known.since) = (Some(pid), None, None);
    }

    /// It is not probed any more.
    pub(super) fn forget(&mut self, probed: Probed) {
        self.probed.remove(&probed);
        if let Some((all, _)) = &mut self.search {
            // Another image may have its index when the search ends.
            all.retain(|other| *other != probed);
        }
    }

    /// An image is probed although no process may use it yet.
    pub(super) fn is_installed(&mut self, image: u32) {
        self.probed.entry(Probed::Image(image)).or_default().installed = true;
    }
}

impl Control {
    /// A process uses an image.
    pub(in crate::discover) fn used(&mut self, traced: &ProbedImage, pid: u32) {
        self.unused.used(traced.index, pid);
    }

    /// Reserves an index for an image; where all are taken, some images that nobody uses give theirs back first. `kept` does not: it is
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
        // Those that are installed last, and of the others first what has not been used for longest.
        unused.sort_by_key(|probed| {
            let known = self.unused.probed.get(probed);
            known.map(|known| (known.installed, known.since.is_none(), known.since))
        });
        for probed in unused.into_iter().take(GIVEN_BACK) {
            self.retire(probed);
        }
        self.probes.reserve_image()
    }

    /// Gives back what no process has used for a while, and at once what cannot be used again because its file was deleted.
    pub(super) fn give_back_unused(&mut self) {
        // Of mappings that are not looked at yet one may be of such an image.
        if !self.watches_others()
            || self.unattributed.as_ref().is_some_and(|records| records.wait().is_some())
        {
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
        // A host may have thousands of processes, and new ones must not wait for their probes meanwhile.
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
                None => known.not_before = Some(Instant::now() + UNUSED),
                Some(users) => match users.get(&probed) {
                    Some(&pid) => self.unused.has_user(probed, pid),
                    // It may have been used since.
                    None if known.user.is_none() => unused.push(probed),
                    None => {}
                },
            }
        }
        // The rest next time.
        for probed in unused.into_iter().take(GIVEN_BACK) {
            self.retire(probed);
        }
    }

    /// Images that are probed by themselves.
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

    /// Whether a process that has hit a probe of an image, or was forked by one that had, still uses it. It may have begun after the search, or
    /// have been forked while that went on.
    fn has_hits(&mut self, index: u32) -> bool {
        let keys = self.keys_of(index);
        for own in [self.libraries_of(&keys), vec![index]].concat() {
            for (pid, bias) in self.probes.rubies_with(own) {
                if mapped(pid).map_or(true, |mapped| is_any(&mapped, &keys)) {
                    self.unused.used(index, pid);
                    return true;
                }
                // The next image with that index is another one.
                self.probes.unset_ruby(pid, own, bias);
            }
        }
        false
    }

    /// The identities of a probed image.
    pub(super) fn keys_of(&self, index: u32) -> Vec<ImageKey> {
        self.probed_images().remove(&Probed::Image(index)).map(|(_, keys)| keys).unwrap_or_default()
    }

    /// The probed libraries with a GC of a Ruby.
    pub(super) fn libraries_of(&self, ruby: &[ImageKey]) -> Vec<u32> {
        let its = self.libraries.iter().filter(|((_, of), _)| ruby.contains(of));
        its.filter_map(|(_, verdict)| match verdict {
            Verdict::Traced(library) => Some(library.index),
            _ => None,
        })
        .collect()
    }

    /// Unwind tables hold on to their files, too. Those of files with such verdicts are kept while the files are there.
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

/// Looks for these images in the memory of all processes. Not all of them may be open to gctrace; one whose probes were hit is among those that
/// are followed.
fn users(files: &Files, followed: &[u32]) -> Users {
    let mut found = HashMap::new();
    for pid in proc_root::listed().ok()? {
        match mapped(pid) {
            Ok(mapped) => {
                let its = files.iter().filter(|(_, keys)| is_any(&mapped, keys));
                found.extend(its.map(|(probed, _)| (*probed, pid)));
            }
            Err(Unreadable { denied: true }) if !followed.contains(&pid) => {}
            Err(_) => return None,
        }
    }
    Some(found)
}

/// A process whose memory cannot be looked at.
pub(super) struct Unreadable {
    /// It must not be; else gctrace is short of something.
    denied: bool,
}

/// The identities of the files that a process maps; none if it is gone.
pub(super) fn mapped(pid: u32) -> Result<Vec<ImageKey>, Unreadable> {
    let mappings = match mappings::of_process(pid) {
        Ok(mappings) => mappings,
        Err(_) if proc_root::is_gone(pid) => return Ok(Vec::new()),
        Err(error) => return Err(Unreadable { denied: mappings::is_denied(&error) }),
    };
    // The first thread has ended, and others may go on: then its maps show nothing.
    if mappings.is_empty() && !proc_root::is_single(pid) {
        return Err(Unreadable { denied: true });
    }
    let mut keys = Vec::new();
    for mapping in mappings {
        match ImageKey::of(&mapping.file(pid)) {
            Ok(key) => keys.push(key),
            // The mapping is gone.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(Unreadable { denied: error.kind() == ErrorKind::PermissionDenied }),
        }
    }
    Ok(keys)
}

pub(super) fn is_any(mapped: &[ImageKey], keys: &[ImageKey]) -> bool {
    mapped.iter().any(|key| keys.iter().any(|known| known.may_have_been(key)))
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
