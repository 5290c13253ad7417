//! Spans that a tracing library publishes (OTEP 4947): each stack has the one that was active when it was taken, or none.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::Guarded;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::{Live, rubies_dir};
use gctrace_tests::pprof::{Profile, Sample};
use gctrace_tests::receiver::Receiver;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::{PATIENCE, ledger, python, witness};
use rustix::process::Signal;

/// Ways in which a program finds the variable: by a descriptor, by its offset from the thread pointer, by module and offset.
const MODELS: [&str; 3] = ["-mtls-dialect=gnu2", "-ftls-model=initial-exec", "-mtls-dialect=gnu"];
/// How long the program works, seconds; its child then works for half as long.
const SECONDS: &str = "1.2";

/// The span in which the script calls a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Truth {
    In(u32),
    Outside,
}

/// The span in which the script calls the method `in_…` that is on a stack.
fn truth(sample: &Sample) -> Option<Truth> {
    // From 3.3 on, an evaluated method is `Object#in_1 (eval at …`.
    let mut names = sample
        .stack
        .iter()
        .filter_map(|frame| frame.name.rsplit('#').next()?.strip_prefix("in_")?.split(' ').next());
    // The kernel also has such names.
    names.find_map(|doing| match doing {
        "sleep" => Some(Truth::In(0)),
        "none" | "torn" | "nowhere" => Some(Truth::Outside),
        number => number.parse().ok().map(Truth::In),
    })
}

/// Trace id and span id of the script's span with this number.
fn ids(number: u32) -> (String, String) {
    (format!("0102030405060708090a0b0c0d0e0f{:02x}", number + 1), format!("a0000000000000{:02x}", number + 1))
}

/// Whatever TLS model the library is compiled for, and although it is loaded at run time: samples on and off the CPU, collections and allocation have
/// the span in which they happened, in the program and in a child that it forks. They have none outside of spans, during an incomplete update, or if
/// the variable points nowhere.
#[test]
fn stacks_have_the_span_in_which_they_were_taken() -> Result<()> {
    let live = Live::beside_others()?;
    let mut next = 0;
    Ruby::each(|ruby| {
        // Each Ruby tests one model, the first Ruby all of them.
        let models = if next == 0 { &MODELS[..] } else { &MODELS[next % MODELS.len()..][..1] };
        next += 1;
        models.iter().try_for_each(|model| traced(&live, ruby, model).with_context(|| (*model).to_owned()))
    })
}

fn traced(live: &Live, ruby: &Ruby, model: &str) -> Result<()> {
    let library = witness::spans_extension(ruby, &[model])?;
    let mut command = ruby.command()?;
    command.arg(rubies_dir().join("spans.rb")).arg(SECONDS).env("GCTRACE_TEST_SPANS", library);
    let mut program = Guarded::start("ruby", &mut command)?;
    program.wait_stdout(PATIENCE, "ready", |line| line == "ready")?;

    let receiver = Receiver::start(|_, _| (200, "", b""))?;
    let url = format!("http://{}", receiver.address);
    let file = live.path("spans.pb.gz");
    let (pid, path) = (program.pid().to_string(), file.to_string_lossy());
    let args = ["--pid", &pid, "--wall", "--alloc", "--rate", "499", "--pprof", &path, "--otlp", &url];
    let more = ["--otlp-signals", "profiles", "--push-interval", "60s"];
    let gctrace = Invocation::jsonl(args.iter().chain(&more))?.start_ready()?;
    program.say("go")?;
    program.wait_stdout(PATIENCE, "done", |line| line == "done")?;
    let (report, finished) = gctrace.stop_by(Signal::INT)?;
    program.say("end")?;
    let ended = program.finish(PATIENCE)?;
    ensure!(ended.status.success(), "{}", ended.errors());
    ledger::check(&report)?;
    let counted = |name: &str| report.ledger.as_ref().and_then(|ledger| ledger.kernel[name].as_u64());
    let (sought, found) = (counted("stack_spans_sought"), counted("stack_spans"));
    ensure!(found > Some(100) && sought > found, "{sought:?} {found:?}\n{}", finished.errors());
    ensure!(counted("stack_spans_unread") > Some(10), "where it points nowhere, that is counted: {report:?}");

    // Sums of values with a span, by sample type and span.
    let profile = Profile::open(&file)?;
    let mut with: BTreeMap<(&str, String), u64> = BTreeMap::new();
    let mut pids = BTreeMap::<&str, u64>::new();
    let mut without = 0;
    for sample in &profile.samples {
        let label = sample.label("trace_id").zip(sample.label("span_id"));
        let label = label.map(|(trace, span)| (trace.to_owned(), span.to_owned()));
        ensure!(sample.label("trace_origin") == label.as_ref().map(|_| "thread"), "{sample:?}");
        if let Some(truth) = truth(sample) {
            let expected = match truth {
                Truth::In(number) => Some(ids(number)),
                Truth::Outside => None,
            };
            ensure!(label == expected, "{truth:?}: {sample:?}");
            without += u64::from(label.is_none());
        }
        let Some((trace, span)) = label else { continue };
        *pids.entry(sample.label("pid").context("a pid")?).or_default() += 1;
        for (kind, value) in profile.types.iter().zip(&sample.values).filter(|(_, value)| **value > 0) {
            *with.entry((kind, format!("{trace}:{span}"))).or_default() += value;
        }
    }
    ensure!(without > 10 && pids.len() == 2, "{without} without a span; {pids:?}");
    for kind in ["samples/count", "wall/nanoseconds", "gc_pauses/count", "alloc_objects/count"] {
        let spans = with.keys().filter(|(of, _)| *of == kind).count();
        ensure!(spans >= 5, "{spans} spans have {kind}: {with:?}");
    }
    linked(live, &receiver, &with)
}

/// The links of OTLP profiles equal the labels of the pprof file.
fn linked(live: &Live, receiver: &Receiver, labels: &BTreeMap<(&str, String), u64>) -> Result<()> {
    let mut files = Vec::new();
    for (at, push) in receiver.pushes().iter().enumerate() {
        files.push(live.path(&format!("{at}.profiles")));
        std::fs::write(&files[at], &push.body)?;
    }
    let found = python::script("otlp.py", &files)?;
    ensure!(found["errors"].as_array().is_some_and(Vec::is_empty), "against the rules: {}", found["errors"]);
    for (kind, of) in [("gc_pauses", "gc_pauses/count"), ("cpu", "cpu/nanoseconds")] {
        let expected = labels.iter().filter(|((label, _), _)| *label == of);
        let expected: BTreeMap<String, u64> = expected.map(|((_, ids), sum)| (ids.clone(), *sum)).collect();
        let links: BTreeMap<String, u64> = serde_json::from_value(found["links"][kind].clone())?;
        ensure!(!links.is_empty() && links == expected, "{kind}: {links:?} {expected:?}");
    }
    Ok(())
}
