//! `gctrace tune`: recommendations from sample sets in files.

use std::io::{self, Write as _};

use gctrace_tunemygc::{
    offline::{self, Program},
    printable::{printable, printable_path},
};

use super::args::{DocumentArg, TuneArgs};
use crate::console::say;

/// Prints recommendations. Returns the exit status: 2 if some input could not be read; recommendations from the rest are
/// printed nevertheless.
pub fn tune(args: &TuneArgs) -> u8 {
    let found = offline::recommend(&args.paths, args.together);
    let text = match args.format {
        DocumentArg::Json => found.to_json() + "\n",
        DocumentArg::Text => found.programs.iter().map(paragraph).collect::<Vec<_>>().join("\n"),
    };
    let written = io::stdout().lock().write_all(text.as_bytes());
    for failure in &found.failures {
        say(&format!("gctrace: {failure}"));
    }
    match written {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            say(&format!("gctrace: writing to standard output: {error}"));
            2
        }
        _ => u8::from(!found.failures.is_empty()) * 2,
    }
}

fn paragraph(program: &Program) -> String {
    let (first, rest) =
        program.files.split_first().map_or((None, 0), |(first, rest)| (Some(first), rest.len()));
    let files = first.map_or_else(String::new, |path| printable_path(path));
    let more = if rest > 0 { format!(" and {rest} more") } else { String::new() };
    format!("{files}{more} (pid {} on {})\n{}", program.pid, printable(&program.hostname), program.report)
}
