//! Recommendations from sample sets in files.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, BufReader},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use serde::Serialize;

use crate::{
    printable::{Printable, printable_json, printable_path},
    tune::{self, Evidence, Fold, Report, Series},
    wire::{self, ProtocolError},
};

/// What is recommended for the programs of some sample sets.
#[derive(Debug, Serialize)]
pub struct Recommendations {
    /// One for each.
    pub programs: Vec<Program>,
    /// What could not be read.
    #[serde(skip)]
    pub failures: Vec<Failure>,
}

/// A program, and what is recommended for it.
#[derive(Debug, Serialize)]
pub struct Program {
    /// Where its sets are.
    pub files: Vec<PathBuf>,
    /// The host of the last one.
    pub hostname: String,
    /// The pid of the last one, in its own namespace.
    pub pid: u64,
    /// What is recommended.
    #[serde(serialize_with = "report")]
    pub report: Report,
}

fn report<S: serde::Serializer>(report: &Report, serializer: S) -> Result<S::Ok, S::Error> {
    report.to_json().serialize(serializer)
}

/// A file or directory that gives no recommendation.
#[derive(Debug, thiserror::Error)]
#[error("{}: {}", printable_path(path), Printable(why))]
pub struct Failure {
    /// The file.
    pub path: PathBuf,
    /// The reason.
    pub why: Why,
}

/// Why a file gives no recommendation.
#[derive(Debug, thiserror::Error)]
pub enum Why {
    /// It cannot be read.
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    /// A directory without sample sets.
    #[error("holds no sample sets (files that end in .json)")]
    Empty,
    /// A pipe, a device, a socket: reading it might wait for ever.
    #[error("is not a regular file; write the set to a file first")]
    Special,
    /// It is not a set.
    #[error("is not a TuneMyGC sample set: {0}")]
    Protocol(#[from] ProtocolError),
}

impl Recommendations {
    /// As one JSON document.
    pub fn to_json(&self) -> String {
        // Maps with string keys, and paths, of which those that are not text are shown as they can be.
        printable_json(&serde_json::to_string_pretty(self).unwrap_or_default()).into_owned()
    }
}

/// Reads sample sets, from files and from directories with files that end in `.json`. The sets of one process (parts
/// that gctrace wrote one after the other) are taken together; all sets of one series of Ruby, if `together`.
pub fn recommend(paths: &[PathBuf], together: bool) -> Recommendations {
    let mut failures = Vec::new();
    let mut files = Vec::new();
    for path in paths {
        match list(path) {
            Ok(found) => files.extend(found),
            Err(why) => failures.push(Failure { path: path.clone(), why }),
        }
    }
    let mut programs: BTreeMap<(String, u64, Series), (Program, Evidence)> = BTreeMap::new();
    for path in files {
        match fold(&path) {
            Ok((header, series, evidence)) => {
                let key = if together {
                    (String::new(), 0, series)
                } else {
                    (process_of(&path), header.pid, series)
                };
                let (program, sum) = programs.entry(key).or_insert_with(|| {
                    let report = tune::recommend(series, &evidence);
                    (
                        Program { files: Vec::new(), hostname: String::new(), pid: 0, report },
                        Evidence::default(),
                    )
                });
                program.files.push(path);
                (program.hostname, program.pid) = (header.hostname, header.pid);
                sum.merge(&evidence);
            }
            Err(why) => failures.push(Failure { path, why }),
        }
    }
    let programs = programs.into_values().map(|(program, evidence)| {
        let report = tune::recommend(program.report.series, &evidence);
        Program { report, ..program }
    });
    Recommendations { programs: programs.collect(), failures }
}

fn list(path: &Path) -> Result<Vec<PathBuf>, Why> {
    if !fs::metadata(path)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(path)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "json") && path.is_file() {
            files.push(path);
        }
    }
    if files.is_empty() {
        return Err(Why::Empty);
    }
    // Parts in their order: `-part10` after `-part9`.
    files.sort_by_key(|path| (process_of(path), part_of(path)));
    Ok(files)
}

fn fold(path: &Path) -> Result<(wire::Header, Series, Evidence), Why> {
    // Opening a pipe must not wait for somebody to write to it.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(Why::Special);
    }
    fold_from(BufReader::with_capacity(1 << 16, file))
}

pub(crate) fn fold_from(reader: impl io::Read) -> Result<(wire::Header, Series, Evidence), Why> {
    let mut folding = Folding(None);
    let header = wire::read(reader, &mut folding)?;
    let fold = folding.0.ok_or(Why::Empty)?;
    Ok((header, fold.series(), fold.finish()))
}

struct Folding(Option<Fold>);

impl wire::Sink for Folding {
    fn header(&mut self, header: &wire::Header) -> Result<(), String> {
        self.0 = Some(Fold::new(header).map_err(|unsupported| unsupported.to_string())?);
        Ok(())
    }

    fn sample(&mut self, sample: wire::Sample) -> Result<(), String> {
        self.0.iter_mut().for_each(|fold| fold.add(&sample));
        Ok(())
    }
}

/// The path without what tells the parts of one process's sets apart (`-partN.json`).
fn process_of(path: &Path) -> String {
    let text = path.to_string_lossy();
    let stem = text.strip_suffix(".json").unwrap_or(&text);
    match stem.rsplit_once("-part") {
        Some((process, part)) if part.starts_with(|first: char| first.is_ascii_digit()) => process.to_owned(),
        _ => stem.to_owned(),
    }
}

fn part_of(path: &Path) -> u64 {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let part = stem.rsplit_once("-part").map_or("", |(_, part)| part);
    part.split('-').next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts of one process are one program, in their order; what is no set is named, and hides nothing.
    #[test]
    fn programs() {
        let dir = tempfile::tempdir().unwrap();
        let set = include_str!("../../../tests/fixtures/tunemygc_seed.json");
        for name in ["a-part10.json", "a-part9.json", "b.json", "c-part2-2.json", "note.txt"] {
            fs::write(dir.path().join(name), set).unwrap();
        }
        fs::write(dir.path().join("broken.json"), &set[..900]).unwrap();
        let found = recommend(&[dir.path().to_owned()], false);
        let names = |program: &Program| -> Vec<String> {
            program
                .files
                .iter()
                .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
                .collect()
        };
        let programs: Vec<Vec<String>> = found.programs.iter().map(names).collect();
        assert_eq!(programs, [vec!["a-part9.json", "a-part10.json"], vec!["b.json"], vec!["c-part2-2.json"]]);
        assert_eq!(found.programs[0].report.evidence.sets, 2);
        assert_eq!(found.failures.len(), 1);
        assert!(found.failures[0].to_string().contains("broken.json: is not a TuneMyGC sample set: payload"));
        let all = recommend(&[dir.path().to_owned()], true);
        assert_eq!((all.programs.len(), all.programs[0].report.evidence.sets), (1, 4));
        assert!(serde_json::from_str::<serde_json::Value>(&all.to_json()).is_ok());
        let fifo = dir.path().join("pipe\x1b.json");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let found = recommend(&[fifo], false);
        let error = found.failures[0].to_string();
        assert!(
            error.ends_with("pipe\\u{1b}.json: is not a regular file; write the set to a file first"),
            "{error}"
        );
        for path in ["no", "note.txt"] {
            assert_eq!(recommend(&[dir.path().join(path)], false).failures.len(), usize::from(path == "no"));
        }
    }
}
