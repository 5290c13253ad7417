//! Combinations of flags and the settings that they resolve to.

use super::*;
use crate::export::profile::Measure;
use clap::Parser as _;

fn resolve(words: &[&str]) -> Result<Settings, UsageError> {
    Settings::resolve(Args::try_parse_from(words).unwrap(), 77)
}

/// Every profile requires stacks, and each has its own file.
#[test]
fn profiles() {
    let run = |flags: &[&str]| resolve(&[&["gctrace", "--all-ruby"], flags].concat());
    assert!(!run(&["--tunemygc", "sets"]).unwrap().wants_stacks());
    for flag in
        ["--pprof", "--flamegraph", "--folded", "--callgrind", "--top-lines", "--speedscope", "--firefox"]
    {
        assert!(run(&[flag, "file"]).unwrap().wants_stacks(), "{flag}");
    }
    assert!(!run(&["--perfetto", "file"]).unwrap().wants_stacks(), "no samples in it");
    let spans = |flag| run(&["--gvl", flag, "file"]).unwrap().gvl.unwrap().spans;
    assert!(spans("--perfetto") && spans("--firefox") && !spans("--pprof"));
    let same = run(&["--folded", "a", "--pprof", "b", "--firefox", "a"]);
    assert_eq!(same.unwrap_err(), UsageError::SameFile("a".into()));
    assert_eq!(run(&["--pprof", "a", "-o", "a"]).unwrap_err(), UsageError::SameFile("a".into()));
    assert_eq!(run(&["--flamegraph", "-"]).unwrap_err(), UsageError::Dash);
    let graph = |flags: &[&str]| match run(flags).map(|run| run.profiles[0].1) {
        Ok(profile::Format::FlameGraph(graph)) => Ok(graph.of),
        Ok(other) => panic!("{other:?}"),
        Err(error) => Err(error.to_string()),
    };
    let file = ["--flamegraph", "a"];
    let with = |flags: &[&str]| graph(&[&file[..], flags].concat());
    assert_eq!(with(&[]), Ok(Measure::Cpu));
    assert_eq!(with(&["--wall"]), Ok(Measure::Wall));
    assert_eq!(with(&["--wall", "--flamegraph-of", "cpu"]), Ok(Measure::Cpu));
    assert_eq!(with(&["--gvl", "--flamegraph-of", "gvl-wait"]), Ok(Measure::GvlWait));
    assert_eq!(with(&["--flamegraph-of", "gc"]), Ok(Measure::Gc));
    assert!(
        !run(&["--flamegraph", "a", "--flamegraph-of", "gc"]).unwrap().wants_stacks(),
        "no samples in it"
    );
    assert!(!run(&["--top-lines", "a", "--flamegraph-of", "gc"]).unwrap().wants_stacks());
    for (what, needed) in [("wall", "needs --wall;"), ("gvl-wait", "needs --gvl;")] {
        assert!(with(&["--flamegraph-of", what]).unwrap_err().contains(needed), "{what}");
    }
    assert_eq!(run(&["--pprof", "a", "--flamegraph-of", "gc"]).unwrap().notes.len(), 1);
    for flag in ["--flamegraph", "--folded"] {
        let lines = run(&["--stack-lines", flag, "a"]).unwrap();
        assert!(lines.notes.is_empty());
        assert!(matches!(
            lines.profiles[0].1,
            profile::Format::FlameGraph(Graph { lines: true, .. })
                | profile::Format::Folded(Graph { lines: true, .. })
        ));
    }
    assert_eq!(run(&["--stack-lines", "--pprof", "a"]).unwrap().notes.len(), 1);
    let filters = ["--thread", "puma", "--focus=Order#", "--focus=/^Cart/", "--hide=rack", "--app-only"];
    let filtered = run(&[&["--pprof", "a"], &filters[..]].concat()).unwrap();
    assert!(filtered.notes.is_empty() && filtered.filter.app_only && filtered.filter == filtered.push.filter);
    assert_eq!((filtered.filter.focus.len(), filtered.filter.threads[0].text()), (2, "puma"));
    assert_eq!(run(&filters).unwrap().notes.len(), 1);
    let notes = |flags: &[&str]| run(flags).unwrap().notes.len();
    assert_eq!([notes(&["--rate=99"]), notes(&["--rate=99", "--format=jsonl"])], [0, 1]);
    assert_eq!(notes(&["--rate=99", "--format=jsonl", "--pprof=a"]), 0);
    assert_eq!([notes(&["--alloc"]), notes(&["--alloc", "--requests"])], [1, 0]);
    assert_eq!([notes(&["--alloc", "--flamegraph=a"]), notes(&["--alloc", "--pprof=a"])], [1, 0]);
    assert_eq!(notes(&["--kube-root=/proc"]), 1);
    assert_eq!([notes(&["-q", "--min-pause=1ms"]), notes(&["--min-pause=1ms"])], [1, 0]);
    assert_eq!([notes(&["--push-interval=1s"]), notes(&["--push-interval=1s", "--otlp=http://x"])], [1, 0]);
    assert_eq!(
        [notes(&["--tunemygc-dialect=agent"]), notes(&["--tunemygc-dialect=agent", "--tunemygc=a"])],
        [1, 0]
    );
    assert!(Args::try_parse_from(["gctrace", "--all-ruby", "--focus", "/(/"]).is_err());
    assert!(run(&["-o", "-"]).unwrap().data_on_stdout() && !run(&["-o", "a"]).unwrap().data_on_stdout());
}

/// Sample sets are sent only if a URL is given, and never without a token.
#[test]
fn sending() {
    let run = |flags: &[&str]| resolve(&[&["gctrace", "--all-ruby"], flags].concat());
    assert_eq!(run(&["--tunemygc-token", "t"]).unwrap().tunemygc_target, None);
    let url = ["--tunemygc-url", "http://localhost:1/ruby"];
    assert_eq!(run(&[&url[..], &["--tunemygc-token", ""]].concat()).unwrap_err(), UsageError::NoToken);
    let flags = ["--tunemygc-token", "t", "--tunemygc-spool", "/s", "--tunemygc-sync-cycles", "9"];
    let units = ["--requests", "--tunemygc-sync-units", "8"];
    let target = run(&[&url[..], &flags, &units].concat()).unwrap();
    assert!(Args::try_parse_from([&["gctrace", "--all-ruby"], &url[..], &units[1..]].concat()).is_err());
    // Only sample sets need states of units.
    assert!(target.requests.unwrap().states && !run(&["--requests"]).unwrap().requests.unwrap().states);
    assert!(run(&["--requests", "--tunemygc", "sets"]).unwrap().requests.unwrap().states);
    let tokens = Tokens { default: Some("t".into()), ..Tokens::default() };
    let (cycles, units) = (NonZeroU32::new(9), NonZeroU32::new(8));
    let expected = Target { url: "http://localhost:1".into(), tokens, spool: "/s".into(), cycles, units };
    assert_eq!(target.tunemygc_target, Some(expected));
    let wrong = run(&["--tunemygc-url", "localhost:1", "--tunemygc-token", "t"]);
    assert_eq!(wrong.unwrap_err(), UsageError::Url("localhost:1".into()));
}

/// Selectors form a union; an empty selection, or gctrace itself, is a usage error.
#[test]
fn selection() {
    let run = resolve(&["gctrace", "--pid", "5", "--pid", "4", "--pid", "5", "--", "ruby", "-v"]).unwrap();
    assert_eq!(run.selection.pids, [4, 5]);
    assert_eq!(run.selection.command.unwrap(), ["ruby", "-v"]);
    let run = resolve(&["gctrace", "9", "8", "-p", "7,6", "--only-pid", "6,5", "--name", "puma"]).unwrap();
    assert_eq!((run.selection.pids, run.selection.only_pids), (vec![6, 7, 8, 9], vec![5]));
    assert_eq!(run.selection.names, ["puma"]);
    let unknown = |word: &str| resolve(&["gctrace", word]).unwrap_err().to_string();
    assert!(unknown("puma").contains("--name puma") && unknown("puma").contains("-- puma"));
    assert!(!unknown("trace").contains("--name"));
    assert_eq!(resolve(&["gctrace"]).unwrap_err(), UsageError::NothingSelected);
    for flag in ["--name", "--unit", "--container"] {
        assert_eq!(resolve(&["gctrace", flag, ""]).unwrap_err(), UsageError::EmptyGroup, "{flag}");
    }
    assert_eq!(resolve(&["gctrace", "--pid", "77"]).unwrap_err(), UsageError::OwnPid(77));
}
