//! Flags resolved to the settings of a run.

use std::{
    collections::HashSet,
    fs,
    num::{NonZeroU32, NonZeroU64},
    path::{Path, PathBuf},
    time::Duration,
};

use super::{
    args::{
        Args, CacheArgs, DialectArg, FormatArg, GvlArg, OtlpProtocolArg, ProbesArg, RootArg, SignalArg,
        look::LookArgs, output::OutputArgs, select::SelectArgs, usage::UsageError,
    },
    parse::{self, Pids},
    reports::{Format, Idle, Reports},
};
use crate::{
    aggregate::recording::Filter,
    bpf::{GvlOptions, RequestOptions, StackOptions},
    cache,
    discover::{Fault, Selection},
    export::{
        digest::Recorded,
        profile::{self, Graph},
        push::Servers,
        tunemygc::{self, Dialect, Target, Tokens},
        upload::{Address, Protocol, shown},
    },
    host::names::PODS,
    model::MemorySource,
    ruby::{
        fallback::{METHODS, Method, USDT_METHODS},
        plan::OptionalEvent,
    },
    trace_file::{Keep, Trigger},
};

/// Default number of samples per second and CPU: not a multiple of the frequencies at which programs do periodic work.
const DEFAULT_RATE: u32 = 99;
/// Default interval at which metrics and profiles are pushed.
const DEFAULT_PUSH_INTERVAL: Duration = Duration::from_mins(1);
/// Default minimum off-CPU time of a thread to be reported.
const DEFAULT_OFF_CPU_MIN: Duration = Duration::from_millis(1);

/// Default threshold of GVL waits: shorter ones are not reported individually.
const DEFAULT_GVL_THRESHOLD: Duration = Duration::from_millis(1);
/// Default of --gvl-budget: estimated CPU share, millionths. A busy Puma loses about three times as much,
/// because a delay of a hand-over delays every waiting thread.
const DEFAULT_GVL_BUDGET: u64 = 2_000;
/// The same for a run of limited duration (`--duration`), for which completeness is worth a higher cost.
const DEFAULT_GVL_BUDGET_OF_SOME_TIME: u64 = 10_000;

/// How `gctrace top` presents its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Show {
    /// On a terminal, until the user quits.
    Screen {
        /// Whether the mouse is used.
        mouse: bool,
    },
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
    /// Whether series are per process.
    pub by_pid: bool,
}

/// A web page that shows a run in progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Live {
    /// A loopback address.
    pub listen: std::net::SocketAddr,
    /// Whether a browser is started.
    pub open: bool,
    /// How long events are kept, nanoseconds.
    pub keep_ns: u64,
    /// Limit of the kept events, compressed bytes.
    pub keep_bytes: u64,
}

/// Settings of a run.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a separate flag")]
pub struct Settings {
    /// Processes to trace.
    pub selection: Selection,
    /// If the run is a `gctrace top`: how it is shown.
    pub top: Option<Show>,
    /// If the run is a `gctrace serve --live`: the settings of its page.
    pub live: Option<Live>,
    /// For a recording: one screen about it instead of lines and summaries.
    pub one_screen: Option<Recorded>,
    /// Root of the kubelet's files, by which pods are named.
    pub kube_root: Option<PathBuf>,
    /// Whether to read how memory is shared.
    pub shares: bool,
    /// Whether an account of the memory of each process is written at the end.
    pub memory_account: bool,
    /// Length of the run; `None`: until it is ended.
    pub duration: Option<Duration>,
    /// File for lines; `None`: standard output.
    pub output: Option<PathBuf>,
    /// Whether a command runs as root and files belong to root although another user called `sudo`.
    pub as_root: bool,
    /// What is written to standard output.
    pub reports: Reports,
    /// Notes on flags that have no effect.
    pub notes: Vec<&'static str>,
    /// Whether the hottest methods are printed at the end.
    pub hottest: bool,
    /// Directory for sample sets.
    pub tunemygc: Option<PathBuf>,
    /// Maximum size of sample sets in that directory, bytes.
    pub tunemygc_most: Option<NonZeroU64>,
    /// Where sample sets are sent.
    pub tunemygc_target: Option<Target>,
    /// Header variant of sample sets.
    pub tunemygc_dialect: Dialect,
    /// Where metrics are served.
    pub prometheus: Option<Metrics>,
    /// Servers that metrics and profiles are pushed to.
    pub push: Servers,
    /// What profiles contain.
    pub filter: Filter,
    /// File for a table of cycles.
    pub csv: Option<PathBuf>,
    /// Files for profiles.
    pub profiles: Vec<(PathBuf, profile::Format)>,
    /// File for a recording.
    pub record: Option<PathBuf>,
    /// Size of the recording at which the run ends, bytes.
    pub record_most: Option<u64>,
    /// If the recording is kept in memory until a trigger: how.
    pub keep: Option<Keep>,
    /// Which stacks are taken in addition to those of GC starts.
    pub stacks: Option<StackOptions>,
    /// Whether and how the GVL is traced.
    pub gvl: Option<GvlOptions>,
    /// Whether and how requests are traced.
    pub requests: Option<RequestOptions>,
    /// Which optional events are traced.
    pub optional: Vec<OptionalEvent>,
    /// Whether allocation is counted.
    pub alloc: bool,
    /// Whether allocation is also attributed to stacks.
    pub alloc_stacks: bool,
    /// File for a line per stack (for tests).
    pub stack_log: Option<PathBuf>,
    /// Methods of tracing GC work, in order of preference.
    pub methods: &'static [Method],
    /// A fault to inject into every plan.
    pub fault: Option<Fault>,
    /// Whether to use attach cookies if the kernel has them.
    pub cookies: bool,
    /// Whether to attach many probes by one link if the kernel can.
    pub multi: bool,
    /// Preferred source of memory usage.
    pub memory: MemorySource,
    /// Size of the ring for GC events, bytes.
    pub gc_ring_bytes: Option<u32>,
    /// Debug files that contain layouts.
    pub layout_from: Vec<PathBuf>,
    /// Directory of cached analyses; `None`: analyses are not cached.
    pub cache_dir: Option<PathBuf>,
}

/// The pids of several flags without duplicates.
pub(super) fn merged(pids: Vec<Pids>) -> Vec<u32> {
    let mut pids: Vec<u32> = pids.into_iter().flat_map(|Pids(pids)| pids).collect();
    pids.sort_unstable();
    pids.dedup();
    pids
}

impl CacheArgs {
    /// The cache directory; `None`: analyses are not cached.
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
            look:
                LookArgs {
                    duration,
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
                    optional,
                    shares,
                    memory_account,
                },
            outputs:
                OutputArgs {
                    format,
                    output,
                    reports,
                    tunemygc,
                    tunemygc_mib,
                    tunemygc_dialect,
                    pprof,
                    flamegraph,
                    folded,
                    callgrind,
                    top_lines,
                    csv,
                    speedscope,
                    firefox,
                    stack_root,
                    stack_lines,
                    profile,
                    perfetto,
                    stack_log,
                },
            record,
            max_size,
            keep,
            proc: _,
            as_root,
            tunemygc_url,
            tunemygc_token,
            tunemygc_tokens,
            tunemygc_sync_cycles,
            tunemygc_sync_units,
            tunemygc_spool,
            prometheus,
            prometheus_pid,
            otlp,
            otlp_protocol,
            otlp_signals,
            pyroscope,
            push_interval,
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
        let alloc = optional.alloc;
        for word in words {
            pids.push(parse::pids(&word).map_err(|_| UsageError::Word(word))?);
        }
        let command = (!command.is_empty()).then_some(command);
        let selection = Selection {
            all: all_ruby,
            pids: merged(pids),
            only_pids: merged(only_pids),
            names,
            cgroups,
            units,
            containers,
            command,
        };
        let selection = checked(selection, own_pid)?;
        if stack_root == RootArg::Endpoint && !requests {
            return Err(UsageError::NoRequests("--stack-root endpoint"));
        }
        let of = profile.measure(wall, gvl.is_some(), alloc)?;
        let graph = Graph { grouping: stack_root.into(), of, lines: stack_lines, roots_on_top: false };
        let profiles: Vec<(PathBuf, profile::Format)> = [
            (pprof, profile::Format::Pprof),
            (flamegraph, profile::Format::FlameGraph(graph)),
            (folded, profile::Format::Folded(graph)),
            (callgrind, profile::Format::Callgrind),
            (top_lines, profile::Format::TopLines(graph.of)),
            (speedscope, profile::Format::Speedscope),
            (firefox, profile::Format::Firefox),
            (perfetto, profile::Format::Perfetto),
        ]
        .into_iter()
        .filter_map(|(path, format)| Some((path?, format)))
        .collect();
        // `-` conventionally means standard output.
        let output = output.filter(|path| path.as_os_str() != "-");
        differ(
            profiles
                .iter()
                .map(|(path, _)| path)
                .chain(&output)
                .chain(record.iter().filter(|path| path.as_os_str() != "-"))
                .chain(&csv),
        )?;
        let server = |flag, url: Option<String>| match url {
            None => Ok(None),
            Some(url) => Address::http(&url).map(Some).ok_or(UsageError::Server(flag, shown(&url))),
        };
        let otlp_protocol = otlp_protocol.map(|protocol| match protocol {
            OtlpProtocolArg::Grpc => Protocol::Grpc,
            OtlpProtocolArg::Http => Protocol::Http,
        });
        let usual = std::env::var("OTEL_EXPORTER_OTLP_PROTOCOL").ok();
        let otlp = otlp.map(|url| Address::otlp(&url, otlp_protocol, usual.as_deref()));
        let filter = profile.filter(reports.slower_than);
        let push = Servers {
            otlp: otlp.transpose().map_err(UsageError::Otlp)?,
            metrics: otlp_signals.contains(&SignalArg::Metrics),
            profiles: otlp_signals.contains(&SignalArg::Profiles),
            pyroscope: server("--pyroscope", pyroscope)?,
            interval: push_interval.unwrap_or(DEFAULT_PUSH_INTERVAL),
            wall,
            filter: filter.clone(),
        };
        let sampled = profiles.iter().any(|(_, format)| format.has_samples());
        let shows_stacks = sampled || push.wants_stacks() || stack_log.is_some() || record.is_some();
        let wants_stacks = shows_stacks || rate.is_some() || wall;
        let gvl = gvl.map(|how| GvlOptions {
            futex: how == GvlArg::Futex,
            threshold: gvl_threshold.unwrap_or(DEFAULT_GVL_THRESHOLD),
            spans: record.is_some() || profiles.iter().any(|(_, format)| format.has_gvl_states()),
            budget_ppm: gvl_budget.unwrap_or(match duration {
                Some(_) => DEFAULT_GVL_BUDGET_OF_SOME_TIME,
                None => DEFAULT_GVL_BUDGET,
            }),
        });
        let keep = keep.resolve(record.as_deref(), gvl.map(|gvl| gvl.threshold), requests)?;
        let text = format == FormatArg::Text;
        let has = |test: fn(&profile::Format) -> bool| profiles.iter().any(|(_, format)| test(format));
        let shows_alloc = has(|format| format.has_allocation()) || push.wants_stacks() || record.is_some();
        let has_metrics = prometheus.is_some() || (push.otlp.is_some() && push.metrics);
        let makes_sets = tunemygc.is_some() || tunemygc_url.is_some();
        let idle = Idle {
            text,
            shares,
            memory_account,
            brief: reports.brief,
            fields: reports.fields.is_some(),
            interval: reports.interval.is_some(),
            slower_than: reports.slower_than.is_some(),
            by: reports.by.is_some(),
            wall,
            rate: rate.is_some(),
            no_native,
            root: stack_root,
            stack_lines,
            graph_of: profile.flamegraph_of.is_some(),
            filters: profile.filter(None).is_any(),
            shows_profiles: !profiles.is_empty() || push.wants_stacks() || (rate.is_some() && text),
            shows_shares: !text || record.is_some() || has_metrics || has(|format| format.has_memory()),
            shows_wall: shows_stacks,
            shows_native: shows_stacks,
            shows_graphs: has(|format| {
                matches!(format, profile::Format::FlameGraph(_) | profile::Format::Folded(_))
            }),
            shows_measure: has(|format| format.measure().is_some()),
            min_pause_of_none: reports.quiet && reports.min_pause.is_some(),
            alloc,
            shows_alloc: shows_alloc || !text || requests || has_metrics,
            push_interval: push_interval.is_some(),
            pushes: push.otlp.is_some() || push.pyroscope.is_some(),
            // The variable may be set for other runs.
            token: tunemygc_token.is_some() && std::env::var_os("RUBY_GC_TOKEN").is_none(),
            sends_sets: tunemygc_url.is_some(),
            dialect: tunemygc_dialect != DialectArg::Spec,
            makes_sets,
            // The directory may appear later: a node creates it with its first pod.
            no_pods: kube_root.as_ref().is_some_and(|root| !root.join(PODS).is_dir()),
        };
        let alloc_stacks = alloc && shows_alloc;
        let reports = Reports::resolve(&reports, format.into());
        let requests = requests.then(|| RequestOptions::new(request_ring, makes_sets));
        Ok(Self {
            selection,
            top: None,
            live: None,
            one_screen: None,
            kube_root,
            shares,
            memory_account: memory_account && text,
            duration,
            output,
            as_root,
            notes: idle.notes(),
            // Requested by --rate, or shown by a run with stacks in addition to its cycles.
            hottest: text && (rate.is_some() || (reports.streams() && wants_stacks)),
            reports,
            tunemygc,
            tunemygc_most: tunemygc_mib.and_then(|mib| NonZeroU64::new(mib.get().saturating_mul(1 << 20))),
            tunemygc_target: target(
                tunemygc_url,
                tunemygc_token,
                tunemygc_tokens,
                tunemygc_spool,
                (tunemygc_sync_cycles, tunemygc_sync_units),
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
            filter,
            profiles,
            csv,
            record,
            record_most: max_size,
            keep,
            gvl,
            requests,
            optional: optional.events(),
            alloc,
            alloc_stacks,
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

    /// Whether any output shows counters during the run.
    pub fn wants_accounts(&self) -> bool {
        let shown = self.top.is_some() || self.live.is_some();
        shown || self.prometheus.is_some() || self.push.any() || self.record.is_some()
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
            || self.csv.is_some()
            || !self.profiles.is_empty()
            || self.record.is_some()
            || self.stack_log.is_some()
            || self.cache_dir.is_some()
    }

    /// Whether files appear when the run ends.
    pub fn has_files_at_end(&self) -> bool {
        let is_shown = self.top.is_some() || self.live.is_some();
        let has_some = self.csv.is_some() || self.stack_log.is_some() || !self.profiles.is_empty();
        let is_dumped = self.keep.as_ref().is_some_and(|keep| keep.triggers.contains(&Trigger::End));
        !is_shown && (has_some || is_dumped || self.tunemygc.is_some())
    }

    /// Whether there are outputs besides lines and summaries.
    pub fn has_others(&self) -> bool {
        let is_pushed = self.push.otlp.is_some() || self.push.pyroscope.is_some();
        let is_sent = is_pushed || self.tunemygc_target.is_some();
        let is_recorded = self.record.as_ref().is_some_and(|path| path.as_os_str() != "-");
        self.has_files_at_end() || is_sent || is_recorded || self.prometheus.is_some()
    }

    /// Whether any output shows stacks; otherwise only stacks of GC starts are taken.
    pub fn wants_stacks(&self) -> bool {
        self.stacks.is_some()
    }
}

/// Returns the selection if it selects something that can be traced.
fn checked(mut selection: Selection, own_pid: u32) -> Result<Selection, UsageError> {
    let Selection { pids, only_pids, names, cgroups, units, containers, .. } = &mut selection;
    if pids.contains(&own_pid) || only_pids.contains(&own_pid) {
        return Err(UsageError::OwnPid(own_pid));
    }
    only_pids.retain(|pid| !pids.contains(pid));
    if [names, units, containers].iter().any(|list| list.iter().any(String::is_empty))
        || cgroups.iter().any(|path| path.as_os_str().is_empty())
    {
        return Err(UsageError::EmptyGroup);
    }
    if selection.is_empty() {
        return Err(UsageError::NothingSelected);
    }
    Ok(selection)
}

/// Refuses two outputs to the same file, and file outputs to standard output.
pub(super) fn differ<'a>(files: impl Iterator<Item = &'a PathBuf>) -> Result<(), UsageError> {
    let mut seen = HashSet::new();
    for path in files {
        if path.as_os_str() == "-" {
            return Err(UsageError::Dash);
        }
        if !seen.insert(identity(path)) {
            return Err(UsageError::SameFile(path.clone()));
        }
    }
    Ok(())
}

/// A path that is the same for all names of a file, whether or not the file exists.
fn identity(path: &Path) -> PathBuf {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let beside = || Some(fs::canonicalize(parent).ok()?.join(path.file_name()?));
    fs::canonicalize(path).ok().or_else(beside).unwrap_or_else(|| path.to_owned())
}

/// Where sample sets are sent; `None`: they are not sent.
fn target(
    url: Option<String>,
    token: Option<String>,
    file: Option<PathBuf>,
    spool: Option<PathBuf>,
    (cycles, units): (Option<NonZeroU32>, Option<NonZeroU32>),
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
        url: Target::url(&url).ok_or(UsageError::Url(shown(&url)))?,
        tokens,
        spool: spool.or_else(tunemygc::default_spool).ok_or(UsageError::NoSpool)?,
        cycles,
        units,
    }))
}

#[cfg(test)]
mod tests;
