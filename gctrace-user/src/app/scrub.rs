//! `gctrace scrub`: a copy of a recording without names that identify its owner.

#[cfg(test)]
mod tests;

use super::Failure;
use crate::{
    cli::ScrubArgs,
    console::say,
    sudo,
    trace_file::{self, Ending, ScrubKind},
    words::plural,
};

/// Writes the copy, and prints what was replaced and what remains. Returns the exit status.
///
/// # Errors
///
/// The recording cannot be read or is damaged, or the copy cannot be written.
pub fn scrub(args: &ScrubArgs) -> Result<u8, Failure> {
    sudo::own_files(None).map_err(Failure::Control)?;
    let keep = args.kept();
    let done = trace_file::scrub(&args.file, &args.output, &keep)?;
    let (from, to) = (args.file.display(), args.output.display());
    if let Ending::CutOff(_) = done.ending {
        say(&format!("gctrace: {from} was cut off; the copy ends where it ends"));
    }
    say(&format!("gctrace: wrote {to}"));
    let replaced: Vec<String> =
        done.replaced.iter().map(|(kind, texts)| plural_of(*texts, kind.noun())).collect();
    let replaced = if replaced.is_empty() { "nothing".to_owned() } else { replaced.join(", ") };
    say(&format!("gctrace: replaced {replaced}"));
    if !keep.is_empty() {
        let kept: Vec<&str> =
            ScrubKind::ALL.into_iter().filter(|kind| keep.contains(kind)).map(ScrubKind::name).collect();
        say(&format!("gctrace: left as they are: {}", kept.join(", ")));
    }
    Ok(0)
}

/// `2 names of threads`: the first noun gets the plural ending.
fn plural_of(n: u64, noun: &str) -> String {
    match noun.split_once(' ') {
        Some((first, rest)) if rest.starts_with("of ") || rest.starts_with("or ") => {
            format!("{} {rest}", plural(n, first))
        }
        _ => plural(n, noun),
    }
}
