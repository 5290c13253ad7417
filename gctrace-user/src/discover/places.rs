//! Folders in which packages, version managers and container engines install Rubies.

use std::{
    collections::{BTreeSet, HashSet},
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
};

use crate::host::proc_root;

/// Where packages install `ruby`.
const BIN_DIRS: [&str; 4] = ["/usr/bin", "/usr/local/bin", "/bin", "/opt/ruby/bin"];
/// Where version managers and bundles install one Ruby each.
const SYSTEM: [&str; 11] = [
    "/opt/rubies/*/bin",
    "/opt/rbenv/versions/*/bin",
    "/usr/local/rbenv/versions/*/bin",
    "/usr/local/rvm/rubies/*/bin",
    "/usr/lib/fullstaq-ruby/versions/*/bin",
    "/usr/local/Cellar/ruby*/*/bin",
    "/home/linuxbrew/.linuxbrew/Cellar/ruby*/*/bin",
    "/opt/hostedtoolcache/Ruby/*/x64/bin",
    "/opt/*/bin",
    "/opt/*/embedded/bin",
    "/opt/puppetlabs/*/bin",
];
/// The same, relative to the home of a user.
const HOME: [&str; 8] = [
    ".rbenv/versions/*/bin",
    ".asdf/installs/ruby/*/bin",
    ".local/share/mise/installs/ruby/*/bin",
    ".local/share/rtx/installs/ruby/*/bin",
    ".rvm/rubies/*/bin",
    ".rubies/*/bin",
    ".frum/versions/*/bin",
    ".linuxbrew/Cellar/ruby*/*/bin",
];
/// Variables that relocate a version manager, and where its Rubies are below that folder.
const MOVED: [(&str, &str); 5] = [
    ("RBENV_ROOT", "versions/*/bin"),
    ("ASDF_DATA_DIR", "installs/ruby/*/bin"),
    ("MISE_DATA_DIR", "installs/ruby/*/bin"),
    ("rvm_path", "rubies/*/bin"),
    ("HOMEBREW_CELLAR", "ruby*/*/bin"),
];
/// Where a layer of a container's root may have a Ruby.
const LAYER: [&str; 10] = [
    "usr/local/lib/libruby*",
    "usr/lib/*-linux-gnu/libruby*",
    "usr/lib/libruby*",
    "usr/lib64/libruby*",
    "opt/*/lib/libruby*",
    "opt/rubies/*/lib/libruby*",
    "usr/local/bin/ruby*",
    "usr/bin/ruby*",
    "opt/*/bin/ruby*",
    "opt/rubies/*/bin/ruby*",
];
/// Home folders that are never those of a person.
const NO_HOMES: [&str; 6] = ["", "/", "/dev", "/proc", "/sys", "/nonexistent"];

/// Maximum number of folder entries read where a pattern has a star.
const ENTRIES: usize = 256;
/// Maximum numbers of folders, home folders and layers that are searched.
const DIRS: usize = 1024;
const HOMES: usize = 1024;
const LAYERS: usize = 512;
const NAMESPACES: usize = 256;

/// Folders in which a `ruby` may be, the most likely ones first.
pub(super) fn bin_dirs() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<PathBuf> = env::split_paths(&path).filter(|dir| dir.is_absolute()).collect();
    dirs.extend(BIN_DIRS.map(PathBuf::from));
    for (variable, pattern) in MOVED {
        if let Some(root) = env::var_os(variable).map(PathBuf::from).filter(|root| root.is_absolute()) {
            dirs.extend(expand(&root, pattern));
        }
    }
    let root = Path::new("/");
    dirs.extend(SYSTEM.iter().flat_map(|pattern| expand(root, pattern.trim_start_matches('/'))));
    for home in homes() {
        dirs.extend(HOME.iter().flat_map(|pattern| expand(&home, pattern)));
    }
    let mut seen = HashSet::new();
    dirs.retain(|dir| seen.insert(dir.clone()));
    dirs.truncate(DIRS);
    dirs
}

/// The homes of all users: gctrace's own first, then that of the caller of sudo, then in the order of passwd(5).
fn homes() -> Vec<PathBuf> {
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let listed = homes_of(&passwd, env::var("SUDO_USER").ok().as_deref());
    let mut seen = HashSet::new();
    let own = env::var_os("HOME").map(PathBuf::from);
    let homes = own.into_iter().chain(listed).filter(|home| home.is_absolute());
    homes.filter(|home| seen.insert(home.clone())).take(HOMES).collect()
}

fn homes_of(passwd: &str, first: Option<&str>) -> Vec<PathBuf> {
    let mut homes: Vec<(bool, &str)> = passwd
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?;
            let home = fields.nth(4)?;
            (!NO_HOMES.contains(&home)).then_some((Some(name) != first, home))
        })
        .collect();
    homes.sort_by_key(|(other, _)| *other);
    homes.into_iter().map(|(_, home)| home.into()).collect()
}

/// Files in the layers of containers' roots that may contain a Ruby, by their names. Links are left out: their targets differ
/// inside the container.
pub(super) fn layer_files() -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for layer in layers() {
        for path in LAYER.iter().flat_map(|pattern| expand(&layer, pattern)) {
            if found.len() < DIRS && fs::symlink_metadata(&path).is_ok_and(|data| data.is_file()) {
                found.insert(path);
            }
        }
    }
    found
}

/// The lower folders of all overlay file systems that processes have mounted.
fn layers() -> BTreeSet<PathBuf> {
    let (root, mut namespaces, mut layers) = (proc_root::file_root(), HashSet::new(), BTreeSet::new());
    let Ok(pids) = proc_root::pids() else { return layers };
    for pid in pids {
        let Ok(namespace) = fs::read_link(proc_root::path(pid, "ns/mnt")) else { continue };
        if namespaces.len() >= NAMESPACES || !namespaces.insert(namespace) {
            continue;
        }
        let mounts = proc_root::process(pid).and_then(|process| process.mountinfo());
        for mount in mounts.into_iter().flatten().filter(|mount| mount.fs_type == "overlay") {
            let lower = mount.super_options.get("lowerdir").cloned().flatten().unwrap_or_default();
            for dir in lower.split(':').filter(|dir| dir.starts_with('/')) {
                if layers.len() < LAYERS {
                    layers.insert(root.join(dir.trim_start_matches('/')));
                }
            }
        }
    }
    layers
}

/// The paths that match a pattern: a star matches any part of one name.
fn expand(base: &Path, pattern: &str) -> Vec<PathBuf> {
    let mut paths = vec![base.to_owned()];
    for part in pattern.split('/') {
        let Some((start, end)) = part.split_once('*') else {
            for path in &mut paths {
                path.push(part);
            }
            continue;
        };
        let matches = |name: &OsStr| {
            let name = name.as_encoded_bytes();
            name.len() >= start.len() + end.len()
                && name.starts_with(start.as_bytes())
                && name.ends_with(end.as_bytes())
        };
        let entries = paths.iter().flat_map(|path| {
            let entries = fs::read_dir(path).into_iter().flatten().flatten().take(ENTRIES);
            entries.filter(|entry| matches(&entry.file_name())).map(|entry| entry.path())
        });
        paths = entries.take(DIRS).collect();
        paths.sort_unstable();
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A star matches within one name, in order.
    #[test]
    fn patterns() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a/1/bin", "a/2/bin", "b/1/bin", "ruby@3/x", "rub"] {
            fs::create_dir_all(dir.path().join(name)).unwrap();
        }
        let of = |pattern| {
            let found = expand(dir.path(), pattern);
            let inside = |path: &PathBuf| path.strip_prefix(dir.path()).unwrap().display().to_string();
            found.iter().map(inside).collect::<Vec<_>>()
        };
        assert_eq!(of("a/*/bin"), ["a/1/bin", "a/2/bin"]);
        assert_eq!(of("ruby*/*"), ["ruby@3/x"]);
        assert!(of("none/*/bin").is_empty());
    }

    /// Homes of people, the caller of sudo first.
    #[test]
    fn users() {
        let text =
            "root:x:0:0::/root:/bin/sh\nnobody:x:9:9::/nonexistent:\nana:x:1000:1000::/home/ana:/bin/sh\nx\n";
        assert_eq!(homes_of(text, Some("ana")), [Path::new("/home/ana"), Path::new("/root")]);
        assert_eq!(homes_of(text, None), [Path::new("/root"), Path::new("/home/ana")]);
    }
}
