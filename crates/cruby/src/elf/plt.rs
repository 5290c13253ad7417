//! Dynamic relocations, and the PLT stubs that jump through the slots filled by them.

use object::LittleEndian as LE;
use object::elf;

use super::headers::{Headers, Machine};
use super::raw::{Section, records};
use super::source::read_bytes;
use super::{ElfError, ReadAt};
use crate::address::Svma;

const MAX_RELOCATIONS: u64 = 64 << 20;
const MAX_PACKED: u64 = 1 << 20;
const MAX_PACKED_SLOTS: usize = 1 << 20;
const MAX_DATA: u64 = 64 << 20;
const MAX_PLT: u64 = 256 << 20;

/// What the dynamic linker stores in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relocation {
    /// The address of a dynamic symbol plus `addend`.
    Symbol {
        /// Index in `.dynsym`.
        index: u32,
        /// Added to the symbol's address.
        addend: i64,
    },
    /// An address inside the image.
    Image(Svma),
    /// The TLS module number of the image (general dynamic model; the next slot holds the offset).
    TlsModule,
    /// The offset of a variable in the TLS block of its module.
    TlsModuleOffset {
        /// Index in `.dynsym`, 0 if there is no symbol.
        index: u32,
        /// Added to the symbol's offset.
        addend: i64,
    },
    /// The offset of a variable from the thread pointer.
    TlsOffset {
        /// Index in `.dynsym`, 0 if there is no symbol.
        index: u32,
        /// Added to the symbol's offset.
        addend: i64,
    },
    /// A TLS descriptor.
    TlsDescriptor {
        /// Index in `.dynsym`, 0 if there is no symbol.
        index: u32,
        /// Added to the symbol's offset.
        addend: i64,
    },
}

/// Reads the relocations of `.rela.dyn` and `.rela.plt`, sorted by slot.
pub(crate) fn relocations(
    source: &(impl ReadAt + ?Sized),
    headers: &Headers,
) -> Result<Vec<(Svma, Relocation)>, ElfError> {
    let mut slots = Vec::new();
    for section in of_kind(headers, elf::SHT_RELA, "relocations", MAX_RELOCATIONS)? {
        let bytes = section.read(source, "relocations", MAX_RELOCATIONS)?;
        slots.extend(
            records::<elf::Rela64<LE>>(&bytes).iter().filter_map(|rela| relocation(rela, headers.machine)),
        );
    }
    let mut packed = Vec::new();
    for section in of_kind(headers, elf::SHT_RELR, "packed relocations", MAX_PACKED)? {
        packed_slots(&section.read(source, "packed relocations", MAX_PACKED)?, &mut packed)?;
    }
    slots.extend(packed_relocations(source, headers, packed)?);
    slots.sort_by_key(|&(slot, _)| slot);
    Ok(slots)
}

/// The allocated sections of a kind. In a hostile file several may cover the same bytes, so the limit applies to their total.
fn of_kind<'a>(
    headers: &'a Headers,
    kind: elf::SectionType,
    what: &'static str,
    limit: u64,
) -> Result<Vec<&'a Section>, ElfError> {
    let sections: Vec<_> = headers.sections.iter().filter(|s| s.kind == kind && s.is_allocated()).collect();
    let size = sections.iter().fold(0_u64, |sum, section| sum.saturating_add(section.size));
    if size > limit {
        return Err(ElfError::TooLarge { what, size, limit });
    }
    Ok(sections)
}

/// `SHT_RELR`: relative relocations whose slots hold the stated address itself. Each is in one segment.
fn packed_relocations(
    source: &(impl ReadAt + ?Sized),
    headers: &Headers,
    mut slots: Vec<u64>,
) -> Result<Vec<(Svma, Relocation)>, ElfError> {
    let mut found = Vec::with_capacity(slots.len());
    let mut left = MAX_DATA;
    for segment in headers.segments.iter().filter(|s| s.writable) {
        let holds = |slot: u64| {
            let at = slot.checked_sub(segment.address.0)?;
            (at.checked_add(8)? <= segment.file_size).then_some(at as usize)
        };
        if !slots.iter().any(|&slot| holds(slot).is_some()) {
            continue;
        }
        let data = read_bytes(source, "relocated data", segment.offset.0, segment.file_size, left)?;
        left = left.saturating_sub(segment.file_size);
        slots.retain(|&slot| {
            let Some(at) = holds(slot) else { return true };
            if let Some(value) = data.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()) {
                found.push((Svma(slot), Relocation::Image(Svma(u64::from_le_bytes(value)))));
            }
            false
        });
    }
    Ok(found)
}

/// Adds the slots of a `SHT_RELR` table: an even word is the address of a slot, an odd one a bitmap of the 63 slots after
/// the last one.
fn packed_slots(packed: &[u8], slots: &mut Vec<u64>) -> Result<(), ElfError> {
    const SLOTS_PER_MAP: u64 = 63;
    let mut next = 0_u64;
    for entry in packed.as_chunks::<8>().0 {
        let entry = u64::from_le_bytes(*entry);
        if entry & 1 == 0 {
            slots.push(entry);
            next = entry.wrapping_add(8);
        } else {
            let set = (0..SLOTS_PER_MAP).filter(|bit| entry >> (bit + 1) & 1 == 1);
            slots.extend(set.map(|bit| next.wrapping_add(8 * bit)));
            next = next.wrapping_add(8 * SLOTS_PER_MAP);
        }
        if slots.len() > MAX_PACKED_SLOTS {
            return Err(ElfError::malformed("packed relocations", "too many slots"));
        }
    }
    Ok(())
}

fn relocation(rela: &elf::Rela64<LE>, machine: Machine) -> Option<(Svma, Relocation)> {
    let info = rela.r_info.get(LE);
    let index = (info >> 32) as u32;
    let addend = rela.r_addend.get(LE);
    let kind = elf::RelocationType(info as u32);
    let relocation = match machine {
        Machine::X86_64 => x86_relocation(kind, index, addend)?,
        Machine::Aarch64 => aarch64_relocation(kind, index, addend)?,
    };
    Some((Svma(rela.r_offset.get(LE)), relocation))
}

fn x86_relocation(kind: elf::RelocationType, index: u32, addend: i64) -> Option<Relocation> {
    Some(match kind {
        elf::R_X86_64_GLOB_DAT | elf::R_X86_64_JUMP_SLOT => Relocation::Symbol { index, addend: 0 },
        elf::R_X86_64_64 => Relocation::Symbol { index, addend },
        elf::R_X86_64_RELATIVE => Relocation::Image(Svma(addend as u64)),
        elf::R_X86_64_DTPMOD64 => Relocation::TlsModule,
        elf::R_X86_64_DTPOFF64 => Relocation::TlsModuleOffset { index, addend },
        elf::R_X86_64_TPOFF64 => Relocation::TlsOffset { index, addend },
        elf::R_X86_64_TLSDESC => Relocation::TlsDescriptor { index, addend },
        _ => return None,
    })
}

fn aarch64_relocation(kind: elf::RelocationType, index: u32, addend: i64) -> Option<Relocation> {
    Some(match kind {
        elf::R_AARCH64_GLOB_DAT | elf::R_AARCH64_JUMP_SLOT | elf::R_AARCH64_ABS64 => {
            Relocation::Symbol { index, addend }
        }
        elf::R_AARCH64_RELATIVE => Relocation::Image(Svma(addend as u64)),
        elf::R_AARCH64_TLS_DTPMOD => Relocation::TlsModule,
        elf::R_AARCH64_TLS_DTPREL => Relocation::TlsModuleOffset { index, addend },
        elf::R_AARCH64_TLS_TPREL => Relocation::TlsOffset { index, addend },
        elf::R_AARCH64_TLSDESC => Relocation::TlsDescriptor { index, addend },
        _ => return None,
    })
}

/// Finds the PLT stubs: the address of each stub and the slot it jumps through, sorted by stub.
pub(crate) fn stubs(
    source: &(impl ReadAt + ?Sized),
    headers: &Headers,
) -> Result<Vec<(Svma, Svma)>, ElfError> {
    let mut found = Vec::new();
    for name in [".plt", ".plt.sec", ".plt.got"] {
        let Some(section) = headers.section(name) else { continue };
        let bytes = section.read(source, "a procedure linkage table", MAX_PLT)?;
        match headers.machine {
            Machine::X86_64 => scan_stubs(&bytes, section.address, &mut found),
            Machine::Aarch64 => scan_aarch64_stubs(&bytes, section.address, &mut found),
        }
    }
    found.sort_by_key(|&(stub, _)| stub);
    Ok(found)
}

/// Stubs have 8 or 16 bytes, so each starts at a multiple of 8.
fn scan_stubs(bytes: &[u8], address: u64, found: &mut Vec<(Svma, Svma)>) {
    const ENDBR64: &[u8] = &[0xf3, 0x0f, 0x1e, 0xfa];
    const BND: &[u8] = &[0xf2];
    const JMP_RIP_RELATIVE: &[u8] = &[0xff, 0x25];

    for start in (0..bytes.len()).step_by(8) {
        let stub = &bytes[start..];
        let code = stub.strip_prefix(ENDBR64).unwrap_or(stub);
        let code = code.strip_prefix(BND).unwrap_or(code);
        let Some(code) = code.strip_prefix(JMP_RIP_RELATIVE) else { continue };
        let Some((displacement, rest)) = code.split_first_chunk::<4>() else { continue };
        let next = address.wrapping_add((bytes.len() - rest.len()) as u64);
        let slot = next.wrapping_add_signed(i32::from_le_bytes(*displacement).into());
        found.push((Svma(address.wrapping_add(start as u64)), Svma(slot)));
    }
}

/// Stubs on aarch64 are `[bti c;] adrp x16, page; ldr x17, [x16, offset]; add x16, x16, offset; br x17`, optionally with
/// `autia1716` before the jump (the psABI's PLT; Arm ARM C6.2 for the encodings).
fn scan_aarch64_stubs(bytes: &[u8], address: u64, found: &mut Vec<(Svma, Svma)>) {
    const BTI_C: u32 = 0xd503_245f;
    const ADRP_X16: (u32, u32) = (0x9f00_001f, 0x9000_0010);
    const LDR_X17_X16: (u32, u32) = (0xffc0_03ff, 0xf940_0211);
    let is = |word: u32, (mask, value): (u32, u32)| word & mask == value;
    let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    for (index, pair) in words.windows(2).enumerate() {
        let [adrp, load] = *pair else { continue };
        if !is(adrp, ADRP_X16) || !is(load, LDR_X17_X16) {
            continue;
        }
        let at = address.wrapping_add(4 * index as u64);
        // 21 bits, the lowest two encoded separately; the unit is pages.
        let pages = (adrp >> 5 & 0x7_ffff) << 2 | adrp >> 29 & 3;
        let distance = i64::from((pages << 11).cast_signed() >> 11) << 12;
        let slot =
            (at & !0xfff).wrapping_add_signed(distance).wrapping_add(u64::from(load >> 10 & 0xfff) * 8);
        let marked = index.checked_sub(1).is_some_and(|before| words[before] == BTI_C);
        found.push((Svma(at - if marked { 4 } else { 0 }), Svma(slot)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The stubs of aarch64: plain (Debian's libruby), and marked as branch targets.
    #[test]
    fn aarch64_stub_shapes() {
        let plain = [0xd000_1a50_u32, 0xf941_8a11, 0x910c_4210, 0xd61f_0220];
        let marked = [0xd503_245f, 0xf000_0010, 0xf940_0611, 0x9100_2210, 0xd61f_0220];
        let code: Vec<u8> = plain.iter().chain(&marked).flat_map(|word| word.to_le_bytes()).collect();
        let mut found = Vec::new();
        scan_aarch64_stubs(&code, 0x32d50, &mut found);
        assert_eq!(found, [(Svma(0x32d50), Svma(0x37_c310)), (Svma(0x32d60), Svma(0x3_5008))]);
    }

    /// An address, the slots that a bitmap adds after it, and a second bitmap that continues after the first.
    #[test]
    fn packed() {
        let table = [0x1000_u64, 0b1011, 1 << 63 | 1].map(u64::to_le_bytes).concat();
        let mut slots = Vec::new();
        packed_slots(&table, &mut slots).unwrap();
        assert_eq!(slots, [0x1000, 0x1008, 0x1018, 0x1008 + 63 * 8 + 62 * 8]);
        // The limit applies to all tables together.
        let some = vec![0xff; 1 << 16];
        assert!(packed_slots(&some, &mut slots).is_ok() && packed_slots(&some, &mut slots).is_ok());
        assert!(packed_slots(&some, &mut slots).is_err());
    }

    /// Lazy, IBT (`endbr64; bnd jmp`) and `.plt.got` stubs are recognised; the resolver entry is not.
    #[test]
    fn stub_shapes() {
        let resolver = [0xff, 0x35, 2, 0, 0, 0, 0xff, 0x25, 4, 0, 0, 0, 0x0f, 0x1f, 0x40, 0];
        let lazy = [0xff, 0x25, 0, 1, 0, 0, 0x68, 0, 0, 0, 0, 0xe9, 0, 0, 0, 0];
        let ibt = [0xf3, 0x0f, 0x1e, 0xfa, 0xf2, 0xff, 0x25, 0, 2, 0, 0, 0x0f, 0x1f, 0x44, 0, 0];
        let short = [0xff, 0x25, 0xfc, 0xff, 0xff, 0xff, 0x66, 0x90];
        let mut found = Vec::new();
        scan_stubs(&[&resolver[..], &lazy, &ibt, &short].concat(), 0x1000, &mut found);
        assert_eq!(
            found,
            [(Svma(0x1010), Svma(0x1116)), (Svma(0x1020), Svma(0x122b)), (Svma(0x1030), Svma(0x1032)),]
        );
    }
}
