//! speedscope's JSON (<https://www.speedscope.app/file-format-schema.json>): one profile of samples for each thread, weights
//! in nanoseconds.

use std::{
    collections::HashMap,
    io::{self, Write},
};

use serde::{Serialize, Serializer, ser::SerializeSeq as _};

use super::{Context, by_thread, label};
use crate::{
    aggregate::{
        call_tree::FrameId,
        recording::{Moment, Recording, Timeline},
    },
    model::stack::{FrameKind, ThreadState},
};

/// Frames of all samples together that are written at most: each stack is written out in full, and this is about 150 MB,
/// which a browser still opens.
const MAX_FRAMES: usize = 25_000_000;

#[derive(Serialize)]
struct File<'a> {
    #[serde(rename = "$schema")]
    schema: &'static str,
    name: String,
    exporter: String,
    #[serde(rename = "activeProfileIndex")]
    active: usize,
    shared: Shared<'a>,
    profiles: Vec<Profile<'a>>,
}

#[derive(Serialize)]
struct Shared<'a> {
    frames: &'a [SharedFrame],
}

#[derive(Clone, Debug, Serialize, PartialEq, Eq, Hash)]
struct SharedFrame {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<u32>,
}

#[derive(Serialize)]
struct Profile<'a> {
    r#type: &'static str,
    name: String,
    unit: &'static str,
    #[serde(rename = "startValue")]
    start: u64,
    #[serde(rename = "endValue")]
    end: u64,
    samples: Stacks<'a>,
    weights: Vec<u64>,
    #[serde(skip)]
    cpu_ns: u64,
}

/// Stacks of frame numbers, root first.
struct Stacks<'a> {
    recording: &'a Recording,
    numbers: &'a Numbers,
    samples: Vec<Moment>,
}

/// The frames of speedscope by ours.
struct Numbers {
    of: Vec<usize>,
    waiting: usize,
    blocked: usize,
}

impl Serialize for Stacks<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut stack = Vec::new();
        let mut seq = serializer.serialize_seq(Some(self.samples.len()))?;
        for sample in &self.samples {
            stack.clear();
            match sample.key.state {
                ThreadState::Running => {}
                ThreadState::Runnable => stack.push(self.numbers.waiting),
                ThreadState::Blocked => stack.push(self.numbers.blocked),
            }
            let path = self.recording.tree.path(sample.key.node);
            stack.extend(path.map(|(_, frame): (_, FrameId)| self.numbers.of[frame.index()]));
            stack.reverse();
            seq.serialize_element(stack.as_slice())?;
        }
        seq.end()
    }
}

/// Writes it; returns how many samples were left out.
pub(super) fn write(recording: &Recording, context: &Context<'_>, out: &mut dyn Write) -> io::Result<u64> {
    let nothing = Timeline::default();
    let timeline = recording.timeline.as_ref().unwrap_or(&nothing);
    let (kept, beyond) = within_frames(recording, timeline);
    let left_out = timeline.samples_left_out + beyond;
    let (frames, numbers) = frames(recording);

    let threads = by_thread(recording, kept).into_values();
    let mut profiles: Vec<Profile<'_>> =
        threads.map(|samples| profile(recording, &numbers, samples)).collect();
    // The busiest thread is what is seen first.
    profiles.sort_by_key(|profile| std::cmp::Reverse((profile.cpu_ns, profile.end)));
    let note = match left_out {
        0 => String::new(),
        n => format!(" ({n} later samples are left out)"),
    };
    let file = File {
        schema: "https://www.speedscope.app/file-format-schema.json",
        name: format!("gctrace{note}"),
        exporter: format!("{}{note}", context.account()),
        active: 0,
        shared: Shared { frames: &frames },
        profiles,
    };
    serde_json::to_writer(out, &file)?;
    Ok(left_out)
}

/// The samples whose frames together are not too many, and how many are beyond.
fn within_frames<'a>(recording: &Recording, timeline: &'a Timeline) -> (&'a [Moment], u64) {
    let mut frames = 0;
    let fits = timeline
        .samples
        .iter()
        .position(|sample| {
            frames += 1 + recording.tree.path(sample.key.node).count();
            frames > MAX_FRAMES
        })
        .unwrap_or(timeline.samples.len());
    let (kept, beyond) = timeline.samples.split_at(fits);
    (kept, beyond.len() as u64)
}

/// The profile of one thread. Samples of one stack that follow each other are one.
fn profile<'a>(recording: &'a Recording, numbers: &'a Numbers, all: Vec<Moment>) -> Profile<'a> {
    // A thread is called what it was called last: names are given after it starts.
    let last = all.last().map(|sample| recording.thread_facts(sample.key.thread));
    let name = last.map_or_else(String::new, |(thread, process)| {
        format!("{} {} [{}]", label::process(process), label::text(&thread.name), thread.tid)
    });
    let cpu_ns = all.iter().map(|sample| sample.cpu_ns).sum();
    let mut samples: Vec<Moment> = Vec::new();
    let mut weights: Vec<u64> = Vec::new();
    for sample in all {
        let same = |last: &Moment| (last.key.node, last.key.state) == (sample.key.node, sample.key.state);
        match (samples.last(), weights.last_mut()) {
            (Some(last), Some(weight)) if same(last) => *weight += sample.time_ns(),
            _ => {
                samples.push(sample);
                weights.push(sample.time_ns());
            }
        }
    }
    let samples = Stacks { recording, numbers, samples };
    Profile {
        r#type: "sampled",
        name,
        unit: "nanoseconds",
        start: 0,
        end: weights.iter().sum(),
        samples,
        weights,
        cpu_ns,
    }
}

/// The table of frames: one for each method, whatever its lines.
fn frames(recording: &Recording) -> (Vec<SharedFrame>, Numbers) {
    let mut table: Vec<SharedFrame> = Vec::new();
    let mut known: HashMap<SharedFrame, usize> = HashMap::new();
    let mut number = |frame: SharedFrame| {
        *known.entry(frame).or_insert_with_key(|frame| {
            table.push(frame.clone());
            table.len() - 1
        })
    };
    let of = recording
        .tree
        .frames()
        .map(|frame| {
            let name = label::text(&frame.name);
            let name = if frame.kind == FrameKind::Kernel { format!("{name}_[k]") } else { name };
            let line = Some(frame.first_line).filter(|&line| line > 0);
            number(SharedFrame { name, file: frame.file.as_deref().map(label::text), line })
        })
        .collect();
    let mut state = |state| {
        let name = label::state(state).unwrap_or_default().to_owned();
        number(SharedFrame { name, file: None, line: None })
    };
    let (waiting, blocked) = (state(ThreadState::Runnable), state(ThreadState::Blocked));
    (table, Numbers { of, waiting, blocked })
}
