//! `gctrace serve`: flags, and how requests for a part are understood: as `gctrace report` understands its flags.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Args as ClapArgs, Parser as _};
use gctrace_serve::{Asked, Options};

use super::{
    Args, Settings, UsageError, args::CacheArgs, keep_args::DEFAULT_BYTES, look_args::LookArgs, parse,
    record::part, select_args::SelectArgs, settings::Live,
};
use crate::{export::window::Window, trace_file::Header};

/// Flags of `gctrace serve`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
        gctrace serve puma.gctrace                          prints the address of the page\n  \
        gctrace serve puma.gctrace --open                   and opens it in a browser\n  \
        gctrace serve yesterday.gctrace today.gctrace       today's, and what has changed\n  \
        sudo gctrace serve --live --gvl --name puma         what Puma does now, and did in the last 10 minutes\n  \
        sudo gctrace serve --live -- ruby script.rb         a program from its start\n  \
        ssh -L 8080:127.0.0.1:8080 host gctrace serve puma.gctrace --listen 127.0.0.1:8080\n  \
        \x20                                                   a recording on another host\n\n\
        Exit status: 0 ended by SIGINT or SIGTERM, 2 error or bad usage; with --live that of `gctrace record`.\n\
        A damaged recording is shown up to the damage. No privilege is needed without --live.\n\
        The address contains a secret; the server listens on this host only.")]
pub struct ServeArgs {
    /// The recording, written by `gctrace record` or --record. Of two, the second is shown, compared with the first. With --live pids: short for --pid
    #[arg(value_name = "FILE", required_unless_present = "live")]
    pub files: Vec<PathBuf>,

    /// Trace, and show what is seen while it goes on; without a selection every Ruby process
    #[arg(long)]
    pub live: bool,

    /// Address of this host and port to listen on [default: 127.0.0.1 and a free port]
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0", hide_default_value = true, value_parser = parse::listen_here)]
    pub listen: SocketAddr,

    /// Open the page in a browser, too (xdg-open)
    #[arg(long)]
    pub open: bool,

    /// (--live) Keep the last TIME in memory; older parts are dropped [default: 10m]
    #[arg(long, value_name = "TIME", requires = "live", value_parser = parse::duration)]
    pub keep: Option<Duration>,

    /// (--live) Limit of that memory, compressed; the oldest parts are dropped first [default: 64MiB]
    #[arg(long, value_name = "SIZE", requires = "live", value_parser = parse::kept)]
    pub keep_size: Option<u64>,

    /// What to trace.
    #[command(flatten, next_help_heading = "What to trace (--live)")]
    pub select: SelectArgs,

    /// What to look at.
    #[command(flatten, next_help_heading = "What to look at (--live)")]
    pub look: LookArgs,

    /// Under sudo, run COMMAND as root
    #[arg(long, requires = "live")]
    pub as_root: bool,

    /// Where the host's /proc is mounted, if gctrace runs in a container without the host's pids
    #[arg(long, value_name = "DIR", requires = "live", hide_short_help = true)]
    pub proc: Option<PathBuf>,

    /// The cache of analyses.
    #[command(flatten)]
    pub cache: CacheArgs,

    /// Start this command and trace it and everything it starts
    #[arg(last = true, value_name = "COMMAND", requires = "live")]
    pub command: Vec<std::ffi::OsString>,
}

/// How long is kept what was seen where nothing else is said.
const DEFAULT_KEEP: Duration = Duration::from_mins(10);

impl ServeArgs {
    /// What the server of a recording is to do.
    ///
    /// # Errors
    ///
    /// There are more than two.
    pub fn options(&self) -> Result<Options, UsageError> {
        let (file, against) = match &self.files[..] {
            [file] => (file, None),
            [a, b] => (b, Some(a.clone())),
            _ => return Err(UsageError::TooManyRecordings),
        };
        Ok(Options { file: file.clone(), against, listen: self.listen, choose })
    }
}

/// The run that `gctrace serve --live` is.
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
    // It looks at what a recording has, and no file is written.
    let record = Some(PathBuf::from(gctrace_serve::LIVE));
    let mut run = Args { select, look, record, as_root, cache, words, command, ..run };
    run.outputs.reports.quiet = true;
    let settings = Settings::resolve(run, own_pid)?;
    let keep_ns = u64::try_from(keep.unwrap_or(DEFAULT_KEEP).as_nanos()).unwrap_or(u64::MAX);
    let live = Live { listen, open, keep_ns, keep_bytes: keep_size.unwrap_or(DEFAULT_BYTES) };
    let mut notes = settings.notes;
    if settings.memory_account {
        notes.push("--memory-account has no effect on the page: use gctrace heap --by memory");
    }
    Ok(Settings { live: Some(live), memory_account: false, notes, hottest: false, record: None, ..settings })
}

/// The part of a recording that a request asks for.
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
    let last_ns = u64::try_from(last.as_nanos()).unwrap_or(u64::MAX);
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

    /// A file, or a run: the flags of one are not those of the other.
    #[test]
    fn files_and_runs() {
        assert_eq!(parsed(&["x"]).unwrap().options().unwrap().file, PathBuf::from("x"));
        let two = parsed(&["a", "b"]).unwrap().options().unwrap();
        assert_eq!((two.against, two.file), (Some("a".into()), "b".into()));
        assert!(parsed(&["a", "b", "c"]).unwrap().options().is_err());
        for wrong in [
            &[][..],
            &["x", "--pid", "4"],
            &["x", "--gvl"],
            &["x", "--keep", "1m"],
            &["x", "--no-cache"],
            &["x", "--", "ruby"],
        ] {
            assert!(parsed(wrong).is_err(), "{wrong:?}");
        }
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
        assert_eq!(run(&["--live", "x.gctrace"]).unwrap_err(), UsageError::Word("x.gctrace".to_owned()));
        assert_eq!(run(&["--live", "7"]).unwrap_err(), UsageError::OwnPid(7));
    }
}
