//! Frames as text.

use std::sync::Arc;

use crate::model::stack::Frame;

/// `Class#method file:line`.
pub(super) fn frame_text(frame: &Frame) -> String {
    match &frame.file {
        Some(file) if frame.line != 0 => format!("{} {file}:{}", frame.name, frame.line),
        Some(file) => format!("{} {file}", frame.name),
        None => frame.name.to_string(),
    }
}

pub(super) fn frame_texts(stack: &[Arc<Frame>]) -> Vec<String> {
    stack.iter().map(|frame| frame_text(frame)).collect()
}
