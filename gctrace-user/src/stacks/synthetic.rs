//! Synthetic frames: what the collector was doing, and what could not be determined.

use std::sync::Arc;

use gctrace_common::stack::{GcActivity, StackEvent};

use crate::model::stack::{Frame, FrameKind, Stack, gc_name};

/// Frames that gctrace inserts.
pub(super) struct SyntheticFrames {
    collection: Arc<Frame>,
    marking: Arc<Frame>,
    sweeping: Arc<Frame>,
    compacting: Arc<Frame>,
    minor: Arc<Frame>,
    major: Arc<Frame>,
    pub(super) not_taken: Stack,
    pub(super) no_frames: Arc<Frame>,
    pub(super) unreadable: Arc<Frame>,
    missing: [(u32, Arc<Frame>); 5],
}

impl SyntheticFrames {
    pub(super) fn new() -> Self {
        let vm = |name: &str| synthetic_frame(FrameKind::Vm, name);
        let activity = |activity| vm(&format!("({})", gc_name(activity)));
        let missing = |flag, name| (flag, synthetic_frame(FrameKind::Missing, name));
        Self {
            collection: vm("(garbage collection)"),
            marking: activity(GcActivity::Marking),
            sweeping: activity(GcActivity::Sweeping),
            compacting: activity(GcActivity::Compacting),
            minor: vm("(minor GC)"),
            major: vm("(major GC)"),
            no_frames: synthetic_frame(FrameKind::Missing, "(no Ruby frames)"),
            unreadable: synthetic_frame(FrameKind::Missing, "(unreadable)"),
            not_taken: [synthetic_frame(FrameKind::Missing, "(no stack: sampling limit)")].into(),
            missing: [
                missing(StackEvent::TRUNCATED, "(truncated)"),
                missing(StackEvent::READ_FAILED, "(unreadable)"),
                missing(StackEvent::NO_CONTEXT, "(no Ruby context)"),
                missing(StackEvent::BAD_CONTEXT, "(Ruby context in transition)"),
                missing(StackEvent::NO_LAYOUT, "(Ruby stack not readable)"),
            ],
        }
    }

    /// Frames that show that the collector ran, leaf first; those of a measured pause have the same names. `flags`: of the record.
    pub(super) fn gc(&self, activity: GcActivity, flags: u32) -> Vec<Arc<Frame>> {
        let phase = match activity {
            GcActivity::None => return Vec::new(),
            GcActivity::Other => None,
            GcActivity::Marking => Some(&self.marking),
            GcActivity::Sweeping => Some(&self.sweeping),
            GcActivity::Compacting => Some(&self.compacting),
        };
        let kind = match flags & (StackEvent::MINOR | StackEvent::MAJOR) {
            StackEvent::MINOR => Some(&self.minor),
            StackEvent::MAJOR => Some(&self.major),
            _ => None,
        };
        phase.into_iter().chain(kind).chain([&self.collection]).cloned().collect()
    }

    /// The frame that represents the missing root end, if any.
    pub(super) fn missing(&self, flags: u32) -> Option<Arc<Frame>> {
        self.missing.iter().find(|(flag, _)| flags & flag != 0).map(|(_, frame)| frame.clone())
    }
}

pub(super) fn synthetic_frame(kind: FrameKind, name: &str) -> Arc<Frame> {
    Arc::new(Frame { kind, name: name.into(), file: None, line: 0, first_line: 0, address: 0 })
}
