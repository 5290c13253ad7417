//! Comparisons of parts of a recording, and of two recordings.

use std::{path::Path, sync::Arc};

use gctrace_report::{
    diff::{Chosen, Comparison, Looked},
    export::{
        Outputs,
        diff::{self, Gathered},
        profile::Measure,
        window::Window,
    },
    trace_file::{self, Recording, Subjects},
};

use super::{GOLDEN, HOSTILE, copies::write, served};
use crate::{
    Asked,
    compare::Compared,
    page,
    source::{Source, View, Whole},
    wanted::Wanted,
};

const S: u64 = 1_000_000_000;

/// A side as `gctrace diff` gathers it.
fn gathered(name: &'static str, path: &Path) -> Gathered {
    let mut recording = Recording::open(path).unwrap();
    let Subjects { samples, wall, gvl, requests, alloc } = recording.header().subjects;
    let side = Gathered::new(name, Looked { samples, wall, gvl, requests, alloc }, Chosen::default(), true);
    trace_file::replay(&mut recording, &mut Outputs::new(vec![side.exporter()])).unwrap();
    side
}

fn figures(comparison: &Comparison) -> String {
    format!("{:?} {:?} {:?}", comparison.tables, comparison.only, comparison.blocks)
}

fn shown(
    source: &Source,
    whole: &Whole,
    view: &View,
    wanted: &Wanted,
    compared: Option<&Compared>,
) -> String {
    let drawn = view.graphs.of(&view.kept, wanted.of).unwrap();
    page::page(source, whole, view, wanted, &drawn, (None, compared))
}

/// Two recordings are compared as `gctrace diff` does: figures, verdicts, and the picture.
#[test]
fn recordings() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a.gctrace"), dir.path().join("b.gctrace"));
    write(&a, 5, None);
    write(&b, 9, None);
    for (a, b) in [(&a, &b), (&b, &a), (&a, &Path::new(GOLDEN).to_owned())] {
        let sides = [gathered("A", a), gathered("B", b)];
        let comparison = diff::compare(&sides[0], &sides[1]);
        let mut svg = Vec::new();
        diff::draw_graph(&sides[0], &sides[1], true, &mut svg).unwrap();
        let ((other, its), (source, whole)) = (served(a), served(b));
        let all = Window::default();
        let compared = source.compared(&whole, &all, (&other, &its, &all)).unwrap();
        assert_eq!(figures(&compared.comparison), figures(&comparison));
        assert!(compared.graph.svg == svg && svg.len() > 1000 && !compared.cuts_time);
        assert!(Arc::ptr_eq(&compared, &source.compared(&whole, &all, (&other, &its, &all)).unwrap()));
        // The page says what is compared, and has every table that is not empty.
        let wanted =
            Wanted { asked: Asked::default(), window: all, of: Measure::Gc, other: Some(Window::default()) };
        let text = shown(&source, &whole, &whole.view, &wanted, Some(&compared));
        let tables = compared.comparison.tables.iter().filter(|table| !table.rows.is_empty()).count();
        let section = text.split("id=\"diff\"").nth(1).unwrap().split("</section>").next().unwrap();
        assert_eq!(section.matches("<summary>").count(), tables, "{section}");
        for title in ["GC", "Waiting for the GVL", "Methods, CPU time"] {
            assert!(section.contains(&format!("<summary>{title}</summary>")), "{title}: {section}");
        }
        assert!(text.contains("What has changed from A to B"), "{text}");
        assert!(text.contains("src=\"diff.svg?\"") && !text.contains("NaN"), "{text}");
    }
}

/// Parts contain what lies in them; sums over whole lifetimes are left out, which is stated; an empty part is not compared.
#[test]
fn parts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gctrace");
    write(&path, 20, None);
    let (source, whole) = served(&path);
    let part = |from: u64, to: u64| {
        let at = |seconds: u64| Some(source.header.begun_ns + seconds * S);
        Window { from_ns: at(from), to_ns: at(to), ..Window::default() }
    };
    let (a, b) = (part(6, 30), part(30, 54));
    let compared = source.compared(&whole, &b, (&source, &whole, &a)).unwrap();
    let comparison = &compared.comparison;
    let longest = comparison.figures().find(|(.., figure)| figure.what == "pause, longest").unwrap().2;
    let stops = [&a, &b].map(|window| source.view(&whole, window).unwrap().figures.stops.max_ns() as f64);
    assert_eq!([longest.a, longest.b], stops.map(Some));
    // The same program repeatedly, eight times in each part.
    assert!(comparison.figures().all(|(.., figure)| !figure.verdict.is_real()), "{comparison:?}");
    assert!(comparison.figures().any(|(.., figure)| figure.p.is_some()), "{comparison:?}");
    assert!(
        comparison.blocks.iter().all(|blocks| blocks.is_some_and(|(_, ns)| ns <= 24 * S / 8)),
        "{comparison:?}"
    );
    assert!(compared.cuts_time && compared.sides[0].about.file.contains("from 6.000 s to 30.000 s"));
    let text = {
        let view = source.view(&whole, &b).unwrap();
        let asked =
            Asked { a_from: Some("6s".to_owned()), a_to: Some(HOSTILE.to_owned()), ..Asked::default() };
        let wanted = Wanted { asked, window: b.clone(), of: Measure::Cpu, other: Some(a.clone()) };
        shown(&source, &whole, &view, &wanted, Some(&compared))
    };
    for words in [
        "No change is more than noise",
        "Swap A and B",
        "Do not compare",
        "a part of the recording has none",
        "name=\"afrom\" value=\"6s\"",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    for class in ["chosen", "other"] {
        assert_eq!(text.matches(&format!("<rect class=\"{class}\"")).count(), 1, "{class}: {text}");
    }
    assert!(!text.contains("<summary>Waiting for the GVL") && !text.contains("<img"), "{text}");
    let nothing = source.compared(&whole, &part(100, 120), (&source, &whole, &a)).unwrap();
    assert_eq!(nothing.comparison.nothing, ["B contains no Ruby process"]);
    // A marked part is highlighted on the time line, and nothing is compared yet; a chosen part has links.
    let marked = Wanted {
        asked: Asked { a_from: Some("6s".to_owned()), ..Asked::default() },
        window: Window::default(),
        of: Measure::Cpu,
        other: Some(a.clone()),
    };
    let text = shown(&source, &whole, &whole.view, &marked, None);
    assert!(text.contains("A is marked") && text.contains("class=\"other\""), "{text}");
    let chosen = Wanted { asked: Asked::default(), window: b.clone(), of: Measure::Cpu, other: None };
    let view = source.view(&whole, &b).unwrap();
    let text = shown(&source, &whole, &view, &chosen, None);
    assert!(text.contains("afrom=6.000000s&amp;ato=30.000000s") && text.contains("Mark as A"), "{text}");
}

/// Names of methods and programs are escaped.
#[test]
fn hostile() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gctrace");
    write(&path, 3, Some(HOSTILE));
    let (source, whole) = served(&path);
    let all = Window::default();
    let compared = source.compared(&whole, &all, (&source, &whole, &all)).unwrap();
    let asked = Asked { a_from: Some(HOSTILE.to_owned()), ..Asked::default() };
    let wanted = Wanted { asked, window: all.clone(), of: Measure::Gc, other: Some(all) };
    let text = shown(&source, &whole, &whole.view, &wanted, Some(&compared));
    assert_eq!(text.matches("<script").count(), 1, "{text}");
    assert!(
        !text.contains("<img") && !text.contains(['\u{202e}', '\u{1b}']) && !text.contains("\"'>"),
        "{text}"
    );
    let svg = String::from_utf8(compared.graph.svg.clone()).unwrap();
    assert!(svg.matches("<script").count() <= 1 && !svg.contains("<img"), "{svg}");
    assert!(!svg.contains(['\u{202e}', '\u{1b}']), "{svg}");
}
