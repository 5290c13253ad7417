//! The stack log (`--stack-log`): one line per stack that was taken.

use std::path::Path;

use anyhow::{Context as _, Result};
use serde::Deserialize;

/// A line.
#[derive(Debug, Deserialize)]
pub struct Sample {
    /// The process.
    pub pid: u32,
    /// Its thread.
    pub tid: u32,
    /// The state of the thread: `running`, `blocked`, `runnable`, ….
    pub state: String,
    /// CPU time that the sample represents, nanoseconds.
    pub cpu_ns: u64,
    /// Wall-clock time that the sample represents, nanoseconds.
    pub wall_ns: u64,
    /// The number of the request that its thread was serving.
    pub request: Option<u64>,
    /// The frames, leaf first.
    pub stack: Vec<Frame>,
}

/// A frame.
#[derive(Debug, Deserialize)]
pub struct Frame {
    /// `ruby`, `c`, `native`, `kernel`, `vm` or `missing`.
    pub kind: String,
    /// Its name.
    pub name: String,
}

impl Sample {
    /// Number of its frames whose name ends with `method`.
    pub fn frames_of(&self, method: &str) -> usize {
        self.stack.iter().filter(|frame| frame.name.ends_with(method)).count()
    }
}

/// The samples of a process in a file.
pub fn of_process(path: &Path, pid: u32) -> Result<Vec<Sample>> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let all = text.lines().map(serde_json::from_str).collect::<Result<Vec<Sample>, _>>();
    let all = all.with_context(|| path.display().to_string())?;
    Ok(all.into_iter().filter(|sample| sample.pid == pid).collect())
}
