//! Flags resolved to what the run does.

use std::{num::NonZeroU32, path::PathBuf, time::Duration};

use gctrace_common::request::REQUEST_RING_BYTES;

use super::reports::{Idle, Reports};
use super::{
    args::{Args, CacheArgs, DialectArg, FormatArg, GvlArg, OtlpProtocolArg, ProbesArg, RootArg, SignalArg},
    parse::{self, Pids},
    select_args::SelectArgs,
};
use crate::{
    bpf::{GvlOptions, StackOptions},
    cache,
    discover::{Fault, Selection},
    export::{
        profile::{self, Grouping},
        push::Servers,
        tunemygc::{self, Dialect, Target, Tokens},
        upload::{Address, Protocol},
    },
    model::MemorySource,
    ruby::fallback::{METHODS, Method, USDT_METHODS},
};

/// Ticks per second and CPU where nothing else is said: no multiple of the frequencies at which programs do things.
const DEFAULT_RATE: u32 = 99;
/// How long a thread must be off its CPU to be reported where nothing else is said.
const DEFAULT_OFF_CPU_MIN: Duration = Duration::from_millis(1);

/// From when on a wait for the GVL is reported where nothing else is said.
const DEFAULT_GVL_THRESHOLD: Duration = Duration::from_millis(1);
/// Default budget of --gvl: estimated CPU share, millionths. A busy Puma loses some three times as much,
/// because what delays a hand-over delays everybody who waits.
const DEFAULT_GVL_BUDGET: u64 = 2_000;
/// The same for a run of limited duration (`--duration`), where seeing more is worth more.
const DEFAULT_GVL_BUDGET_OF_SOME_TIME: u64 = 10_000;

/// What goes to standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Lines for people.
    Text,
    /// JSON lines.
    Jsonl,
}

/// How `gctrace top` shows what it knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Show {
    /// On a terminal, until the user ends it.
    Screen,
    /// One table at the end.
    Text,
    /// One JSON object per row at the end.
    Jsonl,
}

/// Where metrics are served, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metrics {
    /// Address and port.
    pub address: std::net::SocketAddr,
    /// Whether processes are told apart.
    pub by_pid: bool,
}

/// A run.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub struct Settings {
    /// Which processes.
    pub selection: Selection,
    /// The run is a `gctrace top`: how it is shown.
    pub top: Option<Show>,
    /// Root of the kubelet's files, by which pods are named.
    pub kube_root: Option<PathBuf>,
    /// Whether it is read how memory is shared.
    pub shares: bool,
    /// For how long.
    pub duration: Option<Duration>,
    /// Where they are written; `None`: to standard output.
    pub output: Option<PathBuf>,
    /// Whether a command runs as root and files are root's, although `sudo` was called by somebody else.
    pub as_root: bool,
    /// Standard output.
    pub reports: Reports,
    /// Flags that change nothing, and why.
    pub notes: Vec<&'static str>,
    /// Whether the hottest methods are printed at the end.
    pub hottest: bool,
    /// Directory for sample sets.
    pub tunemygc: Option<PathBuf>,
    /// Where sample sets are sent.
    pub tunemygc_target: Option<Target>,
    /// How the headers of sample sets are written.
    pub tunemygc_dialect: Dialect,
    /// Where metrics are served.
    pub prometheus: Option<Metrics>,
    /// Where is pushed.
    pub push: Servers,
    /// Files for profiles.
    pub profiles: Vec<(PathBuf, profile::Format)>,
    /// Which stacks are taken besides those of GC starts.
    pub stacks: Option<StackOptions>,
    /// Whether and how the GVL is watched.
    pub gvl: Option<GvlOptions>,
    /// Bytes of the ring of requests, if they are seen.
    pub requests: Option<u32>,
    /// Whether allocation is counted.
    pub alloc: bool,
    /// File for each stack.
    pub stack_log: Option<PathBuf>,
    /// How GC work is seen, in order of preference.
    pub methods: &'static [Method],
    /// A fault to inject into every plan.
    pub fault: Option<Fault>,
    /// Use attach cookies where the kernel has them.
    pub cookies: bool,
    /// Attach many probes by one link where the kernel can.
    pub multi: bool,
    /// Where memory is read if it can be.
    pub memory: MemorySource,
    /// Size of the GC ring, bytes.
    pub gc_ring_bytes: Option<u32>,
    /// Debug files that tell layouts.
    pub layout_from: Vec<PathBuf>,
    /// Where analyses are kept; `None`: nowhere.
    pub cache_dir: Option<PathBuf>,
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
    #[error(
        "nothing is selected: give --all-ruby, --pid PID, --name NAME, --unit UNIT, --cgroup PATH, --container NAME or -- COMMAND (see gctrace \
         --help)"
    )]
    NothingSelected,
    /// Two outputs would overwrite each other.
    #[error("{} is named for two outputs; give each its own file", .0.display())]
    SameFile(PathBuf),
    /// A profile for standard output.
    #[error("profiles are written to files, not to standard output: name a file instead of `-`")]
    Dash,
    /// It is not known where sample sets go.
    #[error("--tunemygc-url: `{0}` is no http:// or https:// address")]
    Url(String),
    /// It is not known where is pushed.
    #[error("{0}: `{1}` is no http:// or https:// address")]
    Server(&'static str, String),
    /// The same, of OTLP.
    #[error("--otlp: {0}")]
    Otlp(String),
    /// It is not known whose sample sets are.
    #[error(
        "--tunemygc-url needs the token of an application: give --tunemygc-token or set RUBY_GC_TOKEN (a collector \
         makes one: curl -d email=you@example.com -d app=NAME URL/accounts)"
    )]
    NoToken,
    /// The file of tokens cannot be used.
    #[error("--tunemygc-tokens: {}: {reason}", path.display())]
    Tokens {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// There is no place for sets that wait.
    #[error("--tunemygc-url needs a directory for sets that wait: give --tunemygc-spool")]
    NoSpool,
    /// A cgroup or container without a name, as from a variable that is not set.
    #[error("--name, --unit, --cgroup and --container need a value that is not empty")]
    EmptyGroup,
    /// A word that is no flag, no subcommand and no pid.
    #[error("{}", unknown_word(.0))]
    Word(String),
    /// There is nothing to draw on.
    #[error("gctrace top needs a terminal; `gctrace top --once` prints one table")]
    NoTerminal,
    /// The selection of `gctrace top` is none.
    #[error("{0}")]
    Top(String),
    /// gctrace cannot trace itself.
    #[error("--pid {0} is gctrace itself, which is never traced")]
    OwnPid(u32),
}

/// What other tracers call what gctrace does without a subcommand.
const SUBCOMMANDS_OF_OTHERS: [&str; 7] = ["attach", "record", "report", "run", "snapshot", "stat", "trace"];

/// What to do about a word that is no subcommand and no pid.
fn unknown_word(word: &str) -> String {
    if word.starts_with(|c: char| c.is_ascii_digit()) {
        return format!("`{word}` is no pid");
    }
    if SUBCOMMANDS_OF_OTHERS.contains(&word) {
        return format!("there is no subcommand `{word}` (see gctrace --help)");
    }
    format!(
        "`{word}` is neither a pid nor a subcommand; did you mean `--name {word}`, to trace the programs of that name, or \
         `-- {word}`, to start it?"
    )
}

/// The pids of several flags, each once.
pub(super) fn merged(pids: Vec<Pids>) -> Vec<u32> {
    let mut pids: Vec<u32> = pids.into_iter().flat_map(|Pids(pids)| pids).collect();
    pids.sort_unstable();
    pids.dedup();
    pids
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
            select: SelectArgs { all_ruby, mut pids, only_pids, names, units, cgroups, containers },
            words,
            kube_root,
            proc: _,
            shares,
            duration,
            format,
            output,
            as_root,
            reports,
            tunemygc,
            tunemygc_url,
            tunemygc_token,
            tunemygc_tokens,
            tunemygc_sync_cycles,
            tunemygc_dialect,
            tunemygc_spool,
            prometheus,
            prometheus_pid,
            otlp,
            otlp_protocol,
            otlp_signals,
            pyroscope,
            push_interval,
            pprof,
            flamegraph,
            folded,
            speedscope,
            firefox,
            stack_root,
            rate,
            no_native,
            wall,
            off_cpu_min,
            off_cpu_stacks,
            gvl,
            gvl_threshold,
            gvl_budget,
            requests,
            request_ring,
            alloc,
            perfetto,
            stack_log,
            gc_ring,
            probes,
            inject_fault: fault,
            without_cookies,
            without_multi,
            without_kernel_memory,
            layout_from,
            cache,
            command,
        } = args;
        for word in words {
            pids.push(parse::pids(&word).map_err(|_| UsageError::Word(word))?);
        }
        let pids = merged(pids);
        let mut only_pids = merged(only_pids);
        if pids.contains(&own_pid) || only_pids.contains(&own_pid) {
            return Err(UsageError::OwnPid(own_pid));
        }
        only_pids.retain(|pid| !pids.contains(pid));
        let command = (!command.is_empty()).then_some(command);
        if [&names, &units, &containers].iter().any(|list| list.iter().any(String::is_empty))
            || cgroups.iter().any(|path| path.as_os_str().is_empty())
        {
            return Err(UsageError::EmptyGroup);
        }
        let selection =
            Selection { all: all_ruby, pids, only_pids, names, cgroups, units, containers, command };
        if selection.is_empty() {
            return Err(UsageError::NothingSelected);
        }
        let root = match stack_root {
            RootArg::Process => Grouping::Process,
            RootArg::Thread => Grouping::Thread,
            RootArg::None => Grouping::None,
        };
        let profiles: Vec<(PathBuf, profile::Format)> = [
            (pprof, profile::Format::Pprof),
            (flamegraph, profile::Format::FlameGraph(root)),
            (folded, profile::Format::Folded(root)),
            (speedscope, profile::Format::Speedscope),
            (firefox, profile::Format::Firefox),
            (perfetto, profile::Format::Perfetto),
        ]
        .into_iter()
        .filter_map(|(path, format)| Some((path?, format)))
        .collect();
        // `-` is standard output by custom.
        let output = output.filter(|path| path.as_os_str() != "-");
        let files: Vec<&PathBuf> = profiles.iter().map(|(path, _)| path).chain(&output).collect();
        for (at, path) in files.iter().enumerate() {
            if path.as_os_str() == "-" {
                return Err(UsageError::Dash);
            }
            if files[..at].contains(path) {
                return Err(UsageError::SameFile((*path).clone()));
            }
        }
        let server = |flag, url: Option<String>| match url {
            None => Ok(None),
            Some(url) => Address::http(&url).map(Some).ok_or(UsageError::Server(flag, url)),
        };
        let otlp_protocol = otlp_protocol.map(|protocol| match protocol {
            OtlpProtocolArg::Grpc => Protocol::Grpc,
            OtlpProtocolArg::Http => Protocol::Http,
        });
        let usual = std::env::var("OTEL_EXPORTER_OTLP_PROTOCOL").ok();
        let otlp = otlp.map(|url| Address::otlp(&url, otlp_protocol, usual.as_deref()));
        let push = Servers {
            otlp: otlp.transpose().map_err(UsageError::Otlp)?,
            metrics: otlp_signals.contains(&SignalArg::Metrics),
            profiles: otlp_signals.contains(&SignalArg::Profiles),
            pyroscope: server("--pyroscope", pyroscope)?,
            interval: push_interval,
            wall,
        };
        let sampled = profiles.iter().any(|(_, format)| format.has_samples());
        let wants_stacks = sampled || rate.is_some() || wall || stack_log.is_some() || push.wants_stacks();
        let gvl = gvl.map(|how| GvlOptions {
            futex: how == GvlArg::Futex,
            threshold: gvl_threshold.unwrap_or(DEFAULT_GVL_THRESHOLD),
            spans: profiles.iter().any(|(_, format)| format.has_gvl_states()),
            budget_ppm: gvl_budget.unwrap_or(match duration {
                Some(_) => DEFAULT_GVL_BUDGET_OF_SOME_TIME,
                None => DEFAULT_GVL_BUDGET,
            }),
        });
        let text = format == FormatArg::Text;
        let has = |test: fn(&profile::Format) -> bool| profiles.iter().any(|(_, format)| test(format));
        let idle = Idle {
            text,
            shares,
            brief: reports.brief,
            interval: reports.interval.is_some(),
            slower_than: reports.slower_than.is_some(),
            wall,
            no_native,
            root: stack_root,
            shows_wall: sampled || push.wants_stacks() || stack_log.is_some(),
            shows_native: sampled || push.wants_stacks() || stack_log.is_some(),
            shows_roots: has(|format| {
                matches!(format, profile::Format::FlameGraph(_) | profile::Format::Folded(_))
            }),
        };
        let reports = Reports::resolve(&reports, format.into());
        Ok(Self {
            selection,
            top: None,
            kube_root,
            shares,
            duration,
            output,
            as_root,
            notes: idle.notes(),
            // Asked for with --rate, or what a run with stacks shows beside its cycles.
            hottest: text && (rate.is_some() || (reports.streams() && wants_stacks)),
            reports,
            tunemygc,
            tunemygc_target: target(
                tunemygc_url,
                tunemygc_token,
                tunemygc_tokens,
                tunemygc_spool,
                tunemygc_sync_cycles,
            )?,
            tunemygc_dialect: match tunemygc_dialect {
                DialectArg::Spec => Dialect::Spec,
                DialectArg::Agent => Dialect::Agent,
            },
            prometheus: prometheus.map(|address| Metrics { address, by_pid: prometheus_pid }),
            push,
            stacks: wants_stacks.then(|| StackOptions {
                rate: rate.unwrap_or(DEFAULT_RATE),
                wall,
                off_cpu_min: off_cpu_min.unwrap_or(DEFAULT_OFF_CPU_MIN),
                off_cpu_stacks: off_cpu_stacks.unwrap_or(StackOptions::OFF_CPU_STACKS),
                native: !no_native && cfg!(target_arch = "x86_64"),
                only_blockers: false,
            }),
            profiles,
            gvl,
            requests: requests.then_some(request_ring.unwrap_or(REQUEST_RING_BYTES)),
            alloc,
            stack_log,
            gc_ring_bytes: gc_ring,
            methods: match probes {
                ProbesArg::Auto => &METHODS,
                ProbesArg::Sites => &[Method::Sites],
                ProbesArg::Functions => &[Method::Functions],
                ProbesArg::Usdt => &USDT_METHODS,
            },
            fault,
            cookies: !without_cookies,
            multi: !without_multi,
            memory: if without_kernel_memory { MemorySource::Proc } else { MemorySource::Kernel },
            layout_from,
            cache_dir: cache.dir(),
        })
    }

    /// Whether any output tells what is counted while the run goes on.
    pub fn wants_accounts(&self) -> bool {
        self.prometheus.is_some() || self.push.any() || self.top.is_some()
    }

    /// Whether lines go to standard output.
    pub fn data_on_stdout(&self) -> bool {
        self.output.is_none() && (self.reports.streams() || self.reports.format == Format::Jsonl)
    }

    /// Whether anything is written to files.
    pub fn writes(&self) -> bool {
        self.tunemygc.is_some()
            || self.output.is_some()
            || self.tunemygc_target.is_some()
            || !self.profiles.is_empty()
            || self.stack_log.is_some()
            || self.cache_dir.is_some()
    }

    /// Whether any output shows stacks; else none are taken but those that start a GC.
    pub fn wants_stacks(&self) -> bool {
        self.stacks.is_some()
    }
}

/// Where sample sets are sent, if anywhere.
fn target(
    url: Option<String>,
    token: Option<String>,
    file: Option<PathBuf>,
    spool: Option<PathBuf>,
    cycles: Option<NonZeroU32>,
) -> Result<Option<Target>, UsageError> {
    let Some(url) = url else { return Ok(None) };
    let mut tokens = match file {
        None => Tokens::default(),
        Some(path) => Tokens::read(&path).map_err(|reason| UsageError::Tokens { path, reason })?,
    };
    if tokens.default.is_none() {
        tokens.default = token.filter(|token| !token.is_empty());
    }
    if tokens.is_empty() {
        return Err(UsageError::NoToken);
    }
    Ok(Some(Target {
        url: Target::url(&url).ok_or(UsageError::Url(url))?,
        tokens,
        spool: spool.or_else(tunemygc::default_spool).ok_or(UsageError::NoSpool)?,
        cycles,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    fn resolve(words: &[&str]) -> Result<Settings, UsageError> {
        Settings::resolve(Args::try_parse_from(words).unwrap(), 77)
    }

    /// Every profile wants stacks, and each has a file of its own.
    #[test]
    fn profiles() {
        let run = |flags: &[&str]| resolve(&[&["gctrace", "--all-ruby"], flags].concat());
        assert!(!run(&["--tunemygc", "sets"]).unwrap().wants_stacks());
        for flag in ["--pprof", "--flamegraph", "--folded", "--speedscope", "--firefox"] {
            assert!(run(&[flag, "file"]).unwrap().wants_stacks(), "{flag}");
        }
        assert!(!run(&["--perfetto", "file"]).unwrap().wants_stacks(), "no samples in it");
        let spans = |flag| run(&["--gvl", flag, "file"]).unwrap().gvl.unwrap().spans;
        assert!(spans("--perfetto") && spans("--firefox") && !spans("--pprof"));
        let same = run(&["--folded", "a", "--pprof", "b", "--firefox", "a"]);
        assert_eq!(same.unwrap_err(), UsageError::SameFile("a".into()));
        assert_eq!(run(&["--pprof", "a", "-o", "a"]).unwrap_err(), UsageError::SameFile("a".into()));
        assert_eq!(run(&["--flamegraph", "-"]).unwrap_err(), UsageError::Dash);
        assert!(run(&["-o", "-"]).unwrap().data_on_stdout() && !run(&["-o", "a"]).unwrap().data_on_stdout());
    }

    /// Sample sets are sent only where a URL says so, and never without a token.
    #[test]
    fn sending() {
        let run = |flags: &[&str]| resolve(&[&["gctrace", "--all-ruby"], flags].concat());
        assert_eq!(run(&["--tunemygc-token", "t"]).unwrap().tunemygc_target, None);
        let url = ["--tunemygc-url", "http://localhost:1/ruby"];
        assert_eq!(run(&[&url[..], &["--tunemygc-token", ""]].concat()).unwrap_err(), UsageError::NoToken);
        let flags = ["--tunemygc-token", "t", "--tunemygc-spool", "/s", "--tunemygc-sync-cycles", "9"];
        let target = run(&[&url[..], &flags].concat()).unwrap();
        let tokens = Tokens { default: Some("t".into()), ..Tokens::default() };
        let cycles = NonZeroU32::new(9);
        let expected = Target { url: "http://localhost:1".into(), tokens, spool: "/s".into(), cycles };
        assert_eq!(target.tunemygc_target, Some(expected));
        let wrong = run(&["--tunemygc-url", "localhost:1", "--tunemygc-token", "t"]);
        assert_eq!(wrong.unwrap_err(), UsageError::Url("localhost:1".into()));
    }

    /// Selectors form a union; none, or gctrace itself, is bad usage.
    #[test]
    fn selection() {
        let run =
            resolve(&["gctrace", "--pid", "5", "--pid", "4", "--pid", "5", "--", "ruby", "-v"]).unwrap();
        assert_eq!(run.selection.pids, [4, 5]);
        assert_eq!(run.selection.command.unwrap(), ["ruby", "-v"]);
        let run =
            resolve(&["gctrace", "9", "8", "-p", "7,6", "--only-pid", "6,5", "--name", "puma"]).unwrap();
        assert_eq!((run.selection.pids, run.selection.only_pids), (vec![6, 7, 8, 9], vec![5]));
        assert_eq!(run.selection.names, ["puma"]);
        let unknown = |word: &str| resolve(&["gctrace", word]).unwrap_err().to_string();
        assert!(unknown("puma").contains("--name puma") && unknown("puma").contains("-- puma"));
        assert!(!unknown("trace").contains("--name"));
        assert_eq!(resolve(&["gctrace"]).unwrap_err(), UsageError::NothingSelected);
        for flag in ["--name", "--unit", "--container"] {
            assert_eq!(resolve(&["gctrace", flag, ""]).unwrap_err(), UsageError::EmptyGroup, "{flag}");
        }
        assert_eq!(resolve(&["gctrace", "--pid", "77"]).unwrap_err(), UsageError::OwnPid(77));
    }
}
