//! Fields of the objspace and sums of them: the form in which tables and machine code are compared.

use std::fmt;

use gctrace_common::config::Span;
use serde::{Deserialize, Serialize};

use super::stat::Sign;

/// A field that a snapshot copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Piece {
    /// Byte offset in the objspace of a pointer to follow first, or [`Span::DIRECT`].
    pub via: u16,
    /// Byte offset in the objspace, or in the structure that the pointer leads to.
    pub offset: u32,
    /// Size in bytes.
    pub size: u8,
}

impl Piece {
    /// A field of the objspace itself.
    pub const fn direct(offset: u32, size: u8) -> Self {
        Self { via: Span::DIRECT, offset, size }
    }
}

impl fmt::Display for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { via, offset, size } = *self;
        match via {
            Span::DIRECT => write!(f, "[{offset:#x}]:{size}"),
            Span::CACHE => write!(f, "[cache+{offset:#x}]:{size}"),
            Span::LOCAL => write!(f, "[thread-local+{offset:#x}]:{size}"),
            via => write!(f, "[[{via:#x}]+{offset:#x}]:{size}"),
        }
    }
}

/// A sum of fields of the objspace, divided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Formula {
    /// The terms with their signs, sorted.
    pub terms: Vec<(Sign, Piece)>,
    /// Divisor of the sum; the quotient is rounded down.
    pub divisor: u64,
    /// Number of terms that lie elsewhere.
    pub outside: usize,
}

impl Formula {
    /// A formula of objspace fields alone.
    pub fn new(mut terms: Vec<(Sign, Piece)>, divisor: u64) -> Self {
        terms.sort_unstable();
        Self { terms, divisor, outside: 0 }
    }

    /// Whether both are equal, except for terms that lie elsewhere.
    pub(super) fn agrees_with(&self, other: &Self) -> bool {
        self.terms == other.terms && self.divisor == other.divisor
    }
}

impl fmt::Display for Formula {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (sign, piece)) in self.terms.iter().enumerate() {
            match (index, sign) {
                (0, Sign::Plus) => {}
                (0, Sign::Minus) => f.write_str("-")?,
                (_, Sign::Minus) => f.write_str(" - ")?,
                (_, Sign::Plus) => f.write_str(" + ")?,
                (_, Sign::Signed) => f.write_str(" ± ")?,
            }
            write!(f, "{piece}")?;
        }
        if self.divisor != 1 {
            write!(f, ", divided by {}", self.divisor)?;
        }
        match self.outside {
            0 => Ok(()),
            outside => write!(f, " (and {outside} elsewhere)"),
        }
    }
}
