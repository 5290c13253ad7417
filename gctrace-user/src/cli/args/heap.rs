//! Flags of `gctrace heap`.

use std::{path::PathBuf, time::Duration};

use clap::{Args as ClapArgs, ValueEnum};

use super::{CacheArgs, FormatArg};

/// Flags of `gctrace heap`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
        sudo gctrace heap --pid 4242                  objects by type, as ObjectSpace.count_objects counts them\n  \
        sudo gctrace heap --pid 4242 --by class       objects by class\n  \
        sudo gctrace heap --pid 4242 --by line        where they were allocated, if the program traces that\n  \
        sudo gctrace heap --pid 4242 --by page        how full the pages are, and what keeps them from being freed\n  \
        sudo gctrace heap --pid 4242 --svg heap.svg   a picture of its pages\n  \
        sudo gctrace heap --pid 4242 --by class --every 30s     what grows\n  \
        sudo gctrace heap --pid 4242 --by memory --every 30s    what a forked worker copies of its parent's memory\n  \
        sudo gctrace heap --pid 4242 --leaks 10m      objects that grow in number over major GCs\n  \
        gctrace heap --diff before.jsonl after.jsonl  what has changed between two censuses\n\n\
        Exit status: 0 done, 1 no Ruby process, 2 the heap could not be counted, 3 missing privilege.\n\
        The process is not stopped; the report says if it collected or allocated while its heap was read.")]
pub struct HeapArgs {
    /// The process
    #[arg(long, short, value_name = "PID", required_unless_present_any = ["diff", "word"],
        value_parser = crate::cli::parse::pid)]
    pub pid: Option<u32>,

    /// Short for --pid
    #[arg(value_name = "PID", conflicts_with = "pid", value_parser = crate::cli::parse::pid)]
    pub word: Option<u32>,

    /// What a row represents
    #[arg(long, value_enum, default_value_t = HeapByArg::Type)]
    pub by: HeapByArg,

    /// Rows in text output; the rest is summed
    #[arg(long, value_name = "N", default_value_t = 40)]
    pub top: usize,

    /// What to write to standard output
    #[arg(long, value_enum, default_value_t = FormatArg::Text)]
    pub format: FormatArg,

    /// Also draw the pages of the heap to this file: how full they are, and how old their objects are
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// Write every object to this file, in the format that heapy, sheap and harb read
    #[arg(long, value_name = "FILE", 
        conflicts_with_all = ["by", "top", "format", "svg", "every", "diff"])]
    pub dump: Option<PathBuf>,

    /// Compare two censuses that --format jsonl wrote (by type, class or line), or one with the process as it is now
    #[arg(long, value_name = "FILE", num_args = 1..=2, conflicts_with_all = ["by", "svg", "every"])]
    pub diff: Vec<PathBuf>,

    /// Repeat the census at this interval and print the classes (--by class), lines (--by line) or types that grew; with --by memory, how much of
    /// what a worker shared since its fork became private
    #[arg(long, value_name = "TIME", value_parser = crate::cli::parse::duration, conflicts_with = "svg")]
    pub every: Option<Duration>,

    /// Watch for this time which objects grow in number from one major GC to the next; report what retains them, and which lines allocate them
    #[arg(long, value_name = "TIME", value_parser = crate::cli::parse::duration,
        conflicts_with_all = ["by", "svg", "dump", "diff", "every"])]
    pub leaks: Option<Duration>,

    /// With --leaks: do not follow where objects are allocated, which costs the process a trap at each refill of its free slots
    #[arg(long, requires = "leaks")]
    pub no_sites: bool,

    /// Under sudo, leave files to root, not to the user who called sudo
    #[arg(long)]
    pub as_root: bool,

    /// Where the host's /proc is mounted, if gctrace runs in a container without the host's pids
    #[arg(long, value_name = "DIR", hide_short_help = true)]
    pub proc: Option<PathBuf>,

    /// The cache of analyses.
    #[command(flatten)]
    pub cache: CacheArgs,
}

/// `--by` of `gctrace heap`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum HeapByArg {
    /// Types, as `ObjectSpace.count_objects` has them; with --format jsonl also its FREE and TOTAL
    Type,
    /// Classes
    Class,
    /// Lines that allocated objects, of a program that traces its allocations (`ObjectSpace.trace_object_allocations_start`)
    Line,
    /// Sizes of slots
    Size,
    /// Pages by how full they are, and what keeps nearly empty ones
    Page,
    /// Collections that objects survived
    Age,
    /// Where the resident memory is: pages of objects, allocations, libraries, stacks
    Memory,
}

#[cfg(test)]
mod tests {
    use crate::cli::{Args, HeapSettings, Subcommand};
    use clap::Parser as _;

    /// A pid may be given without a flag, as for a run and for `gctrace dump`.
    #[test]
    fn pids() {
        let pid = |words: &[&str]| -> Result<Option<u32>, String> {
            let words = [&["gctrace", "heap"], words].concat();
            match Args::try_parse_from(words).map_err(|error| error.to_string())?.subcommand {
                Some(Subcommand::Heap(args)) => Ok(HeapSettings::from(args).pid),
                other => panic!("{other:?}"),
            }
        };
        for words in [&["4"][..], &["--pid", "4"], &["4", "--by", "class"], &["--by", "class", "4"]] {
            assert_eq!(pid(words), Ok(Some(4)), "{words:?}");
        }
        assert_eq!(pid(&["--diff", "a", "b"]), Ok(None));
        let error = pid(&["--pid", "4", "5"]).unwrap_err();
        assert!(error.contains("cannot be used with"), "{error}");
        for wrong in [&["4", "5"][..], &["puma"], &[]] {
            pid(wrong).unwrap_err();
        }
    }

    /// A flag that would have no effect is refused.
    #[test]
    fn without_effect() {
        let heap = |flags: &[&str]| {
            let words = [&["gctrace", "heap", "--pid", "4"], flags].concat();
            Args::try_parse_from(words).map(|_| ()).map_err(|error| error.to_string())
        };
        for first in [&["--dump", "a"][..], &["--diff", "a"], &["--leaks", "1m"], &["--every", "1m"]] {
            heap(first).unwrap();
        }
        for (what, other) in [
            (["--dump", "a"], ["--by", "class"]),
            (["--dump", "a"], ["--format", "jsonl"]),
            (["--dump", "a"], ["--top", "4"]),
            (["--diff", "a"], ["--by", "class"]),
            (["--leaks", "1m"], ["--by", "class"]),
        ] {
            let error = heap(&[what, other].concat()).unwrap_err();
            assert!(error.contains(what[0]) && error.contains(other[0]), "{error}");
        }
        for other in [["--by", "class"], ["--format", "jsonl"], ["--top", "4"]] {
            heap(&[["--every", "1m"], other].concat()).unwrap();
        }
    }
}
