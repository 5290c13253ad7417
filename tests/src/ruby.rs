//! The Ruby builds under test: those of this machine, and those in separate roots.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use anyhow::{Context as _, Result, anyhow, ensure};

use crate::PATIENCE;
use crate::child::Guarded;
use crate::live::{rubies_dir, work_dir};
use crate::timing;

/// The file that identifies a root; `cargo xtask lab` creates it. Its first line is the path of the Ruby in the root.
const STAMP: &str = ".gctrace-lab";

/// Enters a root and execs the given command there. The caller has moved us into our own mount namespace, so
/// mounts made here disappear with the last process in it, however it ends. Arguments: the root, two directories that are
/// visible in it under their own paths, the command. If `GCTRACE_TEST_PROC` is set, `/proc` is visible, too.
const ENTER: &str = r#"
set -e
for dir in "$2" "$3"; do
    mkdir -p "$1$dir"
    mount --bind "$dir" "$1$dir"
done
if [ -n "$GCTRACE_TEST_PROC" ]; then
    mkdir -p "$1/proc"
    mount --bind /proc "$1/proc"
fi
root=$1
shift 3
exec chroot "$root" "$@"
"#;

/// One Ruby executable.
#[derive(Clone, Debug)]
pub struct Ruby {
    /// Its path, relative to its root if it has one.
    exe: PathBuf,
    root: Option<PathBuf>,
    /// Options that are always passed.
    options: Vec<String>,
    config: BTreeMap<String, String>,
}

impl Ruby {
    /// The Ruby that most tests use: the first of [`Ruby::all`].
    pub fn main() -> Result<Self> {
        Self::all()?.into_iter().next().context("GCTRACE_RUBIES names no Ruby")
    }

    /// All Rubies under test: those in `GCTRACE_RUBIES`, or `ruby` and those of all existing roots.
    pub fn all() -> Result<Vec<Self>> {
        let paths = match std::env::var_os("GCTRACE_RUBIES") {
            Some(list) => std::env::split_paths(&list).filter(|path| !path.as_os_str().is_empty()).collect(),
            None => std::iter::once(PathBuf::from("ruby")).chain(in_roots()?).collect::<Vec<_>>(),
        };
        paths.iter().map(|path| Self::at(path)).collect()
    }

    /// Runs the test with every Ruby, of which an idle process exists all the time. A failure does not hide the other Rubies; a test that fails
    /// because of a comparison of times is [run again](timing).
    pub fn each(test: impl FnMut(&Self) -> Result<()>) -> Result<()> {
        Self::of_these(Self::all()?, test)
    }

    /// Like [`Self::each`], with the first and the last Ruby only, for tests that do not depend on the release.
    pub fn first_and_last(test: impl FnMut(&Self) -> Result<()>) -> Result<()> {
        Self::of_these(Self::ends()?, test)
    }

    /// Like [`Self::first_and_last`] for a test that mostly waits: both at the same time.
    pub fn first_and_last_at_a_time(test: impl Fn(&Self) -> Result<()> + Sync) -> Result<()> {
        Self::two_of(Self::ends()?, test)
    }

    /// Like [`Self::each`] for a test that mostly waits: two Rubies at a time.
    pub fn two_at_a_time(test: impl Fn(&Self) -> Result<()> + Sync) -> Result<()> {
        Self::two_of(Self::all()?, test)
    }

    /// The first and the last Ruby.
    fn ends() -> Result<Vec<Self>> {
        let mut rubies = Self::all()?;
        if rubies.len() > 2 {
            rubies.drain(1..rubies.len() - 1);
        }
        Ok(rubies)
    }

    /// Runs the test with these Rubies, two at a time.
    pub fn two_of(rubies: Vec<Self>, test: impl Fn(&Self) -> Result<()> + Sync) -> Result<()> {
        let rest = Mutex::new(rubies.into_iter());
        let next = || rest.lock().ok()?.next();
        let work = || -> Result<Vec<String>> {
            let mut failures = Vec::new();
            while let Some(ruby) = next() {
                failures.extend(ruby.failure(&test)?);
            }
            Ok(failures)
        };
        let failures = std::thread::scope(|scope| -> Result<_> {
            let both = [(); 2].map(|()| {
                // The test's name is that of its thread.
                let name = std::thread::current().name().unwrap_or("?").to_owned();
                std::thread::Builder::new().name(name).spawn_scoped(scope, work)
            });
            let both = both.into_iter().map(|one| one?.join().map_err(|_| anyhow!("a test panicked"))?);
            Ok(both.collect::<Result<Vec<_>>>()?.concat())
        })?;
        Self::none_fails(&failures)
    }

    fn of_these(rubies: Vec<Self>, mut test: impl FnMut(&Self) -> Result<()>) -> Result<()> {
        let mut failures = Vec::new();
        for ruby in rubies {
            failures.extend(ruby.failure(&mut test)?);
        }
        Self::none_fails(&failures)
    }

    fn none_fails(failures: &[String]) -> Result<()> {
        ensure!(failures.is_empty(), "{} Rubies fail.\n{}", failures.len(), failures.join("\n"));
        Ok(())
    }

    /// Why the test fails with this Ruby; `None` if it passes.
    fn failure(&self, mut test: impl FnMut(&Self) -> Result<()>) -> Result<Option<String>> {
        let _resident = self.resident()?;
        let Err(error) = timing::settled(|| test(self)) else { return Ok(None) };
        let failure = format!("Ruby {} ({}): {error:?}", self.version(), self.label());
        // Print it at once, whatever happens to the run. The output of macros is shown with the other failures at the end.
        writeln!(std::io::stderr(), "{failure}")?;
        Ok(Some(failure))
    }

    /// The Rubies under test that have separate roots.
    pub fn rooted() -> Result<Vec<Self>> {
        let mut all = Self::all()?;
        all.retain(|ruby| ruby.root.is_some());
        ensure!(!all.is_empty(), "none of the Rubies is in a root of its own: run `cargo xtask lab`");
        Ok(all)
    }

    /// The Ruby at `path`. If a directory above it is a root of the lab, the Ruby runs inside that root.
    pub fn at(path: &Path) -> Result<Self> {
        let root = path.ancestors().skip(1).find(|dir| dir.join(STAMP).is_file());
        let exe =
            root.and_then(|root| path.strip_prefix(root).ok()).map(|inside| Path::new("/").join(inside));
        Self::examine(exe.unwrap_or_else(|| path.to_path_buf()), root.map(Path::to_path_buf))
    }

    /// The same Ruby in a new copy of its root. Files are hard-linked if the file systems allow it: to replace a file, remove it first.
    pub fn copied(&self, to: &Path) -> Result<Self> {
        let from = self.root.as_deref().context("it has no root of its own")?;
        let linked = Command::new("cp").args(["-a", "--link", "--"]).arg(from).arg(to).output()?;
        if !linked.status.success() {
            if to.exists() {
                std::fs::remove_dir_all(to)?;
            }
            let output = Command::new("cp").args(["-a", "--"]).arg(from).arg(to).output()?;
            ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        self.in_copy(to)
    }

    /// The same Ruby in an existing copy of its root.
    pub fn in_copy(&self, root: &Path) -> Result<Self> {
        Self::examine(self.exe.clone(), Some(root.to_path_buf()))
    }

    fn examine(exe: PathBuf, root: Option<PathBuf>) -> Result<Self> {
        let mut ruby = Self { exe, root, options: Vec::new(), config: BTreeMap::new() };
        let keys = [
            "ruby_version",
            "RUBY_PROGRAM_VERSION",
            "bindir",
            "CC",
            "rubyhdrdir",
            "rubyarchhdrdir",
            "DLEXT",
            "libdir",
            "LIBRUBY_SO",
            "LIBRUBY_ALIASES",
            "archdir",
        ];
        let script = "ARGV.each { |key| puts RbConfig::CONFIG[key].to_s }";
        let output = ruby
            .command()?
            .args(["--disable-gems", "-rrbconfig", "-e", script])
            .args(keys)
            .stdin(Stdio::null())
            .output()
            .with_context(|| {
                format!("cannot run {}: run `cargo xtask test`, which installs Ruby", ruby.exe.display())
            })?;
        ensure!(
            output.status.success(),
            "{} in {:?} failed: {}",
            ruby.exe.display(),
            ruby.root,
            String::from_utf8_lossy(&output.stderr)
        );
        let values = String::from_utf8(output.stdout)?;
        ruby.config =
            keys.iter().map(ToString::to_string).zip(values.lines().map(ToOwned::to_owned)).collect();
        Ok(ruby)
    }

    /// The same Ruby under another path, which is also its path at run time.
    #[must_use]
    pub fn renamed(&self, exe: &Path) -> Self {
        Self { exe: exe.to_path_buf(), ..self.clone() }
    }

    /// The same Ruby, always with this option.
    #[must_use]
    pub fn with_option(mut self, option: &str) -> Self {
        self.options.push(option.to_owned());
        self
    }

    /// The command that starts it in its root: program and first arguments. The process that is started becomes the Ruby (exec).
    pub fn argv(&self) -> Result<Vec<OsString>> {
        let mut argv: Vec<OsString> = Vec::new();
        if let Some(root) = &self.root {
            argv.extend(["unshare", "--mount", "--", "sh", "-c", ENTER, "enter"].map(Into::into));
            argv.extend([root.into(), work_dir()?.into(), rubies_dir().into()]);
        }
        argv.push(self.exe.clone().into());
        argv.extend(self.options.iter().map(Into::into));
        Ok(argv)
    }

    /// A command that starts it.
    pub fn command(&self) -> Result<Command> {
        let argv = self.argv()?;
        let mut command = Command::new(&argv[0]);
        command.args(&argv[1..]);
        Ok(command)
    }

    /// The executable, by its path at run time.
    pub fn exe(&self) -> &OsStr {
        self.exe.as_os_str()
    }

    /// The root that it runs in, if it has one.
    pub fn root(&self) -> Option<&Path> {
        self.root.as_deref()
    }

    /// The path of its shared library on this machine: the file itself, not a symbolic link.
    pub fn library(&self) -> Result<PathBuf> {
        let path = Path::new(self.config("libdir")).join(self.config("LIBRUBY_SO"));
        let multiarch = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
        let multiarch = Path::new(&multiarch).join(self.config("LIBRUBY_SO"));
        let paths = [path, multiarch].map(|path| self.host_path(&path.to_string_lossy()));
        let found = paths.into_iter().find(|path| path.is_file());
        found.with_context(|| format!("Ruby {} has no {}", self.version(), self.config("LIBRUBY_SO")))
    }

    /// The name of its root, which can be part of a file name.
    pub fn label(&self) -> String {
        let name =
            self.root.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
        name.unwrap_or_else(|| format!("host-{}", self.version()))
    }

    /// The path on this machine of a file that the Ruby calls `path`.
    pub fn host_path(&self, path: &str) -> PathBuf {
        match &self.root {
            Some(root) => root.join(path.trim_start_matches('/')),
            None => PathBuf::from(path),
        }
    }

    /// An idle process of this Ruby, which runs until it is dropped. A Ruby in a place where gctrace does not search for
    /// installed ones must be seen before the first collection of a short script can be seen. `None` for an installed Ruby of
    /// this machine, which needs no such process.
    pub fn resident(&self) -> Result<Option<Guarded>> {
        /// The directories in which gctrace looks.
        const INSTALLED: [&str; 4] = ["/usr/bin", "/usr/local/bin", "/bin", "/opt/ruby/bin"];
        if self.root.is_none() && INSTALLED.contains(&self.config("bindir")) {
            return Ok(None);
        }
        let mut command = self.command()?;
        command.args(["--disable-gems", "-e", "GC.disable; $stdout.puts 'idle'; $stdout.flush; $stdin.gets"]);
        let mut idle = Guarded::start("resident Ruby", &mut command)?;
        idle.wait_stdout(PATIENCE, "idle", |line| line == "idle")?;
        Ok(Some(idle))
    }

    /// `RUBY_VERSION`, e.g. `3.1.2`.
    pub fn version(&self) -> &str {
        self.config("RUBY_PROGRAM_VERSION")
    }

    /// Whether its version is at least `major.minor`.
    pub fn is_at_least(&self, major: u32, minor: u32) -> bool {
        let mut numbers = self.version().split('.').map(|number| number.parse().unwrap_or(0));
        (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (major, minor)
    }

    /// Whether it shows how long a thread holds the GVL. 3.2 does not: its yields have no event.
    pub fn tells_holds(&self) -> bool {
        !self.is_at_least(3, 2) || self.is_at_least(3, 3)
    }

    /// Whether gctrace has layout tables of its series. Without them no Ruby stack is walked.
    pub fn has_tables(&self) -> bool {
        !self.is_at_least(4, 1)
    }

    /// A value of `RbConfig::CONFIG`, or an empty string.
    pub fn config(&self, key: &str) -> &str {
        self.config.get(key).map_or("", String::as_str)
    }
}

/// The Rubies of the roots in the user's cache.
fn in_roots() -> Result<Vec<PathBuf>> {
    let cache = std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let cache = cache.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")));
    let Some(lab) = cache.map(|cache| cache.join("gctrace/lab")) else { return Ok(Vec::new()) };
    let Ok(entries) = std::fs::read_dir(&lab) else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in entries {
        let root = entry.with_context(|| format!("cannot read {}", lab.display()))?.path();
        // A root without a stamp is still being built.
        if let Ok(stamp) = std::fs::read_to_string(root.join(STAMP)) {
            let ruby = stamp.lines().next().unwrap_or_default();
            found.push(root.join(ruby.trim_start_matches('/')));
        }
    }
    found.sort();
    Ok(found)
}
