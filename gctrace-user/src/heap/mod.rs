//! `gctrace heap`: what lies in the heap of a running process, slot by slot, without stopping it.

mod count;
mod diff;
mod dump;
mod failure;
mod jsonl;
mod report;
mod saved;
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
    if !settings.diff.is_empty() {
        return diff::compare(settings);
    }
    let Some(pid) = settings.pid else {
        return Err(HeapFailure::Usage("which process? give --pid".to_owned()));
    };
    for path in settings.svg.iter().chain(&settings.dump) {
        export::check_path(path).map_err(|error| file_failure(path, io::Error::other(error)))?;
    }
    let target = Target::find(pid, settings)?;
    if settings.by == By::Class {
        target.needs_names()?;
    }
    if let Some(every) = settings.every {
        return diff::watch(&target, every, settings);
    }
    if let Some(path) = &settings.dump {
        let dumped = dump::write(&target, path)?;
        for line in dump::summary(path, &dumped) {
            say(&line);
        }
        return Ok(());
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
