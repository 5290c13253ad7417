//! Collapsed stacks: a line `root;…;leaf NANOSECONDS` (or bytes) for each call path, as flame graph tools read them.

use std::io::{self, Write};

use super::{
    Graph,
    label_tree::{LabelTree, Rows},
};
use crate::aggregate::recording::Recording;

/// Writes them.
pub(super) fn write(recording: &Recording, graph: Graph, out: &mut dyn Write) -> io::Result<()> {
    LabelTree::of(recording, graph, Rows::All).visit(|path, weight| writeln!(out, "{path} {weight}"))
}
