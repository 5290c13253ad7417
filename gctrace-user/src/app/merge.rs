//! `gctrace merge`: merges several recordings into one.

use super::Failure;
use crate::{cli::MergeArgs, console::say, sudo, trace_file, words::plural};

/// Writes the merged recording, and prints how it was merged. Returns the exit status.
///
/// # Errors
///
/// One cannot be read or is damaged, they cannot be merged exactly, or the result cannot be written.
pub fn merge(args: &MergeArgs) -> Result<u8, Failure> {
    sudo::own_files(None).map_err(Failure::Control)?;
    let merged = trace_file::merge(&args.files, &args.output)?;
    for note in &merged.notes {
        say(&format!("gctrace: {note}"));
    }
    let (to, processes) = (args.output.display(), plural(merged.processes, "process"));
    say(&format!("gctrace: wrote {to}: {processes} of {}", plural(args.files.len() as u64, "recording")));
    Ok(0)
}
