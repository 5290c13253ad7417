//! pprof: sums of every value, ids that resolve, functions that can be distinguished.

use std::collections::HashSet;

use prost::Message as _;

use super::*;
use crate::export::profile::pprof;

pub(super) fn check_pprof(recorder: &Recorder, inputs: &[Input]) {
    let profile =
        pprof::proto::Profile::decode(&*gunzip(&written(recorder, Format::Pprof, "x.pb.gz").0)).unwrap();
    let text = |at: i64| profile.string_table[at as usize].as_str();
    let types = profile.sample_type.iter().map(|known| (text(known.r#type), text(known.unit)));
    let total = |at: usize| profile.sample.iter().map(|sample| sample.value[at] as u64).sum::<u64>();
    let pauses = |input: &Input| input.pauses.iter().map(|(a, b, c)| a + b + c).sum();
    let expected = [
        ("samples", "count", inputs.len() as u64),
        ("cpu", "nanoseconds", sum(inputs, |input| input.cpu_ns)),
        ("wall", "nanoseconds", sum(inputs, |input| input.wall_ns)),
        ("gc_pauses", "count", sum(inputs, |input| input.pauses.len() as u64)),
        ("gc", "nanoseconds", sum(inputs, pauses)),
        ("gvl_waits", "count", 0),
        ("gvl_wait", "nanoseconds", 0),
        ("gvl_hold", "nanoseconds", 0),
        ("alloc_objects", "count", 0),
        ("alloc_space", "bytes", 0),
    ];
    let found: Vec<_> = types.enumerate().map(|(at, (name, unit))| (name, unit, total(at))).collect();
    assert_eq!(found, expected);
    assert_eq!(text(0), "");
    assert_eq!(text(profile.default_sample_type), "cpu");

    // Every id resolves, and equal samples are merged.
    let ids = |found: Vec<u64>| found.into_iter().collect::<HashSet<u64>>();
    let mappings = ids(profile.mapping.iter().map(|mapping| mapping.id).collect());
    let functions = ids(profile.function.iter().map(|function| function.id).collect());
    let locations = ids(profile.location.iter().map(|location| location.id).collect());
    assert!(!text(profile.mapping[0].filename).contains("libruby"), "the program comes first");
    for location in &profile.location {
        // The process that represents those above the limit has no Ruby.
        assert!(location.mapping_id == 0 || mappings.contains(&location.mapping_id));
        assert!(location.line.iter().all(|line| functions.contains(&line.function_id)));
    }
    let mut seen = HashSet::new();
    for sample in &profile.sample {
        assert!(!sample.location_id.is_empty(), "`go tool pprof -raw` leaves such out");
        assert!(sample.location_id.iter().all(|id| locations.contains(id)));
        let labels: Vec<_> = sample.label.iter().map(|label| (text(label.key), text(label.str))).collect();
        assert_eq!(
            labels.iter().map(|label| label.0).collect::<HashSet<_>>().len(),
            labels.len(),
            "{labels:?}"
        );
        assert!(seen.insert((sample.location_id.clone(), labels)), "a sample occurs twice");
    }
}

/// Blocks of one class are different functions in pprof, and so are top levels of different files; methods are not.
#[test]
fn blocks_have_their_line() {
    let ruby = |name: &str, file: &str, line, first_line| {
        let (kind, name, file) = (FrameKind::Ruby, Arc::from(name), Some(Arc::from(file)));
        Arc::new(Frame { kind, name, file, line, first_line, address: 0 })
    };
    let mut recorder = recorded(&[], Limits::default());
    let stacks = [
        [ruby("block in <class:App>", "/srv/app.rb", 41, 40), ruby("<top (required)>", "/srv/app.rb", 3, 0)],
        [
            ruby("block in <class:App>", "/srv/app.rb", 51, 50),
            ruby("<top (required)>", "/srv/other.rb", 3, 0),
        ],
        [ruby("App#call", "/srv/app.rb", 61, 60), ruby("<main>", "/srv/main.rb", 3, 0)],
        [ruby("App#call", "/srv/patch.rb", 7, 6), ruby("<main>", "/srv/main.rb", 4, 0)],
    ];
    for stack in stacks {
        let sample = StackSample { stack: Arc::new(stack), ..a_sample(5).1 };
        recorder.see(&process(2), Seen::Stack(&sample)).unwrap();
    }
    let profile =
        pprof::proto::Profile::decode(&*gunzip(&written(&recorder, Format::Pprof, "x.pb.gz").0)).unwrap();
    let text = |at: i64| profile.string_table[at as usize].as_str();
    let mut names: Vec<&str> = profile.function.iter().map(|function| text(function.name)).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(
        names,
        [
            "<main>",
            "<top (required)> app.rb",
            "<top (required)> other.rb",
            "App#call",
            "block in <class:App> app.rb:40",
            "block in <class:App> app.rb:50"
        ]
    );
}
