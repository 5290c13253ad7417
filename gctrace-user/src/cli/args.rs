//! Flags as they are written. Parsing does nothing but parse.

use std::{num::NonZeroU32, path::PathBuf, time::Duration};

#[cfg(feature = "collector")]
use super::collector::{AppsArgs, CollectorArgs};
use super::{
    parse::{self, Pids},
    reports::ReportArgs,
    select_args::SelectArgs,
};
use crate::discover::Fault;
use clap::{Args as ClapArgs, Parser, ValueEnum};

/// Trace garbage collection, GVL contention and CPU time of running Ruby processes, from outside
#[derive(Debug, Parser)]
#[command(
    name = "gctrace",
    version,
    after_help = "Examples:\n  \
        sudo gctrace --all-ruby                          every Ruby on this host, until Ctrl-C\n  \
        sudo gctrace --pid 4242 --duration 30s           one process, for half a minute\n  \
        sudo gctrace --all-ruby --tunemygc sets/         a TuneMyGC sample set per process\n  \
        sudo gctrace --pprof run.pb.gz -- ruby script.rb  a command and all it starts\n  \
        sudo gctrace --pid 4242 --duration 1m -q --flamegraph cpu.svg\n\
        \x20                                                  where a process spends its CPU time\n  \
        sudo gctrace doctor                              what works here, and how to fix the rest\n\n\
        Exit status: 0 done, 1 nothing matched, 2 error or bad usage, 3 missing privilege or kernel feature.\n\
        Standard output carries data, standard error diagnostics (RUST_LOG=debug for more)."
)]
#[command(args_conflicts_with_subcommands = true)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
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

    /// Where the host's /proc is mounted, if gctrace runs in a container without the host's pids (--pid=host)
    #[arg(long, value_name = "DIR", hide_short_help = true, conflicts_with = "command")]
    pub proc: Option<PathBuf>,

    /// (JSON lines only) Report PSS and private dirty memory after a cycle, at most once per second and process: what collections
    /// cost the workers of a server that forks
    #[arg(long)]
    pub shares: bool,

    /// Stop after this time, e.g. 500ms, 30s, 1m30s, 1d [default: until Ctrl-C or the end of COMMAND]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub duration: Option<Duration>,

    /// What to write to standard output
    #[arg(long, value_enum, default_value_t = FormatArg::Text)]
    pub format: FormatArg,

    /// Write lines to this file instead of standard output. It is emptied first, and grows while the run goes on
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// Under sudo, run COMMAND as root and leave files to root, not to the user who called sudo
    #[arg(long)]
    pub as_root: bool,

    /// How much of it.
    #[command(flatten)]
    pub reports: ReportArgs,

    /// Write a TuneMyGC sample set per process to this directory
    #[arg(long, value_name = "DIR")]
    pub tunemygc: Option<PathBuf>,

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

    /// Header variant of sample sets: `spec` (11 elements) or `agent` (12, as the gem sends)
    #[arg(long, value_enum, value_name = "WHICH", default_value_t = DialectArg::Spec, hide_short_help = true)]
    pub tunemygc_dialect: DialectArg,

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

    /// What http and https addresses of --otlp speak [default: `OTEL_EXPORTER_OTLP_PROTOCOL`, or http/protobuf]
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

    /// How often --otlp and --pyroscope send
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse::duration)]
    pub push_interval: Duration,

    /// Write CPU time and GC pauses by stack as a pprof profile, e.g. run.pb.gz (open with `go tool pprof`)
    #[arg(long, value_name = "FILE")]
    pub pprof: Option<PathBuf>,

    /// Draw a flame graph, e.g. cpu.svg (open in a browser)
    #[arg(long, value_name = "FILE")]
    pub flamegraph: Option<PathBuf>,

    /// Write collapsed stacks, e.g. cpu.folded: a line `root;caller;leaf NANOSECONDS` per stack
    #[arg(long, value_name = "FILE")]
    pub folded: Option<PathBuf>,

    /// Write a profile for speedscope (www.speedscope.app), e.g. run.speedscope.json
    #[arg(long, value_name = "FILE")]
    pub speedscope: Option<PathBuf>,

    /// Write a timeline with GC markers and memory for the Firefox Profiler (profiler.firefox.com), e.g. run.json.gz
    #[arg(long, value_name = "FILE")]
    pub firefox: Option<PathBuf>,

    /// Root frame of each stack of --flamegraph and --folded
    #[arg(
        long,
        value_enum,
        default_value_t = RootArg::Process,
        value_name = "WHAT",
    )]
    pub stack_root: RootArg,

    /// Sample what the threads do this often per second and CPU, 1 to 999 [default: 99 where an output wants stacks]
    #[arg(long, value_name = "HZ", value_parser = parse::rate)]
    pub rate: Option<u32>,

    /// Leave native frames (the VM itself, C extensions, libraries) out of stacks
    #[arg(long)]
    pub no_native: bool,

    /// Also profile threads while they sleep, block or wait for a CPU
    #[arg(long)]
    pub wall: bool,

    /// Ignore waits shorter than this [default: 1ms]
    #[arg(long, value_name = "TIME", requires = "wall", value_parser = parse::duration)]
    pub off_cpu_min: Option<Duration>,

    /// Take about this many stacks of threads off their CPU per second and CPU, chosen at random [default: 1000]
    #[arg(long, value_name = "N", requires = "wall", value_parser = clap::value_parser!(u32).range(10..=100_000))]
    pub off_cpu_stacks: Option<u32>,

    /// Trace the GVL: how long threads wait for it, how long they hold it, and who waits for whom (exact). Adds about 1 µs each
    /// time a thread requests, acquires or releases the GVL. --gvl=futex sets no probe in the program and reports only waits
    /// that blocked, and no holds
    #[arg(
        long,
        value_enum,
        value_name = "HOW",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "exact"
    )]
    pub gvl: Option<GvlArg>,

    /// Report each wait for the GVL that takes at least this long [default: 1ms]
    #[arg(long, value_name = "TIME", requires = "gvl", value_parser = parse::duration)]
    pub gvl_threshold: Option<Duration>,

    /// Maximum CPU cost of --gvl in percent (of the host, and of one CPU per process). Above it gctrace first samples single
    /// waits, then everything, then stops; each step is reported [default: 0.2, with --duration 1]
    #[arg(long, value_name = "PERCENT", requires = "gvl", value_parser = parse::percent)]
    pub gvl_budget: Option<u64>,

    /// Trace the HTTP requests of Puma on TCP: endpoint, status, duration, and the GC cycles and pauses of each. Reports the
    /// path without ids, and never query, headers or bodies. Adds about 7 µs to each request
    #[arg(long)]
    pub requests: bool,

    /// Size of the kernel ring for requests (for tests)
    #[arg(long, value_name = "BYTES", value_parser = parse::ring, hide = true)]
    pub request_ring: Option<u32>,

    /// (JSON lines only) Count allocated objects exactly, by slot size, once a second. A loop of Object.new took 1.08 times its
    /// CPU time on Ruby 3.1
    #[arg(long, hide_short_help = true)]
    pub alloc: bool,

    /// Write a trace for Perfetto (ui.perfetto.dev), e.g. run.pftrace: GC pauses and cycles, and with --gvl what each
    /// thread did with the GVL
    #[arg(long, value_name = "FILE")]
    pub perfetto: Option<PathBuf>,

    /// Write each stack as one JSON object per line to this file (for tests)
    #[arg(long, value_name = "FILE", hide = true)]
    pub stack_log: Option<PathBuf>,

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

    /// Behave as on kernels before 6.11, which attach each probe by itself (for tests)
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
    pub command: Vec<String>,
}

/// Other things that gctrace does.
#[derive(Debug, clap::Subcommand)]
pub enum Subcommand {
    /// Check what gctrace can do on this host, per Ruby, and how to fix the rest
    Doctor(DoctorArgs),
    /// Count the objects of a running process by type or class
    Heap(super::heap_args::HeapArgs),
    /// Show what every Ruby process does right now, on a terminal; `gctrace` alone does that, too
    Top(super::top_args::TopArgs),
    /// Print what each thread of a process does right now, with its Ruby stack
    Dump(DumpArgs),
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
        The process is not stopped; of each stack is said how it was read.")]
pub struct DumpArgs {
    /// This process and its descendants (repeatable)
    #[arg(
        long = "pid",
        short = 'p',
        value_name = "PID",
        value_parser = parse::pids,
        required_unless_present_any = ["all_ruby", "words"]
    )]
    pub pids: Vec<Pids>,

    /// Every Ruby process
    #[arg(long)]
    pub all_ruby: bool,

    /// Also the threads that are no Ruby threads
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
        Nothing is recommended where the data do not suffice; the report says what is missing.")]
pub struct TuneArgs {
    /// Sample sets, or directories with sample sets (files that end in .json)
    #[arg(value_name = "DIR|FILE", required = true)]
    pub paths: Vec<PathBuf>,

    /// What to write to standard output
    #[arg(long, value_enum, default_value_t = TuneFormatArg::Text)]
    pub format: TuneFormatArg,

    /// Take all sets of one series of Ruby together, as those of one program
    #[arg(long)]
    pub together: bool,
}

/// `gctrace tune --format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TuneFormatArg {
    /// For people
    Text,
    /// One JSON document
    Json,
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
    #[arg(long = "pid", short = 'p', value_name = "PID", value_parser = parse::pids)]
    pub pids: Vec<Pids>,

    /// Where the host's /proc is mounted, if gctrace runs in a container without the host's pids
    #[arg(long, value_name = "DIR", hide_short_help = true)]
    pub proc: Option<PathBuf>,

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
    /// USDT probes or nothing: only pauses (Ruby 4.1), or marking and sweeping
    Usdt,
}

/// `--tunemygc-dialect`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DialectArg {
    /// 11 elements, as the protocol's text says
    Spec,
    /// 12 elements, as the protocol's agent does
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
    /// Nothing: the stacks of all processes together
    None,
}

/// `--format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FormatArg {
    /// Lines for people
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
