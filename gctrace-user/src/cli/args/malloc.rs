//! Flags of `gctrace malloc`.

use std::{path::PathBuf, time::Duration};

use clap::{ArgGroup, Args as ClapArgs, ValueEnum};

use super::{CacheArgs, FormatArg, select::RunningArgs};
use crate::{
    cli::parse::{self, Pids},
    export::profile::{Format, Graph, Measure},
};

/// Flags of `gctrace malloc`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
        sudo gctrace malloc --pid 4242                  what it allocates in ten seconds, by size, age and line\n  \
        sudo gctrace malloc --pid 4242 --children       a server and its workers, one by one and in sum\n  \
        sudo gctrace malloc --unit puma.service         the same of a systemd unit, at most 16 processes\n  \
        sudo gctrace malloc --pid 4242 --pprof malloc.pb.gz           by stack, for go tool pprof\n  \
        sudo gctrace malloc --pid 4242 --duration 1m --format jsonl   the same for scripts\n\n\
        Exit status: 0 done, 1 no Ruby process, 2 its calls cannot be counted, 3 missing privilege or kernel feature.\n\
        Each call costs the process about a microsecond, each stack some more.\n\
        The window ends early when that is above the budget.")]
#[command(group(ArgGroup::new("selected").required(true).multiple(true)
    .args(["pids", "words", "all_ruby", "names", "units", "cgroups", "containers"])))]
#[command(group(ArgGroup::new("named").multiple(true).args(["pids", "words"])))]
#[command(group(ArgGroup::new("graphs").multiple(true).args(["flamegraph", "folded"])))]
pub struct MallocArgs {
    /// The process (repeatable, or a list: --pid 17,42, --pid "$(pgrep puma)"); its children only with --children
    #[arg(long = "pid", short = 'p', value_name = "PID", value_parser = parse::pids)]
    pub pids: Vec<Pids>,

    /// Also the descendants of these processes that run when counting begins, such as the workers of a server
    #[arg(long, requires = "named")]
    pub children: bool,

    /// Every Ruby process that runs when counting begins (16 at most)
    #[arg(long)]
    pub all_ruby: bool,

    /// Names and groups.
    #[command(flatten)]
    pub running: RunningArgs,

    /// How long calls are counted; Ctrl-C ends it earlier
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse::duration)]
    pub duration: Duration,

    /// Maximum overhead, in percent of one CPU; counting of a process stops above it
    #[arg(long, value_name = "PERCENT", default_value = "10", value_parser = parse::percent)]
    pub budget: u64,

    /// Take one stack per this many allocated bytes on average, e.g. 64KiB; 0 takes no stacks
    #[arg(long, value_name = "BYTES", default_value = "64KiB", value_parser = parse::malloc_period)]
    pub sample: u64,

    /// Number of allocation sites to show
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub top: usize,

    /// Write allocated and live bytes by stack as a pprof profile, e.g. malloc.pb.gz (open with `go tool pprof`)
    #[arg(long, value_name = "FILE")]
    pub pprof: Option<PathBuf>,

    /// Draw a flame graph, e.g. malloc.svg (open in a browser)
    #[arg(long, value_name = "FILE")]
    pub flamegraph: Option<PathBuf>,

    /// Write collapsed stacks, e.g. malloc.folded: a line `root;caller;leaf BYTES` per stack
    #[arg(long, value_name = "FILE")]
    pub folded: Option<PathBuf>,

    /// What --flamegraph and --folded show
    #[arg(long, value_enum, default_value_t = MallocMeasureArg::Malloc, value_name = "WHAT", requires = "graphs")]
    pub flamegraph_of: MallocMeasureArg,

    /// What to write to standard output
    #[arg(long, value_enum, default_value_t = FormatArg::Text)]
    pub format: FormatArg,

    /// Under sudo, leave files to root, not to the user who called sudo
    #[arg(long)]
    pub as_root: bool,

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

/// `--flamegraph-of`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MallocMeasureArg {
    /// All allocated bytes
    Malloc,
    /// Bytes still live at the end
    MallocLive,
}

impl MallocArgs {
    /// Files to write.
    pub(in crate::cli) fn files(&self) -> Vec<(PathBuf, Format)> {
        let of = match self.flamegraph_of {
            MallocMeasureArg::Malloc => Measure::Malloc,
            MallocMeasureArg::MallocLive => Measure::MallocLive,
        };
        let graph = Graph { of, ..Graph::default() };
        let files = [
            (&self.pprof, Format::Pprof),
            (&self.flamegraph, Format::FlameGraph(graph)),
            (&self.folded, Format::Folded(graph)),
        ];
        files.into_iter().filter_map(|(path, format)| Some((path.clone()?, format))).collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::cli::{Args, MallocSettings, Subcommand};
    use clap::Parser as _;

    fn malloc(flags: &[&str]) -> Result<super::MallocArgs, String> {
        let words = [&["gctrace", "malloc"], flags].concat();
        match Args::try_parse_from(words).map_err(|error| error.to_string())?.subcommand {
            Some(Subcommand::Malloc(args)) => Ok(args),
            other => panic!("{other:?}"),
        }
    }

    /// If nothing is selected, the error names all selecting flags.
    #[test]
    fn selection() {
        let error = malloc(&[]).unwrap_err();
        for flag in ["--pid", "--all-ruby", "--name", "--unit", "--cgroup", "--container"] {
            assert!(error.contains(flag), "{flag}: {error}");
        }
        for one in [&["--all-ruby"][..], &["--name", "puma"], &["--pid", "4", "--unit", "puma.service"]] {
            malloc(one).unwrap();
        }
        // A pid may be given without a flag, as for a run and for `gctrace dump`.
        for words in [&["4,5"][..], &["4", "5"], &["4", "--pid", "5"]] {
            let settings = MallocSettings::try_from(malloc(words).unwrap()).unwrap();
            let mut pids = settings.selection.only_pids;
            pids.sort_unstable();
            assert_eq!(pids, [4, 5], "{words:?}");
        }
        let settings = MallocSettings::try_from(malloc(&["4", "--children"]).unwrap()).unwrap();
        assert_eq!(settings.selection.pids, [4]);
        malloc(&["--all-ruby", "--children"]).unwrap_err();
    }

    /// `--flamegraph-of` is refused if no graph is drawn.
    #[test]
    fn graphs() {
        let of = ["--all-ruby", "--flamegraph-of", "malloc-live"];
        let error = malloc(&[&of[..], &["--pprof", "a"]].concat()).unwrap_err();
        assert!(error.contains("--flamegraph") && error.contains("--folded"), "{error}");
        for file in [&["--flamegraph", "a"][..], &["--folded", "a"], &["--flamegraph", "a", "--folded", "b"]]
        {
            malloc(&[&of[..], file].concat()).unwrap();
        }
        malloc(&["--all-ruby"]).unwrap();
    }
}
