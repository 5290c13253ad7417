//! Parse, run, exit status.

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use gctrace_user::{
    app::{self, Outcome},
    cli::{self, Settings, Subcommand},
    console, doctor, dump, heap,
    host::proc_root,
    malloc,
};

fn main() -> ExitCode {
    console::init_logging();
    gctrace_user::signals::report_large_files();
    gctrace_user::signals::survive_requests();
    let args = match cli::parse() {
        Ok(args) => args,
        Err(error) => {
            let error = cli::with_hint(error, &std::env::args_os().collect::<Vec<_>>());
            let code = u8::try_from(error.exit_code()).unwrap_or(2);
            // Help and version go to standard output, errors to standard error.
            let printed = error.print().and_then(|()| io::stdout().flush());
            return if error.use_stderr() { ExitCode::from(code) } else { on_stdout(printed) };
        }
    };
    match args.subcommand {
        Some(Subcommand::Doctor(args)) => {
            if let Some(proc) = &args.proc {
                proc_root::read_below(proc);
            }
            return ended(doctor::run(&args.into()).map_err(app::Failure::from));
        }
        Some(Subcommand::Heap(args)) => {
            if let Some(proc) = &args.proc {
                proc_root::read_below(proc);
            }
            return ExitCode::from(heap::run(&args.into()));
        }
        Some(Subcommand::Malloc(args)) => {
            if let Some(proc) = &args.proc {
                proc_root::read_below(proc);
            }
            return match args.try_into() {
                Ok(settings) => ExitCode::from(malloc::run(&settings)),
                Err(error) => ended(Err(app::Failure::Usage(error))),
            };
        }
        Some(Subcommand::Dump(args)) => {
            if let Some(proc) = &args.proc {
                proc_root::read_below(proc);
            }
            return ExitCode::from(dump::run(&args.into()));
        }
        Some(Subcommand::Top(args)) => return top(args),
        Some(Subcommand::Record(args)) => return record(args),
        Some(Subcommand::Report(args)) => return ended(app::report(*args).map(Outcome::exit_status)),
        Some(Subcommand::Diff(args)) => return ended(app::diff(&args)),
        Some(Subcommand::Serve(args)) if args.live => return live(args),
        Some(Subcommand::Serve(args)) => return ended(app::serve(&args)),
        Some(Subcommand::Info(args)) => return ended(app::info(&args)),
        Some(Subcommand::Merge(args)) => return ended(app::merge(&args)),
        Some(Subcommand::Scrub(args)) => return ended(app::scrub(&args)),
        None if cli::alone() => {
            if let Some(args) = cli::top_alone() {
                return top(args);
            }
        }
        Some(Subcommand::Tune(args)) => return ExitCode::from(cli::tune(&args)),
        Some(Subcommand::Completions { shell }) => return written(&cli::completions(shell)),
        Some(Subcommand::Man) => {
            return match cli::man() {
                Ok(page) => written(&page),
                Err(error) => {
                    console::say(&format!("gctrace: making the manual page: {error}"));
                    ExitCode::from(2)
                }
            };
        }
        #[cfg(feature = "collector")]
        Some(Subcommand::Collector(args)) => {
            return match cli::collector(args) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    console::say(&format!("gctrace: {error}"));
                    ExitCode::from(2)
                }
            };
        }
        #[cfg(feature = "collector")]
        Some(Subcommand::Apps(args)) => {
            return match cli::apps(&args) {
                Ok(Some(text)) => written(text.as_bytes()),
                Ok(None) => {
                    console::say(
                        "gctrace: the store has no such application or token; `gctrace apps list` and `tokens` list them",
                    );
                    ExitCode::from(1)
                }
                Err(error) => {
                    console::say(&format!("gctrace: {error}"));
                    ExitCode::from(2)
                }
            };
        }
        None => {}
    }
    if let Some(proc) = &args.proc {
        proc_root::read_below(proc);
    }
    let result = Settings::resolve(args, proc_root::own_pid())
        .map_err(app::Failure::from)
        .and_then(|settings| app::run(&settings));
    ended(result.map(Outcome::exit_status))
}

/// A run that is shown on a terminal.
fn top(args: cli::TopArgs) -> ExitCode {
    if let Some(proc) = &args.proc {
        proc_root::read_below(proc);
    }
    let result = cli::top(args, proc_root::own_pid())
        .map_err(app::Failure::from)
        .and_then(|settings| app::run(&settings));
    ended(result.map(Outcome::exit_status))
}

/// A run that is served as a page.
fn live(args: cli::ServeArgs) -> ExitCode {
    if let Some(proc) = &args.proc {
        proc_root::read_below(proc);
    }
    let result = cli::live(args, proc_root::own_pid())
        .map_err(app::Failure::from)
        .and_then(|settings| app::run(&settings));
    ended(result.map(Outcome::exit_status))
}

/// A run that is written to a file.
fn record(args: cli::RecordArgs) -> ExitCode {
    if let Some(proc) = &args.proc {
        proc_root::read_below(proc);
    }
    let result = cli::record(args, proc_root::own_pid())
        .map_err(app::Failure::from)
        .and_then(|settings| app::run(&settings));
    ended(result.map(Outcome::exit_status))
}

/// Writes a text to standard output.
fn written(text: &[u8]) -> ExitCode {
    on_stdout(io::stdout().write_all(text).and_then(|()| io::stdout().flush()))
}

/// The exit status of a command that only writes to standard output.
fn on_stdout(written: io::Result<()>) -> ExitCode {
    match written {
        Ok(()) => ExitCode::SUCCESS,
        // The reader has closed the pipe.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            console::say(&format!("gctrace: writing to standard output: {error}"));
            ExitCode::from(2)
        }
    }
}

fn ended(result: Result<u8, app::Failure>) -> ExitCode {
    match result {
        Ok(status) => ExitCode::from(status),
        Err(failure) => {
            console::say(&format!("gctrace: {failure}"));
            ExitCode::from(failure.exit_status())
        }
    }
}
