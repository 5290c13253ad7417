//! The file of an image: how to open it, its paths, and below which root folders its debug files may be.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use crate::host::proc_root;

/// The file of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ImageFile {
    /// Path by which gctrace opens it.
    pub(super) open: PathBuf,
    /// Path that messages name: the one in the process's maps.
    pub(super) shown: PathBuf,
    /// Path below the root of its process.
    pub(super) in_root: PathBuf,
    /// Root folders to search below: that of its process, then the host's.
    pub(super) roots: Vec<PathBuf>,
}

impl ImageFile {
    /// A file of the host.
    pub(super) fn on_host(path: &Path) -> Self {
        let path = path.to_owned();
        Self { open: path.clone(), shown: path.clone(), in_root: path, roots: vec![PathBuf::from("/")] }
    }

    /// A file that a process maps. `open`: the path to open it; `shown`: its path in the process's maps.
    pub(super) fn of_process(pid: u32, open: &Path, shown: &Path) -> Self {
        let root = proc_root::path(pid, "root");
        if is_ours(pid, &root) {
            return Self { open: open.to_owned(), ..Self::on_host(shown) };
        }
        // A process that has changed its root sees less of the path than gctrace does, unless its mount namespace has that root, too.
        let path = fs::read_link(&root).ok().and_then(|root| beneath(shown, &root));
        let (open, shown) = (open.to_owned(), shown.to_owned());
        let in_root = path.unwrap_or_else(|| shown.clone());
        Self { open, shown, in_root, roots: vec![root, PathBuf::from("/")] }
    }
}

/// The path relative to `root`; `None` if it is not below it.
fn beneath(path: &Path, root: &Path) -> Option<PathBuf> {
    path.strip_prefix(root).ok().map(|rest| Path::new("/").join(rest))
}

/// Whether a process sees the same files under the same paths as gctrace: it has the same root and mount namespace.
fn is_ours(pid: u32, root: &Path) -> bool {
    let mounts = |link: &Path| fs::read_link(link).ok();
    let folder = |path: &Path| fs::metadata(path).ok().map(|data| (data.dev(), data.ino()));
    let (own, its) = (mounts(Path::new("/proc/self/ns/mnt")), mounts(&proc_root::path(pid, "ns/mnt")));
    own.is_some() && own == its && folder(root).is_some() && folder(root) == folder(Path::new("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How a process sees a path below its own root, and one that is not below it.
    #[test]
    fn below_a_root() {
        let library = Path::new("/srv/box/usr/lib/libruby.so");
        assert_eq!(beneath(library, Path::new("/srv/box")), Some(PathBuf::from("/usr/lib/libruby.so")));
        assert_eq!(beneath(library, Path::new("/")).as_deref(), Some(library));
        assert_eq!(beneath(library, Path::new("/srv/bo")), None);
    }

    /// A process with gctrace's root uses the host's paths; one that is gone falls back on the host's root.
    #[test]
    fn own_and_vanished() {
        let path = Path::new("/usr/lib/libruby.so");
        assert_eq!(ImageFile::of_process(std::process::id(), path, path), ImageFile::on_host(path));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let gone = ImageFile::of_process(child.id(), path, path);
        assert_eq!((gone.in_root.as_path(), gone.roots.last().unwrap().as_path()), (path, Path::new("/")));
    }
}
