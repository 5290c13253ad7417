//! A size limit for the sets in a directory: a service that runs for months makes room by deleting the oldest.

use std::{
    collections::VecDeque,
    fs, io,
    num::NonZeroU64,
    path::{Path, PathBuf},
    time::SystemTime,
};

/// Prefix and suffix of the names of all sets (`open.rs`). Other files in the directory are left alone.
const NAME: (&str, &str) = ("tunemygc-", ".json");

/// The sets in a directory, oldest first.
pub(super) struct Kept {
    most: u64,
    bytes: u64,
    files: VecDeque<(PathBuf, u64)>,
    /// Number of deleted sets.
    pub(super) deleted: u64,
}

impl Kept {
    /// The existing sets in `dir`, and the maximum number of bytes.
    pub(super) fn new(dir: &Path, most: NonZeroU64) -> io::Result<Self> {
        let mut there: Vec<(SystemTime, PathBuf, u64)> = Vec::new();
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let name = entry.file_name();
            let ours = name.to_str().is_some_and(|name| name.starts_with(NAME.0) && name.ends_with(NAME.1));
            // This does not follow links.
            let about = entry.metadata()?;
            if ours && about.is_file() {
                there.push((about.modified()?, entry.path(), about.len()));
            }
        }
        there.sort();
        let bytes = there.iter().map(|(.., len)| len).sum();
        let files = there.into_iter().map(|(_, path, len)| (path, len)).collect();
        let mut kept = Self { most: most.get(), bytes, files, deleted: 0 };
        kept.make_room()?;
        Ok(kept)
    }

    /// Adds a written set.
    pub(super) fn add(&mut self, path: PathBuf) -> io::Result<()> {
        let len = fs::metadata(&path)?.len();
        self.bytes += len;
        self.files.push_back((path, len));
        self.make_room()
    }

    /// Deletes the oldest sets while the limit is exceeded; the last one stays.
    fn make_room(&mut self) -> io::Result<()> {
        while self.bytes > self.most && self.files.len() > 1 {
            let Some((path, len)) = self.files.pop_front() else { break };
            self.bytes -= len;
            match fs::remove_file(&path) {
                Ok(()) => self.deleted += 1,
                // The file was already removed by somebody else.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The oldest sets are deleted, including those from before the run. Other files stay, and so does the last set, however large it is.
    #[test]
    fn the_oldest_make_room() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, age: u64, len: usize| {
            let path = dir.path().join(name);
            fs::write(&path, vec![b'x'; len]).unwrap();
            let time = SystemTime::now() - std::time::Duration::from_secs(age);
            fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
            path
        };
        let there = || {
            let mut names: Vec<_> = fs::read_dir(dir.path())
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names.join(" ")
        };
        write("tunemygc-9-1.00.json", 300, 40);
        write("tunemygc-1-2.00.json", 200, 40);
        write("tunemygc-5-3.00.json", 100, 40);
        write("notes.json", 900, 400);
        fs::create_dir(dir.path().join("tunemygc-x.json")).unwrap();
        let mut kept = Kept::new(dir.path(), NonZeroU64::new(100).unwrap()).unwrap();
        assert_eq!((kept.deleted, kept.bytes), (1, 80));
        kept.add(write("tunemygc-2-4.00.json", 0, 20)).unwrap();
        assert_eq!(kept.deleted, 1);
        // A file that was removed is not counted.
        fs::remove_file(dir.path().join("tunemygc-1-2.00.json")).unwrap();
        kept.add(write("tunemygc-2-4.00-part2.json", 0, 1)).unwrap();
        assert_eq!((kept.deleted, kept.bytes), (1, 61));
        kept.add(write("tunemygc-3-5.00.json", 0, 500)).unwrap();
        assert_eq!((kept.deleted, kept.files.len()), (4, 1));
        assert_eq!(there(), "notes.json tunemygc-3-5.00.json tunemygc-x.json");
    }
}
