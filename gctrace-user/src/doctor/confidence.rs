//! How sure the reading of an image is, from how its sites and its layout are known. The only place in doctor that
//! judges a layout.

use super::report::{Confidence, KeySource};
use crate::ruby::plan::AttachPlan;

/// What is known of an image's layout, and by what.
pub(super) struct Judgement {
    /// The word.
    pub(super) confidence: Confidence,
    /// What it rests on.
    pub(super) reason: String,
    /// Where the layout comes from.
    pub(super) layout: String,
    /// By what each key of `GC.stat` is known.
    pub(super) keys: Vec<KeySource>,
}

/// Judges the layout of a plan.
pub(super) fn of(plan: &AttachPlan) -> Judgement {
    let table = &plan.layout.table;
    let (from, to) = (table.from, table.to);
    let range = format!("{}.{}.{} to {}.{}.{}", from.0, from.1, from.2, to.0, to.1, to.2);
    let (confidence, reason) = if plan.layout.absent.is_empty() {
        (
            Confidence::Table,
            format!("layout as {range} is usually built; the code agrees where it was compared"),
        )
    } else {
        (Confidence::Partial, format!("these keys cannot be read: {}", plan.layout.absent.join(", ")))
    };
    Judgement {
        confidence,
        reason,
        layout: format!("table of {range}"),
        keys: plan.layout.keys.iter().map(|key| KeySource { name: key.name, known_by: "table" }).collect(),
    }
}
