//! Pages and files of recordings that are derived from a committed one.

mod chunks;
mod copies;
mod damage;
mod diff;
mod fuzz;
mod live;
mod speed;
mod threads;

use std::{path::Path, sync::Arc, time::Duration};

use gctrace_report::export::{
    profile::{Format, Graph, Measure},
    window::Window,
};

use copies::{LIFE, write};

use crate::{
    Asked, graph, page,
    source::{Source, View, Whole},
    wanted::Wanted,
};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/recordings/3.4.gctrace");
const HOSTILE: &str =
    "</title></script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>\u{202e}\u{1b}[2J";

fn served(path: &Path) -> (Source, Arc<Whole>) {
    let source = Source::open(path).unwrap();
    source.read().unwrap();
    let whole = source.whole(Duration::ZERO).unwrap().unwrap();
    (source, whole)
}

fn shown(source: &Source, whole: &Whole, view: &View, of: Measure) -> (String, String) {
    let drawn = view.graphs.of(&view.kept, of).unwrap();
    let asked = Asked { pids: vec![HOSTILE.to_owned()], ..Asked::default() };
    let wanted = Wanted { asked, window: view.window.clone(), of, other: None };
    (
        page::page(source, whole, view, &wanted, &drawn, (None, None)),
        String::from_utf8(drawn.svg.clone()).unwrap(),
    )
}

/// Names of everything are escaped: on the page, in graphs, and in errors about a request.
#[test]
fn hostile() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(format!("{}.gctrace", HOSTILE.replace('/', "\u{2215}")));
    write(&path, 1, Some(HOSTILE));
    let (source, whole) = served(&path);
    let mut texts =
        vec![page::refused(&source, HOSTILE), page::failed(&source, HOSTILE), page::reading(&source)];
    for (of, ..) in graph::MEASURES {
        let (page, svg) = shown(&source, &whole, &whole.view, of);
        assert!(page.matches("&lt;script&gt;alert(1)").count() > 10, "{page}");
        assert!(page.contains("&lt;script&gt;alert(3)"), "the endpoint is there: {page}");
        // The division of its requests' time, for the requests for which it is known.
        for (head, share) in [("CPU", "12.0 %"), ("Ready", "25.0 %"), ("Waiting", "63.0 %")] {
            assert!(
                page.contains(&format!(">{head}</th>")) && page.contains(&format!(">{share}</td>")),
                "{head}: {page}"
            );
        }
        assert!(page.contains("Thread activity over time") && page.contains("In a request or job"), "{page}");
        // Names cannot break out for a browser that parses the SVG as XML.
        let elements = svg.matches("<script").count();
        assert!(elements <= 1 && !svg.contains("<img"), "{elements}: {svg}");
        assert!(!svg.contains(['\u{202e}', '\u{1b}']), "{svg}");
        texts.push(page);
    }
    for text in texts {
        let scripts = text.matches("<script").count();
        assert_eq!(scripts, text.matches("<script src=\"brush.js\" defer></script>").count(), "{text}");
        assert!(!text.contains("<img") && !text.contains(['\u{202e}', '\u{1b}']), "{text}");
        assert!(!text.contains("\"'>"), "an attribute ends there: {text}");
    }
}

/// The activity of threads over time is drawn and adds up: strips match the sums of threads.
#[test]
fn when() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gctrace");
    write(&path, 2, Some("x"));
    let (source, whole) = served(&path);
    let figures = &whole.view.figures;
    let mut total = 0;
    for (key, thread) in &figures.threads {
        let did = thread.did.as_ref().unwrap();
        let sum = did.sum();
        assert_eq!((did.width_ns, sum.gc), (figures.lanes.columns.width_ns, thread.pause_ns), "{key:?}");
        assert!(sum.cpu <= thread.cpu_ns && sum.wait <= thread.waits.ns, "{key:?}");
        assert!(did.cells.len() <= figures.lanes.columns.cells.len() + 1, "{key:?}");
        total += sum.request;
    }
    assert_eq!(total, 1_000_000 * figures.requests.count());
    assert!(figures.lanes.columns.cells.iter().all(|cell| cell.held[1].is_some() == cell.held[2].is_some()));
    assert!(figures.lanes.columns.cells.iter().any(|cell| cell.held[1].is_some()), "live slots");
    let (page, _) = shown(&source, &whole, &whole.view, Measure::Gc);
    for words in [
        "Orders&lt;Controller&gt;#show",
        "What threads did",
        "class=\"track\"",
        "Live slots",
        "Free slots",
        "oldmalloc_increase_bytes",
    ] {
        assert!(page.contains(words), "{words}: {page}");
    }
    // Without requests and their states there are no columns for them.
    let plain = dir.path().join("y.gctrace");
    write(&plain, 1, None);
    let (source, whole) = served(&plain);
    let (page, _) = shown(&source, &whole, &whole.view, Measure::Gc);
    assert!(!page.contains(">Ready</th>") && !page.contains("In a request or job"), "{page}");
}

/// A part read by means of the index equals the same part of the whole file, and is read without the rest.
#[test]
fn parts_by_the_index() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("long.gctrace");
    write(&path, 40, None);
    let (source, whole) = served(&path);
    let begun_ns = source.header.begun_ns;
    let folded = Format::Folded(Graph::default());
    let all = &whole.view;
    assert_eq!(all.figures.cycles, 40 * 18);
    for (from, to) in [
        (0, 2500),
        (30_800, 31_000),
        (30_900, 31_000),
        (31_900, 64_000),
        (60_000, 60_100),
        (119_000, 300_000),
        (400_000, 500_000),
    ] {
        let at = |ms: u64| Some(begun_ns + ms * 1_000_000);
        let window = Window { from_ns: at(from), to_ns: at(to), ..Window::default() };
        let (needed, of) = whole.needed(&window);
        assert!(of >= 40 && (to - from > 30_000 || needed <= 25), "{needed} of {of} chunks");
        let view = source.with_times(&whole, &window).unwrap();
        let plain = source.without_index(&window).unwrap();
        for format in [folded, Format::Pprof, Format::Firefox, Format::Perfetto, Format::Speedscope] {
            let bytes = |view: &View| {
                let mut bytes = Vec::new();
                view.kept.write(format, &mut bytes).unwrap();
                bytes
            };
            assert!(bytes(&view) == bytes(&plain), "{from} {to} {format:?}");
        }
        assert_eq!(view.processes, plain.processes);
        assert_eq!(view.figures.cycles, plain.figures.cycles);
        let cells = |view: &View| view.figures.lanes.columns.cells.clone();
        assert_eq!(cells(&view), cells(&plain));
        // A process that was never seen has nothing.
        let nobody = Window { pids: [7].into(), ..window.clone() };
        assert!(whole.needed(&nobody).0 <= 24, "{:?}", whole.needed(&nobody));
        // The same part is not read again.
        let first = source.view(&whole, &window).unwrap();
        assert!(Arc::ptr_eq(&first, &source.view(&whole, &window).unwrap()));
    }
    let of = |pids: &[u32]| Window { pids: pids.iter().copied().collect(), ..Window::default() };
    let pid = all.figures.processes[0].pid;
    let pids: Vec<u32> = (0..10).map(|n| pid + n).collect();
    assert!(Arc::ptr_eq(all, &source.view(&whole, &of(&pids)).unwrap()), "all processes are the whole");
    for chosen in [&[pid + 3][..], &[pid, pid + 9]] {
        let window = of(chosen);
        let (needed, of) = whole.needed(&window);
        assert!(needed < of * 3 / 4, "{needed} of {of} chunks");
        let plain = source.without_index(&window).unwrap();
        let view = source.with_times(&whole, &window).unwrap();
        assert_eq!(
            (view.processes, view.figures.cycles),
            (chosen.len() as u64, 18 * LIFE * chosen.len() as u64)
        );
        let bytes = |view: &View| {
            let mut bytes = Vec::new();
            view.kept.write(Format::Firefox, &mut bytes).unwrap();
            bytes
        };
        assert!(bytes(&view) == bytes(&plain), "{chosen:?}");
    }
    // Pids of absent processes, one of which maps to the same bit.
    for pid in [7, pid + 64] {
        assert!(source.view(&whole, &of(&[pid])).unwrap().figures.is_empty());
    }
}
