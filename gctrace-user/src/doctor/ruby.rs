//! Checks of the Rubies: how each image and process would be traced.

use gctrace_common::event::Point;

use super::{
    confidence::{self, Judgement},
    features,
    report::{Confidence, ImageReport, ProcessReport, Proof, Refused, SiteCount, Tracing},
};
use crate::{
    discover::{
        Abilities, ImageFound, Planned, ProcessFound, Rejection, Survey, Symbols, TracingMethod, VmState,
    },
    ruby::{
        Outcome, Refusal, RubyAnalysis, SiteForm,
        fallback::Method,
        layout::LayoutError,
        plan::{AttachPlan, PlanError},
        reconcile::Unproven,
    },
};

/// Reports on the results of a survey.
pub(super) fn examine(survey: &Survey, abilities: Abilities) -> (Vec<ImageReport>, Vec<ProcessReport>) {
    let users = |index| survey.processes.iter().filter(|process| process.image == index).count();
    let images = survey.images.iter().enumerate().map(|(index, found)| image(found, users(index), abilities));
    let processes = survey.processes.iter().map(|found| {
        let plan = match &survey.images[found.image].choice.method {
            Some(TracingMethod::Sites(planned)) => Some(&planned.plan),
            _ => None,
        };
        process(found, plan)
    });
    (images.collect(), processes.collect())
}

fn image(found: &ImageFound, processes: usize, abilities: Abilities) -> ImageReport {
    let refused =
        found.choice.refusals.first().map(|why| Refused { reason: why.to_string(), remedy: remedy(why) });
    let method = found.choice.method.as_ref().map(|method| match method {
        TracingMethod::Sites(_) => Method::Sites,
        TracingMethod::Fallback(_, last) => last.method,
    });
    let (confidence, tracing, features) = match (&found.choice.method, &refused) {
        (Some(TracingMethod::Sites(planned)), _) => {
            let judgement = confidence::of(&planned.plan);
            let confidence = (judgement.confidence, judgement.reason.clone());
            let features = features::of(&planned.plan, abilities);
            (confidence, Some(tracing(planned, judgement)), features)
        }
        (_, Some(refused)) => {
            let misses = method.and_then(Method::misses);
            let confidence =
                misses.map_or((Confidence::None, "not traced"), |misses| (Confidence::Partial, misses));
            ((confidence.0, confidence.1.to_owned()), None, features::without_sites(refused, method))
        }
        (_, None) => ((Confidence::None, "not traced".to_owned()), None, Vec::new()),
    };
    let text = |text: &String| (!text.is_empty()).then(|| text.clone());
    ImageReport {
        path: found.path.clone(),
        version: found.identity.version.as_ref().and_then(text),
        description: found.identity.description.as_ref().and_then(text),
        build_id: found.identity.build_id.as_ref().map(ToString::to_string),
        confidence,
        method,
        fallback: match &found.choice.method {
            Some(TracingMethod::Fallback(_, last)) => Some((last.probes.len(), last.slow())),
            _ => None,
        },
        tracing,
        refused,
        features,
        processes,
        named: found.named,
    }
}

fn tracing(planned: &Planned, judgement: Judgement) -> Tracing {
    let analysis = &planned.plan.analysis;
    let check = |check: &crate::ruby::Check| match &check.outcome {
        Outcome::Passed => (check.name.to_string(), None),
        Outcome::Failed(reason) | Outcome::NotApplicable(reason) => {
            (check.name.to_string(), Some(reason.clone()))
        }
    };
    Tracing {
        sites: Point::ALL.iter().map(|&point| count(analysis, point)).collect(),
        slow_sites: analysis.sites.iter().filter(|site| !site.emulated).count(),
        symbols: analysis.has_symbols,
        symbols_from: match &planned.symbols {
            Symbols::None => None,
            Symbols::Own => Some("the file itself".to_owned()),
            Symbols::Separate(origin) => Some(origin.to_string()),
            Symbols::Earlier => Some("separate ones, when the file was analysed earlier".to_owned()),
        },
        checks: analysis.checks.iter().map(check).collect(),
        layout: judgement.layout,
        stat_keys: judgement.keys,
        cached: planned.cached,
        took_us: planned.took.as_micros(),
    }
}

fn count(analysis: &RubyAnalysis, point: Point) -> SiteCount {
    let sites = || analysis.sites.iter().filter(move |site| site.point == point);
    let form = |form| sites().filter(|site| site.form == form).count();
    SiteCount {
        event: point.name(),
        guard: form(SiteForm::Guard),
        scan: form(SiteForm::Scan),
        call: form(SiteForm::Call),
        with_register: sites().filter(|site| site.register.is_some()).count(),
    }
}

fn process(found: &ProcessFound, plan: Option<&AttachPlan>) -> ProcessReport {
    let proof = match (&found.state, plan) {
        (Some(state), Some(plan)) => proof(state, plan),
        _ => Proof::NotTried,
    };
    ProcessReport { pid: found.pid, image: found.image, command: found.command.clone(), proof }
}

fn proof(state: &Result<VmState, String>, plan: &AttachPlan) -> Proof {
    match state {
        Ok(VmState::Proven(_, data)) => {
            let value = |name| plan.layout.keys.iter().find(|key| key.name == name)?.value(data);
            Proof::Passed {
                count: plan.layout.count.read(data).unwrap_or_default(),
                live_slots: value("heap_live_slots"),
                available_slots: value("heap_available_slots"),
            }
        }
        Ok(VmState::PerThread) => Proof::Later("its counters belong to threads"),
        Ok(VmState::NotSetUp) => Proof::Later("its VM is not set up yet"),
        Ok(VmState::Busy) => Proof::Later("it was collecting at every attempt to read it"),
        Ok(VmState::Unreadable(error)) => Proof::Unreadable(error.to_string()),
        Err(failed) => Proof::Failed(failed.clone()),
    }
}

/// The remedy for an image that is not traced.
fn remedy(why: &Rejection) -> String {
    let error = match why {
        Rejection::Sites(error) => error,
        Rejection::Damaged(_) => return "the file is damaged or was cut off: reinstall it".to_owned(),
        Rejection::Unread(_) => {
            return "its disk or file server answered with an error: look at the kernel's log, and try again"
                .to_owned();
        }
        Rejection::Fallback(_) => return "use a kernel of 5.15 or later".to_owned(),
    };
    let text = match error {
        PlanError::Elf { .. } => "the file is damaged or was cut off: reinstall it",
        PlanError::Refused(refusal) => match refusal {
            Refusal::Machine(_) => "run gctrace's build for that processor on a host that runs such programs",
            Refusal::Aarch64(_) => {
                "on this processor use a Ruby up to 3.4 without a modular GC; on x86-64 it works"
            }
            Refusal::Version(version) if version.at_least(5, 0) => "upgrade gctrace",
            Refusal::Version(_) => "upgrade Ruby to 2.6 or later",
            Refusal::ForeignGc(_) => {
                "run the program without RUBY_GC_LIBRARY, or with RUBY_GC_LIBRARY=default"
            }
            Refusal::NotRuby => "the file is damaged: reinstall it",
            _ => {
                "compare the file with its package (`dpkg -V` or `rpm -V`); if it is unchanged, report this with \
                 `gctrace doctor --format jsonl`"
            }
        },
        PlanError::Layout(Unproven::Layout(LayoutError::UnknownVersion(..))) => {
            "upgrade gctrace, or give this build's debug file with --layout-from"
        }
        PlanError::Layout(Unproven::Layout(_)) | PlanError::NotExecutable(..) => {
            "this is a mistake in gctrace: report it with `gctrace doctor --format jsonl`"
        }
        PlanError::Disagreement(_) | PlanError::SymbolsDisagree { .. } => {
            "reinstall the Ruby and its debug package; if they belong together, report this with \
             `gctrace doctor --format jsonl`"
        }
        PlanError::OtherBuild(_) | PlanError::DebugInformation(_) => {
            "give the debug file of exactly this build with --layout-from"
        }
        PlanError::Layout(Unproven::Disagrees { .. }) => {
            "give this build's debug file with --layout-from, or use a Ruby that is built with the usual options"
        }
    };
    text.to_owned()
}
