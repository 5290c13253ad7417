//! Recommendations from sample sets in files.

use std::{
    collections::{BTreeMap, HashSet},
    fs::{self, File},
    hash::{DefaultHasher, Hasher as _},
    io::{self, BufReader},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use serde::Serialize;

use crate::{
    printable::{Printable, printable_json, printable_path},
    tune::{
        self, Episode, Evidence, Fold, InForce, Report, Series, Times,
        history::{self, FORGOTTEN},
    },
    wire::{self, ProtocolError},
};

/// The recommendations for the programs of some sample sets.
#[derive(Debug, Serialize)]
pub struct Recommendations {
    /// One entry per program.
    pub programs: Vec<Program>,
    /// Files and directories that could not be read.
    #[serde(skip)]
    pub failures: Vec<Failure>,
}

/// A program, and the recommendation for it.
#[derive(Debug, Serialize)]
pub struct Program {
    /// The files with its sets.
    pub files: Vec<PathBuf>,
    /// The host name in the last file.
    pub hostname: String,
    /// The pid in the last file, as seen in the process's own namespace.
    pub pid: u64,
    /// The recommendation.
    #[serde(serialize_with = "report")]
    pub report: Report,
}

fn report<S: serde::Serializer>(report: &Report, serializer: S) -> Result<S::Ok, S::Error> {
    report.to_json().serialize(serializer)
}

/// A file or directory that yields no recommendation.
#[derive(Debug, thiserror::Error)]
#[error("{}: {}", printable_path(path), Printable(why))]
pub struct Failure {
    /// The file or directory.
    pub path: PathBuf,
    /// The reason.
    pub why: Why,
}

/// Why a file yields no recommendation.
#[derive(Debug, thiserror::Error)]
pub enum Why {
    /// It cannot be read.
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    /// It is a directory without sample sets.
    #[error("holds no sample sets (files that end in .json)")]
    Empty,
    /// It is a pipe, a device or a socket: reading it could block forever.
    #[error("is not a regular file; write the set to a file first")]
    Special,
    /// It is not a sample set.
    #[error("is not a TuneMyGC sample set: {0}")]
    Protocol(#[from] ProtocolError),
}

impl Recommendations {
    /// The recommendations as one JSON document.
    pub fn to_json(&self) -> String {
        // This cannot fail: only maps with string keys, and paths, which are shown lossily if they are not UTF-8.
        printable_json(&serde_json::to_string_pretty(self).unwrap_or_default()).into_owned()
    }
}

/// Smaller times, in seconds, are relative to the boot of a host, not to the epoch: no machine has this uptime, and no set is older.
pub const EPOCH: f64 = 1e9;

/// Reads sample sets from files, and from directories with files that end in `.json`. The sets of one process (parts
/// that gctrace wrote one after the other) form one program; if `together`, all sets of one series of Ruby do. Evidence is
/// grouped by the settings that Ruby follows: the advice is for those in force last, and considers those in force before. Copies of a set
/// count once.
pub fn recommend(paths: &[PathBuf], together: bool) -> Recommendations {
    let mut failures = Vec::new();
    let mut files = Vec::new();
    for path in paths {
        match list(path) {
            Ok(found) => files.extend(found),
            Err(why) => failures.push(Failure { path: path.clone(), why }),
        }
    }
    // A file listed twice, such as by itself and by its directory, is one set.
    let mut seen = HashSet::new();
    files.retain(|path| seen.insert(fs::canonicalize(path).unwrap_or_else(|_| path.clone())));
    let mut programs: BTreeMap<(String, u64, Series), Sum> = BTreeMap::new();
    let mut contents = HashSet::new();
    for path in files {
        match fold(&path) {
            // A copy under another name, such as from a recording that was reported twice.
            Ok((_, content)) if !contents.insert(content) => {}
            Ok((set, _)) => {
                let key = if together {
                    (String::new(), 0, set.series)
                } else {
                    (process_of(&path), set.header.pid, set.series)
                };
                programs.entry(key).or_default().add(path, set);
            }
            Err(why) => failures.push(Failure { path, why }),
        }
    }
    let programs = programs.into_iter().filter_map(|((_, _, series), sum)| sum.program(series));
    Recommendations { programs: programs.collect(), failures }
}

/// The sets of a program.
#[derive(Default)]
struct Sum {
    files: Vec<PathBuf>,
    hostname: String,
    pid: u64,
    /// The sets by environment: see [`InForce::key`].
    episodes: BTreeMap<String, Timed>,
    /// Whether a set has times that cannot be compared with those of other hosts.
    monotonic: bool,
}

/// The sets under one environment.
#[derive(Default)]
struct Timed {
    episode: Episode,
    /// Start and end of each set.
    spans: Vec<[f64; 2]>,
    /// When the latest of them ends.
    seen: f64,
    /// Number of files read when the last of these sets was added.
    order: usize,
}

impl Sum {
    fn add(&mut self, path: PathBuf, set: Set) {
        self.files.push(path);
        (self.hostname, self.pid) = (set.header.hostname, set.header.pid);
        self.monotonic |= set.last < EPOCH;
        let in_force = InForce::of(&set.evidence.environment, set.series);
        let timed = self.episodes.entry(in_force.key()).or_default();
        let Timed { episode, order, spans, seen } = timed;
        // Files of several processes are not in time order: the environment is that of the latest set.
        if *seen <= set.last {
            episode.evidence.merge(&set.evidence);
        } else {
            let latest = std::mem::take(&mut episode.evidence.environment);
            let refused = episode.evidence.environment_refused;
            episode.evidence.merge(&set.evidence);
            (episode.evidence.environment, episode.evidence.environment_refused) = (latest, refused);
        }
        (episode.in_force, *seen) = (in_force, seen.max(set.last));
        spans.push([set.first, set.last]);
        *order = self.files.len();
    }

    /// The recommendation; `None` if there are no sets.
    fn program(self, series: Series) -> Option<Program> {
        let mut episodes: Vec<Episode> = self
            .episodes
            .into_values()
            .map(|Timed { episode, order, spans, .. }| {
                let times = if self.monotonic { Times::at(order as f64) } else { Times::latest_of(spans) };
                Episode { times, ..episode }
            })
            .collect();
        let all: Vec<Times> = episodes.iter().map(|episode| episode.times).collect();
        let now = episodes.remove(history::in_force(&all)?);
        episodes.sort_by(|a, b| a.times.until.total_cmp(&b.times.until));
        episodes.retain(|other| other.times.until >= now.times.until - FORGOTTEN);
        let report = tune::recommend_after(series, &now, &episodes);
        Some(Program { files: self.files, hostname: self.hostname, pid: self.pid, report })
    }
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
    // Parts in numerical order: `-part10` after `-part9`.
    files.sort_by_key(|path| (process_of(path), part_of(path)));
    Ok(files)
}

/// The evidence of one set.
pub(crate) struct Set {
    pub(crate) header: wire::Header,
    pub(crate) series: Series,
    pub(crate) evidence: Evidence,
    /// The earliest time of a sample, seconds.
    first: f64,
    /// The latest time of a sample, seconds.
    last: f64,
}

/// The length of a file, and a hash of its content.
type Content = (u64, u64);

/// A reader that records the length and the hash of what it reads.
struct Noted<R> {
    inner: R,
    hash: DefaultHasher,
    len: u64,
}

impl<R: io::Read> io::Read for Noted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.hash.write(&buffer[..read]);
        self.len += read as u64;
        Ok(read)
    }
}

fn fold(path: &Path) -> Result<(Set, Content), Why> {
    // Opening a pipe must not wait for a writer.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(Why::Special);
    }
    let mut noted = Noted { inner: file, hash: DefaultHasher::new(), len: 0 };
    let set = fold_from(BufReader::with_capacity(1 << 16, &mut noted))?;
    Ok((set, (noted.len, noted.hash.finish())))
}

pub(crate) fn fold_from(reader: impl io::Read) -> Result<Set, Why> {
    let mut folding = Folding { fold: None, first: f64::INFINITY, last: 0.0 };
    let header = wire::read(reader, &mut folding)?;
    let fold = folding.fold.ok_or(Why::Empty)?;
    let (first, last) = (folding.first.min(folding.last), folding.last);
    Ok(Set { header, series: fold.series(), evidence: fold.finish(), first, last })
}

struct Folding {
    fold: Option<Fold>,
    first: f64,
    last: f64,
}

impl wire::Sink for Folding {
    fn header(&mut self, header: &wire::Header) -> Result<(), String> {
        self.fold = Some(Fold::new(header).map_err(|unsupported| unsupported.to_string())?);
        Ok(())
    }

    fn sample(&mut self, sample: &wire::Sample) -> Result<(), String> {
        self.first = self.first.min(sample.ts);
        self.last = self.last.max(sample.ts);
        self.fold.iter_mut().for_each(|fold| fold.add(sample));
        Ok(())
    }
}

/// The path without the part number (`-partN.json`), so that it is the same for all sets of one process.
fn process_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let stem = name.strip_suffix(".json").unwrap_or(&name);
    let stem = match stem.rsplit_once("-part") {
        Some((process, part)) if part.starts_with(|first: char| first.is_ascii_digit()) => process,
        _ => stem,
    };
    path.with_file_name(stem).to_string_lossy().into_owned()
}

fn part_of(path: &Path) -> u64 {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let part = stem.rsplit_once("-part").map_or("", |(_, part)| part);
    part.split('-').next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parts of one process are one program, in order; a file that is not a set is reported, and hides no other.
    #[test]
    fn programs() {
        let dir = tempfile::tempdir().unwrap();
        let set = include_str!("../../../tests/fixtures/tunemygc_seed.json");
        // Each file has a different content: copies count once.
        let unlike = |number: usize| format!("{}{set}", " ".repeat(number));
        let names = ["a-part10.json", "a-part9.json", "b.json", "c-part2-2.json", "note.txt"];
        for (number, name) in names.into_iter().enumerate() {
            fs::write(dir.path().join(name), unlike(number)).unwrap();
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
        // `-partN` in a directory's name is not a part number.
        let folder = dir.path().join("web-part2");
        fs::create_dir(&folder).unwrap();
        for (number, name) in ["shop.json", "jobs.json"].into_iter().enumerate() {
            fs::write(folder.join(name), unlike(number)).unwrap();
        }
        assert_eq!(recommend(std::slice::from_ref(&folder), false).programs.len(), 2);
        fs::remove_dir_all(&folder).unwrap();
        // A set that is listed twice is one set.
        let twice =
            recommend(&[dir.path().to_owned(), dir.path().join("./b.json"), dir.path().join(".")], true);
        assert_eq!((twice.programs[0].report.evidence.sets, twice.failures.len()), (4, 1));
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

    /// A set of 60 cycles in a heap of 400 000 slots that ends at `end`. Each cycle takes `ms` in the GC. Its memory is 600 MiB plus one MiB
    /// for each of these milliseconds; there are 50 000 objects per cycle, or twice as many if the cycle is short.
    fn set(env: &serde_json::Value, ms: u64, end: f64) -> String {
        let keys = [
            "count",
            "heap_available_slots",
            "heap_live_slots",
            "total_allocated_objects",
            "old_objects",
            "time",
        ];
        let header = serde_json::json!([null, "3.4.8", "0.0", env, "1.0.71", [], {}, keys, "host", 1, 42]);
        let mut set = vec![header];
        for n in 0..60_u64 {
            let info = serde_json::json!({"gc_by": "malloc", "state": "none"});
            let (objects, rss) = (if ms < 200 { 100_000 } else { 50_000 }, (600 + ms) << 20);
            let stat = |time: u64, live: u64| [n + 1, 400_000, live, (n + 1) * objects, 100_000, time];
            let ts = end - 60.0 + n as f64;
            let (begun, done) = (stat(n * ms, 400_000), stat((n + 1) * ms, 200_000));
            set.push(serde_json::json!([ts, rss, rss, "GC_CYCLE_STARTED", begun, info, null, null]));
            set.push(serde_json::json!([ts + 1.0, rss, rss, "GC_CYCLE_ENDED", done, info, null, null]));
        }
        serde_json::Value::Array(set).to_string()
    }

    fn together(sets: &[(&str, String)]) -> Report {
        let dir = tempfile::tempdir().unwrap();
        for (name, set) in sets {
            fs::write(dir.path().join(name), set).unwrap();
        }
        let mut found = recommend(&[dir.path().to_owned()], true);
        assert_eq!((found.programs.len(), found.failures.len()), (1, 0), "{:?}", found.failures);
        found.programs.remove(0).report
    }

    /// A set under two names counts once.
    #[test]
    fn copies() {
        let one = set(&serde_json::json!({}), 300, 1_700_000_000.0);
        let other = set(&serde_json::json!({}), 310, 1_700_000_100.0);
        let report = together(&[("a.json", one.clone()), ("b.json", other), ("c.json", one)]);
        assert_eq!(report.evidence.sets, 2);
    }

    /// Sets under two environments are not merged: the advice is for the one in force last, and reports the effect of the change. Which one is
    /// last depends on the times of samples, not on file names; a variable that Ruby ignores creates no environment of its own.
    #[test]
    fn environments() {
        let (none, ignored) = (serde_json::json!({}), serde_json::json!({"RUBY_GC_MALLOC_LIMIT": "1_000"}));
        let tuned = serde_json::json!({"RUBY_GC_MALLOC_LIMIT": "32m", "RUBY_GC_MALLOC_LIMIT_MAX": "64m"});
        let begin = 1_700_000_000.0;
        let before = [
            ("z1.json", set(&none, 300, begin)),
            ("z2.json", set(&ignored, 310, begin + 100.0)),
            ("z3.json", set(&none, 290, begin + 200.0)),
        ];
        let report = together(&before);
        assert_eq!((report.evidence.sets, &report.change, report.in_force.is_default()), (3, &None, true));
        let value = |report: &Report, name: &str| {
            report
                .speed()
                .settings()
                .find(|change| change.variable == name)
                .map(|change| (change.current, change.value))
        };
        let (current, advised) = value(&report, "RUBY_GC_MALLOC_LIMIT").unwrap();
        assert_eq!((current, advised), (16_777_216.0, tune::Setting::Size(64 << 20)));

        let after = [
            ("a1.json", set(&tuned, 100, begin + 1000.0)),
            ("a2.json", set(&tuned, 110, begin + 1100.0)),
            ("a3.json", set(&tuned, 90, begin + 1200.0)),
        ];
        let report = together(&[before.clone(), after.clone()].concat());
        assert_eq!(report.evidence.sets, 3);
        assert_eq!(report.in_force.key(), "RUBY_GC_MALLOC_LIMIT=33554432 RUBY_GC_MALLOC_LIMIT_MAX=67108864");
        let text = report.to_string();
        let line = |begin: &str| text.lines().map(str::trim_start).find(|line| line.starts_with(begin));
        assert_eq!(
            line("since "),
            Some("since MALLOC_LIMIT=32M MALLOC_LIMIT_MAX=64M (before: 16M 32M), 3 min in 3 sets:"),
            "{text}"
        );
        assert_eq!(line("minors per "), Some("minors per million objects 20 → 10 (-50 %)"), "{text}");
        // From 900 to 700 MiB, rounded as quantiles are.
        for (figure, unit) in [("RSS ", " MiB (-22 %), per set 6"), ("peak RSS ", " MiB (-22 %), per set 6")]
        {
            assert!(line(figure).is_some_and(|line| line.contains(" → 7") && line.contains(unit)), "{text}");
        }
        assert!(
            line("time in GC 3").is_some_and(|line| line.contains(" → 1") && line.contains(" %, per set 9"))
        );
        assert_eq!(line("GC time: "), Some("GC time: clearly less than before"));
        assert_eq!(line("memory: "), Some("memory: clearly less than before"));
        let change = report.change.unwrap();
        assert_eq!((change.sets_before, change.sets_after, change.speed), (3, 3, history::Outcome::Better));
        let share = change.figures.iter().find(|figure| figure.metric == "time in GC, %").unwrap();
        // 300 and 100 ms in each second; quantiles are exact to 1.6 %.
        assert!(
            (share.before / 30.0 - 1.0).abs() < 0.02 && (share.after / 10.0 - 1.0).abs() < 0.02,
            "{share}"
        );

        // A change that made it worse is withdrawn.
        let worse = after.clone().map(|(name, _)| (name, set(&tuned, 900, begin + 1000.0)));
        let report = together(&[before, worse].concat());
        assert!(report.speed().withdrawal.as_ref().is_some_and(|back| back.to.is_default()), "{report}");

        // Times since a host's boot define no order: the order of the files is used.
        let uptime = [("a.json", set(&none, 300, 90_000.0)), ("b.json", set(&tuned, 100, 500.0))];
        assert!(!together(&uptime).in_force.is_default());
    }
}
