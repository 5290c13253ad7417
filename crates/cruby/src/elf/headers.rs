//! The ELF header, the program headers and the section headers.

use object::LittleEndian as LE;
use object::elf;
use object::pod;

use super::raw::{LoadSegment, Section, read_table, string_at};
use super::sectionless::{self, Pointer};
use super::source::read_bytes;
use super::{ElfError, ReadAt};
use crate::address::{FileOffset, Svma};

/// Processor that an image is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Machine {
    /// AMD64.
    X86_64,
    /// 64-bit ARM.
    Aarch64,
}

impl Machine {
    /// The processor that gctrace itself was built for.
    pub const HOST: Self = if cfg!(target_arch = "aarch64") { Self::Aarch64 } else { Self::X86_64 };
}

/// All headers of one file.
#[expect(clippy::struct_excessive_bools, reason = "independent facts of the file header")]
#[derive(Debug)]
pub struct Headers {
    /// The processor that it is built for.
    pub machine: Machine,
    /// `ET_EXEC`: addresses in the file are final.
    pub fixed_position: bool,
    /// `ET_REL`: symbol values are relative to their section.
    pub relocatable: bool,
    /// The `PT_LOAD` segments.
    pub segments: Vec<LoadSegment>,
    /// Whether it names a dynamic linker, that is, whether it is a program.
    pub has_interpreter: bool,
    /// The sections; without section headers, those that the program headers describe.
    pub sections: Vec<Section>,
    /// Whether the file lacks section headers, so that the sections come from the program headers.
    pub sectionless: bool,
}

/// Maximum number of sections or program headers; a file with more is refused.
const MAX_HEADERS: u64 = 4096;
const MAX_SECTION_NAMES: u64 = 1 << 20;

impl Headers {
    /// Reads the headers of a 64-bit little-endian ELF file for any machine in [`Machine`].
    pub fn read(source: &(impl ReadAt + ?Sized)) -> Result<Self, ElfError> {
        let header = read_file_header(source)?;
        let machine = match header.e_machine.get(LE) {
            elf::EM_X86_64 => Machine::X86_64,
            elf::EM_AARCH64 => Machine::Aarch64,
            _ => return Err(ElfError::Unsupported("machine is neither x86-64 nor aarch64")),
        };
        Self::read_rest(source, &header, machine)
    }

    /// As [`Headers::read`], but for a file of any machine, such as a BPF object.
    pub fn read_any_machine(source: &(impl ReadAt + ?Sized)) -> Result<Self, ElfError> {
        let header = read_file_header(source)?;
        Self::read_rest(source, &header, Machine::X86_64)
    }

    fn read_rest(
        source: &(impl ReadAt + ?Sized),
        header: &elf::FileHeader64<LE>,
        machine: Machine,
    ) -> Result<Self, ElfError> {
        let program_headers: Vec<elf::ProgramHeader64<LE>> = read_table(
            source,
            "program headers",
            header.e_phoff.get(LE),
            u64::from(header.e_phnum.get(LE)),
            MAX_HEADERS,
        )?;
        let segments = program_headers
            .iter()
            .filter(|p| p.p_type.get(LE) == elf::PT_LOAD)
            .map(|p| LoadSegment {
                address: Svma(p.p_vaddr.get(LE)),
                offset: FileOffset(p.p_offset.get(LE)),
                file_size: p.p_filesz.get(LE),
                memory_size: p.p_memsz.get(LE),
                executable: p.p_flags.get(LE).0 & elf::PF_X.0 != 0,
                writable: p.p_flags.get(LE).0 & elf::PF_W.0 != 0,
            })
            .collect::<Vec<_>>();
        let mut sections = read_sections(source, header)?;
        let sectionless = sections.is_empty() && !segments.is_empty();
        if sectionless {
            let pointers: Vec<Pointer> = program_headers.iter().map(pointer).collect();
            sections = sectionless::sections(source, &segments, &pointers)?;
        }
        Ok(Self {
            machine,
            fixed_position: header.e_type.get(LE) == elf::ET_EXEC,
            relocatable: header.e_type.get(LE) == elf::ET_REL,
            segments,
            has_interpreter: program_headers.iter().any(|p| p.p_type.get(LE) == elf::PT_INTERP),
            sections,
            sectionless,
        })
    }

    /// The section with this name.
    pub fn section(&self, name: &str) -> Option<&Section> {
        self.sections.iter().find(|s| s.name == name)
    }

    /// The first section of this type.
    pub fn section_of_kind(&self, kind: elf::SectionType) -> Option<&Section> {
        self.sections.iter().find(|s| s.kind == kind)
    }

    /// The section that a section's `sh_link` refers to, such as the string table of a symbol table.
    pub fn linked(&self, section: &Section) -> Option<&Section> {
        self.sections.get(section.link as usize)
    }
}

fn read_file_header(source: &(impl ReadAt + ?Sized)) -> Result<elf::FileHeader64<LE>, ElfError> {
    let what = "the ELF header";
    let size = size_of::<elf::FileHeader64<LE>>() as u64;
    let file_size = source.size().map_err(|source| ElfError::Io { what, source })?;
    if file_size < size {
        return Err(ElfError::NotElf);
    }
    let bytes = read_bytes(source, what, 0, size, size)?;
    let Ok((header, _)) = pod::from_bytes::<elf::FileHeader64<LE>>(&bytes) else {
        return Err(ElfError::NotElf);
    };
    if header.e_ident.magic != elf::ELFMAG {
        return Err(ElfError::NotElf);
    }
    if header.e_ident.class != elf::ELFCLASS64 {
        return Err(ElfError::Unsupported("not 64-bit"));
    }
    if header.e_ident.data != elf::ELFDATA2LSB {
        return Err(ElfError::Unsupported("not little-endian"));
    }
    Ok(*header)
}

fn pointer(header: &elf::ProgramHeader64<LE>) -> Pointer {
    Pointer {
        kind: header.p_type.get(LE),
        address: header.p_vaddr.get(LE),
        offset: header.p_offset.get(LE),
        size: header.p_filesz.get(LE),
    }
}

fn read_sections(
    source: &(impl ReadAt + ?Sized),
    header: &elf::FileHeader64<LE>,
) -> Result<Vec<Section>, ElfError> {
    let raw: Vec<elf::SectionHeader64<LE>> = read_table(
        source,
        "section headers",
        header.e_shoff.get(LE),
        u64::from(header.e_shnum.get(LE)),
        MAX_HEADERS,
    )?;
    let names = match raw.get(usize::from(header.e_shstrndx.get(LE).0)) {
        Some(s) => {
            read_bytes(source, "section names", s.sh_offset.get(LE), s.sh_size.get(LE), MAX_SECTION_NAMES)?
        }
        None => Vec::new(),
    };
    let section = |s: &elf::SectionHeader64<LE>| Section {
        name: string_at(&names, s.sh_name.get(LE) as usize).unwrap_or_default().to_owned(),
        kind: s.sh_type.get(LE),
        flags: s.sh_flags.get(LE),
        address: s.sh_addr.get(LE),
        offset: s.sh_offset.get(LE),
        size: s.sh_size.get(LE),
        link: s.sh_link.get(LE),
    };
    Ok(raw.iter().map(section).collect())
}
