//! `gctrace malloc`: what a running process allocates outside its heap during a time window, by size and by age (Feature #14857).
//!
//! The kernel counts the calls themselves and delivers sums. It also takes the stacks of some calls, drawn by their size, from which the
//! distribution over allocation sites is estimated. Each call costs a trap, so the window is bounded, and it ends early if it costs more
//! than the budget.

mod failure;
mod jsonl;
mod report;
mod sampling;
mod select;
mod site;
mod text;
mod window;

use std::io::{self, BufWriter, Write as _};

use failure::MallocFailure;
use report::{Report, Sums};

use crate::{
    cli::{Format, MallocSettings},
    console::say,
    export::profile::MallocProfile,
};

/// Counts and prints. Returns the exit status: that of the first process without a report.
pub fn run(settings: &MallocSettings) -> u8 {
    let mut status = 0;
    let mut fail = |failure: &MallocFailure| {
        say(&format!("gctrace: {failure}"));
        if status == 0 {
            status = failure.exit_status();
        }
    };
    match window::watch(settings, &mut fail)
        .and_then(|(reports, profile)| write(&reports, &profile, settings))
    {
        Ok(()) => {}
        Err(failure) => fail(&failure),
    }
    status
}

fn write(
    reports: &[Report],
    profile: &MallocProfile,
    settings: &MallocSettings,
) -> Result<(), MallocFailure> {
    if !reports.is_empty() {
        profile.write_files(&settings.files)?;
    }
    let mut out = BufWriter::new(io::stdout());
    match written(&mut out, reports, settings).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(MallocFailure::Output(error)),
        _ => Ok(()),
    }
}

/// Writes each process, then the sums if there are several.
fn written(out: &mut impl io::Write, reports: &[Report], settings: &MallocSettings) -> io::Result<()> {
    for (at, report) in reports.iter().enumerate() {
        match settings.format {
            Format::Jsonl => jsonl::write(out, report)?,
            Format::Text => {
                if at > 0 {
                    writeln!(out)?;
                }
                text::write(out, report, settings.top)?;
            }
        }
    }
    if reports.len() < 2 {
        return Ok(());
    }
    let sums = Sums::of_all(reports.iter().map(|report| &report.sums));
    match settings.format {
        Format::Jsonl => jsonl::total(out, &sums, reports.len()),
        Format::Text => text::total(out, &sums, reports.len()),
    }
}
