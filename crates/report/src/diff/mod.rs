//! Two recordings compared: what has changed, by how much, and whether that is more than noise.
//!
//! [`Side`] gathers what is needed of one recording, [`Comparison`] has the tables, [`Condition`] is a bound that a change must not
//! exceed. Pure: no I/O, no clock. docs/diff.md describes the method; in short:
//!
//! - Samples that follow each other are alike, so they are no independent units. A recording is split into 8 to 30 blocks of equal
//!   length, and a figure varies as it does from block to block ([`statistics::ratio`]).
//! - A change is tested against the least one that matters (Welch's t), figures of a table together (Benjamini and Hochberg).

mod blocks;
mod by_method;
mod compare;
mod condition;
mod figures;
mod gather;
mod lost;
mod methods;
mod prepared;
mod statistics;
#[cfg(test)]
mod tests;

pub use by_method::{Kind, Row};
pub use compare::{Comparison, LEVEL, Table};
pub use condition::{Condition, ConditionError, Judged, METRICS, Outcome};
pub use figures::{Figure, Unit, Verdict};
pub use gather::{Chosen, Looked, Program, Side, program};
pub use methods::Method;
