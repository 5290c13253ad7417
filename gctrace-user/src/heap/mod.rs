//! `gctrace heap`: the contents of the heap of a running process, slot by slot, without stopping it.

mod accounts;
mod anonymous;
mod baselines;
mod count;
mod diff;
mod dump;
mod failure;
mod holders;
mod jsonl;
mod leaks;
mod line;
mod memory;
mod origins;
mod places;
mod report;
mod saved;
mod sharing;
mod svg;
mod target;
mod text;
mod trend;

use std::{
    io::{self, BufWriter},
    path::Path,
};

pub use accounts::Accounts;
pub(crate) use failure::HeapFailure;
pub(crate) use line::Line;
use report::Report;
pub(crate) use target::{Target, looked_at};

use crate::{
    cli::{By, Format, HeapSettings},
    console::say,
    export, preflight,
    ruby::heap::HeapError,
    sudo,
};

/// Takes the census and prints it. Returns the exit status.
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
    preflight::proc()?;
    let Some(pid) = settings.pid else {
        return Err(HeapFailure::Usage("which process? give --pid".to_owned()));
    };
    let mut files = settings.svg.iter().chain(&settings.dump).peekable();
    if files.peek().is_some() {
        sudo::own_files(Some(settings.as_root)).map_err(HeapFailure::Usage)?;
    }
    for path in files {
        export::check_path(path)?;
    }
    if settings.every.is_some() && matches!(settings.by, By::Size | By::Page | By::Age) {
        return Err(HeapFailure::Usage(
            "--every counts by type, class, line or memory: give another --by".to_owned(),
        ));
    }
    if settings.svg.is_some() && settings.by == By::Memory {
        return Err(HeapFailure::Usage(
            "--svg draws pages, which --by memory does not count: give another --by".to_owned(),
        ));
    }
    let target = Target::find(pid, settings.cache_dir.as_deref())?;
    if matches!(settings.by, By::Class | By::Line) {
        target.needs_names()?;
    }
    if let Some(time) = settings.leaks {
        return leaks::watch(&target, time, settings);
    }
    if let Some(every) = settings.every {
        if settings.by == By::Memory {
            return sharing::watch(&target, every, settings);
        }
        return diff::watch(&target, every, settings);
    }
    if let Some(path) = &settings.dump {
        let dumped = dump::write(&target, path)?;
        for line in dump::summary(path, &dumped) {
            say(&line);
        }
        return Ok(());
    }
    if settings.by == By::Memory {
        let (report, account) = accounted(&target)?;
        let mut out = BufWriter::new(io::stdout());
        let written = memory::write(&mut out, &report, &account, settings.format);
        return flushed(written, &mut out);
    }
    let counted = count::count(&target, settings.by).map_err(|source| target.failure(source))?;
    let report = Report::of(&target, settings.by, &counted).map_err(|source| target.failure(source))?;
    if let Some(path) = &settings.svg {
        export::write_atomically(path, |out| svg::write(out, &report, &counted.census.pages))
            .map_err(|error| file_failure(path, error))?;
    }
    write(&report, settings)
}

/// Maximum number of attempts: mappings and pages may come and go while they are read.
const TRIES: u32 = 3;

/// Reads something of a heap again if it failed because the heap changed meanwhile: `passes` says so of an error.
fn retried<T, E>(passes: impl Fn(&E) -> bool, mut read: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    let mut result = read();
    for _ in 1..TRIES {
        if !result.as_ref().is_err_and(&passes) {
            break;
        }
        result = read();
    }
    result
}

/// Whether another attempt may succeed: a page that is given back while it is read cannot be read, or makes no sense.
fn passes(error: &HeapError) -> bool {
    matches!(error, HeapError::Unreadable { .. } | HeapError::Implausible(_))
}

/// The account of the memory of a process, and the report on its heap.
fn accounted(target: &Target) -> Result<(Report, memory::Account), HeapFailure> {
    retried(HeapFailure::passes, || {
        let counted = count::count(target, By::Memory).map_err(|source| target.failure(source))?;
        let account = account(target, &counted)?;
        let report = Report::of(target, By::Memory, &counted).map_err(|source| target.failure(source))?;
        Ok((report, account))
    })
}

/// The account of the memory of the process; the kernel's view and the census must match.
fn account(target: &Target, counted: &count::Counted) -> Result<memory::Account, HeapFailure> {
    let unreadable = |source: io::Error| {
        if !target.is_there() {
            return target.ended();
        }
        let reason = format!("its mappings cannot be read: {source}");
        let denied = source.kind() == io::ErrorKind::PermissionDenied;
        HeapFailure::NotRuby { pid: target.pid, reason, denied }
    };
    let page = target.layout().map_err(|source| target.failure(source))?.page_bytes();
    let moved = || HeapError::Implausible("its mappings changed while they were read; try again".to_owned());
    memory::Account::of(target, counted, page).map_err(unreadable)?.ok_or_else(|| target.failure(moved()))
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
    flushed(written, &mut out)
}

fn flushed(written: io::Result<()>, out: &mut impl io::Write) -> Result<(), HeapFailure> {
    match written.and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(HeapFailure::Output(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Args, Subcommand};

    /// A path that cannot be written is named once, before anything is read.
    #[test]
    fn paths_that_cannot_be_written() {
        for path in ["-", "/tmp"] {
            for flag in ["--dump", "--svg"] {
                let args = Args::try_parse_from(["gctrace", "heap", "4194303", flag, path]).unwrap();
                let Some(Subcommand::Heap(args)) = args.subcommand else { panic!("{path}") };
                let failure = reported(&args.into()).unwrap_err();
                let text = failure.to_string();
                assert!(text.starts_with(&format!("{path} cannot be written: ")), "{text}");
                assert!(!text.contains("writing") && failure.exit_status() == 2, "{text}");
            }
        }
    }

    /// What changes while it is read is read again, a few times; another failure is one at once.
    #[test]
    fn reads_again() {
        let moved = || HeapFailure::Heap {
            pid: 7,
            source: HeapError::Implausible("its mappings changed".to_owned()),
        };
        let other = || HeapFailure::Usage("no".to_owned());
        let attempts = |fails: u32, failure: &dyn Fn() -> HeapFailure| {
            let mut attempts = 0;
            let result = retried(HeapFailure::passes, || {
                attempts += 1;
                if attempts <= fails { Err(failure()) } else { Ok(()) }
            });
            (result.is_ok(), attempts)
        };
        assert_eq!(attempts(0, &moved), (true, 1));
        assert_eq!(attempts(2, &moved), (true, 3));
        assert_eq!(attempts(9, &moved), (false, TRIES));
        assert_eq!(attempts(9, &other), (false, 1));
    }
}
