//! The kernels: Debian's, unpacked and not installed.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};

use super::arch::Arch;
use crate::{
    lab,
    util::{as_root, cache_dirs, progress, run_quiet, short},
};

/// One series of kernels.
pub(crate) struct Kernel {
    /// Its name on the command line.
    pub(crate) name: &'static str,
    /// The Debian release whose archive contains it.
    suite: &'static str,
}

/// Oldest first. The `cloud` builds have everything that gctrace needs built in, and so need no modules.
pub(crate) const KERNELS: &[Kernel] = &[
    Kernel { name: "5.10", suite: "bullseye" },
    Kernel { name: "6.1", suite: "bookworm" },
    Kernel { name: "6.12", suite: "trixie" },
    Kernel { name: "newest", suite: "sid" },
];

impl Kernel {
    /// The path of its image in the cache, which is fetched if it is missing.
    pub(crate) fn image(&self, arch: Arch) -> Result<PathBuf> {
        let dir = cache_dirs("vm")?.into_iter().next().context("no folder for the kernels")?;
        let dir = dir.join(arch.folder());
        let image = dir.join(format!("vmlinuz-{}", self.name));
        if image.is_file() {
            return Ok(image);
        }
        fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        progress(format!("vm: fetching Linux {} of {} (10 to 30 s)", self.name, self.suite));
        let started = Instant::now();
        let tree = dir.join(format!("{}.part", self.name));
        remove(&tree)?;
        let mut command = lab::mmdebstrap("extract", arch.debian())?;
        command.arg(format!("--include={}", arch.kernel_package())).arg(self.suite).arg(&tree);
        run_quiet(command.args(lab::release_sources(&[self.suite])?))?;
        let found = find(&tree)?;
        // The image is complete or does not exist.
        let part = image.with_extension("part");
        run_quiet(as_root("cp", "read the kernel")?.arg(&found).arg(&part))?;
        run_quiet(as_root("chmod", "read the kernel")?.arg("644").arg(&part))?;
        fs::rename(&part, &image).with_context(|| format!("cannot write {}", image.display()))?;
        remove(&tree)?;
        progress(format!("vm: {} was ready after {:.0} s", short(&image), started.elapsed().as_secs_f64()));
        Ok(image)
    }
}

fn remove(tree: &Path) -> Result<()> {
    run_quiet(as_root("rm", "make the lab's kernels")?.args(["-rf", "--"]).arg(tree))
}

/// The image in an unpacked package: in `/boot`, or since 7.x beside the modules.
fn find(tree: &Path) -> Result<PathBuf> {
    let mut found = Vec::new();
    for dir in [tree.join("boot"), tree.join("usr/lib/modules"), tree.join("lib/modules")] {
        let Ok(entries) = fs::read_dir(&dir) else { continue };
        for entry in entries {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with("vmlinuz-") {
                found.push(path);
            } else if path.join("vmlinuz").is_file() {
                found.push(path.join("vmlinuz"));
            }
        }
    }
    found.dedup();
    ensure!(!found.is_empty(), "no vmlinuz in the unpacked package under {}", tree.display());
    Ok(found.remove(0))
}
