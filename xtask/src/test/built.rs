//! `cargo xtask test --built`: what gctrace finds in stripped libraries, against builds that kept their symbols.

use std::{fmt::Write as _, fs, process::ExitCode};

use anyhow::{Context as _, Result, ensure};

use super::live_tests;
use crate::{
    lab_built::{self, Built, Outcome},
    util::{cargo, progress, root, run, short, status},
};

/// The tests that are run on each build, by the names of their test programs.
const LIVE: [&str; 2] = ["host_witness", "live_gc"];
/// The test of the images that the environment names.
const FINDER: &str = "images_of_the_environment";

/// Makes the builds, checks each one, and writes the table.
pub(super) fn run_checks(names: &[String]) -> Result<ExitCode> {
    let outcomes = lab_built::ensure(names)?;
    run(cargo().args(["build", "--quiet", "--package", "gctrace-user"]))?;
    let mut rows = String::new();
    let mut passed = true;
    let mut checked = 0;
    for outcome in &outcomes {
        match outcome {
            Outcome::Built(built) => {
                let (row, good) = check(built)?;
                rows.push_str(&row);
                passed &= good;
                checked += 1;
            }
            Outcome::NoSource(suite) => {
                writeln!(rows, "| {suite} | | | the mirror has no source of it | | |")?;
            }
        }
    }
    if !names.is_empty() {
        writeln!(rows, "\nOnly these suites were asked for: {}.", names.join(", "))?;
    }
    ensure!(checked > 0, "no Ruby could be built");
    let path = root().join("docs/lab-results.md");
    fs::create_dir_all(path.parent().context("a path has a parent")?).context("cannot create docs")?;
    fs::write(&path, page(&rows)).with_context(|| format!("cannot write {}", path.display()))?;
    progress(format!("test: the results are in {}", short(&path)));
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The row of one build, and whether it passed.
fn check(built: &Built) -> Result<(String, bool)> {
    progress(format!("test: {} {}: sites against symbols", built.suite, built.version));
    let mut finder = cargo();
    finder.args(["test", "--package", "gctrace-user", "--lib", "--", FINDER, "--nocapture"]);
    // The build lies beside its source: `build/results/built.so`, `build/source`.
    let source = built.library.ancestors().nth(2).map(|build| build.join("source")).unwrap_or_default();
    finder.env("GCTRACE_RUBY_IMAGES", &built.library).env("GCTRACE_RUBY_SOURCE", source);
    let found = status(&mut finder)?.success();
    let mut lived = true;
    for name in LIVE {
        progress(format!("test: {} {}: {name}", built.suite, built.version));
        let mut live = live_tests()?;
        live.args(["--test", name]);
        if name == "live_gc" {
            // That one demands a Ruby with YJIT, which not every single one has.
            live.args(["--", "--test-threads=1", "--skip", "yjit_equals_the_witness"]);
        }
        lived &= status(live.env("GCTRACE_RUBIES", &built.ruby))?.success();
    }
    let word = |good: bool| if good { "pass" } else { "FAIL" };
    let sections = built.differing.iter().map(|(name, bytes)| match bytes {
        0 => format!("`{name}` equal"),
        _ => format!("`{name}` {bytes} bytes differ"),
    });
    let row = format!(
        "| {} | {} | {} | {} | {} | {} |\n",
        built.suite,
        built.version,
        built.compiler,
        sections.collect::<Vec<_>>().join(", "),
        word(found),
        word(lived)
    );
    Ok((row, found && lived))
}

fn page(rows: &str) -> String {
    format!(
        "# Debian's Rubies, compiled again with symbols\n\n\
         Written by `cargo xtask test --built`. Each Ruby is built from the suite's source package by the suite's own\n\
         compiler. *Code*: the sections of the build against those of the shipped, stripped library of the same version.\n\
         *Sites*: what gctrace finds in the build, held against its symbols and DWARF. *Witness*: the tests `{}` on it.\n\n\
         | suite | version | compiler | code | sites | witness |\n\
         |---|---|---|---|---|---|\n{rows}",
        LIVE.join("`, `")
    )
}
