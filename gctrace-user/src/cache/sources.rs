//! Identity of the code that produces analyses. Used by the build script, which cannot use other modules.

use std::{fs, io, path::Path};

/// The sources that an analysis and its stored form depend on: files and directories, relative to the crate. The lock file stands for
/// the libraries.
pub(super) const PATHS: [&str; 3] = ["../crates/cruby/src", "src/cache", "../Cargo.lock"];

/// Hash of these sources' names and contents (FNV-1a, 64 bit).
pub(super) fn hash(root: &Path) -> io::Result<u64> {
    let mut hash = 0xcbf2_9ce4_8422_2325;
    for path in PATHS {
        add(&mut hash, &root.join(path), path)?;
    }
    Ok(hash)
}

fn add(hash: &mut u64, path: &Path, name: &str) -> io::Result<()> {
    if path.is_dir() {
        let mut names: Vec<_> = fs::read_dir(path)?.flatten().map(|entry| entry.file_name()).collect();
        names.sort_unstable();
        return names.iter().try_for_each(|name| add(hash, &path.join(name), &name.to_string_lossy()));
    }
    let contents = match fs::read(path) {
        // In a packaged crate the lock file is elsewhere.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        read => read?,
    };
    for byte in name.bytes().chain([0]).chain(contents.len().to_le_bytes()).chain(contents) {
        *hash = (*hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    Ok(())
}
