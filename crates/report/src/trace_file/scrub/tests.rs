//! Nothing that is replaced remains, and everything else is unchanged.

use std::{collections::HashSet, os::unix::fs::PermissionsExt as _};

use proptest::prelude::*;

use super::*;
use crate::{
    export::Outputs,
    model::{source::Source, stack::FrameKind},
    trace_file::{
        chunk::{Chunks, Expander, Next},
        replay,
        tests::{Log, recorded},
    },
};

/// The texts in the chunks, and the header.
fn texts(bytes: &[u8]) -> (Vec<String>, wire::Header) {
    let mut chunks = Chunks::open(bytes).unwrap();
    let mut found = Vec::new();
    let mut header = None;
    loop {
        match chunks.next().unwrap() {
            Next::Header(bytes) => header = Some(wire::Header::decode(&bytes[..]).unwrap()),
            Next::Entries(bytes) => {
                let content = Expander::default().expand(&bytes).unwrap();
                let chunk = wire::Chunk::decode(&content[..]).unwrap();
                found.extend(chunk.texts);
                found.extend(chunk.images.iter().map(|image| String::from_utf8(image.path.clone()).unwrap()));
            }
            Next::Ended(_) => return (found, header.unwrap()),
        }
    }
}

/// What outputs receive, with empty strings and without traces.
fn blanked(bytes: &[u8]) -> Vec<String> {
    let log = Log::default();
    let mut outputs = Outputs::new(vec![Box::new(log.clone())]);
    let mut recording = Recording::read(bytes, Path::new("test")).unwrap();
    let replayed = replay(&mut recording, &mut outputs).unwrap();
    let quoted = regex_lite::Regex::new(r#""([^"\\]|\\.)*""#).unwrap();
    let traces = r"trace: (None|Some\(Trace \{ trace_id: \d+, caller: (None|Some\(Caller \{[^}]*\}\)), origin: \w+ \}\))";
    let traces = regex_lite::Regex::new(traces).unwrap();
    let spans = regex_lite::Regex::new(r"span: (None|Some\(Span \{[^}]*\}\))").unwrap();
    let mut lines: Vec<String> =
        log.lines().iter().filter(|line| !line.starts_with("refused")).cloned().collect();
    lines.push(format!("{replayed:?} {:?}", recording.header()));
    // Counters are named in maps.
    lines
        .iter()
        .map(|line| quoted.replace_all(line, "\"\"").into_owned())
        .map(|line| traces.replace_all(&line, "trace: _").into_owned())
        .map(|line| spans.replace_all(&line, "span: _").into_owned())
        .collect()
}

fn scrubbed(bytes: &[u8], keep: &[Kind]) -> (Vec<u8>, Scrubbed) {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("a.gctrace"), dir.path().join("b.gctrace"));
    std::fs::write(&from, bytes).unwrap();
    let done = scrub(&from, &to, &keep.iter().copied().collect()).unwrap();
    assert_eq!(std::fs::metadata(&to).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    (std::fs::read(&to).unwrap(), done)
}

/// Committed recordings of real Rubies, and one with everything that can be seen.
fn recordings() -> Vec<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/recordings");
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|name| name == "gctrace"));
    let found: Vec<_> = files.map(|path| std::fs::read(path).unwrap()).chain([recorded().0]).collect();
    assert!(found.len() >= 5);
    found
}

/// What any copy keeps: words of Ruby and gctrace.
fn is_word(text: &str) -> bool {
    let mut words = crate::ruby::stat::words().chain(crate::aggregate::endpoint::METHODS);
    let counters = gctrace_common::stats::Counter::ALL;
    text.is_empty()
        || text == "why not"
        || text == "RUBY_GC_HEAP_INIT_SLOTS"
        || words.any(|word| word == text)
        || counters.iter().any(|counter| counter.name() == text)
        || crate::ledger::UserCounts::default().set(text, 0)
        || text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Frames of a recording: kind, name, file.
fn frames(bytes: &[u8]) -> Vec<(FrameKind, String, Option<String>)> {
    let mut recording = Recording::read(bytes, Path::new("test")).unwrap();
    let mut found = Vec::new();
    while let Ok((_, entries)) = recording.next().unwrap() {
        for entry in entries {
            if let Recorded::Seen(_, mut owned) = entry {
                visit(&mut owned, &mut Frames(&mut found));
            }
        }
    }
    found
}

struct Frames<'a>(&'a mut Vec<(FrameKind, String, Option<String>)>);

impl Visit for Frames<'_> {
    fn stack(&mut self, stack: &mut Stack) {
        let of =
            |frame: &Arc<Frame>| (frame.kind, frame.name.to_string(), frame.file.as_deref().map(Into::into));
        self.0.extend(stack.iter().map(of));
    }
}

/// The traces of a recording's requests, and of its stacks.
fn traces(bytes: &[u8]) -> Vec<Option<u128>> {
    let mut recording = Recording::read(bytes, Path::new("test")).unwrap();
    let mut found = Vec::new();
    while let Ok((_, entries)) = recording.next().unwrap() {
        for entry in entries {
            if let Recorded::Seen(_, mut owned) = entry {
                visit(&mut owned, &mut Traces(&mut found));
            }
        }
    }
    found
}

/// The path of the run of a program is its name, which is kept only with all else that may be this name.
#[test]
fn names_of_runs() {
    let mut scrubber = Scrubber::new([Kind::Endpoints].into()).unwrap();
    let run = request::Request {
        path: Some("secret.rb".to_owned()),
        is_run: true,
        job: None,
        ..crate::trace_file::samples::request(7)
    };
    let path = |scrubber: &mut Scrubber, is_run| {
        let mut request = request::Request { is_run, ..run.clone() };
        crate::trace_file::visit::request(&mut request, scrubber);
        request.path.unwrap()
    };
    assert!(path(&mut scrubber, true).starts_with("program-"));
    assert_eq!(path(&mut scrubber, false), "secret.rb");
    let keep = [Kind::Endpoints, Kind::Services, Kind::Arguments, Kind::Threads].into();
    assert_eq!(path(&mut Scrubber::new(keep).unwrap(), true), "secret.rb");
    assert!(path(&mut Scrubber::new(BTreeSet::new()).unwrap(), true).starts_with("/path-"));
}

struct Traces<'a>(&'a mut Vec<Option<u128>>);

impl Visit for Traces<'_> {
    fn trace(&mut self, trace: &mut Option<Trace>) {
        self.0.push(trace.map(|trace| trace.trace_id));
    }

    fn span(&mut self, span: &mut Option<Span>) {
        self.0.push(span.map(|span| span.trace_id));
    }
}

/// Traces are removed if paths of requests are replaced, and kept otherwise.
#[test]
fn traces_go_with_paths() {
    let (bytes, _) = recorded();
    let before = traces(&bytes);
    assert!(before.iter().any(Option::is_some) && before.iter().any(Option::is_none), "{before:?}");
    assert_eq!(traces(&scrubbed(&bytes, &[Kind::Endpoints]).0), before);
    let after = traces(&scrubbed(&bytes, &[]).0);
    assert!(after.len() == before.len() && after.iter().all(Option::is_none), "{after:?}");
}

/// With names replaced, no text of the recording is in the copy, except words that are the same in every recording.
#[test]
fn nothing_is_left() {
    for bytes in recordings() {
        let (copy, done) = scrubbed(&bytes, &[]);
        assert_eq!(done.ending, Ending::Complete);
        let public: HashSet<String> = frames(&bytes)
            .into_iter()
            .filter(|(kind, _, file)| {
                let own = matches!(kind, FrameKind::Kernel | FrameKind::Vm | FrameKind::Missing);
                own || (*kind == FrameKind::Native && file.as_deref().is_some_and(files::is_public))
            })
            .map(|(_, name, _)| name)
            .collect();
        let is_public = |text: &str| {
            let own = names::RUBYS_OWN.iter().any(|own| {
                let within = text.strip_suffix(own);
                within.is_some_and(|within| within.is_empty() || within.starts_with("block "))
            });
            own || public.contains(text)
        };
        let ((before, head_before), (after, head)) = (texts(&bytes), texts(&copy));
        let mut secrets = 0;
        for secret in before.iter().chain(&head_before.host).chain(&head_before.boot) {
            // Common files keep their names, in other directories.
            let kept = is_word(secret) || is_public(secret) || secret.starts_with("<internal:");
            if kept || secret.starts_with('[') {
                continue;
            }
            secrets += 1;
            for text in after
                .iter()
                .chain(&head.host)
                .chain(&head.boot)
                .filter(|text| !is_word(text) && !is_public(text))
            {
                // A short text may be part of another one by chance.
                let is_in = if secret.len() < 6 { text == secret } else { text.contains(secret.as_str()) };
                assert!(!is_in, "{secret:?} is in {text:?}");
            }
            let raw = |bytes: &[u8]| bytes.windows(secret.len()).any(|part| part == secret.as_bytes());
            assert!(secret.len() < 6 || !raw(&copy), "{secret}");
        }
        assert!(secrets > 10, "{before:?}");
        let kinds: Vec<Kind> = done.replaced.iter().map(|(kind, _)| *kind).collect();
        assert!(kinds.contains(&Kind::Names) && kinds.contains(&Kind::Hosts), "{kinds:?}");
    }
}

/// Times, counts, stacks, processes and accounts equal those of the recording, whatever is replaced.
#[test]
fn the_rest_is_equal() {
    for bytes in recordings() {
        let before = blanked(&bytes);
        for keep in [&[][..], &[Kind::Names], &Kind::ALL] {
            let after = blanked(&scrubbed(&bytes, keep).0);
            assert_eq!(before.len(), after.len());
            for (before, after) in before.iter().zip(&after) {
                assert_eq!(before, after);
            }
        }
        // What is kept is equal, too.
        let (same, done) = scrubbed(&bytes, &Kind::ALL);
        assert_eq!((texts(&same), done.replaced), (texts(&bytes), Vec::new()));
    }
}

/// A copy ends like the recording; a damaged recording has no copy.
#[test]
fn ends() {
    let (bytes, _) = recorded();
    let (copy, done) = scrubbed(&bytes[..bytes.len() - 3], &[]);
    assert_eq!(done.ending, Ending::CutOff(21));
    assert_eq!(scrubbed(&copy, &[]).1.ending, Ending::CutOff(0));
    let mut damaged = bytes.clone();
    damaged[bytes.len() / 2] ^= 1;
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("a"), dir.path().join("b"));
    std::fs::write(&from, &damaged).unwrap();
    std::fs::write(&to, "mine").unwrap();
    let error = scrub(&from, &to, &BTreeSet::new()).unwrap_err().to_string();
    assert!(error.contains("is damaged") && error.ends_with("no copy was written"), "{error}");
    assert_eq!(std::fs::read_to_string(&to).unwrap(), "mine");
    std::fs::write(&from, &bytes).unwrap();
    std::os::unix::fs::symlink(&from, dir.path().join("link")).unwrap();
    for same in [&from, &dir.path().join("link")] {
        let error = scrub(&from, same, &BTreeSet::new()).unwrap_err().to_string();
        assert!(error.contains("is the recording itself"), "{error}");
    }
    assert_eq!(std::fs::read(&from).unwrap(), bytes);
    let error = scrub(&from, &dir.path().join("none/x"), &BTreeSet::new()).unwrap_err().to_string();
    assert!(error.contains("none/x cannot be written: No such file"), "{error}");
}

/// Two copies have different pseudonyms: the key is not kept.
#[test]
fn keys_are_thrown_away() {
    let (bytes, _) = recorded();
    let (one, other) = (texts(&scrubbed(&bytes, &[]).0).0, texts(&scrubbed(&bytes, &[]).0).0);
    let shared: Vec<&String> = one.iter().filter(|text| !is_word(text) && other.contains(text)).collect();
    assert!(shared.iter().all(|text| ["why not", "<main>"].contains(&text.as_str())), "{shared:?}");
}

/// Names keep their form; equal parts have equal pseudonyms.
#[test]
fn forms() {
    let mut with = Pseudonyms::new().unwrap();
    let mut of = |kind, name: &str, file: Option<&str>| {
        let (name, file) = (Arc::from(name), file.map(Arc::from));
        let frame = Frame { kind, name, file, line: 1, first_line: 1, address: 0 };
        names::of(&frame, &mut with)
    };
    let digits = regex_lite::Regex::new("[0-9a-f]{16}").unwrap();
    let cases = [
        ("Order#total", "Class_*#method_*"),
        ("Shop::Order.find", "Class_*.method_*"),
        ("block in Order#total", "block in Class_*#method_*"),
        ("block (2 levels) in Order#total", "block (2 levels) in Class_*#method_*"),
        ("block (x levels) in Order#total", "Class_*#method_*"),
        ("rescue in block in Order#total", "rescue in block in Class_*#method_*"),
        ("block in <class:Order>", "block in <class:Class_*>"),
        ("<main>", "<main>"),
        ("block in <top (required)>", "block in <top (required)>"),
        ("helper", "method_*"),
        ("", "method_*"),
    ];
    for (name, expected) in cases {
        let found = of(FrameKind::Ruby, name, None);
        assert_eq!(digits.replace_all(&found, "*"), expected, "{name}");
    }
    let (one, other) = (of(FrameKind::Ruby, "A#x", None), of(FrameKind::CFunction, "block in A#x", None));
    assert_eq!(format!("block in {one}"), other);
    assert_eq!(of(FrameKind::Native, "gc_mark", Some("/opt/lib/libruby.so.3.3")), "gc_mark");
    assert!(of(FrameKind::Native, "secret_work", Some("/srv/secret.so")).starts_with("function-"));
    assert!(of(FrameKind::Native, "secret_work", Some("/srv/rubysecret.so")).starts_with("function-"));
    assert_eq!(of(FrameKind::Kernel, "do_syscall_64", None), "do_syscall_64");
}

/// What remains of files and of the reason for a dump.
#[test]
fn paths() {
    let mut with = Pseudonyms::new().unwrap();
    let digits = regex_lite::Regex::new("[0-9a-f]{16}").unwrap();
    for (path, short, whole) in [
        ("/srv/shop/app/models/order.rb", "/dir-*/order.rb", "file-*.rb"),
        ("order.rb", "order.rb", "file-*.rb"),
        ("(eval at /srv/shop/x.rb:3)", "/dir-*/x.rb:3)", "file-*"),
        ("<internal:gc>", "<internal:gc>", "<internal:gc>"),
        (
            "/usr/lib/ruby/3.1.0/json/common.rb",
            "/dir-*/ruby/3.1.0/json/common.rb",
            "/dir-*/ruby/3.1.0/file-*.rb",
        ),
        (
            "/srv/shop/vendor/bundle/ruby/3.2.0/gems/rack-2.2.7/lib/rack.rb",
            "/dir-*/gems/rack-2.2.7/lib/rack.rb",
            "/dir-*/gems/gem-*-0/file-*.rb",
        ),
        (
            "/srv/ruby/3.2.0/bundler/gems/rails-0ab1c2d3e4f5/lib/rails.rb",
            "/dir-*/bundler/gems/rails-0ab1c2d3e4f5/lib/rails.rb",
            "/dir-*/gems/gem-*-0/file-*.rb",
        ),
    ] {
        let found = files::ruby(path, false, &mut with);
        assert_eq!(digits.replace_all(&found, "*"), short);
        let found = files::ruby(path, true, &mut with);
        assert_eq!(digits.replace_all(&found, "*"), whole);
    }
    assert_eq!(files::native("[vdso]", true, &mut with), "[vdso]");
    assert!(files::native("/srv/libacme.so", true, &mut with).starts_with("file-"));
    assert!(files::native("/srv/libacme.so", false, &mut with).ends_with("/libacme.so"));
    assert_eq!(
        without_program("gc.pause > 1ms: 2.0 ms, pid 7 (puma, pid 8)"),
        "gc.pause > 1ms: 2.0 ms, pid 7"
    );
    assert_eq!(without_program("SIGUSR2"), "SIGUSR2");
    assert_eq!(without_program("acme (shop)"), "a trigger");
}

/// The name of a program in a trigger may come from its title or its thread: it is kept only if all of these are.
#[test]
fn triggers() {
    let why = "gc.pause > 1ms: 2.0 ms, pid 7 (puma[acme-shop])";
    let header = Header {
        dump: Some(Dump { why: why.to_owned(), at_ns: 2, from_ns: 1, carried: 0, open: 0 }),
        ..crate::trace_file::tests::header()
    };
    let kept = |keep: &[Kind]| {
        let mut scrubber = Scrubber::new(keep.iter().copied().collect()).unwrap();
        scrubber.header(&header).dump.unwrap().why
    };
    assert_eq!(kept(&[Kind::Services]), "gc.pause > 1ms: 2.0 ms, pid 7");
    assert_eq!(kept(&[Kind::Services, Kind::Threads]), "gc.pause > 1ms: 2.0 ms, pid 7");
    assert_eq!(kept(&[Kind::Services, Kind::Threads, Kind::Arguments]), why);
}

/// Names of variables are kept only if Ruby or the agent knows them.
#[test]
fn variables() {
    let mut process = crate::trace_file::tests::samples::process();
    let set = [
        "RUBY_GC_HEAP_INIT_SLOTS",
        "RUBY_GC_TUNE_HOST",
        "RUBY_GC_ACME_SHOP",
        "RUBY_GC_HEAP_INIT_SLOT",
        "RUBY_GC_TUNE_ACME",
    ];
    process.gc_env_refused = vec!["RUBY_GC_\n".into(), "RUBY_GC_TUNE_acme".into()];
    process.gc_env = Some(set.iter().map(|name| ((*name).to_owned(), "secret".to_owned())).collect());
    let scrubbed = |keep: &[Kind]| Scrubber::new(keep.iter().copied().collect()).unwrap().process(&process);
    let after = scrubbed(&[]);
    let variables = after.gc_env.as_ref().unwrap();
    let (kept, replaced): (Vec<&String>, Vec<&String>) =
        variables.keys().partition(|name| set.contains(&name.as_str()));
    assert_eq!(kept, ["RUBY_GC_HEAP_INIT_SLOTS", "RUBY_GC_TUNE_HOST"]);
    assert_eq!(replaced.len(), 3);
    let digits = regex_lite::Regex::new("^RUBY_GC_[0-9A-F]{16}$").unwrap();
    assert!(
        replaced
            .iter()
            .chain(&after.gc_env_refused.iter().collect::<Vec<_>>())
            .all(|name| digits.is_match(name))
    );
    assert!(variables.values().all(|value| value.starts_with("value-")), "{after:?}");
    assert_eq!(scrubbed(&[Kind::Settings]).gc_env, process.gc_env);
}

proptest! {
    /// The source of a file remains visible, and different files stay different.
    #[test]
    fn sources(
        parts in proptest::collection::vec(
            prop::sample::select(vec![
                "srv", "ruby", "3.1.0", "gems", "rack-2.2.7", "bundler", "x-0ab1c2", "vendor_ruby", "a.rb", "", "<internal:gc>",
            ]),
            1..8,
        ),
        names: bool,
    ) {
        let mut with = Pseudonyms::new().unwrap();
        let path = parts.join("/");
        let found = files::ruby(&path, names, &mut with);
        let kind = |source| match source {
            Source::App => 0,
            Source::Gem(_) => 1,
            Source::Library => 2,
            Source::Internal => 3,
        };
        let (before, after) = (Source::of(&path), Source::of(&found));
        if !path.starts_with("<internal:") {
            prop_assert_eq!(kind(before), kind(after), "{} {}", path, found);
        }
        if let (Source::Gem(before), Source::Gem(after), false) = (before, after, names) {
            prop_assert_eq!(before, after);
        }
        prop_assert_eq!(&found, &files::ruby(&path, names, &mut with));
        let other = files::ruby(&format!("x{path}"), names, &mut with);
        prop_assert!(found != other || path.is_empty());
    }

    /// Any text can be a name, a path, a reason.
    #[test]
    fn any_text(text in ".{0,60}", names: bool) {
        let mut with = Pseudonyms::new().unwrap();
        for kind in [FrameKind::Ruby, FrameKind::Native] {
            let file = Some(Arc::from(text.as_str()));
            let frame = Frame { kind, name: text.as_str().into(), file, line: 1, first_line: 1, address: 0 };
            prop_assert!(!names::of(&frame, &mut with).is_empty());
        }
        files::ruby(&text, names, &mut with);
        files::native(&text, names, &mut with);
        without_program(&text);
        Scrubber::new(BTreeSet::new()).unwrap().reason(&text);
    }
}
