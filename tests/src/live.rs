//! Setup of every live test.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use tempfile::TempDir;

/// A live test in progress. It runs as root, it is alone on this machine (or beside tests that began with [`Live::beside_others`]),
/// and it has a scratch directory, which is removed at its end.
#[derive(Debug)]
pub struct Live {
    scratch: TempDir,
    _turn: Turn,
    /// Unlocked when closed. Declared after the directory so that it is dropped last.
    _lock: Option<File>,
}

/// A test's turn. When it ends, it appends a line to the file named by `GCTRACE_TEST_TIMES`, from which `cargo xtask test` computes where
/// time went: milliseconds, whether the test had the machine to itself (`alone`, `beside`), and the name of the test.
#[derive(Debug)]
struct Turn {
    begun: Instant,
    kind: &'static str,
}

impl Turn {
    fn begin(kind: &'static str) -> Self {
        Self { begun: Instant::now(), kind }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        account(&format!("{} {}", self.begun.elapsed().as_millis(), self.kind));
    }
}

/// Appends a line about the running test, which has the name of its thread, to the file named by `GCTRACE_TEST_TIMES`.
pub(crate) fn account(what: &str) {
    let Some(path) = std::env::var_os("GCTRACE_TEST_TIMES") else { return };
    let line = format!("{what} {}\n", std::thread::current().name().unwrap_or("?"));
    let added = File::options().create(true).append(true).open(&path);
    if let Err(error) = added.and_then(|mut file| file.write_all(line.as_bytes())) {
        eprintln!("{} lacks `{}`: {error}", path.display(), line.trim_end());
    }
}

impl Live {
    /// Checks the preconditions and waits for a turn in which the test has the machine to itself.
    pub fn begin() -> Result<Self> {
        let lock = lock_file()?;
        lock.lock().context("cannot lock the live tests")?;
        Ok(Self { scratch: scratch()?, _turn: Turn::begin("alone"), _lock: Some(lock) })
    }

    /// Like [`Self::begin`], for a test that compares no times, observes only its own processes (no `--all-ruby`) and leaves no probes behind
    /// that another test would find. Other tests of this kind run beside it.
    pub fn beside_others() -> Result<Self> {
        let lock = lock_file()?;
        lock.lock_shared().context("cannot lock the live tests")?;
        Ok(Self { scratch: scratch()?, _turn: Turn::begin("beside"), _lock: Some(lock) })
    }

    /// Like [`Self::beside_others`], for a test that also sleeps nearly all the time: `cargo xtask test` runs it beside four that began with
    /// `beside_others`.
    pub fn idle_beside_others() -> Result<Self> {
        Self::beside_others()
    }

    /// For tests that run Ruby but not gctrace: no preconditions, no waiting.
    pub fn without_gctrace() -> Result<Self> {
        Ok(Self { scratch: scratch()?, _turn: Turn::begin("beside"), _lock: None })
    }

    /// Like [`Self::without_gctrace`], with the scratch directory in memory: how long a disk takes for a commit must not decide the result.
    pub fn in_memory() -> Result<Self> {
        let scratch = tempfile::Builder::new().prefix("gctrace-test-").tempdir_in("/dev/shm");
        let scratch = scratch.context("no /dev/shm")?;
        Ok(Self { scratch, _turn: Turn::begin("beside"), _lock: None })
    }

    /// A path in the scratch directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// A new directory in the scratch directory.
    pub fn dir(&self, name: &str) -> Result<PathBuf> {
        let path = self.path(name);
        std::fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(path)
    }
}

/// The file whose lock represents a turn. Probes are a machine-wide resource.
fn lock_file() -> Result<File> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "live tests attach probes to the kernel and must run as root: run `sudo -E cargo xtask test`"
    );
    let path = std::env::temp_dir().join("gctrace-live-tests.lock");
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    file.with_context(|| format!("cannot open {}", path.display()))
}

fn scratch() -> Result<TempDir> {
    Ok(tempfile::Builder::new().prefix("gctrace-test-").tempdir_in(work_dir()?)?)
}

/// The directory for build results of tests: `tmp` in the target directory in which the running test was built.
pub fn work_dir() -> Result<PathBuf> {
    let path = target_dir()?.join("tmp").join("gctrace-tests");
    std::fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
    Ok(path)
}

/// The directory of the profile in the target directory, e.g. `target/debug`.
fn target_dir() -> Result<PathBuf> {
    let exe = std::env::current_exe().context("cannot find the path of the running test")?;
    let deps = exe.parent().unwrap_or(Path::new("/"));
    let profile = if deps.ends_with("deps") { deps.parent().unwrap_or(deps) } else { deps };
    Ok(profile.to_path_buf())
}

/// The gctrace binary under test.
pub fn gctrace_binary() -> Result<PathBuf> {
    let path = match std::env::var_os("GCTRACE_BIN") {
        Some(path) => PathBuf::from(path),
        None => target_dir()?.join("gctrace"),
    };
    if !path.is_file() {
        bail!("no gctrace binary at {}: run `cargo xtask test`, which builds it first", path.display());
    }
    Ok(path)
}

/// The repository's directory of Ruby scripts.
pub fn rubies_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("rubies")
}

/// The numbers of the lines that end with this comment, in a program in `tests/rubies`.
pub fn marked_lines(program: &str, comment: &str) -> Result<Vec<u64>> {
    let program = std::fs::read_to_string(rubies_dir().join(program))?;
    let ending = format!("# {comment}");
    let lines = program.lines().zip(1..).filter(|(text, _)| text.ends_with(&ending)).map(|(_, n)| n);
    Ok(lines.collect())
}
