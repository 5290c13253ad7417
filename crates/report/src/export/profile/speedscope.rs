//! speedscope's JSON (<https://www.speedscope.app/file-format-schema.json>): one profile of samples for each thread, weights
//! in nanoseconds, from the beginning of the recording to its end. Where nothing is known of a thread, or it did nothing, there is
//! a sample without frames, which is shown as a gap. A sample on a CPU stands for the time before its tick. Weights are never cut:
//! where two samples would overlap (by less than a tick), the later one is shown later.
//!
//! Of several threads there is one more profile, which has the samples of all of them below a frame for each; its time is the
//! sum of theirs.

use std::{
    collections::HashMap,
    io::{self, Write},
};

use serde::{Serialize, Serializer, ser::SerializeSeq as _};

use super::{Context, by_thread, label};
use crate::{
    aggregate::{
        call_tree::FrameId,
        recording::{Moment, ProcessIndex, Recording, Timeline},
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
}

/// Stacks of frame numbers, root first; `None` is a gap.
struct Stacks<'a> {
    recording: &'a Recording,
    numbers: &'a Numbers,
    samples: Vec<Option<Moment>>,
    /// Whether the thread stands at the root.
    by_thread: bool,
}

/// The frames of speedscope by ours.
struct Numbers {
    of: Vec<usize>,
    waiting: usize,
    blocked: usize,
    /// Frames that stand for threads.
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
            match sample.key.state {
                ThreadState::Running => {}
                ThreadState::Runnable => stack.push(self.numbers.waiting),
                ThreadState::Blocked => stack.push(self.numbers.blocked),
            }
            let path = self.recording.tree.path(sample.key.node);
            stack.extend(path.map(|(_, frame): (_, FrameId)| self.numbers.of[frame.index()]));
            if self.by_thread {
                let (thread, _) = self.recording.thread_facts(sample.key.thread);
                stack.extend(self.numbers.threads.get(&(thread.process, thread.tid)));
            }
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
    let threads = threads(recording, kept);
    let (frames, numbers) = frames(recording, &threads);
    let mut profiles: Vec<Profile<'_>> = Vec::new();
    if threads.len() > 1 {
        profiles.push(together(recording, &numbers, kept));
    }
    // What is cut off ends with its last sample.
    let until_ns = if left_out == 0 { context.ended_ns } else { context.began_ns };
    let span = (context.began_ns, until_ns);
    profiles.extend(threads.into_iter().map(|thread| profile(recording, span, &numbers, thread)));
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
            // Once for its thread and once for all of them.
            frames += 2 * (2 + recording.tree.path(sample.key.node).count());
            frames > MAX_FRAMES
        })
        .unwrap_or(timeline.samples.len());
    let (kept, beyond) = timeline.samples.split_at(fits);
    (kept, beyond.len() as u64)
}

/// A thread and its samples in the order of their time.
struct ThreadSamples {
    key: (ProcessIndex, u32),
    name: String,
    samples: Vec<Moment>,
}

/// The threads: those of the process with most CPU time first, of a process its main thread, then the others by name.
fn threads(recording: &Recording, kept: &[Moment]) -> Vec<ThreadSamples> {
    let mut cpu_ns: HashMap<ProcessIndex, u64> = HashMap::new();
    for sample in kept {
        *cpu_ns.entry(recording.thread_facts(sample.key.thread).0.process).or_default() += sample.cpu_ns;
    }
    let mut threads: Vec<ThreadSamples> = by_thread(recording, kept)
        .into_iter()
        .map(|(key, samples)| {
            // A thread is called what it was called last: names are given after it starts.
            let last = samples.last().map(|sample| recording.thread_facts(sample.key.thread));
            let name = last.map_or_else(String::new, |(thread, process)| {
                format!("{} {} [{}]", label::process(process), label::text(&thread.name), thread.tid)
            });
            ThreadSamples { key, name, samples }
        })
        .collect();
    threads.sort_by_cached_key(|ThreadSamples { key: (process, tid), name, .. }| {
        let is_main = recording.processes[*process].pid == *tid;
        (std::cmp::Reverse(cpu_ns[process]), *process, !is_main, name.clone(), *tid)
    });
    threads
}

/// The profile of one thread. Samples of one stack that follow each other are one.
fn profile<'a>(
    recording: &'a Recording,
    (began_ns, until_ns): (u64, u64),
    numbers: &'a Numbers,
    ThreadSamples { name, samples: all, .. }: ThreadSamples,
) -> Profile<'a> {
    let mut samples: Vec<Option<Moment>> = Vec::new();
    let mut weights: Vec<u64> = Vec::new();
    // Nanoseconds since the beginning of the recording.
    let mut now = 0;
    let mut push = |sample: Option<Moment>, weight: u64| {
        let what = |sample: &Option<Moment>| sample.map(|sample| (sample.key.node, sample.key.state));
        match (samples.last(), weights.last_mut()) {
            (Some(last), Some(last_weight)) if what(last) == what(&sample) => *last_weight += weight,
            _ => {
                samples.push(sample);
                weights.push(weight);
            }
        }
    };
    for sample in all {
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
    let samples = all.into_iter().map(Some).collect();
    let samples = Stacks { recording, numbers, samples, by_thread: true };
    let (end, name) = (weights.iter().sum(), "all threads (sum of their time)".to_owned());
    Profile { r#type: "sampled", name, unit: "nanoseconds", start: 0, end, samples, weights }
}

/// The table of frames: one for each method, whatever its lines.
fn frames(recording: &Recording, threads: &[ThreadSamples]) -> (Vec<SharedFrame>, Numbers) {
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
    let threads = threads
        .iter()
        .map(|thread| (thread.key, number(SharedFrame { name: thread.name.clone(), file: None, line: None })))
        .collect();
    (table, Numbers { of, waiting, blocked, threads })
}
