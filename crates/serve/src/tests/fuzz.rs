//! Damaged recordings and hostile requests, together: whatever a file contains and a query asks for, the result is a page or a reason.
//! For longer runs: `PROPTEST_CASES=100000 cargo test -p gctrace-serve fuzz`.

use std::{fs, path::Path, sync::OnceLock};

use gctrace_report::{
    export::{profile::Format, window::Window},
    trace_file::Header,
};
use proptest::{prelude::*, sample::select};

use super::{GOLDEN, HOSTILE, chunks, copies::write};
use crate::{Asked, page, source::Source, wanted::Wanted};

/// Pieces of queries that violate expectations wherever they are inserted.
const PIECES: [&str; 28] = [
    "from=",
    "&to=",
    "&pid=",
    "&of=",
    "&afrom=",
    "&ato=",
    "&last=",
    "&",
    "=",
    "%",
    "%00",
    "%ff%fe",
    "%3Cscript%3Ealert(9)%3C/script%3E",
    "\"'><img src=x>",
    "+",
    "-1",
    "0",
    "1",
    "1e999",
    "18446744073709551615",
    "18446744073709551616",
    "4294967295",
    "900000000",
    "cpu",
    "gc",
    "gvl-wait",
    "alloc",
    "\u{202e}",
];

/// Few cases by default: each reads a recording several times.
fn cases() -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|text| text.parse().ok());
    ProptestConfig { cases: asked.unwrap_or(24), ..ProptestConfig::default() }
}

/// A short recording, and a longer one with requests.
fn recordings() -> &'static [Vec<u8>; 2] {
    static BYTES: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
    BYTES.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.gctrace");
        write(&path, 5, Some("a <b> c"));
        [fs::read(GOLDEN).unwrap(), fs::read(path).unwrap()]
    })
}

/// Interprets times as nanoseconds after the start, and pids: the syntax of the command line is tested elsewhere.
fn choose(header: &Header, asked: &Asked) -> Result<Window, String> {
    let number = |text: &String| text.parse::<u64>().map_err(|error| format!("{text}: {error}"));
    let at = |text: &Option<String>| text.as_ref().map(number).transpose();
    let at = |text| Ok::<_, String>(at(text)?.map(|ns| header.begun_ns.saturating_add(ns)));
    let (from_ns, to_ns) = (at(&asked.from)?, at(&asked.to)?);
    if from_ns.zip(to_ns).is_some_and(|(from_ns, to_ns)| from_ns >= to_ns) {
        return Err(format!("no time: {asked:?}"));
    }
    let pids = asked.pids.iter().map(|text| Ok(number(text)? as u32)).collect::<Result<_, String>>()?;
    Ok(Window { pids, from_ns, to_ns, ..Window::default() })
}

/// A page refers to nothing from elsewhere.
fn clean(page: &str) {
    let own = page.matches("<script src=\"brush.js\" defer></script>").count();
    assert_eq!(page.matches("<script").count(), own, "{page}");
    assert!(!page.contains("<img") && !page.contains("<b>") && !page.contains('\u{202e}'), "{page}");
    assert!(!page.contains("NaN"), "{page}");
}

/// Sends these queries for a recording, and returns its number of cycles; `None` if it is not served.
fn asked(path: &Path, queries: &[String]) -> Option<u64> {
    let source = match Source::open(path) {
        Ok(source) => source,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return None;
        }
    };
    source.read().unwrap();
    let whole = source.whole(std::time::Duration::ZERO).unwrap().unwrap();
    for query in queries.iter().map(String::as_str).chain([""]) {
        let wanted = match Wanted::of(query, &source.header, None, choose) {
            Ok(wanted) => wanted,
            Err(why) => {
                clean(&page::refused(&source, &why));
                continue;
            }
        };
        let view = source.view(&whole, &wanted.window).unwrap();
        assert!(view.damage.is_none(), "{:?}", view.damage);
        let drawn = view.graphs.of(&view.kept, wanted.of).unwrap();
        let compared = wanted
            .other
            .as_ref()
            .map(|other| source.compared(&whole, &wanted.window, (&source, &whole, other)).unwrap());
        clean(&page::page(&source, &whole, &view, &wanted, &drawn, (None, compared.as_deref())));
        let timed = source.with_times(&whole, &wanted.window).unwrap();
        for format in [Format::Pprof, Format::Firefox, Format::Speedscope, Format::Perfetto] {
            timed.kept.write(format, &mut Vec::new()).unwrap();
        }
    }
    Some(whole.view.figures.cycles)
}

/// A file with this content and a constant name: the name is on the page, and a random one contains `NaN` now and then, as in `.tmpxNaN0`.
struct Named {
    dir: tempfile::TempDir,
}

impl Named {
    fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("damaged.gctrace")
    }
}

fn file(bytes: &[u8]) -> Named {
    let named = Named { dir: tempfile::tempdir().unwrap() };
    fs::write(named.path(), bytes).unwrap();
    named
}

fn query() -> impl Strategy<Value = String> {
    let pieces = prop::collection::vec(select(PIECES.to_vec()), 0..8).prop_map(|pieces| pieces.concat());
    let part = (0_u64..16_000, 1_u64..9000, any::<u8>()).prop_map(|(from, ms, pid)| {
        let pid = if pid < 128 { String::new() } else { format!("&pid={pid}") };
        format!("from={}&to={}{pid}&of=gc", from * 1_000_000, (from + ms) * 1_000_000)
    });
    prop_oneof![pieces, part, ".{0,40}", Just(format!("pid={HOSTILE}&from={HOSTILE}"))]
}

proptest! {
    #![proptest_config(cases())]

    /// Truncated anywhere, with flipped bits: served up to the last complete chunk, or refused.
    #[test]
    fn damaged(
        which in 0_usize..2,
        length in any::<prop::sample::Index>(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0_u8..8), 0..3),
        queries in prop::collection::vec(query(), 0..3),
    ) {
        let whole = &recordings()[which];
        let places = chunks::places(whole);
        // Half of them are not truncated.
        let length = length.index(whole.len() * 2).min(whole.len());
        let mut bytes = whole[..length].to_vec();
        let mut sound = length;
        for (at, bit) in flips {
            let at = at.index(bytes.len().max(1));
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << bit;
                sound = sound.min(at);
            }
        }
        let found = asked(&file(&bytes).path(), &queries);
        let last = places.iter().rfind(|(_, end)| *end <= sound).map_or(0, |(_, end)| *end);
        if last >= places[0].1 {
            let expected = asked(&file(&whole[..last]).path(), &[]);
            // Bits that are flipped back leave it intact; a flip in an incomplete chunk changes nothing.
            prop_assert!(found >= expected && expected.is_some(), "{found:?} {expected:?}");
        }
    }

    /// Chunks with a valid checksum and any content.
    #[test]
    fn contents(
        which in 0_usize..2,
        chunk in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0_u8..3), 1..6),
        queries in prop::collection::vec(query(), 0..3),
    ) {
        let whole = &recordings()[which];
        let places = chunks::places(whole);
        let (begin, end) = places[1 + chunk.index(places.len() - 2)];
        let mut content = chunks::content(&whole[begin..end]);
        for (at, byte, how) in changes {
            let at = at.index(content.len().max(1));
            match how {
                0 if at < content.len() => content[at] = byte,
                1 => content.insert(at.min(content.len()), byte),
                _ if at < content.len() => drop(content.remove(at)),
                _ => {}
            }
        }
        let bytes = [&whole[..begin], &chunks::entries(&content), &whole[end..]].concat();
        asked(&file(&bytes).path(), &queries);
    }

    /// Anything as a query.
    #[test]
    fn queries(queries in prop::collection::vec(query(), 1..4)) {
        prop_assert!(asked(Path::new(GOLDEN), &queries).is_some());
    }
}
