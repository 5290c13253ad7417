//! Accounts of the memory of traced processes at the end of a run (`--memory-account`): the output of `gctrace heap --by memory` for each
//! process that still runs. Memory is read once, after tracing, without stopping the process, so it costs the traced time nothing.

use std::{
    collections::BTreeSet,
    io::{self, Write},
    path::PathBuf,
};

use gctrace_tunemygc::printable::printable;

use super::{
    accounted,
    baselines::Baselines,
    failure::HeapFailure,
    memory::{self, Account},
    report::Report,
    sharing::Since,
    target::Target,
};
use crate::{
    cli::Format,
    export::{ExportError, Exporter},
    host::{proc::MemoryReader, sharing::SharingError},
    ledger::Ledger,
    model::{EndReason, Process, seen::Seen},
    words::plural,
};

/// Maximum number of accounts: those of the processes with the most memory. Each takes about 60 ms for a heap of 100 MB.
const PROCESSES: usize = 5;

/// Writes accounts of memory at the end of a run.
pub struct Accounts<W: Write> {
    out: W,
    cache_dir: Option<PathBuf>,
    /// Pids of the running processes.
    running: BTreeSet<u32>,
    /// What the processes shared with others when they were first seen.
    baselines: Baselines,
}

impl<W: Write> Accounts<W> {
    /// Writes to this output. `cache_dir` is the directory of cached analyses.
    ///
    /// # Errors
    ///
    /// A thread cannot be started.
    pub fn new(out: W, cache_dir: Option<PathBuf>) -> Result<Self, ExportError> {
        let baselines = Baselines::start().map_err(ExportError::Thread)?;
        Ok(Self { out, cache_dir, running: BTreeSet::new(), baselines })
    }

    fn read(&self, pid: u32) -> Result<(Report, Account), HeapFailure> {
        let target = Target::find(pid, self.cache_dir.as_deref())?;
        accounted(&target)
    }

    /// Writes what became of the memory that the process shared when it was first seen, if it shared any.
    fn sharing(&mut self, pid: u32, account: &Account) -> io::Result<()> {
        let since = self.baselines.take(pid).and_then(|mut pages| {
            match Since::look(&mut pages, &account.places) {
                // It has replaced its program, so nothing of the shared memory is left.
                Err(SharingError::Unreadable(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    Ok(None)
                }
                looked => looked.map(Some).map_err(|error| error.to_string()),
            }
        });
        match since {
            Ok(None) => Ok(()),
            Ok(Some(since)) if since.before() == 0 => Ok(()),
            Ok(Some(since)) => {
                let ago = since.ago().as_secs_f64();
                since.text(&mut self.out, &format!("when it was first seen, {ago:.1} s before"))
            }
            Err(reason) => {
                writeln!(
                    self.out,
                    "unknown what it shared with other processes at first: {}",
                    printable(&reason)
                )
            }
        }
    }

    fn write(&mut self) -> io::Result<()> {
        self.baselines.end();
        let rss = |pid: u32| MemoryReader::open(pid).ok()?.read().map(|memory| memory.rss);
        let mut pids: Vec<(u32, u64)> =
            self.running.iter().filter_map(|&pid| Some((pid, rss(pid)?))).collect();
        pids.sort_by_key(|&(pid, rss)| (std::cmp::Reverse(rss), pid));
        writeln!(self.out)?;
        if pids.is_empty() {
            writeln!(self.out, "no account of memory: no traced process runs any more")?;
        }
        for (at, &(pid, _)) in pids.iter().take(PROCESSES).enumerate() {
            if at > 0 {
                writeln!(self.out)?;
            }
            match self.read(pid) {
                Ok((report, account)) => {
                    memory::write(&mut self.out, &report, &account, Format::Text)?;
                    self.sharing(pid, &account)?;
                }
                Err(failure) => writeln!(self.out, "no account of memory of {failure}")?,
            }
        }
        if let Some(others) = pids.len().checked_sub(PROCESSES).filter(|&others| others > 0) {
            let others = plural(others as u64, "process");
            writeln!(self.out, "\nwithout an account of memory: {others} with less of it")?;
        }
        self.out.flush()
    }
}

impl<W: Write> Exporter for Accounts<W> {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        match seen {
            Seen::Process { .. } => {
                self.running.insert(process.pid);
                self.baselines.want(process.pid);
            }
            // The end of tracing is not the end of the process.
            Seen::Ended(end) if end.reason != EndReason::Detached => {
                self.running.remove(&process.pid);
                self.baselines.forget(process.pid);
            }
            _ => {}
        }
        Ok(())
    }

    /// A worker is running even if it has had no GC so far.
    fn forked(&mut self, pid: u32) {
        self.running.insert(pid);
        self.baselines.want(pid);
    }

    fn left(&mut self, pid: u32) {
        self.running.remove(&pid);
        self.baselines.forget(pid);
    }

    fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
        self.write().map_err(ExportError::Stdout)
    }
}
