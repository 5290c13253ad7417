//! `cargo xtask deb`: a Debian package of the release build, with manual page, completions and systemd unit.

use std::{fs, process::Command};

use anyhow::{Context as _, Result, ensure};

use crate::util::{cargo, output, progress, root, run, short, target_dir};

/// Arguments of `deb`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Files that gctrace itself generates, and the arguments for that. The package's manifest refers to them by these paths.
const WRITTEN: [(&str, &[&str]); 4] = [
    ("gctrace.1", &["man"]),
    ("gctrace.bash", &["completions", "bash"]),
    ("_gctrace", &["completions", "zsh"]),
    ("gctrace.fish", &["completions", "fish"]),
];

/// Runs the command. The last line of its output is the path of the package.
pub(crate) fn run_deb(_args: &Args) -> Result<()> {
    let there = cargo().args(["deb", "--version"]).output().is_ok_and(|asked| asked.status.success());
    ensure!(there, "there is no `cargo deb` here: `cargo install --locked cargo-deb`, then try again");
    progress("deb: building gctrace");
    run(cargo().args(["build", "--quiet", "--release", "--locked", "--package", "gctrace-user"]))?;
    let dir = root().join("target/package");
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let gctrace = target_dir()?.join("release/gctrace");
    for (name, args) in WRITTEN {
        let text = output(Command::new(&gctrace).args(args))?;
        let path = dir.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let said =
        output(cargo().args(["deb", "--quiet", "--no-build", "--strip", "--package", "gctrace-user"]))?;
    let package = said.lines().last().context("cargo deb named no package")?;
    println!("{}", short(package.as_ref()));
    Ok(())
}
