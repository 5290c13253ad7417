//! `gctrace heap`: what lies in the heap of a running process, slot by slot, without stopping it.

mod count;
mod failure;
mod jsonl;
mod report;
mod svg;
mod target;
mod text;

use std::{
    io::{self, BufWriter, Write as _},
    path::Path,
};

use failure::HeapFailure;
use report::Report;
use target::Target;

use crate::{
    cli::{By, Format, HeapSettings},
    console::say,
    export,
};

/// Counts and prints. Returns the exit status.
pub fn run(settings: &HeapSettings) -> u8 {
    match reported(settings) {
        Ok(()) => 0,
        Err(failure) => {
            say(&format!("gctrace: {failure}"));
            failure.exit_status()
        }
    }
}

fn reported(settings: &HeapSettings) -> Result<(), HeapFailure> {
    if let Some(path) = &settings.svg {
        export::check_path(path).map_err(|error| file_failure(path, io::Error::other(error)))?;
    }
    let target = Target::find(settings.pid, settings)?;
    if settings.by == By::Class {
        target.needs_names()?;
    }
    let counted = count::count(&target).map_err(|source| target.failure(source))?;
    let report = Report::of(&target, settings.by, &counted);
    if let Some(path) = &settings.svg {
        export::write_atomically(path, |out| svg::write(out, &report, &counted.census.pages))
            .map_err(|error| file_failure(path, error))?;
    }
    write(&report, settings)
}

fn file_failure(path: &Path, source: io::Error) -> HeapFailure {
    HeapFailure::File { path: path.to_owned(), source }
}

fn write(report: &Report, settings: &HeapSettings) -> Result<(), HeapFailure> {
    let mut out = BufWriter::new(io::stdout());
    let written = match settings.format {
        Format::Jsonl => jsonl::write(&mut out, report),
        Format::Text => text::write(&mut out, report, settings.top),
    };
    match written.and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(HeapFailure::Output(error)),
        _ => Ok(()),
    }
}
