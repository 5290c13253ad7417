//! Sets that wait to be sent, on disk: bounded, oldest dropped first, and still there after a restart.

use std::{
    collections::VecDeque,
    fs::{self, File},
    io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use super::super::file;

/// Sets that wait.
#[derive(Debug)]
pub(super) struct Spool {
    dir: PathBuf,
    waiting: VecDeque<(PathBuf, u64)>,
    bytes: u64,
    limit: u64,
    dropped: u64,
    made: u64,
    /// Held as long as this run sends what earlier ones left.
    _lock: Option<File>,
}

impl Spool {
    /// Opens the spool in a directory, which is made if it is not there, for its owner only: sets carry tokens. What an
    /// earlier run left is sent first, unless another run is about to.
    pub(super) fn open(dir: &Path, limit: u64) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let lock = File::options().create(true).truncate(false).write(true).open(dir.join("lock"))?;
        let mine = lock.try_lock().is_ok();
        let mut spool = Self {
            dir: dir.to_owned(),
            waiting: VecDeque::new(),
            bytes: 0,
            limit,
            dropped: 0,
            made: 0,
            _lock: mine.then_some(lock),
        };
        if mine {
            let mut left = Vec::new();
            for entry in fs::read_dir(dir)? {
                let entry = entry?;
                let path = entry.path();
                if path.extension().is_some_and(|extension| extension == "json") {
                    left.push((path, entry.metadata()?.len()));
                }
            }
            left.sort();
            spool.bytes = left.iter().map(|(_, size)| size).sum();
            spool.waiting = left.into();
            spool.shed(0);
        }
        Ok(spool)
    }

    /// Puts a set at the end.
    pub(super) fn push(&mut self, text: &str) -> io::Result<()> {
        let size = text.len() as u64;
        self.shed(size);
        self.made += 1;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let stem = format!("{now:020}-{}-{}", std::process::id(), self.made);
        file::write_new(&self.dir, &stem, ".json", text.as_bytes())?;
        self.waiting.push_back((self.dir.join(format!("{stem}.json")), size));
        self.bytes += size;
        Ok(())
    }

    /// The set at the front. One that cannot be read any more is dropped.
    pub(super) fn front(&mut self) -> Option<Vec<u8>> {
        loop {
            let (path, _) = self.waiting.front()?;
            match fs::read(path) {
                Ok(bytes) => return Some(bytes),
                Err(error) => {
                    log::warn!("{}: {error}", path.display());
                    self.dropped += 1;
                    self.forget();
                }
            }
        }
    }

    /// Removes the set at the front.
    pub(super) fn pop(&mut self) {
        if let Some((path, _)) = self.waiting.front()
            && let Err(error) = fs::remove_file(path)
        {
            log::warn!("removing {}: {error}", path.display());
        }
        self.forget();
    }

    fn forget(&mut self) {
        if let Some((_, size)) = self.waiting.pop_front() {
            self.bytes = self.bytes.saturating_sub(size);
        }
    }

    /// Makes room for so many bytes.
    fn shed(&mut self, more: u64) {
        while self.bytes + more > self.limit && !self.waiting.is_empty() {
            self.dropped += 1;
            self.pop();
        }
    }

    /// Sets that wait.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Sets that were dropped for want of room, or could not be read.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Where they wait.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(of: Option<Vec<u8>>) -> Option<String> {
        of.map(|bytes| String::from_utf8(bytes).unwrap())
    }

    /// First in, first out, over restarts, and only one run takes what was left.
    #[test]
    fn survives() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("spool");
        let mut spool = Spool::open(&path, 1000).unwrap();
        for set in ["first", "second"] {
            spool.push(set).unwrap();
        }
        assert_eq!(Spool::open(&path, 1000).unwrap().len(), 0, "another run has them");
        drop(spool);
        let mut spool = Spool::open(&path, 1000).unwrap();
        spool.push("third").unwrap();
        for set in ["first", "second", "third"] {
            assert_eq!(text(spool.front()).as_deref(), Some(set));
            spool.pop();
        }
        assert_eq!((spool.front(), spool.dropped()), (None, 0));
        assert_eq!(fs::read_dir(&path).unwrap().count(), 1, "only the lock");
        let mode = std::os::unix::fs::MetadataExt::mode(&fs::metadata(&path).unwrap());
        assert_eq!(mode & 0o777, 0o700);
    }

    /// It never takes more room than it may; the oldest go first and are counted.
    #[test]
    fn bounded() {
        let dir = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(dir.path(), 10).unwrap();
        for set in ["aaaa", "bbbb", "cccc"] {
            spool.push(set).unwrap();
        }
        assert_eq!((text(spool.front()).as_deref(), spool.len(), spool.dropped()), (Some("bbbb"), 2, 1));
        drop(spool);
        let mut spool = Spool::open(dir.path(), 4).unwrap();
        assert_eq!((text(spool.front()).as_deref(), spool.dropped()), (Some("cccc"), 1));
        fs::remove_file(&spool.waiting[0].0).unwrap();
        assert_eq!((spool.front(), spool.dropped()), (None, 2), "somebody took it away");
    }
}
