//! Fuzzing of everything that reads a sample set, from bytes (gzip or not) to recommendations, with damaged copies of the protocol's
//! example. For longer runs: `PROPTEST_CASES=1000000 cargo test -p gctrace-tunemygc fuzz`.

use std::io::{Read as _, Write as _};

use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use proptest::{prelude::*, sample::select};

use crate::{
    offline::{Set, fold_from},
    tune,
};

const EXAMPLE: &[u8] = include_bytes!("../../../tests/fixtures/tunemygc_seed.json");
/// Upper bound on the decompressed size of a damaged copy of the example.
const LARGEST: u64 = 1 << 20;

/// Pieces of JSON that violate expectations wherever they are inserted.
const PIECES: [&str; 24] = [
    "",
    ",",
    "[",
    "]",
    "{",
    "}",
    "\"",
    "null",
    "-1",
    "1e999",
    "-0",
    "0.5",
    "18446744073709551615",
    "NaN",
    "true",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "\"GC_CYCLE_STARTED\"",
    "\"TERMINATED\"",
    "\"nofree\"",
    "\"2.2.0\"",
    "\"4.0.0\"",
    "\"RUBY_GC_MALLOC_LIMIT\":\"0x7fffffffffffffff\",",
    "[[[[[[[[[[",
];

/// A change: a part of the text is replaced by a piece, by a byte, or by a copy of another part.
#[derive(Clone, Debug)]
enum Change {
    Piece(usize, usize, &'static str),
    Byte(usize, u8),
    Copy(usize, usize, usize),
}

fn change() -> impl Strategy<Value = Change> {
    let at = || 0..EXAMPLE.len();
    prop_oneof![
        (at(), 0_usize..40, select(PIECES.to_vec()))
            .prop_map(|(at, length, piece)| Change::Piece(at, length, piece)),
        (at(), any::<u8>()).prop_map(|(at, byte)| Change::Byte(at, byte)),
        (at(), at(), 1_usize..1500).prop_map(|(to, from, length)| Change::Copy(to, from, length)),
    ]
}

fn damaged(mut bytes: Vec<u8>, changes: &[Change]) -> Vec<u8> {
    for change in changes {
        let (at, removed, with) = match change {
            Change::Piece(at, length, piece) => (*at, *length, piece.as_bytes().to_vec()),
            Change::Byte(at, byte) => (*at, 1, vec![*byte]),
            Change::Copy(to, from, length) => {
                let from = (*from).min(bytes.len());
                (*to, 0, bytes[from..(from + length).min(bytes.len())].to_vec())
            }
        };
        let at = at.min(bytes.len());
        let end = (at + removed).min(bytes.len());
        bytes.splice(at..end, with);
    }
    bytes
}

/// Whatever a set contains, it is either refused or leads to a recommendation.
fn survives(reader: impl std::io::Read) {
    let Ok(Set { series, evidence, .. }) = fold_from(reader) else { return };
    let report = tune::recommend(series, &evidence);
    assert_eq!(report.plans.len(), 2);
    let _ = (report.to_string(), report.to_json(), report.to_config());
    for strategy in tune::Strategy::ALL {
        let _ = (report.to_exports(strategy, &|_, _| false), report.to_state(strategy, &|_, _| true));
    }
    // The same program under other settings, earlier.
    let before = tune::Episode {
        in_force: tune::InForce::default(),
        evidence: evidence.clone(),
        times: tune::Times::at(0.0),
    };
    let now = tune::Episode { in_force: report.in_force, evidence, times: tune::Times::at(1.0) };
    let _ = tune::recommend_after(series, &now, &[before]).to_string();
}

proptest! {
    /// Damaged text.
    #[test]
    fn sets(changes in prop::collection::vec(change(), 0..6)) {
        survives(damaged(EXAMPLE.to_vec(), &changes).as_slice());
    }

    /// Damaged gzip, and gzip of damaged text.
    #[test]
    fn compressed(inside in prop::collection::vec(change(), 0..3), outside in prop::collection::vec(change(), 0..3)) {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(&damaged(EXAMPLE.to_vec(), &inside)).unwrap();
        let bytes = damaged(gzip.finish().unwrap(), &outside);
        survives(GzDecoder::new(bytes.as_slice()).take(LARGEST));
    }
}
