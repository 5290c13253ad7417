//! Suggests what a user may have meant by a command line that is not valid.

use std::ffi::OsString;

use clap::{
    Command, Error,
    error::{ContextKind, ContextValue, ErrorKind},
};

use super::{args::usage::comes_first, help::command};

/// Flags of other tools and likely first guesses, each with the equivalent flags of gctrace. The first one that the subcommand has is suggested.
const MEANT: [(&str, &[&str]); 7] = [
    ("--all", &["--all-ruby"]),
    ("--process", &["--name", "--pid"]),
    ("--pids", &["--pid"]),
    ("--service", &["--unit"]),
    ("--unit", &["--service"]),
    ("--file", &["--output"]),
    ("--time", &["--duration", "--to"]),
];

/// Returns the error of these words, which begin with the program's name, with a better suggestion than the flag with the most similar spelling.
#[must_use]
pub fn with_hint(mut error: Error, words: &[OsString]) -> Error {
    let command = command();
    let (reached, behind) = reached(&command, words);
    if reached.get_name() == command.get_name()
        && let Some(sub) = subcommand_behind(&command, behind)
        && !matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion)
    {
        return Error::raw(ErrorKind::ArgumentConflict, comes_first(sub) + "\n");
    }
    let given = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(given)) => MEANT.iter().find(|(flag, _)| flag == given),
        _ => None,
    };
    let meant = given.and_then(|(_, flags)| flags.iter().find(|flag| has(reached, flag)));
    if let Some(flag) = meant {
        error.insert(ContextKind::SuggestedArg, ContextValue::String((*flag).to_owned()));
    }
    error
}

/// The subcommand that clap has entered, and the words behind its name.
fn reached<'a, 'w>(command: &'a Command, words: &'w [OsString]) -> (&'a Command, &'w [OsString]) {
    let (mut command, mut rest) = (command, words.get(1..).unwrap_or_default());
    while let [word, behind @ ..] = rest
        && let Some(sub) = word.to_str().and_then(|word| command.find_subcommand(word))
    {
        (command, rest) = (sub, behind);
    }
    (command, rest)
}

/// A subcommand among these words, up to `--`, that is not the value of a flag.
fn subcommand_behind<'a>(command: &'a Command, words: &[OsString]) -> Option<&'a str> {
    let mut is_value = false;
    for word in words {
        let word = word.to_str().filter(|word| *word != "--")?;
        if let Some(sub) = command.find_subcommand(word).filter(|_| !is_value) {
            return Some(sub.get_name());
        }
        let known = command.get_arguments().find(|arg| {
            let long = word.strip_prefix("--").is_some_and(|flag| arg.get_long() == Some(flag));
            let short = word.strip_prefix('-').is_some_and(|flag| arg.get_short() == flag.parse().ok());
            long || (short && arg.get_short().is_some())
        });
        // A flag that does not exist may have been meant to have a value.
        let may_have_value = word.starts_with('-') && !word.contains('=');
        is_value = known.map_or(may_have_value, |arg| arg.get_action().takes_values());
    }
    None
}

fn has(command: &Command, flag: &str) -> bool {
    command.get_arguments().any(|arg| arg.get_long() == flag.strip_prefix("--"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Args;
    use clap::Parser as _;

    fn hint(words: &[&str]) -> String {
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        with_hint(Args::try_parse_from(&words).unwrap_err(), &words).to_string()
    }

    /// The suggestion is the equivalent flag of the subcommand, and every suggested flag exists there.
    #[test]
    fn suggestions() {
        let command = command();
        for (given, meant) in MEANT {
            for reached in std::iter::once(&command).chain(command.get_subcommands()) {
                let (name, long) = (reached.get_name(), given.trim_start_matches('-'));
                if has(reached, given) || reached.is_allow_external_subcommands_set() {
                    continue;
                }
                let words =
                    if name == "gctrace" { vec!["gctrace", given] } else { vec!["gctrace", name, given] };
                let text = hint(&words);
                for flag in meant {
                    let exists = has(reached, flag);
                    let first = meant.iter().find(|flag| has(reached, flag)) == Some(flag);
                    assert!(exists || !text.contains(&format!("'{flag}' exists")), "{name} --{long}: {text}");
                    assert!(!first || text.contains(&format!("'{flag}'")), "{name} --{long}: {text}");
                }
            }
        }
        assert!(hint(&["gctrace", "--all"]).contains("'--all-ruby'"));
        assert!(hint(&["gctrace", "report", "x", "--time", "5s"]).contains("'--to'"));
    }

    /// A subcommand behind a flag is named as such, whatever error its own flags cause.
    #[test]
    fn not_first() {
        for words in [
            &["gctrace", "--pid", "4242", "heap", "--by", "class"][..],
            &["gctrace", "-q", "serve", "--live"],
            &["gctrace", "--pid", "1", "doctor", "--nonsense"],
        ] {
            let text = hint(words);
            assert!(text.contains("comes first, before any flag: gctrace "), "{words:?}: {text}");
        }
        for words in
            [&["gctrace", "--nonsense", "--", "top"][..], &["gctrace", "--name", "top", "--nonsense"]]
        {
            assert!(!hint(words).contains("comes first"), "{words:?}");
        }
        assert!(hint(&["gctrace", "--nme", "top"]).contains("'--name'"));
        assert!(hint(&["gctrace", "--process", "report"]).contains("'--name'"));
        assert!(!hint(&["gctrace", "dump", "--nonsense", "top"]).contains("comes first"));
    }
}
