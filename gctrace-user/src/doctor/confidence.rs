//! How reliable the reading of an image is, derived from how its sites and its layout are known. The only place in doctor
//! that judges a layout.

use super::report::{Confidence, KeySource};
use crate::ruby::plan::AttachPlan;
use crate::ruby::reconcile::Source;

/// How reliable an image's layout is, and why.
pub(super) struct Judgement {
    /// The verdict.
    pub(super) confidence: Confidence,
    /// What the verdict is based on.
    pub(super) reason: String,
    /// Where the layout comes from.
    pub(super) layout: String,
    /// How each key of `GC.stat` is known.
    pub(super) keys: Vec<KeySource>,
}

/// Judges the layout of a plan.
pub(super) fn of(plan: &AttachPlan) -> Judgement {
    let knowledge = &plan.knowledge;
    let from_table = |parts: &[(&str, Source)]| parts.iter().any(|(_, source)| *source == Source::Table);
    let (confidence, reason) = if knowledge.absent.is_empty() {
        let confidence = if from_table(&knowledge.keys) || from_table(&knowledge.fields) {
            Confidence::Table
        } else {
            Confidence::Proven
        };
        (confidence, knowledge.to_string())
    } else {
        let absent = knowledge.absent.iter().map(|key| format!("{} ({})", key.name, key.reason));
        let absent = absent.collect::<Vec<_>>().join(", ");
        (Confidence::Partial, format!("these keys cannot be read: {absent}"))
    };
    let known = |&(name, source): &(&'static str, Source)| KeySource { name, known_by: source.name() };
    Judgement {
        confidence,
        reason,
        layout: knowledge.to_string(),
        keys: knowledge.keys.iter().map(known).collect(),
    }
}
