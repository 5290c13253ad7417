//! Sections of a file without section headers, as far as its program headers and its dynamic section describe them. Some
//! packaging tools (sstrip, `strip --strip-section-headers`) remove the section headers; the kernel and the dynamic linker
//! never read them.

use object::LittleEndian as LE;
use object::elf;

use super::ElfError;
use super::ReadAt;
use super::raw::{LoadSegment, Section, records};
use super::source::read_bytes;

/// Maximum number of dynamic symbols counted.
const MAX_SYMBOLS: u64 = 1 << 22;
const MAX_DYNAMIC: u64 = 1 << 20;
const MAX_UNWIND: u64 = 64 << 20;

/// A program header that is not a loadable segment but locates something.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pointer {
    pub(crate) kind: elf::ProgramType,
    pub(crate) address: u64,
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

/// The sections that gctrace uses, under their usual names.
pub(crate) fn sections(
    source: &(impl ReadAt + ?Sized),
    segments: &[LoadSegment],
    pointers: &[Pointer],
) -> Result<Vec<Section>, ElfError> {
    let mut builder = Builder { source, segments, sections: Vec::new() };
    builder.push("", elf::SHT_NULL, 0, 0, 0);
    builder.segments();
    for pointer in pointers {
        match pointer.kind {
            elf::PT_DYNAMIC => builder.dynamic(pointer)?,
            elf::PT_GNU_EH_FRAME => builder.unwind_table(pointer)?,
            elf::PT_NOTE => builder.push(".note", elf::SHT_NOTE, pointer.address, pointer.size, 0),
            _ => {}
        }
    }
    Ok(builder.sections)
}

struct Builder<'a, S: ?Sized> {
    source: &'a S,
    segments: &'a [LoadSegment],
    sections: Vec<Section>,
}

impl<S: ReadAt + ?Sized> Builder<'_, S> {
    /// Adds a section whose bytes lie in a segment; does nothing if they do not.
    fn push(&mut self, name: &str, kind: elf::SectionType, address: u64, size: u64, link: u32) {
        let null = kind == elf::SHT_NULL || kind == elf::SHT_NOBITS;
        let offset = if null { Some(0) } else { self.offset(address, size) };
        let Some(offset) = offset else { return };
        self.sections.push(Section {
            name: name.to_owned(),
            kind,
            flags: elf::SHF_ALLOC,
            address,
            offset,
            size,
            link,
        });
    }

    /// File offset of an address that is followed by `size` bytes in the file.
    fn offset(&self, address: u64, size: u64) -> Option<u64> {
        self.segments.iter().find_map(|segment| {
            let at = address.checked_sub(segment.address.0)?;
            (at.checked_add(size)? <= segment.file_size).then(|| segment.offset.0.checked_add(at))?
        })
    }

    /// Number of bytes in the file from an address to the end of its segment.
    fn available(&self, address: u64) -> u64 {
        let behind = |s: &LoadSegment| s.file_size.checked_sub(address.checked_sub(s.address.0)?);
        self.segments.iter().find_map(behind).unwrap_or(0)
    }

    fn read(&self, what: &'static str, address: u64, size: u64, limit: u64) -> Result<Vec<u8>, ElfError> {
        let offset = self.offset(address, size).ok_or(ElfError::OutOfFile { what })?;
        read_bytes(self.source, what, offset, size, limit)
    }

    /// Code, constants and data are whole segments. Constants that share the segment of the code are part of both.
    fn segments(&mut self) {
        let segments = self.segments;
        let code = segments.iter().filter(|s| s.executable).max_by_key(|s| s.file_size);
        if let Some(code) = code {
            self.push(".text", elf::SHT_PROGBITS, code.address.0, code.file_size, 0);
            self.push(".plt", elf::SHT_PROGBITS, code.address.0, code.file_size, 0);
        }
        let constants = |s: &&LoadSegment| !s.executable && !s.writable;
        for segment in segments.iter().filter(constants) {
            self.push(".rodata", elf::SHT_PROGBITS, segment.address.0, segment.file_size, 0);
        }
        if !segments.iter().any(|s| constants(&s))
            && let Some(code) = code
        {
            self.push(".rodata", elf::SHT_PROGBITS, code.address.0, code.file_size, 0);
        }
        for segment in segments.iter().filter(|s| s.writable) {
            self.push(".got", elf::SHT_PROGBITS, segment.address.0, segment.file_size, 0);
            let zeroed = segment.memory_size.saturating_sub(segment.file_size);
            if zeroed > 0 {
                let start = segment.address.0.saturating_add(segment.file_size);
                self.push(".bss", elf::SHT_NOBITS, start, zeroed, 0);
            }
        }
    }

    fn dynamic(&mut self, pointer: &Pointer) -> Result<(), ElfError> {
        let what = "the dynamic section";
        let bytes = read_bytes(self.source, what, pointer.offset, pointer.size, MAX_DYNAMIC)?;
        let value = |tag: elf::DynamicTag| {
            let entries = records::<elf::Dyn64<LE>>(&bytes).iter();
            let mut entries = entries.take_while(|entry| entry.d_tag.get(LE) != elf::DT_NULL);
            entries.find(|entry| entry.d_tag.get(LE) == tag).map(|entry| entry.d_val.get(LE))
        };
        let size = |tag| value(tag).unwrap_or(0);

        let strings = self.sections.len() as u32;
        let Some(names) = value(elf::DT_STRTAB) else { return Ok(()) };
        self.push(".dynstr", elf::SHT_STRTAB, names, size(elf::DT_STRSZ), 0);
        if self.sections.len() as u32 == strings {
            return Err(ElfError::OutOfFile { what: "the dynamic string table" });
        }
        self.push(".dynamic", elf::SHT_DYNAMIC, pointer.address, pointer.size, strings);
        if let Some(symbols) = value(elf::DT_SYMTAB) {
            let count = match (value(elf::DT_GNU_HASH), value(elf::DT_HASH)) {
                (Some(hash), _) => self.count_by_gnu_hash(hash)?,
                (None, Some(hash)) => {
                    let header = self.read("the symbol hash table", hash, 8, 8)?;
                    u64::from(u32::from_le_bytes(header[4..8].try_into().unwrap_or_default()))
                }
                (None, None) => 0,
            };
            let bytes = count.min(MAX_SYMBOLS) * size_of::<elf::Sym64<LE>>() as u64;
            self.push(".dynsym", elf::SHT_DYNSYM, symbols, bytes, strings);
        }
        for (table, bytes, kind) in [
            (elf::DT_RELA, elf::DT_RELASZ, elf::SHT_RELA),
            (elf::DT_JMPREL, elf::DT_PLTRELSZ, elf::SHT_RELA),
            (elf::DT_RELR, elf::DT_RELRSZ, elf::SHT_RELR),
        ] {
            if let Some(address) = value(table) {
                self.push(".rela", kind, address, size(bytes), 0);
            }
        }
        Ok(())
    }

    /// Number of dynamic symbols: `DT_GNU_HASH` sorts them by bucket, so the last chain ends at the last symbol.
    fn count_by_gnu_hash(&self, address: u64) -> Result<u64, ElfError> {
        const HEADER: u64 = 16;
        let what = "the symbol hash table";
        let header = self.read(what, address, HEADER, HEADER)?;
        let word = |bytes: &[u8], at: usize| {
            bytes.get(at..at + 4).and_then(|word| word.try_into().ok()).map_or(0, u32::from_le_bytes)
        };
        let (buckets, first, bloom) = (word(&header, 0), word(&header, 4), word(&header, 8));
        let malformed = || ElfError::malformed(what, "it reaches past its segment");
        let at_buckets = address.checked_add(HEADER + u64::from(bloom) * 8).ok_or_else(malformed)?;
        let size = u64::from(buckets) * 4;
        let table = self.read(what, at_buckets, size, MAX_SYMBOLS * 4)?;
        let last = table.chunks_exact(4).map(|bucket| word(bucket, 0)).max().unwrap_or(0);
        if last < first {
            return Ok(first.into());
        }
        let chains = at_buckets.checked_add(size).ok_or_else(malformed)?;
        let chain = chains.checked_add(u64::from(last - first) * 4).ok_or_else(malformed)?;
        let length = self.available(chain).min(MAX_SYMBOLS * 4);
        let hashes = self.read(what, chain, length, MAX_SYMBOLS * 4)?;
        let end = hashes.chunks_exact(4).position(|hash| word(hash, 0) & 1 == 1).ok_or_else(malformed)?;
        Ok(u64::from(last) + end as u64 + 1)
    }

    /// `.eh_frame` starts at the address in `.eh_frame_hdr` and ends at its terminator.
    fn unwind_table(&mut self, pointer: &Pointer) -> Result<(), ElfError> {
        let what = ".eh_frame_hdr";
        let bytes = read_bytes(self.source, what, pointer.offset, pointer.size, MAX_UNWIND)?;
        let bases = gimli::BaseAddresses::default().set_eh_frame_hdr(pointer.address);
        let header = gimli::EhFrameHdr::new(&bytes, gimli::LittleEndian).parse(&bases, 8);
        let header = header.map_err(|error| ElfError::malformed(what, error.to_string()))?;
        let gimli::Pointer::Direct(start) = header.eh_frame_ptr() else {
            return Err(ElfError::malformed(what, "an indirect pointer to .eh_frame"));
        };
        let available = self.available(start).min(MAX_UNWIND);
        let bytes = self.read(".eh_frame", start, available, MAX_UNWIND)?;
        self.push(".eh_frame", elf::SHT_PROGBITS, start, unwind_size(&bytes), 0);
        Ok(())
    }
}

/// Bytes of the entries before the terminator (a length of zero).
fn unwind_size(bytes: &[u8]) -> u64 {
    let mut at = 0_usize;
    while let Some(length) = bytes.get(at..).and_then(|rest| rest.first_chunk::<4>()) {
        let length = u32::from_le_bytes(*length) as usize;
        // Entries with 64-bit lengths do not exist in practice.
        let next = at.checked_add(4).and_then(|at| at.checked_add(length));
        match next {
            Some(next) if length != 0 && next <= bytes.len() => at = next,
            _ => break,
        }
    }
    at as u64
}
