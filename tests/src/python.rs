//! A Python with the packages that tests check against, installed only in the build directory.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context as _, Result, anyhow, ensure};
use serde_json::Value;

use crate::child::Guarded;
use crate::live::work_dir;

/// The official definition of OTLP, a gRPC server, and gRPC's error details. OTLP's profiles are `v1development`: any minor release may change
/// their layout, as 1.45 did.
const PACKAGES: [&str; 3] = ["opentelemetry-proto>=1.45,<1.46", "grpcio>=1.60,<2", "grpcio-status>=1.60,<2"];

fn python() -> Result<PathBuf> {
    static PYTHON: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let python = PYTHON.get_or_init(|| installed().map_err(|error| format!("{error:#}")));
    python.clone().map_err(|error| anyhow!(error))
}

/// The Python in its environment, which is complete or not there: another test program may look for it meanwhile.
fn installed() -> Result<PathBuf> {
    let work = work_dir()?;
    let lock = work.join("python.lock");
    let lock = File::options().create(true).truncate(false).write(true).open(&lock)?;
    lock.lock().context("cannot lock the virtual environment")?;
    let dir = work.join("python");
    let wanted = PACKAGES.join("\n");
    if std::fs::read_to_string(dir.join("installed")).is_ok_and(|found| found == wanted) {
        return Ok(dir.join("bin/python"));
    }
    let new = tempfile::Builder::new().prefix("python-").tempdir_in(&work)?;
    run(Command::new("python3").args(["-m", "venv"]).arg(new.path()))
        .context("making a virtual environment; `cargo xtask setup` installs python3-venv")?;
    // Not bin/pip: its first line contains the path at which the environment was created, and that changes here and whenever the build is moved.
    run(Command::new(new.path().join("bin/python"))
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"])
        .args(PACKAGES))
    .context("installing from PyPI")?;
    std::fs::write(new.path().join("installed"), wanted)?;
    if dir.exists() {
        std::fs::remove_dir_all(&dir)?;
    }
    std::fs::rename(new.keep(), &dir)?;
    Ok(dir.join("bin/python"))
}

/// Starts `tests/python/NAME` with these arguments. It runs as long as the test.
pub fn server<I: IntoIterator<Item: AsRef<OsStr>>>(name: &str, args: I) -> Result<Guarded> {
    let mut command = Command::new(python()?);
    command.arg(script_path(name)).args(args);
    Guarded::start(name, &mut command)
}

fn script_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("python").join(name)
}

/// Runs `tests/python/NAME` with these arguments; its output is JSON.
pub fn script<I: IntoIterator<Item: AsRef<Path>>>(name: &str, args: I) -> Result<Value> {
    let mut command = Command::new(python()?);
    command.arg(script_path(name)).args(args.into_iter().map(|arg| arg.as_ref().to_owned()));
    let text = run(&mut command)?;
    serde_json::from_str(&text).with_context(|| format!("output of {name}: {text}"))
}

/// Like [`script`], for a script that prints a result for each of its arguments after `--each`: Python starts once, not once per argument.
pub fn script_each(name: &str, args: &[PathBuf]) -> Result<Vec<Value>> {
    let found = script(name, std::iter::once(Path::new("--each")).chain(args.iter().map(PathBuf::as_path)))?;
    let list = found.as_array().with_context(|| format!("output of {name}: {found}"))?;
    ensure!(list.len() == args.len(), "{name} says something of {} of {} arguments", list.len(), args.len());
    Ok(list.clone())
}

fn run(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} failed: {errors}");
    Ok(String::from_utf8(output.stdout)?)
}
