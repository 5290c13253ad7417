//! What gctrace does with an image, feature by feature.

use super::report::{Feature, Refused};
use crate::ruby::{last_resort::Method, plan::AttachPlan};

/// Stable names of all features, in the order in which they are told.
pub(super) const NAMES: [&str; 6] =
    ["gc_cycles", "gc_pauses", "gc_stat", "latest_gc_info", "tunemygc", "pprof"];

/// The only feature of the methods of the last resort.
const WORK: &str = "gc_work";

/// The features of an image that is traced by its event sites.
pub(super) fn of(plan: &AttachPlan, reads_threads: bool) -> Vec<Feature> {
    let absent = &plan.layout.absent;
    let remedy = if reads_threads {
        "upgrade gctrace"
    } else {
        "use a kernel with BTF (CONFIG_DEBUG_INFO_BTF): what Ruby 4.0 counts per thread is found with its help"
    };
    let lack = |name: &str| {
        let partly = matches!(name, "gc_stat" | "tunemygc") && !absent.is_empty();
        partly.then(|| (format!("without {}", absent.join(", ")), remedy.to_owned()))
    };
    NAMES.iter().map(|&name| Feature { name, lack: lack(name) }).collect()
}

/// The features of an image that is not traced by its event sites: at best, how long GC work takes.
pub(super) fn without_sites(refused: &Refused, method: Option<Method>) -> Vec<Feature> {
    let lack = || Some((refused.reason.clone(), refused.remedy.clone()));
    let work = method.map(|_| Feature { name: WORK, lack: None });
    work.into_iter().chain(NAMES.iter().map(|&name| Feature { name, lack: lack() })).collect()
}
