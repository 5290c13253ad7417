//! `gctrace diff`: two recordings compared.

use std::{io::Write as _, path::Path};

use super::Failure;
use crate::{
    cli::{DiffArgs, DocumentArg, UsageError},
    console::say,
    diff::{Chosen, Judged, Looked, Outcome},
    export::{
        self, ExportError, Outputs,
        diff::{About, Compared, Gathered},
    },
    sudo,
    trace_file::{self, Ending, Header, ReadError, Recording, Subjects},
};

/// Exit status: a condition is true.
const FAILED: u8 = 1;
/// Exit status: a condition cannot be tested.
const UNKNOWN: u8 = 2;

/// What a recording covers.
pub(super) fn looked(header: &Header) -> Looked {
    let Subjects { samples, wall, gvl, requests, alloc } = header.subjects;
    Looked { samples, wall, gvl, requests, alloc }
}

/// Reads one side of the comparison.
fn gather(
    name: &'static str,
    path: &Path,
    chosen: Chosen,
    graph: bool,
) -> Result<(Gathered, About), ReadError> {
    let mut recording = Recording::open(path)?;
    let gathered = Gathered::new(name, looked(recording.header()), chosen, graph);
    let mut outputs = Outputs::new(vec![gathered.exporter()]);
    let replayed = trace_file::replay(&mut recording, &mut outputs)?;
    let clock = recording.header().clock;
    let about = gathered.with(|side| About {
        file: path.display().to_string(),
        began: side.began_ns().map(|began_ns| clock.epoch_seconds(began_ns)),
        seconds: side.seconds(),
        cut_off: replayed.ending != Ending::Complete,
    });
    Ok((gathered, about))
}

/// Compares and prints. Returns the exit status.
///
/// # Errors
///
/// A recording cannot be read or is damaged, or an output cannot be written.
pub fn diff(args: &DiffArgs) -> Result<u8, Failure> {
    if [&args.a, &args.b].iter().all(|path| path.as_os_str() == "/dev/stdin") {
        return Err(UsageError::BothStandardInput.into());
    }
    if let Some(path) = &args.flamegraph {
        if [&args.a, &args.b].iter().any(|recording| trace_file::is_same_file(recording, path)) {
            return Err(UsageError::Recording(path.clone()).into());
        }
        export::check_path(path)?;
        sudo::own_files(None).map_err(Failure::Control)?;
    }
    let chosen = |pid| Chosen { pid, program: args.program.clone() };
    let graph = args.flamegraph.is_some();
    let (a, about_a) = gather("A", &args.a, chosen(args.pid_a), graph)?;
    let (b, about_b) = gather("B", &args.b, chosen(args.pid_b), graph)?;
    let comparison = export::diff::compare(&a, &b);
    let judged: Vec<Judged> = args.conditions.iter().map(|condition| condition.judge(&comparison)).collect();
    let mut text = Vec::new();
    let written = a.with(|a| {
        b.with(|b| {
            let compared = Compared {
                about: [about_a, about_b],
                sides: [a, b],
                comparison: &comparison,
                judged: &judged,
            };
            match args.format {
                DocumentArg::Text => export::diff::write_text(&mut text, &compared),
                DocumentArg::Json => export::diff::write_json(&mut text, &compared),
            }
        })
    });
    let mut out = std::io::stdout().lock();
    match written.and_then(|()| out.write_all(&text)).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            return Err(ExportError::Stdout(error).into());
        }
        _ => {}
    }
    if let Some(path) = &args.flamegraph {
        export::diff::write_graph(path, &a, &b)?;
        let said =
            if comparison.nothing.is_empty() { "open it in a browser" } else { "nothing is compared in it" };
        say(&format!("gctrace: wrote {}: {said}", path.display()));
    }
    for judged in judged.iter().filter(|judged| judged.outcome == Outcome::Unknown) {
        say(&format!("gctrace: `{}` cannot be tested: {}", judged.text, judged.why));
    }
    let any = |outcome| judged.iter().any(|judged| judged.outcome == outcome);
    Ok(match (any(Outcome::Failed), any(Outcome::Unknown)) {
        (true, _) => FAILED,
        (false, true) => UNKNOWN,
        (false, false) if !comparison.nothing.is_empty() => UNKNOWN,
        _ => 0,
    })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use clap::Parser as _;

    use super::*;
    use crate::cli::{Args, Subcommand};

    fn golden(version: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/fixtures/recordings/{version}.gctrace"))
    }

    fn parsed(a: &Path, b: &Path, more: &[&str]) -> Result<DiffArgs, clap::Error> {
        let words = ["gctrace".into(), "diff".into(), a.to_owned(), b.to_owned()];
        let words = words.into_iter().chain(more.iter().map(PathBuf::from));
        let Some(Subcommand::Diff(args)) = Args::try_parse_from(words)?.subcommand else {
            panic!("not diff");
        };
        Ok(args)
    }

    /// A recording equals itself, and recordings of several Rubies can be compared, whatever they lack.
    #[test]
    fn recordings() {
        let dir = tempfile::tempdir().unwrap();
        let svg = dir.path().join("changes.svg");
        let picture = ["--flamegraph", svg.to_str().unwrap()];
        for (a, b) in [("2.7", "2.7"), ("3.1", "3.4"), ("3.3", "2.7"), ("3.4", "3.4")] {
            let (a, b) = (golden(a), golden(b));
            assert_eq!(diff(&parsed(&a, &b, &picture).unwrap()).unwrap(), 0);
            assert!(std::fs::read_to_string(&svg).unwrap().contains("Order#total"));
            let gathered = [("A", &a), ("B", &b)]
                .map(|(name, path)| gather(name, path, Chosen::default(), false).unwrap().0);
            let comparison = export::diff::compare(&gathered[0], &gathered[1]);
            let changes: Vec<_> = comparison.figures().filter_map(|(.., figure)| figure.change()).collect();
            assert!(changes.len() > 10, "{comparison:?}");
            assert_eq!(changes.iter().any(|change| *change != 0.0), a != b, "{comparison:?}");
            assert!(comparison.figures().all(|(.., figure)| a != b || !figure.verdict.is_real()));
        }
    }

    /// Exit statuses: an untestable condition is an error, as is an unknown metric or a file that is not a recording.
    #[test]
    fn statuses() {
        let recording = golden("3.4");
        let status = |more: &[&str]| diff(&parsed(&recording, &recording, more).unwrap()).unwrap();
        // The recording is too short for a test.
        assert_eq!(status(&["--fail-if", "gc.share > +20%"]), UNKNOWN);
        assert_eq!(status(&["--pid-a", "1"]), UNKNOWN);
        let error = parsed(&recording, &recording, &["--fail-if", "gc.time > +20%"]).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("`gc.time` is not a metric; there are gc.share, "), "{error}");
        let dir = tempfile::tempdir().unwrap();
        let bytes = std::fs::read(&recording).unwrap();
        let other = dir.path().join("other");
        let mut damaged = bytes.clone();
        let middle = bytes.len() / 2;
        damaged[middle] ^= 1;
        for (content, expected) in [
            (b"no recording".to_vec(), "it is not a gctrace recording"),
            (damaged, "is damaged"),
            (bytes[..20].to_vec(), "the recording has no header"),
        ] {
            std::fs::write(&other, content).unwrap();
            for (a, b) in [(&recording, &other), (&other, &recording)] {
                let failure = diff(&parsed(a, b, &[]).unwrap()).unwrap_err();
                assert!(failure.to_string().contains(expected), "{failure}");
                assert_eq!(failure.exit_status(), 2);
            }
        }
        // A truncated recording is compared by what it contains.
        std::fs::write(&other, &bytes[..bytes.len() - 1]).unwrap();
        assert_eq!(diff(&parsed(&recording, &other, &[]).unwrap()).unwrap(), 0);
    }
}
