//! Searches for separate debug information of a small library, below fabricated roots and on a fake server.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Shutdown, TcpListener};
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::damaged::Damaged;

const SOURCE: &str = "static int __attribute__((noinline)) hidden(int a) { return a * 3; }\n\
                      int shown(int a) { return hidden(a) + 1; }\n\
                      struct thing { int a; } thing;\n";

/// A library in several states, and an empty root folder.
struct Fixture {
    dir: TempDir,
}

impl Fixture {
    fn new() -> Self {
        let fixture = Self { dir: tempfile::tempdir().unwrap() };
        fs::write(fixture.path("gc.c"), SOURCE).unwrap();
        fixture.run("gcc", &["-g", "-O1", "-shared", "-fPIC", "-Wl,--build-id", "gc.c", "-o", "whole.so"]);
        fixture.run("objcopy", &["--only-keep-debug", "whole.so", "thing.debug"]);
        fixture.run("objcopy", &["--strip-all", "whole.so", "bare.so"]);
        fixture.run("objcopy", &["--strip-all", "--add-gnu-debuglink=thing.debug", "whole.so", "linked.so"]);
        // The same source, but another build, with different code and build id.
        fixture.run("gcc", &["-g", "-O0", "-shared", "-fPIC", "-Wl,--build-id", "gc.c", "-o", "other.so"]);
        fs::create_dir(fixture.path("root")).unwrap();
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn run(&self, program: &str, args: &[&str]) {
        let output = Command::new(program).args(args).current_dir(self.dir.path()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {args:?}: {said}");
    }

    fn image(&self, name: &str) -> (ElfImage, File) {
        let file = File::open(self.path(name)).unwrap();
        (ElfImage::read(&file).unwrap(), file)
    }

    /// Installs a file below the root.
    fn install(&self, name: &str, at: &str) -> PathBuf {
        let target = self.path("root").join(at.trim_start_matches('/'));
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::copy(self.path(name), &target).unwrap();
        target
    }

    fn build_id(&self) -> String {
        self.image("bare.so").0.build_id().unwrap().to_string()
    }

    fn by_id(&self) -> String {
        let id = self.build_id();
        format!("/usr/lib/debug/.build-id/{}/{}.debug", &id[..2], &id[2..])
    }

    fn symbols_of(&self, name: &str, servers: Option<&Servers>) -> Located<SymbolTable> {
        let (image, file) = self.image(name);
        let roots = [self.path("root")];
        let path = Path::new("/usr/lib/libthing.so");
        let search = Search { build_id: image.build_id(), path, owner: Some(user()), roots: &roots, servers };
        symbols(&image, &file, &search)
    }
}

/// The user who makes the files of these tests.
fn user() -> u32 {
    rustix::process::getuid().as_raw()
}

/// A debug file or supplementary file is used if root or the owner of the image owns it: a process may show any file in its root, and the image is
/// that of other users, too.
#[test]
fn owners() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let fixture = Fixture::new();
    let target = fixture.install("thing.debug", &fixture.by_id());
    let (image, file) = fixture.image("bare.so");
    let roots = [fixture.path("root")];
    let path = Path::new("/usr/lib/libthing.so");
    let of = |owner| {
        let search = Search { build_id: image.build_id(), path, owner, roots: &roots, servers: None };
        (symbols(&image, &file, &search), types(&file, &search).found.is_some())
    };
    for (its, images, used) in [
        (0, Some(1), true),
        (0, None, true),
        (1, Some(1), true),
        (1, Some(0), false),
        (1, Some(2), false),
        (1, None, false),
    ] {
        std::os::unix::fs::chown(&target, Some(its), None).unwrap();
        let (symbols, types) = of(images);
        assert_eq!((symbols.found.is_some(), types), (used, used), "{its} {images:?}");
        let reason = "user 1 owns it, not root or the owner of the image";
        assert_eq!(reasons(&symbols).contains(reason), !used, "{}", reasons(&symbols));
    }
}

/// Asserts that a table agrees with the symbols of the unstripped file.
fn agrees(fixture: &Fixture, table: &SymbolTable) {
    let (whole, _) = fixture.image("whole.so");
    for name in ["hidden", "shown"] {
        assert_eq!(table.find(name).unwrap().address, whole.symbols().find(name).unwrap().address, "{name}");
    }
}

fn reasons<T>(located: &Located<T>) -> String {
    located.misses.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// Found by build id; and by debug link beside the file, in `.debug`, and below /usr/lib/debug, with its checksum.
#[test]
fn separate_files() {
    for (image, at) in [
        ("bare.so", None),
        ("linked.so", Some("/usr/lib/thing.debug")),
        ("linked.so", Some("/usr/lib/.debug/thing.debug")),
        ("linked.so", Some("/usr/lib/debug/usr/lib/thing.debug")),
    ] {
        let fixture = Fixture::new();
        let nothing = fixture.symbols_of(image, None);
        assert!(nothing.found.is_none());
        assert!(nothing.misses.iter().all(|miss| miss.reason == "not there"), "{}", reasons(&nothing));

        let by_id = fixture.by_id();
        let target = fixture.install("thing.debug", at.unwrap_or(&by_id));
        let (table, origin) = fixture.symbols_of(image, None).found.unwrap();
        agrees(&fixture, &table);
        let expected = if at.is_some() { Origin::DebugLink(target) } else { Origin::BuildId(target) };
        assert_eq!(origin, expected);

        let (elf, file) = fixture.image(image);
        let roots = [fixture.path("nowhere"), fixture.path("root")];
        let path = Path::new("/usr/lib/libthing.so");
        let search =
            Search { build_id: elf.build_id(), path, owner: Some(user()), roots: &roots, servers: None };
        let types = types(&file, &search).found.unwrap().0;
        let found = dwarf::read_structs(&types.file, None, &["thing"], &["gc.c"]).unwrap();
        assert_eq!(found.by_tag["thing"].size, 4);
    }
}

/// The root of the process takes precedence over the host's, and build ids over links; candidates that do not belong are
/// skipped.
#[test]
fn order_of_places() {
    let fixture = Fixture::new();
    let by_id = fixture.by_id();
    let links = ["/usr/lib/thing.debug", "/usr/lib/.debug/thing.debug", "/usr/lib/debug/usr/lib/thing.debug"];
    let roots = [fixture.path("root/container"), fixture.path("root")];
    let (image, file) = fixture.image("linked.so");
    let path = Path::new("/usr/lib/libthing.so");
    let search =
        Search { build_id: image.build_id(), path, owner: Some(user()), roots: &roots, servers: None };
    let look = || symbols(&image, &file, &search).found.map(|(_, origin)| origin);
    let install =
        |at: &str| ["container/", ""].map(|root| fixture.install("thing.debug", &format!("{root}{at}")));
    let mut expected: Vec<Origin> = install(&by_id).map(Origin::BuildId).into();
    let linked = links.map(install);
    expected.extend((0..2).flat_map(|root| linked.iter().map(move |at| Origin::DebugLink(at[root].clone()))));
    for origin in expected {
        assert_eq!(look().as_ref(), Some(&origin));
        assert!(may_be_at_hand(&file, &search));
        let (Origin::BuildId(place) | Origin::DebugLink(place)) = &origin else { unreachable!() };
        // First as another build's, then not at all.
        fs::copy(fixture.path("other.so"), place).unwrap();
        assert_ne!(look().as_ref(), Some(&origin));
        fs::remove_file(place).unwrap();
    }
    assert!(look().is_none() && !may_be_at_hand(&file, &search));
}

/// A debug file of another build, one whose checksum differs, one without symbols and a broken one are not used, and
/// the reason is reported.
#[test]
fn strangers_are_refused() {
    let fixture = Fixture::new();
    let by_id = fixture.by_id();
    fixture.install("other.so", &by_id);
    fixture.install("other.so", "/usr/lib/thing.debug");
    fixture.install("bare.so", "/usr/lib/.debug/thing.debug");
    let mut damaged = fs::read(fixture.path("thing.debug")).unwrap();
    *damaged.last_mut().unwrap() ^= 1;
    fs::write(fixture.path("damaged"), damaged).unwrap();
    fixture.install("damaged", "/usr/lib/debug/usr/lib/thing.debug");
    let located = fixture.symbols_of("linked.so", None);
    assert!(located.found.is_none());
    let said = reasons(&located);
    assert_eq!(said.matches("its build id is").count(), 2, "{said}");
    assert_eq!(said.matches("its CRC is").count(), 2, "{said}");

    fixture.install("bare.so", &by_id);
    assert!(reasons(&fixture.symbols_of("bare.so", None)).contains("it has no symbol table"));
    fs::write(fixture.path("text"), "no debug file").unwrap();
    fixture.install("text", &by_id);
    assert!(reasons(&fixture.symbols_of("bare.so", None)).contains("not an ELF file"));
}

/// Symbolic links are followed inside the root and never out of it; only regular files are opened.
#[test]
fn links_stay_below_the_root() {
    let fixture = Fixture::new();
    let by_id = fixture.by_id();
    let target = fixture.install("thing.debug", &by_id);
    fs::rename(&target, fixture.path("root/moved.debug")).unwrap();
    symlink("/moved.debug", &target).unwrap();
    assert!(fixture.symbols_of("bare.so", None).found.is_some(), "a link inside the root");
    fs::remove_file(&target).unwrap();
    symlink(fixture.path("thing.debug"), &target).unwrap();
    let outside = fixture.symbols_of("bare.so", None);
    assert!(outside.found.is_none(), "a link out of the root");
    fs::remove_file(&target).unwrap();
    symlink("../../../../../../../../../../../../etc/passwd", &target).unwrap();
    assert!(fixture.symbols_of("bare.so", None).found.is_none());
    fs::remove_file(&target).unwrap();
    fixture.run("mkfifo", &[target.to_str().unwrap()]);
    let fifo = fixture.symbols_of("bare.so", None);
    assert!(reasons(&fifo).contains("not a regular file"), "{}", reasons(&fifo));
}

/// `.gnu_debugdata`, made as distributions make it; broken or oversized ones are refused.
#[test]
fn embedded_symbols() {
    let fixture = Fixture::new();
    let embed = |content: &str| {
        let section = format!(".gnu_debugdata={content}");
        fixture.run("objcopy", &["--add-section", &section, "bare.so", "mini.so"]);
        fixture.symbols_of("mini.so", None)
    };
    fixture.run(
        "objcopy",
        &["-S", "--remove-section=.gdb_index", "--keep-symbol=hidden", "thing.debug", "mini"],
    );
    fixture.run("xz", &["-k", "mini"]);
    let (table, origin) = embed("mini.xz").found.unwrap();
    assert_eq!(origin, Origin::Embedded);
    let (whole, _) = fixture.image("whole.so");
    assert_eq!(table.find("hidden").unwrap().address, whole.symbols().find("hidden").unwrap().address);
    assert!(table.find("shown").is_none());

    fs::write(fixture.path("garbage.xz"), b"\xfd7zXZ\0garbage").unwrap();
    assert!(reasons(&embed("garbage.xz")).contains("malformed .gnu_debugdata: xz:"));
    fs::write(fixture.path("zeros"), vec![0; 80 << 20]).unwrap();
    fixture.run("xz", &["-k", "-1", "zeros"]);
    assert!(reasons(&embed("zeros.xz")).contains("more than the limit"));
    fixture.run("objcopy", &["-S", "--keep-symbol=hidden", "other.so", "stranger"]);
    fixture.run("xz", &["-k", "stranger"]);
    assert!(reasons(&embed("stranger.xz")).contains("its build id is"));
}

/// A server that responds to each path with the given data, and records the requests.
fn serve(answer: impl Fn(&str) -> Option<Vec<u8>> + Send + 'static) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&asked);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut lines = BufReader::new(&stream).lines().map_while(Result::ok);
            let path =
                lines.next().and_then(|line| line.split(' ').nth(1).map(str::to_owned)).unwrap_or_default();
            lines.take_while(|line| !line.is_empty()).for_each(drop);
            log.lock().unwrap().push(path.clone());
            let mut out = &stream;
            let _ = match answer(&path) {
                Some(body) if body.starts_with(b"HTTP/1.1 ") => out.write_all(&body),
                Some(body) => {
                    let head = format!(
                        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                        body.len()
                    );
                    out.write_all(head.as_bytes()).and_then(|()| out.write_all(&body))
                }
                None => {
                    out.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                }
            };
            let _ = stream.shutdown(Shutdown::Both);
        }
    });
    (url, asked)
}

fn servers(urls: &str) -> Servers {
    Servers::with_timeout(urls, Duration::from_secs(2)).0.unwrap()
}

/// Sections are requested first; a server that does not support them is asked for the whole file; after a server that has
/// nothing, the next one is queried.
#[test]
fn servers_are_asked() {
    let fixture = Fixture::new();
    let id = fixture.build_id();
    let bytes = fs::read(fixture.path("whole.so")).unwrap();
    let headers = Headers::read(bytes.as_slice()).unwrap();
    let section = |name: &str| {
        let section = headers.section(name).unwrap();
        bytes[section.offset as usize..(section.offset + section.size) as usize].to_vec()
    };
    let (symtab, strtab) = (section(".symtab"), section(".strtab"));
    let (empty, asked_empty) = serve(|_| None);
    let (new, asked_new) = serve(move |path| match path.rsplit_once('/')?.1 {
        ".symtab" => Some(symtab.clone()),
        ".strtab" => Some(strtab.clone()),
        _ => None,
    });
    let both = servers(&format!("{empty}/ {new}"));
    let located = fixture.symbols_of("bare.so", Some(&both));
    let (table, origin) = located.found.unwrap();
    agrees(&fixture, &table);
    assert_eq!(origin, Origin::Server(new));
    let prefix = format!("/buildid/{id}");
    let sections = [format!("{prefix}/section/.symtab"), format!("{prefix}/section/.strtab")];
    assert_eq!(*asked_new.lock().unwrap(), sections);
    assert_eq!(*asked_empty.lock().unwrap(), [sections[0].clone(), format!("{prefix}/debuginfo")]);

    let (old, _) = serve(move |path| path.ends_with("/debuginfo").then(|| bytes.clone()));
    let old = servers(&old);
    agrees(&fixture, &fixture.symbols_of("bare.so", Some(&old)).found.unwrap().0);
    let (image, file) = fixture.image("bare.so");
    let search = Search {
        build_id: image.build_id(),
        path: Path::new("/x"),
        owner: None,
        roots: &[],
        servers: Some(&old),
    };
    let types = types(&file, &search).found.unwrap().0;
    assert!(
        dwarf::read_structs(&types.file, None, &["thing"], &["gc.c"]).unwrap().by_tag.contains_key("thing")
    );
}

/// Wrong, endless, slow and oversized responses are refused by name, within the time limit.
#[test]
fn servers_are_not_trusted() {
    let fixture = Fixture::new();
    let other = fs::read(fixture.path("other.so")).unwrap();
    let (wrong, _) = serve(move |path| path.ends_with("/debuginfo").then(|| other.clone()));
    let (large, _) = serve(|_| Some(b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999999\r\n\r\n".to_vec()));
    let (short, _) = serve(|_| Some(b"HTTP/1.1 200 OK\r\nContent-Length: 4096\r\n\r\nabc".to_vec()));
    let (broken, _) = serve(|_| Some(b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n".to_vec()));
    let (garbage, _) = serve(|_| Some(vec![7; 4096]));
    let (slow, _) = serve(|_| {
        std::thread::sleep(Duration::from_secs(20));
        None
    });
    let stranger_symbols = {
        let bytes = fs::read(fixture.path("other.so")).unwrap();
        let headers = Headers::read(bytes.as_slice()).unwrap();
        move |path: &str| {
            let section = headers.section(path.rsplit_once('/')?.1)?;
            Some(bytes[section.offset as usize..(section.offset + section.size) as usize].to_vec())
        }
    };
    let (stranger, _) = serve(stranger_symbols);
    let closed = "http://127.0.0.1:9";
    for (url, expected) in [
        (wrong.as_str(), "its build id is"),
        (&large, "more than the limit"),
        (&short, "the response was cut off"),
        (&broken, "500"),
        (&garbage, "no symbol table"),
        (&stranger, "is at another address than in the image"),
        (&slow, "timeout"),
        (closed, "efused"),
    ] {
        let begun = Instant::now();
        let located = fixture.symbols_of("bare.so", Some(&servers(url)));
        assert!(located.found.is_none(), "{expected}");
        assert!(reasons(&located).contains(expected), "{expected}: {}", reasons(&located));
        assert!(begun.elapsed() < Duration::from_secs(10), "{expected}");
    }
}

/// Without servers nothing is requested; anything that is not a URL is reported and left out.
#[test]
fn servers_are_named_by_the_user() {
    let (none, invalid) = Servers::parse("  ");
    assert!(none.is_none() && invalid.is_empty());
    let (some, invalid) = Servers::parse("https://one.example/ file:///x http://two.example/sub");
    assert_eq!(some.unwrap().urls(), ["https://one.example", "http://two.example/sub"]);
    assert_eq!(invalid.len(), 1);
    assert!(invalid[0].to_string().contains("`file:///x`"));
}

/// Two libraries, `one.so` and `two.so`, that share a supplementary file, `common.debug`.
fn with_supplement() -> Fixture {
    let fixture = Fixture::new();
    // Enough types to make sharing worthwhile.
    let part = |i| format!("struct part{i} {{ long a{i}, b{i}; char *c{i}; }} part{i};\n");
    let many = (0..40).map(part).collect::<Vec<_>>().concat();
    fs::write(fixture.path("many.c"), many).unwrap();
    for (name, optimise) in [("one.so", "-O1"), ("two.so", "-O0")] {
        let options = ["-g", optimise, "-shared", "-fPIC", "-Wl,--build-id", "gc.c", "many.c", "-o", name];
        fixture.run("gcc", &options);
    }
    fixture.run("dwz", &["-m", "common.debug", "one.so", "two.so"]);
    fixture
}

/// A server's supplementary file must be the one to which the debug file refers.
#[test]
fn supplementary_files_of_servers() {
    let fixture = with_supplement();
    let (image, file) = fixture.image("one.so");
    let own = format!("/buildid/{}/debuginfo", image.build_id().unwrap());
    for (supplement, fits) in [("common.debug", true), ("other.so", false)] {
        let bytes = |name: &str| fs::read(fixture.path(name)).unwrap();
        let (own, one, common) = (own.clone(), bytes("one.so"), bytes(supplement));
        let (url, _) = serve(move |path| Some(if path == own { one.clone() } else { common.clone() }));
        let servers = servers(&url);
        let path = Path::new("/x");
        let search = Search {
            build_id: image.build_id(),
            path,
            owner: Some(user()),
            roots: &[],
            servers: Some(&servers),
        };
        let located = types(&file, &search);
        assert_eq!(located.found.is_some(), fits, "{supplement}: {}", reasons(&located));
        assert!(fits || reasons(&located).contains("its build id is"), "{}", reasons(&located));
    }
}

/// The supplementary file of dwz is found beside the debug file or by its build id, and must match.
#[test]
fn supplementary_files() {
    let fixture = with_supplement();
    let (file, _) = open_given(&fixture.path("one.so")).unwrap();
    assert!(dwarf::alt_link(&file.file).unwrap().is_some());
    assert!(file.alt.is_some());
    fs::rename(fixture.path("common.debug"), fixture.path("gone")).unwrap();
    assert!(open_given(&fixture.path("one.so")).unwrap_err().contains("common.debug"));
    fs::copy(fixture.path("whole.so"), fixture.path("common.debug")).unwrap();
    assert!(open_given(&fixture.path("one.so")).is_err(), "another file in its place");
}

/// A supplementary file of another user beside the debug file does not hide the one that its build id names.
#[test]
fn supplementary_files_of_others() {
    let fixture = with_supplement();
    let (debug, alt) = (fixture.install("one.so", "/usr/lib/one.so"), fixture.path("common.debug"));
    let beside = fixture.install("common.debug", "/usr/lib/common.debug");
    let id = build_id_of(&File::open(alt).unwrap()).unwrap().unwrap().to_string();
    let by_id = format!("/usr/lib/debug/.build-id/{}/{}.debug", &id[..2], &id[2..]);
    let inode = |path: &Path| fs::metadata(path).unwrap().ino();
    let others = inode(&beside);
    let look = || {
        let check = |alt: &File| {
            let other = alt.metadata()?.ino() == others;
            if other { Err(Reject::OtherOwner(1)) } else { Ok(()) }
        };
        let root = fixture.path("root");
        local::alt_of(&File::open(&debug).unwrap(), &root, Path::new("/usr/lib/one.so"), check)
    };
    assert!(matches!(look(), Err(Reject::OtherOwner(1))));
    let usable = fixture.install("common.debug", &by_id);
    assert_eq!(look().unwrap().unwrap().metadata().unwrap().ino(), inode(&usable));
}

/// Files that a user names are refused with their path and the reason.
#[test]
fn given_files() {
    let fixture = Fixture::new();
    let (_, id) = open_given(&fixture.path("thing.debug")).unwrap();
    assert_eq!(id.unwrap().to_string(), fixture.build_id());
    for (name, reason) in [("bare.so", "no DWARF"), ("gc.c", "not an ELF file"), ("none", "No such file")] {
        let error = open_given(&fixture.path(name)).unwrap_err();
        assert!(error.contains(name) && error.contains(reason), "{error}");
    }
}

/// Damaged images, links and packed tables never panic.
#[test]
fn damage_never_panics() {
    let fixture = Fixture::new();
    fixture.run("objcopy", &["-S", "--keep-symbol=hidden", "thing.debug", "mini"]);
    fixture.run("xz", &["-k", "mini"]);
    fixture.run("objcopy", &["--add-section", ".gnu_debugdata=mini.xz", "linked.so", "mini.so"]);
    fixture.install("thing.debug", "/usr/lib/thing.debug");
    let bytes = fs::read(fixture.path("mini.so")).unwrap();
    let (image, _) = fixture.image("mini.so");
    let headers = Headers::read(bytes.as_slice()).unwrap();
    let wanted = [".gnu_debugdata", ".gnu_debuglink", ".note.gnu.build-id"];
    let mut ranges: Vec<_> = wanted
        .iter()
        .map(|name| headers.section(name).unwrap())
        .map(|section| section.offset as usize..(section.offset + section.size) as usize)
        .collect();
    ranges.push(bytes.len() - 64 * headers.sections.len()..bytes.len());
    let byte = prop_oneof![Just(0_u8), Just(0xff), any::<u8>()];
    let place = prop::sample::select(ranges).prop_flat_map(|range| range);
    let roots = [fixture.path("root")];
    proptest!(ProptestConfig::with_cases(1_000), |(patches in prop::collection::vec((place, byte), 1..12))| {
        let damaged = Damaged { bytes: &bytes, patches };
        let path = Path::new("/usr/lib/libthing.so");
        let search = Search { build_id: image.build_id(), path, owner: Some(user()), roots: &roots, servers: None };
        let located = symbols(&image, &damaged, &search);
        prop_assert!(located.misses.len() <= 5);
        let _ = types(&damaged, &search);
    });
}
