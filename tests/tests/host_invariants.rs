//! The invariants of ARCHITECTURE.md that can be checked in the sources.

use std::{
    collections::BTreeMap,
    fs,
    path::{Component, Path, PathBuf},
};

#[path = "product/source.rs"]
mod source;
use source::without_tests;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_owned()
}

/// All Rust files below a directory, with their paths relative to it.
fn sources(dir: &Path) -> Vec<(String, String)> {
    files(dir, &["rs"])
}

/// All files below a directory whose names end like this, with their paths relative to it.
fn files(dir: &Path, extensions: &[&str]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut waiting = vec![dir.to_owned()];
    while let Some(next) = waiting.pop() {
        for entry in fs::read_dir(&next).expect("a source folder").flatten() {
            let path = entry.path();
            if path.is_dir() {
                waiting.push(path);
            } else if path.extension().is_some_and(|end| extensions.iter().any(|wanted| end == *wanted)) {
                let name = path.strip_prefix(dir).expect("below the folder").to_string_lossy().into_owned();
                found.push((name, fs::read_to_string(&path).expect("a source file")));
            }
        }
    }
    assert!(found.len() > 3, "{} holds sources", dir.display());
    found
}

/// Whether only tests compile this file or directory.
fn is_test(path: &str) -> bool {
    path.split('/').any(|part| {
        let name = part.strip_suffix(".rs").unwrap_or(part);
        ["tests", "fuzz", "dwarf_oracle"].contains(&name) || name.ends_with("_tests")
    })
}

/// Lines of code (not comments) that contain `needle` outside the allowed places.
fn offenders(needle: &str, allowed: &[&str]) -> Vec<String> {
    offenders_in("gctrace-user/src", needle, allowed)
}

fn offenders_in(folder: &str, needle: &str, allowed: &[&str]) -> Vec<String> {
    sources(&root().join(folder))
        .into_iter()
        .filter(|(name, _)| !allowed.iter().any(|prefix| name.starts_with(prefix)))
        .filter(|(_, text)| {
            text.lines().map(str::trim_start).any(|line| !line.starts_with("//") && names(line, needle))
        })
        .map(|(name, _)| name)
        .collect()
}

/// Whether a text contains `needle` where a word begins.
fn names(text: &str, needle: &str) -> bool {
    let inside = |before: char| before.is_alphanumeric() || before == '_';
    text.match_indices(needle).any(|(at, _)| !text[..at].ends_with(inside))
}

/// Each library is named only in the modules that wrap it.
#[test]
fn libraries_stay_in_their_modules() {
    for (needle, allowed) in [
        ("aya::", &["bpf/"][..]),
        ("perf_event::", &["bpf/"]),
        (
            "serde_json",
            &[
                "app/scrub/tests.rs",
                "doctor/jsonl.rs",
                "dump/jsonl.rs",
                "heap/jsonl.rs",
                "host/names.rs",
                "malloc/jsonl.rs",
                "top/once.rs",
            ],
        ),
        ("ratatui", &["top/"]),
        ("crossterm", &["top/"]),
        ("object::", &["debuginfo/"]),
        ("ureq::", &["debuginfo/"]),
        ("lzma_rust2::", &["debuginfo/"]),
        ("procfs::", &["discover/", "host/"]),
    ] {
        assert_eq!(offenders(needle, allowed), Vec::<String>::new(), "{needle} outside {allowed:?}");
    }
}

/// Other processes are read only where those of the host are (`--proc`).
#[test]
fn processes_are_read_in_one_place() {
    for needle in ["\"/proc/{", "process::all_processes", "Process::new("] {
        assert_eq!(offenders(needle, &["host/proc_root.rs"]), Vec::<String>::new(), "{needle}");
    }
}

/// The same for the crate of reports. In addition, nothing in it reads another process.
#[test]
fn the_reports_libraries_stay_in_their_modules() {
    for (needle, allowed) in [
        ("serde_json", &["export/"][..]),
        ("prost", &["export/", "trace_file/"]),
        ("inferno", &["export/"]),
        ("ureq::", &["export/tunemygc/", "export/upload.rs", "export/upload/", "tls.rs"]),
        ("hyper", &["export/prometheus/", "export/upload/grpc.rs"]),
        ("tokio::", &["export/prometheus/", "export/upload/grpc.rs"]),
        ("tonic::", &["export/upload/grpc.rs", "export/otlp/"]),
        ("rustls", &["export/upload/grpc.rs", "tls.rs"]),
        ("prometheus_client", &["export/prometheus/"]),
        ("opentelemetry_proto", &["export/otlp/"]),
        ("\"/proc/{", &[]),
    ] {
        let found = offenders_in("crates/report/src", needle, allowed);
        assert_eq!(found, Vec::<String>::new(), "{needle} outside {allowed:?}");
    }
}

/// The same for the collector: its server and its store do not use each other's libraries.
#[test]
fn the_collectors_libraries_stay_in_their_modules() {
    for (needle, allowed) in [
        ("hyper", &["server/"][..]),
        ("tokio::", &["server/", "store/postgres"]),
        ("rustls", &["server/", "store/postgres"]),
        ("flate2", &["server/"]),
        ("rusqlite", &["store/"]),
        ("fs::", &["store/"]),
        ("File::", &["store/"]),
        ("SystemTime", &["lib.rs"]),
        ("Instant", &["server/"]),
    ] {
        assert_eq!(
            offenders_in("crates/collector/src", needle, allowed),
            Vec::<String>::new(),
            "{needle} outside {allowed:?}"
        );
    }
}

/// The same for the server of recordings: figures and pages do not depend on the server.
#[test]
fn the_libraries_of_served_recordings_stay_in_their_modules() {
    for (needle, allowed) in [
        ("hyper", &["listen.rs", "routes.rs"][..]),
        ("tokio::", &["lib.rs", "listen.rs", "routes.rs"]),
        ("rustix::", &["token.rs"]),
        ("sha2", &["graph.rs"]),
        ("base64", &["graph.rs"]),
        ("maud", &["page.rs", "page/"]),
        ("File::", &["source.rs", "tests.rs", "tests/"]),
        // The medium reads parts of a file that the source has opened.
        ("fs::", &["medium.rs", "source.rs", "tests.rs", "tests/"]),
        ("Instant", &["live.rs", "source.rs", "tests/", "token.rs"]),
    ] {
        let found = offenders_in("crates/serve/src", needle, allowed);
        assert_eq!(found, Vec::<String>::new(), "{needle} outside {allowed:?}");
    }
}

/// `unsafe` is used only where the architecture allows it: as blocks, functions, traits or implementations.
#[test]
fn unsafe_stays_in_its_modules() {
    for (folder, allowed) in [
        ("gctrace-user", &["src/bpf/raw.rs"][..]),
        ("gctrace-common/src", &["gvl.rs", "pod.rs"]),
        ("crates", &[]),
        ("tests/src", &[]),
        ("xtask/src", &[]),
    ] {
        for needle in ["unsafe ", "unsafe("] {
            assert_eq!(offenders_in(folder, needle, allowed), Vec::<String>::new(), "{folder}: {needle}");
        }
    }
}

/// What names a clock, a file, a socket, another process, the environment or an output, however it is imported.
const IMPURE: &[&str] = &[
    "fs::",
    "File::",
    "net::",
    "process::",
    "env::",
    "io::stdin",
    "io::stdout",
    "io::stderr",
    "print!",
    "println!",
    "eprint!",
    "eprintln!",
    "dbg!",
    "Instant::now",
    "SystemTime::now",
    "clock_gettime",
];

/// Pure modules read no clock and do no I/O: everything about CRuby, sample sets and advice, and some directories of the
/// agent.
#[test]
fn pure_modules_stay_pure() {
    let mut looked_at = 0;
    for (folder, pure) in [
        ("gctrace-user/src", &["decode/"][..]),
        ("crates/report/src", &["aggregate/", "diff/", "ledger", "model"]),
        ("gctrace-common/src", &[""]),
        ("crates/cruby/src", &["elf/", "ruby/"]),
        ("crates/tunemygc/src", &["tune/", "wire/"]),
    ] {
        for (name, text) in sources(&root().join(folder)) {
            if is_test(&name) || !pure.iter().any(|prefix| name.starts_with(prefix)) {
                continue;
            }
            looked_at += 1;
            let text = without_tests(&text);
            for needle in IMPURE {
                // Files are passed in already opened: `ReadAt` is implemented for them.
                if *needle == "fs::" && name == "elf/source.rs" {
                    continue;
                }
                assert!(!names(&text, needle), "{folder}/{name} contains `{needle}`");
            }
        }
    }
    assert!(looked_at > 100, "{looked_at} files");
}

/// BPF programs use `tgid_tid()`: the library's `pid()` is a thread id, which is easily misread.
#[test]
fn bpf_code_does_not_use_the_misleading_pid() {
    for (name, text) in sources(&root().join("gctrace-ebpf/src")) {
        let code: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
        assert!(!code.contains("ctx.pid()"), "{name}");
    }
}

/// File names in a text that end with the three numbers of a patch release: `libNAME.so.X.Y.Z`.
fn patch_releases(text: &str) -> Vec<&str> {
    let name = |character: char| character.is_ascii_alphanumeric() || "-_.+".contains(character);
    let numbers = |end: &str| {
        let parts: Vec<&str> = end.trim_end_matches('.').split('.').collect();
        parts.len() >= 3 && parts.iter().all(|part| part.parse::<u32>().is_ok())
    };
    let words = text.split(|character| !name(character));
    words.filter(|word| word.split_once(".so.").is_some_and(|(_, end)| numbers(end))).collect()
}

/// Security updates replace a library by its next patch release, so no source names the file of one; sources use sonames
/// (`libruby-3.1.so.3.1`). Facts about a single build are looked up by its build id, in one module.
#[test]
fn no_source_depends_on_a_patch_release() {
    // Assembled here, because this file is checked, too.
    let named = ["/usr/lib/libruby-3.1.so", "3.1.2"].join(".");
    assert_eq!(patch_releases(&format!("open(\"{named}\")")), named.rsplit('/').take(1).collect::<Vec<_>>());
    assert!(patch_releases("\"libruby-3.1.so.3.1\", libc.so.6, lib.so.1.2.x, Ruby 3.1.2").is_empty());

    for folder in ["gctrace-user", "gctrace-common/src", "crates", "tests", "xtask/src"] {
        for (name, text) in files(&root().join(folder), &["c", "py", "rb", "rs", "ru", "sh", "toml"]) {
            assert_eq!(patch_releases(&text), Vec::<&str>::new(), "{folder}/{name}");
            let hexadecimal = |word: &&str| word.len() == 40 && word.bytes().all(|b| b.is_ascii_hexdigit());
            let build_ids = text.split('"').filter(hexadecimal).count();
            assert!(build_ids == 0 || name == "cruby/src/debian.rs", "{folder}/{name} names a build id");
        }
    }
}

/// The text of the manifest of the Debian package.
fn package() -> String {
    let manifest = fs::read_to_string(root().join("gctrace-user/Cargo.toml")).expect("a manifest");
    let from = manifest.find("[package.metadata.deb]").expect("a package");
    let package = &manifest[from..];
    package[..package.find("\n[[bin]]").expect("an end of the package")].to_owned()
}

/// The Debian package has every systemd unit that there is, with scripts that restart it after an upgrade and stop it before removal; a purge
/// deletes the directories that it writes.
#[test]
fn units_are_packaged() {
    let package = package();
    let scripts = root().join("packaging/deb");
    assert!(package.contains("\nmaintainer-scripts = \"../packaging/deb\"\n"), "{package}");
    let postrm = fs::read_to_string(scripts.join("postrm")).expect("a script");
    assert!(postrm.contains("\n#DEBHELPER#\n"), "cargo-deb inserts its own part there");
    let purged = postrm.split("\nif [ \"$1\" = \"purge\" ]; then\n").nth(1).expect("a part for purge");
    let mut units = 0;
    for entry in fs::read_dir(root().join("packaging")).expect("a folder").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(unit) = name.strip_suffix(".service") else { continue };
        units += 1;
        let asset = format!("[\"../packaging/{name}\", \"usr/lib/systemd/system/\", \"644\"]");
        assert!(package.contains(&asset), "{name} is not in the package");
        let started = format!(
            "{{ unit-name = \"{unit}\", enable = false, start = false, restart-after-upgrade = true }}"
        );
        assert!(package.contains(&started), "{name} has no scripts");
        let text = fs::read_to_string(entry.path()).expect("a unit");
        let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        for (key, place) in [("StateDirectory", "/var/lib"), ("CacheDirectory", "/var/cache")] {
            let Some(dir) = value(key) else { continue };
            assert!(
                purged.contains(&format!(" {place}/{dir} ")) || purged.contains(&format!(" {place}/{dir}\n")),
                "{name}: {place}/{dir} is left"
            );
            if value("DynamicUser") == Some("yes") {
                assert!(
                    purged.contains(&format!(" {place}/private/{dir} ")),
                    "{name}: {place}/private/{dir} is left"
                );
            }
        }
    }
    assert!(units >= 2, "{units} units");
}

/// Every file to which a page in the Debian package links is in the package, at the place that the link names.
#[test]
fn links_in_the_package_lead_somewhere() {
    let mut places = BTreeMap::new();
    for line in package().lines() {
        let parts: Vec<&str> = line.split('"').collect();
        let [_, from, _, to, _, _mode, _] = parts[..] else { continue };
        let (Some(from), Some(to)) = (from.strip_prefix("../"), to.strip_prefix("usr/share/doc/gctrace/"))
        else {
            continue;
        };
        let from = Path::new(from);
        let folder = from.parent().expect("a folder");
        let wanted = from.extension().filter(|_| from.file_stem().is_some_and(|stem| stem == "*"));
        let all = from.ends_with("*");
        for entry in fs::read_dir(root().join(folder)).expect("a folder").flatten() {
            let name = PathBuf::from(entry.file_name());
            if all || wanted.is_some_and(|wanted| name.extension() == Some(wanted)) || from.ends_with(&name) {
                places.insert(Path::new(to).join(&name), entry.path());
            }
        }
    }
    assert!(
        places.contains_key(Path::new("README.md")) && places.contains_key(Path::new("docs/options.md")),
        "{places:?}"
    );
    let mut links = 0;
    for (place, file) in places.iter().filter(|(place, _)| place.extension().is_some_and(|is| is == "md")) {
        let text = fs::read_to_string(file).expect("a page");
        for link in text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next()) {
            if link.is_empty() || link.contains(':') || link.contains(char::is_whitespace) {
                continue;
            }
            links += 1;
            let mut target = place.parent().expect("a folder").to_owned();
            for part in Path::new(link).components() {
                match part {
                    Component::ParentDir => drop(target.pop()),
                    part => target.push(part),
                }
            }
            assert!(
                places.keys().any(|place| place.starts_with(&target)),
                "{}: {link} is not in the package",
                place.display()
            );
        }
    }
    assert!(links > 100, "{links} links");
}

/// The top-level functions of a file: whether it is a test, its name, and its text.
fn functions(text: &str) -> Vec<(bool, &str, &str)> {
    let mut found = Vec::new();
    let mut is_test = false;
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let begin = at;
        at += line.len();
        is_test |= line.trim_end() == "#[test]";
        let head = line.strip_prefix("pub(super) ").or_else(|| line.strip_prefix("pub ")).unwrap_or(line);
        let Some(head) = head.strip_prefix("fn ") else { continue };
        let name =
            &head[..head.find(|c: char| !c.is_alphanumeric() && c != '_').expect("an end of the name")];
        let length = text[begin..].find("\n}\n").map_or(text.len() - begin, |end| end + 3);
        found.push((std::mem::take(&mut is_test), name, &text[begin..begin + length]));
    }
    found
}

/// Whether a text names a function of its file: not a method, and not only one whose name begins or ends like this.
fn calls(text: &str, function: &str) -> bool {
    let part_of_a_name = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(function).any(|(at, _)| {
        !text[..at].ends_with(|c| part_of_a_name(c) || c == ':' || c == '.')
            && !text[at + function.len()..].starts_with(part_of_a_name)
    })
}

/// A test that compares times repeats the comparison: `ensure_times!` without `settled`, which the loops over Rubies contain, is only `ensure!`.
#[test]
fn comparisons_of_times_are_repeated() {
    const REPEAT: [&str; 6] = [
        "settled(",
        "Ruby::each(",
        "Ruby::first_and_last(",
        "Ruby::first_and_last_at_a_time(",
        "Ruby::two_at_a_time(",
        "Ruby::two_of(",
    ];
    let mut compare = 0;
    for (file, text) in sources(&root().join("tests/tests")) {
        let functions = functions(&text);
        for (_, name, body) in functions.iter().filter(|(is_test, ..)| *is_test) {
            let (mut reached, mut waiting) = (vec![*name], vec![*body]);
            let (mut compares, mut repeats) = (false, false);
            while let Some(body) = waiting.pop() {
                compares |= body.contains("ensure_times!");
                repeats |= REPEAT.iter().any(|how| body.contains(how));
                for (_, other, its) in &functions {
                    if !reached.contains(other) && calls(body, other) {
                        reached.push(other);
                        waiting.push(its);
                    }
                }
            }
            compare += u32::from(compares);
            assert!(!compares || repeats, "{file}: {name} compares times only once");
        }
    }
    assert!(compare > 30, "{compare} tests");
}

/// What has to be compiled before anything else can start: `xtask` has few dependencies, and none on the product.
#[test]
fn xtask_is_small() {
    let lock = fs::read_to_string(root().join("Cargo.lock")).expect("a lock file");
    let mut packages: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in lock.split("[[package]]").skip(1) {
        let name = package.split('"').nth(1).expect("a name");
        let dependencies = package.split_once("dependencies = [").map_or("", |(_, rest)| rest);
        // A name, and a version where there are several.
        let dependencies =
            dependencies.split('"').skip(1).step_by(2).filter_map(|text| text.split(' ').next());
        packages.entry(name).or_default().extend(dependencies);
    }
    let (mut reached, mut waiting) = (Vec::new(), vec!["xtask"]);
    while let Some(name) = waiting.pop() {
        // Those for another system are in the file, too.
        if !reached.contains(&name) && !name.starts_with("windows") {
            reached.push(name);
            waiting.extend(packages.get(name).unwrap_or_else(|| panic!("no package {name}")));
        }
    }
    assert!((10..=40).contains(&reached.len()), "{} packages: {reached:?}", reached.len());
    for product in ["gctrace-user", "gctrace-cruby"] {
        assert!(!reached.contains(&product), "it depends on {product}");
    }
}
