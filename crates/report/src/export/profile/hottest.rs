//! The hottest methods of each process, as text: printed once, at the end of a run.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    io::{self, Write},
    rc::Rc,
    sync::Arc,
};

use super::label;
use crate::{
    aggregate::recording::{ProcessIndex, Recording, SampleKey, SampleSum},
    export::{ExportError, Exporter},
    ledger::Ledger,
    model::{
        source::last_two,
        stack::{Frame, FrameKind, ThreadState},
    },
    words::plural,
};

/// Maximum number of processes shown: those with the most CPU time.
const PROCESSES: usize = 5;
/// Maximum number of methods shown per process.
const METHODS: usize = 10;

/// Prints the methods.
pub(super) struct Hottest<W: Write> {
    pub(super) recording: Rc<RefCell<Recording>>,
    pub(super) out: W,
}

impl<W: Write> Exporter for Hottest<W> {
    fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
        print(&self.recording.borrow(), &mut self.out).map_err(ExportError::Stdout)
    }
}

/// A method, or time outside all methods.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Method {
    Of { name: Arc<str>, file: Option<Arc<str>>, line: u32 },
    Gc,
    Outside,
}

impl Method {
    fn of(frame: &Frame) -> Option<Self> {
        match frame.kind {
            FrameKind::Ruby | FrameKind::CFunction => {
                Some(Self::Of { name: frame.name.clone(), file: frame.file.clone(), line: frame.first_line })
            }
            FrameKind::Vm => Some(Self::Gc),
            FrameKind::Native | FrameKind::Kernel | FrameKind::Missing => None,
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Gc => "(garbage collection)".to_owned(),
            Self::Outside => "(outside of Ruby methods)".to_owned(),
            Self::Of { name, file: Some(file), line } if *line > 0 => {
                format!("{}  {}:{line}", label::text(name), label::text(last_two(file)))
            }
            Self::Of { name, .. } => label::text(name),
        }
    }
}

/// A method with its CPU time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HotMethod {
    /// Its name and location.
    pub text: String,
    /// CPU time with the method at the top of the stack, nanoseconds.
    pub self_ns: u64,
    /// CPU time with the method anywhere on the stack, nanoseconds.
    pub total_ns: u64,
}

/// The hottest methods of all processes together, at most `most`, and the number of further ones.
pub(in crate::export) fn of_all(recording: &Recording, most: usize) -> (Vec<HotMethod>, usize) {
    let running = |(key, sum): &(&SampleKey, &SampleSum)| key.state == ThreadState::Running && sum.cpu_ns > 0;
    let samples: Vec<_> = recording.samples.iter().filter(running).collect();
    let methods = methods(recording, &samples);
    let hot = |(method, time): &(Method, Time)| HotMethod {
        text: method.text(),
        self_ns: time.self_ns,
        total_ns: time.total_ns,
    };
    (methods.iter().take(most).map(hot).collect(), methods.len().saturating_sub(most))
}

#[derive(Clone, Copy, Default)]
struct Time {
    self_ns: u64,
    total_ns: u64,
}

fn print(recording: &Recording, out: &mut impl Write) -> io::Result<()> {
    let mut processes: BTreeMap<ProcessIndex, Vec<(&SampleKey, &SampleSum)>> = BTreeMap::new();
    for (key, sum) in &recording.samples {
        if key.state == ThreadState::Running && sum.cpu_ns > 0 {
            let process = recording.threads[key.thread as usize].process;
            processes.entry(process).or_default().push((key, sum));
        }
    }
    let cpu = |samples: &[(&SampleKey, &SampleSum)]| samples.iter().map(|(_, sum)| sum.cpu_ns).sum::<u64>();
    let mut by_time: Vec<_> =
        processes.into_iter().map(|(process, samples)| (cpu(&samples), process, samples)).collect();
    by_time.sort_unstable_by_key(|(ns, process, _)| (std::cmp::Reverse(*ns), *process));
    for (ns, process, samples) in by_time.iter().take(PROCESSES) {
        let facts = &recording.processes[*process];
        let ruby = facts.image.as_ref().map(|image| format!(", Ruby {}", image.version)).unwrap_or_default();
        let count: u64 = samples.iter().map(|(_, sum)| sum.samples).sum();
        writeln!(
            out,
            "\n{}{ruby}: {:.2} s of CPU time in {}\n  SELF  TOTAL  METHOD",
            label::process(facts),
            *ns as f64 / 1e9,
            plural(count, "sample")
        )?;
        let methods = methods(recording, samples);
        for (method, time) in methods.iter().take(METHODS) {
            let part = |part: u64| 100.0 * part as f64 / *ns as f64;
            writeln!(out, "{:>5.1}% {:>5.1}%  {}", part(time.self_ns), part(time.total_ns), method.text())?;
        }
        if methods.len() > METHODS {
            writeln!(out, "               {}", plural((methods.len() - METHODS) as u64, "more method"))?;
        }
    }
    if let Some(others) = by_time.get(PROCESSES..).filter(|others| !others.is_empty()) {
        let ns: u64 = others.iter().map(|(ns, ..)| ns).sum();
        let others = plural(others.len() as u64, "other process");
        writeln!(out, "\n{others}: {:.2} s of CPU time", ns as f64 / 1e9)?;
    }
    out.flush()
}

/// Methods with their time, by self time in descending order. A method that is on a stack several times counts once.
fn methods(recording: &Recording, samples: &[(&SampleKey, &SampleSum)]) -> Vec<(Method, Time)> {
    // Methods by number, so that the cost of a sample is proportional to its depth.
    let mut numbers: HashMap<Method, usize> = HashMap::from([(Method::Outside, 0)]);
    let of_frame: Vec<Option<usize>> = recording
        .tree
        .frames()
        .map(|frame| {
            let next = numbers.len();
            Some(*numbers.entry(Method::of(frame)?).or_insert(next))
        })
        .collect();
    let mut times: Vec<Time> = vec![Time::default(); numbers.len()];
    // The last sample whose stack contained the method.
    let mut seen: Vec<usize> = vec![0; numbers.len()];
    for (number, (key, sum)) in samples.iter().enumerate() {
        let mut top = None;
        let path = recording.tree.path(key.node).filter_map(|(_, frame)| of_frame[frame.index()]);
        for method in path {
            top.get_or_insert(method);
            if std::mem::replace(&mut seen[method], number + 1) != number + 1 {
                times[method].total_ns += sum.cpu_ns;
            }
        }
        if top.is_none() {
            times[0].total_ns += sum.cpu_ns;
        }
        times[top.unwrap_or(0)].self_ns += sum.cpu_ns;
    }
    let mut times: Vec<(Method, Time)> = numbers
        .into_iter()
        .map(|(method, number)| (method, times[number]))
        .filter(|(_, time)| time.total_ns > 0)
        .collect();
    times.sort_unstable_by(|(a, x), (b, y)| {
        (y.self_ns, y.total_ns).cmp(&(x.self_ns, x.total_ns)).then_with(|| a.cmp(b))
    });
    times
}
