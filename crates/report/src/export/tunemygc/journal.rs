//! Drafts: on-disk copies of sets that are not in the spool yet. A gctrace that is killed loses less than a minute of them.
//!
//! A draft is a text file: a line with the header, then one line per sample. It is locked until the complete set is in
//! the spool, and then removed. An unlocked draft was left by a run that was killed; the next run sends it. A set in
//! the spool has the name of its draft: if a killed run left both, the draft is not sent again.

use std::{
    fs::File,
    io::{self, Write as _},
    os::unix::fs::MetadataExt as _,
    path::Path,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use gctrace_tunemygc::printable::printable_json;

use super::Header;
use crate::private_dir::PrivateDir;

/// Maximum size of a draft read, bytes; gctrace writes no larger one.
pub(super) const MAX_SET: usize = 256 << 20;
/// The extension of complete sets.
pub(super) const WHOLE: &str = "json";
/// The extension of drafts.
const DRAFT: &str = "draft";
/// Maximum number of names tried for a new draft.
const MOST_USED: u32 = 1000;

/// The directory where drafts are written.
#[derive(Debug)]
pub(super) struct Journal {
    dir: Arc<PrivateDir>,
    made: u64,
}

/// The part of a set that is on disk.
#[derive(Debug)]
pub(super) struct Draft {
    dir: Arc<PrivateDir>,
    /// The file, locked.
    file: File,
    /// Name without extension.
    stem: String,
    /// Number of samples in the file.
    samples: usize,
}

impl Journal {
    /// A journal in the directory of a spool.
    pub(super) fn new(dir: PrivateDir) -> Self {
        Self { dir: Arc::new(dir), made: 0 }
    }

    /// Appends the new samples of a set to its draft, which is created if necessary. After an error the draft is gone. `to_json`: a sample
    /// on the wire.
    pub(super) fn append<S>(
        &mut self,
        header: &Header,
        samples: &[S],
        to_json: fn(&S) -> String,
        draft: &mut Option<Draft>,
    ) -> io::Result<()> {
        if samples.len() <= draft.as_ref().map_or(0, |draft| draft.samples) {
            return Ok(());
        }
        let mut current = match draft.take() {
            Some(draft) => draft,
            None => self.begin(header)?,
        };
        let mut lines = String::new();
        for sample in samples.iter().skip(current.samples) {
            lines.push(',');
            lines.push_str(&printable_json(&to_json(sample)));
            lines.push('\n');
        }
        if let Err(error) = current.file.write_all(lines.as_bytes()) {
            current.discard();
            return Err(error);
        }
        current.samples = samples.len();
        *draft = Some(current);
        Ok(())
    }

    fn begin(&mut self, header: &Header) -> io::Result<Draft> {
        let (mut file, stem) = self.unused()?;
        let header = format!("[{}\n", printable_json(&header.to_json()));
        if let Err(error) = file.write_all(header.as_bytes()) {
            self.dir.remove(draft_name(&stem).as_ref());
            return Err(error);
        }
        Ok(Draft { dir: Arc::clone(&self.dir), file, stem, samples: 0 })
    }

    /// Creates a locked draft; returns it and its name without extension. A run with our pid that was just killed may have left drafts
    /// that were still locked when this run looked for them (in a container every run has pid 1): those are left for the next run.
    fn unused(&mut self) -> io::Result<(File, String)> {
        for _ in 0..MOST_USED {
            self.made += 1;
            let stem = unique_stem(self.made);
            let file = self.dir.lock_file(&draft_name(&stem))?;
            if file.try_lock().is_err() {
                continue;
            }
            let there = file.metadata()?;
            // Otherwise another run removed it as an abandoned draft.
            if there.len() == 0 && there.nlink() > 0 {
                return Ok((file, stem));
            }
        }
        Err(io::Error::other(format!("{MOST_USED} names of drafts are in use")))
    }
}

impl Draft {
    /// The name of its set in the spool, without extension.
    pub(super) fn stem(&self) -> &str {
        &self.stem
    }

    /// Removes the draft.
    pub(super) fn discard(self) {
        // Before the lock is released.
        self.dir.remove(draft_name(&self.stem).as_ref());
        drop(self.file);
    }
}

/// The name of a set without extension. No other run of any pid uses it, and names sort by time.
pub(super) fn unique_stem(made: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    format!("{now:020}-{}-{made}", std::process::id())
}

fn draft_name(stem: &str) -> String {
    format!("{stem}.{DRAFT}")
}

/// Passes on the drafts left by killed runs as sets: the name without extension, and the text. A partially written
/// last line is cut off. A draft is removed once `keep` has succeeded.
pub(super) fn left(dir: &PrivateDir, mut keep: impl FnMut(&str, &str) -> io::Result<()>) -> io::Result<()> {
    let files = dir.files()?;
    for (name, _) in &files {
        let path = Path::new(&name);
        if path.extension().is_none_or(|extension| extension != DRAFT) {
            continue;
        }
        let Some(stem) = name.to_str().and_then(|name| name.strip_suffix(DRAFT)?.strip_suffix('.')) else {
            continue;
        };
        let Ok(file) = dir.lock_file(&draft_name(stem)) else { continue };
        if file.try_lock().is_err() {
            continue;
        }
        let whole = format!("{stem}.{WHOLE}");
        let is_whole = dir.read(&whole, 0).is_ok_and(|there| there.is_some());
        if !is_whole
            && let Ok(Some(bytes)) = dir.read(name, MAX_SET)
            && let Some(set) = set(&bytes)
        {
            keep(stem, &set)?;
        }
        dir.remove(name);
    }
    Ok(())
}

/// The set of a draft, with its samples in order of time; `None` if it has no samples.
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
    use crate::export::tunemygc::{EventName, Sample, SampleSet, spool::Spool};
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

    fn append(journal: &mut Journal, samples: usize, draft: &mut Option<Draft>) -> io::Result<()> {
        let set = set_of(samples);
        journal.append(&set.header, &set.samples, Sample::to_json, draft)
    }

    struct Count(usize);
    impl wire::Sink for Count {
        fn header(&mut self, _: &Header) -> Result<(), String> {
            Ok(())
        }
        fn sample(&mut self, _: &Sample) -> Result<(), String> {
            self.0 += 1;
            Ok(())
        }
    }

    fn samples(set: &[u8]) -> usize {
        let mut count = Count(0);
        wire::read_slice(set, &mut count).unwrap();
        count.0
    }

    fn sets_left(dir: &PrivateDir) -> Vec<String> {
        let mut sets = Vec::new();
        left(dir, |_, set| {
            sets.push(set.to_owned());
            Ok(())
        })
        .unwrap();
        sets
    }

    /// Sets of a killed run are sent by the next run; sets that another run still writes, or that were handed over, are not.
    #[test]
    fn killed() {
        let base = tempfile::tempdir().unwrap();
        let dir = || PrivateDir::create(base.path()).unwrap().child("spool").unwrap();
        let mut journal = Journal::new(dir());
        let (mut killed, mut running, mut sent, mut empty) = (None, None, None, None);
        append(&mut journal, 3, &mut killed).unwrap();
        append(&mut journal, 3, &mut killed).unwrap();
        append(&mut journal, 5, &mut killed).unwrap();
        append(&mut journal, 2, &mut running).unwrap();
        append(&mut journal, 2, &mut sent).unwrap();
        append(&mut journal, 0, &mut empty).unwrap();
        assert!(empty.is_none());
        sent.unwrap().discard();
        // The run was killed while writing.
        let mut cut = killed.unwrap();
        cut.file.write_all(b",[5.0,nu").unwrap();
        drop(cut);
        let mut spool = Spool::open(base.path(), "spool", 1 << 20).unwrap();
        assert_eq!(spool.len(), 1);
        assert_eq!(samples(&spool.front().unwrap()), 5);
        drop(spool);
        // The draft is sent once its run has ended, too; and no set is sent twice.
        drop(running);
        let mut spool = Spool::open(base.path(), "spool", 1 << 20).unwrap();
        assert_eq!(spool.len(), 2);
        spool.pop();
        assert_eq!(samples(&spool.front().unwrap()), 2);
        assert!(sets_left(&dir()).is_empty());
    }

    /// A draft that cannot be turned into a set, for example on a full disk, does not end the run and stays for the next one.
    #[test]
    fn no_room() {
        let base = tempfile::tempdir().unwrap();
        let dir = PrivateDir::create(base.path()).unwrap().child("spool").unwrap();
        let mut draft = None;
        append(&mut Journal::new(dir), 3, &mut draft).unwrap();
        let in_the_way = base.path().join("spool").join(format!("{}.{WHOLE}", draft.unwrap().stem()));
        std::fs::create_dir(&in_the_way).unwrap();
        let open = || Spool::open(base.path(), "spool", 1 << 20).unwrap();
        assert_eq!(open().len(), 0);
        std::fs::remove_dir(&in_the_way).unwrap();
        let mut spool = open();
        assert_eq!(samples(&spool.front().unwrap()), 3);
    }

    /// A run with the pid of a killed run that has not exited yet leaves that run's draft alone, before and after it exits.
    #[test]
    fn same_pid() {
        let base = tempfile::tempdir().unwrap();
        let dir = || PrivateDir::create(base.path()).unwrap().child("spool").unwrap();
        let mut before = None;
        append(&mut Journal::new(dir()), 4, &mut before).unwrap();
        let (mut first, mut second) = (None, None);
        let mut journal = Journal::new(dir());
        assert!(sets_left(&dir()).is_empty());
        append(&mut journal, 1, &mut first).unwrap();
        drop(before);
        let mut journal = Journal { made: 0, ..journal };
        append(&mut journal, 2, &mut second).unwrap();
        drop((first, second));
        let mut all: Vec<usize> = sets_left(&dir()).iter().map(|set| samples(set.as_bytes())).collect();
        all.sort_unstable();
        assert_eq!(all, [1, 2, 4]);
    }

    /// A draft exists until its set has been kept. If a run was killed in between, the set is sent once.
    #[test]
    fn kept_once() {
        let base = tempfile::tempdir().unwrap();
        let dir = PrivateDir::create(base.path()).unwrap();
        let mut draft = None;
        append(&mut Journal::new(PrivateDir::create(base.path()).unwrap()), 4, &mut draft).unwrap();
        drop(draft);
        let full = left(&dir, |_, _| Err(io::Error::other("full")));
        assert_eq!(full.unwrap_err().to_string(), "full");
        let mut kept = Vec::new();
        left(&dir, |stem, set| {
            kept.push((stem.to_owned(), samples(set.as_bytes())));
            Ok(())
        })
        .unwrap();
        let [(stem, 4)] = &kept[..] else { panic!("{kept:?}") };
        assert_eq!(dir.files().unwrap().len(), 0);
        // The run was killed after the set was complete, and before its draft was removed.
        for extension in [WHOLE, DRAFT] {
            dir.write(&format!("{stem}.{extension}"), b"[h\n,[1.0]\n").unwrap();
        }
        assert!(sets_left(&dir).is_empty());
        let names: Vec<_> = dir.files().unwrap().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, [format!("{stem}.{WHOLE}").as_str()]);
    }

    /// The content of drafts may be anything.
    #[test]
    fn damaged() {
        for text in ["", "\n", "[header\n", "[header", "\u{0}"] {
            assert_eq!(set(text.as_bytes()), None, "{text:?}");
        }
        assert_eq!(set(b"[\xff\n,x\n"), None);
        assert_eq!(set(b"[h\n,a\n,b").as_deref(), Some("[h,a]"));
        // Units of work are written when they end.
        let late = b"[h\n,[10.5,1]\n,[9.25,2]\n,[9.25,3]\n";
        assert_eq!(set(late).as_deref(), Some("[h,[9.25,2],[9.25,3],[10.5,1]]"));
    }
}
