//! Real containers: podman and runc with an image of a lab root; pid, mount, UTS and cgroup namespaces, and overlayfs.

use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};

use crate::PATIENCE;
use crate::child::{Finished, Guarded};
use crate::live::{Live, rubies_dir, work_dir};
use crate::report::GcLine;
use crate::ruby::Ruby;
use crate::script::{Outputs, Report, Script};
use crate::witness::Log;

/// No network (which would need iptables), the runtime that works with cgroup v1, v2 and both, and limits that need not
/// be raised.
const SETTINGS: &str = r#"
[containers]
netns = "none"
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"#;

/// Creates containers of one Ruby.
#[derive(Debug)]
pub struct Engine {
    settings: PathBuf,
    image: String,
    ruby: Ruby,
}

impl Engine {
    /// The engine for a Ruby of the lab. Its image is built once and kept.
    pub fn of(live: &Live, ruby: &Ruby) -> Result<Self> {
        let root = ruby.root().context("only a Ruby of the lab makes a container")?;
        let settings = live.path("containers.conf");
        fs::write(&settings, SETTINGS)?;
        let mut hasher = DefaultHasher::new();
        let made = fs::metadata(root)?;
        (root, made.ino(), made.mtime(), made.mtime_nsec()).hash(&mut hasher);
        let image = format!("localhost/gctrace-lab-{}:{:016x}", ruby.label(), hasher.finish());
        let engine = Self { settings, image, ruby: ruby.clone() };
        if !engine.podman().args(["image", "exists", &engine.image]).status()?.success() {
            let mut tar =
                Command::new("tar").arg("-C").arg(root).args(["-c", "."]).stdout(Stdio::piped()).spawn()?;
            let packed = tar.stdout.take().context("no output of tar")?;
            let output = engine.podman().args(["import", "-", &engine.image]).stdin(packed).output()?;
            ensure!(tar.wait()?.success(), "tar failed");
            ensure!(output.status.success(), "podman import: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(engine)
    }

    /// A podman command with the settings of the tests.
    pub fn podman(&self) -> Command {
        let mut command = Command::new("podman");
        command.env("CONTAINERS_CONF", &self.settings);
        command
    }

    /// The image's name.
    pub fn image(&self) -> &str {
        &self.image
    }

    /// Podman's settings, for `CONTAINERS_CONF`.
    pub fn settings(&self) -> &Path {
        &self.settings
    }

    /// A container name that no other run uses.
    pub fn name(&self, suffix: &str) -> String {
        format!("gctrace-test-{}-{suffix}", std::process::id())
    }

    /// Starts a script in its own container and returns once the script is ready.
    pub fn start(&self, name: &str, script: Script, before: &str) -> Result<Container> {
        let mut container = self.begin(name, script, before)?;
        container.guarded()?.wait_stdout(PATIENCE, "ready", |line| line.trim_end() == "ready")?;
        container.look()?;
        Ok(container)
    }

    /// Like [`Self::start`], but does not wait for the script. A shell on this machine runs `change` before the container starts,
    /// with the Ruby's library in `$LIB`.
    pub fn begin(&self, name: &str, script: Script, change: &str) -> Result<Container> {
        let (argv, env, outputs) = script.into_parts()?;
        let arguments = &argv[self.ruby.argv()?.len()..];
        let mut create = self.podman();
        create.args(["create", "--rm", "-i", "--name", name, "--hostname", &format!("host-{name}")]);
        for dir in [work_dir()?, rubies_dir()] {
            create.arg("-v").arg(format!("{0}:{0}", dir.display()));
        }
        for (key, value) in env {
            create.arg("-e").arg(format!("{}={}", key.to_string_lossy(), value.to_string_lossy()));
        }
        create.arg(&self.image).arg(self.ruby.exe()).args(arguments);
        said("podman create", &mut create)?;
        if !change.is_empty() {
            let mounted = said("podman mount", self.podman().args(["mount", name]))?;
            let library = self.ruby.library()?;
            let inside = library.strip_prefix(self.ruby.root().context("no root")?)?;
            let library = Path::new(mounted.trim()).join(inside);
            said(change, Command::new("sh").args(["-ec", change]).env("LIB", library))?;
            said("podman unmount", self.podman().args(["unmount", name]))?;
        }
        let mut command = self.podman();
        command.args(["start", "--attach", "--interactive", name]);
        let process = Guarded::start(name, &mut command)?;
        let settings = self.settings.clone();
        let process = Some(process);
        Ok(Container { process, settings, outputs, name: name.to_owned(), pid: 0, id: String::new() })
    }
}

/// A script running in a container. Dropping it removes the container.
#[derive(Debug)]
pub struct Container {
    process: Option<Guarded>,
    settings: PathBuf,
    outputs: Outputs,
    /// Its name.
    pub name: String,
    /// The script's pid on the host; 0 if it was not looked up.
    pub pid: u32,
    /// Its id.
    pub id: String,
}

/// A container that has ended.
#[derive(Debug)]
pub struct Done {
    /// The script's pid on the host; 0 if it was not looked up.
    pub pid: u32,
    /// Status and output.
    pub finished: Finished,
    /// The script's report; its pid is the one inside the container.
    pub report: Report,
    /// The witness's log, if there was one.
    pub witness: Option<Log>,
}

impl Container {
    fn podman(&self) -> Command {
        let mut command = Command::new("podman");
        command.env("CONTAINERS_CONF", &self.settings);
        command
    }

    fn guarded(&mut self) -> Result<&mut Guarded> {
        self.process.as_mut().context("it is gone")
    }

    fn look(&mut self) -> Result<()> {
        let mut command = self.podman();
        command.args(["inspect", "--format", "{{.State.Pid}} {{.Id}}", &self.name]);
        let text = said("podman inspect", &mut command)?;
        let (pid, id) = text.trim().split_once(' ').context("podman inspect says nothing")?;
        self.pid = pid.parse()?;
        id.clone_into(&mut self.id);
        Ok(())
    }

    /// Writes a line to the standard input of the script.
    pub fn say(&mut self, line: &str) -> Result<()> {
        self.guarded()?.say(line)
    }

    /// Waits until the container has ended and reads the script's outputs.
    pub fn finish(mut self) -> Result<Done> {
        let (pid, outputs) = (self.pid, self.outputs.clone());
        let name = self.name.clone();
        let process = self.process.take().context("it is gone")?;
        let finished = process.finish(PATIENCE)?;
        ensure!(finished.status.success(), "{name}: {}: {}", finished.status, finished.errors());
        let (report, witness) = outputs.read("")?;
        Ok(Done { pid, finished, report, witness })
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let mut command = self.podman();
        command.args(["rm", "--force", "--ignore", "--time", "0", &self.name]);
        // A failure here cannot be handled.
        let _gone = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
}

/// The output of a command, which must succeed.
fn said(what: &str, command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {what}"))?;
    ensure!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// The lines of a process as it sees itself in its pid namespace, where it is a script with one thread.
pub fn as_seen_inside(lines: &[&GcLine], host: u32, inside: u32) -> Vec<GcLine> {
    let translated = lines.iter().map(|line| {
        let tid = if line.tid == host { inside } else { line.tid };
        GcLine { pid: inside, tid, ..(*line).clone() }
    });
    translated.collect()
}

/// A cgroup, removed when dropped.
#[derive(Debug)]
pub struct Cgroup(PathBuf);

impl Cgroup {
    /// Creates a cgroup in the v2 hierarchy, or in that of a v1 controller.
    pub fn new(controller: Option<&str>, name: &str) -> Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        let mounted = mounts.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(' ').collect();
            let right = match controller {
                None => fields.get(2) == Some(&"cgroup2"),
                Some(controller) => {
                    fields.get(2) == Some(&"cgroup") && fields.get(3)?.split(',').any(|o| o == controller)
                }
            };
            right.then(|| PathBuf::from(fields[1]))
        });
        let root = mounted.with_context(|| format!("no cgroup hierarchy ({controller:?}) is mounted"))?;
        Self::at(root.join(format!("gctrace-test-{}-{name}", std::process::id())))
    }

    /// Creates a cgroup below this one.
    pub fn below(&self, name: &str) -> Result<Self> {
        Self::at(self.0.join(name))
    }

    fn at(path: PathBuf) -> Result<Self> {
        fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self(path))
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Moves a process into this cgroup.
    pub fn take(&self, pid: u32) -> Result<()> {
        fs::write(self.0.join("cgroup.procs"), pid.to_string())
            .with_context(|| format!("cannot move {pid} into {}", self.0.display()))
    }

    /// Moves a process to the root of the hierarchy.
    pub fn release(&self, pid: u32) -> Result<()> {
        let above = self.0.ancestors().find(|dir| !dir.to_string_lossy().contains("gctrace-test-"));
        let root = above.context("no root")?;
        fs::write(root.join("cgroup.procs"), pid.to_string()).context("cannot move it to the root")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let since = Instant::now();
        // The kernel may take a moment to account for the exit of a process that has ended.
        while fs::remove_dir(&self.0).is_err() && self.0.exists() && since.elapsed().as_secs() < 5 {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}
