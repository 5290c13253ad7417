//! Running the scripts in `tests/rubies`.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::PATIENCE;
use crate::child::{Finished, Guarded};
use crate::gctrace::{Gctrace, Invocation};
use crate::live::{Live, rubies_dir};
use crate::ruby::Ruby;
use crate::witness::{self, Log};

/// A script that has not been started.
#[derive(Debug)]
pub struct Script {
    name: String,
    ruby: Ruby,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    outputs: Outputs,
}

/// What another program needs to start a script: program and arguments, environment, and the script's outputs.
pub type Parts = (Vec<OsString>, Vec<(OsString, OsString)>, Outputs);

/// Where a script writes its report and the log of its witness.
#[derive(Clone, Debug)]
pub struct Outputs {
    name: String,
    report: PathBuf,
    log: Option<PathBuf>,
}

/// A script's report about itself.
#[derive(Clone, Debug, Deserialize)]
pub struct Report {
    /// Its pid.
    pub pid: u32,
    /// Its parent's pid.
    pub ppid: u32,
    /// `RUBY_VERSION`.
    pub ruby: String,
    /// `GC::OPTS`.
    pub opts: Value,
    /// `GC::INTERNAL_CONSTANTS`.
    pub constants: Value,
    /// `GC.stat` before its work.
    pub before: Map<String, Value>,
    /// `GC.stat` after its work.
    pub after: Map<String, Value>,
    /// What the script adds to its report.
    pub extra: Map<String, Value>,
}

impl Report {
    /// The growth of a key of `GC.stat` during its work.
    pub fn growth(&self, key: &str) -> Result<u64> {
        let of = |stat: &Map<String, Value>| {
            stat.get(key).and_then(Value::as_u64).with_context(|| format!("no {key} in the script's GC.stat"))
        };
        of(&self.after)?.checked_sub(of(&self.before)?).with_context(|| format!("{key} went backwards"))
    }

    /// The counts (`GC.stat[:count]`) of the cycles that started during its work.
    pub fn counts(&self) -> Result<std::ops::RangeInclusive<u64>> {
        let before = self.before.get("count").and_then(Value::as_u64).context("no count in GC.stat")?;
        let after = self.after.get("count").and_then(Value::as_u64).context("no count in GC.stat")?;
        Ok(before + 1..=after)
    }

    /// A number that the script added to its report.
    pub fn extra_u64(&self, key: &str) -> Result<u64> {
        self.extra
            .get(key)
            .and_then(Value::as_u64)
            .with_context(|| format!("no number {key} in the script's report"))
    }
}

/// A script that has ended.
#[derive(Debug)]
pub struct Done {
    /// The process's pid.
    pub pid: u32,
    /// Status and output.
    pub finished: Finished,
    /// The script's report.
    pub report: Report,
    /// The witness's log, if there was one.
    pub witness: Option<Log>,
}

impl Done {
    /// The log of its witness. It is an error if the script ran without one.
    pub fn log(&self) -> Result<&Log> {
        self.witness.as_ref().context("this script ran without a witness")
    }
}

impl Script {
    /// The script `tests/rubies/NAME` on `ruby`, with a witness inside the process.
    pub fn new(live: &Live, ruby: &Ruby, name: &str) -> Result<Self> {
        let mut script = Self::unwitnessed(live, ruby, name)?;
        let log = script.outputs.report.with_extension("log");
        script.set("GCTRACE_TEST_WITNESS", witness::extension(ruby)?);
        script.set("GCTRACE_TEST_LOG", &log);
        script.outputs.log = Some(log);
        Ok(script)
    }

    /// Like [`Self::new`], without a witness: the process runs as it would anywhere.
    pub fn unwitnessed(live: &Live, ruby: &Ruby, name: &str) -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let path = rubies_dir().join(name);
        ensure!(path.is_file(), "no script {}", path.display());
        let report = live.path(&format!("{}-{name}.json", NUMBER.fetch_add(1, Ordering::Relaxed)));
        let outputs = Outputs { name: name.to_owned(), report: report.clone(), log: None };
        let mut script = Self {
            name: name.to_owned(),
            ruby: ruby.clone(),
            args: vec![path.into_os_string()],
            env: Vec::new(),
            outputs,
        };
        script.set("GCTRACE_TEST_REPORT", report);
        Ok(script)
    }

    /// Runs the script on this Ruby instead, which must be the same except for its name.
    #[must_use]
    pub fn on(mut self, ruby: &Ruby) -> Self {
        self.ruby = ruby.clone();
        self
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, key: &str, value: impl AsRef<OsStr>) -> Self {
        self.set(key, value);
        self
    }

    /// Makes `/proc` visible to the script, even if its Ruby has a separate root.
    #[must_use]
    pub fn seeing_proc(self) -> Self {
        self.env("GCTRACE_TEST_PROC", "1")
    }

    /// Makes the script print "ready" and wait for a line before it starts its work.
    #[must_use]
    pub fn waiting(self) -> Self {
        self.env("GCTRACE_TEST_WAIT", "1")
    }

    /// Starts it.
    pub fn start(self) -> Result<Running> {
        let mut command = self.ruby.command()?;
        command.args(&self.args).envs(self.env.iter().map(|(key, value)| (key, value)));
        Ok(Running { process: Guarded::start(self.name, &mut command)?, outputs: self.outputs })
    }

    /// Starts it and waits until it ends.
    pub fn run(self) -> Result<Done> {
        self.start()?.finish()
    }

    /// Runs scripts one after the other under a gctrace with these arguments that traces nothing else. gctrace runs from before the work of the
    /// first script until it ends by itself, with the last script.
    pub fn under<A: AsRef<OsStr>>(
        scripts: impl IntoIterator<Item = Self>,
        args: impl IntoIterator<Item = A>,
    ) -> Result<(Vec<Done>, Gctrace)> {
        let started = scripts.into_iter().map(|script| {
            let mut running = script.waiting().start()?;
            running.wait_for("ready")?;
            Ok(running)
        });
        let running = started.collect::<Result<Vec<Running>>>()?;
        let pids: Vec<String> = running.iter().map(|script| script.pid().to_string()).collect();
        let mut all = vec![OsString::from("--pid"), pids.join(",").into()];
        all.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        let gctrace = Invocation::jsonl(all)?.start_ready()?;
        let done = running.into_iter().map(|mut script| {
            script.say("go")?;
            script.finish()
        });
        Ok((done.collect::<Result<_>>()?, gctrace))
    }

    /// The parts of the command, for another program that starts it.
    pub fn into_parts(self) -> Result<Parts> {
        let mut command = self.ruby.argv()?;
        command.extend(self.args);
        Ok((command, self.env, self.outputs))
    }

    fn set(&mut self, key: &str, value: impl AsRef<OsStr>) {
        self.env.push((key.into(), value.as_ref().to_owned()));
    }
}

impl Outputs {
    /// The report and the log of the script, or of a child or successor whose outputs have the given suffix.
    pub fn read(&self, suffix: &str) -> Result<(Report, Option<Log>)> {
        let with_suffix = |path: &Path| {
            let mut name = path.as_os_str().to_owned();
            name.push(suffix);
            PathBuf::from(name)
        };
        let path = with_suffix(&self.report);
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("{} left no report at {}", self.name, path.display()))?;
        let report =
            serde_json::from_str(&text).with_context(|| format!("report of {}: {text}", self.name))?;
        let log = self.log.as_deref().map(|log| Log::read(&with_suffix(log))).transpose()?;
        Ok((report, log))
    }
}

/// A running script. Dropping it kills it.
#[derive(Debug)]
pub struct Running {
    process: Guarded,
    outputs: Outputs,
}

impl Running {
    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Where it writes its outputs.
    pub fn outputs(&self) -> Outputs {
        self.outputs.clone()
    }

    /// Waits until it prints `line`.
    pub fn wait_for(&mut self, line: &str) -> Result<()> {
        self.process.wait_stdout(PATIENCE, line, |text| text.trim_end() == line).map(drop)
    }

    /// Waits until it has printed a line that ends with `end`, and returns that line.
    pub fn wait_for_end(&mut self, end: &str) -> Result<String> {
        self.process.wait_stdout(PATIENCE, end, |text| text.trim_end().ends_with(end))
    }

    /// Writes a line to its standard input.
    pub fn say(&mut self, line: &str) -> Result<()> {
        self.process.say(line)
    }

    /// Whether it is still running.
    pub fn running(&mut self) -> Result<bool> {
        self.process.running()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.process.signal(signal)
    }

    /// Waits until it ends, with success, and reads its outputs.
    pub fn finish(self) -> Result<Done> {
        let name = self.outputs.name.clone();
        let done = self.finish_any()?;
        ensure!(
            done.finished.status.success(),
            "{name} failed with {}: {}",
            done.finished.status,
            done.finished.errors()
        );
        Ok(done)
    }

    /// Waits until it ends, with any status, and reads its outputs.
    pub fn finish_any(self) -> Result<Done> {
        let pid = self.pid();
        let finished = self.process.finish(PATIENCE)?;
        let (report, witness) =
            self.outputs.read("").with_context(|| format!("{}: {}", finished.status, finished.errors()))?;
        Ok(Done { pid, finished, report, witness })
    }
}
