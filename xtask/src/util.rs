//! Paths, child processes and privileges, shared by the commands.

use std::{
    env,
    ffi::OsStr,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

/// Root directory of the checkout: that of the workspace of the running package.
pub fn root() -> PathBuf {
    let manifest = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let mut above = Path::new(&manifest).ancestors();
    above.find(|dir| dir.join("Cargo.lock").is_file()).map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// The target directory in which this program was built.
pub fn target_dir() -> Result<PathBuf> {
    let exe = env::current_exe().context("cannot find the path of this program")?;
    exe.ancestors()
        .nth(2)
        .map(Path::to_path_buf)
        .with_context(|| format!("no build folder above {}", exe.display()))
}

/// Directories for results that are costly to create, best first: the user's cache, which survives `cargo clean`, then the
/// target directory.
pub fn cache_dirs(name: &str) -> Result<Vec<PathBuf>> {
    let cache = env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let cache = cache.or_else(|| env::var_os("HOME").map(|home| Path::new(&home).join(".cache")));
    let mut dirs: Vec<PathBuf> = cache.into_iter().map(|dir| dir.join("gctrace").join(name)).collect();
    dirs.push(target_dir()?.join("xtask").join(name));
    Ok(dirs)
}

/// A cargo command in the root directory, run by the cargo that started us.
pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    // Remove what cargo set about this program. Build scripts that depend on it (ring's) would run again, and all their dependents would be rebuilt.
    let of_this_program = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_str().is_some_and(of_this_program)) {
        command.env_remove(name);
    }
    command
}

/// Prints what happens next.
pub fn progress(line: impl AsRef<str>) {
    eprintln!("xtask: {}", line.as_ref());
}

/// A path relative to the current directory if it is below it.
pub fn short(path: &Path) -> String {
    let cwd = env::current_dir().unwrap_or_default();
    path.strip_prefix(&cwd).unwrap_or(path).display().to_string()
}

/// A command line as it would be typed.
pub fn line(command: &Command) -> String {
    let words: Vec<_> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(OsStr::to_string_lossy)
        .collect();
    words.join(" ")
}

/// Runs a command on our terminal and returns its status.
pub fn status(command: &mut Command) -> Result<ExitStatus> {
    command.status().with_context(|| format!("cannot run `{}`", line(command)))
}

/// Runs a command on our terminal; its failure is an error.
pub fn run(command: &mut Command) -> Result<()> {
    let status = status(command)?;
    if !status.success() {
        bail!("`{}` failed ({status})", line(command));
    }
    Ok(())
}

/// Runs a command silently; if it fails, its output becomes part of the error.
pub fn run_quiet(command: &mut Command) -> Result<()> {
    output(command).map(drop)
}

/// Runs a command and returns its standard output.
pub fn output(command: &mut Command) -> Result<String> {
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("cannot run `{}`", line(command)))?;
    if !output.status.success() {
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        let lines: Vec<_> = said.lines().collect();
        let tail = lines[lines.len().saturating_sub(40)..].join("\n");
        bail!("`{}` failed ({}); its last lines:\n{tail}", line(command), output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{}` did not answer in UTF-8", line(command)))
}

/// The first program with this name on `PATH`.
pub fn which(name: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?).map(|dir| dir.join(name)).find(|path| path.is_file())
}

/// Whether we run as root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A command that runs as root: directly, or through sudo. `why` completes "root is needed to …".
pub fn as_root(program: impl AsRef<OsStr>, why: &str) -> Result<Command> {
    if is_root() {
        return Ok(Command::new(program));
    }
    if which("sudo").is_none() {
        bail!("root is needed to {why}, and there is no sudo here: run the same command as root");
    }
    let mut command = Command::new("sudo");
    command.arg("-E").arg(program);
    Ok(command)
}

/// SHA-256 of some bytes in hexadecimal, computed by coreutils.
pub fn sha256(bytes: &[u8]) -> Result<String> {
    let mut child = Command::new("sha256sum")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run `sha256sum` (package coreutils)")?;
    // It reads to the end before it writes, so this cannot block forever. The pipe is closed at the end of the statement.
    child
        .stdin
        .take()
        .context("no pipe to sha256sum")?
        .write_all(bytes)
        .context("cannot write to sha256sum")?;
    let output = child.wait_with_output().context("cannot wait for sha256sum")?;
    let text = String::from_utf8_lossy(&output.stdout);
    match text.split_whitespace().next() {
        Some(hash) if output.status.success() && hash.len() == 64 => Ok(hash.to_owned()),
        _ => bail!("sha256sum answered {text:?} ({})", output.status),
    }
}

/// A child process that does not outlive this value.
pub struct Running {
    child: Child,
    name: String,
}

impl Running {
    /// Starts a command.
    pub fn start(command: &mut Command) -> Result<Self> {
        let child = command.spawn().with_context(|| format!("cannot start `{}`", line(command)))?;
        Ok(Self { child, name: line(command) })
    }

    /// The child itself.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its exit status, if it has ended.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().with_context(|| format!("cannot wait for `{}`", self.name))
    }

    /// Sends a signal to this process only, unless it has ended.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        if self.ended()?.is_none() {
            kill_process(Pid::from_child(&self.child), signal)
                .with_context(|| format!("cannot send {signal:?} to `{}`", self.name))?;
        }
        Ok(())
    }

    /// Waits for its end, for at most `limit`.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            if Instant::now() > end {
                bail!("`{}` did not end within {} s", self.name, limit.as_secs());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let ended = self.child.kill().and_then(|()| self.child.wait());
            if let Err(error) = ended {
                progress(format!("{} (pid {}) may run on: {error}", self.name, self.child.id()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The hashes equal the published ones of the empty text and of a short text.
    #[test]
    fn sha256_of_known_texts() {
        assert_eq!(sha256(b"").unwrap(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        assert_eq!(
            sha256(b"abc").unwrap(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    /// An error names the command and quotes its output.
    #[test]
    fn failing_command_is_quoted() {
        let error =
            run_quiet(Command::new("sh").args(["-c", "echo why >&2; exit 3"])).unwrap_err().to_string();
        assert!(error.contains("why") && error.contains("exit status: 3"), "{error}");
    }

    /// A child does not outlive its guard.
    #[test]
    fn dropped_child_is_gone() {
        let child = Running::start(Command::new("sleep").arg("60")).unwrap();
        let proc = PathBuf::from(format!("/proc/{}", child.pid()));
        assert!(proc.exists());
        drop(child);
        assert!(!proc.exists());
    }
}
