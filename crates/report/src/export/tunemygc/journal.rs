//! Sets that are still growing, in the spool: a gctrace that is killed loses less than a minute of them.
//!
//! A draft is a text file: a line with the header, then one for each sample. It is locked as long as its set grows, and removed
//! when the set is handed over whole. A draft that is not locked was left by a run that was killed: the next run sends it.

use std::{
    fs::File,
    io::{self, Write as _},
    os::unix::fs::MetadataExt as _,
    path::Path,
};

use gctrace_tunemygc::printable::printable_json;

use super::{SampleSet, spool::MAX_SET};
use crate::private_dir::PrivateDir;

/// The extension of drafts.
const DRAFT: &str = "draft";
/// Names that may be in use already.
const MOST_USED: u32 = 1000;

/// Where drafts are written.
#[derive(Debug)]
pub(super) struct Journal {
    dir: PrivateDir,
    made: u64,
}

/// A set on disk, as far as it is there.
#[derive(Debug)]
pub(super) struct Draft {
    /// Locked.
    file: File,
    name: String,
    /// Samples in it.
    samples: usize,
}

impl Journal {
    /// In the directory of a spool.
    pub(super) fn new(dir: PrivateDir) -> Self {
        Self { dir, made: 0 }
    }

    /// Writes what is new in a set to its draft, which is made if there is none. After an error the draft is gone.
    pub(super) fn append(&mut self, set: &SampleSet, draft: &mut Option<Draft>) -> io::Result<()> {
        if set.samples.len() <= draft.as_ref().map_or(0, |draft| draft.samples) {
            return Ok(());
        }
        let mut current = match draft.take() {
            Some(draft) => draft,
            None => self.begin(set)?,
        };
        let mut lines = String::new();
        for sample in set.samples.iter().skip(current.samples) {
            lines.push(',');
            lines.push_str(&printable_json(&sample.to_json()));
            lines.push('\n');
        }
        if let Err(error) = current.file.write_all(lines.as_bytes()) {
            self.discard(current);
            return Err(error);
        }
        current.samples = set.samples.len();
        *draft = Some(current);
        Ok(())
    }

    fn begin(&mut self, set: &SampleSet) -> io::Result<Draft> {
        let (mut file, name) = self.unused()?;
        let header = format!("[{}\n", printable_json(&set.header.to_json()));
        if let Err(error) = file.write_all(header.as_bytes()) {
            self.dir.remove(name.as_ref());
            return Err(error);
        }
        Ok(Draft { file, name, samples: 0 })
    }

    /// A new draft, locked. A run of our pid that was killed a moment ago may have left some that were still locked when
    /// this run looked for them (in a container every run has the pid 1): those are for the next run.
    fn unused(&mut self) -> io::Result<(File, String)> {
        for _ in 0..MOST_USED {
            self.made += 1;
            let name = format!("{}-{}.{DRAFT}", std::process::id(), self.made);
            let file = self.dir.lock_file(&name)?;
            if file.try_lock().is_err() {
                continue;
            }
            let there = file.metadata()?;
            // Another run removed it as an abandoned draft.
            if there.len() == 0 && there.nlink() > 0 {
                return Ok((file, name));
            }
        }
        Err(io::Error::other(format!("{MOST_USED} names of drafts are in use")))
    }

    /// Removes a draft.
    pub(super) fn discard(&self, draft: Draft) {
        // Before its lock is gone.
        self.dir.remove(draft.name.as_ref());
        drop(draft.file);
    }
}

/// Takes the drafts that a killed run left, as sets. What was being written when it was killed is cut off.
pub(super) fn left(dir: &PrivateDir) -> io::Result<Vec<String>> {
    let mut sets = Vec::new();
    for (name, _) in dir.files()? {
        let path = Path::new(&name);
        if path.extension().is_none_or(|extension| extension != DRAFT) {
            continue;
        }
        let Some(text) = name.to_str() else { continue };
        let Ok(file) = dir.lock_file(text) else { continue };
        if file.try_lock().is_err() {
            continue;
        }
        if let Ok(Some(bytes)) = dir.read(&name, MAX_SET) {
            sets.extend(set(&bytes));
        }
        dir.remove(&name);
    }
    Ok(sets)
}

/// The set of a draft, with its samples in the order of their times; `None` if there is no sample in it.
fn set(draft: &[u8]) -> Option<String> {
    let end = draft.iter().rposition(|byte| *byte == b'\n')?;
    let text = std::str::from_utf8(&draft[..end]).ok()?;
    let (header, samples) = text.split_once('\n')?;
    let time = |line: &str| line.strip_prefix(",[")?.split(',').next()?.parse::<f64>().ok();
    let mut samples: Vec<(f64, &str)> =
        samples.split('\n').map(|line| (time(line).unwrap_or_default(), line)).collect();
    samples.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let samples: String = samples.into_iter().map(|(_, line)| line).collect();
    Some(format!("{header}{samples}]"))
}

#[cfg(test)]
mod tests {
    use gctrace_tunemygc::wire;
    use serde_json::Map;

    use super::*;
    use crate::export::tunemygc::{EventName, Header, Sample, spool::Spool};
    use crate::export::upload::engine::Backlog as _;

    fn set_of(samples: usize) -> SampleSet {
        let header = Header {
            token: Some("t".to_owned()),
            ruby_version: "3.4.1".to_owned(),
            rails_version: "0.0".to_owned(),
            gc_env: Map::new(),
            agent_version: "1".to_owned(),
            gc_opts: Vec::new(),
            gc_constants: Map::new(),
            stat_keys: vec!["count".to_owned()],
            spy_ids: None,
            hostname: "a\nb".to_owned(),
            ppid: 1,
            pid: 7,
        };
        let sample = |at: usize| Sample {
            ts: at as f64,
            peak_rss: None,
            current_rss: None,
            event: EventName::GcCycleStarted,
            stat: vec![at as u64],
            latest_gc_info: Map::new(),
            meta: None,
            thread_id: None,
        };
        SampleSet { header, samples: (0..samples).map(sample).collect() }
    }

    struct Count(usize);
    impl wire::Sink for Count {
        fn header(&mut self, _: &Header) -> Result<(), String> {
            Ok(())
        }
        fn sample(&mut self, _: Sample) -> Result<(), String> {
            self.0 += 1;
            Ok(())
        }
    }

    fn samples(set: &[u8]) -> usize {
        let mut count = Count(0);
        wire::read_slice(set, &mut count).unwrap();
        count.0
    }

    /// What a killed run had written is sent by the next one; what another run still writes, and what was handed over, is not.
    #[test]
    fn killed() {
        let base = tempfile::tempdir().unwrap();
        let dir = || PrivateDir::create(base.path()).unwrap().child("spool").unwrap();
        let mut journal = Journal::new(dir());
        let (mut killed, mut running, mut sent, mut empty) = (None, None, None, None);
        journal.append(&set_of(3), &mut killed).unwrap();
        journal.append(&set_of(3), &mut killed).unwrap();
        journal.append(&set_of(5), &mut killed).unwrap();
        journal.append(&set_of(2), &mut running).unwrap();
        journal.append(&set_of(2), &mut sent).unwrap();
        journal.append(&set_of(0), &mut empty).unwrap();
        assert!(empty.is_none());
        journal.discard(sent.unwrap());
        // It was killed while it wrote.
        let mut cut = killed.unwrap();
        cut.file.write_all(b",[5.0,nu").unwrap();
        drop(cut);
        let mut spool = Spool::open(base.path(), "spool", 1 << 20).unwrap();
        assert_eq!(spool.len(), 1);
        assert_eq!(samples(&spool.front().unwrap()), 5);
        drop(spool);
        // Once its run is gone, too; and no set is sent twice.
        drop(running);
        let mut spool = Spool::open(base.path(), "spool", 1 << 20).unwrap();
        assert_eq!(spool.len(), 2);
        spool.pop();
        assert_eq!(samples(&spool.front().unwrap()), 2);
        assert!(left(&dir()).unwrap().is_empty());
    }

    /// A run with the pid of one that was killed and is not gone yet leaves its draft alone, before and after it is gone.
    #[test]
    fn same_pid() {
        let base = tempfile::tempdir().unwrap();
        let dir = || PrivateDir::create(base.path()).unwrap().child("spool").unwrap();
        let mut before = None;
        Journal::new(dir()).append(&set_of(4), &mut before).unwrap();
        let (mut first, mut second) = (None, None);
        let mut journal = Journal::new(dir());
        assert!(left(&dir()).unwrap().is_empty());
        journal.append(&set_of(1), &mut first).unwrap();
        drop(before);
        let mut journal = Journal { made: 0, ..journal };
        journal.append(&set_of(2), &mut second).unwrap();
        drop((first, second));
        let mut all: Vec<usize> = left(&dir()).unwrap().iter().map(|set| samples(set.as_bytes())).collect();
        all.sort_unstable();
        assert_eq!(all, [1, 2, 4]);
    }

    /// Drafts are whatever is there.
    #[test]
    fn damaged() {
        for text in ["", "\n", "[header\n", "[header", "\u{0}"] {
            assert_eq!(set(text.as_bytes()), None, "{text:?}");
        }
        assert_eq!(set(b"[\xff\n,x\n"), None);
        assert_eq!(set(b"[h\n,a\n,b").as_deref(), Some("[h,a]"));
        // Units of work are written when they are over.
        let late = b"[h\n,[10.5,1]\n,[9.25,2]\n,[9.25,3]\n";
        assert_eq!(set(late).as_deref(), Some("[h,[9.25,2],[9.25,3],[10.5,1]]"));
    }
}
