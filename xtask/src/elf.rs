//! Strips a linked BPF object to the parts that are kept, and extracts the parts by which two objects are compared.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use object::{
    Object as _, ObjectSection as _,
    build::{
        ByteString,
        elf::{Builder, SectionData},
    },
    elf::{SHF_ALLOC, SHT_PROGBITS, SHT_STRTAB},
    read::{File, SectionFlags},
};

use crate::btf;

/// Removes DWARF from a BPF object, and adds BTF that describes its functions. Programs, maps and symbols stay.
pub(crate) fn strip(object: &[u8]) -> Result<Vec<u8>> {
    let described = btf::describe(object)?;
    let mut builder = Builder::read(object).context("the linked object is not an ELF file")?;
    for section in &mut builder.sections {
        section.delete = is_debug(&section.name);
    }
    builder.delete_orphans();
    for (name, data) in [(".BTF", &described.types), (".BTF.ext", &described.functions)] {
        let section = builder.sections.add();
        section.name = ByteString::from(name);
        section.sh_type = SHT_PROGBITS;
        section.sh_addralign = 4;
        section.data = SectionData::Data(data.as_slice().into());
    }
    // LLVM stores the names of sections and of symbols in one table, the writer uses two.
    if !builder.sections.iter().any(|section| matches!(section.data, SectionData::SectionString)) {
        let names = builder.sections.add();
        names.name = ByteString::from(".shstrtab");
        names.sh_type = SHT_STRTAB;
        names.sh_addralign = 1;
        names.data = SectionData::SectionString;
    }
    let mut stripped = Vec::new();
    builder.write(&mut stripped).context("cannot write the object without debug information")?;
    Ok(stripped)
}

fn is_debug(name: &ByteString<'_>) -> bool {
    [b".debug_".as_slice(), b".rel.debug_", b".BTF", b".rel.BTF"]
        .iter()
        .any(|prefix| name.starts_with(prefix))
}

/// The sections that are loaded into the kernel (code, maps, constants, licence), by name.
pub(crate) fn loaded_sections(object: &[u8]) -> Result<BTreeMap<String, Vec<u8>>> {
    let file = File::parse(object).context("not an ELF file")?;
    let mut sections = BTreeMap::new();
    for section in file.sections() {
        let SectionFlags::Elf { sh_flags, .. } = section.flags() else { continue };
        if sh_flags & SHF_ALLOC == SHF_ALLOC {
            let name = section.name().context("a section without a name")?.to_owned();
            let data = section.data().with_context(|| format!("section {name} cannot be read"))?;
            sections.insert(name, data.to_vec());
        }
    }
    Ok(sections)
}
