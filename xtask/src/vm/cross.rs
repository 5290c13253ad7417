//! Cross-compiles what a guest of another architecture runs: gctrace and test programs with Debian's rustc and the standard
//! library from Debian's package for that architecture, the witness with Debian's cross compiler.
//!
//! Nothing is installed on this machine: packages of the other architecture are unpacked in the cache.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

use super::arch::Arch;
use crate::{
    lab, toolchain,
    util::{as_root, cache_dirs, progress, root, run, run_quiet, target_dir},
};

const TARGET: &str = "aarch64-unknown-linux-gnu";
const TUPLE: &str = "aarch64-linux-gnu";
const COMPILER: &str = "aarch64-linux-gnu-gcc";
/// The package with the standard library; its version must equal that of this machine's rustc.
const STD: &str = "libstd-rust-web-dev";
/// The packages of a guest's base: a shell with its tools, and the libraries with which gctrace is linked.
const BASE: &str = "busybox-static,libc6,libgcc-s1";
/// Name of the file that records the recipe of a directory.
const STAMP: &str = ".made-of";

/// The cache directory of the architecture.
fn cache(arch: Arch) -> Result<PathBuf> {
    let dir = cache_dirs("vm")?.into_iter().next().context("no folder for the guests")?.join(arch.folder());
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    Ok(dir)
}

/// The root directory of a guest that contains only its base.
pub(super) fn base(arch: Arch) -> Result<PathBuf> {
    let dir = cache(arch)?.join("base");
    kept(&dir, BASE, |part| {
        unpack(arch, BASE, part)?;
        // The links that the essential package that merges /usr would create.
        let finish = r#"cd "$1"; rm -rf usr/share; for dir in bin lib sbin; do [ -e $dir ] || ln -s usr/$dir $dir; done"#;
        run_quiet(as_root("sh", "make a guest's root")?.args(["-ec", finish, "finish"]).arg(part))
    })?;
    Ok(dir)
}

/// The Rubies of the lab's roots with these names, for that architecture.
pub(super) fn rubies(arch: Arch, names: &[String]) -> Result<Vec<PathBuf>> {
    lab::ensure_in(&cache(arch)?.join("lab"), arch.debian(), names)
}

/// A sysroot for rustc that contains the standard library.
fn sysroot(arch: Arch) -> Result<PathBuf> {
    let dir = cache(arch)?.join("sysroot");
    let rustc = toolchain::rustc_version()?;
    kept(&dir, &rustc, |part| {
        let tree = part.with_extension("tree");
        unpack(arch, STD, &tree)?;
        let libraries = part.join("lib/rustlib");
        let mut copy = as_root("sh", "unpack the standard library")?;
        copy.args(["-ec", r#"mkdir -p "$2"; mv "$1" "$2"; rm -rf "$3""#, "copy"]);
        run_quiet(copy.arg(tree.join("usr/lib/rustlib").join(TARGET)).arg(libraries).arg(&tree))
    })?;
    Ok(dir)
}

/// Creates a directory unless it exists with this recipe; it is complete or does not exist.
fn kept(dir: &Path, recipe: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    if fs::read_to_string(dir.join(STAMP)).is_ok_and(|stamp| stamp == recipe) {
        return Ok(());
    }
    let part = dir.with_extension("part");
    run_quiet(as_root("rm", "make a guest's files")?.args(["-rf", "--"]).arg(&part).arg(dir))?;
    make(&part).with_context(|| format!("cannot make {}", dir.display()))?;
    let mut finish = as_root("sh", "make a guest's files")?;
    finish.args(["-ec", r#"printf '%s' "$3" > "$1/$4"; mv "$1" "$2""#, "finish"]);
    run_quiet(finish.arg(&part).arg(dir).args([recipe, STAMP]))
}

/// Unpacks packages of bookworm, the release of this machine's compilers, for that architecture.
fn unpack(arch: Arch, packages: &str, to: &Path) -> Result<()> {
    progress(format!("vm: unpacking {packages} for {} (10 to 30 s)", arch.debian()));
    run_quiet(as_root("rm", "unpack packages")?.args(["-rf", "--"]).arg(to))?;
    let mut command = lab::mmdebstrap("extract", arch.debian())?;
    command
        .arg(format!("--include={packages}"))
        .arg("bookworm")
        .arg(to)
        .args(lab::updated_sources("bookworm")?);
    run_quiet(&mut command)
}

/// The results of the compilation.
pub(super) struct Built {
    /// The gctrace binary.
    pub(super) gctrace: PathBuf,
    /// The test programs by name.
    pub(super) programs: BTreeMap<String, PathBuf>,
}

/// Compiles gctrace and these test programs.
pub(super) fn build(arch: Arch, programs: &[&str]) -> Result<Built> {
    let dir = target_dir()?.join("xtask/vm").join(arch.folder());
    let sysroot = sysroot(arch)?;
    let cargo = |arguments: &[&str]| {
        let mut cargo = toolchain::plain_cargo();
        let variable =
            |what: &str| format!("CARGO_TARGET_{}_{what}", TARGET.replace('-', "_").to_uppercase());
        cargo.env(variable("LINKER"), COMPILER);
        cargo.env(variable("RUSTFLAGS"), format!("--sysroot={}", sysroot.display()));
        // A guest's memory contains these files twice, so omit debug information.
        cargo.env("CARGO_PROFILE_DEV_DEBUG", "0");
        cargo.current_dir(root()).args(arguments).args(["--target", TARGET, "--target-dir"]).arg(&dir);
        cargo
    };
    progress(format!("vm: building gctrace and the tests for {TARGET} (several minutes the first time)"));
    run(&mut cargo(&["build", "--package", "gctrace-user"]))?;
    let mut tests = cargo(&["test", "--no-run", "--package", "gctrace-tests"]);
    tests.args(programs.iter().flat_map(|program| ["--test", program])).env("CARGO_TERM_COLOR", "never");
    let programs =
        if programs.is_empty() { BTreeMap::new() } else { crate::programs::executables(&mut tests)? };
    Ok(Built { gctrace: dir.join(TARGET).join("debug/gctrace"), programs })
}

/// Compiles the witness for these Rubies, into the directory for `GCTRACE_WITNESSES`, which is returned.
pub(super) fn witnesses(arch: Arch, rubies: &[PathBuf]) -> Result<PathBuf> {
    // The tests' own directory is also visible in the roots of the Rubies.
    let debug = target_dir()?.join("xtask/vm").join(arch.folder()).join(TARGET).join("debug");
    let all = debug.join("tmp/gctrace-tests/witnesses");
    let source = root().join("tests/rubies/witness/witness.c");
    for ruby in rubies {
        let root = lab::root_of(ruby)?;
        let label = root.file_name().context("a root without a name")?;
        let dir = all.join(label);
        fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let mut compiler = Command::new(COMPILER);
        compiler.args(["-shared", "-fPIC", "-O2"]);
        for folder in ["usr/include".to_owned(), format!("usr/include/{TUPLE}")] {
            compiler.arg("-I").arg(headers(&root.join(folder))?);
        }
        run_quiet(compiler.arg("-o").arg(dir.join("witness.so")).arg(&source))
            .with_context(|| format!("cannot build the witness for {}", ruby.display()))?;
    }
    all.canonicalize().with_context(|| format!("cannot find {}", all.display()))
}

/// The directory `ruby-X.Y.Z` in a directory of headers.
fn headers(dir: &Path) -> Result<PathBuf> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let mut found: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    found.retain(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("ruby-")));
    ensure!(found.len() == 1, "{} folders of Ruby headers in {}", found.len(), dir.display());
    Ok(found.remove(0))
}
