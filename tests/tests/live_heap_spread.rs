//! `gctrace heap --leaks` if no single object holds what grows, if the holder is replaced, and if objects are not watched.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::heap::heap;
use gctrace_tests::live::Live;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;

use crate::live_heap_growth::{growing, leaks, suspect, two_on_each};

/// If several objects are holders, each of them is named with what holds it.
fn spread(live: &Live, ruby: &Ruby) -> Result<()> {
    let (_, found) = growing(live, ruby, "spread")?;
    let named = |class: &str, kind: &str, end: &str, arrays: u64| -> Result<BTreeSet<String>> {
        let leak = suspect(&found, class, "Array")?;
        // Each holds some of the samples, which repeat in memory in the order of their allocation.
        let holder = &leak["holders"][0];
        ensure!(holder["objects"] == arrays && holder["holds"] == holder["of"], "{leak}");
        ensure!(leak["end"] == end && leak["several"]["of"] == arrays, "{leak}");
        let named = leak["several"]["named"].as_array().with_context(|| format!("no names: {leak}"))?;
        ensure!(named.len() as u64 == arrays, "{leak}");
        Ok(named.iter().map(|named| named[kind].to_string()).collect())
    };
    let texts = |names: [&str; 4]| names.map(str::to_owned).into();
    let constants = named("Toll", "constant", "constant", 4)?;
    ensure!(constants == texts(["\"TOLL0\"", "\"TOLL1\"", "\"TOLL2\"", "\"TOLL3\""]), "{constants:?}");
    let variables = named("Good", "variable", "class_variable", 4)?;
    let of = |i: u32| format!(r#"{{"name":"@goods","class":"Depot{i}"}}"#);
    ensure!(variables == (0..4).map(of).collect(), "{variables:?}");
    let locals = named("Visa", "thread_local", "thread_local", 3)?;
    ensure!(locals.len() == 3 && locals.iter().all(|local| local.contains("\"visas\"")), "{locals:?}");
    Ok(())
}

/// A list that is replaced at each change may no longer exist when it is reported; but objects that are not read are not named as holders.
fn copies(live: &Live, ruby: &Ruby) -> Result<()> {
    let (_, found) = growing(live, ruby, "copies")?;
    let leak = found.iter().find(|leak| leak["name"] == "Version");
    let leak = leak.with_context(|| format!("Version is not named: {found:#?}"))?;
    let end = leak["end"].as_str().unwrap_or_default();
    // The copy that was found may be gone when it is checked again.
    let held = leak["holders"][0]["class"] == "Array";
    ensure!(held || end == "changed", "{leak}");
    ensure!(["doubtful", "changed", "global_variable"].contains(&end), "{leak}");
    ensure!(end != "global_variable" || leak["global"] == "$versions", "{leak}");
    Ok(())
}

/// Holders with instance variables hold their elements, and a singleton class does not set similar holders apart.
fn with_own_variables(live: &Live, ruby: &Ruby) -> Result<()> {
    let (_, found) = growing(live, ruby, "holders")?;
    for (class, holder, constant) in [("Book", "Shelf", "SHELF"), ("Card", "Array", "CARDS")] {
        let leak = suspect(&found, class, holder)?;
        ensure!(leak["constant"] == constant && leak["end"] == "constant", "{leak}");
        ensure!(leak["holders"].as_array().map(Vec::len) == Some(1), "{leak}");
    }
    // Up to 3.4, a set has a hash.
    let holder = if ruby.is_at_least(4, 0) { "Set" } else { "Hash" };
    let leak = suspect(&found, "Seal", holder)?;
    let last = leak["holders"].as_array().and_then(|holders| holders.last());
    ensure!(last.is_some_and(|last| last["class"] == "Set") && leak["constant"] == "SEALS", "{leak}");
    let leak = suspect(&found, "Gift", "Box")?;
    let holder = &leak["holders"][0];
    ensure!(holder["objects"].as_u64() > Some(1) && holder["holds"] == holder["of"], "{leak}");
    ensure!(leak["holders"][1]["class"] == "Array" && leak["constant"] == "BOXES", "{leak}");
    Ok(())
}

/// Holders that are spread out or replaced are named, as far as they are known.
#[test]
fn several_holders() -> Result<()> {
    let live = Live::beside_others()?;
    two_on_each(&live, [("spread", spread), ("copies", copies)])
}

/// Holders that are unlike others are named, too.
#[test]
fn holders_with_own_variables() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::two_at_a_time(|ruby| with_own_variables(&live, ruby))
}

/// Objects without write barriers are not watched. gctrace says so, with their numbers.
#[test]
fn objects_that_are_not_watched() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::two_at_a_time(|ruby| {
        let mut script = Script::unwitnessed(&live, ruby, "heap_leaks.rb")?.arg("loose").start()?;
        script.wait_for("ready")?;
        let (head, found) = leaks(&live, script.pid())?;
        // Two censuses are needed; a busy machine may take longer for them.
        let mut said = Vec::new();
        for time in ["2s", "8s", "16s", "40s"] {
            said = heap(&live, script.pid(), &["--leaks", time, "--no-sites"])?.stdout;
            if said.iter().any(|line| line.starts_with("not watched: ")) {
                break;
            }
        }
        script.say("end")?;
        script.finish()?;
        ensure!(found.iter().all(|leak| leak["name"] != "Random"), "{found:#?}");
        let more = head["unprotected"].as_array().with_context(|| format!("none: {head}"))?;
        let of = more.iter().find(|more| more["name"] == "Random");
        let count = |name: &str| of.and_then(|of| of[name].as_u64());
        // 300 in each of at least eight rounds.
        let grown = count("before").zip(count("after")).is_some_and(|(first, last)| last >= first + 2000);
        ensure!(grown, "{head}");
        let named = said.iter().any(|line| line.starts_with("not watched: ") && line.contains("Random "));
        ensure!(named, "{said:?}");
        Ok(())
    })
}
