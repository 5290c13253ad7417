//! `cargo xtask dist`: builds gctrace as one static file for hosts without cargo and with any C library, and a container image of it.

use std::{fs, path::Path, process::Command};

use anyhow::{Context as _, Result, bail, ensure};
use object::{Object as _, ObjectSection as _, read::File};

use crate::util::{cargo, output, progress, root, run, short, target_dir, which};

/// Arguments of `dist`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Make a container image of this name, too (needs podman).
    #[arg(long, value_name = "NAME")]
    image: Option<String>,
}

/// Flags of a container in which limits cannot be raised and networks cannot be created.
const MODEST: [&str; 3] = ["--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096"];

/// Maximum size of the file, bytes.
const MAX_BYTES: u64 = 25 << 20;

/// Runs the command. Its last lines name its results.
pub(crate) fn run_dist(args: &Args) -> Result<()> {
    ensure!(
        args.image.is_none() || which("podman").is_some(),
        "--image needs podman: `apt install podman`, then try again"
    );
    let target = host_target()?;
    progress("dist: building gctrace as a static executable");
    // With an explicit target, the flags do not apply to build scripts and procedural macros, which cannot be static.
    run(cargo()
        .args(["build", "--quiet", "--release", "--locked", "--package", "gctrace-user", "--bin", "gctrace"])
        .args(["--target", &target])
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
        // Optimised as one unit: 23.1 MB instead of 27.5 MB, for about 4 min more on two cores.
        .env("CARGO_PROFILE_RELEASE_LTO", "fat")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1"))?;
    let built = target_dir()?.join(&target).join("release/gctrace");
    let dir = target_dir()?.join("dist");
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let file = dir.join("gctrace");
    fs::copy(&built, &file).with_context(|| format!("cannot write {}", file.display()))?;
    let size = check(&file)?;
    println!("{} ({} MB, static)", short(&file), size.div_ceil(1 << 20));
    if let Some(image) = &args.image {
        progress("dist: building the image");
        let recipe = root().join("packaging/Containerfile");
        run(Command::new("podman")
            .args(["build", "--quiet", "--tag", image, "--file"])
            .arg(&recipe)
            .arg(&dir))?;
        let version =
            output(Command::new("podman").args(["run", "--rm"]).args(MODEST).args([image, "--version"]))?;
        println!("image {image}: {}", version.trim());
    }
    Ok(())
}

/// The target triple of the toolchain's own host.
fn host_target() -> Result<String> {
    let about = output(Command::new("rustc").arg("-vV"))?;
    let host = about.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc does not name its host")?.to_owned())
}

/// Checks that the file depends on nothing of the host, and runs. Returns its size, bytes.
fn check(path: &Path) -> Result<u64> {
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let file = File::parse(bytes.as_slice()).context("the result of the build is not an ELF file")?;
    if file.sections().any(|section| section.name() == Ok(".interp")) {
        bail!("{} is not static: it needs a dynamic loader", path.display());
    }
    ensure!(file.symbols().next().is_none(), "{} is not stripped", path.display());
    let size = bytes.len() as u64;
    ensure!(size <= MAX_BYTES, "{} has {size} bytes, more than {MAX_BYTES}", path.display());
    let version = output(Command::new(path).arg("--version"))?;
    ensure!(version.starts_with("gctrace "), "{} --version printed {version:?}", path.display());
    Ok(size)
}
