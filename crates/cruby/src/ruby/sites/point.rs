//! [`Point`] on disk: its number in the kernel ABI.

use gctrace_common::event::Point;
use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde calls")]
pub(super) fn serialize<S: Serializer>(point: &Point, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u32(*point as u32)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Point, D::Error> {
    let raw = u32::deserialize(deserializer)?;
    Point::from_raw(raw).ok_or_else(|| D::Error::custom("no such event"))
}
