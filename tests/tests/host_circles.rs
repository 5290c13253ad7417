//! No folder of a crate imports, directly or through others, a folder that imports it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

#[path = "product/source.rs"]
mod source;
use source::{is_test, without_tests};

/// Top-level modules of a crate, each with the top-level modules that its code names.
type Graph = BTreeMap<String, BTreeSet<String>>;

#[test]
fn folders_import_in_one_direction() {
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
        let graph = graph(&root.join(folder).join("src"));
        assert!(graph.len() > 1 && graph.values().any(|named| !named.is_empty()), "{folder}: {graph:?}");
        found.extend(circles(&graph).into_iter().map(|circle| format!("{folder}: {}", circle.join(" "))));
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

#[test]
fn imports_are_read() {
    let text = "use crate::{\n    alpha::{self, Beta},\n    gamma,\n};\nfn f() { crate::delta::g(); }\n// crate::no\n\
                #[cfg(test)]\nmod tests {\n    use crate::late;\n}\nfn g() { crate::after::h(); }\n";
    let named: Vec<String> = named_modules(&without_tests(text)).into_iter().collect();
    assert_eq!(named, ["after", "alpha", "delta", "gamma"]);
}

fn graph(src: &Path) -> Graph {
    let mut graph = Graph::new();
    let mut waiting = vec![src.to_owned()];
    while let Some(folder) = waiting.pop() {
        for entry in fs::read_dir(&folder).expect("a source folder").flatten() {
            let path = entry.path();
            let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
            if is_test(&name) {
                continue;
            }
            if path.is_dir() {
                waiting.push(path);
                continue;
            }
            if path.extension().is_none_or(|extension| extension != "rs") {
                continue;
            }
            let below = path.strip_prefix(src).expect("below src");
            let first = below.components().next().expect("a component").as_os_str();
            let module = Path::new(first).file_stem().expect("a name").to_string_lossy().into_owned();
            // The roots of a crate wire everything.
            if module == "lib" || module == "main" {
                continue;
            }
            let named = named_modules(&without_tests(&fs::read_to_string(&path).expect("a source file")));
            graph.entry(module.clone()).or_default().extend(named.into_iter().filter(|to| *to != module));
        }
    }
    let modules: BTreeSet<String> = graph.keys().cloned().collect();
    for named in graph.values_mut() {
        named.retain(|to| modules.contains(to));
    }
    graph
}

/// What follows `crate::`: a module, or the first name of each entry of a group.
fn named_modules(code: &str) -> BTreeSet<String> {
    let mut named = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        let Some(group) = rest.strip_prefix('{') else {
            named.insert(first_name(rest));
            continue;
        };
        let mut depth = 0_u32;
        let mut entry = true;
        for (index, character) in group.char_indices() {
            match character {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => entry = true,
                _ if entry && !character.is_whitespace() => {
                    named.insert(first_name(&group[index..]));
                    entry = false;
                }
                _ => {}
            }
        }
    }
    named
}

fn first_name(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
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
