//! Measures how long a long recording takes: `GCTRACE_COPIES=28800 cargo test -p gctrace-serve speed -- --ignored --nocapture`.

use std::{fs, time::Instant};

use gctrace_report::{
    export::{Outputs, profile::Keeper, window::Window},
    trace_file::{self, Recording},
};

use super::{copies::write, served};

/// Environment variable with the number of copies in the recording.
const COPIES: &str = "GCTRACE_COPIES";

#[test]
#[ignore = "it measures"]
fn speed() {
    let copies = std::env::var(COPIES).map_or(2000, |text| text.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("long.gctrace");
    let began = Instant::now();
    write(&path, copies, None);
    let megabytes = fs::metadata(&path).unwrap().len() >> 20;
    eprintln!("written: {copies} copies, {megabytes} MB: {:.2?}", began.elapsed());
    let timed = |what: &str, outputs: Outputs| {
        let began = Instant::now();
        let mut outputs = outputs;
        trace_file::replay(&mut Recording::open(&path).unwrap(), &mut outputs).unwrap();
        eprintln!("{what}: {:.2?}", began.elapsed());
    };
    timed("decoded only", Outputs::new(Vec::new()));
    let header = Recording::open(&path).unwrap().header().clone();
    timed("for profiles", Outputs::new(Keeper::new(false, (true, false), header.clock).exporters()));
    let began = Instant::now();
    let (source, whole) = served(&path);
    eprintln!("all of it: {:.2?}", began.elapsed());
    let window = Window { from_ns: Some(source.header.begun_ns + 9_000_000_000), ..Window::default() };
    let began = Instant::now();
    source.view(&whole, &window).unwrap();
    eprintln!("all but the first seconds: {:.2?}", began.elapsed());
}
