//! Compares two recordings: what has changed, by how much, and whether that is more than noise.
//!
//! [`Side`] gathers what is needed from one recording, [`Comparison`] has the tables, [`Condition`] is a bound that a change must not
//! exceed. Pure: no I/O, no clock. docs/diff.md describes the method; in short:
//!
//! - Consecutive samples are correlated, so they are not independent units. A recording is split into 8 to 30 blocks of equal
//!   length, and the variance of a figure is estimated from its variation between blocks ([`statistics::ratio`]).
//! - A change is tested against the smallest change that matters (Welch's t); all figures of a table are tested together (Benjamini and Hochberg).

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
