//! Location of SQLite's temporary files. The directory is a setting of the whole process, so this test is a program of its own.

use gctrace_collector::store;

/// They are beside the store, and not where a container cannot write.
#[test]
fn they_are_beside_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let _store = store::open(&format!("sqlite:{}", dir.path().join("sets.db").display())).unwrap();
    let other = rusqlite::Connection::open_in_memory().unwrap();
    let mut sorted = other
        .prepare(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 30000) \
             SELECT randomblob(1000) AS text FROM n ORDER BY text",
        )
        .unwrap();
    let mut rows = sorted.query([]).unwrap();
    rows.next().unwrap().unwrap();
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let open: Vec<_> = open.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok()).collect();
    let temporary = |file: &&std::path::PathBuf| file.to_string_lossy().ends_with(" (deleted)");
    let found: Vec<_> = open.iter().filter(temporary).collect();
    assert!(!found.is_empty() && found.iter().all(|file| file.starts_with(dir.path())), "{open:?}");
}
