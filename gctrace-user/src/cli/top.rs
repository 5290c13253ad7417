//! `gctrace top` is a run with an output of its own.

use std::io::{self, IsTerminal as _};

use clap::Parser as _;

use super::{
    Args, Settings, UsageError,
    args::{FormatArg, Subcommand},
    settings::{Show, merged},
    top_args::TopArgs,
};

/// Whether `gctrace` was called without any argument, by somebody at a terminal.
pub fn alone() -> bool {
    std::env::args_os().len() == 1 && io::stdout().is_terminal() && io::stdin().is_terminal()
}

/// The flags of `gctrace top` without flags.
pub fn top_alone() -> Option<TopArgs> {
    match Args::try_parse_from(["gctrace", "top"]).ok()?.subcommand? {
        Subcommand::Top(args) => Some(args),
        _ => None,
    }
}

/// The run that it is.
///
/// # Errors
///
/// There is no terminal, or the selection is none.
pub fn top(args: TopArgs, own_pid: u32) -> Result<Settings, UsageError> {
    let terminal = io::stdout().is_terminal() && io::stdin().is_terminal();
    if !args.once && !terminal {
        return Err(UsageError::NoTerminal);
    }
    let show = match (args.once, args.format) {
        (false, _) => Show::Screen,
        (true, FormatArg::Text) => Show::Text,
        (true, FormatArg::Jsonl) => Show::Jsonl,
    };
    let duration = args.once.then_some(args.interval);
    let words = as_run(args);
    let args = Args::try_parse_from(words).map_err(|error| UsageError::Top(error.to_string()))?;
    let settings = Settings::resolve(args, own_pid)?;
    Ok(Settings { top: Some(show), duration, hottest: false, notes: Vec::new(), ..settings })
}

/// The same as flags of a run.
fn as_run(args: TopArgs) -> Vec<String> {
    let TopArgs { all_ruby, pids, names, units, cgroups, containers, gvl, rate, cache, words, .. } = args;
    let mut run = vec!["gctrace".to_owned(), format!("--rate={rate}"), "--no-native".to_owned()];
    let pids = merged(pids.into_iter().chain(words).collect());
    run.extend(pids.iter().map(|pid| format!("--pid={pid}")));
    for (flag, values) in [("name", names), ("unit", units), ("cgroup", cgroups), ("container", containers)] {
        run.extend(values.iter().map(|value| format!("--{flag}={value}")));
    }
    // Parts of the time would be counted as all of it.
    if gvl {
        run.extend(["--gvl".to_owned(), "--gvl-budget=100".to_owned()]);
    }
    if all_ruby
        || run
            .iter()
            .all(|word| word.starts_with("--rate") || word.starts_with("--gvl") || !word.contains('='))
    {
        run.push("--all-ruby".to_owned());
    }
    if cache.no_cache {
        run.push("--no-cache".to_owned());
    }
    run.extend(cache.cache_dir.map(|dir| format!("--cache-dir={}", dir.display())));
    run
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(words: &[&str]) -> Vec<String> {
        let words = ["gctrace", "top"].iter().chain(words);
        match Args::try_parse_from(words).unwrap().subcommand {
            Some(Subcommand::Top(args)) => as_run(args),
            _ => panic!("not top"),
        }
    }

    /// Without a selection it is every Ruby; what is selected is handed on as it is.
    #[test]
    fn selections() {
        assert_eq!(run(&[]), ["gctrace", "--rate=49", "--no-native", "--all-ruby"]);
        assert!(run(&["--gvl", "--rate", "9"]).contains(&"--all-ruby".to_owned()));
        let some = run(&["--pid", "17,42", "--name=--odd name", "4711"]);
        assert!(!some.contains(&"--all-ruby".to_owned()), "{some:?}");
        for word in ["--pid=17", "--pid=42", "--pid=4711", "--name=--odd name"] {
            assert!(some.contains(&word.to_owned()), "{some:?}");
        }
        assert!(top_alone().is_some());
        assert!(matches!(top(top_alone().unwrap(), 1), Err(UsageError::NoTerminal)));
    }
}
