//! Debian's libruby of the series 3.1, on which unit tests run: whichever patch release is installed.
//!
//! Security updates replace this file, so no test may depend on its patch release, its build id or its addresses. Tests
//! take versions, sections and symbols from the image. Facts of one build only, such as the exact addresses of its probe
//! sites, are in [`KNOWN`] by build id; every test also checks something on an unknown build.
//!
//! Compiled for tests only (`#[cfg(test)]` in both crates that use it): a library that cannot be read fails the test, so results
//! are unwrapped.

use std::{
    fs::{self, File},
    ops::Range,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use gctrace_common::event::Point;

use crate::{
    address::Svma,
    elf::{ElfImage, Headers, LoadSegment},
    ruby::{RubyAnalysis, RubyVersion, analyse},
};

/// Names another libruby of the series to test on, such as one in a root directory of the lab.
const VARIABLE: &str = "GCTRACE_LIBRUBY";
/// The name under which programs load the library, a link to the installed patch release.
const SONAME: &str = "libruby-3.1.so.3.1";
/// Directory of Debian's libraries for this processor.
const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

/// Exact values of one build.
pub(crate) struct Known {
    /// Its build id.
    build_id: &'static str,
    /// Its version, as in the package.
    pub(crate) version: RubyVersion,
    /// Addresses of the GC's event sites, by event. Those of 3.1.2 were confirmed by DWARF and by a dynamic comparison with
    /// `GC.count`; those of 3.1.7 are the instructions after the tests in the output of `objdump -d`.
    pub(crate) sites: [&'static [u64]; Point::ALL.len()],
    /// Registers that hold the objspace at the start of a cycle, at the end of marking and at the end of sweeping.
    pub(crate) registers: [u8; 3],
    /// Number of GVL sites: waits, acquisitions, releases.
    pub(crate) gvl: [usize; 3],
    /// Number of stores that take a page, and of similar stores that do not.
    pub(crate) refill: (usize, usize),
}

const KNOWN: [Known; 2] = [
    // libruby3.1 3.1.2-7+deb12u1, amd64.
    Known {
        build_id: "803542d97ea70c8f19d5fb7f9fd3b828e3e9ada4",
        version: RubyVersion::new(3, 1, 2),
        sites: [
            &[0xd580d],
            &[0xd4e94],
            &[0xd79fe],
            &[0xd5643, 0xd5aed, 0xd6147, 0xd91ac, 0xd9767, 0xd98a7],
            &[0x39e20, 0xd5a44, 0xd617f, 0xd92b5, 0xd9782, 0xd9909],
        ],
        registers: [14, 14, 3],
        gvl: [1, 3, 8],
        refill: (2, 1),
    },
    // libruby3.1 3.1.7-1~deb12u2, amd64.
    Known {
        build_id: "82bc8f658d0c0ccfafdf7078aaafd56d39491b7c",
        version: RubyVersion::new(3, 1, 7),
        sites: [
            &[0xd5ccd],
            &[0xd5354],
            &[0xd7eee],
            &[0xd5b03, 0xd5fad, 0xd6607, 0xd992c, 0xd9c27, 0xd9d67],
            &[0x39e34, 0xd5f04, 0xd663f, 0xd9a35, 0xd9c42, 0xd9dc9],
        ],
        registers: [14, 14, 3],
        gvl: [1, 3, 8],
        refill: (2, 1),
    },
];

static PATH: LazyLock<PathBuf> = LazyLock::new(|| {
    let link = std::env::var_os(VARIABLE).map_or_else(|| Path::new(LIBRARIES).join(SONAME), PathBuf::from);
    // The file itself: some tests must not get a symbolic link.
    fs::canonicalize(&link).unwrap_or_else(|error| {
        panic!("{}: {error}; `cargo xtask setup --for test` installs it", link.display())
    })
});
static BYTES: LazyLock<Vec<u8>> = LazyLock::new(|| fs::read(libruby()).unwrap());
static ANALYSIS: LazyLock<RubyAnalysis> = LazyLock::new(|| analyse(&libruby_image()).unwrap());

/// Path of the library, without links.
pub(crate) fn libruby() -> &'static Path {
    &PATH
}

/// The library, opened.
pub(crate) fn libruby_file() -> File {
    File::open(libruby()).unwrap()
}

/// All bytes of the library.
pub(crate) fn libruby_bytes() -> &'static [u8] {
    &BYTES
}

/// The library, read as an image.
pub(crate) fn libruby_image() -> ElfImage {
    ElfImage::read(libruby_bytes()).unwrap()
}

/// Its analysis.
pub(crate) fn libruby_analysis() -> &'static RubyAnalysis {
    &ANALYSIS
}

/// The facts of this build, if it is a known one.
pub(crate) fn known_libruby() -> Option<&'static Known> {
    let id = libruby_analysis().build_id.as_ref().unwrap().to_string();
    KNOWN.iter().find(|known| known.build_id == id)
}

/// File offset of a stated address of code or data.
pub(crate) fn libruby_offset(address: Svma) -> usize {
    let segments = Headers::read(libruby_bytes()).unwrap().segments;
    let holds = |segment: &&LoadSegment| {
        address.0.checked_sub(segment.address.0).is_some_and(|at| at < segment.file_size)
    };
    let segment = segments.iter().find(holds).unwrap_or_else(|| panic!("the file does not have {address}"));
    (segment.offset.0 + address.0 - segment.address.0) as usize
}

/// Byte range of a section of the library in the file.
pub(crate) fn libruby_section(name: &str) -> Range<usize> {
    let headers = Headers::read(libruby_bytes()).unwrap();
    let section = headers.section(name).unwrap_or_else(|| panic!("the library has no section {name}"));
    section.offset as usize..(section.offset + section.size) as usize
}
