//! Flags as written on the command line. Parsing does nothing else.

use std::{ffi::OsString, num::NonZeroU32, path::PathBuf, time::Duration};

pub(super) mod diff;
pub(super) mod heap;
pub(super) mod keep;
pub(super) mod look;
pub(super) mod malloc;
pub(super) mod output;
pub(super) mod profile;
pub(super) mod record;
pub(super) mod report;
pub(super) mod select;
pub(super) mod serve;
pub(super) mod top;
pub(super) mod usage;

use self::{
    keep::KeepArgs,
    look::LookArgs,
    output::OutputArgs,
    select::{RunningArgs, SelectArgs},
};
#[cfg(feature = "collector")]
use super::collector::{AppsArgs, CollectorArgs};
use super::parse::{self, Pids};
use crate::{discover::Fault, export::profile::Grouping};
use clap::{Args as ClapArgs, Parser, ValueEnum};

/// Trace garbage collection, GVL contention and CPU time of running Ruby processes, from outside
#[derive(Debug, Parser)]
#[command(
    name = "gctrace",
    version,
    after_help = "Examples:\n  \
        sudo gctrace --all-ruby                            every Ruby on this host, until Ctrl-C\n  \
        sudo gctrace --pid 4242 --duration 30s             one process, for half a minute\n  \
        sudo gctrace --all-ruby --tunemygc sets/           a TuneMyGC sample set per process\n  \
        sudo gctrace --pprof run.pb.gz -- ruby script.rb   a command and all it starts\n  \
        sudo gctrace --pid 4242 --duration 1m -q --flamegraph cpu.svg\n\
        \x20                                                    where a process spends its CPU time\n  \
        sudo gctrace doctor                                what works here, and how to fix the rest\n\n\
        Exit status: 0 done, 1 nothing matched, 2 error or bad usage, 3 missing privilege or kernel feature.\n\
        Standard output carries data, standard error diagnostics (RUST_LOG=debug for more)."
)]
#[command(args_conflicts_with_subcommands = true)]
#[expect(clippy::struct_excessive_bools, reason = "each is a separate flag")]
pub struct Args {
    /// Other things than tracing.
    #[command(subcommand)]
    pub subcommand: Option<Subcommand>,

    /// What to trace.
    #[command(flatten)]
    pub select: SelectArgs,

    /// Name Kubernetes pods by the kubelet's folders below this root (DIR/var/log/pods), e.g. / on a node
    #[arg(long, value_name = "DIR", hide_short_help = true)]
    pub kube_root: Option<PathBuf>,

    /// What to look at.
    #[command(flatten)]
    pub look: LookArgs,

    /// What to write.
    #[command(flatten)]
    pub outputs: OutputArgs,

    /// Also write a recording to this file, from which `gctrace report` can make every output later
    #[arg(long, value_name = "FILE", value_parser = parse::beside())]
    pub record: Option<PathBuf>,

    /// End the run when the recording has this size, e.g. 500MiB; what its end adds (sums of processes) comes on top
    #[arg(long, value_name = "SIZE", value_parser = parse::recorded, requires = "record", conflicts_with = "keep")]
    pub max_size: Option<u64>,

    /// Whether it is kept in memory.
    #[command(flatten)]
    pub keep: KeepArgs,

    /// Where the host's /proc is mounted, if gctrace runs in a container without the host's pids (--pid=host)
    #[arg(long, value_name = "DIR", hide_short_help = true, conflicts_with = "command")]
    pub proc: Option<PathBuf>,

    /// Under sudo, run COMMAND as root and leave files to root, not to the user who called sudo
    #[arg(long)]
    pub as_root: bool,

    /// Send the sample set of each process to this collector, e.g. `http://127.0.0.1:9292` (see `gctrace collector`)
    #[arg(long, value_name = "URL")]
    pub tunemygc_url: Option<String>,

    /// Token of the application that the sets belong to
    #[arg(long, value_name = "TOKEN", env = "RUBY_GC_TOKEN", hide_env_values = true)]
    pub tunemygc_token: Option<String>,

    /// Tokens by unit, control group or user, from a TOML file: `default = "TOKEN"`, and under `[units]`, `[cgroups]` and
    /// `[users]` lines `"NAME" = "TOKEN"`
    #[arg(long, value_name = "FILE", requires = "tunemygc_url", hide_short_help = true)]
    pub tunemygc_tokens: Option<PathBuf>,

    /// Send the set of a process after this many of its GC cycles, too, not only after 10 minutes and when it ends
    #[arg(long, value_name = "N", requires = "tunemygc_url", hide_short_help = true)]
    pub tunemygc_sync_cycles: Option<NonZeroU32>,

    /// The same after this many of its requests and jobs
    #[arg(long, value_name = "N", requires = "tunemygc_url", requires = "requests", hide_short_help = true)]
    pub tunemygc_sync_units: Option<NonZeroU32>,

    /// Keep sets here until the collector has them
    /// [default: /var/lib/gctrace/spool; not as root: ~/.local/state/gctrace/spool]
    #[arg(long, value_name = "DIR", requires = "tunemygc_url", hide_short_help = true)]
    pub tunemygc_spool: Option<PathBuf>,

    /// Serve metrics for Prometheus at this address, e.g. 127.0.0.1:9394 (/metrics, /healthz); a port alone is one on
    /// 127.0.0.1
    #[arg(long, value_name = "ADDR:PORT", value_parser = parse::listen)]
    pub prometheus: Option<std::net::SocketAddr>,

    /// Add a `pid` label to metrics (one set of series per process that ever ran: short-lived use only)
    #[arg(long, requires = "prometheus")]
    pub prometheus_pid: bool,

    /// Send metrics and profiles to this OTLP receiver, e.g. `http://127.0.0.1:4318` or `grpc://127.0.0.1:4317` (with TLS:
    /// https, grpcs); headers are taken from `OTEL_EXPORTER_OTLP_HEADERS`
    #[arg(long, value_name = "URL")]
    pub otlp: Option<String>,

    /// Protocol for http and https addresses of --otlp [default: `OTEL_EXPORTER_OTLP_PROTOCOL`, or http/protobuf]
    #[arg(long, value_enum, value_name = "WHICH", requires = "otlp", hide_short_help = true)]
    pub otlp_protocol: Option<OtlpProtocolArg>,

    /// What --otlp sends; profiles start sampling
    #[arg(
        long,
        value_enum,
        value_name = "WHAT",
        value_delimiter = ',',
        default_value = "metrics,profiles",
        requires = "otlp"
    )]
    pub otlp_signals: Vec<SignalArg>,

    /// Send profiles (this starts sampling) to this Pyroscope, e.g. `http://127.0.0.1:4040`; headers are taken from
    /// `GCTRACE_PYROSCOPE_HEADERS` (Name=value,Name=value)
    #[arg(long, value_name = "URL")]
    pub pyroscope: Option<String>,

    /// How often --otlp and --pyroscope send [default: 60s]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub push_interval: Option<Duration>,

    /// Size of the kernel ring for GC events, e.g. 4MiB; a power of two
    #[arg(long, value_name = "BYTES", value_parser = parse::ring, hide_short_help = true)]
    pub gc_ring: Option<u32>,

    /// Which probes to use (for troubleshooting)
    #[arg(long, value_enum, default_value_t = ProbesArg::Auto, hide_short_help = true)]
    pub probes: ProbesArg,

    /// Inject a fault that the live checks must catch (for tests)
    #[arg(long, value_enum, hide = true)]
    pub inject_fault: Option<Fault>,

    /// Behave as on kernels before 5.15, which have no attach cookies (for tests)
    #[arg(long, hide = true)]
    pub without_cookies: bool,

    /// Behave as on kernels before 6.11, which attach each probe separately (for tests)
    #[arg(long, hide = true)]
    pub without_multi: bool,

    /// Read memory in /proc, as on kernels that do not describe their types (for tests)
    #[arg(long, hide = true)]
    pub without_kernel_memory: bool,

    /// Take the layout of the VM's structures from this unstripped library or separate debug file (repeatable);
    /// it must be of the same build as the traced Ruby
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub layout_from: Vec<PathBuf>,

    /// The cache of analyses.
    #[command(flatten)]
    pub cache: CacheArgs,

    /// Pids: short for --pid
    #[arg(value_name = "PID", hide = true)]
    pub words: Vec<String>,

    /// Start this command and trace it and everything it starts
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// Other things that gctrace does.
#[derive(Debug, clap::Subcommand)]
pub enum Subcommand {
    /// Check what gctrace can do on this host, per Ruby, and how to fix the rest
    Doctor(DoctorArgs),
    /// Count the objects of a running process by type or class
    Heap(heap::HeapArgs),
    /// Count what a process allocates by malloc, by size and age
    Malloc(malloc::MallocArgs),
    /// Show what every Ruby process does right now, on a terminal; `gctrace` alone does that, too
    Top(top::TopArgs),
    /// Print what each thread of a process does right now, with its Ruby stack
    Dump(DumpArgs),
    /// Write everything that is seen to a recording, for `gctrace report`
    Record(record::RecordArgs),
    /// Write a summary, or any output of a run, from a recording
    #[command(visible_alias = "summary")]
    Report(Box<record::ReportFileArgs>),
    /// Compare two recordings: what has changed, and whether that is more than noise
    Diff(diff::DiffArgs),
    /// Show a recording, or a run while it goes on, as a web page on this host
    Serve(serve::ServeArgs),
    /// Show what a recording contains
    Info(diff::InfoArgs),
    /// Write several recordings as one
    Merge(super::copies::MergeArgs),
    /// Copy a recording without names that identify its owner
    Scrub(super::copies::ScrubArgs),
    /// Recommend GC settings from TuneMyGC sample sets
    Tune(TuneArgs),
    /// Write a completion script for a shell to standard output
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write the manual page to standard output (`gctrace man | man -l -`)
    Man,
    /// Receive TuneMyGC sample sets over HTTP, keep them, and answer with recommendations
    #[cfg(feature = "collector")]
    Collector(CollectorArgs),
    /// Add, list and delete the applications of a collector's store
    #[cfg(feature = "collector")]
    Apps(AppsArgs),
}

/// Flags of `gctrace dump`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
        sudo gctrace dump --pid 4242                 its threads and those of its descendants\n  \
        sudo gctrace dump --pid 4242 --format jsonl  the same for scripts\n  \
        sudo gctrace dump --all-ruby                 every Ruby process\n\n\
        Exit status: 0 done, 1 no Ruby process, 2 it could not be read, 3 missing privilege.\n\
        The process is not stopped; the output says for each stack how it was read.")]
#[command(group(clap::ArgGroup::new("selected").required(true).multiple(true)
    .args(["pids", "all_ruby", "words", "names", "units", "cgroups", "containers"])))]
pub struct DumpArgs {
    /// This process and its descendants (repeatable)
    #[arg(long = "pid", short = 'p', value_name = "PID", value_parser = parse::pids)]
    pub pids: Vec<Pids>,

    /// Every Ruby process
    #[arg(long)]
    pub all_ruby: bool,

    /// Names and groups.
    #[command(flatten)]
    pub running: RunningArgs,

    /// Also print native frames (C functions, libraries) of threads that sleep, and threads that are not Ruby threads
    #[arg(long)]
    pub native: bool,

    /// What to write to standard output
    #[arg(long, value_enum, default_value_t = FormatArg::Text)]
    pub format: FormatArg,

    /// Where the host's /proc is mounted, if gctrace runs in a container without the host's pids
    #[arg(long, value_name = "DIR", hide_short_help = true)]
    pub proc: Option<PathBuf>,

    /// The cache of analyses.
    #[command(flatten)]
    pub cache: CacheArgs,

    /// Pids: short for --pid
    #[arg(value_name = "PID", value_parser = parse::pids, hide = true)]
    pub words: Vec<Pids>,
}

/// Flags of `gctrace tune`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
        gctrace tune sets/                   one report per process of what `gctrace --tunemygc sets/` wrote\n  \
        gctrace tune --together sets/        all sets are of the same program: one report per Ruby\n  \
        gctrace tune --format json set.json  for scripts\n\n\
        Exit status: 0 done, 2 something could not be read.\n\
        Without enough data there is no recommendation; the report says what is missing.")]
pub struct TuneArgs {
    /// Sample sets, or directories with sample sets (files that end in .json)
    #[arg(value_name = "DIR|FILE", required = true)]
    pub paths: Vec<PathBuf>,

    /// What to write to standard output
    #[arg(long, value_enum, default_value_t = DocumentArg::Text)]
    pub format: DocumentArg,

    /// Treat all sets of one series of Ruby as those of one program; advice is for the latest settings in force
    #[arg(long)]
    pub together: bool,
}

/// `--format` of commands that write one document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DocumentArg {
    /// Text
    Text,
    /// One JSON document
    Json,
}

/// Flags of `gctrace doctor`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
        sudo gctrace doctor                            this host, every Ruby that runs or is installed\n  \
        sudo gctrace doctor 4242 -v                    one process, with every check\n  \
        sudo gctrace doctor --unit puma.service        why (not) the processes of a unit\n  \
        sudo gctrace doctor /opt/rubies/3.4/bin/ruby   an installed Ruby, running or not\n\n\
        Exit status: 0 everything works, 1 nothing matched, 2 something does not work, 3 missing privilege or kernel \
        feature.\n\
        Nothing is attached to any Ruby, nothing is stopped.")]
pub struct DoctorArgs {
    /// Every Ruby, running or installed [default, if nothing else is given]
    #[arg(long)]
    pub all_ruby: bool,

    /// This process (repeatable)
    #[arg(long = "pid", short = 'p', value_name = "PID", value_parser = parse::pids)]
    pub pids: Vec<Pids>,

    /// Other running processes.
    #[command(flatten)]
    pub running: RunningArgs,

    /// Where the host's /proc is mounted, if gctrace runs in a container without the host's pids
    #[arg(long, value_name = "DIR", hide_short_help = true)]
    pub proc: Option<PathBuf>,

    /// Ruby images or executables, or pids
    #[arg(value_name = "FILE|PID")]
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

    /// Analyse every Ruby image again and store no analyses
    #[arg(long, hide_short_help = true)]
    pub no_cache: bool,
}

/// `--probes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ProbesArg {
    /// The VM's event sites; for images without, functions by symbol or USDT probes
    Auto,
    /// The VM's event sites only
    Sites,
    /// Functions by symbol only: reports only how long they run
    Functions,
    /// USDT probes only: reports only pauses (Ruby 4.1), or marking and sweeping
    Usdt,
}

/// `--tunemygc-dialect`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DialectArg {
    /// 11 elements, as in the protocol's text
    Spec,
    /// 12 elements, as in the protocol's agent
    Agent,
}

/// `--otlp-protocol`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OtlpProtocolArg {
    /// gRPC
    Grpc,
    /// HTTP/1.1
    #[value(name = "http/protobuf")]
    Http,
}

/// `--otlp-signals`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SignalArg {
    /// Figures by service
    Metrics,
    /// Stacks by process
    Profiles,
}

/// `--stack-root`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RootArg {
    /// The process
    Process,
    /// The process, then the thread by its name
    Thread,
    /// The endpoint of the request that the thread serves (needs --requests): all processes together
    Endpoint,
    /// Nothing: the stacks of all processes together
    None,
}

impl From<RootArg> for Grouping {
    fn from(root: RootArg) -> Self {
        match root {
            RootArg::Process => Self::Process,
            RootArg::Thread => Self::Thread,
            RootArg::Endpoint => Self::Endpoint,
            RootArg::None => Self::None,
        }
    }
}

/// `--format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FormatArg {
    /// Lines of text
    Text,
    /// One JSON object per line
    Jsonl,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    /// The definition is consistent.
    #[test]
    fn definition() {
        Args::command().debug_assert();
    }
}

/// How the GVL is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GvlArg {
    /// By probes in the program: everything
    Exact,
    /// By the kernel's futexes: only waits for which a thread had to block
    Futex,
}
