//! The modules of a crate that the code of each module names.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    slice,
};

use super::source::without_tests;

/// The segments below the root of the crate: `["export", "text"]`.
pub(crate) type ModulePath = Vec<String>;

/// The direct children of a directory, each with those other children that are named in its file or in the files of its directory.
pub(crate) type Graph = BTreeMap<String, BTreeSet<String>>;

/// The modules that are compiled without tests.
pub(crate) type Modules = BTreeMap<ModulePath, Module>;

#[derive(Default)]
pub(crate) struct Module {
    /// Names that `use` brings into scope, and the paths that they stand for.
    imports: BTreeMap<String, Vec<String>>,
    /// Paths from which `use` brings everything into scope.
    globs: Vec<Vec<String>>,
    /// All paths in the code, including those in `use`.
    named: BTreeSet<Vec<String>>,
    /// Names that the module itself defines.
    defined: BTreeSet<String>,
}

/// Keywords before the name of an item.
const DEFINING: [&str; 9] = ["struct", "enum", "union", "trait", "type", "fn", "const", "static", "mod"];

/// The modules below `lib.rs`, `main.rs`, or both, according to their `mod` declarations.
pub(crate) fn modules(src: &Path) -> Modules {
    let mut modules = Modules::new();
    let mut waiting: Vec<_> = ["lib.rs", "main.rs"].map(|root| (ModulePath::new(), src.join(root))).into();
    waiting.retain(|(_, file)| file.exists());
    while let Some((path, file)) = waiting.pop() {
        let text = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        for child in add(&mut modules, &path, &text) {
            let folder = child.iter().fold(src.to_owned(), |folder, segment| folder.join(segment));
            let beside = folder.with_extension("rs");
            waiting.push((child, if beside.exists() { beside } else { folder.join("mod.rs") }));
        }
    }
    modules
}

/// Adds what a file names to its module. Returns the modules that the file declares.
pub(crate) fn add(modules: &mut Modules, path: &[String], text: &str) -> Vec<ModulePath> {
    let tokens = tokens(&without_tests(text));
    let module = modules.entry(path.to_vec()).or_default();
    let mut declared = Vec::new();
    let mut before = ";";
    let mut rest = tokens.as_slice();
    while let [first, after @ ..] = rest {
        rest = after;
        // `use` is also part of types: `impl Iterator + use<'a>`.
        if first == "use" && [";", "{", "}", "]", ")", "pub"].contains(&before) {
            let end = after.iter().position(|token| token == ";").unwrap_or(after.len());
            read_use(&after[..end], &[], module);
            rest = &after[end..];
        } else if let [name, end, ..] = after
            && first == "mod"
            && end == ";"
        {
            declared.push([path, slice::from_ref(name)].concat());
        } else if let [name, ..] = after
            && DEFINING.contains(&first.as_str())
        {
            module.defined.insert(name.clone());
        } else if is_name(first) {
            let mut named = vec![first.clone()];
            while let [colons, name, after @ ..] = rest
                && colons == "::"
                && is_name(name)
            {
                named.push(name.clone());
                rest = after;
            }
            if named.len() > 1 {
                module.named.insert(named);
            }
        }
        before = first;
    }
    declared
}

/// Reads one entry of a `use`: `a`, `a as b`, `a::*`, or `a::{self, b}`.
fn read_use(entry: &[String], before: &[String], module: &mut Module) {
    let join = |tokens: &[String]| {
        before.iter().chain(tokens).filter(|token| *token != "::").cloned().collect::<Vec<String>>()
    };
    if let Some(open) = entry.iter().position(|token| token == "{") {
        let mut depth = 0_u32;
        let group = &entry[open + 1..entry.len() - 1];
        let inner = group.split(|token| {
            match token.as_str() {
                "{" => depth += 1,
                "}" => depth -= 1,
                _ => {}
            }
            depth == 0 && token == ","
        });
        inner
            .filter(|entry| !entry.is_empty())
            .for_each(|inner| read_use(inner, &join(&entry[..open]), module));
        return;
    }
    let (mut path, alias) = match entry {
        [path @ .., keyword, alias] if keyword == "as" => (join(path), Some(alias.clone())),
        _ => (join(entry), None),
    };
    let glob = path.pop_if(|last| last == "*").is_some();
    if path.len() > 1 {
        path.pop_if(|last| last == "self");
    }
    if glob {
        module.globs.push(path.clone());
    } else if let Some(name) = alias.or_else(|| path.last().cloned()) {
        module.imports.insert(name, path.clone());
    }
    module.named.insert(path);
}

fn is_name(token: &str) -> bool {
    token.starts_with(|character: char| character.is_alphabetic() || character == '_')
}

/// Splits code into names, `::`, and single other characters, without strings and comments.
fn tokens(code: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut rest = code;
    while let Some(first) = rest.chars().next() {
        if let Some(after) = after_text(rest) {
            rest = after;
            continue;
        }
        let length = match first {
            ':' if rest.starts_with("::") => 2,
            _ if is_name(rest) => rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len()),
            _ => first.len_utf8(),
        };
        if !first.is_whitespace() {
            tokens.push(rest[..length].to_owned());
        }
        rest = &rest[length..];
    }
    tokens
}

/// The rest after a comment, a string or a character literal, if the code begins with one.
fn after_text(code: &str) -> Option<&str> {
    if code.starts_with("//") {
        return Some(code.split_once('\n').map_or("", |(_, after)| after));
    }
    if let Some(raw) = code.strip_prefix("br").or_else(|| code.strip_prefix('r')) {
        let string = raw.trim_start_matches('#');
        let end = format!("\"{}", "#".repeat(raw.len() - string.len()));
        if let Some((_, after)) = string.strip_prefix('"').and_then(|string| string.split_once(&end)) {
            return Some(after);
        }
    }
    let quote = code.chars().next().filter(|first| "\"'".contains(*first))?;
    let mut characters = code.char_indices().skip(1);
    while let Some((at, character)) = characters.next() {
        if character == '\\' {
            characters.next();
        } else if character == quote {
            return Some(&code[at + 1..]);
        } else if quote == '\'' && !code[at + character.len_utf8()..].starts_with(quote) {
            // A lifetime.
            return None;
        }
    }
    None
}

/// The graph of every directory.
pub(crate) fn graphs(modules: &Modules) -> BTreeMap<ModulePath, Graph> {
    let mut graphs = BTreeMap::<ModulePath, Graph>::new();
    for path in modules.keys() {
        if let Some((child, folder)) = path.split_last() {
            graphs.entry(folder.to_vec()).or_default().entry(child.clone()).or_default();
        }
    }
    for (from, module) in modules {
        for to in module.named.iter().flat_map(|path| resolve(modules, from, path)) {
            let common = from.iter().zip(&to).take_while(|(from, to)| from == to).count();
            // A module that contains the other one is not a child of their common directory: it only wires its children.
            if let (Some(child), Some(named)) = (from.get(common), to.get(common)) {
                let graph = graphs.entry(from[..common].to_vec()).or_default();
                graph.entry(child.clone()).or_default().insert(named.clone());
            }
        }
    }
    graphs
}

/// The modules that a path in a module's code leads to: the module with the item, and the modules that only re-export it.
pub(crate) fn resolve(modules: &Modules, from: &[String], path: &[String]) -> BTreeSet<ModulePath> {
    let mut found = BTreeSet::new();
    // The flag says whether a glob led there; then the item may be elsewhere.
    let mut waiting = vec![(from.to_vec(), path.to_vec(), false)];
    let mut seen = BTreeSet::new();
    while let Some((mut at, path, mut maybe)) = waiting.pop() {
        // The first name may be that of a library, which is no module of the crate.
        let mut entered = false;
        for (index, segment) in path.iter().enumerate() {
            let child = [at.as_slice(), slice::from_ref(segment)].concat();
            match segment.as_str() {
                "crate" => at.clear(),
                "super" => _ = at.pop(),
                "self" => {}
                _ if modules.contains_key(&child) => at = child,
                _ => {
                    let Some(module) = modules.get(&at) else { break };
                    let import = module.imports.get(segment);
                    let own = import.is_some() || module.defined.contains(segment);
                    maybe &= !own;
                    // Visit each one once: `use a::a` does not lead to itself.
                    if seen.insert(child) {
                        let imported = import.map(|import| [import, &path[index + 1..]].concat());
                        waiting.extend(imported.map(|path| (at.clone(), path, false)));
                        let globs = module.globs.iter().filter(|_| !own);
                        waiting.extend(globs.map(|glob| (at.clone(), [glob, &path[index..]].concat(), true)));
                    }
                    break;
                }
            }
            entered = true;
        }
        if entered && !maybe {
            found.insert(at);
        }
    }
    found
}
