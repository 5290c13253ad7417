//! Holders of objects in words.

use std::collections::{BTreeMap, BTreeSet};

use gctrace_tunemygc::printable::printable;

use super::super::holders::{ClassVariable, End, Holder, Local, NamedEnd, Path, Several};
use crate::words::plural;

/// Maximum number of names listed per kind.
const NAMES: usize = 3;

/// A holder: one object, or several.
pub(super) fn words(holder: &Holder) -> String {
    let Holder { address, kind, class, hidden, code, refers, objects, holds, of, .. } = holder;
    let (class, code) = (class.as_deref().map(printable), code.as_deref().map(printable));
    let samples = format!("({holds} of {of} samples)");
    if *objects > 1 {
        let alike = match (class, code) {
            (Some(class), Some(code)) => format!("{class} objects defined at {code}"),
            (None, Some(code)) if *kind == "T_DATA" => {
                format!("Procs of a class without a name, defined at {code}")
            }
            (None, Some(code)) => format!("closures over the variables of {code}"),
            (Some(class), None) => format!("{class} objects"),
            (None, None) if *hidden => format!("hidden {kind} objects"),
            (None, None) => "objects of a class without a name".to_owned(),
        };
        return if *objects >= *holds as u64 {
            format!("{alike}, each its own {samples}")
        } else {
            format!("{objects} {alike} {samples}")
        };
    }
    let class = match (class, code) {
        (Some(class), Some(code)) => format!("{class} defined at {code}"),
        (None, Some(code)) if *kind == "T_DATA" => {
            format!("a Proc of a class without a name, defined at {code}")
        }
        (None, Some(code)) => format!("a closure over the variables of {code}"),
        (Some(class), None) => class.into_owned(),
        (None, None) if *hidden => format!("a hidden {kind}"),
        (None, None) => "an object of a class without a name".to_owned(),
    };
    let samples = if *of > 1 { format!(" {samples}") } else { String::new() };
    format!("{class} {:#x} with {}{samples}", address.0, plural(*refers, "reference"))
}

/// The end of a path.
pub(super) fn end_words(path: &Path) -> String {
    let Path { constant, variable, global, local, several, end, unread, .. } = path;
    if let Some(constant) = constant {
        return format!("held by the constant {}", printable(constant));
    }
    if let Some(variable) = variable {
        return format!("held by {}", of_class(variable));
    }
    if let Some(global) = global {
        return format!("held by the global variable {}", printable(global));
    }
    if let Some(local) = local {
        let kind = match end {
            End::ThreadVariable => "thread variable",
            End::FiberStorage => "fiber storage",
            _ => "thread local",
        };
        return format!("held by the {kind} {} of {}", symbol(&local.name), thread(local));
    }
    if let Some(several) = several {
        return format!("held by {}", several_words(several));
    }
    match unread {
        Some(why) => format!("{}: {}", end.words(), printable(why)),
        None => end.words().to_owned(),
    }
}

/// The named holders of several objects.
fn several_words(several: &Several) -> String {
    let (mut constants, mut globals) = (Vec::new(), Vec::new());
    let mut variables: BTreeMap<&str, Vec<&ClassVariable>> = BTreeMap::new();
    let mut locals: BTreeMap<&str, Vec<&Local>> = BTreeMap::new();
    for named in &several.named {
        match named {
            NamedEnd::Constant(name) => constants.push(printable(name).into_owned()),
            NamedEnd::Global(name) => globals.push(printable(name).into_owned()),
            NamedEnd::Variable(variable) => variables.entry(&variable.name).or_default().push(variable),
            NamedEnd::ThreadLocal(local) => locals.entry(&local.name).or_default().push(local),
        }
    }
    let mut parts = Vec::new();
    for (kind, names) in [("constant", constants), ("global variable", globals)] {
        match names.as_slice() {
            [] => {}
            [name] => parts.push(format!("the {kind} {name}")),
            _ => parts.push(format!("the {kind}s {}", list(names, ""))),
        }
    }
    for (name, of) in variables {
        if let [variable] = of.as_slice() {
            parts.push(of_class(variable));
            continue;
        }
        let class = |variable: &&ClassVariable| match &variable.class {
            Some(class) => printable(class).into_owned(),
            None => "a class without a name".to_owned(),
        };
        let classes = list(of.iter().map(class).collect(), " classes");
        parts.push(format!("{} of {classes}", printable(name)));
    }
    for (name, of) in locals {
        let threads: BTreeSet<u32> = of.iter().filter_map(|local| local.tid).collect();
        let of = match of.as_slice() {
            [local] => thread(local),
            _ if threads.len() == of.len() => format!("{} threads", of.len()),
            _ => format!("{} threads or fibers", of.len()),
        };
        parts.push(format!("the thread local {} of {of}", symbol(name)));
    }
    let words = parts.join(" and ");
    let (named, of) = (several.named.len(), several.of);
    if named < of { format!("{words} ({named} of {of} of them)") } else { words }
}

/// The first names in alphabetical order, and how many more there are.
fn list(mut names: Vec<String>, what: &str) -> String {
    names.sort();
    match names.len().checked_sub(NAMES) {
        None | Some(0) => match names.pop() {
            Some(last) if !names.is_empty() => format!("{} and {last}", names.join(", ")),
            last => last.unwrap_or_default(),
        },
        Some(more) => format!("{} and {more} more{what}", names[..NAMES].join(", ")),
    }
}

/// A symbol in the syntax of Ruby code.
fn symbol(name: &str) -> String {
    let name = printable(name);
    let plain = |character: char| character.is_alphanumeric() || character == '_';
    let word = name.strip_suffix(['?', '!', '=']).unwrap_or(&name);
    let plain = !word.is_empty() && !word.starts_with(char::is_numeric) && word.chars().all(plain);
    if plain { format!(":{name}") } else { format!(":\"{name}\"") }
}

fn thread(local: &Local) -> String {
    let Local { tid, thread, main, fiber, .. } = local;
    let mut words = match tid {
        Some(tid) => format!("thread {tid}"),
        None => "a thread".to_owned(),
    };
    if let Some(name) = thread {
        words = format!("{words} \"{}\"", printable(name));
    }
    if *main {
        words += " (main)";
    }
    if *fiber { format!("a fiber of {words}") } else { words }
}

fn of_class(variable: &ClassVariable) -> String {
    let class = variable.class.as_deref().map(printable);
    let class = class.as_deref().unwrap_or("a class without a name");
    let kind = if variable.name.starts_with("@@") { "class variable" } else { "instance variable" };
    format!("the {kind} {} of {class}", printable(&variable.name))
}

#[cfg(test)]
mod tests {
    use super::{super::super::jsonl::Address, *};

    fn holder(class: Option<&str>, code: Option<&str>, objects: u64, (holds, of): (usize, usize)) -> Holder {
        let [class, code] = [class, code].map(|text| text.map(str::to_owned));
        let hidden = false;
        Holder {
            address: Address(0x40),
            kind: "T_OBJECT",
            class,
            hidden,
            code,
            refers: 2,
            size: 40,
            objects,
            holds,
            of,
        }
    }

    /// A single holder is shown with its address; for several an address would mislead.
    #[test]
    fn holders() {
        let (order, block) = (Some("Order"), Some("block in on bus.rb:3"));
        for (holder, expected) in [
            (holder(order, None, 1, (51, 53)), "Order 0x40 with 2 references (51 of 53 samples)"),
            (holder(order, None, 1, (1, 1)), "Order 0x40 with 2 references"),
            (holder(None, None, 1, (1, 1)), "an object of a class without a name 0x40 with 2 references"),
            (
                holder(None, None, 4, (4, 4)),
                "objects of a class without a name, each its own (4 of 4 samples)",
            ),
            (
                Holder { hidden: true, ..holder(None, None, 1, (1, 1)) },
                "a hidden T_OBJECT 0x40 with 2 references",
            ),
            (
                Holder { hidden: true, ..holder(None, None, 4, (4, 5)) },
                "hidden T_OBJECT objects, each its own (4 of 5 samples)",
            ),
            (holder(order, None, 39, (39, 39)), "Order objects, each its own (39 of 39 samples)"),
            (holder(order, None, 41, (39, 52)), "Order objects, each its own (39 of 52 samples)"),
            (holder(order, None, 5, (39, 52)), "5 Order objects (39 of 52 samples)"),
            (
                holder(None, block, 39, (39, 39)),
                "closures over the variables of block in on bus.rb:3, each its own (39 of 39 samples)",
            ),
            (
                holder(Some("Proc"), block, 39, (39, 39)),
                "Proc objects defined at block in on bus.rb:3, each its own (39 of 39 samples)",
            ),
        ] {
            assert_eq!(words(&holder), expected);
        }
    }

    /// Holders of several objects are named up to the limit, with the number of objects for which a holder is known.
    #[test]
    fn several_names() {
        let words = |named: Vec<NamedEnd>, of| {
            let several = Some(Several { named, of });
            end_words(&Path { several, ..Path::new(Vec::new(), End::Constant) })
        };
        let constants = |count| (0..count).rev().map(|i| NamedEnd::Constant(format!("LIST{i}"))).collect();
        assert_eq!(words(constants(5), 5), "held by the constants LIST0, LIST1, LIST2 and 2 more");
        assert_eq!(words(constants(3), 3), "held by the constants LIST0, LIST1 and LIST2");
        assert_eq!(words(constants(2), 5), "held by the constants LIST0 and LIST1 (2 of 5 of them)");
        assert_eq!(words(constants(1), 5), "held by the constant LIST0 (1 of 5 of them)");
        let variable = |class: Option<&str>| {
            let class = class.map(str::to_owned);
            NamedEnd::Variable(ClassVariable { name: "@cache".to_owned(), class })
        };
        let classes: Vec<String> = (0..5).map(|i| format!("Model{i}")).collect();
        let variables: Vec<NamedEnd> = classes.iter().map(|class| variable(Some(class))).collect();
        assert_eq!(words(variables, 5), "held by @cache of Model0, Model1, Model2 and 2 more classes");
        assert_eq!(
            words(vec![variable(None)], 1),
            "held by the instance variable @cache of a class without a name"
        );
        let local = |tid| {
            let thread = Some("puma".to_owned());
            NamedEnd::ThreadLocal(Local { name: "ctx".to_owned(), tid, thread, main: false, fiber: false })
        };
        let threads = |tids: [u32; 2]| tids.map(|tid| local(Some(tid))).to_vec();
        assert_eq!(words(threads([7, 8]), 2), "held by the thread local :ctx of 2 threads");
        assert_eq!(words(threads([7, 7]), 2), "held by the thread local :ctx of 2 threads or fibers");
        let global = NamedEnd::Global("$list".to_owned());
        assert_eq!(
            words(vec![global, local(Some(7))], 2),
            "held by the global variable $list and the thread local :ctx of thread 7 \"puma\""
        );
    }

    /// Named holders are described in the terms of Ruby code.
    #[test]
    fn ends() {
        let local = Local {
            name: "orders".to_owned(),
            tid: Some(4250),
            thread: Some("worker 1".to_owned()),
            main: false,
            fiber: false,
        };
        let path = |end| Path::new(Vec::new(), end);
        let at = |local: &Local| Path { local: Some(local.clone()), ..path(End::ThreadLocal) };
        let main = Local { thread: None, main: true, fiber: true, name: "a b".to_owned(), ..local.clone() };
        let unknown = Local { tid: None, thread: None, name: "[]".to_owned(), ..local.clone() };
        let global = Path { global: Some("$cache".to_owned()), ..path(End::GlobalVariable) };
        for (path, expected) in [
            (global, "the global variable $cache"),
            (at(&local), "the thread local :orders of thread 4250 \"worker 1\""),
            (at(&main), "the thread local :\"a b\" of a fiber of thread 4250 (main)"),
            (at(&unknown), "the thread local :\"[]\" of a thread"),
            (
                Path { end: End::FiberStorage, ..at(&main) },
                "the fiber storage :\"a b\" of a fiber of thread 4250 (main)",
            ),
            (
                Path { end: End::ThreadVariable, ..at(&local) },
                "the thread variable :orders of thread 4250 \"worker 1\"",
            ),
        ] {
            assert_eq!(end_words(&path), format!("held by {expected}"));
        }
        for (name, expected) in
            [("ok?", ":ok?"), ("x=", ":x="), ("", ":\"\""), ("1a", ":\"1a\""), ("é", ":é")]
        {
            assert_eq!(symbol(name), expected);
        }
    }
}
