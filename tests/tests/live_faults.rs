//! Faults that the static checks would have missed, injected into every plan: the live proofs refuse each process, and name
//! the failed check, before anything about its GC is reported.

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::memory::changed_code;
use gctrace_tests::report::Report;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use gctrace_tests::{gctrace, ledger};

/// Injects the fault for each Ruby, in a separate run.
fn refused(live: &Live, fault: &str, checks: &[&str]) -> Result<()> {
    Ruby::each(|ruby| {
        let script = Script::new(live, ruby, "explicit.rb")?.arg("12");
        let args = ["--probes", "sites", "--no-cache", "--inject-fault", fault];
        let (mut done, gctrace) = Script::under([script], args)?;
        let (done, finished) = (done.pop().context("no script")?, gctrace.wait()?);
        // Nothing was traced: each process was refused.
        let report = if finished.status.code() == Some(2) {
            Report::parse(&finished.stdout)?
        } else {
            gctrace::read(&finished)?
        };
        ledger::check(&report)?;
        let told = report.refused.iter().find(|line| line.pid == Some(done.pid));
        let told = told.context("it is not refused")?;
        ensure!(checks.iter().any(|check| told.reason.contains(check)), "{}", told.reason);
        ensure!(report.gcs_of(done.pid).count() == 0, "a GC was reported: {:?}", report.gcs.first());
        Ok(())
    })
}

/// A layout that is off by one word everywhere.
#[test]
fn wrong_layout() -> Result<()> {
    refused(
        &Live::beside_others()?,
        "layout",
        &[
            "count = minor_gc_count + major_gc_count",
            "live + final",
            "GC mode at the event",
            "during_gc is set",
        ],
    )
}

/// The probes of start and end of sweeping are swapped.
#[test]
fn starts_for_ends() -> Result<()> {
    refused(&Live::beside_others()?, "starts", &["GC mode at the event"])
}

/// The probes of start and end of marking are swapped.
#[test]
fn starts_for_marks() -> Result<()> {
    refused(&Live::beside_others()?, "marks", &["GC mode at the event"])
}

/// The probes of enter and exit are swapped: no state shows this, but cycles then start between the pauses.
#[test]
fn enters_for_exits() -> Result<()> {
    refused(&Live::beside_others()?, "enters", &["cycles start inside a pause"])
}

/// The last probe of an image cannot be attached: the probes before it are detached again, none of their hits count, and the
/// image is refused with the name of the probe. Tested with event sites, and with each kind of fallback probe.
#[test]
fn attaching_fails() -> Result<()> {
    let live = Live::begin()?;
    let mut fallbacks = 0;
    Ruby::each(|ruby| {
        for method in ["sites", "functions", "usdt"] {
            let mut script = Script::new(&live, ruby, "explicit.rb")?.arg("5").waiting().start()?;
            script.wait_for("ready")?;
            let args = ["--all-ruby", "--probes", method, "--no-cache", "--inject-fault", "attach"];
            let gctrace = Invocation::jsonl(args)?.start_ready()?;
            let changed = changed_code(script.pid())?;
            ensure!(changed.is_empty(), "{method}: probes were left at {changed:x?}");
            script.say("go")?;
            let done = script.finish()?;
            let finished = gctrace.interrupt()?;
            ensure!(finished.status.code() == Some(2), "{method}: {}", finished.errors());
            let said = |part: &str| finished.errors().contains(part);
            ensure!(
                said("nothing was traced") && !said("nothing matched"),
                "{method}: {}",
                finished.errors()
            );
            ensure!(!said("/proc/self/fd/"), "a descriptor instead of the file: {}", finished.errors());
            let report = Report::parse(&finished.stdout)?;
            ledger::check(&report)?;
            ensure!(report.gcs.is_empty() && report.works.is_empty(), "{method}: something was reported");
            let told = report.refused.iter().find(|line| line.pid == Some(done.pid));
            let reason = &told.with_context(|| format!("{method}: it is not refused"))?.reason;
            let attached = reason.contains("attaching the ") && reason.contains(" probe at file offset ");
            // A Ruby may have no symbols, or no USDT probes.
            ensure!(attached || (method != "sites" && reason.contains("it has no ")), "{method}: {reason}");
            fallbacks += usize::from(attached && method != "sites");
        }
        Ok(())
    })?;
    ensure!(fallbacks > 0, "no Ruby of the lab has fallback probes");
    Ok(())
}
