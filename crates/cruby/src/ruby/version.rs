//! CRuby's version, as the image states it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::elf::ElfImage;

/// Version of the interpreter, such as 3.1.2 (`ruby_version` in version.c).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RubyVersion {
    /// First number.
    pub major: u16,
    /// Second number; the series, together with `major`.
    pub minor: u16,
    /// Third number.
    pub teeny: u16,
}

/// The text is not three numbers separated by dots.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a Ruby version: {0:?}")]
pub struct InvalidVersion(String);

impl RubyVersion {
    /// The version with these numbers.
    pub const fn new(major: u16, minor: u16, teeny: u16) -> Self {
        Self { major, minor, teeny }
    }

    /// Reads the exported string `ruby_version`.
    pub fn of_image(image: &ElfImage) -> Option<Self> {
        image.c_string(image.symbol("ruby_version")?.address)?.parse().ok()
    }
}

/// Reads the exported string `ruby_description`, such as "ruby 3.1.2p20 (2022-04-12 revision 4491bb740a) [x86_64-linux]".
pub(super) fn description(image: &ElfImage) -> Option<&str> {
    image.c_string(image.symbol("ruby_description")?.address)
}

impl FromStr for RubyVersion {
    type Err = InvalidVersion;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidVersion(text.chars().take(32).collect());
        let mut numbers = text.split('.').map(|part| part.parse::<u16>().map_err(|_| invalid()));
        let mut next = || numbers.next().ok_or_else(invalid)?;
        let version = Self { major: next()?, minor: next()?, teeny: next()? };
        match numbers.next() {
            None => Ok(version),
            Some(_) => Err(invalid()),
        }
    }
}

impl fmt::Display for RubyVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.teeny)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Display and parse are inverses, and versions are ordered by number, not by text.
    #[test]
    fn round_trip_and_order() {
        let version: RubyVersion = "3.3.10".parse().unwrap();
        assert_eq!(version, RubyVersion::new(3, 3, 10));
        assert_eq!(version.to_string(), "3.3.10");
        assert!(version > RubyVersion::new(3, 3, 9));
    }

    /// Anything but three plain numbers is refused.
    #[test]
    fn refuses_other_text() {
        for text in ["", "3", "3.1", "3.1.2.4", "3.1.x", "3..1", "-3.1.2", "99999999.0.0"] {
            assert!(text.parse::<RubyVersion>().is_err(), "{text}");
        }
    }
}
