//! Running `gctrace doctor` and reading its JSON lines.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::child::Finished;
use crate::gctrace::Invocation;

/// The output of `gctrace doctor`.
#[derive(Debug)]
pub struct Diagnosis {
    /// The host.
    pub host: Value,
    /// The images.
    pub images: Vec<Value>,
    /// The processes.
    pub processes: Vec<Value>,
    /// The summary.
    pub summary: Value,
    /// Exit status and raw output.
    pub finished: Finished,
}

/// Runs `gctrace doctor --format jsonl` with these arguments and this cache directory.
pub fn diagnose<I: IntoIterator<Item: AsRef<OsStr>>>(cache: &Path, args: I) -> Result<Diagnosis> {
    let mut all: Vec<OsString> =
        vec!["doctor".into(), "--format".into(), "jsonl".into(), "--cache-dir".into(), cache.into()];
    all.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
    read(Invocation::new(all)?.run()?)
}

/// Parses the output: one `host` line, then images, then processes, then one `summary` line.
pub fn read(finished: Finished) -> Result<Diagnosis> {
    let parse =
        |line: &String| serde_json::from_str::<Value>(line).with_context(|| format!("not JSON: {line}"));
    let lines = finished.stdout.iter().map(parse).collect::<Result<Vec<_>>>()?;
    ensure!(
        lines.len() >= 2,
        "doctor said too little:\n{}\n{}",
        finished.stdout.join("\n"),
        finished.errors()
    );
    let of = |kind: &str| lines.iter().filter(|line| line["type"] == kind).cloned().collect::<Vec<_>>();
    let (images, processes) = (of("image"), of("process"));
    ensure!(
        lines[0]["type"] == "host" && lines[lines.len() - 1]["type"] == "summary",
        "order of lines: {lines:?}"
    );
    ensure!(images.len() + processes.len() + 2 == lines.len(), "lines of another type: {lines:?}");
    let (host, summary) = (lines[0].clone(), lines[lines.len() - 1].clone());
    let status = finished.status.code().map(i64::from);
    ensure!(summary["exit_status"].as_i64() == status, "{summary} but {}", finished.status);
    Ok(Diagnosis { host, images, processes, summary, finished })
}

impl Diagnosis {
    /// The number of instructions that the verifier processed, by program.
    pub fn verified(&self) -> Result<BTreeMap<String, u64>> {
        Ok(serde_json::from_value(self.host["verified"].clone())?)
    }

    /// The host check with this name.
    pub fn check(&self, name: &str) -> Result<&Value> {
        let checks = self.host["checks"].as_array().context("no checks")?;
        checks
            .iter()
            .find(|check| check["name"] == name)
            .with_context(|| format!("no check {name}: {checks:?}"))
    }

    /// The only image.
    pub fn image(&self) -> Result<&Value> {
        ensure!(self.images.len() == 1, "{} images: {:?}", self.images.len(), self.images);
        Ok(&self.images[0])
    }
}
