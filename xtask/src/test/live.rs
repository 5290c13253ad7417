//! The live tests: those that load BPF programs. Probes are a machine-wide resource, so most of these tests need to run alone.
//!
//! They are one program, run several times. First the tests that may run concurrently, several at a time: they mostly wait. Among the other tests,
//! each of which keeps a thread of the harness waiting for its turn, they would run almost alone. Tests that sleep nearly all the time run beside
//! these, one at a time, so that they keep no place of theirs. Then all other tests, one after the other.

use std::{collections::BTreeSet, fs, process::Command};

use anyhow::{Context as _, Result};

use super::{Args, failures::Failures, runner, surround};
use crate::{
    programs::test_programs,
    util::{progress, root},
};

/// What tests that may run concurrently call.
const CONCURRENT: &str = "Live::beside_others()";
/// What those call that also sleep nearly all the time.
const IDLE: &str = "Live::idle_beside_others()";

/// Number of concurrent tests: with five on two cores, those with a time limit come too close to it.
const BESIDE: &str = "--test-threads=4";
/// The name of the test program.
const PROGRAM: &str = "live";

/// Runs the live tests; `prepare` completes their environment. `alone` is called before the rest of them run one after the other, which leaves most
/// of a CPU idle. Returns whether all passed.
pub(super) fn run(
    args: &Args,
    failures: &mut Failures,
    prepare: impl Fn(&mut Command),
    alone: impl FnOnce(),
) -> Result<bool> {
    progress("test: building the live tests");
    // Not run by cargo, which would wait for another cargo that is building.
    let programs = test_programs()?;
    let program = programs.get(PROGRAM).with_context(|| format!("there is no test program {PROGRAM}"))?;
    let command = || -> Result<Command> {
        let runner = runner()?;
        let mut command = Command::new(&runner[0]);
        command.args(&runner[1..]).arg(program).current_dir(root().join("tests"));
        surround(&mut command)?;
        prepare(&mut command);
        Ok(command)
    };
    if args.filter.is_some() {
        return failures.run(command()?.args(&args.filter).arg("--test-threads=3").args(&args.rest));
    }
    let (beside, idle) = (calling(CONCURRENT)?, calling(IDLE)?);
    let of = |names: &BTreeSet<String>, threads: &str| -> Result<Command> {
        let mut command = command()?;
        command.arg("--exact").args(names).arg(threads).args(&args.rest);
        Ok(command)
    };
    let mut several = of(&beside, BESIDE)?;
    // Without names, the program would run all tests.
    let first = if idle.is_empty() {
        failures.run(&mut several)?
    } else {
        failures.run_both(&mut of(&idle, "--test-threads=1")?, &mut several)?
    };
    alone();
    let mut others = command()?;
    others.args(["--exact", "--test-threads=1"]);
    for name in beside.iter().chain(&idle) {
        others.args(["--skip", name]);
    }
    Ok(failures.run(others.args(&args.rest))? && first)
}

/// The names of the tests that call this. A test that is found for neither is run with those that run alone.
fn calling(call: &str) -> Result<BTreeSet<String>> {
    let folder = root().join("tests/tests");
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        let Some(module) =
            path.file_stem().and_then(|name| name.to_str()).filter(|name| name.starts_with("live_"))
        else {
            continue;
        };
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        found.extend(tests_calling(&text, call).map(|name| format!("{module}::{name}")));
    }
    Ok(found)
}

/// The names of such tests in the text of one file.
fn tests_calling<'a>(text: &'a str, call: &str) -> impl Iterator<Item = &'a str> {
    text.split("\n#[test]\n").skip(1).filter_map(move |test| {
        let body = test.split_once("\n}\n").map_or(test, |(body, _)| body);
        // Ignored tests are run where their inputs are.
        let name = body.strip_prefix("fn ")?.split_once('(')?.0;
        body.contains(call).then_some(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only tests that call it themselves, within their own body.
    #[test]
    fn names() {
        let text = "\n#[test]\nfn one() -> Result<()> {\n    let live = Live::beside_others()?;\n}\n\n#[test]\nfn two() {\n    Live::begin();\n}\n\n\
                    fn helper() {\n    Live::beside_others();\n}\n\n#[test]\n#[ignore = \"x\"]\nfn three() {\n    Live::beside_others();\n}\n";
        assert_eq!(tests_calling(text, CONCURRENT).collect::<Vec<_>>(), ["one"]);
        assert_eq!(tests_calling(&text.replace(CONCURRENT, IDLE), IDLE).collect::<Vec<_>>(), ["one"]);
        assert_eq!(tests_calling(&text.replace(CONCURRENT, IDLE), CONCURRENT).count(), 0);
        let (found, idle) = (calling(CONCURRENT).unwrap(), calling(IDLE).unwrap());
        assert!(found.len() > 50 && found.contains("live_heap::dump_equals_object_space"), "{found:?}");
        // Without a name, the program would run all of its tests.
        assert!(idle.contains("live_serve_browser::kept_up_to_date") && idle.is_disjoint(&found), "{idle:?}");
    }
}
