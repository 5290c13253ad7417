//! One analysis on disk: what is stored, and what is checked before it is used.
//!
//! Layout: [`MAGIC`], identity of the writer (`u64`), length of the payload (`u32`), CRC-32 of the payload (`u32`), all
//! little-endian, then the payload (postcard). The checksum detects damage; the ownership of the directory prevents forgery.

use gctrace_common::ABI_HASH;
use serde::{Deserialize, Serialize};

use super::{CachedAnalysis, SOURCES};
use crate::{
    address::Svma,
    elf::{BuildId, ElfImage, ImageHead, ReadAt, code_offset},
    ruby::{GvlEvent, GvlSite, RubyAnalysis, may_be_probed},
};

const MAGIC: [u8; 8] = *b"gctrace\x01";
const HEADER: usize = MAGIC.len() + 8 + 4 + 4;
/// Maximum size of an entry in bytes; real entries have some kilobytes. Limits what a damaged one makes gctrace read.
pub(super) const MAX_BYTES: usize = 256 << 10;
/// Number of bytes of each instruction that are compared with the file: no relevant instruction is longer.
const CODE_BYTES: usize = 8;
/// The strings that identify the Ruby (version.c).
const STRINGS: [&str; 2] = ["ruby_version", "ruby_description"];

/// Why an entry is not used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum EntryError {
    /// Not written by gctrace, or by one that wrote another format.
    #[error("it is not a cache entry of this gctrace's format")]
    Foreign,
    /// Written by a gctrace with a different finder.
    #[error("it was written by another version of gctrace")]
    OtherVersion,
    /// Its length differs from the stated one.
    #[error("it is {0} bytes long, but states {1}")]
    Length(usize, usize),
    /// Changed since it was written.
    #[error("its checksum is wrong")]
    Checksum,
    /// The payload does not decode.
    #[error("its contents are malformed")]
    Malformed,
    /// It belongs to another file.
    #[error("it is about another image ({0})")]
    OtherImage(&'static str),
    /// The content of the file differs from that when the entry was written.
    #[error("the image's {0} differs from the analysed one, although its build id is the same")]
    Differs(String),
}

/// The stored data of an image.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    build_id: BuildId,
    file_size: u64,
    kept: CachedAnalysis,
    /// Version and description, with their addresses.
    strings: [(Svma, String); 2],
    /// The first bytes of the relevant instructions.
    code: Vec<(Svma, [u8; CODE_BYTES])>,
    /// CRC-32 of all executable segments: the meaning of a site depends on the code around it.
    checksum: u32,
}

/// CRC-32 of the executable segments, which takes about a millisecond; `None` if they cannot be read or are absurdly
/// large.
fn checksum(source: &(impl ReadAt + ?Sized), head: &ImageHead) -> Option<u32> {
    const LIMIT: u64 = 256 << 20;
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = vec![0; 64 << 10];
    let mut total = 0_u64;
    for segment in head.segments.iter().filter(|segment| segment.executable) {
        total = total.checked_add(segment.file_size).filter(|&total| total <= LIMIT)?;
        let mut done = 0;
        while done < segment.file_size {
            let len = (segment.file_size - done).min(buffer.len() as u64) as usize;
            source.read_exact_at(&mut buffer[..len], segment.offset.0.checked_add(done)?).ok()?;
            hasher.update(&buffer[..len]);
            done += len as u64;
        }
    }
    Some(hasher.finalize())
}

/// Hash of everything whose change invalidates older entries: the sources of finder and format, and the kernel ABI.
const fn identity() -> u64 {
    SOURCES ^ ABI_HASH.rotate_left(1)
}

/// The instructions of an analysis that are compared with the file: first those that get a probe, then those that their
/// meaning depends on. The pattern lists every field, so that a new field requires a decision.
fn instructions(analysis: &RubyAnalysis) -> (Vec<Svma>, Vec<Svma>) {
    let RubyAnalysis {
        machine: _,
        sites,
        version: _,
        description: _,
        build_id: _,
        vm: _,
        checks: _,
        has_symbols: _,
        static_probes: _,
        thread,
        gvl,
        // Not attached yet.
        refill: _,
        // Offsets, not addresses of probes.
        derived: _,
        modular: _,
    } = analysis;
    let mut probed: Vec<Svma> = sites.iter().map(|site| site.address).collect();
    probed.extend(thread.sites.iter().map(|site| site.address));
    let emulated = |site: &&GvlSite| site.emulated && site.event != GvlEvent::Acquired;
    probed.extend(gvl.sites.iter().filter(emulated).map(|site| site.address));
    // The function that acquires the GVL is probed at its start, whatever its first instruction is.
    let others = gvl.sites.iter().filter(|site| !emulated(site)).map(|site| site.address);
    (probed, sites.iter().map(|site| site.guard).chain(others).collect())
}

impl Entry {
    /// The entry of an analysis; `None` if the image has no build id.
    pub(super) fn new(
        source: &(impl ReadAt + ?Sized),
        head: &ImageHead,
        image: &ElfImage,
        kept: &CachedAnalysis,
    ) -> Option<Self> {
        let string = |name| {
            let address = image.symbol(name)?.address;
            Some((address, image.c_string(address)?.to_owned()))
        };
        let (probed, others) = instructions(&kept.analysis);
        let code = probed.into_iter().chain(others).map(|address| {
            let mut bytes = [0; CODE_BYTES];
            head.read_at(source, address, &mut bytes).then_some((address, bytes))
        });
        Some(Self {
            build_id: head.build_id.clone()?,
            file_size: head.file_size,
            kept: kept.clone(),
            strings: [string(STRINGS[0])?, string(STRINGS[1])?],
            code: code.collect::<Option<_>>()?,
            checksum: checksum(source, head)?,
        })
    }

    /// Encodes the entry; `None` if it is too large.
    pub(super) fn encode(&self) -> Option<Vec<u8>> {
        let payload = postcard::to_stdvec(self).ok()?;
        let mut bytes = Vec::with_capacity(HEADER + payload.len());
        bytes.extend(MAGIC);
        bytes.extend(identity().to_le_bytes());
        bytes.extend((payload.len() as u32).to_le_bytes());
        bytes.extend(crc32fast::hash(&payload).to_le_bytes());
        bytes.extend(payload);
        (bytes.len() <= MAX_BYTES).then_some(bytes)
    }

    /// Decodes an entry. Memory use is limited to a small multiple of the input size.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, EntryError> {
        let (magic, rest) = bytes.split_at_checked(MAGIC.len()).ok_or(EntryError::Foreign)?;
        if magic != MAGIC {
            return Err(EntryError::Foreign);
        }
        let short = || EntryError::Length(bytes.len(), HEADER);
        let (writer, rest) = rest.split_first_chunk().ok_or_else(short)?;
        let (len, rest) = rest.split_first_chunk().ok_or_else(short)?;
        let (checksum, payload) = rest.split_first_chunk().ok_or_else(short)?;
        if u64::from_le_bytes(*writer) != identity() {
            return Err(EntryError::OtherVersion);
        }
        let len = u32::from_le_bytes(*len) as usize;
        if len != payload.len() {
            return Err(EntryError::Length(bytes.len(), HEADER.saturating_add(len)));
        }
        if u32::from_le_bytes(*checksum) != crc32fast::hash(payload) {
            return Err(EntryError::Checksum);
        }
        match postcard::take_from_bytes(payload) {
            Ok((entry, [])) => Ok(entry),
            _ => Err(EntryError::Malformed),
        }
    }

    /// The stored analysis, if the file is the one that was analysed.
    pub(super) fn verified(
        self,
        source: &(impl ReadAt + ?Sized),
        head: &ImageHead,
    ) -> Result<CachedAnalysis, EntryError> {
        if head.build_id.as_ref() != Some(&self.build_id) || self.kept.analysis.build_id != head.build_id {
            return Err(EntryError::OtherImage("another build id"));
        }
        if self.file_size != head.file_size {
            return Err(EntryError::OtherImage("another file size"));
        }
        self.verify_strings(source, head)?;
        self.verify_code(source, head)?;
        if checksum(source, head) != Some(self.checksum) {
            return Err(EntryError::Differs("code".to_owned()));
        }
        Ok(self.kept)
    }

    fn verify_strings(&self, source: &(impl ReadAt + ?Sized), head: &ImageHead) -> Result<(), EntryError> {
        let [(_, version), (_, description)] = &self.strings;
        if version.parse() != Ok(self.kept.analysis.version) || *description != self.kept.analysis.description
        {
            return Err(EntryError::Malformed);
        }
        for ((address, text), name) in self.strings.iter().zip(STRINGS) {
            let mut stored = text.as_bytes().to_vec();
            stored.push(0);
            let mut found = vec![0; stored.len()];
            if !head.read_at(source, *address, &mut found) || found != stored {
                return Err(EntryError::Differs(name.to_owned()));
            }
        }
        Ok(())
    }

    fn verify_code(&self, source: &(impl ReadAt + ?Sized), head: &ImageHead) -> Result<(), EntryError> {
        let (probed, others) = instructions(&self.kept.analysis);
        let addresses = probed.iter().chain(&others);
        if !addresses.eq(self.code.iter().map(|(address, _)| address)) {
            return Err(EntryError::Malformed);
        }
        for (index, (address, stored)) in self.code.iter().enumerate() {
            let mut found = [0; CODE_BYTES];
            if !head.read_at(source, *address, &mut found) || found != *stored {
                return Err(EntryError::Differs(format!("code at {address}")));
            }
            // Whatever an entry says, a probe must be at an address that may be probed.
            let executable = code_offset(&head.segments, *address).is_some();
            if index < probed.len() && !(executable && may_be_probed(stored, *address)) {
                return Err(EntryError::Malformed);
            }
        }
        Ok(())
    }
}
