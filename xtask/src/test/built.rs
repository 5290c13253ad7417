//! `cargo xtask test --built`: checks results from stripped libraries against builds that kept their symbols.

use std::{fs, io, process::ExitCode};

use anyhow::{Context as _, Result, ensure};

use super::{BUILT, root_tests};
use crate::{
    lab::built::{self, Built, Outcome},
    lab::{self, Suite},
    util::{cargo, progress, root, short, status},
};

/// The tests that run on each build, by the names of their files.
const LIVE: [&str; 2] = ["host_witness", "live_gc"];
/// The test of the images named in the environment.
const FINDER: &str = "images_of_the_environment";

/// Creates the builds, checks each one, and writes the table.
pub(super) fn run_checks(names: &[String]) -> Result<ExitCode> {
    let outcomes = built::ensure(names)?;
    super::build()?;
    let mut rows = Vec::new();
    let mut passed = true;
    let mut checked = 0;
    for outcome in &outcomes {
        match outcome {
            Outcome::Built(built) => {
                let (row, good) = check(built)?;
                rows.push(row);
                passed &= good;
                checked += 1;
            }
            Outcome::NoSource(missing) => {
                progress(format!("test: {missing}"));
                rows.push(row(missing.suite, "", "", "the mirror has no source for it", "", ""));
            }
        }
    }
    ensure!(checked > 0, "no Ruby could be built");
    let path = root().join("docs/lab-results.md");
    fs::create_dir_all(path.parent().context("a path has a parent")?).context("cannot create docs")?;
    let before = match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        read => read.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let page = page(&merged(&before, &rows));
    fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()))?;
    progress(format!("test: the results are in {}", short(&path)));
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The row of one build, and whether it passed.
fn check(built: &Built) -> Result<(String, bool)> {
    progress(format!("test: {} {}: sites against symbols", built.suite, built.version));
    let mut finder = cargo();
    finder.args(["test", "--package", "gctrace-cruby"]).args(BUILT);
    finder.args(["--lib", "--", FINDER, "--ignored", "--nocapture"]);
    // The source is beside the build: `build/results/built.so`, `build/source`.
    let source = built.library.ancestors().nth(2).map(|build| build.join("source")).unwrap_or_default();
    finder.env("GCTRACE_RUBY_IMAGES", &built.library).env("GCTRACE_RUBY_SOURCE", source);
    let found = status(&mut finder)?.success();
    let mut lived = true;
    for name in LIVE {
        progress(format!("test: {} {}: {name}", built.suite, built.version));
        let mut live = root_tests()?;
        if name == "live_gc" {
            // The skipped test requires a Ruby with YJIT, which not every Ruby has.
            live.args(["--test", "live", "--", "live_gc::", "--test-threads=1"]);
            live.args(["--skip", "yjit_equals_the_witness"]);
        } else {
            live.args(["--test", name]);
        }
        lived &= status(live.env("GCTRACE_RUBIES", &built.ruby))?.success();
    }
    let word = |good: bool| if good { "pass" } else { "FAIL" };
    let sections = built.differing.iter().map(|(name, bytes)| match bytes {
        0 => format!("`{name}` equal"),
        _ => format!("`{name}` {bytes} bytes differ"),
    });
    let code = sections.collect::<Vec<_>>().join(", ");
    let row = row(built.suite, &built.version, &built.compiler, &code, word(found), word(lived));
    Ok((row, found && lived))
}

fn row(suite: &str, version: &str, compiler: &str, code: &str, sites: &str, witness: &str) -> String {
    format!("| {suite} | {version} | {compiler} | {code} | {sites} | {witness} |\n")
}

/// The rows of a page, with the rows about the same suites replaced by the new ones, in the order of the lab.
fn merged(before: &str, new: &[String]) -> String {
    let about = |row: &str, suite: &Suite| row.starts_with(&format!("| {} |", suite.name));
    let rows = lab::chosen(&[]).filter_map(|suite| {
        let row = new.iter().map(|row| row.trim_end()).find(|row| about(row, suite));
        row.or_else(|| before.lines().find(|row| about(row, suite))).map(|row| format!("{row}\n"))
    });
    rows.collect()
}

fn page(rows: &str) -> String {
    format!(
        "# Debian's Rubies, compiled again with symbols\n\n\
         Written by `cargo xtask test --built`. Each Ruby is built from the suite's source package by the suite's own\n\
         compiler. *Code*: the sections of the build against those of the shipped, stripped library of the same version.\n\
         *Sites*: what gctrace finds in the build, held against its symbols and DWARF. *Witness*: the tests `{}` on it.\n\
         A run that asks for some of the suites leaves the rows of the others as they were.\n\n\
         | suite | version | compiler | code | sites | witness |\n\
         |---|---|---|---|---|---|\n{rows}",
        LIVE.join("`, `")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run replaces the rows of its suites and keeps the other rows, in the order of the lab, whatever the old page contains.
    #[test]
    fn rows_are_kept() {
        let old = page(
            "| trixie | 3 | | | pass | pass |\n| bullseye | 2 | | | FAIL | pass |\n| bookworm | 3.1 | | | | |\n",
        );
        let new = [
            "| bullseye | 2 | | | pass | pass |\n".to_owned(),
            "| experimental | | | none | | |\n".to_owned(),
        ];
        let rows = merged(&old, &new);
        let expected = "| bullseye | 2 | | | pass | pass |\n| bookworm | 3.1 | | | | |\n\
                        | trixie | 3 | | | pass | pass |\n| experimental | | | none | | |\n";
        assert_eq!(rows, expected);
        assert_eq!(merged(&page(&rows), &[]), expected);
        assert_eq!(merged("", &new[..1]), new[0]);
    }
}
