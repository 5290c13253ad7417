//! A flame graph: an SVG that a browser shows, with search and zoom.

use std::io::{self, Write};

mod differential;
mod legend;
mod percent;
mod theme;
mod titles;

pub(in crate::export) use differential::{Comparable, write as differential};

use inferno::flamegraph::{
    self, Direction, Options, TextTruncateDirection,
    color::{BackgroundColor, Color, PaletteMap},
};

use super::{
    Context, Graph, Measure,
    label::{self, Class},
    label_tree::{LabelTree, Rows},
    measure::Entry,
};
use crate::{
    aggregate::recording::{AllocCount, AllocKey, MallocSum, Recording},
    ledger::without_stack,
    model::stack::{FrameKind, ThreadState},
    words::{data_size, plural},
};

/// Paths with less than this share of the total would be narrower than a third of a pixel.
const MIN_PART: f64 = 0.0002;

/// Writes the graph.
pub(super) fn write(
    recording: &Recording,
    graph: Graph,
    context: &Context<'_>,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut tree = LabelTree::of(recording, graph, Rows::Telling);
    let total = tree.total();
    if total == 0 {
        return out.write_all(empty(recording, graph.of, context).as_bytes());
    }
    tree.prune((total as f64 * MIN_PART) as u64);
    let mut lines = Vec::new();
    tree.visit(|path, weight| {
        lines.push(format!("{path} {weight}"));
        Ok::<_, io::Error>(())
    })?;
    let mut palette = PaletteMap::default();
    let mut classes: Vec<Class> = Vec::new();
    for (name, class) in tree.labels() {
        palette.insert(name, color(name, class));
        if !classes.contains(&class) {
            classes.push(class);
        }
    }
    // The root of all paths.
    palette.insert("", Color { r: 235, g: 235, b: 235 });
    let mut options = Options::default();
    options.bgcolors = Some(BackgroundColor::Flat(Color { r: 255, g: 255, b: 255 }));
    // A label starts with the method's name; its location comes last.
    options.text_truncate_direction = TextTruncateDirection::Right;
    let title = title(recording, graph.of);
    let lines_below = titles::lines(&subtitle(recording, graph.of, context));
    options.title.clone_from(&title);
    options.subtitle = lines_below.first().cloned();
    options.palette_map = Some(&mut palette);
    let (unit, factor) = graph.of.unit();
    unit.clone_into(&mut options.count_name);
    options.factor = factor;
    options.min_width = MIN_PART * 100.0;
    "Frame:".clone_into(&mut options.name_type);
    if graph.roots_on_top {
        options.direction = Direction::Inverted;
    }
    options.notes = comment(&context.account());
    let mut svg = Vec::new();
    flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), &mut svg)?;
    let svg = percent::exact(&String::from_utf8(svg).map_err(io::Error::other)?, factor);
    let titled = titles::added(&svg, &title, &lines_below);
    let svg = legend::added(&titled.svg, &classes, titled.lower);
    out.write_all(theme::added(&svg, &titled.rules).as_bytes())
}

/// Makes a text valid in an XML comment, which contains the notes: without two consecutive hyphens, and without a hyphen at the end.
fn comment(text: &str) -> String {
    let mut comment = String::with_capacity(text.len());
    for c in text.chars() {
        // A non-breaking hyphen, which looks the same.
        let follows = c == '-' && comment.ends_with('-');
        comment.push(if follows { '\u{2011}' } else { c });
    }
    if comment.ends_with('-') {
        comment.push(' ');
    }
    comment
}

/// An image saying that there is nothing to show.
fn empty(recording: &Recording, of: Measure, context: &Context<'_>) -> String {
    let mut lines = vec![of.nothing()];
    if of == Measure::Gc && recording.images.iter().any(|image| !image.method.sees_cycles()) {
        lines.push("Pauses of Rubies without event sites are not in this graph.");
    }
    if context.filtered.is_some() {
        lines.push("Filters may have dropped samples or events.");
    }
    picture(&lines)
}

/// An image of sentences, each on a line of its own.
fn picture(lines: &[&str]) -> String {
    let height = 56 + 24 * lines.len();
    let texts = lines.iter().zip(0..).map(|(line, at)| {
        format!(
            "<text x=\"20\" y=\"{}\" font-family=\"sans-serif\" font-size=\"16\">{line}</text>\n",
            46 + 24 * at
        )
    });
    let texts: String = texts.collect();
    format!(
        r#"<?xml version="1.0" standalone="no"?>
<svg version="1.1" width="640" height="{height}" xmlns="http://www.w3.org/2000/svg">
<style>@media (prefers-color-scheme: dark) {{ svg {{ background: #0d1117 }} text {{ fill: #e6edf3 }} }}</style>
{texts}</svg>
"#
    )
}

fn title(recording: &Recording, of: Measure) -> String {
    let what = of.title();
    let process = |entry: &Entry| recording.threads[entry.thread as usize].process;
    let mut processes: Vec<usize> = of.entries(recording).iter().map(process).collect();
    processes.sort_unstable();
    processes.dedup();
    match processes.as_slice() {
        [one] => {
            let facts = &recording.processes[*one];
            let ruby = facts.image.as_ref().map(|image| format!(", Ruby {}", image.version));
            format!("{what} of {}{}", label::process(facts), ruby.unwrap_or_default())
        }
        several => format!("{what} of {} Ruby processes", several.len()),
    }
}

fn subtitle(recording: &Recording, of: Measure, context: &Context<'_>) -> String {
    let seconds = context.ended_ns.saturating_sub(context.began_ns) as f64 / 1e9;
    let mut parts = vec![format!("{seconds:.1} s of recording")];
    match of {
        Measure::Cpu | Measure::Wall => parts.extend(samples(recording, of, context)),
        Measure::Gc => {
            let pauses: u64 = recording.pauses.values().map(|sum| sum.pauses).sum();
            parts.push(format!("{}, measured", plural(pauses, "pause")));
        }
        Measure::Alloc => {
            let sum = |of: fn(&AllocKey, &AllocCount) -> u64| -> u64 {
                recording.allocs.iter().map(|(key, sum)| of(key, sum)).sum()
            };
            let (slots, stacks) = (sum(|_, sum| sum.slots), sum(|_, sum| sum.stacks));
            parts.push(format!(
                "{} in {}, measured",
                plural(slots, "slot"),
                data_size(sum(|key, sum| key.bytes(sum.slots)))
            ));
            parts.push(format!("by {}", plural(stacks, "stack")));
        }
        Measure::Malloc | Measure::MallocLive => {
            let parts_of = |sum: &MallocSum| if of == Measure::Malloc { sum.asked } else { sum.left };
            let sums: Vec<_> = recording.mallocs.values().map(parts_of).collect();
            let bytes: f64 = sums.iter().map(|sum| sum.bytes.sum).sum();
            let error = sums.iter().map(|sum| sum.bytes.variance).sum::<f64>().sqrt();
            let taken: u64 = sums.iter().map(|sum| sum.taken).sum();
            parts.push(format!(
                "{} ± {}, estimated from {}",
                data_size(bytes.round() as u64),
                data_size(error.round() as u64),
                plural(taken, "stack")
            ));
        }
        Measure::GvlWait => {
            let single: u64 = recording.gvl_waits.values().map(|times| times.count).sum();
            let others: u64 = recording.gvl_threads.values().map(|facts| facts.unreported().0).sum();
            parts.push(format!("{}, measured", plural(single + others, "wait")));
        }
    }
    parts.extend(context.filtered.clone());
    parts.join(" · ")
}

/// The number of samples that a graph is based on, in words.
fn samples(recording: &Recording, of: Measure, context: &Context<'_>) -> Vec<String> {
    let count = |running| -> u64 {
        let of_state =
            recording.samples.iter().filter(|(key, _)| (key.state == ThreadState::Running) == running);
        of_state.map(|(_, sum)| sum.samples).sum()
    };
    let rate = recording.period_ns.map_or_else(String::new, |ns| format!(" at {:.0} Hz", 1e9 / ns as f64));
    let mut parts = vec![format!("{}{rate}", plural(count(true), "CPU sample"))];
    if of == Measure::Wall {
        parts.push(plural(count(false), "off-CPU interval"));
        parts.extend(without_stack(&context.ledger.user.stacks));
    }
    if recording.merged > 0 {
        let merged = plural(recording.merged, "sample");
        parts.push(format!("{merged} without a stack: too many different ones"));
    }
    parts
}

/// The hue depends on the kind, the shade on the name, so that colours are the same in every graph.
fn color(name: &str, class: Class) -> Color {
    // FNV-1a
    let hash =
        name.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    shade(class, |spread| ((hash >> 8) % (u32::from(spread) + 1)) as u8)
}

/// The middle shade of a kind.
fn base_color(class: Class) -> Color {
    shade(class, |spread| spread / 2)
}

fn shade(class: Class, of: impl Fn(u8) -> u8) -> Color {
    let (base, spread): ([u8; 3], [u8; 3]) = match class {
        Class::Frame(FrameKind::Ruby) => ([208, 62, 62], [38, 34, 34]),
        Class::Frame(FrameKind::CFunction) => ([240, 168, 48], [12, 38, 30]),
        Class::Frame(FrameKind::Native) => ([90, 150, 205], [40, 40, 35]),
        Class::Frame(FrameKind::Kernel) => ([120, 125, 150], [25, 25, 30]),
        Class::Frame(FrameKind::Vm) => ([150, 100, 190], [35, 30, 40]),
        Class::Frame(FrameKind::Missing) => ([170, 170, 170], [20, 20, 20]),
        Class::GvlWait => ([225, 150, 170], [20, 20, 20]),
        Class::Off(ThreadState::Runnable) => ([236, 226, 140], [10, 10, 10]),
        Class::Off(_) => ([205, 215, 225], [10, 10, 10]),
        Class::Group => ([225, 205, 175], [10, 12, 12]),
    };
    let part = |at: usize| base[at].saturating_add(of(spread[at]));
    Color { r: part(0), g: part(1), b: part(2) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kinds of rows that the legend distinguishes.
    const KINDS: [Class; 10] = [
        Class::Frame(FrameKind::Ruby),
        Class::Frame(FrameKind::CFunction),
        Class::Frame(FrameKind::Native),
        Class::Frame(FrameKind::Kernel),
        Class::Frame(FrameKind::Vm),
        Class::Frame(FrameKind::Missing),
        Class::GvlWait,
        Class::Off(ThreadState::Runnable),
        Class::Off(ThreadState::Blocked),
        Class::Group,
    ];

    /// The hue of a colour, degrees.
    fn hue(Color { r, g, b }: Color) -> f64 {
        let (most, least) = (r.max(g).max(b), r.min(g).min(b));
        let part = |one: u8, other: u8| (f64::from(one) - f64::from(other)) / f64::from(most - least);
        let around = match most {
            _ if most == least => return 0.0,
            _ if most == r => part(g, b),
            _ if most == g => 2.0 + part(b, r),
            _ => 4.0 + part(r, g),
        };
        (60.0 * around).rem_euclid(360.0)
    }

    /// The shades of different kinds are disjoint, and Ruby methods (red) and C functions (orange) differ in hue whatever their names.
    #[test]
    fn kinds_have_their_own_colours() {
        let channels = |class| {
            let (first, last) = (shade(class, |_| 0), shade(class, |spread| spread));
            [(first.r, last.r), (first.g, last.g), (first.b, last.b)]
        };
        for (at, one) in KINDS.into_iter().enumerate() {
            for other in KINDS.into_iter().skip(at + 1) {
                let apart = channels(one).iter().zip(channels(other)).any(|(a, b)| a.1 < b.0 || b.1 < a.0);
                assert!(apart, "{one:?} and {other:?} have shades in common");
            }
        }
        // The squares of the legend have the middle shade of their kind.
        for class in KINDS.into_iter().filter(|class| *class != Class::Group) {
            let svg = "<svg height=\"9\" x=\" 9\"><text id=\"details\" y=\"1\"/><text id=\"matched\" y=\"1\"/><svg id=\"frames\"";
            let shown = legend::added(svg, &[class], 0);
            let [r, g, b] = channels(class).map(|(first, last)| first + (last - first) / 2);
            assert!(shown.contains(&format!("fill=\"rgb({r},{g},{b})\"")), "{class:?}: {shown}");
        }
        let hues = |kind| (0..500).map(move |at| hue(color(&format!("Order#line{at}"), Class::Frame(kind))));
        for ruby in hues(FrameKind::Ruby) {
            for c in hues(FrameKind::CFunction) {
                let apart = (ruby - c).abs().min(360.0 - (ruby - c).abs());
                assert!(apart > 12.0, "{ruby} and {c} degrees");
            }
        }
    }
}
