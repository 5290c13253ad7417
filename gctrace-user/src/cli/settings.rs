//! Flags resolved to what the run does.

use std::{path::PathBuf, time::Duration};

use super::args::{Args, CacheArgs, DoctorArgs, FormatArg, ProbesArg};
use crate::{
    cache,
    discover::{Fault, Selection},
    ruby::last_resort::{METHODS, Method},
};

/// What goes to standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Lines for people.
    Text,
    /// JSON lines.
    Jsonl,
    /// Nothing.
    Quiet,
}

/// A run.
#[derive(Debug)]
pub struct Settings {
    /// Which processes.
    pub selection: Selection,
    /// For how long.
    pub duration: Option<Duration>,
    /// Standard output.
    pub format: Format,
    /// Directory for sample sets.
    pub tunemygc: Option<PathBuf>,
    /// File for the profile.
    pub pprof: Option<PathBuf>,
    /// How GC work is seen, in order of preference.
    pub methods: &'static [Method],
    /// A mistake to plant in every plan.
    pub plant: Option<Fault>,
    /// Use attach cookies where the kernel has them.
    pub cookies: bool,
    /// Size of the GC ring, bytes.
    pub gc_ring_bytes: Option<u32>,
    /// Debug files that tell layouts.
    pub layout_from: Vec<PathBuf>,
    /// Where analyses are kept; `None`: nowhere.
    pub cache_dir: Option<PathBuf>,
}

/// An examination.
#[derive(Debug)]
pub struct DoctorSettings {
    /// Which processes.
    pub selection: Selection,
    /// Which files.
    pub files: Vec<PathBuf>,
    /// Standard output.
    pub format: Format,
    /// Whether everything is shown.
    pub verbose: bool,
    /// Where analyses are kept; `None`: nowhere.
    pub cache_dir: Option<PathBuf>,
}

impl From<DoctorArgs> for DoctorSettings {
    fn from(args: DoctorArgs) -> Self {
        let DoctorArgs { all_ruby, pids, files, format, verbose, cache } = args;
        let all = all_ruby || (pids.is_empty() && files.is_empty());
        Self {
            selection: Selection { all, pids, command: None },
            files,
            format: format.into(),
            verbose,
            cache_dir: cache.dir(),
        }
    }
}

impl From<FormatArg> for Format {
    fn from(format: FormatArg) -> Self {
        match format {
            FormatArg::Text => Self::Text,
            FormatArg::Jsonl => Self::Jsonl,
        }
    }
}

/// Flags that do not make a run.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum UsageError {
    /// Nothing was selected.
    #[error("nothing is selected: give --all-ruby, --pid PID or -- COMMAND (see gctrace --help)")]
    NothingSelected,
    /// gctrace cannot trace itself.
    #[error("--pid {0} is gctrace itself, which is never traced")]
    OwnPid(u32),
}

impl CacheArgs {
    /// The directory that these flags mean.
    pub(super) fn dir(self) -> Option<PathBuf> {
        if self.no_cache { None } else { self.cache_dir.or_else(cache::default_dir) }
    }
}

impl Settings {
    /// Resolves flags.
    pub fn resolve(args: Args, own_pid: u32) -> Result<Self, UsageError> {
        let Args {
            subcommand: _,
            all_ruby,
            mut pids,
            duration,
            format,
            quiet,
            tunemygc,
            pprof,
            gc_ring,
            probes,
            plant,
            without_cookies,
            layout_from,
            cache,
            command,
        } = args;
        pids.sort_unstable();
        pids.dedup();
        if pids.contains(&own_pid) {
            return Err(UsageError::OwnPid(own_pid));
        }
        let command = (!command.is_empty()).then_some(command);
        if !all_ruby && pids.is_empty() && command.is_none() {
            return Err(UsageError::NothingSelected);
        }
        let format = if quiet { Format::Quiet } else { format.into() };
        let selection = Selection { all: all_ruby, pids, command };
        Ok(Self {
            selection,
            duration,
            format,
            tunemygc,
            pprof,
            gc_ring_bytes: gc_ring,
            methods: match probes {
                ProbesArg::Auto => &METHODS,
                ProbesArg::Sites => &[Method::Sites],
                ProbesArg::Functions => &[Method::Functions],
                ProbesArg::Usdt => &[Method::Usdt],
            },
            plant,
            cookies: !without_cookies,
            layout_from,
            cache_dir: cache.dir(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    fn resolve(words: &[&str]) -> Result<Settings, UsageError> {
        Settings::resolve(Args::try_parse_from(words).unwrap(), 77)
    }

    /// Selectors form a union; none, or gctrace itself, is bad usage.
    #[test]
    fn selection() {
        let run =
            resolve(&["gctrace", "--pid", "5", "--pid", "4", "--pid", "5", "--", "ruby", "-v"]).unwrap();
        assert_eq!(run.selection.pids, [4, 5]);
        assert_eq!(run.selection.command.unwrap(), ["ruby", "-v"]);
        assert_eq!(resolve(&["gctrace"]).unwrap_err(), UsageError::NothingSelected);
        assert_eq!(resolve(&["gctrace", "--pid", "77"]).unwrap_err(), UsageError::OwnPid(77));
    }
}
