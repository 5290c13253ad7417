//! Tests of the cache on Debian's libruby.

use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    sync::OnceLock,
};

use proptest::prelude::*;

use super::{
    Cache, CachedAnalysis, SOURCES,
    dir::{Dir, MAX_ENTRIES},
    entry::{Entry, EntryError},
    key, sources,
};
use crate::{
    damaged::Damaged,
    debian::{libruby, libruby_bytes, libruby_file, libruby_image, libruby_offset},
    elf::{ElfImage, ImageHead},
    ruby::{analyse, may_be_probed},
};

struct Sample {
    file: File,
    head: ImageHead,
    image: ElfImage,
    kept: CachedAnalysis,
    bytes: Vec<u8>,
}

fn sample() -> &'static Sample {
    static SAMPLE: OnceLock<Sample> = OnceLock::new();
    SAMPLE.get_or_init(|| {
        let (file, image) = (libruby_file(), libruby_image());
        let head = ImageHead::read(&file).unwrap();
        let kept = CachedAnalysis { analysis: analyse(&image).unwrap(), witnessed: true };
        let bytes = Entry::new(&file, &head, &image, &kept).unwrap().encode().unwrap();
        Sample { file, head, image, kept, bytes }
    })
}

fn read(bytes: &[u8]) -> Result<CachedAnalysis, EntryError> {
    Entry::decode(bytes)?.verified(&sample().file, &sample().head)
}

/// The entry with another payload and a matching checksum.
fn with_payload(payload: &[u8]) -> Vec<u8> {
    let mut bytes = sample().bytes[..16].to_vec();
    bytes.extend((payload.len() as u32).to_le_bytes());
    bytes.extend(crc32fast::hash(payload).to_le_bytes());
    bytes.extend(payload);
    bytes
}

fn stored(dir: &std::path::Path) -> PathBuf {
    dir.join(Dir::entry_name(&key(&sample().head).unwrap()))
}

/// A stored analysis is read back unchanged.
#[test]
fn round_trip() {
    let sample = sample();
    assert_eq!(read(&sample.bytes).as_ref(), Ok(&sample.kept));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("made/when/needed");
    let mut cache = Cache::at(&path);
    assert_eq!(cache.get(&sample.file, &sample.head), None);
    cache.put(&sample.file, &sample.head, &sample.image, &sample.kept);
    assert_eq!(cache.get(&sample.file, &sample.head).as_ref(), Some(&sample.kept));
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(fs::metadata(stored(&path)).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::read_dir(&path).unwrap().count(), 1);
}

/// The identity is that of the current sources, and a change of any of them changes it.
#[test]
fn identity_follows_the_sources() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    assert_eq!(sources::hash(root).unwrap(), SOURCES);
    let workspace = tempfile::tempdir().unwrap();
    let cruby = workspace.path().join("crates/cruby/src/ruby/sites");
    let copy = workspace.path().join("gctrace-user");
    fs::create_dir_all(&cruby).unwrap();
    fs::create_dir_all(copy.join("src/cache")).unwrap();
    let finder = cruby.join("finder.rs");
    let mut seen = std::collections::BTreeSet::new();
    for text in ["a", "b", ""] {
        fs::write(&finder, text).unwrap();
        seen.insert(sources::hash(&copy).unwrap());
    }
    fs::rename(&finder, cruby.join("other.rs")).unwrap();
    seen.insert(sources::hash(&copy).unwrap());
    assert_eq!(seen.len(), 4);
}

/// Every kind of unusable entry is refused with its own error, and the next store replaces it.
#[test]
fn unusable_entries() {
    let sample = sample();
    let changed = |at: usize| {
        let mut bytes = sample.bytes.clone();
        bytes[at] ^= 1;
        bytes
    };
    assert_eq!(read(b""), Err(EntryError::Foreign));
    assert_eq!(read(&changed(0)), Err(EntryError::Foreign));
    assert_eq!(read(&changed(9)), Err(EntryError::OtherVersion));
    assert_eq!(read(&changed(sample.bytes.len() / 2)), Err(EntryError::Checksum));
    assert!(matches!(read(&sample.bytes[..sample.bytes.len() - 1]), Err(EntryError::Length(..))));
    assert!(matches!(read(&sample.bytes[..12]), Err(EntryError::Length(..))));
    let mut longer = sample.bytes[24..].to_vec();
    longer.push(0);
    assert_eq!(read(&with_payload(&longer)), Err(EntryError::Malformed));

    let dir = tempfile::tempdir().unwrap();
    let mut cache = Cache::at(dir.path());
    for contents in [changed(100), Vec::new(), b"someone else's file".to_vec(), vec![0; 1 << 20]] {
        fs::write(stored(dir.path()), contents).unwrap();
        assert_eq!(cache.get(&sample.file, &sample.head), None);
        cache.put(&sample.file, &sample.head, &sample.image, &sample.kept);
        assert!(cache.get(&sample.file, &sample.head).is_some());
    }
}

/// A file with the same build id and size, but other code or another version, is not the file that was analysed.
#[test]
fn patched_image() {
    let sample = sample();
    let contents = libruby_bytes();
    let version = sample.image.symbol("ruby_version").unwrap().address;
    let site = sample.kept.analysis.sites[0].address;
    let code = sample.image.svma_to_file_offset(site).unwrap().0 as usize;
    let last_digit = libruby_offset(version) + sample.image.c_string(version).unwrap().len() - 1;
    for (at, what) in
        [(code, "code at"), (code + 7, "code at"), (code - 200, "code"), (last_digit, "ruby_version")]
    {
        let damaged = Damaged { bytes: contents, patches: vec![(at, contents[at] ^ 1)] };
        let head = ImageHead::read(&damaged).unwrap();
        let refused = Entry::decode(&sample.bytes).unwrap().verified(&damaged, &head).unwrap_err();
        assert!(refused.to_string().contains(what), "{refused}");
    }
    let other = ImageHead { file_size: 1, ..sample.head.clone() };
    assert!(Entry::decode(&sample.bytes).unwrap().verified(&sample.file, &other).is_err());
    let other = ImageHead { build_id: None, ..sample.head.clone() };
    assert!(Entry::decode(&sample.bytes).unwrap().verified(&sample.file, &other).is_err());
}

/// Directories and files that others can write, links and pipes are not used, and do not block.
#[test]
fn unsafe_places() {
    let sample = sample();
    let dir = tempfile::tempdir().unwrap();
    let open = dir.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    assert!(Cache::at(&open).path().is_none());
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(dir.path(), &link).unwrap();
    assert!(Cache::at(&link).path().is_none());
    assert!(Cache::at(libruby()).path().is_none());

    let mut cache = Cache::at(dir.path());
    let entry = stored(dir.path());
    fs::write(dir.path().join("target"), &sample.bytes).unwrap();
    std::os::unix::fs::symlink("target", &entry).unwrap();
    assert_eq!(cache.get(&sample.file, &sample.head), None);
    cache.put(&sample.file, &sample.head, &sample.image, &sample.kept);
    assert!(fs::symlink_metadata(&entry).unwrap().is_file(), "the link is replaced, not written through");
    fs::set_permissions(&entry, fs::Permissions::from_mode(0o666)).unwrap();
    assert_eq!(cache.get(&sample.file, &sample.head), None);
    fs::remove_file(&entry).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, &entry, rustix::fs::Mode::RUSR).unwrap();
    assert_eq!(cache.get(&sample.file, &sample.head), None);
}

/// If nothing can be written, storing ends and nothing else happens.
#[test]
fn nowhere_to_write() {
    let sample = sample();
    // Not even root can create a directory there.
    let mut cache = Cache::at(std::path::Path::new("/proc/self/cache"));
    assert!(cache.path().is_some());
    cache.put(&sample.file, &sample.head, &sample.image, &sample.kept);
    assert!(cache.path().is_none());
    assert_eq!(cache.get(&sample.file, &sample.head), None);
}

/// The oldest entries are removed first; foreign files stay.
#[test]
fn pruning() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = Dir::open(temporary.path()).unwrap().unwrap();
    let set_age = |name: &str, age: u64| {
        let time = std::time::SystemTime::now() - std::time::Duration::from_secs(age);
        File::options().write(true).open(temporary.path().join(name)).unwrap().set_modified(time).unwrap();
    };
    for number in 0..MAX_ENTRIES as u64 + 10 {
        let name = Dir::entry_name(&number.to_string());
        dir.write(&name, b"x").unwrap();
        set_age(&name, 100_000 - number);
    }
    for (name, age) in [("README", 1_000_000), (".writing-1-a", 7200), (".writing-2-b", 60)] {
        fs::write(temporary.path().join(name), "x").unwrap();
        set_age(name, age);
    }
    dir.prune().unwrap();
    let exists = |name: &str| temporary.path().join(name).exists();
    assert!(!exists(&Dir::entry_name("9")) && exists(&Dir::entry_name("10")));
    assert!(exists("README") && !exists(".writing-1-a") && exists(".writing-2-b"));
    assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), MAX_ENTRIES + 2);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// A changed entry is refused; it never yields a different analysis.
    #[test]
    fn changed_entries(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8), cut in any::<prop::sample::Index>(), truncate in any::<bool>()) {
        let mut bytes = sample().bytes.clone();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if truncate {
            bytes.truncate(cut.index(bytes.len()));
        }
        if bytes != sample().bytes {
            prop_assert!(read(&bytes).is_err());
        }
    }

    /// Even with a matching checksum, an accepted entry has its probes where the file has instructions that may be
    /// probed, and the version of the file.
    #[test]
    fn forged_entries(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let sample = sample();
        let mut payload = sample.bytes[24..].to_vec();
        for (at, value) in changes {
            let at = at.index(payload.len());
            payload[at] = value;
        }
        if let Ok(CachedAnalysis { analysis, .. }) = read(&with_payload(&payload)) {
            prop_assert_eq!(analysis.version, sample.kept.analysis.version);
            prop_assert_eq!(&analysis.build_id, &sample.kept.analysis.build_id);
            for site in &analysis.sites {
                let offset = sample.image.svma_to_file_offset(site.address);
                prop_assert!(offset.is_some());
                let code = sample.image.read_bytes(site.address, 8).unwrap();
                prop_assert!(may_be_probed(code, site.address));
            }
        }
    }

    /// Nothing that is not an entry does harm.
    #[test]
    fn noise(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
        prop_assert!(read(&bytes).is_err());
        prop_assert!(read(&with_payload(&bytes)).is_err());
    }
}
