//! The collector implements TuneMyGC's protocol: every resource, every status code.

use std::io::Write as _;

use anyhow::{Context as _, Result, ensure};
use flate2::{Compression, write::GzEncoder};
use gctrace_tests::collector::{Collector, Cycle, cycles, example, set};
use gctrace_tests::http;
use gctrace_tests::live::Live;
use serde_json::{Value, json};

fn gzip(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes)?;
    Ok(encoder.finish()?)
}

/// A program that is short of slots, often enough to get advice.
fn starving() -> Vec<Cycle> {
    let cycle = |by, major| Cycle { by, major, old_after: 99_000 };
    cycles(&[
        (cycle("newobj", None), 300),
        (cycle("malloc", None), 60),
        (cycle("newobj", Some("oldgen")), 40),
    ])
}

/// The exchange from registration to settings: once, again, compressed, and after a restart.
#[test]
fn exchange() -> Result<()> {
    let live = Live::without_gctrace()?;
    let store = live.path("sets.db");
    let collector = Collector::start(&store, &[])?;
    ensure!(collector.get("/healthz")?.code == 200);
    let token = collector.register()?;
    ensure!(token.len() == 32 && token.bytes().all(|byte| byte.is_ascii_hexdigit()), "{token}");
    ensure!(token != collector.register()?, "each application has its own token");
    ensure!(collector.get(&format!("/apps/{token}"))?.code == 204, "nothing to set yet");

    // The example has too little data for advice: that is reported, and is not an error.
    let little = collector.send(&example(&token, 1)?.to_string())?;
    ensure!(little.code == 200, "{little:?}");
    ensure!(little.headers.get("accept-encoding").is_some_and(|codings| codings == "gzip"));
    let base = format!("http://{}", collector.address);
    let path = |answer: &http::Answer| answer.text().strip_prefix(&base).map(ToOwned::to_owned);
    let little = path(&little).context("an address at the collector")?;
    let config: Value = serde_json::from_slice(&collector.get(&format!("{little}.json"))?.body)?;
    ensure!(config["Speed"] == json!({}) && config["Memory"] == json!({}), "{config}");
    ensure!(
        config["explanation"][0].as_str().is_some_and(|text| text.starts_with("insufficient")),
        "{config}"
    );
    ensure!(collector.get(&format!("/apps/{token}"))?.code == 204);

    // Enough data, for another Ruby.
    let enough = set(&token, "3.4.7", &json!({}), &starving()).to_string();
    let first = collector.send(&enough)?;
    ensure!(first.code == 200, "{first:?}");
    let address = path(&first).context("an address at the collector")?;
    let again = collector.send(&enough)?;
    ensure!((again.code, &again.body) == (200, &first.body), "the same set is the same set");
    let compressed = collector.send_bytes(&gzip(enough.as_bytes())?, &[("Content-Encoding", "gzip")])?;
    ensure!((compressed.code, &compressed.body) == (200, &first.body), "also compressed: {compressed:?}");
    ensure!(collector.metric("gctrace_collector_stored_sets")? == 2);
    ensure!(collector.metric("gctrace_collector_duplicate_sets_total")? == 2);
    ensure!(collector.metric("gctrace_collector_stored_samples")? == 800 + 10);

    let config = collector.get(&format!("{address}.json"))?;
    ensure!(config.headers.get("content-type").is_some_and(|kind| kind == "application/json"));
    let json: Value = serde_json::from_slice(&config.body)?;
    let speed = json["Speed"].as_object().context("no Speed")?;
    ensure!(speed.get("RUBY_GC_MALLOC_LIMIT") == Some(&json!(33_554_432)), "{json}");
    ensure!(speed.get("RUBY_GC_HEAP_FREE_SLOTS_MIN_RATIO").is_some(), "{json}");
    for value in speed.values() {
        ensure!(value.is_u64() || value.as_f64().is_some_and(|value| value > 0.0), "{value}");
    }
    let exports = collector.get(&format!("/apps/{token}"))?;
    ensure!(exports.code == 200);
    let mut lines: Vec<String> = exports.text().lines().map(ToOwned::to_owned).collect();
    let expected = |(name, value): (&String, &Value)| match value.as_u64() {
        Some(size) => format!("export {name}={size}"),
        None => format!("export {name}={:.2}", value.as_f64().unwrap_or_default()),
    };
    let mut wanted: Vec<String> = speed.iter().map(expected).collect();
    lines.sort();
    wanted.sort();
    ensure!(lines == wanted, "{lines:?}, the configuration says {wanted:?}");
    let page = collector.get(&address)?.text();
    for line in lines {
        ensure!(page.contains(&line), "{line} is not in\n{page}");
    }
    for word in ["why:", "measured:", "expected:", "confidence:", "no change:"] {
        ensure!(page.contains(word), "{word} is not in\n{page}");
    }

    collector.stop()?;
    let collector = Collector::start(&store, &["--public-url", "https://gc.example.com/"])?;
    ensure!(collector.get(&format!("{address}.json"))?.body == config.body, "a restart changes nothing");
    let third = collector.send(&enough)?.text();
    ensure!(third == format!("https://gc.example.com{address}"), "{third}");
    Ok(())
}

/// Every refusal has the status code of the protocol and gives the reason.
#[test]
fn codes() -> Result<()> {
    let live = Live::without_gctrace()?;
    let collector = Collector::start(&live.path("sets.db"), &[])?;
    let token = collector.register()?;
    let good = example(&token, 1)?;
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut set = good.clone();
        change(&mut set);
        collector.send(&set.to_string())
    };
    let expect = |answer: http::Answer, code: u16, text: &str| {
        ensure!(answer.code == code && answer.text().contains(text), "not {code} {text}: {answer:?}");
        Ok(())
    };
    expect(changed(&|set| set[0][0] = json!("0123"))?, 404, "token")?;
    expect(changed(&|set| set[0][0] = Value::Null)?, 404, "token")?;
    expect(changed(&|set| set[0][4] = json!("1.0.9"))?, 426, "1.0.15")?;
    expect(changed(&|set| set[0][1] = json!("2.1.0"))?, 501, "2.1.0")?;
    expect(changed(&|set| set[0][1] = json!("9.9.9"))?, 501, "9.9.9")?;
    expect(changed(&|set| set[0][7][4] = json!("committed"))?, 501, "heap_available_slots")?;
    expect(changed(&|set| set[2][0] = json!("x"))?, 400, "sample 1 (timestamp)")?;
    expect(changed(&|set| set[3][4] = json!([1]))?, 400, "sample 2 (GC.stat values)")?;
    expect(changed(&|set| set[1][3] = json!("PROCESSED"))?, 400, "sample 0 (event)")?;
    expect(changed(&|set| set[0][3] = json!([]))?, 400, "header [3] (environment)")?;
    expect(collector.send_bytes(good.to_string().as_bytes(), &[("Content-Encoding", "br")])?, 400, "`br`")?;
    expect(collector.send_bytes(b"not gzip at all", &[("Content-Encoding", "gzip")])?, 400, "payload")?;
    // gctrace's own version is not a version of the agent.
    let mut ours = good.clone();
    ours[0][4] = json!("0.1.0");
    let agent = [("User-Agent", "gctrace/0.1.0")];
    ensure!(http::post(collector.address, "/ruby", &agent, ours.to_string().as_bytes())?.code == 200);
    // The agent's dialect: spy ids as the ninth element, and events that only forks send.
    let spies = changed(&|set| {
        set[0].as_array_mut().expect("a list").insert(8, json!("manual"));
        set[2][3] = json!("GC_CYCLE_MARK_ENDED");
    })?;
    ensure!(spies.code == 200, "{spies:?}");

    // A program that is already tuned, to much less than the advice. Variables of the agent do not count.
    let env = json!({"RUBY_GC_MALLOC_LIMIT": "64m", "RUBY_GC_OLDMALLOC_LIMIT": "20m", "RUBY_GC_TUNE": "200",
        "RUBY_GC_TOKEN": token.as_str()});
    let cycle = |by, major| Cycle { by, major, old_after: 99_000 };
    let full = cycles(&[(cycle("malloc", None), 300), (cycle("malloc", Some("oldmalloc")), 150)]);
    let answer = collector.send(&set(&token, "3.1.2", &env, &full).to_string())?;
    ensure!(answer.code == 412, "{answer:?}");
    let clobbered: Value = serde_json::from_slice(&answer.body)?;
    ensure!(
        clobbered
            == json!({"RUBY_GC_MALLOC_LIMIT": "64m", "RUBY_GC_OLDMALLOC_LIMIT": "20m", "RUBY_GC_TUNE": "200"}),
        "all that there is, but no token: {clobbered}"
    );
    let state = collector.get(&format!("/apps/{token}?ruby=3.1"))?.text();
    ensure!(state.contains("export RUBY_GC_OLDMALLOC_LIMIT=20971520\n"), "left as it was set: {state}");
    ensure!(state.contains("export RUBY_GC_MALLOC_LIMIT=134217728\n"), "twice is not too much: {state}");

    for (path, code, text) in [
        ("/apps/0123", 404, "Invalid application token"),
        ("/configs/0123", 404, "no such configuration"),
        ("/configs/0123.json", 404, "no such configuration"),
        ("/x", 404, "there are /, POST /ruby, POST /accounts, GET /apps/TOKEN"),
        ("/ruby", 405, "this resource has other methods"),
    ] {
        expect(collector.get(path)?, code, text).with_context(|| path.to_owned())?;
    }
    for (form, text) in [
        ("", "email: "),
        ("email=someone&app=shop", "email: "),
        ("email=a%40b&app=", "app: "),
        ("email=a%40b%0a&app=x", "email: "),
        ("app=x", "email: "),
    ] {
        expect(collector.form("/accounts", form)?, 422, text).with_context(|| form.to_owned())?;
    }
    let stored = collector.metric("gctrace_collector_stored_sets")?;
    ensure!(stored == 3, "{stored} sets, of which three were good");
    collector.stop()?;
    let closed = Collector::start(&live.path("sets.db"), &["--no-registration", "--min-agent", "2.0"])?;
    expect(closed.form("/accounts", "email=a%40b&app=x")?, 422, "regist")?;
    expect(closed.send(&good.to_string())?, 426, "2.0")
}

/// A program that follows advice reaches a stable state: no value is raised again without a cycle that requires it, nothing is refused, and
/// `/apps` keeps the settings that are in force.
#[test]
fn followed_advice() -> Result<()> {
    let live = Live::without_gctrace()?;
    let store = live.path("sets.db");
    let mut collector = Collector::start(&store, &[])?;
    let token = collector.register()?;
    let cycle = |by, major| Cycle { by, major, old_after: 99_000 };
    let hungry = cycles(&[(cycle("malloc", None), 300), (cycle("newobj", Some("oldgen")), 40)]);
    let healthy = cycles(&[(cycle("newobj", None), 300), (cycle("newobj", Some("force")), 40)]);
    let state = |collector: &Collector, query: &str| -> Result<Value> {
        let answer = collector.get(&format!("/apps/{token}?format=json{query}"))?;
        ensure!(answer.code == 200, "{answer:?}");
        Ok(serde_json::from_slice(&answer.body)?)
    };
    for round in 0..4_u64 {
        let mut set = set(&token, "3.1.2", &json!({}), &hungry);
        set[0][10] = json!(round + 1);
        ensure!(collector.send(&set.to_string())?.code == 200);
    }
    let advised = state(&collector, "")?["set"].clone();
    ensure!(advised["RUBY_GC_MALLOC_LIMIT"].as_f64() >= Some(33_554_432.0), "{advised}");
    // Parsed as a shell would.
    let lines = collector.get(&format!("/apps/{token}"))?.text();
    let env: serde_json::Map<String, Value> = lines
        .lines()
        .filter_map(|line| line.strip_prefix("export ")?.split_once('='))
        .map(|(name, value)| (name.to_owned(), json!(value)))
        .collect();
    ensure!(env.len() == advised.as_object().context("an object")?.len(), "{lines}");
    let mut late = None;
    for round in 0..20_u64 {
        let mut set = set(&token, "3.1.2", &Value::Object(env.clone()), &healthy);
        set[0][10] = json!(round + 100);
        let answer = collector.send(&set.to_string())?;
        ensure!(answer.code == 200, "own advice is no obstacle: {answer:?}");
        let now = state(&collector, "")?;
        ensure!(
            now["set"]["RUBY_GC_MALLOC_LIMIT"] == advised["RUBY_GC_MALLOC_LIMIT"],
            "round {round}: {now}"
        );
        // Its cycles require more slots, about which nothing was advised before.
        for (name, before) in advised.as_object().context("an object")? {
            ensure!(now["set"][name].as_f64() <= before.as_f64(), "round {round}: {name} is raised: {now}");
        }
        if round >= 10 {
            let settings = (now["set"].clone(), now["unset"].clone());
            let first = late.get_or_insert_with(|| settings.clone());
            ensure!(*first == settings, "round {round}: no longer {first:?} but {settings:?}");
        }
        if round == 12 {
            collector.stop()?;
            collector = Collector::start(&store, &[])?;
        }
    }
    let now = state(&collector, "")?;
    let changed = now["last_change"]["changed"].as_array().context("what was changed")?;
    ensure!(changed.iter().any(|change| change["variable"] == "RUBY_GC_MALLOC_LIMIT"), "{now}");
    ensure!(now["last_change"]["figures"].as_array().is_some_and(|figures| !figures.is_empty()), "{now}");
    let text = collector.get(&format!("/apps/{token}"))?.text();
    for (name, value) in &env {
        let wanted = format!("export {name}={}", value.as_str().context("text")?);
        ensure!(text.lines().any(|shown| shown == wanted), "{wanted} is in force, but not in\n{text}");
    }
    ensure!(state(&collector, "&strategy=memory")?["strategy"] == "memory");
    ensure!(collector.get(&format!("/apps/{token}?ruby=3.4"))?.code == 204, "no sets of it");
    ensure!(collector.get(&format!("/apps/{token}?strategy=fast"))?.code == 400);
    ensure!(collector.metric("gctrace_collector_stored_sets")? == 24);
    Ok(())
}

/// Text that a sender could use to forge a report: escape sequences, reversed text, and lines that look like gctrace's own.
const FORGED: &str = "\x1b[2J\u{9b}8m\u{202e}\r\n\n  For speed:\n    export LD_PRELOAD=x.so # ";

/// Checks that an answer with this code shows everything that it contains, on our own lines only, and that no browser takes it for a page.
fn harmless(what: &str, code: u16, answer: &http::Answer) -> Result<()> {
    let hides = |c: char| c != '\n' && (c.is_control() || ('\u{200b}'..='\u{202e}').contains(&c));
    let text = answer.text();
    ensure!(answer.code == code, "{what}: not {code}: {answer:?}");
    ensure!(!text.chars().any(hides), "{what}: {text:?}");
    ensure!(!text.lines().any(|line| line.trim_start().starts_with("export LD_")), "{what}: {text}");
    let header = |name: &str| answer.headers.get(name).map_or("", String::as_str);
    ensure!(header("x-content-type-options") == "nosniff", "{what}: {:?}", answer.headers);
    let kind = header("content-type");
    ensure!(kind.starts_with("text/plain") || kind == "application/json", "{what}: {kind}");
    Ok(())
}

/// Text from a sender can control neither a terminal nor a browser, whatever answer contains it.
#[test]
fn forged_texts() -> Result<()> {
    let live = Live::without_gctrace()?;
    let collector = Collector::start(&live.path("sets.db"), &[])?;
    let token = collector.register()?;
    let env =
        json!({"RUBY_GC_HEAP_GROWTH": FORGED, format!("RUBY_GC_X{FORGED}"): "1", "RUBY_GC_\u{202e}": "1"});
    let mut forged = set(&token, &format!("3.1.2{FORGED}"), &env, &starving());
    forged[0][8] = json!(FORGED);
    // The report of a leak contains the name of its host.
    for (at, sample) in forged.as_array_mut().context("a set")?.iter_mut().enumerate().skip(1) {
        sample[4][2] = json!(100_000 + at * 200);
    }
    let address = collector.send(&forged.to_string())?;
    harmless("a set", 200, &address)?;
    let address = address.text();
    let address = address.split_once("/configs/").context("an address")?.1;
    let text = collector.get(&format!("/configs/{address}"))?;
    harmless("a report", 200, &text)?;
    for shown in
        [r"4242 on \u{1b}[2J\u{9b}8m", r"RUBY_GC_HEAP_GROWTH=\u{1b}[2J", "ignored 2 environment variables"]
    {
        ensure!(text.text().contains(shown), "no {shown} in {}", text.text());
    }
    let json = collector.get(&format!("/configs/{address}.json"))?;
    harmless("a report as JSON", 200, &json)?;
    let config: Value = serde_json::from_slice(&json.body)?;
    ensure!(config["explanation"][0].as_str().is_some_and(|leak| leak.contains("4242 on")), "{config}");
    for query in ["", "?format=json", "?format=json&strategy=memory"] {
        harmless(query, 200, &collector.get(&format!("/apps/{token}{query}"))?)?;
    }
    let state = collector.get(&format!("/apps/{token}?format=json"))?;
    let state: Value = serde_json::from_slice(&state.body)?;
    // The text in JSON is the same once its escapes are decoded.
    let process = state["leaks"][0]["process"].as_str().context("a leak")?;
    ensure!(process.contains("on \x1b[2J\u{9b}8m\u{202e}"), "{process:?}");

    let refused = |what: &str, code: u16, change: &dyn Fn(&mut Value)| {
        let mut set = forged.clone();
        change(&mut set);
        harmless(what, code, &collector.send(&set.to_string())?)
    };
    refused("an unknown Ruby", 501, &|set| set[0][1] = json!(format!("3.1{FORGED}")))?;
    refused("another GC", 501, &|set| set[0][7][4] = json!(FORGED))?;
    refused("an event", 400, &|set| set[1][3] = json!(FORGED))?;
    refused("a time", 400, &|set| set[1][0] = json!(FORGED))?;
    refused("values", 400, &|set| set[1][4] = json!(FORGED))?;
    refused("keys", 400, &|set| set[0][7] = json!(FORGED))?;
    refused("a pid", 400, &|set| set[0][10] = json!(FORGED))?;
    refused("a token", 404, &|set| set[0][0] = json!(FORGED))?;
    refused("an agent", 426, &|set| set[0][4] = json!(FORGED))?;
    let coding = [("Content-Encoding", "\u{9b}2J\u{202e}")];
    harmless("a coding", 400, &collector.send_bytes(b"[]", &coding)?)?;
    let set_by_hand =
        json!({"RUBY_GC_MALLOC_LIMIT": "5m", "RUBY_GC_HEAP_GROWTH": FORGED, "RUBY_GC_\u{202e}": "1"});
    let malloc = cycles(&[(Cycle { by: "malloc", major: None, old_after: 0 }, 300)]);
    let clobbered = collector.send(&set(&token, "3.4.2", &set_by_hand, &malloc).to_string())?;
    harmless("variables", 412, &clobbered)?;
    let clobbered: Value = serde_json::from_slice(&clobbered.body)?;
    ensure!(clobbered == json!({"RUBY_GC_MALLOC_LIMIT": "5m", "RUBY_GC_HEAP_GROWTH": FORGED}), "{clobbered}");

    let escape = "%1b%5b2J%c2%9b8m%e2%80%ae%0aexport%20LD_X=";
    for (path, code) in [
        (format!("/apps/{escape}"), 404),
        (format!("/apps/{token}?strategy={escape}"), 400),
        (format!("/apps/{token}?ruby={escape}"), 400),
        (format!("/apps/{token}?app={escape}"), 400),
        (format!("/apps/{token}?format={escape}"), 400),
        (format!("/configs/{escape}"), 404),
        (format!("/configs/{escape}.json"), 404),
        (format!("/{escape}"), 404),
        ("/ruby".to_owned(), 405),
        ("/healthz".to_owned(), 200),
        ("/metrics".to_owned(), 200),
    ] {
        harmless(&path, code, &collector.get(&path)?)?;
    }
    for form in [format!("email={escape}&app=x"), format!("email=a%40b&app={escape}")] {
        harmless(&form, 422, &collector.form("/accounts", &form)?)?;
    }
    Ok(())
}

/// A set of a program with this number of heap slots, half of them live, that spends `ms` in GC per cycle. The heap is its only bottleneck:
/// cycles start because no free slot is left.
fn short_of_slots(token: &str, env: &Value, pid: u64, slots: u64, ms: u64) -> Result<Value> {
    let cycle = |major| Cycle { by: "newobj", major, old_after: 60_000 };
    let mut set = set(token, "3.1.2", env, &cycles(&[(cycle(None), 300), (cycle(Some("oldgen")), 40)]));
    set[0][10] = json!(pid);
    for sample in set.as_array_mut().context("a set")?.iter_mut().skip(1) {
        let stat = &mut sample[4];
        let scaled = |n: &Value| n.as_u64().map(|n| n * slots / 400_000);
        (stat[1], stat[2]) = (json!(scaled(&stat[1])), json!(scaled(&stat[2])));
        stat[5] = json!(stat[5].as_u64().map(|time| time * ms / 30));
    }
    Ok(set)
}

/// Values that the collector advised are not the user's choice: it may advise much more later, and it stores and answers sets as before. The
/// same value counts as a choice in an application to which it was never advised, unless it is Ruby's default.
#[test]
fn own_advice() -> Result<()> {
    const NAME: &str = "RUBY_GC_HEAP_INIT_SLOTS";
    let live = Live::without_gctrace()?;
    let store = live.path("sets.db");
    let mut collector = Collector::start(&store, &[])?;
    let (token, other) = (collector.register()?, collector.register()?);
    let value = |collector: &Collector, token: &str| -> Result<u64> {
        let state = collector.get(&format!("/apps/{token}?format=json"))?;
        let state: Value = serde_json::from_slice(&state.body)?;
        state["set"][NAME].as_u64().with_context(|| format!("no {NAME} in {state}"))
    };
    for pid in 1..4 {
        let answer = collector.send(&short_of_slots(&token, &json!({}), pid, 100_000, 30)?.to_string())?;
        ensure!(answer.code == 200, "{answer:?}");
    }
    let first = value(&collector, &token)?;
    // The advice helped, but the program needs more by now.
    let advised = json!({NAME: first.to_string()});
    for pid in 11..14 {
        let answer = collector.send(&short_of_slots(&token, &advised, pid, 600_000, 15)?.to_string())?;
        ensure!(answer.code == 200, "own advice is an obstacle: {answer:?}");
        let wanted = value(&collector, &token)?;
        ensure!(wanted > 2 * first, "{wanted} is not much more than {first}");
        if pid == 12 {
            collector.stop()?;
            collector = Collector::start(&store, &[])?;
        }
    }
    ensure!(collector.metric("gctrace_collector_stored_sets")? == 6, "all of them are kept");

    // This value was never advised to this application.
    let answer = collector.send(&short_of_slots(&other, &advised, 21, 600_000, 15)?.to_string())?;
    ensure!(answer.code == 412 && serde_json::from_slice::<Value>(&answer.body)? == advised, "{answer:?}");
    ensure!(value(&collector, &other)? == first, "it stays as it was set");
    let default = json!({NAME: "10000"});
    let answer = collector.send(&short_of_slots(&other, &default, 22, 600_000, 15)?.to_string())?;
    ensure!(answer.code == 200, "Ruby's default: {answer:?}");
    ensure!(collector.metric("gctrace_collector_stored_sets")? == 8);
    Ok(())
}

/// A failing store leads to a 500, which agents retry, and works again once it is repaired.
#[test]
fn failing_store() -> Result<()> {
    let live = Live::without_gctrace()?;
    let store = live.path("sets.db");
    let collector = Collector::start(&store, &[])?;
    let token = collector.register()?;
    let set = example(&token, 1)?.to_string();
    let somebody = rusqlite::Connection::open(&store)?;
    somebody.execute_batch("ALTER TABLE sample_set RENAME TO elsewhere")?;
    ensure!(collector.send(&set)?.code == 500);
    ensure!(collector.get("/healthz")?.code == 500);
    somebody.execute_batch("ALTER TABLE elsewhere RENAME TO sample_set")?;
    ensure!(collector.send(&set)?.code == 200);
    ensure!(collector.get("/healthz")?.code == 200);
    Ok(())
}

/// A store contains no token, neither in the header nor in the environment of a set, but everything else of the set.
#[test]
fn what_is_kept() -> Result<()> {
    let live = Live::without_gctrace()?;
    let store = live.path("sets.db");
    let collector = Collector::start(&store, &[])?;
    let token = collector.register()?;
    let mut sent = example(&token, 77)?;
    sent[0][3]["RUBY_GC_TOKEN"] = json!(token);
    ensure!(collector.send(&sent.to_string())?.code == 200);
    ensure!(collector.get(&format!("/apps/{token}"))?.code == 204);
    let finished = collector.stop()?;
    ensure!(!finished.errors().contains(&token), "the token is in the log");
    for entry in std::fs::read_dir(store.parent().context("a directory")?)? {
        let bytes = std::fs::read(entry?.path())?;
        ensure!(
            !bytes.windows(token.len()).any(|window| window == token.as_bytes()),
            "the token is in the store"
        );
    }
    let kept: Vec<u8> =
        rusqlite::Connection::open(&store)?.query_row("SELECT body FROM sample_set", [], |row| row.get(0))?;
    let mut text = String::new();
    std::io::Read::read_to_string(&mut flate2::read::GzDecoder::new(&kept[..]), &mut text)?;
    let kept: Value = serde_json::from_str(&text)?;
    sent[0][0] = Value::Null;
    sent[0][3]["RUBY_GC_TOKEN"] = json!("(redacted)");
    ensure!(kept == sent, "kept is {kept}");
    Ok(())
}
