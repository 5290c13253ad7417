//! The contents of a guest: files of this machine at their own paths, packed for the kernel to unpack into memory.
//!
//! No files are copied and no image is made: the list of paths is passed to `cpio`, so a guest sees the tests, the Rubies of the
//! lab and their libraries at the same paths as this machine.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs,
    io::Write as _,
    os::unix::{ffi::OsStrExt as _, fs::PermissionsExt as _},
    path::{Component, Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::util::{as_root, line};

/// A complete set of paths: with each path it contains the directories above it, and the targets of its links.
#[derive(Default)]
pub(crate) struct Files {
    paths: BTreeSet<PathBuf>,
}

impl Files {
    /// Adds one file, directory (without its contents) or link.
    pub(crate) fn add(&mut self, path: &Path) -> Result<()> {
        ensure!(path.is_absolute(), "{} is not absolute", path.display());
        let mut at = PathBuf::from("/");
        let mut rest = path.components();
        rest.next();
        while let Some(part) = rest.next() {
            match part {
                Component::ParentDir => drop(at.pop()),
                part => at.push(part),
            }
            let kind =
                fs::symlink_metadata(&at).with_context(|| format!("cannot look at {}", at.display()))?;
            let new = self.paths.insert(at.clone());
            if kind.is_symlink() {
                let target = fs::read_link(&at).with_context(|| format!("cannot read {}", at.display()))?;
                let target = at.parent().unwrap_or(Path::new("/")).join(target).join(rest.as_path());
                return if new || !rest.as_path().as_os_str().is_empty() {
                    self.add(&target)
                } else {
                    Ok(())
                };
            }
        }
        Ok(())
    }

    /// Adds a directory with everything in it. Links in it stay unchanged: they may be relative to their own root.
    pub(crate) fn add_tree(&mut self, dir: &Path) -> Result<()> {
        self.add(dir)?;
        for entry in fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                self.add_tree(&entry.path())?;
            } else {
                self.paths.insert(entry.path());
            }
        }
        Ok(())
    }

    /// Adds a program and the libraries with which it is linked, if any.
    pub(crate) fn add_program(&mut self, program: &Path) -> Result<()> {
        self.add(program)?;
        let ldd = Command::new("ldd").arg(program).output().context("cannot run `ldd`")?;
        let text = String::from_utf8_lossy(&ldd.stdout);
        // `ldd` fails for a program that needs no libraries.
        let is_static =
            text.contains("not a dynamic") || String::from_utf8_lossy(&ldd.stderr).contains("not a dynamic");
        ensure!(ldd.status.success() || is_static, "`ldd {}` failed: {text}", program.display());
        for word in text.split_whitespace().filter(|word| word.starts_with('/')) {
            self.add(Path::new(word.trim_end_matches(':')))?;
        }
        Ok(())
    }

    /// Writes the archive of these files, and of the contents of `base`, which becomes the guest's root, with the text `init` as its
    /// `/init`, which the `BusyBox` among them runs.
    pub(crate) fn pack(self, init: &str, base: Option<&Path>, archive: &Path) -> Result<()> {
        let dir = archive.parent().unwrap_or(Path::new("."));
        let script = dir.join("init");
        fs::write(&script, format!("#!/bin/busybox sh\n{init}"))
            .with_context(|| format!("cannot write {}", script.display()))?;
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;

        // The kernel unpacks one archive after the other.
        let mut bytes = Vec::new();
        if let Some(base) = base {
            let mut files = Self::default();
            files.add_tree(base)?;
            let inside = files.paths.iter().filter_map(|path| path.strip_prefix(base).ok());
            let inside = inside.filter(|path| !path.as_os_str().is_empty());
            bytes.extend(cpio(base, inside.map(|path| path.as_os_str().to_owned()))?);
        }
        bytes.extend(cpio(Path::new("/"), self.paths.iter().map(|path| path.as_os_str().to_owned()))?);
        bytes.extend(cpio(dir, [OsString::from("init")])?);
        fs::write(archive, bytes).with_context(|| format!("cannot write {}", archive.display()))
    }
}

/// The archive of these paths, relative to `dir`.
fn cpio(dir: &Path, paths: impl IntoIterator<Item = OsString>) -> Result<Vec<u8>> {
    let mut command = as_root("cpio", "read the files for the guest")?;
    command.args(["--create", "--format=newc", "--null", "--quiet"]).current_dir(dir);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .with_context(|| format!("cannot run `{}` (package cpio)", line(&command)))?;
    let mut stdin = child.stdin.take().context("no pipe to cpio")?;
    let list: Vec<u8> = paths
        .into_iter()
        .flat_map(|path| {
            let relative = path.as_bytes().strip_prefix(b"/").unwrap_or(path.as_bytes()).to_vec();
            relative.into_iter().chain([0])
        })
        .collect();
    // In a thread of its own: cpio writes while it reads.
    let writer = std::thread::spawn(move || stdin.write_all(&list));
    let output = child.wait_with_output().context("cannot wait for cpio")?;
    if !writer.join().is_ok_and(|written| written.is_ok()) || !output.status.success() {
        bail!("`{}` failed ({})", line(&command), output.status);
    }
    Ok(output.stdout)
}
