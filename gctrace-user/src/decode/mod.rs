//! Decodes ring records to events. Total: any bytes yield an event or a counted error. Does not allocate.

use gctrace_common::{
    event::{Header, Kind, LifeEvent, PauseEvent, PhaseEvent, Point, RefillEvent, SnapshotEvent, WorkPhase},
    gvl::{GvlSpanEvent, GvlState, GvlThread, GvlWaitEvent},
    job::JobEvent,
    request::{RequestEnd, RequestEvent, UnitEvent, UnitPoint},
    stack::{
        Cause, GcActivity, MAX_KERNEL_FRAMES, MAX_NATIVE_FRAMES, MAX_RUBY_FRAMES, NativeEnd, NativeEvent,
        OffCpuEvent, RubyFrame, StackEvent,
    },
};
use zerocopy::{FromBytes, Immutable, KnownLayout};

/// A decoded record, borrowed from the ring.
#[derive(Debug)]
pub enum Event<'a> {
    /// The objspace at a GC event.
    Snapshot(Point, &'a SnapshotEvent),
    /// One pause.
    Pause(PauseEvent),
    /// One interval between two fallback probes.
    Phase(WorkPhase, PhaseEvent),
    /// The stack of a thread.
    Stack(StackRecord<'a>),
    /// The native frames of the stack that follows, leaf first.
    Native(NativeEnd, NativeEvent, &'a [u64]),
    /// A thread runs again.
    OffCpu(OffCpuEvent),
    /// A thread waited long for the GVL.
    GvlWait(GvlWaitEvent),
    /// A thread ended: its account of the GVL.
    GvlThread(&'a GvlThread),
    /// A thread held the GVL, or was without it, for a long time.
    GvlSpan(GvlState, GvlSpanEvent),
    /// A server has served a request.
    Request(RequestEnd, &'a RequestEvent),
    /// A thread has run a job.
    Job(RequestEnd, &'a JobEvent),
    /// The objspace when a thread starts or finishes a request or a job.
    Unit(UnitPoint, &'a UnitEvent),
    /// A thread took the free slots of a heap page.
    Refill(RefillEvent),
    /// A traced process forked (the child is `other`), replaced its program, or is gone.
    Life(Kind, LifeEvent),
}

/// A stack as the kernel took it.
#[derive(Clone, Copy, Debug)]
pub struct StackRecord<'a> {
    /// Why it was taken.
    pub cause: Cause,
    /// What the collector was doing on the thread.
    pub gc: GcActivity,
    /// The record's head.
    pub event: &'a StackEvent,
    /// Kernel frames, leaf first.
    pub kernel: &'a [u64],
    /// Ruby frames, leaf first.
    pub ruby: &'a [RubyFrame],
}

impl Event<'_> {
    /// Time of the record, `CLOCK_MONOTONIC` nanoseconds.
    pub fn ts_ns(&self) -> u64 {
        match self {
            Self::Snapshot(_, event) => event.header.ts_ns,
            Self::Pause(event) => event.header.ts_ns,
            Self::Phase(_, event) => event.header.ts_ns,
            Self::Stack(record) => record.event.header.ts_ns,
            Self::Native(_, event, _) => event.header.ts_ns,
            Self::OffCpu(event) => event.header.ts_ns,
            Self::GvlWait(event) => event.header.ts_ns,
            Self::GvlThread(event) => event.header.ts_ns,
            Self::GvlSpan(_, event) => event.header.ts_ns,
            Self::Refill(event) => event.header.ts_ns,
            Self::Life(_, event) => event.header.ts_ns,
            Self::Request(_, event) => event.header.ts_ns,
            Self::Job(_, event) => event.header.ts_ns,
            Self::Unit(_, event) => event.header.ts_ns,
        }
    }

    /// Converts an event that arrives through the ring of stacks to one that does not borrow from the ring; `None` for other events.
    pub fn owned(self) -> Option<(Kind, OwnedEvent)> {
        Some(match self {
            Self::OffCpu(event) => (Kind::OffCpu, OwnedEvent::OffCpu(event)),
            Self::GvlWait(event) => (Kind::GvlWait, OwnedEvent::Gvl(GvlRecord::Wait(Box::new(event)))),
            Self::GvlThread(event) => (Kind::GvlThread, OwnedEvent::Gvl(GvlRecord::Thread(Box::new(*event)))),
            Self::GvlSpan(state, event) => {
                (Kind::GvlSpan, OwnedEvent::Gvl(GvlRecord::Span(state, Box::new(event))))
            }
            Self::Refill(event) => (Kind::Refill, OwnedEvent::Refill(event)),
            _ => return None,
        })
    }
}

/// An event that does not borrow from the ring.
#[derive(Debug)]
pub enum OwnedEvent {
    /// A thread is back on a CPU.
    OffCpu(OffCpuEvent),
    /// An event of the GVL.
    Gvl(GvlRecord),
    /// A thread took the free slots of a heap page.
    Refill(RefillEvent),
}

impl OwnedEvent {
    /// The head of its record.
    pub fn header(&self) -> &Header {
        match self {
            Self::OffCpu(event) => &event.header,
            Self::Gvl(GvlRecord::Wait(event)) => &event.header,
            Self::Gvl(GvlRecord::Thread(thread)) => &thread.header,
            Self::Gvl(GvlRecord::Span(_, event)) => &event.header,
            Self::Refill(event) => &event.header,
        }
    }
}

/// An event of a thread and the GVL.
#[derive(Debug)]
pub enum GvlRecord {
    /// A thread waited long for it; its stack may follow.
    Wait(Box<GvlWaitEvent>),
    /// A thread ended: its account of the GVL.
    Thread(Box<GvlThread>),
    /// A thread held it, or was without it, for a long time.
    Span(GvlState, Box<GvlSpanEvent>),
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
    /// A number of frames that no record has.
    #[error("a stack of {0} frames is too long")]
    Frames(u32),
}

/// Decodes one record.
pub fn decode(bytes: &[u8]) -> Result<Event<'_>, DecodeError> {
    let short = DecodeError::Short(bytes.len());
    let raw_kind = bytes.first_chunk::<4>().map(|b| u32::from_ne_bytes(*b)).ok_or(short)?;
    let kind = Kind::from_raw(raw_kind).ok_or(DecodeError::Kind(raw_kind))?;
    match kind {
        Kind::Snapshot => {
            let event: &SnapshotEvent = view(bytes).ok_or(short)?;
            let point = Point::from_raw(event.header.point).ok_or(DecodeError::Point(event.header.point))?;
            Ok(Event::Snapshot(point, event))
        }
        Kind::Pause => Ok(Event::Pause(*view::<PauseEvent>(bytes).ok_or(short)?)),
        Kind::Phase => {
            let event: &PhaseEvent = view(bytes).ok_or(short)?;
            let phase =
                WorkPhase::from_raw(event.header.point).ok_or(DecodeError::Point(event.header.point))?;
            Ok(Event::Phase(phase, *event))
        }
        Kind::Stack => Ok(Event::Stack(stack(bytes).ok_or(short)??)),
        Kind::Native => {
            let event: &NativeEvent = view(bytes).ok_or(short)?;
            let end =
                NativeEnd::from_raw(event.header.point).ok_or(DecodeError::Point(event.header.point))?;
            let count = bounded(event.count, MAX_NATIVE_FRAMES)?;
            let frames = list(bytes, size_of::<NativeEvent>(), count).ok_or(short)?;
            Ok(Event::Native(end, *event, frames))
        }
        Kind::OffCpu => {
            let event: &OffCpuEvent = view(bytes).ok_or(short)?;
            if event.header.point & !OffCpuEvent::STACK_FOLLOWS > OffCpuEvent::PREEMPTED {
                return Err(DecodeError::Point(event.header.point));
            }
            Ok(Event::OffCpu(*event))
        }
        Kind::GvlWait => Ok(Event::GvlWait(*view::<GvlWaitEvent>(bytes).ok_or(short)?)),
        Kind::GvlThread => {
            let event: &GvlThread = view(bytes).ok_or(short)?;
            GvlState::from_raw(event.state).ok_or(DecodeError::Point(event.state))?;
            Ok(Event::GvlThread(event))
        }
        Kind::GvlSpan => {
            let event: &GvlSpanEvent = view(bytes).ok_or(short)?;
            let state = GvlState::from_raw(event.state).ok_or(DecodeError::Point(event.state))?;
            Ok(Event::GvlSpan(state, *event))
        }
        Kind::Request => {
            let event: &RequestEvent = view(bytes).ok_or(short)?;
            let point = event.header.point;
            let end = RequestEnd::from_raw(point).ok_or(DecodeError::Point(point))?;
            Ok(Event::Request(end, event))
        }
        Kind::Job => {
            let event: &JobEvent = view(bytes).ok_or(short)?;
            let point = event.header.point;
            let end = RequestEnd::from_raw(point).ok_or(DecodeError::Point(point))?;
            Ok(Event::Job(end, event))
        }
        Kind::Unit => {
            let event: &UnitEvent = view(bytes).ok_or(short)?;
            let point = event.header.point;
            let point = UnitPoint::from_raw(point).ok_or(DecodeError::Point(point))?;
            Ok(Event::Unit(point, event))
        }
        Kind::Refill => Ok(Event::Refill(*view::<RefillEvent>(bytes).ok_or(short)?)),
        Kind::Fork | Kind::Exec | Kind::Exit => {
            Ok(Event::Life(kind, *view::<LifeEvent>(bytes).ok_or(short)?))
        }
    }
}

fn stack(bytes: &[u8]) -> Option<Result<StackRecord<'_>, DecodeError>> {
    let event: &StackEvent = view(bytes)?;
    let record = || {
        let point = event.header.point;
        let cause = Cause::from_raw(point).ok_or(DecodeError::Point(point))?;
        let gc = GcActivity::from_raw(event.gc).ok_or(DecodeError::Point(event.gc))?;
        let kernel = &event.kernel_frames[..bounded(event.kernel, MAX_KERNEL_FRAMES)?];
        let short = DecodeError::Short(bytes.len());
        let ruby =
            list(bytes, size_of::<StackEvent>(), bounded(event.ruby, MAX_RUBY_FRAMES)?).ok_or(short)?;
        Ok(StackRecord { cause, gc, event, kernel, ruby })
    };
    Some(record())
}

/// The record at the start of `bytes`; `None` if they are too few or misaligned (the kernel aligns to 8 bytes).
fn view<T: FromBytes + Immutable + KnownLayout>(bytes: &[u8]) -> Option<&T> {
    T::ref_from_prefix(bytes).ok().map(|(record, _)| record)
}

/// The `count` values that follow the first `skip` bytes; `None` if they are too few or misaligned.
fn list<T: FromBytes + Immutable>(bytes: &[u8], skip: usize, count: usize) -> Option<&[T]> {
    <[T]>::ref_from_prefix_with_elems(bytes.get(skip..)?, count).ok().map(|(values, _)| values)
}

fn bounded(count: u32, most: usize) -> Result<usize, DecodeError> {
    let number = count as usize;
    if number > most { Err(DecodeError::Frames(count)) } else { Ok(number) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[repr(align(8))]
    struct Aligned([u8; 4096]);

    proptest! {
        /// Any bytes of any length decode or yield an error; nothing panics.
        #[test]
        fn total(bytes in proptest::collection::vec(any::<u8>(), 0..4096), kind in 0_u32..20) {
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

    /// A stack has the frames that its head announces; missing frames, or more than the maximum, are refused.
    #[test]
    fn stacks() {
        const HEAD: usize = size_of::<StackEvent>();
        let mut buffer = Aligned([0; 4096]);
        let mut put = |at: usize, value: u32| buffer.0[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        put(0, Kind::Stack as u32);
        put(std::mem::offset_of!(StackEvent, ruby), 2);
        put(std::mem::offset_of!(StackEvent, kernel), 3);
        put(HEAD + size_of::<RubyFrame>(), 0x77);
        match decode(&buffer.0[..HEAD + 2 * size_of::<RubyFrame>()]) {
            Ok(Event::Stack(record)) => {
                assert_eq!((record.ruby.len(), record.kernel.len()), (2, 3));
                assert_eq!(record.ruby[1].iseq, 0x77);
            }
            other => panic!("{other:?}"),
        }
        assert!(matches!(decode(&buffer.0[..HEAD + size_of::<RubyFrame>()]), Err(DecodeError::Short(_))));
        let mut put = |at: usize, value: u32| buffer.0[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        put(std::mem::offset_of!(StackEvent, ruby), MAX_RUBY_FRAMES as u32 + 1);
        assert!(matches!(decode(&buffer.0), Err(DecodeError::Frames(_))));
    }

    /// A misaligned record is refused instead of read.
    #[test]
    fn misaligned() {
        let mut buffer = Aligned([0; 4096]);
        buffer.0[1..5].copy_from_slice(&2_u32.to_ne_bytes());
        assert!(decode(&buffer.0[1..300]).is_err());
    }
}
