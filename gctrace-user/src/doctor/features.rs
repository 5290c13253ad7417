//! What gctrace does with an image, feature by feature.

use super::report::{Feature, Refused};
use crate::ruby::plan::AttachPlan;

/// Stable names of all features, in the order in which they are told.
pub(super) const NAMES: [&str; 6] =
    ["gc_cycles", "gc_pauses", "gc_stat", "latest_gc_info", "tunemygc", "pprof"];

/// The features of an image that is traced.
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

/// The features of an image that is not traced.
pub(super) fn none(refused: &Refused) -> Vec<Feature> {
    let lack = || Some((refused.reason.clone(), refused.remedy.clone()));
    NAMES.iter().map(|&name| Feature { name, lack: lack() }).collect()
}
