//! Where the memory of traced processes is when a run ends (`--memory-account`): what `gctrace heap --by memory` says of each that still
//! runs. It is read once, after tracing, without stopping the process, so that it costs the traced time nothing.

use std::{
    collections::BTreeSet,
    io::{self, Write},
    path::PathBuf,
};

use super::{
    account, count,
    failure::HeapFailure,
    memory::{self, Account},
    report::Report,
    target::Target,
};
use crate::{
    cli::{By, Format},
    export::{ExportError, Exporter},
    host::proc::MemoryReader,
    ledger::Ledger,
    model::{EndReason, Process, seen::Seen},
    words::plural,
};

/// Processes whose account is written: those with most memory. Each takes about 60 ms for a heap of 100 MB.
const PROCESSES: usize = 5;

/// Writes accounts of memory at the end of a run.
pub struct Accounts<W: Write> {
    out: W,
    cache_dir: Option<PathBuf>,
    /// Pids of the processes that run.
    running: BTreeSet<u32>,
}

impl<W: Write> Accounts<W> {
    /// To this output; analyses of Ruby files are in that folder.
    pub fn new(out: W, cache_dir: Option<PathBuf>) -> Self {
        Self { out, cache_dir, running: BTreeSet::new() }
    }

    fn read(&self, pid: u32) -> Result<(Report, Account), HeapFailure> {
        let target = Target::find(pid, self.cache_dir.as_deref())?;
        let counted = count::count(&target).map_err(|source| target.failure(source))?;
        let account = account(&target, &counted)?;
        Ok((Report::of(&target, By::Memory, &counted), account))
    }

    fn write(&mut self) -> io::Result<()> {
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
                Ok((report, account)) => memory::write(&mut self.out, &report, &account, Format::Text)?,
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
            }
            // The end of tracing is not that of the process.
            Seen::Ended(end) if end.reason != EndReason::Detached => {
                self.running.remove(&process.pid);
            }
            _ => {}
        }
        Ok(())
    }

    fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
        self.write().map_err(ExportError::Stdout)
    }
}
