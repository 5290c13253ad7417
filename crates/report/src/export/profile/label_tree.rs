//! Call paths by what their frames are called: lines of a method, and its copies in several processes, are one.

use std::collections::HashMap;

use super::{label, rows};
use crate::{
    aggregate::{
        call_tree::{FrameId, NodeId},
        recording::Recording,
    },
    model::stack::{Frame, FrameKind, ThreadState},
};

/// What stands at the root of each stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Grouping {
    /// The process.
    #[default]
    Process,
    /// The process, then the name of the thread.
    Thread,
    /// Nothing: all processes together.
    None,
}

/// Which frames there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rows {
    /// Every one.
    All,
    /// Those that say something, for a picture (see [`rows`]).
    Telling,
}

/// What a label stands for, for its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// A process or thread.
    Group,
    /// A frame.
    Frame(FrameKind),
    /// Not running.
    Off(ThreadState),
}

/// A node: a label below another node.
#[derive(Clone, Copy, Debug)]
struct Node {
    parent: u32,
    label: u32,
    /// Time at which this was the leaf, nanoseconds.
    self_ns: u64,
}

/// Labelled call paths with their time.
pub(super) struct LabelTree {
    labels: Vec<(String, Class)>,
    by_label: HashMap<String, u32>,
    nodes: Vec<Node>,
    children: HashMap<(u32, u32), u32>,
}

const ROOT: u32 = 0;

impl LabelTree {
    /// The samples of a recording.
    pub(super) fn of(recording: &Recording, grouping: Grouping, shown: Rows) -> Self {
        let mut tree = Self {
            labels: Vec::new(),
            by_label: HashMap::new(),
            nodes: vec![Node { parent: ROOT, label: 0, self_ns: 0 }],
            children: HashMap::new(),
        };
        let mut frame_labels: Vec<Option<u32>> = vec![None; recording.tree.frames().count()];
        let mut known: HashMap<(u32, NodeId), u32> = HashMap::new();
        for (key, sum) in &recording.samples {
            let (thread, process) = recording.thread_facts(key.thread);
            let mut group = ROOT;
            if grouping != Grouping::None {
                group = tree.child_called(group, &label::process(process), Class::Group);
            }
            if grouping == Grouping::Thread {
                group = tree.child_called(group, &label::text(&thread.name), Class::Group);
            }
            // Up to the nearest caller that is known, then down again.
            let mut way: Vec<(NodeId, FrameId)> = Vec::new();
            let mut at = group;
            let mut path = recording.tree.path(key.node).peekable();
            let mut kernel: Vec<&Frame> = Vec::new();
            while shown == Rows::Telling
                && let Some((_, frame)) =
                    path.next_if(|(_, frame)| recording.tree.frame(*frame).kind == FrameKind::Kernel)
            {
                kernel.push(recording.tree.frame(frame));
            }
            for (node, frame) in path {
                if let Some(&found) = known.get(&(group, node)) {
                    at = found;
                    break;
                }
                way.push((node, frame));
            }
            for &(node, frame) in way.iter().rev() {
                let of = recording.tree.frame(frame);
                let unnamed = if shown == Rows::Telling { rows::unnamed(of) } else { None };
                let label = frame_labels[frame.index()].unwrap_or_else(|| {
                    let name = unnamed.clone().unwrap_or_else(|| label::method(of));
                    tree.label(&name, Class::Frame(of.kind))
                });
                frame_labels[frame.index()] = Some(label);
                // Code without symbols that calls itself is one row.
                if unnamed.is_none() || at == ROOT || tree.nodes[at as usize].label != label {
                    at = tree.child(at, label);
                }
                known.insert((group, node), at);
            }
            for row in rows::kernel(&kernel, key.state) {
                at = tree.child_called(at, &row, Class::Frame(FrameKind::Kernel));
            }
            if let Some(state) = label::state(key.state) {
                at = tree.child_called(at, state, Class::Off(key.state));
            }
            tree.nodes[at as usize].self_ns += sum.time_ns(key.state);
        }
        tree
    }

    fn label(&mut self, name: &str, class: Class) -> u32 {
        let name = foldable(name);
        if let Some(&label) = self.by_label.get(&name) {
            return label;
        }
        let label = self.labels.len() as u32;
        self.labels.push((name.clone(), class));
        self.by_label.insert(name, label);
        label
    }

    fn child_called(&mut self, parent: u32, name: &str, class: Class) -> u32 {
        let label = self.label(name, class);
        self.child(parent, label)
    }

    fn child(&mut self, parent: u32, label: u32) -> u32 {
        let nodes = &mut self.nodes;
        *self.children.entry((parent, label)).or_insert_with(|| {
            nodes.push(Node { parent, label, self_ns: 0 });
            nodes.len() as u32 - 1
        })
    }

    /// All time, nanoseconds.
    pub(super) fn total_ns(&self) -> u64 {
        self.nodes.iter().map(|node| node.self_ns).sum()
    }

    /// The labels.
    pub(super) fn labels(&self) -> impl Iterator<Item = (&str, Class)> {
        self.labels.iter().map(|(name, class)| (name.as_str(), *class))
    }

    /// Gives the time of every path that has less than `min_ns` in all to its caller, if it has one, so that few paths
    /// remain. Sums stay.
    pub(super) fn prune(&mut self, min_ns: u64) {
        // A node comes after its parent, so going backwards all children are done before.
        let mut totals: Vec<u64> = self.nodes.iter().map(|node| node.self_ns).collect();
        for at in (1..self.nodes.len()).rev() {
            let Node { parent, self_ns, .. } = self.nodes[at];
            totals[parent as usize] += totals[at];
            if totals[at] < min_ns && parent != ROOT {
                // Its own children are pruned already, so this is all of it.
                self.nodes[at].self_ns = 0;
                self.nodes[parent as usize].self_ns += self_ns;
            }
        }
    }

    /// Hands out each path that was a leaf as `root;…;leaf`, with its time, sorted.
    pub(super) fn visit<E>(&self, mut leaf: impl FnMut(&str, u64) -> Result<(), E>) -> Result<(), E> {
        let mut children: Vec<Vec<u32>> = vec![Vec::new(); self.nodes.len()];
        for (at, node) in self.nodes.iter().enumerate().skip(1) {
            children[node.parent as usize].push(at as u32);
        }
        let name = |at: u32| self.labels[self.nodes[at as usize].label as usize].0.as_str();
        for list in &mut children {
            list.sort_unstable_by(|a, b| name(*b).cmp(name(*a)));
        }
        // Stacks are thousands deep, so this is no recursion: a node, and how long the path was before it.
        let mut line = String::new();
        let mut waiting: Vec<(u32, usize)> = vec![(ROOT, 0)];
        while let Some((at, length)) = waiting.pop() {
            line.truncate(length);
            if at != ROOT {
                if !line.is_empty() {
                    line.push(';');
                }
                line.push_str(name(at));
            }
            let self_ns = self.nodes[at as usize].self_ns;
            if self_ns > 0 {
                leaf(&line, self_ns)?;
            }
            waiting.extend(children[at as usize].iter().map(|&child| (child, line.len())));
        }
        Ok(())
    }
}

/// A name that does not look like another part of a line `a;b;c 42`: no separator, no number of its own at its end, no
/// comment.
fn foldable(name: &str) -> String {
    let mut name = name.trim().replace(';', ":");
    if name.starts_with('#') {
        name.insert(0, '\\');
    }
    if let Some(at) = name.rfind(' ')
        && name[at + 1..].chars().all(|c| c.is_ascii_digit() || c == '.')
    {
        name.replace_range(at..=at, "_");
    }
    name
}
