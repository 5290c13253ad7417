//! The programs of the tests on real Rubies.

use std::{collections::BTreeMap, path::PathBuf, process::Command};

use anyhow::{Context as _, Result, ensure};

use crate::util::{cargo, line, root};

/// Builds the test programs and returns them by name. Cargo prints each as `Executable tests/live.rs (target/debug/deps/live-…)`.
pub(crate) fn test_programs() -> Result<BTreeMap<String, PathBuf>> {
    let mut tests = cargo();
    tests.args(["test", "--no-run", "--package", "gctrace-tests"]).env("CARGO_TERM_COLOR", "never");
    executables(&mut tests)
}

/// The test programs that a `cargo test --no-run` command builds.
pub(crate) fn executables(tests: &mut Command) -> Result<BTreeMap<String, PathBuf>> {
    let built = tests.output().with_context(|| format!("cannot run `{}`", line(tests)))?;
    let said = String::from_utf8_lossy(&built.stderr);
    ensure!(built.status.success(), "`{}` failed ({}):\n{said}", line(tests), built.status);
    let named = said.lines().filter_map(|line| {
        let (source, program) = line.trim().strip_prefix("Executable tests/")?.split_once(".rs (")?;
        Some((source.to_owned(), root().join(program.trim_end_matches(')'))))
    });
    named.map(|(name, path)| Ok((name, path.canonicalize()?))).collect()
}
