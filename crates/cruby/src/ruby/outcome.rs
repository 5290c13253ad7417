//! The outcome of a check.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Outcome of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// It holds.
    Passed,
    /// It does not hold; the reason.
    Failed(String),
    /// It does not apply to this image; the reason.
    NotApplicable(String),
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed => f.write_str("passed"),
            Self::Failed(reason) => write!(f, "failed: {reason}"),
            Self::NotApplicable(reason) => write!(f, "not applicable: {reason}"),
        }
    }
}
