//! Programs whose titles overwrite the memory in which the kernel finds their environment.

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::{Invocation, read};
use gctrace_tests::ledger;
use gctrace_tests::live::Live;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use gctrace_tests::tunemygc::Set;
use serde_json::{Value, json};

/// A worker has the environment that its master had before its title: if gctrace has seen that, it reports it; otherwise it reports that the
/// environment is unknown, not that nothing is set, and writes no sample sets.
#[test]
fn of_workers() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::first_and_last(|ruby| {
        for early in [true, false] {
            let sets = live.dir(&format!("sets-{}-{early}", ruby.version()))?;
            let mut master = Script::unwitnessed(&live, ruby, "titled.rb")?
                .env("RUBY_GC_HEAP_GROWTH_FACTOR", "1.5")
                .env("OTEL_SERVICE_NAME", "shop")
                .start()?;
            master.wait_for("started")?;
            if !early {
                master.say("title")?;
                master.wait_for("titled")?;
            }
            let pid = master.pid();
            let mut args = vec!["--pid".into(), pid.to_string().into(), "--tunemygc".into()];
            args.push(sets.clone().into_os_string());
            let gctrace = Invocation::jsonl(args)?.start_ready()?;
            if early {
                master.say("title")?;
                master.wait_for("titled")?;
            }
            let outputs = master.outputs();
            master.say("fork")?;
            master.finish()?;
            let finished = gctrace.wait()?;
            let report = read(&finished)?;
            ledger::check(&report)?;
            let (worker, _) = outputs.read(".worker")?;
            ensure!(worker.extra["factor"] == "1.5", "{:?}", worker.extra);
            let known = early.then(|| json!({ "RUBY_GC_HEAP_GROWTH_FACTOR": "1.5" }));
            for pid in [pid, worker.pid] {
                let process = report.processes.iter().find(|line| line.pid == pid).context("no process")?;
                let env = process.env.clone().map(Value::Object);
                ensure!(env == known, "{early}: {process:?}");
            }
            let services = report.summaries.iter().filter(|line| line["service"] == "shop").count();
            ensure!(services == if early { 2 } else { 0 }, "{early}: {:?}", report.summaries);
            let user = &report.ledger.as_ref().context("a ledger")?.user;
            let (written, unknown) = if early { (2, 0) } else { (0, 2) };
            ensure!(user["sets_environment_unknown"] == unknown, "{user:?}");
            ensure!(std::fs::read_dir(&sets)?.count() == written, "{early}");
            let told = "no sample sets of 2 processes (environment overwritten by a title, or gone)";
            ensure!(finished.errors().contains(told) != early, "{}", finished.errors());
            for set in Set::read_dir(&sets)? {
                ensure!(set.env.get("RUBY_GC_HEAP_GROWTH_FACTOR") == Some(&json!("1.5")), "{:?}", set.env);
            }
        }
        Ok(())
    })
}
