//! Call paths by the labels of their frames: the same method in several processes is one node, and so are its lines,
//! unless lines are requested.

use std::collections::HashMap;

use super::{
    Graph,
    label::{self, Class},
    measure::Entry,
    rows,
};
use crate::{
    aggregate::{
        call_tree::{FrameId, NodeId},
        recording::Recording,
    },
    model::stack::{Frame, FrameKind},
};

/// What is at the root of each stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Grouping {
    /// The process.
    #[default]
    Process,
    /// The process, then the name of the thread.
    Thread,
    /// The endpoint of the request that the thread served, for all processes together.
    Endpoint,
    /// Nothing: all processes together.
    None,
}

/// Which frames a tree contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rows {
    /// All of them.
    All,
    /// Those that carry information, for an image (see [`rows`]).
    Telling,
    /// Like `Telling`, without lines, which move from one version of a program to the next.
    Comparable,
}

/// A node: a label below another node.
#[derive(Clone, Copy, Debug)]
struct Node {
    parent: u32,
    label: u32,
    /// Weight of the paths that end here, in the unit of the measure.
    own: u64,
}

/// Labelled call paths with their weights.
pub(super) struct LabelTree {
    labels: Vec<(String, Class)>,
    by_label: HashMap<String, u32>,
    nodes: Vec<Node>,
    children: HashMap<(u32, u32), u32>,
}

const ROOT: u32 = 0;

impl LabelTree {
    /// The paths that a graph of a recording shows.
    pub(super) fn of(recording: &Recording, graph: Graph, shown: Rows) -> Self {
        let Graph { grouping, of, lines, roots_on_top: _ } = graph;
        let mut tree = Self {
            labels: Vec::new(),
            by_label: HashMap::new(),
            nodes: vec![Node { parent: ROOT, label: 0, own: 0 }],
            children: HashMap::new(),
        };
        let mut frame_labels: Vec<Option<u32>> = vec![None; recording.tree.frames().count()];
        let mut known: HashMap<(u32, NodeId), u32> = HashMap::new();
        for Entry { thread, node, endpoint, state, rows, weight } in of.entries(recording) {
            let (thread, process) = recording.thread_facts(thread);
            let endpoint = || match endpoint {
                Some(index) => label::text(recording.endpoint(index)),
                None => "(no request)".to_owned(),
            };
            let groups = match grouping {
                Grouping::None => vec![],
                Grouping::Process => vec![label::process(process)],
                Grouping::Thread => vec![label::process(process), label::text(&thread.name)],
                Grouping::Endpoint => vec![endpoint()],
            };
            let mut group = ROOT;
            for name in groups {
                group = tree.child_called(group, &name, Class::Group);
            }
            // Up to the nearest known caller, then down again.
            let mut way: Vec<(NodeId, FrameId)> = Vec::new();
            let mut at = group;
            let mut path = recording.tree.path(node).peekable();
            let mut kernel: Vec<&Frame> = Vec::new();
            while shown != Rows::All
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
                let unnamed = if shown == Rows::All { None } else { rows::unnamed(of) };
                let label = frame_labels[frame.index()].unwrap_or_else(|| {
                    let named = match shown {
                        Rows::Comparable => label::without_line,
                        Rows::All | Rows::Telling if lines => label::at_line,
                        Rows::All | Rows::Telling => label::method,
                    };
                    let name = unnamed.clone().unwrap_or_else(|| named(of));
                    tree.label(&name, Class::Frame(of.kind))
                });
                frame_labels[frame.index()] = Some(label);
                // Consecutive frames of code without symbols in one file are a single row.
                if unnamed.is_none() || at == ROOT || tree.nodes[at as usize].label != label {
                    at = tree.child(at, label);
                }
                known.insert((group, node), at);
            }
            for row in rows::kernel(&kernel, state) {
                at = tree.child_called(at, &row, Class::Frame(FrameKind::Kernel));
            }
            for (name, class) in rows {
                at = tree.child_called(at, &name, class);
            }
            tree.nodes[at as usize].own += weight;
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
            nodes.push(Node { parent, label, own: 0 });
            nodes.len() as u32 - 1
        })
    }

    /// The total weight.
    pub(super) fn total(&self) -> u64 {
        self.nodes.iter().map(|node| node.own).sum()
    }

    /// All labels.
    pub(super) fn labels(&self) -> impl Iterator<Item = (&str, Class)> {
        self.labels.iter().map(|(name, class)| (name.as_str(), *class))
    }

    /// Merges every path whose total weight is below `least` into its caller, if it has one, so that few paths remain. The
    /// total is unchanged.
    pub(super) fn prune(&mut self, least: u64) {
        // A node comes after its parent, so in reverse order all children are processed first.
        let mut totals: Vec<u64> = self.nodes.iter().map(|node| node.own).collect();
        for at in (1..self.nodes.len()).rev() {
            let Node { parent, own, .. } = self.nodes[at];
            totals[parent as usize] += totals[at];
            if totals[at] < least && parent != ROOT {
                // Its children are merged already, so this is its total.
                self.nodes[at].own = 0;
                self.nodes[parent as usize].own += own;
            }
        }
    }

    /// Calls `leaf` for each path that ends in a leaf, as `root;…;leaf` with its weight, in sorted order.
    pub(super) fn visit<E>(&self, mut leaf: impl FnMut(&str, u64) -> Result<(), E>) -> Result<(), E> {
        let mut children: Vec<Vec<u32>> = vec![Vec::new(); self.nodes.len()];
        for (at, node) in self.nodes.iter().enumerate().skip(1) {
            children[node.parent as usize].push(at as u32);
        }
        let name = |at: u32| self.labels[self.nodes[at as usize].label as usize].0.as_str();
        for list in &mut children {
            list.sort_unstable_by(|a, b| name(*b).cmp(name(*a)));
        }
        // Stacks can be thousands of frames deep, so this is not recursive. An entry is a node, and the length of the path before it.
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
            let own = self.nodes[at as usize].own;
            if own > 0 {
                leaf(&line, own)?;
            }
            waiting.extend(children[at as usize].iter().map(|&child| (child, line.len())));
        }
        Ok(())
    }
}

/// Makes a name that is not ambiguous in a line `a;b;c 42`: no separator, no number at its end, no comment.
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
