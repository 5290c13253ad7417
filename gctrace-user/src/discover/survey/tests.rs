//! A survey of files.

use std::process::{Command, Stdio};

use super::*;

fn of_file(path: &Path) -> Survey {
    let subjects = Subjects {
        selection: Selection::default(),
        files: vec![path.to_owned()],
        abilities: Abilities { reads_threads: false, cookies: false },
        debug: DebugInfo::of_servers(None),
    };
    survey(&subjects, &mut Cache::none())
}

/// For a named file, its processes are searched, and processes of other files are not shown. A Ruby with a missing library is not "no Ruby".
#[test]
fn files() {
    let mut ruby = Command::new("/usr/bin/ruby3.1")
        .args(["--disable-gems", "-e", "puts; $stdout.flush; $stdin.gets"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    io::Read::read_exact(ruby.stdout.as_mut().unwrap(), &mut [0]).unwrap();
    let found = of_file(Path::new("/usr/bin/ruby3.1"));
    assert!(found.searched && found.looked_at > 0 && found.misses.is_empty(), "{found:?}");
    assert!(found.processes.iter().any(|process| process.pid == ruby.id()), "{:?}", found.processes);
    assert!(found.images.iter().all(|image| image.named), "{:?}", found.images);
    drop(ruby.stdin.take());
    ruby.wait().unwrap();

    let dir = tempfile::tempdir().unwrap();
    let other = dir.path().join("ruby9.1");
    let mut bytes = std::fs::read("/usr/bin/ruby3.1").unwrap();
    let soname = b"libruby-3.1.so.3.1\0";
    let at = bytes.windows(soname.len()).position(|window| window == soname).unwrap();
    bytes[at + 8] = b'9';
    std::fs::write(&other, bytes).unwrap();
    let found = of_file(&other);
    let miss = &found.misses[0];
    assert!(miss.reason.contains("it loads libruby-9.1.so.3.1, which was not found"), "{}", miss.reason);
    assert!(!miss.reason.contains("  "), "{}", miss.reason);
    assert!(miss.denied && !found.searched && found.images.is_empty());
}
