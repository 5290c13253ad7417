//! How sure the reading of an image is, from how its sites and its layout are known.

use super::report::Confidence;
use crate::ruby::plan::AttachPlan;

/// The word, and what it rests on.
pub(super) fn of(plan: &AttachPlan) -> (Confidence, String) {
    let table = &plan.layout.table;
    let (from, to) = (table.from, table.to);
    let range = format!("{}.{}.{} to {}.{}.{}", from.0, from.1, from.2, to.0, to.1, to.2);
    (Confidence::Table, format!("layout as {range} is usually built; the code agrees where it was compared"))
}
