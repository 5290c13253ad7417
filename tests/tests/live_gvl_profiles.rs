//! Profiles and timelines of the GVL, compared with the lines of the same run.

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::ensure_times;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::perfetto::Trace;
use gctrace_tests::pprof::{Profile, Sample};
use gctrace_tests::report::GvlSumsLine;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use gctrace_tests::{ledger, witness};
use serde_json::Value;

use super::live_gvl::{Hog, within};

/// A marker about the GVL: thread, name, begin and end, nanoseconds since the start of the run.
type Marker = (u32, String, u64, u64);

fn gvl_markers(file: &Value) -> Result<Vec<Marker>> {
    let mut found = Vec::new();
    for thread in file["threads"].as_array().context("no threads")? {
        let markers = &thread["markers"];
        for (at, data) in markers["data"].as_array().context("no markers")?.iter().enumerate() {
            let Some(name) = data["type"].as_str().filter(|name| name.starts_with("THREAD_")) else {
                continue;
            };
            let tid = thread["tid"].as_str().context("no tid")?.parse()?;
            let ns =
                |key: &str| markers[key][at].as_f64().map(|ms| (ms * 1e6).round() as u64).context("no time");
            found.push((tid, name.to_owned(), ns("startTime")?, ns("endTime")?));
        }
    }
    Ok(found)
}

/// Profiles and timelines agree with the lines: the same number of waits with the same durations, and all states of a thread, which are
/// mutually exclusive. Arrows lead from the holder of the GVL to the waiting thread.
#[test]
fn profiles_agree_with_the_lines() -> Result<()> {
    let live = Live::begin()?;
    Ruby::first_and_last(|ruby| {
        let dir = live.dir(&format!("gvl-{}", ruby.label()))?;
        let (pprof, firefox, perfetto) =
            (dir.join("run.pb.gz"), dir.join("run.json"), dir.join("run.pftrace"));
        let mut args: Vec<&std::ffi::OsStr> = Vec::new();
        args.extend(["--all-ruby", "--gvl", "--gvl-budget", "100", "--pprof"].map(std::ffi::OsStr::new));
        args.extend([pprof.as_os_str(), "--firefox".as_ref(), firefox.as_os_str()]);
        args.extend(["--perfetto".as_ref(), perfetto.as_os_str()]);
        let gctrace = Invocation::jsonl(args)?.start_ready()?;
        let script = Script::unwitnessed(&live, ruby, "gvl_holder.rb")?.seeing_proc();
        let done = script.env("GCTRACE_TEST_GVL_WITNESS", witness::gvl_extension(ruby)?).run()?;
        let report = gctrace.stop()?;
        ledger::check_lossless(&report)?;
        let Hog { tid: hog, .. } = serde_json::from_value(done.report.extra["hog"].clone())?;

        let profile = Profile::open(&pprof)?;
        let sum = |of: fn(&GvlSumsLine) -> u64| report.gvl_threads.iter().map(of).sum::<u64>();
        assert_eq!(profile.total("gvl_waits/count")?, sum(|line| line.waits), "waits in pprof");
        assert_eq!(profile.total("gvl_wait/nanoseconds")?, sum(|line| line.wait_ns), "their time");
        let holds = sum(|line| line.hold_ns.unwrap_or(0));
        assert_eq!(profile.total("gvl_hold/nanoseconds")?, holds, "holds in pprof");
        let wait = profile.index("gvl_wait/nanoseconds")?;
        let told: u64 = report.gvl_waits.iter().map(|line| line.wait_ns).sum();
        let for_hog = |sample: &&Sample| sample.label("blocked by id") == Some(&hog.to_string());
        let of_hog: Vec<&Sample> = profile.samples.iter().filter(for_hog).collect();
        let hogged: u64 = of_hog.iter().map(|sample| sample.values[wait]).sum();
        ensure!(hogged > 500_000_000 && hogged <= told, "{hogged} of {told} ns for the hog");
        ensure!(of_hog.iter().all(|sample| sample.label("blocked by") == Some("hog")), "{of_hog:?}");
        let in_script = |sample: &&Sample| sample.stack.iter().any(|f| f.file.ends_with("gvl_holder.rb"));
        let stacks = of_hog.iter().any(in_script);
        ensure!(stacks == ruby.has_tables(), "stacks: {of_hog:?}");
        let says = |label: &str, line: &str| {
            of_hog.iter().any(|s| s.label(label).is_some_and(|l| l.ends_with(line)))
        };
        let blocked = says("blocked in", "(gvl_holder.rb:13)");
        ensure!(blocked == ruby.has_tables(), "what the hog did: {of_hog:?}");
        let until =
            says("blocked until", "(gvl_holder.rb:14)") || says("blocked until", "(gvl_holder.rb:13)");
        // Time slices end with a yield, which has no event in 3.2.
        let known = if ruby.tells_holds() { ruby.has_tables() } else { until };
        ensure!(until == known, "where it gave the GVL up: {of_hog:?}");
        let hold = profile.index("gvl_hold/nanoseconds")?;
        let given_up = |sample: &&Sample| {
            sample.stack.iter().any(|f| f.name == "(giving up the GVL)") && in_script(sample)
        };
        let given_up: u64 = profile.samples.iter().filter(given_up).map(|sample| sample.values[hold]).sum();
        let told = ruby.has_tables() && ruby.tells_holds();
        ensure!((given_up > 500_000_000) == told, "{given_up} of {holds} ns under the hog's stack");
        ensure!(given_up <= holds, "{given_up} of {holds} ns under the hog's stack");

        let file: Value = serde_json::from_str(&std::fs::read_to_string(&firefox)?)?;
        let mut markers = gvl_markers(&file)?;
        let trace = Trace::open(&perfetto)?;
        for (name, marker) in
            [("waiting for the GVL", "THREAD_STALLED"), ("holding the GVL", "THREAD_RUNNING")]
        {
            // Both have the same intervals.
            let mut ours: Vec<u64> =
                markers.iter().filter(|m| m.1 == marker).map(|(.., begin, end)| end - begin).collect();
            let slices = trace.slices.iter().filter(|slice| slice.name == name);
            let mut theirs: Vec<u64> = slices.map(|slice| slice.end_ns - slice.begin_ns).collect();
            ours.sort_unstable();
            theirs.sort_unstable();
            ensure!(ours.len() == theirs.len(), "{name}: {} markers, {} slices", ours.len(), theirs.len());
            // Milliseconds as floating-point numbers are exact to some nanoseconds.
            let same = ours.iter().zip(&theirs).all(|(a, b)| a.abs_diff(*b) <= 10);
            ensure!(same, "{name}: {ours:?}, {theirs:?}");
        }
        for line in &report.gvl_waits {
            let (begin, end) = (line.begin_ns, line.begin_ns + line.wait_ns);
            let here = trace.slices.iter().find(|slice| (slice.begin_ns, slice.end_ns) == (begin, end));
            ensure!(here.is_some_and(|slice| slice.name == "waiting for the GVL"), "no slice of {line:?}");
        }
        let arrows = report.gvl_waits.iter().filter(|line| line.blocked_by.is_some()).count();
        ensure!(trace.arrows.len() == arrows, "{} arrows, {arrows} waits with a holder", trace.arrows.len());
        for ((from, begin), (to, got)) in &trace.arrows {
            let holder = trace.slices.iter().find(|slice| (slice.uuid, slice.begin_ns) == (*from, *begin));
            ensure!(
                holder.is_some_and(|slice| slice.name == "holding the GVL"),
                "{from} {begin}: {holder:?}"
            );
            let ended = trace.slices.iter().any(|slice| (slice.uuid, slice.end_ns) == (*to, *got));
            ensure!(ended && from != to, "no wait on {to} ends at {got}");
        }
        // A thread is in one state at a time. The hog, which is idle only briefly, is always in one of them.
        markers.sort_by_key(|marker| (marker.0, marker.2));
        for pair in markers.windows(2) {
            let apart = pair[0].0 != pair[1].0 || pair[0].3 <= pair[1].2 + 10;
            ensure!(apart, "two states at the same time: {pair:?}");
        }
        let of_it = report.gvl_threads.iter().find(|line| line.tid == Some(hog)).context("no hog")?;
        let shown: u64 =
            markers.iter().filter(|m| m.0 == hog && m.1 == "THREAD_RUNNING").map(|m| m.3 - m.2).sum();
        if !ruby.tells_holds() {
            // The holds that are named by waits are shown.
            ensure_times!(shown > 500_000_000 && of_it.hold_ns.is_none(), "{shown} ns shown of {of_it:?}");
            return Ok(());
        }
        within("holds of the hog in the timeline", shown, of_it.hold_ns.context("no holds")?, 2)
    })
}
