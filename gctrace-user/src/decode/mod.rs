//! Bytes of a ring record → event. Total: any bytes give an event or a counted reason. Allocates nothing.

#[expect(unsafe_code, reason = "reads plain records out of ring memory")]
mod pod;

use gctrace_common::event::{Kind, LifeEvent, PauseEvent, Phase, PhaseEvent, Point, SnapshotEvent};

/// A decoded record, borrowed from the ring.
#[derive(Debug)]
pub enum Event<'a> {
    /// The objspace at a GC event.
    Snapshot(Point, &'a SnapshotEvent),
    /// One pause.
    Pause(PauseEvent),
    /// One interval between two probes of the last resort.
    Phase(Phase, PhaseEvent),
    /// A followed process forked (the child is `other`), replaced its program, or is gone.
    Life(Kind, LifeEvent),
}

impl Event<'_> {
    /// Time of the record, `CLOCK_MONOTONIC` nanoseconds.
    pub fn ts_ns(&self) -> u64 {
        match self {
            Self::Snapshot(_, event) => event.header.ts_ns,
            Self::Pause(event) => event.header.ts_ns,
            Self::Phase(_, event) => event.header.ts_ns,
            Self::Life(_, event) => event.header.ts_ns,
        }
    }
}

/// Why a record could not be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Fewer bytes than the record's kind needs.
    #[error("a record of {0} bytes is too short")]
    Short(usize),
    /// A kind this binary does not know.
    #[error("record kind {0} is unknown")]
    Kind(u32),
    /// A point this binary does not know.
    #[error("probe point {0} is unknown")]
    Point(u32),
}

/// Decodes one record.
pub fn decode(bytes: &[u8]) -> Result<Event<'_>, DecodeError> {
    let short = DecodeError::Short(bytes.len());
    let raw_kind = bytes.first_chunk::<4>().map(|b| u32::from_ne_bytes(*b)).ok_or(short)?;
    let kind = Kind::from_raw(raw_kind).ok_or(DecodeError::Kind(raw_kind))?;
    match kind {
        Kind::Snapshot => {
            let event: &SnapshotEvent = pod::view(bytes).ok_or(short)?;
            let point = Point::from_raw(event.header.point).ok_or(DecodeError::Point(event.header.point))?;
            Ok(Event::Snapshot(point, event))
        }
        Kind::Pause => Ok(Event::Pause(*pod::view::<PauseEvent>(bytes).ok_or(short)?)),
        Kind::Phase => {
            let event: &PhaseEvent = pod::view(bytes).ok_or(short)?;
            let phase = Phase::from_raw(event.header.point).ok_or(DecodeError::Point(event.header.point))?;
            Ok(Event::Phase(phase, *event))
        }
        Kind::Fork | Kind::Exec | Kind::Exit => {
            Ok(Event::Life(kind, *pod::view::<LifeEvent>(bytes).ok_or(short)?))
        }
    }
}

/// A NUL-padded `comm` as text.
pub fn comm(bytes: &[u8; 16]) -> String {
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[repr(align(8))]
    struct Aligned([u8; 4096]);

    proptest! {
        /// Any bytes of any length decode or give a reason; nothing panics.
        #[test]
        fn total(bytes in proptest::collection::vec(any::<u8>(), 0..4096), kind in 0_u32..8) {
            let mut buffer = Aligned([0; 4096]);
            buffer.0[..bytes.len()].copy_from_slice(&bytes);
            if bytes.len() >= 4 {
                buffer.0[..4].copy_from_slice(&kind.to_ne_bytes());
            }
            let known = Kind::from_raw(kind).is_some();
            let result = decode(&buffer.0[..bytes.len()]);
            prop_assert!(known || result.is_err());
        }
    }

    /// A misaligned record is refused, not read.
    #[test]
    fn misaligned() {
        let mut buffer = Aligned([0; 4096]);
        buffer.0[1..5].copy_from_slice(&2_u32.to_ne_bytes());
        assert!(decode(&buffer.0[1..300]).is_err());
    }
}
