//! Compares every output of a copy with that of its recording.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Read as _,
    path::{Path, PathBuf},
};

use clap::Parser as _;
use serde_json::Value;

use super::*;
use crate::{
    app::{Outcome, report},
    cli::{Args, Subcommand},
    export::{ExportError, Exporter, Outputs},
    model::{Process, seen::Seen},
    trace_file::Recording,
};

/// Rows below a stack that show what its thread waited for.
const WAITS: [&str; 8] = [
    "(sleep)",
    "(process wait)",
    "(ConditionVariable wait)",
    "(Queue wait)",
    "(Mutex wait)",
    "(Monitor wait)",
    "(I/O wait)",
    "(I/O or timeout wait)",
];

const OUTPUTS: [&[&str]; 14] = [
    &["--callgrind"],
    &["--csv"],
    &["--top-lines"],
    &["--lines", "-o"],
    &["--format=jsonl", "-o"],
    &["--folded"],
    &["--flamegraph-of=gc", "--folded"],
    &["--flamegraph-of=alloc", "--folded"],
    &["--flamegraph"],
    &["--pprof"],
    &["--speedscope"],
    &["--firefox"],
    &["--perfetto"],
    &["--tunemygc"],
];

fn run(words: &[&str]) -> Subcommand {
    Args::try_parse_from([&["gctrace"], words].concat()).unwrap().subcommand.unwrap()
}

/// An output of a recording, uncompressed.
fn output(recording: &Path, flags: &[&str], dir: &Path) -> Vec<u8> {
    let file = dir.join("out");
    let file = file.to_str().unwrap();
    let words = [&["report", "-q", recording.to_str().unwrap()], flags, &[file]].concat();
    let words: Vec<&str> =
        words.into_iter().filter(|word| *word != "-q" || !flags.contains(&"--lines")).collect();
    let Subcommand::Report(args) = run(&words) else { panic!("not report") };
    assert_eq!(report(*args).unwrap(), Outcome::Done, "{flags:?}");
    if flags == ["--tunemygc"] {
        let sets =
            std::fs::read_dir(file).unwrap().map(|entry| std::fs::read(entry.unwrap().path()).unwrap());
        let sets = sets.collect::<Vec<_>>().concat();
        std::fs::remove_dir_all(file).unwrap();
        return sets;
    }
    let bytes = std::fs::read(file).unwrap();
    std::fs::remove_file(file).unwrap();
    if !bytes.starts_with(&[0x1f, 0x8b]) {
        return bytes;
    }
    let mut expanded = Vec::new();
    flate2::read::GzDecoder::new(&bytes[..]).read_to_end(&mut expanded).unwrap();
    expanded
}

/// Collects texts that must not be in a copy.
#[derive(Clone, Default)]
struct Secrets(std::rc::Rc<std::cell::RefCell<BTreeSet<String>>>);

impl Exporter for Secrets {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        let mut secrets = self.0.borrow_mut();
        secrets.extend(process.cmdline.iter().flatten().cloned());
        secrets.extend(process.hostname.clone());
        let of = &process.container;
        for text in [&of.id, &of.name, &of.pod, &of.pod_uid, &of.unit, &of.cgroup, &process.origin.container]
        {
            secrets.extend(text.clone());
        }
        secrets.extend(
            process.gc_env.iter().flat_map(BTreeMap::values).filter(|value| value.len() > 6).cloned(),
        );
        secrets.insert(process.origin.service.clone());
        let stack = match seen {
            Seen::Stack(sample) => {
                secrets.insert(sample.comm.to_string());
                Some(&sample.stack)
            }
            Seen::Cycle(cycle) => {
                secrets.insert(cycle.comm.clone());
                cycle.trigger.as_ref()
            }
            Seen::Request(request) => {
                secrets.extend(request.path.clone());
                None
            }
            _ => None,
        };
        for frame in stack.into_iter().flat_map(|stack| stack.iter()) {
            use crate::ruby::frames::FrameKind;
            if matches!(frame.kind, FrameKind::Ruby | FrameKind::CFunction) {
                let name = frame.name.trim_start_matches("block in ");
                let rubys_own = name.contains("<main>") || name == "<top (required)>";
                secrets.extend((!rubys_own).then(|| name.to_owned()));
                secrets.extend(frame.file.iter().filter(|file| file.contains('/')).map(ToString::to_string));
            }
        }
        Ok(())
    }
}

fn goldens() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/recordings");
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|name| name == "gctrace")).collect()
}

/// Asserts that the values are equal except for texts.
fn assert_alike(one: &Value, other: &Value) {
    match (one, other) {
        (Value::String(_), Value::String(_)) => {}
        (Value::Array(one), Value::Array(other)) => {
            assert_eq!(one.len(), other.len());
            one.iter().zip(other).for_each(|(one, other)| assert_alike(one, other));
        }
        (Value::Object(one), Value::Object(other)) => {
            assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>());
            one.values().zip(other.values()).for_each(|(one, other)| assert_alike(one, other));
        }
        (one, other) => assert_eq!(one, other),
    }
}

/// Every output of a copy has the figures of the recording's output, and none of its texts.
#[test]
fn outputs() {
    let dir = tempfile::tempdir().unwrap();
    for golden in goldens() {
        let copy = dir.path().join("copy.gctrace");
        let Subcommand::Scrub(args) =
            run(&["scrub", golden.to_str().unwrap(), "-o", copy.to_str().unwrap(), "--names"])
        else {
            panic!("not scrub");
        };
        assert_eq!(scrub(&args).unwrap(), 0);
        let secrets = Secrets::default();
        let mut recording = Recording::open(&golden).unwrap();
        trace_file::replay(&mut recording, &mut Outputs::new(vec![Box::new(secrets.clone())])).unwrap();
        secrets.0.borrow_mut().extend(recording.header().host.name.clone());
        let secrets: Vec<String> = secrets.0.take().into_iter().filter(|secret| secret.len() > 5).collect();
        assert!(secrets.len() > 5, "{secrets:?}");
        for flags in OUTPUTS {
            let (before, after) = (output(&golden, flags, dir.path()), output(&copy, flags, dir.path()));
            let found =
                |bytes: &[u8], text: &str| bytes.windows(text.len()).any(|part| part == text.as_bytes());
            for secret in &secrets {
                assert!(!found(&after, secret), "{flags:?} {}: {secret}", golden.display());
            }
            let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
            if flags.contains(&"--format=jsonl") {
                assert!(secrets.iter().any(|secret| found(&before, secret)));
                let lines = |bytes| -> Vec<Value> {
                    text(bytes).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
                };
                let (before, after) = (lines(&before), lines(&after));
                assert_eq!(before.len(), after.len());
                before.iter().zip(&after).for_each(|(before, after)| assert_alike(before, after));
            } else if flags.contains(&"--folded") {
                // What a thread waited for is derived from the name of a method; without it, the thread counts as blocked.
                let values = |bytes| -> Vec<u64> {
                    let mut stacks = BTreeMap::<String, u64>::new();
                    for line in text(bytes).lines() {
                        let (path, ns) = line.rsplit_once(' ').unwrap();
                        let named = WAITS.iter().find_map(|wait| path.strip_suffix(wait));
                        let path = named.map_or_else(|| path.to_owned(), |path| format!("{path}(blocked)"));
                        *stacks.entry(path).or_default() += ns.parse::<u64>().unwrap();
                    }
                    let mut values: Vec<u64> = stacks.into_values().collect();
                    values.sort_unstable();
                    values
                };
                assert_eq!(values(&before), values(&after), "{flags:?}");
            } else {
                assert!(!after.is_empty());
            }
        }
    }
}
