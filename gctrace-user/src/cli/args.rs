//! Flags as they are written. Parsing does nothing but parse.

use std::{path::PathBuf, time::Duration};

use crate::discover::Fault;
use clap::{Args as ClapArgs, Parser, ValueEnum};

/// Watch the GC of CRuby processes from the kernel: no gem, no restart, no signal, no pause.
#[derive(Debug, Parser)]
#[command(
    name = "gctrace",
    version,
    after_help = "Examples:\n  \
        sudo gctrace --all-ruby                          every Ruby on this host, until Ctrl-C\n  \
        sudo gctrace --pid 4242 --duration 30s           one process, for half a minute\n  \
        sudo gctrace --all-ruby --tunemygc sets/         a TuneMyGC sample set per process\n  \
        sudo gctrace --pprof gc.pb.gz -- ruby script.rb  a command and all it starts\n  \
        sudo gctrace doctor                              what works here, and why the rest does not\n\n\
        Exit status: 0 done, 1 nothing matched, 2 error or bad usage, 3 missing privilege or kernel feature.\n\
        Standard output carries data, standard error diagnostics (RUST_LOG=debug for more)."
)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    /// Other things than tracing.
    #[command(subcommand)]
    pub subcommand: Option<Subcommand>,

    /// Trace every Ruby process, running now or started later
    #[arg(long)]
    pub all_ruby: bool,

    /// Trace this process (repeatable)
    #[arg(long = "pid", value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub pids: Vec<u32>,

    /// Stop after this time, e.g. 500ms, 30s, 5m [default: until Ctrl-C or the end of COMMAND]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub duration: Option<Duration>,

    /// What to write to standard output
    #[arg(long, value_enum, default_value_t = FormatArg::Text)]
    pub format: FormatArg,

    /// Write no cycles to standard output
    #[arg(long, short)]
    pub quiet: bool,

    /// Write a TuneMyGC sample set per process to this directory
    #[arg(long, value_name = "DIR")]
    pub tunemygc: Option<PathBuf>,

    /// Write GC pauses as a pprof profile (open with `go tool pprof`)
    #[arg(long, value_name = "FILE")]
    pub pprof: Option<PathBuf>,

    /// Size of the kernel ring for GC events, e.g. 4MiB; a power of two
    #[arg(long, value_name = "BYTES", value_parser = parse_ring, hide_short_help = true)]
    pub gc_ring: Option<u32>,

    /// How GC work is seen, for finding out why something is not
    #[arg(long, value_enum, default_value_t = ProbesArg::Auto, hide_short_help = true)]
    pub probes: ProbesArg,

    /// Plant a mistake that the live proofs must catch (for tests)
    #[arg(long, value_enum, hide = true)]
    pub plant: Option<Fault>,

    /// Behave as on kernels before 5.15, which have no attach cookies (for tests)
    #[arg(long, hide = true)]
    pub without_cookies: bool,

    /// Take the layout of the VM's structures from this unstripped library or separate debug file (repeatable);
    /// it must be of the same build as the traced Ruby
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub layout_from: Vec<PathBuf>,

    /// The cache of analyses.
    #[command(flatten)]
    pub cache: CacheArgs,

    /// Start this command and trace it and everything it starts
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Other things that gctrace does.
#[derive(Debug, clap::Subcommand)]
pub enum Subcommand {
    /// Say what works on this host and for each Ruby, and why the rest does not
    Doctor(DoctorArgs),
}

/// Flags of `gctrace doctor`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
        sudo gctrace doctor                          this host, every Ruby that runs or is installed\n  \
        sudo gctrace doctor --pid 4242 -v            one process, with every check\n  \
        sudo gctrace doctor /opt/rubies/3.4/bin/ruby a Ruby that need not run\n\n\
        Exit status: 0 everything works, 1 nothing matched, 2 something does not work, 3 missing privilege or kernel \
        feature.\nNothing is attached to any Ruby, nothing is stopped.")]
pub struct DoctorArgs {
    /// Every Ruby, running or installed [default, if nothing else is given]
    #[arg(long)]
    pub all_ruby: bool,

    /// This process (repeatable)
    #[arg(long = "pid", value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub pids: Vec<u32>,

    /// Ruby images or executables
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,

    /// What to write to standard output
    #[arg(long, value_enum, default_value_t = FormatArg::Text)]
    pub format: FormatArg,

    /// Show every check, not only what is wrong
    #[arg(long, short)]
    pub verbose: bool,

    /// The cache of analyses.
    #[command(flatten)]
    pub cache: CacheArgs,
}

/// Where analyses of Ruby images are kept.
#[derive(Debug, ClapArgs)]
pub struct CacheArgs {
    /// Keep analyses of Ruby images here [default: /var/cache/gctrace; not as root: ~/.cache/gctrace]
    #[arg(long, value_name = "DIR", hide_short_help = true, conflicts_with = "no_cache")]
    pub cache_dir: Option<PathBuf>,

    /// Analyse every Ruby image anew and keep nothing
    #[arg(long, hide_short_help = true)]
    pub no_cache: bool,
}

/// `--probes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ProbesArg {
    /// The VM's event sites; for images without, functions by symbol or USDT probes
    Auto,
    /// The VM's event sites or nothing
    Sites,
    /// Functions by symbol or nothing: only how long they run
    Functions,
    /// USDT probes or nothing: only marking and sweeping
    Usdt,
}

/// `--format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FormatArg {
    /// Lines for people
    Text,
    /// One JSON object per line
    Jsonl,
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let seconds = match unit {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err(format!("unknown unit `{unit}`; use ms, s, m or h")),
    };
    let number: f64 = number.parse().map_err(|_| "give a number and a unit, such as 30s".to_owned())?;
    Duration::try_from_secs_f64(number * seconds)
        .ok()
        .filter(|time| !time.is_zero())
        .ok_or_else(|| "give a time above zero, such as 30s".to_owned())
}

fn parse_ring(text: &str) -> Result<u32, String> {
    let (number, factor) = match text.strip_suffix("MiB").or_else(|| text.strip_suffix('M')) {
        Some(number) => (number, 1 << 20),
        None => match text.strip_suffix("KiB").or_else(|| text.strip_suffix('K')) {
            Some(number) => (number, 1 << 10),
            None => (text, 1),
        },
    };
    number
        .parse::<u32>()
        .ok()
        .and_then(|number| number.checked_mul(factor))
        .filter(|bytes| bytes.is_power_of_two() && (16 << 10..=1 << 30).contains(bytes))
        .ok_or_else(|| "give a power of two from 16KiB to 1024MiB".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    /// The definition is consistent, and short forms of times and sizes mean what they say.
    #[test]
    fn definition() {
        Args::command().debug_assert();
        assert_eq!(parse_duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_mins(2)));
        for wrong in ["", "s", "-1s", "0", "1d", "1e400s", "9999999999999999999999h"] {
            assert!(parse_duration(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_ring("16KiB"), Ok(16 << 10));
        for wrong in ["1", "3MiB", "8192MiB", "x"] {
            assert!(parse_ring(wrong).is_err(), "{wrong}");
        }
    }
}
