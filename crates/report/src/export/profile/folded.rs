//! Collapsed stacks: one line `root;…;leaf NANOSECONDS` (or bytes) for each call path, as read by flame graph tools.

use std::io::{self, Write};

use super::{
    Graph,
    label_tree::{LabelTree, Rows},
};
use crate::aggregate::recording::Recording;

/// Writes the lines.
pub(super) fn write(recording: &Recording, graph: Graph, out: &mut dyn Write) -> io::Result<()> {
    LabelTree::of(recording, graph, Rows::All).visit(|path, weight| writeln!(out, "{path} {weight}"))
}
