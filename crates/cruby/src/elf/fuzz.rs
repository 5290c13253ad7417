//! Fuzzes everything that reads bytes of an ELF file, with damaged copies of a real library.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::sample::select;

use super::headers::Headers;
use super::{ElfImage, ImageHead, probe_ruby};
use crate::address::Svma;
use crate::damaged::Damaged;
use crate::debian::{libruby_bytes, libruby_section};
use crate::ruby::analyse;

/// Parts of the file that determine how the rest is read: file header, program headers, section headers, and the sections
/// that the finder parses.
static TARGETS: LazyLock<Vec<std::ops::Range<usize>>> = LazyLock::new(|| {
    let bytes = libruby_bytes();
    let table = bytes.len() - Headers::read(bytes).unwrap().sections.len() * 64..bytes.len();
    let parsed = [".dynsym", ".dynstr", ".gnu.hash", ".rela.dyn", ".rela.plt", ".plt", ".text", ".rodata"];
    let tables = [".eh_frame_hdr", ".eh_frame", ".dynamic", ".got", ".note.gnu.build-id", ".note.stapsdt"];
    let sections = parsed.into_iter().chain(tables).map(libruby_section);
    [0..64, 64..0x300, table].into_iter().chain(sections).collect()
});

/// Values that break length fields and offsets, among others.
fn byte() -> impl Strategy<Value = u8> {
    prop_oneof![Just(0), Just(0xff), Just(0x7f), Just(0x80), any::<u8>()]
}

/// A few changes, all in the same part of the file.
fn patches() -> impl Strategy<Value = Vec<(usize, u8)>> {
    select(TARGETS.clone()).prop_flat_map(|range| {
        // The sizes of a table are at its start.
        let end = range.end;
        let near = range.start..end.min(range.start + 64);
        prop::collection::vec((prop_oneof![near, range], byte()), 1..12)
    })
}

/// Far more than a valid file takes on a busy machine, far less than a runaway loop.
const LIMIT: Duration = Duration::from_secs(20);

fn survives(patches: Vec<(usize, u8)>) {
    let damaged = Damaged { bytes: libruby_bytes(), patches };
    let start = Instant::now();
    let _ = (probe_ruby(&damaged), ImageHead::read(&damaged));
    if let Ok(image) = ElfImage::read(&damaged)
        && let Ok(analysis) = analyse(&image)
    {
        for site in &analysis.sites {
            assert!(image.svma_to_file_offset(site.address).is_some());
        }
        assert!(image.svma_to_file_offset(Svma(u64::MAX)).is_none());
    }
    assert!(start.elapsed() < LIMIT, "{:?} for {:?}", start.elapsed(), damaged.patches);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// Damage causes an error, a refusal, or sites that can be probed; never a panic, and it never takes long.
    #[test]
    fn damaged_library(patches in patches()) {
        survives(patches);
    }

    /// The same without section headers, so that program headers and the dynamic section are used instead.
    #[test]
    fn damaged_library_without_section_headers(patches in patches()) {
        let removed = (0x28..0x30).chain(0x3c..0x40).map(|at| (at, 0));
        survives(patches.into_iter().chain(removed).collect());
    }

    /// Arbitrary bytes after a valid identification.
    #[test]
    fn arbitrary_bytes(mut bytes in prop::collection::vec(any::<u8>(), 0..4096)) {
        for (at, value) in b"\x7fELF\x02\x01\x01".iter().enumerate().take(bytes.len()) {
            bytes[at] = *value;
        }
        let _ = probe_ruby(&bytes[..]);
        let _ = ElfImage::read(&bytes[..]);
        let _ = super::notes::allows_shadow_stacks(&bytes);
    }
}
