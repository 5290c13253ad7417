//! Runs that are shown while in progress: a committed recording is passed to the exporters of a live page.

use std::{
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use gctrace_report::{
    export::{Outputs, profile::Measure, window::Window},
    trace_file::{self, LiveRecorder, Recording},
    words::plural,
};

use super::{HOSTILE, copies::write, served};
use crate::{
    Asked,
    live::{Live, Rolling, Watcher},
    page,
    source::Source,
    wanted::Wanted,
};

const S: u64 = 1_000_000_000;
/// More bytes than any of these recordings has.
const BYTES: u64 = 64 << 20;

/// The live state after a run whose events are those of this recording.
fn live(path: &Path, keep_ns: u64, bytes: u64) -> Live {
    let mut recording = Recording::open(path).unwrap();
    let header = recording.header().clone();
    let rolling = Arc::new(Mutex::new(Rolling::new(header.begun_ns, keep_ns)));
    let (recorder, kept) = LiveRecorder::new(header, keep_ns, bytes);
    let live = Live::new(kept, Arc::clone(&rolling));
    let mut outputs = Outputs::new(vec![Box::new(recorder), Box::new(Watcher(rolling))]);
    trace_file::replay(&mut recording, &mut outputs).unwrap();
    assert!(outputs.failures().is_empty(), "{:?}", outputs.failures());
    live
}

fn wanted(asked: Asked, window: Window) -> Wanted {
    Wanted { asked, window, of: Measure::Gc, other: None }
}

fn shown(live: &Live, source: &Source, wanted: &Wanted) -> String {
    let whole = source.whole(Duration::ZERO).unwrap().unwrap();
    let view = source.view(&whole, &wanted.window).unwrap();
    let drawn = view.graphs.of(&view.kept, wanted.of).unwrap();
    page::page(source, &whole, &view, wanted, &drawn, (Some(&live.now()), None))
}

/// If nothing was dropped, everything is present: figures, files and times equal those of the recording of the same run.
#[test]
fn all_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gctrace");
    write(&path, 4, None);
    let (file, whole) = served(&path);
    let live = live(&path, 600 * S, BYTES);
    let source = live.source().unwrap();
    assert!(Arc::ptr_eq(&source, &live.source().unwrap()), "nothing new has come");
    let kept = source.whole(Duration::ZERO).unwrap().unwrap();
    let (mine, other) = (&kept.view.figures, &whole.view.figures);
    assert_eq!(
        (mine.cycles, mine.samples, mine.threads.len()),
        (other.cycles, other.samples, other.threads.len())
    );
    let now = live.now();
    assert_eq!((now.cycles, now.majors, now.processes), (other.cycles, other.majors, 0));
    assert!(now.state.ended && now.state.expired + now.state.displaced == 0 && !now.state.is_short);
    assert!(now.cycles >= now.columns.sum().cycles && now.columns.sum().cycles > 0, "{now:?}");
    assert_eq!(now.columns.width_ns, S);
    // The same seconds after the start select the same part.
    let at = |seconds: u64| Some(file.header.begun_ns + seconds * S);
    let window = Window { from_ns: at(3), to_ns: at(5), ..Window::default() };
    let [a, b] = [(&file, &whole), (&*source, &kept)].map(|(of, whole)| of.view(whole, &window).unwrap());
    assert!(a.figures.cycles > 0 && a.figures.cycles == b.figures.cycles);
    assert_eq!(a.figures.lanes.columns.cells, b.figures.lanes.columns.cells);
    let text = shown(&live, &source, &wanted(Asked::default(), window));
    for words in [
        "data-state=\"ended\"",
        &format!("data-cycles=\"{}\"", other.cycles),
        "All of it is kept",
        "class=\"chosen\"",
        "Tracing has ended",
        "id=\"part\"",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    for words in ["A flight recorder wrote", "cut off", "damaged", "no longer kept", "data-moves"] {
        assert!(!text.contains(words), "{words}: {text}");
    }
}

/// Events older than the kept time are dropped, which is stated; the kept time has exactly what the whole run has of that time.
#[test]
fn dropped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gctrace");
    write(&path, 20, None);
    let (file, whole) = served(&path);
    for (keep_ns, bytes, is_short) in [(20 * S, BYTES, false), (600 * S, 30_000, true)] {
        let live = live(&path, keep_ns, bytes);
        let now = live.now();
        let state = now.state;
        assert!(state.from_ns > now.begun_ns && state.is_short == is_short, "{state:?}");
        assert_eq!((state.expired > 0, state.displaced > 0), (!is_short, is_short), "{state:?}");
        let source = live.source().unwrap();
        let kept = source.whole(Duration::ZERO).unwrap().unwrap();
        let window = Window { from_ns: Some(state.from_ns), ..Window::default() };
        let [a, b] = [(&file, &whole), (&*source, &kept)].map(|(of, whole)| of.view(whole, &window).unwrap());
        assert!(b.figures.cycles > 0 && b.figures.cycles < whole.view.figures.cycles, "{}", b.figures.cycles);
        assert_eq!(a.figures.cycles, b.figures.cycles);
        assert_eq!((a.figures.samples, a.figures.cpu_ns), (b.figures.samples, b.figures.cpu_ns));
        assert_eq!(now.cycles, whole.view.figures.cycles, "all since the begin");
        // What is drawn is no older than the kept time, and the glance covers its own seconds.
        assert!(
            now.columns.from_ns + 2 * now.columns.width_ns >= now.at_ns.saturating_sub(keep_ns),
            "{now:?}"
        );
        assert!(now.last.cycles > 0 && now.last.cycles < now.cycles && now.last_ns < keep_ns, "{now:?}");
        let text = shown(&live, &source, &wanted(Asked::default(), Window::default()));
        assert!(text.contains("older records were dropped"), "{text}");
        let share = gctrace_pages::words::percent(now.last.pause_ns as f64 / now.last_ns as f64);
        let cycles = format!("{}, {} major", plural(now.last.cycles, "cycle"), now.last.majors);
        for (fact, figure) in [("GC", cycles), ("GC, share of the time", share)] {
            let begins = text.find(&format!(">{fact}<")).unwrap_or_else(|| panic!("no {fact}: {text}"));
            let shown = text[begins + 1..].split_inclusive('>').take(3).collect::<String>();
            assert!(shown.contains(&format!(">{figure}<")), "not {figure} of the last seconds: {shown}");
        }
        assert_eq!(text.contains("--keep-size"), is_short, "{text}");
        assert!(!text.contains("no longer kept"), "{text}");
        // Parts before the kept time, and parts that overlap its start.
        let at = |ns: u64| Some(now.begun_ns + ns);
        let gone = Window { from_ns: at(0), to_ns: at(S), ..Window::default() };
        let text = shown(&live, &source, &wanted(Asked::default(), gone));
        assert!(text.contains("This part is no longer kept"), "{text}");
        let cut = Window { from_ns: at(S), ..Window::default() };
        let text = shown(&live, &source, &wanted(Asked::default(), cut));
        assert!(text.contains("The beginning of this part is no longer kept"), "{text}");
    }
}

/// No event has arrived yet; names are escaped.
#[test]
fn empty_and_hostile() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gctrace");
    write(&path, 2, Some(HOSTILE));
    let header = Recording::open(&path).unwrap().header().clone();
    let rolling = Arc::new(Mutex::new(Rolling::new(header.begun_ns, S)));
    let (_recorder, kept) = LiveRecorder::new(header, S, BYTES);
    let early = Live::new(kept, rolling);
    let last = Asked { last: Some(HOSTILE.to_owned()), ..Asked::default() };
    let begun = shown(&early, &early.source().unwrap(), &wanted(last, Window::default()));
    assert!(begun.contains("The first figures come after a second"), "{begun}");
    assert!(begun.contains("No activity of a process") && begun.contains("data-moves=\"yes\""), "{begun}");
    let late = live(&path, 600 * S, BYTES);
    let pids = Asked { pids: vec![HOSTILE.to_owned()], ..Asked::default() };
    let full = shown(&late, &late.source().unwrap(), &wanted(pids, Window::default()));
    assert!(full.matches("&lt;script&gt;alert(1)").count() > 10, "{full}");
    for text in [begun, full] {
        let own = ["brush.js", "live.js"].map(|script| format!("<script src=\"{script}\" defer></script>"));
        assert!(own.iter().all(|script| text.matches(script.as_str()).count() == 1), "{text}");
        assert_eq!(text.matches("<script").count(), 2, "{text}");
        assert!(!text.contains("<img") && !text.contains(['\u{202e}', '\u{1b}']), "{text}");
        assert!(!text.contains("\"'>") && !text.contains("NaN"), "{text}");
    }
}

/// Times that no clock has are harmless.
#[test]
fn extremes() {
    for (origin_ns, keep_ns) in [(0, 1), (5, u64::MAX / 2), (u64::MAX - 3, 600 * S)] {
        let mut rolling = Rolling::new(origin_ns, keep_ns);
        let header = Recording::open(Path::new(super::GOLDEN)).unwrap().header().clone();
        let (_, kept) = LiveRecorder::new(header, keep_ns, BYTES);
        for now_ns in [0, 1, origin_ns, origin_ns.saturating_add(700 * S), u64::MAX / 4, u64::MAX] {
            rolling.reach(now_ns);
            let now = rolling.now(kept.state());
            assert!(now.columns.cells.len() <= crate::columns::COLUMNS, "{origin_ns} {now_ns}");
        }
    }
}
