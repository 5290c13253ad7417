//! `gctrace top` is a run with its own output.

use std::io::{self, IsTerminal as _};

use clap::Parser as _;

use super::{
    Args, Settings, UsageError,
    args::{FormatArg, Subcommand, look::LookArgs, top::TopArgs},
    settings::Show,
};

/// Whether `gctrace` was called without arguments on a terminal.
pub fn alone() -> bool {
    std::env::args_os().len() == 1 && io::stdout().is_terminal() && io::stdin().is_terminal()
}

/// The arguments of `gctrace top` without flags.
pub fn top_alone() -> Option<TopArgs> {
    match Args::try_parse_from(["gctrace", "top"]).ok()?.subcommand? {
        Subcommand::Top(args) => Some(args),
        _ => None,
    }
}

/// Resolves `gctrace top` to a run.
///
/// # Errors
///
/// There is no terminal, or the selection is not valid.
pub fn top(args: TopArgs, own_pid: u32) -> Result<Settings, UsageError> {
    let terminal = io::stdout().is_terminal() && io::stdin().is_terminal();
    if !args.once && !terminal {
        return Err(UsageError::NoTerminal);
    }
    let show = match (args.once, args.format) {
        (false, _) => Show::Screen { mouse: !args.no_mouse },
        (true, FormatArg::Text) => Show::Text,
        (true, FormatArg::Jsonl) => Show::Jsonl,
    };
    let duration = args.once.then_some(args.interval);
    let settings = Settings::resolve(as_run(args)?, own_pid)?;
    Ok(Settings { top: Some(show), duration, hottest: false, notes: Vec::new(), ..settings })
}

/// The arguments of the corresponding run.
fn as_run(args: TopArgs) -> Result<Args, UsageError> {
    let TopArgs { mut select, gvl, requests, rate, cache, words, .. } = args;
    select.pids.extend(words);
    select.all_ruby |= select.is_empty();
    // With a smaller budget only a part of the time would be counted, but shown as all of it.
    let gvl: &[&str] = if gvl { &["--gvl", "--gvl-budget=100"] } else { &[] };
    let requests: &[&str] = if requests { &["--requests"] } else { &[] };
    let run = Args::try_parse_from(["gctrace", "--no-native"].iter().chain(gvl).chain(requests));
    let run = run.map_err(|error| UsageError::Flags(error.to_string()))?;
    Ok(Args { select, cache, look: LookArgs { rate: Some(rate), ..run.look }, ..run })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(words: &[&str]) -> Settings {
        let words = ["gctrace", "top"].iter().chain(words);
        match Args::try_parse_from(words).unwrap().subcommand {
            Some(Subcommand::Top(args)) => Settings::resolve(as_run(args).unwrap(), 1).unwrap(),
            _ => panic!("not top"),
        }
    }

    /// Without a selection every Ruby is selected; a selection is passed on unchanged.
    #[test]
    fn selections() {
        let every = run(&[]);
        assert!(every.selection.all && every.gvl.is_none());
        assert!(every.stacks.is_some_and(|stacks| stacks.rate == 49 && !stacks.native));
        let contended = run(&["--gvl", "--rate", "9"]);
        assert!(contended.selection.all && contended.gvl.is_some());
        let serving = run(&["--requests"]);
        assert!(serving.requests.is_some() && serving.gvl.is_none() && contended.requests.is_none());
        let some =
            run(&["--pid", "17,42", "--name=--odd name", "4711", "--only-pid=9", "--cgroup=/a=b"]).selection;
        assert!(!some.all);
        assert_eq!((some.pids, some.only_pids), (vec![17, 42, 4711], vec![9]));
        assert_eq!((some.names, some.cgroups), (vec!["--odd name".to_owned()], vec!["/a=b".into()]));
        assert!(top_alone().is_some());
        assert!(matches!(top(top_alone().unwrap(), 1), Err(UsageError::NoTerminal)));
    }
}
