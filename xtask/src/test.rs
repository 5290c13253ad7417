//! `cargo xtask test`: everything that a change must pass.

mod background;
mod built;
mod failures;
mod kernels;
mod live;
mod times;

use std::{
    ffi::OsString,
    fs,
    panic::resume_unwind,
    path::Path,
    process::{Command, ExitCode},
    thread,
};

use anyhow::{Context as _, Result};

use self::failures::Failures;
use crate::{
    demo::ruby,
    lab,
    setup::{self, Purpose},
    util::{as_root, cargo, is_root, progress, run, short, target_dir},
};

/// Arguments of `test`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run only the tests whose name contains this.
    #[arg(long, value_name = "NAME")]
    filter: Option<String>,
    /// Instead of the tests, check the Rubies of `cargo xtask lab --built` (which makes them first): what is found in them
    /// against their symbols and DWARF, and the witness tests on them; the results go to docs/lab-results.md. Names
    /// restrict it to these suites.
    #[arg(long, value_name = "SUITE", num_args = 0.., conflicts_with = "filter")]
    built: Option<Vec<String>>,
    /// Run the tests on other kernels beside the live ones, with the CPU time that those leave (see `cargo xtask vm`).
    #[arg(long, conflicts_with_all = ["filter", "built"])]
    kernels: bool,
    /// Arguments for the test programs, such as `--nocapture`.
    #[arg(last = true, value_name = "ARGS")]
    rest: Vec<String>,
}

/// Runs the command; it prints last what failed, and why.
pub(crate) fn run_tests(args: &Args) -> Result<ExitCode> {
    setup::ensure(&[Purpose::Test])?;
    if let Some(names) = &args.built {
        return built::run_checks(names);
    }
    let stages = times::Stages::default();
    stages.begin("building gctrace");
    let named = std::env::var_os("GCTRACE_RUBIES");
    // Creating the lab's roots mostly waits for the network; building does not.
    let rubies = thread::scope(|scope| {
        let rubies = scope.spawn(|| named.clone().map_or_else(rubies, Ok));
        progress("test: building gctrace");
        build()?;
        rubies.join().unwrap_or_else(|panic| resume_unwind(panic))
    })?;

    let mut failures = Failures::default();
    let host = |failures: &mut Failures| -> Result<bool> {
        stages.begin("tests that need no root");
        let mut host = cargo();
        host.args(["test", "--no-fail-fast"]).args(HOST);
        let mut passed = failures.run(finish(&mut host, args, &[]))?;
        if named.is_none() {
            passed &= other_patch_releases(args, failures)?;
        }
        Ok(passed)
    };
    // The unit tests are built with the CPU time that the live tests leave, and run afterwards: some start Rubies, which live tests would see.
    let host_first = if args.kernels { None } else { Some(host(&mut failures)?) };

    // Servers and files: these tests mostly wait, and do not disturb each other.
    stages.begin("tests of servers and files");
    let mut servers = root_tests()?;
    servers.args(WAITING).env("GCTRACE_RUBIES", &rubies);
    let servers_passed = failures.run(finish(&mut servers, args, &["--test-threads=4"]))?;

    let times = times::Times::begin()?;
    let prepare = |command: &mut Command| {
        command.env("GCTRACE_RUBIES", &rubies).env(times::VARIABLE, times.path());
    };
    stages.begin("live tests beside each other");
    let alone = || stages.begin("live tests one after the other");
    let (live_passed, kernels_passed) = if args.kernels {
        kernels::beside(|guests| {
            let passed = live::run(args, &mut failures, prepare, || {
                alone();
                guests();
            });
            stages.begin("waiting for other kernels");
            passed
        })?
    } else {
        (live::run(args, &mut failures, prepare, alone)?, true)
    };
    let host_passed = match host_first {
        Some(passed) => passed,
        None => host(&mut failures)?,
    };

    times.print();
    stages.print();
    for (passed, which) in [
        (host_passed, "tests that need no root"),
        (servers_passed, "tests of servers and files"),
        (live_passed, "live tests"),
        (kernels_passed, "tests on other kernels"),
    ] {
        if !passed {
            progress(format!("test: {which} failed"));
        }
    }
    failures.print();
    if !kernels_passed {
        kernels::print_failures()?;
    }
    let passed = host_passed && servers_passed && live_passed && kernels_passed;
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Builds the gctrace that tests run: the development build, in which arithmetic overflows are errors. The tests are selected with it,
/// so that its libraries have the same features as in all other commands here.
pub(crate) fn build() -> Result<()> {
    run(cargo().args(["build"]).args(BUILT))
}

/// Packages that are built together.
const BUILT: [&str; 4] = ["--package", "gctrace-user", "--package", "gctrace-tests"];
/// Packages with tests that do not need root.
const HOST: [&str; 3] = ["--workspace", "--exclude", "gctrace-tests"];
/// The package with tests on real Rubies.
const END_TO_END: [&str; 2] = ["--package", "gctrace-tests"];
/// Tests of that package that do not load BPF programs.
const WAITING: [&str; 5] = ["--lib", "--test", "host_*", "--test", "collector_*"];

/// A command for tests on real Rubies, as root.
fn root_tests() -> Result<Command> {
    let mut tests = cargo();
    tests.args(["test", "--no-fail-fast"]).args(END_TO_END);
    tests.args(["--config", &format!("target.'cfg(all())'.runner = {:?}", runner()?)]);
    surround(&mut tests)?;
    Ok(tests)
}

/// Like [`root_tests`], with the Rubies to test on and a new build of gctrace.
pub(crate) fn with_rubies() -> Result<Command> {
    setup::ensure(&[Purpose::Test])?;
    build()?;
    let mut tests = root_tests()?;
    tests.env("GCTRACE_RUBIES", rubies()?);
    Ok(tests)
}

/// The program, with its arguments, that runs a test program.
fn runner() -> Result<Vec<String>> {
    // A shell that runs this in the background makes it ignore these signals, and gctrace with it until it is ready.
    let mut runner = vec!["env".to_owned(), "--default-signal=HUP,INT,QUIT".to_owned()];
    if !is_root() {
        let sudo: Command = as_root("true", "run the live tests")?;
        runner.splice(0..0, [sudo.get_program().to_string_lossy().into_owned(), "-E".to_owned()]);
    }
    Ok(runner)
}

/// Sets the environment of tests on real Rubies.
fn surround(tests: &mut Command) -> Result<()> {
    tests.env("GCTRACE_BIN", target_dir()?.join("debug/gctrace"));
    // With backtraces of panics enabled, each error is followed by thirty lines of the test harness, and a tool that keeps only the end of
    // an output then loses the error.
    if std::env::var_os("RUST_LIB_BACKTRACE").is_none() {
        tests.env("RUST_LIB_BACKTRACE", "0");
    }
    Ok(())
}

/// Roots of the lab on which the tests run besides this machine's Ruby (Debian 12 has 3.1): one for each other series.
const TESTED: [&str; 3] = ["bullseye", "trixie", "experimental"];
/// Roots with the same series as this machine's Ruby, one of them with another patch release.
const SAME_SERIES: [&str; 2] = ["bookworm", "bookworm-security"];
/// The library that unit tests read, relative to a root.
const LIBRUBY: &str = "usr/lib/x86_64-linux-gnu/libruby-3.1.so.3.1";

/// The Rubies to test on if the caller names none: this machine's and those of the lab, after creating the lab's roots for tests.
fn rubies() -> Result<OsString> {
    lab::available(&[&TESTED[..], &SAME_SERIES].concat())?;
    std::env::join_paths(std::iter::once(ruby()).chain(lab::available(&TESTED)?))
        .context("the path of a Ruby cannot be put into GCTRACE_RUBIES")
}

/// Repeats the unit tests that read a Ruby on each libruby of the lab that has the same series as the installed one but is a
/// different file: they must pass with and without security updates.
fn other_patch_releases(args: &Args, failures: &mut Failures) -> Result<bool> {
    let read = |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let mut seen = vec![read(&Path::new("/").join(LIBRUBY))?];
    let mut passed = true;
    for ruby in lab::available(&SAME_SERIES)? {
        let library = lab::root_of(&ruby)?.join(LIBRUBY);
        let bytes = read(&library)?;
        if seen.contains(&bytes) {
            continue;
        }
        seen.push(bytes);
        progress(format!("test: unit tests on {}", short(&library)));
        let mut tests = cargo();
        tests.args(["test", "--no-fail-fast", "--lib", "--package", "gctrace-cruby"]);
        tests.args(BUILT);
        passed &= failures.run(finish(&mut tests, args, &[]).env("GCTRACE_LIBRUBY", &library))?;
    }
    Ok(passed)
}

/// Appends the filter and the arguments for the test programs.
fn finish<'a>(command: &'a mut Command, args: &Args, own: &[&str]) -> &'a mut Command {
    command.args(&args.filter).arg("--").args(own).args(&args.rest)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::util::root;

    /// No test file is left out.
    #[test]
    fn all_test_files_are_run() {
        let waiting: Vec<_> = WAITING.iter().filter_map(|name| name.strip_suffix('*')).collect();
        let read = |path: &str| fs::read_to_string(root().join("tests").join(path)).unwrap();
        let (manifest, live) = (read("Cargo.toml"), read("tests/live.rs"));
        let files = fs::read_dir(root().join("tests/tests")).unwrap().map(|file| file.unwrap().path());
        let tests: Vec<_> = files
            .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
            .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
            .collect();
        assert!(tests.len() > 50, "{tests:?}");
        for name in tests {
            let is_program =
                manifest.contains(&format!("[[test]]\nname = \"{name}\"\npath = \"tests/{name}.rs\"\n"));
            let is_run = if name.starts_with("live_") {
                live.contains(&format!("\nmod {name};\n"))
            } else {
                is_program && (name == "live" || waiting.iter().any(|prefix| name.starts_with(prefix)))
            };
            assert!(is_run, "{name} is not run");
        }
    }

    /// The features of each library are the same in all commands here. If they differ, cargo rebuilds the library and everything that depends on
    /// it: tokio with `test-util` alone cost a second build of the whole product.
    #[test]
    fn libraries_are_built_once() {
        let features = |edges: &str, packages: &[&str]| {
            let mut tree = cargo();
            tree.current_dir(root()).args(["tree", "--locked", "--prefix", "none", "--format", "{p} {f}"]);
            let said = tree.args(["--edges", edges]).args(packages).output().unwrap();
            assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
            let mut features = BTreeMap::<String, BTreeSet<String>>::new();
            for line in String::from_utf8(said.stdout).unwrap().lines() {
                let mut words = line.trim_end_matches(" (*)").split(' ');
                let library = format!("{} {}", words.next().unwrap(), words.next().unwrap_or_default());
                let last = words.next_back().filter(|word| !word.starts_with('(')).unwrap_or_default();
                features.entry(library).or_default().insert(last.to_owned());
            }
            features
        };
        let product = features("normal,build", &BUILT);
        assert!(product.len() > 100, "{product:?}");
        for packages in [&HOST[..], &END_TO_END] {
            for (library, with) in features("normal,build,dev", packages) {
                let same = product.get(&library).is_none_or(|product| *product == with);
                assert!(same, "{library}: {:?} in gctrace, {with:?} with {packages:?}", product[&library]);
            }
        }
    }

    /// A new user waits for xtask to be built before any output appears.
    #[test]
    fn few_libraries_before_the_first_word() {
        let mut tree = cargo();
        tree.current_dir(root()).args(["tree", "--locked", "--prefix", "none", "--format", "{p}"]);
        let said = tree.args(["--edges", "normal,build", "--package", "xtask"]).output().unwrap();
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        let text = String::from_utf8(said.stdout).unwrap();
        let packages: BTreeSet<&str> = text.lines().map(|line| line.trim_end_matches(" (*)")).collect();
        assert!((2..=40).contains(&packages.len()), "{} packages: {packages:?}", packages.len());
    }
}
