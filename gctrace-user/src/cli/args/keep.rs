//! Flags of a recording that is kept in memory until a trigger.

use std::{path::Path, time::Duration};

use clap::Args as ClapArgs;

use super::usage::UsageError;
use crate::{
    cli::parse,
    trace_file::{Keep, Metric, Trigger},
};

/// Default limit of the kept recording, compressed bytes.
pub(in crate::cli) const DEFAULT_BYTES: u64 = 64 << 20;
/// Default limit of the number of files that triggers write.
const DEFAULT_MOST: u64 = 10;

/// A flight recorder.
#[derive(Debug, ClapArgs)]
pub struct KeepArgs {
    /// Keep the recording of the last TIME in memory, e.g. 10m, and write it only on --dump-on or SIGUSR2, each time to a new file
    /// beside FILE
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub keep: Option<Duration>,

    /// Limit of that memory, compressed; the oldest parts are dropped first [default: 64MiB]
    #[arg(long, value_name = "SIZE", value_parser = parse::kept, requires = "keep")]
    pub keep_size: Option<u64>,

    /// Write what is kept when a metric of a process is above a value, e.g. 'gc.pause > 200ms' (repeatable): gc.pause,
    /// gc.pause.p99, gvl.wait, gvl.wait.p99, request (times), gc.share (percent), rss (size); or `end`, when the run ends.
    /// Shares and p99 are of 10 s
    #[arg(long, value_name = "TRIGGER", requires = "keep")]
    pub dump_on: Vec<Trigger>,

    /// After --dump-on has written a file it writes no other one for this time [default: the time of --keep]
    #[arg(long, value_name = "TIME", value_parser = parse::duration, requires = "keep")]
    pub dump_cooldown: Option<Duration>,

    /// Files that --dump-on writes at most [default: 10]
    #[arg(long, value_name = "N", requires = "keep")]
    pub max_dumps: Option<u64>,
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl KeepArgs {
    /// What is kept; `None` without `--keep`. `gvl` is the threshold above which GVL waits are reported individually, `None` if
    /// they are not traced; `requests` says whether requests are traced.
    ///
    /// # Errors
    ///
    /// No file is given from which dumps take their names, or a trigger needs something that is not traced.
    pub(in crate::cli) fn resolve(
        self,
        record: Option<&Path>,
        gvl: Option<Duration>,
        requests: bool,
    ) -> Result<Option<Keep>, UsageError> {
        let Self { keep, keep_size, dump_on, dump_cooldown, max_dumps } = self;
        let Some(time) = keep else { return Ok(None) };
        if record.is_none() {
            return Err(UsageError::KeepsNothing);
        }
        for &trigger in &dump_on {
            let needs = |flag| Err(UsageError::TriggerNeeds(trigger, flag));
            match (trigger, gvl) {
                (Trigger::Above(Metric::GvlWait | Metric::GvlWaitP99, _), None) => {
                    return needs("--gvl".to_owned());
                }
                (Trigger::Above(Metric::GvlWait, ns), Some(least)) if ns < nanos(least) => {
                    return needs(format!("--gvl-threshold {}ms", (ns as f64 / 1e6).max(0.001)));
                }
                (Trigger::Above(Metric::Request, _), _) if !requests => {
                    return needs("--requests".to_owned());
                }
                _ => {}
            }
        }
        Ok(Some(Keep {
            ns: nanos(time),
            bytes: keep_size.unwrap_or(DEFAULT_BYTES),
            triggers: dump_on,
            cooldown_ns: nanos(dump_cooldown.unwrap_or(time)),
            most: max_dumps.unwrap_or(DEFAULT_MOST),
        }))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Args, Settings, Subcommand, record};

    fn run(words: &[&str]) -> Result<Settings, String> {
        let args = Args::try_parse_from([&["gctrace"], words].concat()).map_err(|error| error.to_string())?;
        let settings = match args.subcommand {
            Some(Subcommand::Record(args)) => record(args, 7),
            _ => Settings::resolve(args, 7),
        };
        settings.map_err(|error| error.to_string())
    }

    /// Defaults and the flags that override them, for both commands.
    #[test]
    fn kept() {
        let of = |flags: &[&str]| run(&[&["record", "4", "-o", "x"], flags].concat()).unwrap().keep;
        assert_eq!(of(&[]), None);
        let (ns, triggers) = (600_000_000_000, Vec::new());
        let keep = Keep { ns, bytes: 64 << 20, triggers, cooldown_ns: ns, most: 10 };
        assert_eq!(of(&["--keep", "10m"]), Some(keep.clone()));
        let flags =
            ["--keep=10m", "--keep-size=8MiB", "--dump-on=gc.pause>1ms", "--dump-on=end", "--max-dumps=3"];
        let triggers = vec![Trigger::Above(Metric::GcPause, 1_000_000), Trigger::End];
        let keep = Keep { bytes: 8 << 20, triggers, most: 3, cooldown_ns: 5_000_000_000, ..keep };
        assert_eq!(of(&[&flags[..], &["--dump-cooldown=5s"]].concat()), Some(keep.clone()));
        let also = [&["4", "--record=x", "--dump-cooldown=5s"], &flags[..]].concat();
        assert_eq!(run(&also).unwrap().keep, Some(keep));
    }

    /// Impossible combinations are refused, and the error says what to do.
    #[test]
    fn refused() {
        let recorded = ["record", "4", "-o", "x", "--keep", "10m"];
        for (flags, part) in [
            (&["4", "--keep", "10m"][..], "--keep keeps a recording: name its file with --record"),
            (&["record", "4", "-o", "x", "--dump-on", "end"], "--keep <TIME>"),
            (&["record", "4", "-o", "x", "--keep", "0"], "give a time above zero"),
            (
                &[&recorded[..], &["--dump-on", "gc.pauses > 1s"]].concat(),
                "`gc.pauses` is not a metric; give `METRIC",
            ),
            (
                &[&recorded[..], &["--dump-on", "gvl.wait.p99 > 1s"]].concat(),
                "'gvl.wait.p99 > 1s' needs --gvl",
            ),
            (
                &[&recorded[..], &["--gvl", "--dump-on", "gvl.wait > 500us"]].concat(),
                "'gvl.wait > 500µs' needs --gvl-threshold 0.5ms",
            ),
            (&[&recorded[..], &["--dump-on", "request > 1s"]].concat(), "'request > 1s' needs --requests"),
            (&[&recorded[..], &["--keep-size", "1MiB"]].concat(), "from 4MiB to 64GiB"),
        ] {
            let error = run(flags).unwrap_err();
            assert!(error.contains(part), "{flags:?}: {error}");
        }
    }
}
