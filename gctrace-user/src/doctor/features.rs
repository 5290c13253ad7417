//! What gctrace does with an image, feature by feature.

use super::report::{Feature, Refused};
use crate::{
    discover::Abilities,
    elf::Machine,
    ruby::{fallback::Method, gvl_plan::NoGvl, plan::AttachPlan},
};

/// Stable names of all features, in the order of the report.
pub(super) const NAMES: [&str; 9] = [
    "gc_cycles",
    "gc_pauses",
    "gc_stat",
    "latest_gc_info",
    "tunemygc",
    "pprof",
    "ruby_stacks",
    "gvl_waits",
    "gvl_holds",
];

/// The only feature of the fallback methods.
const WORK: &str = "gc_work";

/// Remedy for a feature that is missing on other processors.
const ON_X86: &str = "not possible on this processor: use x86-64";

/// The features of an image that is traced by its event sites.
pub(super) fn of(plan: &AttachPlan, abilities: Abilities) -> Vec<Feature> {
    let absent = &plan.layout.absent;
    let remedy = if plan.analysis.machine != Machine::X86_64 {
        ON_X86
    } else if abilities.reads_threads {
        "upgrade gctrace"
    } else {
        "use a kernel with BTF (CONFIG_DEBUG_INFO_BTF): it is needed for stacks and the per-thread counters of \
         Ruby 4.0"
    };
    let lack = |name: &str| {
        if name == "ruby_stacks" {
            let why = plan.frames.as_ref().err()?;
            return Some((why.to_string(), remedy.to_owned()));
        }
        if name.starts_with("gvl_") {
            return gvl(plan, name, abilities);
        }
        let partly = matches!(name, "gc_stat" | "tunemygc") && !absent.is_empty();
        partly.then(|| (format!("without {}", absent.join(", ")), remedy.to_owned()))
    };
    NAMES.iter().map(|&name| Feature { name, lack: lack(name) }).collect()
}

/// What is missing from the output of `--gvl`, and the remedy; `None` if nothing is.
fn gvl(plan: &AttachPlan, name: &str, abilities: Abilities) -> Option<(String, String)> {
    if !abilities.cookies {
        let reason = "the kernel has no attach cookies, so the site of a hit is not known";
        return Some((reason.to_owned(), "use Linux 5.15 or later, or --gvl=futex".to_owned()));
    }
    match &plan.gvl {
        Err(why @ NoGvl::Machine) => Some((why.to_string(), ON_X86.to_owned())),
        Err(why) => Some((why.to_string(), "upgrade gctrace, or the Ruby".to_owned())),
        Ok(gvl) if name == "gvl_holds" && !gvl.coverage.holds => {
            let reason = "the yields of Ruby 3.2 have no event, so the time for which a thread holds the GVL is not known";
            Some((reason.to_owned(), "use Ruby 3.3 or later".to_owned()))
        }
        Ok(_) => None,
    }
}

/// The features of an image that is not traced by its event sites: at most the time of GC work.
pub(super) fn without_sites(refused: &Refused, method: Option<Method>) -> Vec<Feature> {
    let lack = || Some((refused.reason.clone(), refused.remedy.clone()));
    let work = method.map(|_| Feature { name: WORK, lack: None });
    work.into_iter().chain(NAMES.iter().map(|&name| Feature { name, lack: lack() })).collect()
}
