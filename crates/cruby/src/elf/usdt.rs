//! USDT probes: the notes that `sys/sdt.h` emits to `.note.stapsdt`.
//!
//! Format: sourceware.org/systemtap/wiki/UserSpaceProbeImplementation, version 3.

use object::LittleEndian as LE;
use object::elf;
use object::read::elf::NoteIterator;

use super::headers::Headers;
use super::{ElfError, ReadAt};
use crate::address::Svma;

/// Maximum bytes of the notes; no Ruby has more.
const MAX_NOTES: u64 = 1 << 20;
/// `NT_STAPSDT`.
const NOTE_TYPE: u32 = 3;

/// One USDT probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsdtProbe {
    /// Provider, `ruby`.
    pub provider: String,
    /// Name, such as `gc__mark__begin`.
    pub name: String,
    /// Address of the instruction, a `nop`.
    pub address: Svma,
    /// The word that counts the probe's users, if the program checks it before it reaches the probe.
    pub semaphore: Option<Svma>,
    /// Its arguments, in assembler syntax: `4@$0 8@%rdi`.
    pub arguments: String,
}

/// The probes of an image; empty if it has no such notes. Notes that are not understood are skipped.
pub(super) fn probes(source: &(impl ReadAt + ?Sized), headers: &Headers) -> Result<Vec<UsdtProbe>, ElfError> {
    let Some(notes) = headers.section(".note.stapsdt") else { return Ok(Vec::new()) };
    let bytes = notes.read(source, ".note.stapsdt", MAX_NOTES)?;
    // Prelinking moves addresses but not notes: the distance shows in the address of `.stapsdt.base`.
    let base = headers.section(".stapsdt.base").map(|section| section.address);
    let mut found = Vec::new();
    let Ok(mut iterator) = NoteIterator::<elf::FileHeader64<LE>>::new(LE, 4, &bytes) else {
        return Ok(found);
    };
    while let Ok(Some(note)) = iterator.next() {
        if note.name() == b"stapsdt" && note.n_type(LE).0 == NOTE_TYPE {
            found.extend(probe(note.desc(), base));
        }
    }
    Ok(found)
}

fn probe(description: &[u8], base: Option<u64>) -> Option<UsdtProbe> {
    const WORDS: usize = 3 * 8;
    let word = |index: usize| {
        let bytes = description.get(index * 8..index * 8 + 8)?;
        Some(u64::from_le_bytes(bytes.try_into().ok()?))
    };
    let (address, note_base, semaphore) = (word(0)?, word(1)?, word(2)?);
    let moved = base.map_or(0, |base| base.wrapping_sub(note_base));
    let mut texts = description.get(WORDS..)?.split(|byte| *byte == 0);
    let mut text = || std::str::from_utf8(texts.next()?).ok().map(ToOwned::to_owned);
    let (provider, name) = (text()?, text()?);
    Some(UsdtProbe {
        provider,
        name,
        arguments: text().unwrap_or_default(),
        address: Svma(address.wrapping_add(moved)),
        semaphore: (semaphore != 0).then(|| Svma(semaphore.wrapping_add(moved))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A note is read and relocated by the distance that its section was moved; a damaged note is skipped.
    #[test]
    fn description() {
        let words = [0x1000_u64, 0x5000, 0x9000];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend(b"ruby\0gc__mark__begin\x004@$2\0");
        let found = probe(&bytes, Some(0x5100)).unwrap();
        assert_eq!((found.provider.as_str(), found.name.as_str()), ("ruby", "gc__mark__begin"));
        assert_eq!((found.address, found.semaphore), (Svma(0x1100), Some(Svma(0x9100))));
        assert_eq!(found.arguments, "4@$2");
        assert_eq!(probe(&bytes[..20], None), None);
    }
}
