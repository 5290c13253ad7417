//! A Ruby built `--with-modular-gc`: each process is traced by the GC that it runs. No distribution ships one, so these tests
//! run only with `--ignored`, with the path of such a `ruby` in `GCTRACE_MODULAR_RUBY`; its library `default` must be installed.
//! The other live tests run on it, too: `GCTRACE_RUBIES`, with and without `RUBY_GC_LIBRARY=default`.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::live::Live;
use gctrace_tests::report::Report;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Done, Running, Script};
use gctrace_tests::{compare, ledger};

/// The environment variable that names the library for a process.
const VARIABLE: &str = "RUBY_GC_LIBRARY";
/// The file name of the library `default`.
const LIBRARY: &str = "librubygc.default.so";

/// The Ruby under test.
fn modular() -> Result<Ruby> {
    let path = std::env::var_os("GCTRACE_MODULAR_RUBY")
        .context("GCTRACE_MODULAR_RUBY has to name a Ruby built --with-modular-gc")?;
    ensure!(
        std::env::var_os(VARIABLE).is_none(),
        "run these tests without {VARIABLE}, which they set themselves"
    );
    Ruby::at(Path::new(&path))
}

/// A waiting script, with the GC library of that name or with the built-in GC.
fn waiting(live: &Live, ruby: &Ruby, library: Option<&str>) -> Result<Running> {
    let script = Script::new(live, ruby, "explicit.rb")?.arg("25").waiting();
    let script = match library {
        Some(name) => script.env(VARIABLE, name),
        None => script,
    };
    let mut running = script.start()?;
    running.wait_for("ready")?;
    Ok(running)
}

/// Checks that the process was traced once, by the image that contains its GC, and that its cycles and pauses are the witness's.
fn traced_by(report: &Report, done: &Done, library: bool) -> Result<()> {
    ledger::check_lossless(report)?;
    let lines = report.gcs_of(done.pid).collect::<Vec<_>>();
    compare::program(&lines, &done.report)?;
    let processes = report.processes_of(done.pid).count();
    let exits = report.exits.iter().filter(|exit| exit.pid == done.pid).count();
    ensure!((processes, exits) == (1, 1), "{processes} process lines, {exits} exit lines");
    ensure!(report.refused.iter().all(|line| line.pid != Some(done.pid)), "{:?}", report.refused);
    compare::cycles(&lines, done.log()?).demand_equal()?;
    compare::pauses(&lines, done.log()?)?;
    let process = report.processes_of(done.pid).next().context("no process line")?;
    ensure!(process.method == "sites", "{}", process.method);
    ensure!(process.image.ends_with(LIBRARY) == library, "traced by {}", process.image);
    Ok(())
}

/// Processes with and without the library at the same time, some started before gctrace and some after.
#[test]
#[ignore = "needs GCTRACE_MODULAR_RUBY"]
fn each_process_by_the_gc_it_runs() -> Result<()> {
    let ruby = modular()?;
    let live = Live::begin()?;
    for arguments in [&["--all-ruby"][..], &["--all-ruby", "--without-cookies"]] {
        let libraries = [None, Some("default")];
        let start = || -> Result<Vec<Running>> {
            libraries.iter().map(|library| waiting(&live, &ruby, *library)).collect()
        };
        let before = start()?;
        let gctrace = Invocation::jsonl(arguments)?.start_ready()?;
        // Without cookies, a process must be known before its first collection.
        let after = if arguments.len() > 1 { Vec::new() } else { start()? };
        let mut scripts: Vec<Running> = before.into_iter().chain(after).collect();
        for script in &mut scripts {
            script.say("go")?;
        }
        let done = scripts.into_iter().map(Running::finish).collect::<Result<Vec<_>>>()?;
        let report = gctrace.stop()?;
        for (done, library) in done.iter().zip(libraries.iter().cycle()) {
            traced_by(&report, done, library.is_some())
                .with_context(|| format!("{arguments:?}, {VARIABLE} {library:?}"))?;
        }
    }
    Ok(())
}

/// A single process with the library, selected by its pid while it runs.
#[test]
#[ignore = "needs GCTRACE_MODULAR_RUBY"]
fn one_process_with_the_library() -> Result<()> {
    let ruby = modular()?;
    let live = Live::begin()?;
    let mut script = waiting(&live, &ruby, Some("default"))?;
    let gctrace = Invocation::jsonl(["--pid", &script.pid().to_string()])?.start_ready()?;
    script.say("go")?;
    let done = script.finish()?;
    traced_by(&gctrace.stop()?, &done, true)
}

/// A command with the library: all of its cycles are seen, from the first on.
#[test]
#[ignore = "needs GCTRACE_MODULAR_RUBY"]
fn a_command_with_the_library() -> Result<()> {
    let ruby = modular()?;
    let live = Live::begin()?;
    let script = Script::new(&live, &ruby, "explicit.rb")?.arg("12").env(VARIABLE, "default");
    let (command, env, outputs) = script.into_parts()?;
    let args = std::iter::once("--".into()).chain(command);
    let (report, _) = Invocation::jsonl(args)?.envs(env).start()?.done()?;
    let (script, log) = outputs.read("")?;
    let lines = report.gcs_of(script.pid).collect::<Vec<_>>();
    compare::whole_life(&lines, script.pid)?;
    compare::program(&lines, &script)?;
    compare::cycles(&lines, &log.context("no witness")?).demand_equal()
}

/// A GC other than CRuby's own is refused by name, and does not hide a process with CRuby's GC
/// (`GCTRACE_FOREIGN_GC`: the name of such a library, installed beside the other one).
#[test]
#[ignore = "needs GCTRACE_MODULAR_RUBY and GCTRACE_FOREIGN_GC"]
fn a_foreign_gc_is_refused() -> Result<()> {
    let ruby = modular()?;
    let name =
        std::env::var_os("GCTRACE_FOREIGN_GC").context("GCTRACE_FOREIGN_GC has to name a GC library")?;
    let live = Live::begin()?;
    let gctrace = Gctrace::all_ruby(&live)?;
    let foreign = Script::unwitnessed(&live, &ruby, "explicit.rb")?.env(VARIABLE, &name).run()?;
    let own = Script::new(&live, &ruby, "explicit.rb")?.env(VARIABLE, "default").run()?;
    let report = gctrace.stop()?;
    traced_by(&report, &own, true)?;
    let told: Vec<_> = report.refused.iter().filter(|line| line.pid == Some(foreign.pid)).collect();
    ensure!(told.len() == 1 && told[0].reason.contains("only CRuby's own"), "{told:?}");
    ensure!(report.gcs_of(foreign.pid).count() == 0, "cycles of a GC that is not known");
    ensure!(report.processes_of(foreign.pid).count() == 0, "the process was treated as a traced one");
    Ok(())
}
