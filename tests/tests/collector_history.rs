//! The history: what was advised and when, which settings came into force, and their effect; on both kinds of store.

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::collector::{Collector, Cycle, cycles, each_store, set};
use serde_json::{Value, json};

/// The index of `time` in the samples of [`set`].
const TIME: usize = 5;

/// A set of a program with these settings that spends `permille` thousandths of its time in GC.
fn spending(token: &str, env: &Value, permille: u64, pid: u64) -> Result<String> {
    let kinds = [("malloc", None, 300), ("newobj", Some("oldgen"), 40)];
    let kinds = kinds.map(|(by, major, n)| (Cycle { by, major, old_after: 99_000 }, n));
    let mut set = set(token, "3.4.7", env, &cycles(&kinds));
    set[0][10] = json!(pid);
    for sample in set.as_array_mut().context("a list")?.iter_mut().skip(1) {
        // Ten cycles per second of 30 ms each are 300 thousandths.
        sample[4][TIME] = json!(sample[4][TIME].as_u64().context("a time")? * permille / 300);
    }
    Ok(set.to_string())
}

fn state(collector: &Collector, token: &str) -> Result<Value> {
    let answer = collector.get(&format!("/apps/{token}?format=json"))?;
    ensure!(answer.code == 200, "{answer:?}");
    Ok(serde_json::from_slice(&answer.body)?)
}

/// A short form of an event: what happened, whether it was advised, and its effect.
fn brief(event: &Value) -> String {
    if event["event"] == "advised" {
        let no_change = event["set"] == event["in_force"];
        return format!(
            "advised{}{}",
            if event["withdrawal"] == true { " back" } else { "" },
            if no_change { " nothing" } else { "" }
        );
    }
    format!("in force {} {}", event["advised"], event["brought"]["speed"])
}

/// Advice is followed and helps, then a change that was not advised makes it worse. Each of these is one entry, in order, however often
/// the state is queried and whichever collector restarts. The figures are those of the sets.
#[test]
fn history() -> Result<()> {
    each_store(|store| {
        let collector = Collector::with_store("127.0.0.1:0", store, &[])?;
        let token = collector.register()?;
        let send =
            |collector: &Collector, env: &Value, permille: u64, pids: std::ops::Range<u64>| -> Result<()> {
                for pid in pids {
                    ensure!(
                        [200, 412].contains(&collector.send(&spending(&token, env, permille, pid)?)?.code)
                    );
                }
                Ok(())
            };
        send(&collector, &json!({}), 300, 0..4)?;
        let first = state(&collector, &token)?;
        let environment = |state: &Value| -> Result<Value> {
            let set = state["set"].as_object().context("settings")?.iter();
            Ok(set
                .map(|(name, value)| (name.clone(), json!(value.to_string())))
                .collect::<serde_json::Map<_, _>>()
                .into())
        };
        let followed = environment(&first)?;
        ensure!(followed["RUBY_GC_MALLOC_LIMIT"].is_string(), "{first}");
        send(&collector, &followed, 100, 10..14)?;
        let second = state(&collector, &token)?;
        let mut chosen = followed.clone();
        chosen["RUBY_GC_MALLOC_LIMIT"] = json!("3000000");
        send(&collector, &chosen, 600, 20..24)?;
        for _ in 0..5 {
            state(&collector, &token)?;
            ensure!(collector.get("/app/1")?.code == 200);
        }
        let last = state(&collector, &token)?;
        collector.stop()?;
        let collector = Collector::with_store("127.0.0.1:0", store, &[])?;
        ensure!(
            state(&collector, &token)?["history"] == last["history"],
            "it is another one after a restart"
        );

        let all = last["history"].as_array().context("a history")?;
        // The page has also requested the advice for memory.
        let events: Vec<&Value> = all.iter().filter(|event| event["strategy"] != "memory").collect();
        let told: Vec<String> = events.iter().map(|event| brief(event)).collect();
        let expected = [
            "in force null null",
            "advised",
            "in force true \"better\"",
            if second["set"] == first["set"] { "advised nothing" } else { "advised" },
            "in force false \"worse\"",
            "advised back",
        ];
        ensure!(told == expected, "{told:?}\n{all:?}");
        ensure!(events[1]["set"] == first["set"] && events[1]["in_force"] == json!({}), "{}", events[1]);
        ensure!(events[2]["set"] == first["set"] && events[5]["set"] == first["set"], "{all:?}");
        let times: Vec<f64> = all.iter().filter_map(|event| event["at"].as_f64()).collect();
        ensure!(times.len() == all.len() && times.is_sorted(), "{times:?}");
        for (event, before, after) in [(events[2], 30.0, 10.0), (events[4], 10.0, 60.0)] {
            let figures = event["brought"]["figures"].as_array().context("figures")?;
            let share =
                figures.iter().find(|figure| figure["metric"] == "time in GC, %").context("the share")?;
            for (name, meant) in [("before", before), ("after", after)] {
                let said = share[name].as_f64().context("a number")?;
                // Quantiles are accurate to 1.6 %.
                ensure!((said / meant - 1.0).abs() < 0.02, "{name} {meant}: {share}");
            }
        }
        let page = collector.get("/app/1")?.text();
        // The settings that were withdrawn come into force again, and later ones are compared with them.
        send(&collector, &followed, 100, 30..34)?;
        send(&collector, &json!({}), 300, 40..44)?;
        let mut other = followed.clone();
        other["RUBY_GC_MALLOC_LIMIT"] = json!("40000000");
        send(&collector, &other, 100, 50..54)?;
        let again = state(&collector, &token)?;
        let mut events = again["history"].as_array().context("a history")?.iter();
        let latest = events.rfind(|event| event["event"] != "advised").context("settings")?;
        let share = |figures: &Value| -> Result<Value> {
            let figures = figures.as_array().context("figures")?;
            let share = figures.iter().find(|figure| figure["metric"] == "time in GC, %");
            Ok(share.context("the share")?["before"].clone())
        };
        let before = share(&latest["brought"]["figures"])?.as_f64().context("a number")?;
        ensure!((before / 30.0 - 1.0).abs() < 0.02, "{before}: {latest}");
        for words in [
            "in force, as advised",
            "advised for speed: go back",
            "in force, not advised",
            "GC time: clearly less",
            "GC time: clearly more",
        ] {
            ensure!(page.contains(words), "no {words:?} in {page}");
        }
        Ok(())
    })
}

/// The effect of a change is still known after the sets from before the change are deleted.
#[test]
fn after_deletion() -> Result<()> {
    each_store(|store| {
        let collector = Collector::with_store("127.0.0.1:0", store, &[])?;
        let token = collector.register()?;
        let tuned = json!({"RUBY_GC_MALLOC_LIMIT": "33554432"});
        let send =
            |collector: &Collector, env: &Value, permille: u64, pids: std::ops::Range<u64>| -> Result<()> {
                for pid in pids {
                    ensure!(
                        [200, 412].contains(&collector.send(&spending(&token, env, permille, pid)?)?.code)
                    );
                }
                Ok(())
            };
        send(&collector, &json!({}), 300, 0..4)?;
        send(&collector, &tuned, 100, 10..14)?;
        let before = state(&collector, &token)?["last_change"].clone();
        ensure!(before["speed"] == "better" && before["sets_before"] == 4, "{before}");
        collector.stop()?;
        // The evidence of sets is saved at startup and every ten minutes.
        let small = Collector::with_store("127.0.0.1:0", store, &["--app-sets", "4"])?;
        let deadline = std::time::Instant::now() + gctrace_tests::PATIENCE;
        while !small.get("/healthz")?.text().starts_with("ok")
            || small.metric("gctrace_collector_kept_environments_total")? == 0
        {
            ensure!(std::time::Instant::now() < deadline, "nothing is kept");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        send(&small, &tuned, 100, 20..24)?;
        ensure!(small.metric("gctrace_collector_stored_sets")? == 4);
        small.stop()?;
        let again = Collector::with_store("127.0.0.1:0", store, &[])?;
        let after = state(&again, &token)?["last_change"].clone();
        ensure!(after["speed"] == "better" && after["sets_before"] == 4, "{after}");
        let figures = |change: &Value| -> Result<Vec<Value>> {
            let all = change["figures"].as_array().context("figures")?;
            Ok(all.iter().map(|figure| json!([figure["metric"], figure["before"]])).collect())
        };
        let (after_all, before_all) = (figures(&after)?, figures(&before)?);
        ensure!(after_all == before_all && after_all.len() > 2, "{after} was {before}");
        Ok(())
    })
}

/// The set of [`spending`], with its last sample at this time.
fn ending(token: &str, env: &Value, permille: u64, pid: u64, end: f64) -> Result<String> {
    let mut set: Value = serde_json::from_str(&spending(token, env, permille, pid)?)?;
    let samples = set.as_array_mut().context("a list")?;
    let last = samples.last().and_then(|sample| sample[0].as_f64()).context("a time")?;
    for sample in samples.iter_mut().skip(1) {
        sample[0] = json!(sample[0].as_f64().context("a time")? - last + end);
    }
    Ok(set.to_string())
}

fn epoch() -> Result<f64> {
    Ok(std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs_f64())
}

/// What `/apps` reports about the settings, without the parts that depend on the time of the query.
fn told(collector: &Collector, sets: &[(&Value, u64, u64, f64)]) -> Result<Value> {
    let token = collector.register()?;
    for (env, permille, pid, end) in sets {
        let answer = collector.send(&ending(&token, env, *permille, *pid, *end)?)?;
        ensure!([200, 412].contains(&answer.code), "{answer:?}");
    }
    let mut told = state(collector, &token)?;
    let history = told["history"].take();
    let history = history.as_array().context("a history")?.iter();
    let in_force: Vec<Value> = history
        .filter(|event| event["event"] == "in_force")
        .map(|event| json!([event["set"], event["at"], event["until"], event["brought"]["speed"]]))
        .collect();
    told["history"] = Value::Array(in_force);
    // Sums of many numbers, whose last digits depend on the order of addition.
    told["last_change"]["seconds"] = Value::Null;
    for change in told["changes"].as_array_mut().into_iter().flatten() {
        *change = json!([change["variable"], change["value"]]);
    }
    Ok(told)
}

/// The settings in force, the settings before them, and the advice depend only on the sets, not on the order in which the sets arrive: a set
/// that was delayed for hours does not count as a current one.
#[test]
fn order_of_arrival() -> Result<()> {
    each_store(|store| {
        let collector = Collector::with_store("127.0.0.1:0", store, &[])?;
        let (old, new) = (json!({}), json!({"RUBY_GC_MALLOC_LIMIT": "33554432"}));
        let now = epoch()?;
        let before = (0..4_u32).map(|n| (&old, 300, u64::from(n), now - 6.0 * 3600.0 + f64::from(n) * 400.0));
        let after = (0..4_u32).map(|n| (&new, 100, 10 + u64::from(n), now - 2000.0 + f64::from(n) * 400.0));
        let late = (&old, 300, 20, now - 5.0 * 3600.0);
        let mut sets: Vec<_> = before.chain(after).chain([late]).collect();
        let expected = told(&collector, &sets)?;
        ensure!(expected["in_force"] == json!({"RUBY_GC_MALLOC_LIMIT": 33_554_432}), "{expected}");
        let change = &expected["last_change"];
        ensure!(change["speed"] == "better" && change["sets_before"] == 5, "{change}");
        ensure!(
            expected["withdrawal"] == Value::Null && expected["at_the_same_time"] == json!([]),
            "{expected}"
        );
        ensure!(expected["history"].as_array().is_some_and(|events| events.len() == 2), "{expected}");
        // A deterministic generator of permutations.
        let mut state = 7_u64;
        for round in 0..8 {
            for at in (1..sets.len()).rev() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                sets.swap(at, (state >> 33) as usize % (at + 1));
            }
            let other = told(&collector, &sets)?;
            ensure!(other == expected, "round {round}, {sets:?}:\n{other}\nis not\n{expected}");
        }
        Ok(())
    })
}

/// Hosts with different settings send sets alternately: the first settings stay in force, and the other ones are reported.
#[test]
fn at_the_same_time() -> Result<()> {
    each_store(|store| {
        let collector = Collector::with_store("127.0.0.1:0", store, &[])?;
        let token = collector.register()?;
        let (all, one) = (json!({}), json!({"RUBY_GC_MALLOC_LIMIT": "33554432"}));
        let now = epoch()?;
        for round in 0..5_u32 {
            let at = now - 3000.0 + f64::from(round) * 500.0;
            for (env, permille, pid, end) in [(&all, 300, 1, at), (&one, 500, 2, at + 10.0)] {
                collector.send(&ending(&token, env, permille, pid, end)?)?;
                let told = state(&collector, &token)?;
                ensure!(
                    told["in_force"] == json!({}) && told["last_change"] == Value::Null,
                    "{round}: {told}"
                );
                let others = &told["at_the_same_time"];
                ensure!(
                    (round == 0 && pid == 1) || others == &json!([{"RUBY_GC_MALLOC_LIMIT": 33_554_432}]),
                    "{told}"
                );
            }
        }
        let told = state(&collector, &token)?;
        let withdrawn = told["history"].as_array().context("a history")?.iter();
        ensure!(withdrawn.filter(|event| event["withdrawal"] == true).count() == 0, "{told}");
        let page = collector.get("/app/1")?.text();
        ensure!(page.contains("two environments are in force at the same time"), "{page}");
        ensure!(!page.contains("compared with the one before"), "{page}");
        Ok(())
    })
}
