//! The on-disk queue of sets to send: its size is limited, the oldest are dropped first, and it survives restarts.

use std::{
    collections::{HashSet, VecDeque},
    ffi::OsString,
    fs::{File, TryLockError},
    io,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use super::journal::{self, Draft, MAX_SET, WHOLE, unique_stem};
use crate::{
    export::upload::engine::{Backlog, Gone, Room},
    private_dir::PrivateDir,
};

/// How often the sets of runs that have ended meanwhile are looked for.
const LOOK: Duration = Duration::from_mins(5);

/// A set on its way to the spool. Until it is there, it is kept in its draft.
#[derive(Debug)]
pub(super) struct Handed {
    pub(super) text: String,
    pub(super) draft: Option<Draft>,
}

impl Drop for Handed {
    /// The set is in the spool, or was dropped and counted. This does not run if the process is killed.
    fn drop(&mut self) {
        if let Some(draft) = self.draft.take() {
            draft.discard();
        }
    }
}

/// A queued set.
#[derive(Debug)]
struct Entry {
    name: OsString,
    size: u64,
    /// Number of failed attempts of this run to send it.
    attempts: u32,
}

/// The queued sets.
#[derive(Debug)]
pub(super) struct Spool {
    dir: Arc<PrivateDir>,
    waiting: VecDeque<Entry>,
    bytes: u64,
    limit: u64,
    /// Number of sets dropped because they exceeded the limit or could not be read, not reported yet.
    gone: u64,
    /// Number of sets of other runs that were taken over, not reported yet.
    added: u64,
    /// Names of sets that could not be read.
    unreadable: HashSet<OsString>,
    /// When the sets of other runs were last looked for.
    looked: Instant,
    made: u64,
    /// A shared lock, held by all runs that send what is in this directory.
    lock: Option<File>,
}

impl Spool {
    /// Opens the spool `name` in a directory. Both are created if they do not exist, accessible only to their owner: sets
    /// contain tokens, and everything in the spool is sent. Links, and directories of other users, are refused. Sets left by
    /// earlier runs are sent first, unless another run is sending: its sets cannot be distinguished from those left over. Once it has ended, they are
    /// taken over ([`Spool::take_over`]).
    pub(super) fn open(base: &Path, name: &str, limit: u64) -> io::Result<Self> {
        let dir = PrivateDir::create(base).and_then(|base| base.child(name))?;
        // Runs that start at the same time check one after the other: converting an exclusive lock to a shared one releases it briefly.
        let turn = dir.folder()?;
        turn.lock()?;
        let lock = dir.lock_file("lock")?;
        let mine = lock.try_lock().is_ok();
        let mut spool = Self {
            dir: Arc::new(dir),
            waiting: VecDeque::new(),
            bytes: 0,
            limit,
            gone: 0,
            added: 0,
            unreadable: HashSet::new(),
            looked: Instant::now(),
            made: 0,
            lock: None,
        };
        if mine {
            spool.take_left()?;
        }
        match lock.try_lock_shared() {
            Ok(()) => spool.lock = Some(lock),
            // An earlier version of gctrace holds an exclusive lock.
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
        Ok(spool)
    }

    /// Appends the sets in the directory that are not known, and the drafts that nobody writes; returns their number. No other run may be sending.
    fn take_left(&mut self) -> io::Result<u64> {
        let known: HashSet<&OsString> =
            self.waiting.iter().map(|entry| &entry.name).chain(&self.unreadable).collect();
        let is_set = |name: &OsString| Path::new(name).extension().is_some_and(|found| found == WHOLE);
        let files = self.dir.files()?.into_iter();
        let mut left: Vec<Entry> = files
            .filter(|(name, _)| is_set(name) && !known.contains(name))
            .map(|(name, stat)| Entry { name, size: stat.st_size.unsigned_abs(), attempts: 0 })
            .collect();
        left.sort_by(|one, other| one.name.cmp(&other.name));
        let mut taken = left.len() as u64;
        self.bytes += left.iter().map(|entry| entry.size).sum::<u64>();
        self.waiting.extend(left);
        self.in_order();
        self.shed(0);
        // `self.dir` cannot be borrowed while sets are added to `self`.
        let dir = Arc::clone(&self.dir);
        let added = journal::left(&dir, |stem, set| {
            self.add(stem, set)?;
            taken += 1;
            Ok(())
        });
        // A full disk does not end the run: a draft that cannot be turned into a set stays for the next one.
        if let Err(error) = added {
            log::warn!("{}: sets of an earlier run stay for the next one: {error}", dir.path().display());
        }
        self.in_order();
        Ok(taken)
    }

    /// Sets are sent in the order in which they were made, which their names have, whatever run made them.
    fn in_order(&mut self) {
        self.waiting.make_contiguous().sort_by(|one, other| one.name.cmp(&other.name));
    }

    /// Takes over the sets of runs that were sending when this one began, if all of them have ended.
    fn take_over(&mut self) -> io::Result<()> {
        // As when the spool is opened: nobody checks at the same time.
        let turn = self.dir.folder()?;
        if turn.try_lock().is_err() {
            return Ok(());
        }
        let lock = match self.lock.take() {
            Some(lock) => lock,
            None => self.dir.lock_file("lock")?,
        };
        let taken = if lock.try_lock().is_ok() { self.take_left() } else { Ok(0) };
        // An attempt that fails gives up the shared lock, too (flock(2)).
        if lock.try_lock_shared().is_ok() {
            self.lock = Some(lock);
        }
        self.added += taken?;
        Ok(())
    }

    fn add(&mut self, stem: &str, text: &str) -> io::Result<()> {
        let size = text.len() as u64;
        self.shed(size);
        let name = format!("{stem}.{WHOLE}");
        self.dir.write(&name, text.as_bytes())?;
        self.waiting.push_back(Entry { name: name.into(), size, attempts: 0 });
        self.bytes += size;
        Ok(())
    }

    fn forget(&mut self) {
        if let Some(entry) = self.waiting.pop_front() {
            self.bytes = self.bytes.saturating_sub(entry.size);
        }
    }

    /// Drops the oldest sets until `more` bytes fit.
    fn shed(&mut self, more: u64) {
        while self.bytes + more > self.limit && !self.waiting.is_empty() {
            self.gone += 1;
            self.pop();
        }
    }

    /// The directory of the queue.
    pub(super) fn dir(&self) -> &Path {
        self.dir.path()
    }
}

impl Backlog for Spool {
    type Job = Handed;
    type Item<'a> = Vec<u8>;

    fn push(&mut self, set: Handed, _in_memory: Room) -> io::Result<()> {
        self.made += 1;
        let own = unique_stem(self.made);
        let stem = set.draft.as_ref().map_or(own.as_str(), Draft::stem);
        self.add(stem, &set.text)
    }

    fn front(&mut self) -> Option<Vec<u8>> {
        loop {
            let name = &self.waiting.front()?.name;
            match self.dir.read(name, MAX_SET) {
                Ok(Some(bytes)) => return Some(bytes),
                gone => {
                    let why = gone.err().map_or_else(|| "it is gone".to_owned(), |error| error.to_string());
                    log::warn!("{}: {why}", self.dir.path().join(name).display());
                    self.gone += 1;
                    let name = name.clone();
                    self.unreadable.insert(name);
                    self.forget();
                }
            }
        }
    }

    fn failed(&mut self) -> u32 {
        self.waiting.front_mut().map_or(0, |entry| {
            entry.attempts += 1;
            entry.attempts
        })
    }

    fn pop(&mut self) {
        if let Some(entry) = self.waiting.front() {
            self.dir.remove(&entry.name);
        }
        self.forget();
    }

    /// In memory only: the next run starts with the oldest again.
    fn requeue(&mut self) {
        if !self.waiting.is_empty() {
            self.waiting.rotate_left(1);
        }
    }

    fn halve(&mut self) -> bool {
        false
    }

    fn len(&self) -> usize {
        self.waiting.len()
    }

    fn take_gone(&mut self) -> Gone {
        let (gone, added) = (&mut self.gone, &mut self.added);
        Gone { dropped: std::mem::take(gone), added: std::mem::take(added), ..Gone::default() }
    }

    fn tend(&mut self) {
        if self.looked.elapsed() < LOOK {
            return;
        }
        self.looked = Instant::now();
        if let Err(error) = self.take_over() {
            log::warn!("{}: sets of other runs are not looked for: {error}", self.dir().display());
        }
    }

    fn keeps_in(&self) -> Option<String> {
        Some(self.dir().display().to_string())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn text(of: Option<Vec<u8>>) -> Option<String> {
        of.map(|bytes| String::from_utf8(bytes).unwrap())
    }

    fn add(spool: &mut Spool, set: &str) {
        spool.made += 1;
        spool.add(&unique_stem(spool.made), set).unwrap();
    }

    /// First in, first out, across restarts, and only one run takes what was left.
    #[test]
    fn survives() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("spool");
        let mut spool = Spool::open(dir.path(), "spool", 1000).unwrap();
        for set in ["first", "second"] {
            add(&mut spool, set);
        }
        assert_eq!(Spool::open(dir.path(), "spool", 1000).unwrap().len(), 0, "another run has them");
        drop(spool);
        let mut spool = Spool::open(dir.path(), "spool", 1000).unwrap();
        add(&mut spool, "third");
        for set in ["first", "second", "third"] {
            assert_eq!(text(spool.front()).as_deref(), Some(set));
            spool.pop();
        }
        assert_eq!((spool.front(), spool.take_gone()), (None, Gone::default()));
        assert_eq!(fs::read_dir(&path).unwrap().count(), 1, "only the lock");
        let mode = std::os::unix::fs::MetadataExt::mode(&fs::metadata(&path).unwrap());
        assert_eq!(mode & 0o777, 0o700);
    }

    /// A run does not take sets that another run is still sending, even if the run that started before that one has ended.
    #[test]
    fn several_runs() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Spool::open(dir.path(), "spool", 1000).unwrap();
        let first = open();
        let mut second = open();
        add(&mut second, "of the second");
        drop(first);
        let third = open();
        assert_eq!(third.len(), 0);
        drop(third);
        assert_eq!(second.len(), 1);
        drop(second);
        assert_eq!(open().len(), 1);
    }

    /// What an overlapping run left is taken over once it has ended, by one run, once.
    #[test]
    fn taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Spool::open(dir.path(), "spool", 1000).unwrap();
        let mut first = open();
        add(&mut first, "of the first");
        let mut second = open();
        add(&mut second, "of the second");
        second.take_over().unwrap();
        assert_eq!((second.len(), second.take_gone()), (1, Gone::default()), "the first run has its own");
        let third = open();
        drop(first);
        second.take_over().unwrap();
        assert_eq!((second.len(), open().len()), (1, 0), "all others must have ended");
        drop(third);
        second.take_over().unwrap();
        assert_eq!((second.len(), second.take_gone().added), (2, 1));
        second.take_over().unwrap();
        assert_eq!((second.len(), open().len(), second.take_gone()), (2, 0, Gone::default()));
        for set in ["of the first", "of the second"] {
            assert_eq!(text(second.front()).as_deref(), Some(set));
            second.pop();
        }
        second.take_over().unwrap();
        assert_eq!((second.len(), second.take_gone()), (0, Gone::default()));
    }

    /// If there is no room for the sets of both runs, the oldest are dropped, whichever run made them.
    #[test]
    fn taken_over_without_room() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = Spool::open(dir.path(), "spool", 100).unwrap();
        let mut second = Spool::open(dir.path(), "spool", 10).unwrap();
        add(&mut first, "earlier");
        add(&mut second, "later");
        drop(first);
        second.take_over().unwrap();
        assert_eq!(
            (text(second.front()).as_deref(), second.len(), second.take_gone().dropped),
            (Some("later"), 1, 1)
        );
    }

    /// The limit is never exceeded; the oldest sets are dropped first and are counted.
    #[test]
    fn bounded() {
        let dir = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(dir.path(), "spool", 10).unwrap();
        for set in ["aaaa", "bbbb", "cccc"] {
            add(&mut spool, set);
        }
        assert_eq!(
            (text(spool.front()).as_deref(), spool.len(), spool.take_gone().dropped),
            (Some("bbbb"), 2, 1)
        );
        drop(spool);
        let mut spool = Spool::open(dir.path(), "spool", 4).unwrap();
        assert_eq!((text(spool.front()).as_deref(), spool.take_gone().dropped), (Some("cccc"), 1));
        fs::remove_file(spool.dir().join(&spool.waiting[0].name)).unwrap();
        assert_eq!((spool.front(), spool.take_gone().dropped), (None, 1), "another process took it away");
    }
}
