//! `gctrace malloc`: what a running process allocates outside its heap in a window of time, by size and by age (Feature #14857).
//!
//! The kernel counts at the calls themselves and hands over sums, and the stacks of some calls, which are drawn by their size, for
//! estimates of where memory is asked for. Each call costs a trap, so the window is bounded, and ends early when it costs more than the
//! budget.

mod failure;
mod jsonl;
mod report;
mod sampling;
mod site;
mod text;
mod window;

use std::io::{self, BufWriter, Write as _};

use failure::MallocFailure;
use report::Report;

use crate::{
    cli::{Format, MallocSettings},
    console::say,
};

/// Counts and prints. Returns the exit status.
pub fn run(settings: &MallocSettings) -> u8 {
    match window::watch(settings).and_then(|report| write(&report, settings)) {
        Ok(()) => 0,
        Err(failure) => {
            say(&format!("gctrace: {failure}"));
            failure.exit_status()
        }
    }
}

fn write(report: &Report, settings: &MallocSettings) -> Result<(), MallocFailure> {
    if let Some(sampled) = &report.sampled {
        sampled.profile.write_files(&settings.files)?;
    }
    let mut out = BufWriter::new(io::stdout());
    let written = match settings.format {
        Format::Jsonl => jsonl::write(&mut out, report),
        Format::Text => text::write(&mut out, report, settings.top),
    };
    match written.and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(MallocFailure::Output(error)),
        _ => Ok(()),
    }
}
