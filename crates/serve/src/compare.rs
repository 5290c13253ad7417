//! Compares two parts of a recording, or two recordings, as `gctrace diff` does.

use std::io;

use gctrace_report::{
    diff::{Chosen, Comparison, Looked, Program},
    export::diff::{self, About, Gathered},
    trace_file::{Header, Subjects},
};

use crate::graph::Drawn;

/// The result of a comparison.
#[derive(Debug)]
pub(crate) struct Compared {
    pub(crate) comparison: Comparison,
    pub(crate) sides: [OneSide; 2],
    /// The flame graph of the change in CPU time.
    pub(crate) graph: Drawn,
    /// Whether sums over whole thread lifetimes are left out, because a side is only a part of the time.
    pub(crate) cuts_time: bool,
}

/// One side of a comparison.
#[derive(Debug)]
pub(crate) struct OneSide {
    pub(crate) about: About,
    pub(crate) programs: Vec<(String, Program)>,
}

/// An empty collector for one side.
pub(crate) fn gathered(name: &'static str, header: &Header) -> Gathered {
    let Subjects { samples, wall, gvl, requests, alloc } = header.subjects;
    // Processes are selected by windows, not here.
    Gathered::new(name, Looked { samples, wall, gvl, requests, alloc }, Chosen::default(), samples)
}

/// The description of a side once all of it has been gathered.
pub(crate) fn about(side: &Gathered, header: &Header, file: String, cut_off: bool) -> OneSide {
    side.with(|side| OneSide {
        about: About {
            file,
            began: side.began_ns().map(|began_ns| header.clock.epoch_seconds(began_ns)),
            seconds: side.seconds(),
            cut_off,
        },
        programs: side.programs().iter().map(|(name, of)| (name.clone(), of.clone())).collect(),
    })
}

impl Compared {
    /// Compares side A with side B.
    pub(crate) fn of([a, b]: [(Gathered, OneSide); 2], cuts_time: bool) -> io::Result<Self> {
        let comparison = diff::compare(&a.0, &b.0);
        let mut svg = Vec::new();
        diff::draw_graph(&a.0, &b.0, true, &mut svg)?;
        Ok(Self { comparison, sides: [a.1, b.1], graph: Drawn::of(svg), cuts_time })
    }
}
