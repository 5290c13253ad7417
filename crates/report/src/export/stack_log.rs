//! Every stack as one JSON object per line: tests compare it with what the program itself knows.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
};

use serde::Serialize;

use super::{ExportError, Exporter, file};
use crate::{
    ledger::Ledger,
    model::{
        Process,
        seen::Seen,
        stack::{Frame, gc_name},
    },
};

/// Writes the log when the run ends.
pub struct StackLog {
    path: PathBuf,
    lines: Vec<u8>,
}

#[derive(Serialize)]
struct Line<'a> {
    pid: u32,
    tid: u32,
    comm: &'a str,
    ts_ns: u64,
    state: &'static str,
    cpu_ns: u64,
    wall_ns: u64,
    gc: &'static str,
    request: Option<u64>,
    stack: Vec<LoggedFrame<'a>>,
}

#[derive(Serialize)]
struct LoggedFrame<'a> {
    kind: String,
    name: &'a str,
    file: Option<&'a str>,
    line: u32,
}

impl<'a> LoggedFrame<'a> {
    fn of(frame: &'a Frame) -> Self {
        let kind = format!("{:?}", frame.kind).to_lowercase();
        Self { kind, name: &frame.name, file: frame.file.as_deref(), line: frame.line }
    }
}

impl StackLog {
    /// A log to be written to `path`.
    pub fn new(path: &Path) -> Result<Self, ExportError> {
        Ok(Self { path: path.to_owned(), lines: Vec::new() })
    }

    fn failed(&self, source: std::io::Error) -> ExportError {
        ExportError::File { path: self.path.clone(), source }
    }
}

impl Exporter for StackLog {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        let Seen::Stack(sample) = seen else { return Ok(()) };
        let line = Line {
            pid: process.pid,
            tid: sample.tid,
            comm: &sample.comm,
            ts_ns: sample.ts_ns,
            state: sample.state.name(),
            cpu_ns: sample.cpu_ns,
            wall_ns: sample.wall_ns,
            gc: gc_name(sample.gc),
            request: sample.request,
            stack: sample.stack.iter().map(|frame| LoggedFrame::of(frame)).collect(),
        };
        let written = serde_json::to_writer(&mut self.lines, &line).map_err(std::io::Error::from);
        written.and_then(|()| self.lines.write_all(b"\n")).map_err(|source| self.failed(source))
    }

    fn finish(&mut self, _ledger: &Ledger) -> Result<(), ExportError> {
        file::write_atomically(&self.path, |out| out.write_all(&self.lines))
            .map_err(|source| self.failed(source))
    }
}
