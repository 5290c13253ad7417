//! The process context that an OpenTelemetry SDK publishes (OTEP 4719): how a process identifies itself.

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::Guarded;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::{Live, rubies_dir};
use gctrace_tests::receiver::{Push, Receiver};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::{PATIENCE, python};
use serde_json::Value;

/// Starts the publisher, and a forked child without its own context. The environment names another service.
fn publisher(ruby: &Ruby, pairs: &[&str]) -> Result<(Guarded, u64)> {
    let mut command = ruby.command()?;
    command.arg(rubies_dir().join("process_context.rb")).args(pairs).env("OTEL_SERVICE_NAME", "web");
    let mut program = Guarded::start("ruby", &mut command)?;
    let said = program.wait_stdout(PATIENCE, "published", |line| line.starts_with("published "))?;
    let child = said.rsplit(' ').next().and_then(|pid| pid.parse().ok()).context("no child")?;
    Ok((program, child))
}

/// The resources that two one-second runs push about a process and its children, decoded with the official definition.
fn resources(live: &Live, pid: u32) -> Result<Vec<Value>> {
    let receiver = Receiver::start(|_, _| (200, "", b""))?;
    let url = format!("http://{}", receiver.address);
    let args = ["--pid", &pid.to_string(), "--quiet", "--wall", "--otlp", &url, "--duration", "1s"];
    let finished = Invocation::new(args)?.run()?;
    ensure!(finished.status.success(), "{}", finished.errors());
    let files = receiver.pushes().into_iter().enumerate().map(|(at, push): (usize, Push)| {
        let kind = if push.path.ends_with("metrics") { "metrics" } else { "profiles" };
        let path = live.path(&format!("{at}.{kind}"));
        std::fs::write(&path, &push.body)?;
        Ok(path)
    });
    let found = python::script("otlp.py", &files.collect::<Result<Vec<_>>>()?)?;
    ensure!(found["errors"].as_array().is_some_and(Vec::is_empty), "{}", found["errors"]);
    found["resources"].as_array().cloned().context("no resources")
}

/// The service and its attributes are those that the process publishes. A forked child does not inherit them. Sums over several
/// processes have their own instance id. The next run reads what the process has published since.
#[test]
fn published_contexts_name_the_service() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::each(|ruby| {
        let first = [
            "service.name=till",
            "service.instance.id=one",
            "deployment.environment.name=bed",
            "process.pid=1",
        ];
        let (mut program, child) = publisher(ruby, &first)?;
        let pid = program.pid();
        let found = resources(&live, pid)?;
        let own =
            found.iter().find(|about| about["process.pid"] == pid).with_context(|| format!("{found:?}"))?;
        ensure!(own["service.name"] == "till" && own["service.instance.id"] == "one", "{own}");
        ensure!(own["deployment.environment.name"] == "bed", "{own}");
        let other = found.iter().find(|about| about["process.pid"] == child);
        let other = other.with_context(|| format!("no child {child}: {found:?}"))?;
        ensure!(other["service.name"] == "web" && other["service.instance.id"].is_null(), "{other}");
        let sums =
            found.iter().find(|about| about["process.pid"].is_null() && about["service.name"] == "till");
        let sums = sums.with_context(|| format!("no sums: {found:?}"))?;
        ensure!(
            sums["deployment.environment.name"] == "bed"
                && sums["service.instance.id"].as_str().is_some_and(|id| id.len() == 36),
            "{sums}"
        );

        program.say("service.name=new service.instance.id=two")?;
        program.wait_stdout(PATIENCE, "published again", |line| line == "published")?;
        let found = resources(&live, pid)?;
        let own =
            found.iter().find(|about| about["process.pid"] == pid).with_context(|| format!("{found:?}"))?;
        ensure!(own["service.name"] == "new" && own["service.instance.id"] == "two", "{own}");
        ensure!(own["deployment.environment.name"].is_null(), "{own}");
        program.say("end")?;
        program.finish(PATIENCE)?;
        Ok(())
    })
}
