//! Images that could not be opened for a possibly temporary reason: each is retried a few times before it is refused.

use std::{
    collections::{BTreeSet, HashMap, hash_map::Entry},
    error::Error,
    io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use super::super::{identity::ImageKey, installed::names_ruby};

/// Maximum number of attempts per image.
const TRIES: u32 = 5;
/// Delay before the second attempt; it doubles for each further one.
const FIRST_WAIT: Duration = Duration::from_secs(1);

/// Errors that may pass.
const PASSING: [i32; 8] = [
    libc::EMFILE,
    libc::ENFILE,
    libc::ENOMEM,
    libc::EAGAIN,
    libc::EINTR,
    libc::EIO,
    libc::ESTALE,
    libc::ETIMEDOUT,
];

/// Why an image could not be opened.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::discover) struct NotOpened {
    pub(in crate::discover) reason: String,
    /// Whether a retry may succeed.
    pub(in crate::discover) passes: bool,
}

impl NotOpened {
    /// With the given wording of the reason; the error and its causes decide whether it is temporary.
    pub(super) fn by(error: &(dyn Error + 'static), reason: String) -> Self {
        Self { reason, passes: passes(error) }
    }

    /// A file that could not be opened or read. `None`: that says nothing about an image, because the process or the file is gone, or
    /// the file does not look like a Ruby.
    pub(super) fn unread(error: &io::Error, shown: &Path) -> Option<Self> {
        let code = error.raw_os_error();
        let passes = passes(error) || error.kind() == io::ErrorKind::UnexpectedEof;
        let gone = matches!(code, Some(libc::ENOENT | libc::ESRCH));
        let reason = || format!("by its name it holds a CRuby interpreter, but it cannot be read: {error}");
        let concerns = !gone && (code.is_some() || passes) && names_ruby(shown);
        concerns.then(|| Self { reason: reason(), passes })
    }
}

/// A permanent reason.
impl From<String> for NotOpened {
    fn from(reason: String) -> Self {
        Self { reason, passes: false }
    }
}

/// Whether the error is a temporary shortage in the kernel, or of a disk or a file server that may answer later (`errno(3)`).
pub(super) fn passes(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        let code = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
        if code.is_some_and(|code| PASSING.contains(&code)) {
            return true;
        }
        cause = error.source();
    }
    false
}

/// An image with a pending retry.
struct Retry {
    tries: u32,
    /// When to retry; `None`: when the next process maps it.
    at: Option<Instant>,
    shown: PathBuf,
    reason: String,
    /// Processes that map the image.
    pids: BTreeSet<u32>,
    /// Whether the processes that waited for it are being inspected.
    in_round: bool,
}

/// All images with pending retries.
#[derive(Default)]
pub(super) struct Retries(HashMap<ImageKey, Retry>);

impl Retries {
    /// Records a failed attempt. Returns whether the image will be retried. If not, it remains refused until its round is over: all processes
    /// that waited for it learn so.
    pub(super) fn failed(&mut self, key: ImageKey, shown: &Path, reason: &str, now: Instant) -> bool {
        let retry = self.0.entry(key).or_insert_with(|| Retry {
            tries: 0,
            at: None,
            shown: shown.to_owned(),
            reason: String::new(),
            pids: BTreeSet::new(),
            in_round: false,
        });
        reason.clone_into(&mut retry.reason);
        retry.tries += 1;
        if retry.tries >= TRIES {
            if !retry.in_round {
                self.0.remove(&key);
            }
            return false;
        }
        retry.at = Some(now + FIRST_WAIT * (1 << (retry.tries - 1)));
        true
    }

    /// Why an image whose last attempt has failed in this round is refused.
    pub(super) fn refused(&self, key: &ImageKey) -> Option<&str> {
        self.0.get(key).filter(|retry| retry.tries >= TRIES).map(|retry| retry.reason.as_str())
    }

    /// All processes that [`Retries::due`] returned with an image have been inspected.
    pub(super) fn round_is_over(&mut self, key: &ImageKey) {
        if let Entry::Occupied(mut entry) = self.0.entry(*key) {
            if entry.get().tries >= TRIES {
                entry.remove();
            } else {
                entry.get_mut().in_round = false;
            }
        }
    }

    /// Ends the retries of an image that has its verdict.
    pub(super) fn opened(&mut self, key: &ImageKey) {
        self.0.remove(key);
    }

    /// Adds a process that maps an image with a pending retry.
    pub(super) fn wait_for(&mut self, key: &ImageKey, pid: u32) {
        if let Some(retry) = self.0.get_mut(key) {
            retry.pids.insert(pid);
        }
    }

    /// Time until the next retry.
    pub(super) fn wait(&self, now: Instant) -> Option<Duration> {
        let next = self.0.values().filter_map(|retry| retry.at).min();
        next.map(|at| at.saturating_duration_since(now))
    }

    /// Takes the images that are due, with the processes that map them. Their rounds begin.
    pub(super) fn due(&mut self, now: Instant) -> Vec<(ImageKey, BTreeSet<u32>)> {
        let due = self.0.iter_mut().filter(|(_, retry)| retry.at.is_some_and(|at| at <= now));
        let take = |(key, retry): (&ImageKey, &mut Retry)| {
            retry.at = None;
            retry.in_round = true;
            (*key, std::mem::take(&mut retry.pids))
        };
        due.map(take).collect()
    }

    /// At the end of the run, takes the images that were not opened: path, reason, and the processes that map them.
    pub(super) fn left(&mut self) -> impl Iterator<Item = (PathBuf, String, BTreeSet<u32>)> + use<> {
        std::mem::take(&mut self.0)
            .into_values()
            .map(|Retry { shown, reason, pids, .. }| (shown, reason, pids))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A Ruby that could not be opened or read is tried again, or refused if it may not be read; nothing follows about other files, and from a
    /// process that is gone.
    #[test]
    fn files_that_are_not_read() {
        let (ruby, other) = (Path::new("/srv/lib/libruby.so.3.4"), Path::new("/srv/lib/libc.so.6"));
        let unread = |code, path| NotOpened::unread(&io::Error::from_raw_os_error(code), path);
        for code in [libc::EMFILE, libc::ENFILE, libc::EIO, libc::ESTALE, libc::ETIMEDOUT] {
            let why = unread(code, ruby).unwrap();
            assert!(why.passes && why.reason.contains("cannot be read: "), "{why:?}");
            assert_eq!(unread(code, other), None);
        }
        assert!(!unread(libc::EACCES, ruby).unwrap().passes);
        assert!(NotOpened::unread(&io::ErrorKind::UnexpectedEof.into(), ruby).unwrap().passes);
        assert_eq!((unread(libc::ENOENT, ruby), unread(libc::ESRCH, ruby)), (None, None));
        assert_eq!(NotOpened::unread(&io::Error::other("not a regular file"), ruby), None);
    }

    /// A shortage in the kernel is temporary; missing permissions or features are not.
    #[test]
    fn reasons_that_pass() {
        #[derive(Debug, thiserror::Error)]
        #[error("attaching")]
        struct Attaching(#[source] Box<dyn Error + Send + Sync>);
        let error = |code| Attaching(io::Error::from_raw_os_error(code).into());
        for code in PASSING {
            assert!(passes(&error(code)), "{code}");
            assert!(NotOpened::by(&error(code), String::new()).passes);
        }
        for code in [libc::EPERM, libc::EINVAL, libc::ENOENT, libc::ENOSPC] {
            assert!(!passes(&error(code)), "{code}");
        }
        assert!(!NotOpened::from("too many images".to_owned()).passes);
    }

    /// After the last attempt, all processes that waited for the image are refused, not one of them; a later one begins anew.
    #[test]
    fn all_that_wait_are_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let key = ImageKey::of(file.path()).unwrap();
        let mut now = Instant::now();
        let mut retries = Retries::default();
        // As `Control::judge` does: the reason for which it is refused, or `None` if the process waits.
        let judge = |retries: &mut Retries, pid, now| {
            if let Some(reason) = retries.refused(&key) {
                return Some(reason.to_owned());
            }
            if retries.failed(key, Path::new("/ruby"), "short", now) {
                retries.wait_for(&key, pid);
                return None;
            }
            Some("short".to_owned())
        };
        let waiting = BTreeSet::from([7, 8, 9]);
        assert_eq!(judge(&mut retries, 7, now), None);
        retries.wait_for(&key, 8);
        retries.wait_for(&key, 9);
        for round in 2..=TRIES {
            now += retries.wait(now).unwrap();
            assert_eq!(retries.due(now), [(key, waiting.clone())]);
            for (nth, &pid) in waiting.iter().enumerate() {
                if round == TRIES {
                    assert_eq!(judge(&mut retries, pid, now).as_deref(), Some("short"), "{pid}");
                } else if nth == 0 {
                    assert_eq!(judge(&mut retries, pid, now), None);
                } else {
                    // Its verdict is that it waits: it is not judged again.
                    retries.wait_for(&key, pid);
                }
            }
            retries.round_is_over(&key);
        }
        assert_eq!((retries.refused(&key), retries.wait(now)), (None, None));
        assert_eq!(judge(&mut retries, 10, now), None);
    }

    /// An image is retried a few times, with growing delays, for the processes that map it; then it is refused. Success resets the count.
    #[test]
    fn tries() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let key = ImageKey::of(file.path()).unwrap();
        let (begin, shown) = (Instant::now(), Path::new("/ruby"));
        let mut now = begin;
        let mut retries = Retries::default();
        assert_eq!(retries.wait(now), None);
        for wait in [1, 2, 4, 8] {
            assert!(retries.failed(key, shown, "short", now));
            retries.wait_for(&key, 7);
            assert_eq!(retries.wait(now), Some(Duration::from_secs(wait)));
            assert!(retries.due(now).is_empty());
            now += Duration::from_secs(wait);
            assert_eq!(retries.due(now), [(key, BTreeSet::from([7]))]);
            assert!(retries.due(now).is_empty() && retries.wait(now).is_none());
            if wait < 8 {
                retries.round_is_over(&key);
            }
        }
        assert!(!retries.failed(key, shown, "short", now));
        retries.round_is_over(&key);
        assert!(retries.failed(key, shown, "short", now));
        retries.opened(&key);
        assert!(retries.failed(key, shown, "short", now));
        assert_eq!(retries.wait(now), Some(Duration::from_secs(1)));
        retries.wait_for(&key, 8);
        let left: Vec<_> = retries.left().collect();
        assert_eq!(left, [(shown.to_owned(), "short".to_owned(), BTreeSet::from([8]))]);
    }
}
