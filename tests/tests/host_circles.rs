//! In every directory of every crate: no module imports, directly or through other modules, a module that imports it.
//!
//! A module is a file `x.rs` together with its directory `x/`: they count as one, so every part of `x` belongs into `x/`.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

#[path = "product/imports.rs"]
mod imports;
#[path = "product/source.rs"]
mod source;
use imports::{Graph, Modules, add, graphs, modules};

#[test]
fn modules_import_in_one_direction() {
    let mut found = Vec::new();
    for folder in [
        "gctrace-common",
        "gctrace-ebpf",
        "crates/cruby",
        "gctrace-user",
        "crates/tunemygc",
        "crates/report",
        "crates/collector",
        "crates/pages",
        "crates/serve",
        "crates/bench",
        "xtask",
    ] {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
        let graphs = graphs(&modules(&root.join(folder).join("src")));
        let top = &graphs[[].as_slice()];
        assert!(top.len() > 1 && top.values().any(|named| !named.is_empty()), "{folder}: {top:?}");
        for (path, graph) in &graphs {
            let name = [&[folder.to_owned()], path.as_slice()].concat().join("/");
            found.extend(circles(graph).into_iter().map(|circle| format!("{name}: {}", circle.join(" "))));
        }
    }
    assert_eq!(found, Vec::<String>::new(), "modules that import each other");
}

#[test]
fn a_circle_is_found() {
    let edges = |pairs: &[(&str, &str)]| {
        let mut graph = Graph::new();
        for (from, to) in pairs {
            graph.entry((*from).to_owned()).or_default().insert((*to).to_owned());
            graph.entry((*to).to_owned()).or_default();
        }
        graph
    };
    assert_eq!(circles(&edges(&[("a", "b"), ("b", "c"), ("a", "c")])), Vec::<Vec<&str>>::new());
    let tied = edges(&[("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "e"), ("e", "d")]);
    assert_eq!(circles(&tied), [vec!["a", "b", "c"], vec!["d", "e"]]);
}

/// The modules of a crate, given the path and the text of each.
fn parsed(files: &[(&str, &str)]) -> Modules {
    let mut modules = Modules::new();
    for (path, text) in files {
        let path: Vec<String> =
            path.split('/').filter(|segment| !segment.is_empty()).map(str::to_owned).collect();
        add(&mut modules, &path, text);
    }
    modules
}

/// The imports within a directory: `a>b`.
fn edges(modules: &Modules, folder: &[&str]) -> Vec<String> {
    let folder: Vec<String> = folder.iter().map(|segment| (*segment).to_owned()).collect();
    let graph = &graphs(modules)[&folder];
    graph.iter().flat_map(|(from, to)| to.iter().map(move |to| format!("{from}>{to}"))).collect()
}

#[test]
fn imports_are_read() {
    let text = "use crate::{\n    alpha::{self, Beta},\n    gamma,\n};\nfn f() { crate::delta::g(\"crate::not\"); }\n\
                // crate::no\n#[cfg(test)]\nmod tests {\n    use crate::late;\n}\n\
                fn g<'a>() { crate::after::h('\\'', r#\"crate::not\"#); } // crate::no\n";
    let mut files = vec![("a", text)];
    files.extend(["alpha", "gamma", "delta", "after", "late", "no", "not"].map(|name| (name, "")));
    assert_eq!(edges(&parsed(&files), &[]), ["a>after", "a>alpha", "a>delta", "a>gamma"]);
}

#[test]
fn paths_go_through_parents_and_imported_names() {
    let modules = parsed(&[
        ("x", "use a::F;\nfn wires() { b::f(); }"),
        ("x/a", "use super::b::{c::{self as d, G}, H};\nfn f() { std::mem::take(); }"),
        ("x/a/deep", "use super::super::f;\nfn g() { super::super::e::h(); }"),
        ("x/b", "use crate::x;\nfn g() { x::f::h(); self::c::i(); }"),
        ("x/b/c", "use super::super::super::y;\nfn g() { y::z(); }"),
        ("x/e", ""),
        ("x/f", "pub(in crate::x) use std::a::B;\nfn late() { use super::e as other; other::g(); }"),
        ("y", ""),
    ]);
    assert_eq!(edges(&modules, &["x"]), ["a>b", "a>e", "a>f", "b>f", "f>e"]);
    assert_eq!(edges(&modules, &[]), ["x>y"]);
}

#[test]
fn a_glob_exports_what_is_defined_there() {
    let modules = parsed(&[
        ("x", "pub(super) use a::*;\npub(super) use b::*;\nconst OWN: u8 = 0;"),
        ("x/a", "pub(super) struct Item;"),
        ("x/b", "pub(super) use super::c::Other;\npub(super) fn f() {}"),
        ("x/c", "pub(super) enum Other {}"),
        ("x/d", "use super::{Item, OWN};\nfn g() { super::f(); }"),
        ("x/e", "fn g() -> super::Other {}"),
    ]);
    assert_eq!(edges(&modules, &["x"]), ["b>c", "d>a", "d>b", "e>b", "e>c"]);
}

#[test]
fn a_name_that_the_parent_exports_is_its_modules() {
    let modules = parsed(&[
        ("x", "mod a;\npub(crate) use a::Item;\npub(super) use self::b::{Other as Named, c};\nstruct Own;"),
        ("x/a", "use super::Own;\npub(super) struct Item;"),
        ("x/b", "use crate::x::Item;"),
        ("x/b/c", ""),
        ("x/d", "use super::{Item, Named};"),
        ("x/e", "fn f() { super::c::g(); }"),
        ("y", "use crate::x::{Item, Named};"),
        ("z", "use crate::y::Item;"),
    ]);
    assert_eq!(edges(&modules, &["x"]), ["b>a", "d>a", "d>b", "e>b"]);
    // A module that imports what another module re-exports depends on both.
    assert_eq!(edges(&modules, &[]), ["y>x", "z>x", "z>y"]);
}

/// The sets of modules that reach each other, sorted.
fn circles(graph: &Graph) -> Vec<Vec<&str>> {
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        graph.keys().map(|from| (from.as_str(), reachable(graph, from))).collect();
    let mut circles = BTreeSet::new();
    for (from, to) in &reached {
        if to.contains(from) {
            let mutual = to.iter().filter(|to| reached.get(*to).is_some_and(|back| back.contains(from)));
            circles.insert(mutual.copied().collect::<Vec<_>>());
        }
    }
    circles.into_iter().collect()
}

fn reachable<'a>(graph: &'a Graph, from: &str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut waiting: Vec<&str> = graph[from].iter().map(String::as_str).collect();
    while let Some(next) = waiting.pop() {
        if found.insert(next) {
            waiting.extend(graph[next].iter().map(String::as_str));
        }
    }
    found
}
