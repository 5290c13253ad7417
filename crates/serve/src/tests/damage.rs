//! Damaged recordings, and files that change while they are served.

use std::{fs, os::unix::fs::FileExt as _, sync::Arc};

use gctrace_report::export::{
    profile::{Format, Measure},
    window::Window,
};

use super::{chunks, copies::write, served, shown};
use crate::source::{Source, View};

fn saved(view: &View) -> Vec<u8> {
    let mut bytes = Vec::new();
    view.kept.write(Format::Pprof, &mut bytes).unwrap();
    bytes
}

fn part(source: &Source, from_ms: u64, to_ms: u64) -> Window {
    let at = |ms: u64| Some(source.header.begun_ns + ms * 1_000_000);
    Window { from_ns: at(from_ms), to_ns: at(to_ms), ..Window::default() }
}

/// A damaged recording is served up to the damage, as if it had been cut off there, and its page reports the damage.
#[test]
fn up_to_it() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, cut) = (dir.path().join("whole.gctrace"), dir.path().join("cut.gctrace"));
    write(&whole, 6, None);
    let bytes = fs::read(&whole).unwrap();
    let places = chunks::places(&bytes);
    // The first entries, some in the middle, the last ones, and the end.
    for at in [1, places.len() / 2, places.len() - 2, places.len() - 1] {
        let (begin, end) = places[at];
        let mut damaged = bytes.clone();
        damaged[usize::midpoint(begin, end)] ^= 4;
        fs::write(&whole, &damaged).unwrap();
        fs::write(&cut, &bytes[..begin]).unwrap();
        let ((source, of_damaged), (other, of_cut)) = (served(&whole), served(&cut));
        let why = of_damaged.damage.clone().unwrap();
        assert!(why.starts_with(&format!("the chunk at byte {begin} is damaged: ")), "{why}");
        assert!(of_cut.damage.is_none());
        let (page, _) = shown(&source, &of_damaged, &of_damaged.view, Measure::Gc);
        assert!(page.contains("This recording cannot be read to its end") && page.contains(&why), "{page}");
        assert!(!page.contains("was cut off"), "{page}");
        assert_eq!(of_damaged.last_ns, of_cut.last_ns);
        assert!(saved(&of_damaged.view) == saved(&of_cut.view), "{at}");
        for (from, to) in [(0, 4000), (3000, 9000), (9500, 100_000)] {
            let window = part(&source, from, to);
            let [one, two] = [(&source, &of_damaged), (&other, &of_cut)]
                .map(|(source, whole)| source.view(whole, &window).unwrap());
            assert_eq!((one.figures.cycles, one.processes), (two.figures.cycles, two.processes), "{from}");
            assert!(one.damage.is_none() && saved(&one) == saved(&two), "{at} {from}: {:?}", one.damage);
            assert_eq!(one.figures.lanes.columns.cells, two.figures.lanes.columns.cells);
        }
    }
}

/// Later damage to the file is reported on the pages of the affected parts, for as long as it exists.
#[test]
fn later() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gctrace");
    write(&path, 6, None);
    let bytes = fs::read(&path).unwrap();
    let (source, whole) = served(&path);
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    let window = part(&source, 6500, 12_500);
    let sound = source.with_times(&whole, &window).unwrap();
    assert!(sound.damage.is_none() && sound.figures.cycles > 0);
    for (begin, end) in &chunks::places(&bytes)[2..] {
        let at = usize::midpoint(*begin, *end);
        file.write_all_at(&[bytes[at] ^ 64], at as u64).unwrap();
    }
    let view = source.view(&whole, &window).unwrap();
    assert!(view.damage.as_ref().is_some_and(|why| why.contains(" is damaged: ")), "{:?}", view.damage);
    assert!(view.figures.cycles < sound.figures.cycles);
    let (page, _) = shown(&source, &whole, &view, Measure::Gc);
    assert!(
        page.contains("The file has changed since it was first read") && page.contains("is damaged: "),
        "{page}"
    );
    // What is in memory is not affected.
    assert!(Arc::ptr_eq(&whole.view, &source.view(&whole, &Window::default()).unwrap()));
    file.set_len(bytes.len() as u64 / 2).unwrap();
    let cut = source.view(&whole, &part(&source, 1, 20_000)).unwrap();
    assert!(cut.damage.is_some(), "it has another end");
    file.write_all_at(&bytes, 0).unwrap();
    let again = source.view(&whole, &window).unwrap();
    assert_eq!((&again.damage, again.figures.cycles), (&None, sound.figures.cycles));
}

/// A recording that cannot be shown at all is reported on the page.
#[test]
fn nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gctrace");
    write(&path, 1, None);
    let source = Source::open(&path).unwrap();
    source.failed("it has gone");
    let why = source.whole(std::time::Duration::ZERO).unwrap_err();
    assert!(crate::page::failed(&source, &why).contains("cannot be shown: it has gone."));
}

/// A recording written over the served one is not shown in its place.
#[test]
fn overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let (path, other) = (dir.path().join("x.gctrace"), dir.path().join("other.gctrace"));
    write(&path, 6, None);
    write(&other, 5, Some("other"));
    let (source, whole) = served(&path);
    fs::write(&path, fs::read(&other).unwrap()).unwrap();
    let error = source.view(&whole, &part(&source, 0, 4000)).unwrap_err().to_string();
    assert!(error.contains("another recording was written over the file"), "{error}");
}
