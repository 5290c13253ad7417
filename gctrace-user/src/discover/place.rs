//! Where an image comes from, and below which root folders its debug files may be.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use crate::host::proc_root;

/// The place of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Path as its process sees it.
    pub(super) path: PathBuf,
    /// Root folders to look below: that of its process, then the host's.
    pub(super) roots: Vec<PathBuf>,
}

impl Place {
    /// A file of the host.
    pub(super) fn on_host(path: &Path) -> Self {
        Self { path: path.to_owned(), roots: vec![PathBuf::from("/")] }
    }

    /// A file that a process maps; `shown` is its path in the process's maps.
    pub(super) fn of_process(pid: u32, shown: &Path) -> Self {
        let root = proc_root::path(pid, "root");
        if is_ours(pid, &root) {
            return Self::on_host(shown);
        }
        // A process that has changed its root sees less of the path than we, unless its namespace ends there, too.
        let path = fs::read_link(&root).ok().and_then(|root| beneath(shown, &root));
        Self { path: path.unwrap_or_else(|| shown.to_owned()), roots: vec![root, PathBuf::from("/")] }
    }
}

/// The path as it is seen below `root`; `None` if it does not lie there.
fn beneath(path: &Path, root: &Path) -> Option<PathBuf> {
    path.strip_prefix(root).ok().map(|rest| Path::new("/").join(rest))
}

/// Whether a process sees the same files under the same paths as we: it has our root and our mounts.
fn is_ours(pid: u32, root: &Path) -> bool {
    let mounts = |link: &Path| fs::read_link(link).ok();
    let folder = |path: &Path| fs::metadata(path).ok().map(|data| (data.dev(), data.ino()));
    let (own, its) = (mounts(Path::new("/proc/self/ns/mnt")), mounts(&proc_root::path(pid, "ns/mnt")));
    own.is_some() && own == its && folder(root).is_some() && folder(root) == folder(Path::new("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a process sees of a path that it reaches through a root of its own, and of another one.
    #[test]
    fn below_a_root() {
        let library = Path::new("/srv/box/usr/lib/libruby.so");
        assert_eq!(beneath(library, Path::new("/srv/box")), Some(PathBuf::from("/usr/lib/libruby.so")));
        assert_eq!(beneath(library, Path::new("/")).as_deref(), Some(library));
        assert_eq!(beneath(library, Path::new("/srv/bo")), None);
    }

    /// A process with our root is looked at by the host's paths; one that is gone still has the host's root to fall back on.
    #[test]
    fn own_and_vanished() {
        let path = Path::new("/usr/lib/libruby.so");
        assert_eq!(Place::of_process(std::process::id(), path), Place::on_host(path));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let gone = Place::of_process(child.id(), path);
        assert_eq!((gone.path.as_path(), gone.roots.last().unwrap().as_path()), (path, Path::new("/")));
    }
}
