//! speedscope's JSON (<https://www.speedscope.app/file-format-schema.json>): one profile of samples for each thread,
//! with weights in nanoseconds, from the start of the recording to its end. When nothing is known about a thread, or it
//! did nothing, there is a sample without frames, which is shown as a gap. A sample on a CPU represents the time before
//! its tick. Weights are never cut: if two samples would overlap (by less than a tick), the later one is shifted.
//!
//! If there are several threads, an additional profile has the samples of all of them below a frame for each; its time is the sum of theirs.
//!
//! Allocation is two further profiles, of bytes and of objects, with a frame for each thread if there are several: the axis is the
//! amount allocated so far instead of time, so that stacks are in chronological order and widths add up to the totals of the pprof file.

use std::{
    collections::HashMap,
    io::{self, Write},
};

use serde::{Serialize, Serializer, ser::SerializeSeq as _};

use super::{Context, by_thread, label, waits};
use crate::{
    aggregate::{
        call_tree::{FrameId, NodeId},
        recording::{
            AllocMoment, Moment, ProcessFacts, ProcessIndex, Recording, Thread, ThreadIndex, Timeline,
        },
    },
    model::stack::{FrameKind, ThreadState},
};

mod alloc;

/// Maximum number of frames written in all samples together: each stack is written out in full, and this is about 150
/// MB, which a browser still opens.
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
}

/// Stacks of frame numbers, root first; `None` is a gap.
struct Stacks<'a> {
    recording: &'a Recording,
    numbers: &'a Numbers,
    samples: Vec<Option<ThreadSample>>,
    /// Whether the root is a frame for the thread.
    by_thread: bool,
}

/// Where a thread was.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ThreadSample {
    thread: ThreadIndex,
    node: NodeId,
    state: ThreadState,
}

impl From<&Moment> for ThreadSample {
    fn from(moment: &Moment) -> Self {
        Self { thread: moment.key.thread, node: moment.key.node, state: moment.key.state }
    }
}

/// Indices of speedscope's frames.
struct Numbers {
    of: Vec<usize>,
    /// Frames that name what a thread off its CPU waits for.
    waits: HashMap<&'static str, usize>,
    /// Frames that represent threads.
    threads: HashMap<(ProcessIndex, u32), usize>,
}

impl Serialize for Stacks<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut stack = Vec::new();
        let mut seq = serializer.serialize_seq(Some(self.samples.len()))?;
        for sample in &self.samples {
            stack.clear();
            let Some(sample) = sample else {
                seq.serialize_element(stack.as_slice())?;
                continue;
            };
            let row = waits::row(&self.recording.tree, sample.node, sample.state);
            stack.extend(row.and_then(|row| self.numbers.waits.get(row)));
            let path = self.recording.tree.path(sample.node);
            stack.extend(path.map(|(_, frame): (_, FrameId)| self.numbers.of[frame.index()]));
            if self.by_thread {
                let (thread, _) = self.recording.thread_facts(sample.thread);
                stack.extend(self.numbers.threads.get(&(thread.process, thread.tid)));
            }
            stack.reverse();
            seq.serialize_element(stack.as_slice())?;
        }
        seq.end()
    }
}

/// Writes the file; returns the number of samples left out.
pub(super) fn write(recording: &Recording, context: &Context<'_>, out: &mut dyn Write) -> io::Result<u64> {
    let nothing = Timeline::default();
    let timeline = recording.timeline.as_ref().unwrap_or(&nothing);
    let (kept, mut frames_left) = within_frames(&timeline.samples, MAX_FRAMES, |sample| {
        // Once for its thread and once for all threads together.
        2 * (2 + recording.tree.path(sample.key.node).count())
    });
    let allocs = alloc::within_frames(recording, timeline, &mut frames_left);
    let left_out = timeline.samples_left_out + (timeline.samples.len() - kept.len()) as u64;
    let allocs_left_out = timeline.allocs_left_out + (timeline.allocs.len() - allocs.len()) as u64;
    let threads = threads(recording, kept);
    let (frames, numbers) = frames(recording, &threads, allocs);
    let mut profiles: Vec<Profile<'_>> = Vec::new();
    if threads.len() > 1 {
        profiles.push(together(recording, &numbers, kept));
    }
    // A truncated profile ends with its last sample.
    let until_ns = if left_out == 0 { context.ended_ns } else { context.began_ns };
    let span = (context.began_ns, until_ns);
    profiles.extend(threads.into_iter().map(|thread| profile(recording, span, &numbers, thread)));
    profiles.extend(alloc::profiles(recording, &numbers, allocs));
    let note = [(left_out, "samples"), (allocs_left_out, "stacks of allocation")].map(|(n, what)| match n {
        0 => String::new(),
        n => format!(" ({n} later {what} are left out)"),
    });
    let note = note.concat();
    let file = File {
        schema: "https://www.speedscope.app/file-format-schema.json",
        name: format!("gctrace{note}"),
        exporter: format!("{}{note}", context.account()),
        active: 0,
        shared: Shared { frames: &frames },
        profiles,
    };
    serde_json::to_writer(out, &file)?;
    Ok(left_out + allocs_left_out)
}

/// The first items whose frames do not exceed the limit in total, and the number of frames left.
fn within_frames<T>(all: &[T], most: usize, frames: impl Fn(&T) -> usize) -> (&[T], usize) {
    let mut left = most;
    let fits = all.iter().position(|one| match left.checked_sub(frames(one)) {
        Some(less) => {
            left = less;
            false
        }
        None => true,
    });
    (&all[..fits.unwrap_or(all.len())], left)
}

/// A thread and its samples in chronological order.
struct ThreadSamples {
    key: (ProcessIndex, u32),
    name: String,
    samples: Vec<Moment>,
}

/// The threads: those of the process with the most CPU time first; within a process its main thread, then the others by name.
fn threads(recording: &Recording, kept: &[Moment]) -> Vec<ThreadSamples> {
    let mut cpu_ns: HashMap<ProcessIndex, u64> = HashMap::new();
    for sample in kept {
        *cpu_ns.entry(recording.thread_facts(sample.key.thread).0.process).or_default() += sample.cpu_ns;
    }
    let mut threads: Vec<ThreadSamples> = by_thread(recording, kept)
        .into_iter()
        .map(|(key, samples)| {
            // A thread is shown with its last name: names are set after it starts.
            let last = samples.last().map(|sample| recording.thread_facts(sample.key.thread));
            let name = last.map_or_else(String::new, |(thread, process)| thread_name(thread, process));
            ThreadSamples { key, name, samples }
        })
        .collect();
    threads.sort_by_cached_key(|ThreadSamples { key: (process, tid), name, .. }| {
        let is_main = recording.processes[*process].pid == *tid;
        (std::cmp::Reverse(cpu_ns[process]), *process, !is_main, name.clone(), *tid)
    });
    threads
}

fn thread_name(thread: &Thread, process: &ProcessFacts) -> String {
    format!("{} {} [{}]", label::process(process), label::text(&thread.name), thread.tid)
}

/// The profile of one thread. Consecutive samples with the same stack are merged.
fn profile<'a>(
    recording: &'a Recording,
    (began_ns, until_ns): (u64, u64),
    numbers: &'a Numbers,
    ThreadSamples { name, samples: all, .. }: ThreadSamples,
) -> Profile<'a> {
    let mut samples: Vec<Option<ThreadSample>> = Vec::new();
    let mut weights: Vec<u64> = Vec::new();
    // Nanoseconds since the start of the recording.
    let mut now = 0;
    let mut push = |sample: Option<&Moment>, weight: u64| {
        let sample = sample.map(ThreadSample::from);
        let what = |sample: &Option<ThreadSample>| sample.map(|sample| (sample.node, sample.state));
        match (samples.last(), weights.last_mut()) {
            (Some(last), Some(last_weight)) if what(last) == what(&sample) => *last_weight += weight,
            _ => {
                samples.push(sample);
                weights.push(weight);
            }
        }
    };
    for sample in &all {
        let weight = sample.time_ns();
        let before = if sample.key.state == ThreadState::Running { weight } else { 0 };
        let begin = sample.ts_ns.saturating_sub(before).saturating_sub(began_ns);
        if begin > now {
            push(None, begin - now);
            now = begin;
        }
        push(Some(sample), weight);
        now += weight;
    }
    let whole = until_ns.saturating_sub(began_ns);
    if whole > now {
        push(None, whole - now);
    }
    let samples = Stacks { recording, numbers, samples, by_thread: false };
    let end = weights.iter().sum();
    Profile { r#type: "sampled", name, unit: "nanoseconds", start: 0, end, samples, weights }
}

/// The profile of all threads.
fn together<'a>(recording: &'a Recording, numbers: &'a Numbers, kept: &[Moment]) -> Profile<'a> {
    let mut all = kept.to_vec();
    all.sort_by_key(|sample| sample.ts_ns);
    let weights: Vec<u64> = all.iter().map(Moment::time_ns).collect();
    let samples = all.iter().map(|sample| Some(sample.into())).collect();
    let samples = Stacks { recording, numbers, samples, by_thread: true };
    let (end, name) = (weights.iter().sum(), "all threads (sum of their time)".to_owned());
    Profile { r#type: "sampled", name, unit: "nanoseconds", start: 0, end, samples, weights }
}

/// The table of frames: one per method, whatever its lines.
fn frames(
    recording: &Recording,
    threads: &[ThreadSamples],
    allocs: &[AllocMoment],
) -> (Vec<SharedFrame>, Numbers) {
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
    let mut waits = HashMap::new();
    for sample in threads.iter().flat_map(|thread| &thread.samples) {
        if let Some(row) = waits::row(&recording.tree, sample.key.node, sample.key.state) {
            waits
                .entry(row)
                .or_insert_with(|| number(SharedFrame { name: row.to_owned(), file: None, line: None }));
        }
    }
    let mut names = alloc::thread_names(recording, allocs);
    names.extend(threads.iter().map(|thread| (thread.key, thread.name.clone())));
    let threads = names
        .into_iter()
        .map(|(key, name)| (key, number(SharedFrame { name, file: None, line: None })))
        .collect();
    (table, Numbers { of, waits, threads })
}
