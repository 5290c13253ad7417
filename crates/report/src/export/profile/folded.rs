//! Collapsed stacks: a line `root;…;leaf NANOSECONDS` for each call path, as flame graph tools read them.

use std::io::{self, Write};

use super::label_tree::{Grouping, LabelTree, Rows};
use crate::aggregate::recording::Recording;

/// Writes them.
pub(super) fn write(recording: &Recording, grouping: Grouping, out: &mut dyn Write) -> io::Result<()> {
    LabelTree::of(recording, grouping, Rows::All).visit(|path, ns| writeln!(out, "{path} {ns}"))
}
