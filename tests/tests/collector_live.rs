//! From a real program to its recommendation and back: traced, sent, advised, and run again as advised.

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::collector::Collector;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::{Live, gctrace_binary};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use serde_json::Value;
use std::process::Command;

/// Seconds that the program runs; `gctrace tune` wants five.
const SECONDS: &str = "5.5";

/// A request loop gets an advice that, followed, does to the number of its collections what was said, to within a factor
/// of two. What the collector advises is what `gctrace tune` advises.
#[test]
fn advice_that_works() -> Result<()> {
    Ruby::first_and_last(|ruby| {
        let live = Live::without_gctrace()?;
        let collector = Collector::start(&live.path("sets.db"), &[])?;
        let token = collector.register()?;
        let (sets, spool) = (live.path("sets"), live.path("spool"));
        let script = Script::unwitnessed(&live, ruby, "requests.rb")?.arg(SECONDS);
        let (command, env, outputs) = script.into_parts()?;
        let mut args = vec!["--quiet".into(), "--tunemygc".into(), sets.clone().into_os_string()];
        args.extend(["--tunemygc-url".into(), format!("http://{}/", collector.address).into()]);
        args.extend(["--tunemygc-spool".into(), spool.into_os_string(), "--".into()]);
        args.extend(command);
        let finished = {
            let _turn = Live::begin()?;
            Invocation::new(args)?
                .envs(env)
                .with(|command| {
                    command.env("RUBY_GC_TOKEN", &token);
                })
                .run()?
        };
        let said = finished.errors();
        ensure!(finished.status.success() && said.contains("1 sample sets were sent, 0 refused"), "{said}");
        ensure!(!said.contains(&token), "the token is in its output");
        let address = said.split("recommendations: ").nth(1).and_then(|rest| rest.lines().next());
        let path = address.and_then(|address| address.split_once("/configs/")).context("an address")?.1;
        let config: Value = serde_json::from_slice(&collector.get(&format!("/configs/{path}.json"))?.body)?;
        let speed = config["Speed"].as_object().filter(|speed| !speed.is_empty());
        let speed = speed.with_context(|| format!("no advice: {config:#}"))?;

        let output =
            Command::new(gctrace_binary()?).args(["tune", "--format", "json"]).arg(&sets).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let tuned: Value = serde_json::from_slice(&output.stdout)?;
        let program = &tuned["programs"][0]["report"];
        ensure!(program["evidence"]["missing"] == 0, "{program}");
        let advice = program["plans"][0]["advice"].as_array().context("advice")?;
        let settings = advice.iter().flat_map(|advice| advice["set"].as_array().into_iter().flatten());
        let settings: serde_json::Map<String, Value> = settings
            .filter_map(|change| Some((change["variable"].as_str()?.to_owned(), change["value"].clone())))
            .collect();
        ensure!(&settings == speed, "the collector says {speed:?}, `gctrace tune` {settings:?}");
        let room = advice.iter().find(|advice| advice["rule"] == "free-slots");
        let room = room.with_context(|| format!("no advice on free slots: {program:#}"))?;
        let predicted = room["effect"]["factor"].as_f64().context("a factor")?;

        let (before, _) = outputs.read("")?;
        let requests = before.extra_u64("requests")?;
        let mut script =
            Script::unwitnessed(&live, ruby, "requests.rb")?.arg(SECONDS).arg(requests.to_string());
        for (name, value) in speed {
            script = script.env(name, value.to_string());
        }
        let after = script.run()?.report;
        ensure!(after.extra_u64("requests")? == requests);
        let minors = |report: &gctrace_tests::script::Report| report.growth("minor_gc_count");
        let (before, after) = (minors(&before)?, minors(&after)?);
        let found = after as f64 / before as f64;
        eprintln!(
            "Ruby {}: {before} minor cycles became {after} ({found:.2}), {predicted:.2} was said",
            ruby.version()
        );
        ensure!(
            found < 1.0 && found / predicted < 2.0 && predicted / found < 2.0,
            "{before} minor cycles became {after}, a factor of {found:.2}; {predicted:.2} was said: {room:#}"
        );
        Ok(())
    })
}

/// Without an address nothing is sent, and an address without a token is bad usage.
#[test]
fn only_where_it_is_told() -> Result<()> {
    let finished = Invocation::new(["--all-ruby", "--tunemygc-url", "http://127.0.0.1:1"])?
        .with(|command| {
            command.env_remove("RUBY_GC_TOKEN");
        })
        .run()?;
    ensure!(
        finished.status.code() == Some(2) && finished.errors().contains("needs the token"),
        "{finished:?}"
    );
    // The token alone is no reason to do anything, nor in the way of other commands.
    let live = Live::without_gctrace()?;
    let finished = Invocation::new(["tune".as_ref(), live.path("no").as_os_str()])?
        .with(|command| {
            command.env("RUBY_GC_TOKEN", "secret");
        })
        .run()?;
    ensure!(
        finished.status.code() == Some(2) && finished.errors().contains("cannot be read"),
        "{finished:?}"
    );
    Ok(())
}
