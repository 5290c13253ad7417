//! The help: options grouped by purpose, with the one-line text that `-h` shows for each.

use std::ffi::OsString;

use clap::{Arg, Args as _, Command, CommandFactory as _, Error, FromArgMatches as _, Id, error::ErrorKind};

use super::{Args, args::look::LookArgs};

/// An option and its text in `-h`. If the text is empty, only `--help` shows the option.
type Entry = (&'static str, &'static str);

const GROUPS: [(&str, &[Entry]); 5] = [
    (
        "What to trace",
        &[
            ("all_ruby", "Every Ruby process, now or started later"),
            ("pids", "These processes and their descendants"),
            ("only_pids", ""),
            ("names", "Ruby programs of this name"),
            ("units", "Processes of this systemd unit"),
            ("cgroups", "Processes in this cgroup"),
            ("containers", "Processes in this container"),
            ("kube_root", ""),
            ("proc", ""),
            ("as_root", ""),
        ],
    ),
    (
        "What to measure",
        &[
            ("duration", "Stop after this time, e.g. 30s"),
            ("rate", "CPU samples per second [99]; prints hot methods"),
            ("wall", "Also profile threads that sleep or block"),
            ("off_cpu_min", ""),
            ("off_cpu_stacks", ""),
            ("gvl", "Waits for the GVL"),
            ("gvl_threshold", ""),
            ("gvl_budget", ""),
            ("requests", "Requests to Puma, Unicorn, WEBrick; jobs of Sidekiq"),
            ("alloc", ""),
            ("shares", ""),
            ("memory_account", ""),
            ("no_native", ""),
            ("threads", ""),
            ("focus", ""),
            ("endpoints", ""),
            ("hide", ""),
            ("app_only", ""),
        ],
    ),
    (
        "Where to write",
        &[
            ("format", "Lines of text, or JSON lines"),
            ("output", "Lines to this file instead of standard output"),
            ("quiet", "No line per cycle or request; summaries are printed"),
            ("min_pause", "Only cycles with a stop this long"),
            ("interval", ""),
            ("slower_than", ""),
            ("by", ""),
            ("brief", ""),
            ("fields", ""),
            ("verbose", ""),
            ("flamegraph", "A flame graph (SVG)"),
            ("pprof", "A pprof profile (go tool pprof)"),
            ("firefox", "A timeline for profiler.firefox.com"),
            ("perfetto", ""),
            ("speedscope", ""),
            ("folded", ""),
            ("callgrind", ""),
            ("top_lines", ""),
            ("csv", ""),
            ("stack_root", ""),
            ("stack_lines", ""),
            ("flamegraph_of", ""),
            ("tunemygc", "GC sample sets, for `gctrace tune`"),
            ("record", ""),
            ("max_size", ""),
            ("keep", ""),
            ("keep_size", ""),
            ("dump_on", ""),
            ("dump_cooldown", ""),
            ("max_dumps", ""),
        ],
    ),
    (
        "Send to others",
        &[
            ("prometheus", "Serve metrics for Prometheus"),
            ("prometheus_pid", ""),
            ("otlp", "Send metrics and profiles by OTLP"),
            ("otlp_protocol", ""),
            ("otlp_signals", ""),
            ("pyroscope", ""),
            ("push_interval", ""),
            ("tunemygc_url", "Send sample sets to a collector"),
            ("tunemygc_token", ""),
            ("tunemygc_tokens", ""),
            ("tunemygc_sync_cycles", ""),
            ("tunemygc_sync_units", ""),
            ("tunemygc_mib", ""),
            ("tunemygc_dialect", ""),
            ("tunemygc_spool", ""),
        ],
    ),
    (
        "Rarely needed",
        &[("gc_ring", ""), ("probes", ""), ("layout_from", ""), ("cache_dir", ""), ("no_cache", "")],
    ),
];

/// One-line descriptions of the subcommands.
const COMMANDS: [(&str, &str); 14] = [
    ("doctor", "Check what works here, per Ruby, and how to fix the rest"),
    ("top", "What every Ruby process does right now; gctrace alone does it"),
    ("dump", "What each thread does right now, with its Ruby stack"),
    ("record", "Write everything to a recording, for `gctrace report`"),
    ("report", "A summary, or any output, from a recording"),
    ("diff", "Compare two recordings: what changed beyond noise"),
    ("serve", "A recording, or a live run, as a web page on this host"),
    ("info", "What a recording contains"),
    ("merge", "Write several recordings as one"),
    ("scrub", "Copy a recording without names that identify its owner"),
    ("tune", "Recommend GC settings from TuneMyGC sample sets"),
    ("collector", "Receive sample sets over HTTP and answer with recommendations"),
    ("completions", "Write a completion script for a shell"),
    ("man", "Write the manual page: gctrace man | man -l -"),
];

/// Text that `-h` shows after the options.
const SHORT_EXAMPLES: &str = "Examples:
  sudo gctrace --all-ruby --duration 30s
  sudo gctrace --pid 4242 --duration 1m -q --flamegraph cpu.svg

All options and their meaning: gctrace --help";

/// The definition of the command line, with its help arranged.
pub fn command() -> Command {
    let mut command = Args::command();
    let long = command.get_after_help().cloned().unwrap_or_default();
    let about = command.get_about().cloned().unwrap_or_default();
    command = command
        .about("Trace GC, GVL contention and CPU time of running Ruby processes, from outside")
        .long_about(about)
        .after_help(SHORT_EXAMPLES)
        .after_long_help(long)
        .disable_help_subcommand(true)
        .mut_arg("slower_than", |arg| arg.requires("requests"))
        .mut_arg("by", |arg| arg.requires("requests"))
        .mut_arg("endpoints", |arg| arg.requires("requests"))
        .mut_arg("command", |arg| arg.hide_short_help(true));
    for (name, short) in COMMANDS {
        if command.find_subcommand(name).is_some() {
            command = command.mut_subcommand(name, |command| {
                let long = command.get_about().cloned().unwrap_or_default();
                command.about(short).long_about(long)
            });
        }
    }
    command = with_negative_numbers(command);
    // Flags of a run require `--live`. In a group, an argument with its default value does not count as given.
    command = command.mut_subcommand("serve", |command| {
        // clap leaves the group of a struct that flattens another one empty.
        let look = LookArgs::augment_args(Command::new("look"));
        let look: Vec<Id> = look.get_arguments().map(|arg| arg.get_id().clone()).collect();
        ["SelectArgs", "LookArgs", "CacheArgs"]
            .into_iter()
            .fold(command, |command, group| command.mut_group(group, |group| group.requires("live")))
            .mut_group("LookArgs", |group| group.args(look))
    });
    for (heading, entries) in GROUPS {
        for (at, &(id, short)) in entries.iter().enumerate() {
            command = command.mut_arg(id, |arg| arranged(arg, heading, at, short));
        }
    }
    command
}

/// Lets clap take `-5` as the value of an option, whose parser then refuses it with its own message. No option is a digit.
fn with_negative_numbers(command: Command) -> Command {
    command.allow_negative_numbers(true).mut_subcommands(with_negative_numbers)
}

fn arranged(arg: Arg, heading: &'static str, at: usize, short: &'static str) -> Arg {
    let arg = arg.help_heading(heading).display_order(at);
    if short.is_empty() {
        return arg.hide_short_help(true);
    }
    let long = arg.get_long_help().or_else(|| arg.get_help()).cloned().unwrap_or_default();
    arg.hide_short_help(false).help(short).long_help(long)
}

/// Rewrites `gctrace help top` to `gctrace top --help`.
fn spelled(words: Vec<OsString>) -> Result<Vec<OsString>, Error> {
    let Some((name, [help, of @ ..])) = words.split_first() else { return Ok(words) };
    if help != "help" {
        return Ok(words);
    }
    let of = match of {
        [word] if word == "help" || word == "--help" || word == "-h" => &[],
        of => of,
    };
    let mut command = command();
    if let Some(word) = of.first().filter(|word| command.find_subcommand(word).is_none()) {
        let text = format!("there is no subcommand `{}` (see gctrace --help)", word.to_string_lossy());
        return Err(command.error(ErrorKind::InvalidSubcommand, text));
    }
    Ok([name].into_iter().chain(of).cloned().chain(["--help".into()]).collect())
}

/// Reads the command line.
pub fn parse() -> Result<Args, Error> {
    let mut matches = command().try_get_matches_from(spelled(std::env::args_os().collect())?)?;
    Args::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A negative number is taken as the value of the option before it, and the error says what that option accepts.
    #[test]
    fn negative_numbers() {
        for (words, reason) in [
            (&["--duration", "-5"][..], "a time cannot be negative"),
            (&["top", "--interval", "-1"], "a time cannot be negative"),
            (&["heap", "--pid", "-1"], "is not a pid"),
            (&["report", "app.gctrace", "--from", "-3"], "a time cannot be negative"),
        ] {
            let error =
                command().try_get_matches_from([&["gctrace"], words].concat()).unwrap_err().to_string();
            assert!(error.contains(reason), "{words:?}: {error}");
        }
    }

    /// `help` means `--help`, also for a subcommand; an unknown subcommand is refused, and a run with the word elsewhere is not changed.
    #[test]
    fn help_as_a_word() {
        let words = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        for (given, meant) in [
            (&["gctrace", "help"][..], &["gctrace", "--help"][..]),
            (&["gctrace", "help", "help"], &["gctrace", "--help"]),
            (&["gctrace", "help", "top"], &["gctrace", "top", "--help"]),
            (&["gctrace", "help", "summary"], &["gctrace", "summary", "--help"]),
            (&["gctrace", "42", "help"], &["gctrace", "42", "help"]),
            (&["gctrace"], &["gctrace"]),
        ] {
            assert_eq!(spelled(words(given)).unwrap(), words(meant));
        }
        let shown = command().try_get_matches_from(spelled(words(&["gctrace", "help", "top"])).unwrap());
        assert_eq!(shown.unwrap_err().kind(), ErrorKind::DisplayHelp);
        let error = spelled(words(&["gctrace", "help", "4242"])).unwrap_err();
        assert!(error.to_string().contains("there is no subcommand `4242`"), "{error}");
    }

    /// Every option that is not for tests is in exactly one group.
    #[test]
    fn groups() {
        let command = command();
        for arg in command.get_arguments().filter(|arg| !arg.is_hide_set() && !arg.is_positional()) {
            let id = arg.get_id().as_str();
            let groups = GROUPS.iter().filter(|(_, entries)| entries.iter().any(|entry| entry.0 == id));
            assert_eq!(groups.count(), 1, "{id}");
        }
        for (id, _) in GROUPS.iter().flat_map(|(_, entries)| *entries) {
            assert!(command.get_arguments().any(|arg| arg.get_id() == *id), "{id}");
        }
        command.debug_assert();
    }

    /// `-h` is little more than one screen, and `--help` contains everything, in the order of the groups.
    #[test]
    fn short_and_long() {
        let short = command().term_width(80).render_help().to_string();
        assert!(short.lines().count() <= 64, "{} lines:\n{short}", short.lines().count());
        assert!(short.lines().all(|line| line.chars().count() <= 80), "{short}");
        let long = command().term_width(80).render_long_help().to_string();
        let mut last = 0;
        for (heading, _) in GROUPS {
            let at = long.find(&format!("\n{heading}:")).expect(heading);
            assert!(at > last, "{heading}");
            last = at;
        }
        for arg in command().get_arguments().filter(|arg| !arg.is_hide_set()) {
            let Some(flag) = arg.get_long() else { continue };
            assert!(long.contains(&format!("--{flag}")), "{flag}");
        }
    }
}
