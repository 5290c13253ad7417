//! `cargo xtask recordings`: the committed recordings, and the expected outputs for them (tests/fixtures/recordings).

use anyhow::Result;

use crate::{
    test,
    util::{cargo, run},
};

/// Arguments of `recordings`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Record a program with the Rubies of the lab again, as root; all expected outputs change with that.
    #[arg(long)]
    again: bool,
}

/// Runs the command. Its user must review the differences before committing them.
pub(crate) fn run_recordings(args: &Args) -> Result<()> {
    let mut tests = test::with_rubies()?;
    if args.again {
        let names = ["live_record::golden", "live_record::golden_requests"];
        run(tests.args(["--test", "live", "--", "--ignored", "--exact"]).args(names))?;
        tests = test::with_rubies()?;
    }
    let mut outputs = cargo();
    outputs.args(["test", "--lib", "--package", "gctrace-user", "golden"]);
    for written in [&mut outputs, tests.args(["--test", "host_report"])] {
        run(written.env("GCTRACE_WRITE_DOCS", "1"))?;
    }
    Ok(())
}
