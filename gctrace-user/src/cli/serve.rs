//! `gctrace serve`: resolves its flags, and requests for a part of a recording as `gctrace report` resolves its flags.

use std::{path::PathBuf, time::Duration};

use clap::Parser as _;
use gctrace_serve::{Asked, Options};

use super::{
    Args, Settings, UsageError,
    args::{keep::DEFAULT_BYTES, record::part, serve::ServeArgs},
    parse,
    settings::Live,
};
use crate::{export::window::Window, trace_file::Header};

/// Default for how long events are kept.
const DEFAULT_KEEP: Duration = Duration::from_mins(10);

impl ServeArgs {
    /// Options of the server of a recording.
    ///
    /// # Errors
    ///
    /// No recording is named, or more than two are.
    pub fn options(&self) -> Result<Options, UsageError> {
        let (file, against) = match &self.files[..] {
            [file] => (file, None),
            [a, b] => (b, Some(a.clone())),
            [] => return Err(UsageError::NothingToServe),
            _ => return Err(UsageError::TooManyRecordings),
        };
        Ok(Options { file: file.clone(), against, listen: self.listen, choose })
    }
}

/// Resolves `gctrace serve --live` to a run.
///
/// # Errors
///
/// The selection is not valid.
pub fn live(args: ServeArgs, own_pid: u32) -> Result<Settings, UsageError> {
    let ServeArgs {
        files,
        live: _,
        listen,
        open,
        keep,
        keep_size,
        mut select,
        look,
        as_root,
        proc: _,
        cache,
        command,
    } = args;
    let words: Vec<String> = files.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    select.all_ruby |= select.is_empty() && words.is_empty() && command.is_empty();
    let run = Args::try_parse_from(["gctrace"]).map_err(|error| UsageError::Flags(error.to_string()))?;
    // The run traces what a recording contains, but writes no file.
    let record = Some(PathBuf::from(gctrace_serve::LIVE));
    let mut run = Args { select, look, record, as_root, cache, words, command, ..run };
    run.outputs.reports.quiet = true;
    let settings = Settings::resolve(run, own_pid).map_err(|error| match error {
        UsageError::Word(word) => UsageError::FileWithLive(word),
        error => error,
    })?;
    let keep_ns = parse::nanos(keep.unwrap_or(DEFAULT_KEEP));
    let live = Live { listen, open, keep_ns, keep_bytes: keep_size.unwrap_or(DEFAULT_BYTES) };
    let mut notes = settings.notes;
    if settings.memory_account {
        notes.push("--memory-account has no effect on the page: use gctrace heap --by memory");
    }
    Ok(Settings { live: Some(live), memory_account: false, notes, hottest: false, record: None, ..settings })
}

/// Resolves the part of a recording that a request asks for.
pub fn choose(header: &Header, asked: &Asked) -> Result<Window, String> {
    let moment = |name: &str, text: &Option<String>| {
        let moment = text.as_deref().map(parse::moment).transpose();
        moment.map_err(|why| format!("{name}={}: {why}", text.as_deref().unwrap_or_default()))
    };
    let (from, to) = (moment("from", &asked.from)?, moment("to", &asked.to)?);
    let pids = asked.pids.iter().map(|text| parse::pids(text).map_err(|why| format!("pid={text}: {why}")));
    let pids: Vec<_> = pids.collect::<Result<_, _>>()?;
    let window = part(header, from, to, &pids).map_err(|error| error.to_string())?;
    let Some(text) = &asked.last else { return Ok(window) };
    let last = parse::duration(text).map_err(|why| format!("last={text}: {why}"))?;
    let now_ns = header.dump.as_ref().map(|dump| dump.at_ns);
    let Some(now_ns) = now_ns.filter(|_| window.from_ns.or(window.to_ns).is_none()) else {
        return Err(format!("last={text}: this is of pages of `gctrace serve --live`, without from and to"));
    };
    let last_ns = parse::nanos(last);
    Ok(Window { from_ns: Some(now_ns.saturating_sub(last_ns)), ..window })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Subcommand;

    fn parsed(words: &[&str]) -> Result<ServeArgs, clap::Error> {
        let matches = crate::cli::command().try_get_matches_from([&["gctrace", "serve"], words].concat())?;
        match <Args as clap::FromArgMatches>::from_arg_matches(&matches)?.subcommand {
            Some(Subcommand::Serve(args)) => Ok(args),
            _ => panic!("not serve"),
        }
    }

    /// Either a recording or a run: flags of one are refused for the other.
    #[test]
    fn files_and_runs() {
        assert_eq!(parsed(&["x"]).unwrap().options().unwrap().file, PathBuf::from("x"));
        let two = parsed(&["a", "b"]).unwrap().options().unwrap();
        assert_eq!((two.against, two.file), (Some("a".into()), "b".into()));
        assert!(parsed(&["a", "b", "c"]).unwrap().options().is_err());
        for wrong in [
            &["x", "--pid", "4"][..],
            &["x", "--gvl"],
            &["x", "--keep", "1m"],
            &["x", "--no-cache"],
            &["x", "--", "ruby"],
        ] {
            assert!(parsed(wrong).is_err(), "{wrong:?}");
        }
        // With neither, the error names the alternatives.
        let nothing = parsed(&[]).unwrap().options().unwrap_err().to_string();
        assert!(nothing.contains("gctrace serve FILE") && nothing.contains("--live"), "{nothing}");
        let run = |words: &[&str]| live(parsed(words).unwrap(), 7);
        let every = run(&["--live"]).unwrap();
        let of = every.live.clone().unwrap();
        assert!(every.selection.all && every.record.is_none() && every.gvl.is_none());
        assert_eq!((of.keep_ns, of.keep_bytes), (600_000_000_000, 64 << 20));
        assert!(every.wants_accounts() && every.stacks.is_some() && !every.data_on_stdout());
        let some = run(&["--live", "17", "--gvl", "--keep=30s", "--keep-size=4MiB", "--open", "--", "ruby"])
            .unwrap();
        assert_eq!((some.selection.all, &some.selection.pids[..]), (false, &[17][..]));
        assert!(some.gvl.is_some_and(|gvl| gvl.spans) && some.selection.command.is_some());
        assert!(some.notes.is_empty() && run(&["--live", "--memory-account"]).unwrap().notes.len() == 1);
        let of = some.live.unwrap();
        assert!(of.open && of.keep_ns == 30_000_000_000 && of.keep_bytes == 4 << 20);
        let error = run(&["--live", "x.gctrace"]).unwrap_err().to_string();
        assert!(error.starts_with("`x.gctrace` is not a pid: --live traces"), "{error}");
        assert_eq!(run(&["--live", "7"]).unwrap_err(), UsageError::OwnPid(7));
    }
}
