//! Identity of an image file across paths, containers and processes.

use std::{
    io,
    os::{linux::fs::MetadataExt as _, unix::fs::MetadataExt},
    path::Path,
};

/// `OVERLAYFS_SUPER_MAGIC` (include/uapi/linux/magic.h).
const OVERLAYFS: i64 = 0x794c_7630;

/// Identifies an image independently of its path. On overlayfs the device number differs from mount to mount while uprobes are
/// on the one lower inode, so the device is ignored there: attaching the same lower file through two containers
/// would count every hit twice. A container that changes the mode or the owner of such a file gets a copy that keeps
/// the inode number and the modification time, so the change time is included there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ImageKey {
    device: Option<u64>,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: Option<(i64, i64)>,
}

impl ImageKey {
    /// The identity of the file that `path` leads to (links are followed).
    pub fn of(path: &Path) -> io::Result<Self> {
        let metadata = std::fs::metadata(path)?;
        let overlay = rustix::fs::statfs(path).is_ok_and(|fs| fs.f_type == OVERLAYFS);
        Ok(Self {
            device: (!overlay).then(|| metadata.st_dev()),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: overlay.then(|| (metadata.ctime(), metadata.ctime_nsec())),
        })
    }

    /// The identity of a file with this inode number.
    #[cfg(test)]
    pub(crate) fn sample(inode: u64) -> Self {
        Self { device: Some(1), inode, size: 1, modified: (1, 0), changed: None }
    }

    /// Whether another identity may be of the same file: seen on overlayfs and below it, or before and after a metadata change
    /// of the lower file (a new link is one). Only a comparison of the code itself can tell then.
    pub fn may_be(&self, other: &Self) -> bool {
        let same = |key: &Self| (key.inode, key.size, key.modified);
        same(self) == same(other) && (self.device.is_none() || other.device.is_none())
    }

    /// Whether both are the same file at different times, if one of them is known to exist still (it is open or mapped): then its inode
    /// number is not reused. The size and the times of a file may change; anybody who owns it can set its modification time.
    pub fn is_same_file(&self, other: &Self) -> bool {
        self.device.is_some() && self.device == other.device && self.inode == other.inode
    }

    /// Whether this may have been an earlier identity of the same file: the times and the size of a file may change while it is mapped, its
    /// inode and device numbers do not.
    pub fn may_have_been(&self, other: &Self) -> bool {
        let unknown = self.device.is_none() || other.device.is_none();
        self.inode == other.inode && (unknown || self.device == other.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Links lead to the same identity, copies do not.
    #[test]
    fn links_and_copies() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link, copy) = (dir.path().join("a"), dir.path().join("b"), dir.path().join("c"));
        std::fs::write(&file, "x").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        std::fs::copy(&file, &copy).unwrap();
        assert_eq!(ImageKey::of(&file).unwrap(), ImageKey::of(&link).unwrap());
        assert_ne!(ImageKey::of(&file).unwrap(), ImageKey::of(&copy).unwrap());
    }

    /// A changed file is recognised as the same one; a copy is not.
    #[test]
    fn changed_files() {
        let dir = tempfile::tempdir().unwrap();
        let (file, copy) = (dir.path().join("a"), dir.path().join("b"));
        std::fs::write(&file, "x").unwrap();
        std::fs::copy(&file, &copy).unwrap();
        let before = ImageKey::of(&file).unwrap();
        std::fs::write(&file, "longer").unwrap();
        let after = ImageKey::of(&file).unwrap();
        assert!(before != after && before.may_have_been(&after));
        assert!(!before.may_have_been(&ImageKey::of(&copy).unwrap()));
        assert!(before.is_same_file(&after) && !before.is_same_file(&ImageKey::of(&copy).unwrap()));
        let elsewhere = |device| ImageKey { device, ..after };
        assert!(!before.is_same_file(&elsewhere(None)) && !elsewhere(None).is_same_file(&elsewhere(None)));
        assert!(before.may_have_been(&elsewhere(None)) && !before.may_have_been(&elsewhere(Some(0))));
    }
}
