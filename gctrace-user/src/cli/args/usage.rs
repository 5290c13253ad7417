//! Errors in flags that do not describe a valid run.

use std::path::PathBuf;

use clap::CommandFactory as _;

use crate::{cli::Args, trace_file::Trigger};

/// Flags that do not describe a valid run.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum UsageError {
    /// Nothing was selected.
    #[error(
        "nothing is selected: give --all-ruby, --pid PID, --name NAME, --unit UNIT, --cgroup PATH, --container NAME or -- COMMAND (see gctrace \
         --help)"
    )]
    NothingSelected,
    /// Neither a recording nor a run was given.
    #[error(
        "name a recording (gctrace serve FILE), or show what is traced now (sudo gctrace serve --live); see gctrace serve --help"
    )]
    NothingToServe,
    /// A recording was given with `--live`.
    #[error(
        "`{0}` is not a pid: --live traces processes that run (--pid PID, --name NAME, --all-ruby, …) and takes no file; `gctrace serve {0}` shows \
         a recording"
    )]
    FileWithLive(String),
    /// Two outputs would overwrite each other.
    #[error("{} is named for two outputs; give each its own file", .0.display())]
    SameFile(PathBuf),
    /// An output would overwrite the recording that is read.
    #[error("{} is the recording that is read; give the output a file of its own", .0.display())]
    Recording(PathBuf),
    /// `--from` is not before `--to`.
    #[error(
        "the recording contains nothing between --from and --to: --to must be later, and after the beginning of the recording"
    )]
    NoTime,
    /// A profile would be written to standard output.
    #[error(
        "profiles and recordings are written to files, not to standard output: name a file instead of `-`"
    )]
    Dash,
    /// The command would write into the recording.
    #[error(
        "COMMAND writes to standard output, too: record to a file, or trace a command that runs by --pid"
    )]
    CommandOnStdout,
    /// The measure of a flame graph is not traced.
    #[error("--flamegraph-of {0} needs {1}; of a recording, one that was made with it")]
    GraphNeeds(&'static str, &'static str),
    /// The URL for sample sets is not valid.
    #[error(
        "--tunemygc-url: `{0}` is not an http:// or https:// URL without query and with a port, if any, up to 65535"
    )]
    Url(String),
    /// The URL of a server to push to is not valid.
    #[error(
        "{0}: `{1}` is not an http:// or https:// URL without query and with a port, if any, up to 65535"
    )]
    Server(&'static str, String),
    /// The same for OTLP.
    #[error("--otlp: {0}")]
    Otlp(String),
    /// The application of the sample sets is unknown.
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
    /// There is no directory for sets that wait to be sent.
    #[error("--tunemygc-url needs a directory for sets that wait: give --tunemygc-spool")]
    NoSpool,
    /// An empty name of a cgroup or container, as from an unset variable.
    #[error("--name, --unit, --cgroup and --container need a non-empty value")]
    EmptyGroup,
    /// A word that is not a flag, a subcommand or a pid.
    #[error("{}", unknown_word(.0))]
    Word(String),
    /// Requests are to be shown, but are not traced, or the recording lacks them.
    #[error("{0} needs requests: add --requests (a recording has them if it was recorded with --requests)")]
    NoRequests(&'static str),
    /// There is no terminal to draw on.
    #[error("gctrace top needs a terminal; `gctrace top --once` prints one table")]
    NoTerminal,
    /// Both recordings would be read from standard input.
    #[error("only one of A and B can be standard input, which is read once; name a file for the other")]
    BothStandardInput,
    /// More than two recordings were given.
    #[error("gctrace serve shows one recording, or compares two; `gctrace merge` makes one of several")]
    TooManyRecordings,
    /// The selection of `gctrace top` or `gctrace record` is not valid.
    #[error("{0}")]
    Flags(String),
    /// `--keep` was given without a recording.
    #[error("--keep keeps a recording: name its file with --record FILE (of gctrace record: -o FILE)")]
    KeepsNothing,
    /// A trigger needs something that is not traced.
    #[error("--dump-on '{0}' needs {1}")]
    TriggerNeeds(Trigger, String),
    /// gctrace cannot trace itself.
    #[error("--pid {0} is gctrace itself, which is never traced")]
    OwnPid(u32),
}

/// Subcommands of other tracers for what gctrace does without a subcommand.
const SUBCOMMANDS_OF_OTHERS: [&str; 5] = ["attach", "run", "snapshot", "stat", "trace"];

/// The advice about a word that is neither a subcommand nor a pid.
fn unknown_word(word: &str) -> String {
    if word.starts_with(|c: char| c.is_ascii_digit()) {
        return format!("`{word}` is not a pid");
    }
    if SUBCOMMANDS_OF_OTHERS.contains(&word) {
        return format!("there is no subcommand `{word}` (see gctrace --help)");
    }
    let command = Args::command();
    if let Some(sub) = command.find_subcommand(word) {
        return comes_first(sub.get_name());
    }
    let meant =
        command.get_subcommands().map(|known| known.get_name().to_owned()).find(|known| is_like(word, known));
    let meant = meant.map_or_else(String::new, |known| format!("`gctrace {known}`, "));
    format!(
        "`{word}` is neither a pid nor a subcommand; did you mean {meant}`--name {word}`, to trace the programs of that name, or \
         `-- {word}`, to start it?"
    )
}

/// The error for a subcommand behind a flag.
pub(in crate::cli) fn comes_first(sub: &str) -> String {
    format!("`{sub}` is a subcommand, which comes first, before any flag: gctrace {sub} …")
}

/// Whether a word is a prefix of a known one, or differs from it by one letter or by two swapped neighbours.
fn is_like(word: &str, known: &str) -> bool {
    let (ours, theirs): (Vec<char>, Vec<char>) = (word.chars().collect(), known.chars().collect());
    let shorter = ours.len().min(theirs.len());
    if shorter < 3 {
        return false;
    }
    let begin = ours.iter().zip(&theirs).take_while(|(one, other)| one == other).count();
    let end = ours.iter().rev().zip(theirs.iter().rev()).take_while(|(one, other)| one == other).count();
    let swapped = ours.len() == theirs.len()
        && ours.len() == begin + end + 2
        && (ours[begin], ours[begin + 1]) == (theirs[begin + 1], theirs[begin]);
    swapped || theirs.starts_with(&ours) || ours.len().max(theirs.len()) - (begin + end).min(shorter) <= 1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An incomplete subcommand is suggested in addition to a program of that name.
    #[test]
    fn subcommands_that_are_meant() {
        for (word, meant) in [
            ("collect", "collector"),
            ("colector", "collector"),
            ("tunes", "tune"),
            ("repart", "report"),
            ("dif", "diff"),
            ("tpo", "top"),
            ("dmup", "dump"),
        ] {
            let text = unknown_word(word);
            let wanted = format!("did you mean `gctrace {meant}`, `--name {word}`, to trace");
            assert!(text.contains(&wanted), "{text}");
        }
        assert_eq!(unknown_word("dump"), comes_first("dump"));
        for word in ["puma", "sidekiq", "t", "du", "collectors-of-others"] {
            let text = unknown_word(word);
            assert!(text.contains(&format!("did you mean `--name {word}`, to trace")), "{text}");
        }
    }
}
