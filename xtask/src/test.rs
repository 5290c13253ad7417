//! `cargo xtask test`: everything a change must pass.

use std::process::{Command, ExitCode};

use anyhow::Result;

use crate::{
    demo::ruby,
    setup::{self, Purpose},
    util::{as_root, cargo, is_root, progress, run, status, target_dir},
};

/// Arguments of `test`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run only the tests whose name contains this.
    #[arg(long, value_name = "NAME")]
    filter: Option<String>,
    /// Arguments for the test programs, such as `--nocapture`.
    #[arg(last = true)]
    args: Vec<String>,
}

/// Runs the command; the last thing printed is cargo's own account of the tests.
pub(crate) fn run_tests(args: &Args) -> Result<ExitCode> {
    setup::ensure(&[Purpose::Test])?;
    progress("test: building gctrace");
    // The development build is what is tested: its arithmetic overflows are errors.
    run(cargo().args(["build", "--quiet", "--package", "gctrace-user"]))?;

    let mut host = cargo();
    host.args(["test", "--no-fail-fast", "--workspace", "--exclude", "gctrace-tests"]);
    let host_passed = status(finish(&mut host, args, &[]))?.success();

    // Probes are a resource of the whole machine: one live test at a time, and as root.
    let mut live = cargo();
    live.args(["test", "--no-fail-fast", "--package", "gctrace-tests"]);
    if !is_root() {
        let sudo: Command = as_root("true", "run the live tests")?;
        let program = sudo.get_program().to_string_lossy().into_owned();
        live.args(["--config", &format!("target.'cfg(all())'.runner = [{program:?}, \"-E\"]")]);
    }
    live.env("GCTRACE_BIN", target_dir()?.join("debug/gctrace"));
    if std::env::var_os("GCTRACE_RUBIES").is_none() {
        live.env("GCTRACE_RUBIES", ruby());
    }
    let live_passed = status(finish(&mut live, args, &["--test-threads=1"]))?.success();

    if !host_passed {
        progress("test: tests that need no root failed, see above");
    }
    Ok(if host_passed && live_passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Appends the filter and the arguments for the test programs.
fn finish<'a>(command: &'a mut Command, args: &Args, own: &[&str]) -> &'a mut Command {
    command.args(&args.filter).arg("--").args(own).args(&args.args)
}
