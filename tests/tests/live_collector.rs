//! From a real program to its recommendation and back: the program is traced, sent, advised, and run again with the advice.

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::PATIENCE;
use gctrace_tests::child::Guarded;
use gctrace_tests::collector::Collector;
use gctrace_tests::container::Cgroup;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::{Live, gctrace_binary};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use serde_json::Value;
use std::process::Command;

/// Seconds that the program runs; `gctrace tune` needs at least five.
const SECONDS: &str = "5.5";

/// A request loop gets advice that, when followed, changes its number of collections as predicted, to within a factor of
/// two. The collector and `gctrace tune` give the same advice.
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
        ensure!(
            finished.status.success() && said.contains("1 sample set was accepted, 0 refused, 0 dropped"),
            "{said}"
        );
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

/// Without an address nothing is sent. An address without a token is a usage error.
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
    // A token alone has no effect, and does not affect other commands.
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

/// Each service has its own token: the sets of one service are sent; the other has no token, so its sets are not. Ineffective variables are
/// reported, once.
#[test]
fn tokens_and_variables() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let collector = Collector::start(&live.path("sets.db"), &[])?;
    let token = collector.register()?;
    let tokens = live.path("tokens.toml");
    std::fs::write(&tokens, format!("trust_environment = true\n[services]\nshop = \"{token}\"\n"))?;
    let mut args: Vec<std::ffi::OsString> = vec!["--tunemygc-url".into()];
    args.push(format!("http://{}", collector.address).into());
    args.extend([
        "--tunemygc-spool".into(),
        live.path("spool").into(),
        "--tunemygc-tokens".into(),
        tokens.into(),
    ]);
    args.extend(["--tunemygc-dialect".into(), "agent".into(), "--".into()]);
    for (service, sent) in [("shop", 1), ("cron", 0)] {
        let script = Script::unwitnessed(&live, &ruby, "scraped.rb")?;
        let (command, env, _) = script.into_parts()?;
        let finished = Invocation::jsonl(args.iter().cloned().chain(command))?
            .envs(env)
            .with(|command| {
                command
                    .env("OTEL_SERVICE_NAME", service)
                    .env("RUBY_GC_HEAP_SLOTS_GROWTH_FACTOR", "1.3\u{1b}");
                command.env("RUBY_GC_MALLOC_LIMIT", "32m").env_remove("RUBY_GC_TOKEN");
            })
            .run()?;
        let report = gctrace_tests::gctrace::read(&finished)?;
        let said = finished.errors();
        let accepted = if sent == 1 { "1 sample set was accepted" } else { "0 sample sets were accepted" };
        ensure!(said.contains(&format!("{accepted}, 0 refused, 0 dropped")), "{said}");
        let told: Vec<&str> = said.lines().filter(|line| line.contains("does nothing")).collect();
        let wanted = format!(
            r"({service}): RUBY_GC_HEAP_SLOTS_GROWTH_FACTOR=1.3\u{{1b}} does nothing: no Ruby knows it"
        );
        ensure!(told.len() == 1 && told[0].contains(&wanted), "{told:?}");
        let user = &report.ledger.as_ref().context("a ledger")?.user;
        let count = |name: &str| user.get(name).and_then(Value::as_u64).context(name.to_owned());
        ensure!(count("sets_without_token")? == 1 - sent, "{user:?}");
        ensure!(said.contains("sample sets of 1 process not sent (no token)") == (sent == 0), "{said}");
        ensure!(
            count("sets")? <= sent && count("sets")? == count("sets_sent")? + count("sets_waiting")?,
            "{user:?}"
        );
    }
    let kept = rusqlite::Connection::open(live.path("sets.db"))?;
    let body: Vec<u8> = kept.query_row("SELECT body FROM sample_set", [], |row| row.get(0))?;
    let set: Value = serde_json::from_reader(flate2::read::GzDecoder::new(body.as_slice()))?;
    ensure!(
        set[0].as_array().is_some_and(|header| header.len() == 12 && header[8] == "manual"),
        "{}",
        set[0]
    );
    Ok(())
}

/// A Ruby of another user, which claims to be this service. It prints "ready", waits for a line, and collects.
fn claiming(ruby: &Ruby, user: u32, service: &str) -> Result<Guarded> {
    let user = user.to_string();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]).arg(ruby.exe());
    command
        .args(["--disable-gems", "-e"])
        .arg("$stdout.sync = true; puts :ready; gets; 40.times { 20_000.times { +'x' } }; GC.start");
    command.env("OTEL_SERVICE_NAME", service).env("RUBY_GC_HEAP_SLOTS_GROWTH_FACTOR", "1.3");
    let mut process = Guarded::start("a claiming ruby", command.current_dir("/"))?;
    process.wait_stdout(PATIENCE, "ready", |line| line == "ready")?;
    Ok(process)
}

/// Sets go to the application of the unit, the cgroup or the user that a process has according to the kernel. What a process claims about
/// itself, in its environment or in the name of a cgroup below its own, does not change that.
#[test]
fn whose_sets() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let path = live.path("sets.db");
    let collector = Collector::start(&path, &[])?;
    let (unit, group) = (Cgroup::new(None, "shop.service")?, Cgroup::new(None, "pods")?);
    let name = |cgroup: &Cgroup| -> Result<String> {
        Ok(cgroup.path().file_name().context("a name")?.to_string_lossy().into_owned())
    };
    let (shop, kube) = (name(&unit)?, name(&group)?);
    let below = group.below(&shop)?;
    let [of_shop, of_pods, of_user] = [collector.register()?, collector.register()?, collector.register()?];
    let tokens = live.path("tokens.toml");
    let text = format!(
        "[units]\n\"{shop}\" = \"{of_shop}\"\n[cgroups]\n\"/{kube}\" = \"{of_pods}\"\n[users]\n65534 = \"{of_user}\"\n"
    );
    std::fs::write(&tokens, text)?;

    // User, cgroup, and number of the application.
    let cases = [(0, Some(&unit), 1), (0, Some(&below), 2), (65534, None, 3), (65533, None, 0), (0, None, 0)];
    let mut started = Vec::new();
    for (user, cgroup, app) in cases {
        let process = claiming(&ruby, user, &shop)?;
        cgroup.map_or(Ok(()), |cgroup| cgroup.take(process.pid()))?;
        started.push((process, app));
    }
    let pids: Vec<String> = started.iter().map(|(process, _)| process.pid().to_string()).collect();
    let url = format!("http://{}", collector.address);
    let mut args: Vec<std::ffi::OsString> =
        ["--pid", &pids.join(","), "--tunemygc-url", &url].map(Into::into).into();
    args.extend([
        "--tunemygc-spool".into(),
        live.path("spool").into(),
        "--tunemygc-tokens".into(),
        tokens.into(),
    ]);
    let gctrace = Invocation::jsonl(args)?
        .with(|command| {
            command.env_remove("RUBY_GC_TOKEN");
        })
        .start_ready()?;
    let mut expected = Vec::new();
    for (mut process, app) in started {
        process.say("go")?;
        let pid = process.pid();
        let finished = process.finish(PATIENCE)?;
        ensure!(finished.status.success(), "{}", finished.errors());
        expected.extend((app > 0).then_some((app, pid)));
    }
    let (report, finished) = gctrace.done()?;
    for pid in pids {
        ensure!(report.gcs_of(pid.parse()?).count() >= 2, "{pid} has no cycles");
    }
    // Their claims were read: elsewhere they are used as the name.
    let said = finished.errors();
    let told = format!("({shop}): RUBY_GC_HEAP_SLOTS_GROWTH_FACTOR=1.3 does nothing");
    ensure!(said.contains(&told), "{said}");
    let kept = rusqlite::Connection::open(&path)?;
    let mut sets = kept.prepare("SELECT app, body FROM sample_set ORDER BY app")?;
    let sets: Vec<(u32, Vec<u8>)> =
        sets.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?.collect::<Result<_, _>>()?;
    let mut found = Vec::new();
    for (app, body) in sets {
        let set: Value = serde_json::from_reader(flate2::read::GzDecoder::new(body.as_slice()))?;
        found.push((app, u32::try_from(set[0][10].as_u64().context("a pid")?)?));
    }
    ensure!(found == expected, "applications and pids: {found:?}, not {expected:?}");
    let user = &report.ledger.as_ref().context("a ledger")?.user;
    ensure!(user["sets_without_token"] == 2 && user["sets_sent"] == 3, "{user:?}");
    ensure!(said.contains("sample sets of 2 processes not sent (no token)"), "{said}");
    Ok(())
}

/// The sets of a long-lived process are sent after a number of cycles: no cycle is missing between the parts, and none is sent twice.
#[test]
fn parts_by_cycles() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let collector = Collector::start(&live.path("sets.db"), &[])?;
    let token = collector.register()?;
    let mut args: Vec<std::ffi::OsString> = vec!["--tunemygc-url".into()];
    args.push(format!("http://{}", collector.address).into());
    args.extend(["--tunemygc-spool".into(), live.path("spool").into()]);
    args.extend(["--tunemygc-sync-cycles".into(), "20".into(), "--".into()]);
    let (command, env, outputs) = Script::unwitnessed(&live, &ruby, "scraped.rb")?.arg("3s").into_parts()?;
    let finished = Invocation::jsonl(args.into_iter().chain(command))?
        .envs(env)
        .with(|command| {
            command.env("RUBY_GC_TOKEN", &token);
        })
        .run()?;
    let report = gctrace_tests::gctrace::read(&finished)?;
    let (script, _) = outputs.read("")?;
    let counts: Vec<u64> = report.gcs_of(script.pid).map(|line| line.count).collect();
    ensure!(counts.len() > 40, "{} cycles", counts.len());

    let kept = rusqlite::Connection::open(live.path("sets.db"))?;
    let mut bodies = kept.prepare("SELECT body FROM sample_set")?;
    let bodies: Vec<Vec<u8>> = bodies.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
    let (mut sizes, mut found) = (Vec::new(), Vec::new());
    for body in &bodies {
        let set: Value = serde_json::from_reader(flate2::read::GzDecoder::new(body.as_slice()))?;
        let keys = set[0][7].as_array().context("keys")?;
        let at = keys.iter().position(|key| key == "count").context("count")?;
        let samples = set.as_array().context("a set")?.iter().skip(1);
        let begun: Vec<u64> = samples
            .filter(|sample| sample[3] == "GC_CYCLE_STARTED")
            .filter_map(|s| s[4][at].as_u64())
            .collect();
        sizes.push(begun.len());
        found.extend(begun);
    }
    found.sort_unstable();
    ensure!(found == counts, "{found:?}, the lines: {counts:?}");
    sizes.sort_unstable();
    let full = counts.len() / 20;
    ensure!(sizes.iter().filter(|size| **size == 20).count() == full, "{sizes:?} of {}", counts.len());
    ensure!(sizes.iter().all(|size| *size <= 20), "{sizes:?}");
    let user = &report.ledger.as_ref().context("a ledger")?.user;
    ensure!(
        user["sets"] == bodies.len() && user["sets_sent"] == bodies.len(),
        "{} sets, {user:?}",
        bodies.len()
    );
    Ok(())
}

/// If malloc starts most cycles, a Ruby that repeatedly runs short of free slots is not advised to ask for more of them, because its
/// heap would not grow; nor to start with a larger heap, which would make those cycles longer.
#[test]
fn malloc_leads() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let sets = live.path("sets");
    let mut script = Script::unwitnessed(&live, &ruby, "strings.rb")?.arg("6");
    for (name, value) in [
        ("RUBY_GC_MALLOC_LIMIT", "8000000"),
        ("RUBY_GC_MALLOC_LIMIT_MAX", "8000000"),
        ("RUBY_GC_OLDMALLOC_LIMIT", "1000000000000"),
        ("RUBY_GC_OLDMALLOC_LIMIT_MAX", "1000000000000"),
        ("RUBY_GC_HEAP_FREE_SLOTS_MIN_RATIO", "0.38"),
        ("RUBY_GC_HEAP_GROWTH_MAX_SLOTS", "500"),
    ] {
        script = script.env(name, value);
    }
    let (command, env, _) = script.into_parts()?;
    let mut args = vec!["--quiet".into(), "--tunemygc".into(), sets.clone().into_os_string(), "--".into()];
    args.extend(command);
    let finished = Invocation::new(args)?.envs(env).run()?;
    ensure!(finished.status.success(), "{}", finished.errors());
    let output = Command::new(gctrace_binary()?).args(["tune", "--format", "json"]).arg(&sets).output()?;
    let tuned: Value = serde_json::from_slice(&output.stdout)?;
    let report = &tuned["programs"][0]["report"];
    let count = |kind: &str, by: &str| report["evidence"][kind][by].as_u64().unwrap_or_default();
    let (malloc, slots, free) =
        (count("minors", "malloc"), count("minors", "newobj"), count("majors", "nofree"));
    ensure!(malloc > slots && free >= 10, "not the case that is meant: {}", report["evidence"]);
    let of_rule = |list: &Value, rule: &str| {
        let found = list.as_array()?.iter().find(|entry| entry["rule"] == rule)?;
        Some(found.clone())
    };
    let plan = &report["plans"][0];
    for rule in ["no-free-majors", "initial-heap"] {
        ensure!(of_rule(&plan["advice"], rule).is_none(), "{}", plan["advice"]);
        let refusal = of_rule(&plan["refusals"], rule).with_context(|| format!("no refusal: {plan:#}"))?;
        let wanted = format!("malloc begins {malloc} minor cycles and a lack of free slots only {slots}");
        ensure!(refusal["reason"].as_str().is_some_and(|reason| reason.starts_with(&wanted)), "{refusal}");
    }
    ensure!(!plan["advice"].to_string().contains("INIT_SLOTS"), "{}", plan["advice"]);
    Ok(())
}
