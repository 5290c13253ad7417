//! ELF notes: the build id, and the properties that the code declares.

use std::fmt;

use object::elf;

/// Maximum number of notes read in one section.
const MAX_NOTES: usize = 1 << 14;

/// The GNU build id: a hash of the linked contents that survives stripping.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct BuildId(Box<[u8]>);

impl BuildId {
    /// From the raw bytes of the note.
    pub fn new(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }

    /// The raw bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BuildId({self})")
    }
}

/// One note.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Note<'a> {
    pub(crate) owner: &'a [u8],
    pub(crate) kind: u32,
    pub(crate) contents: &'a [u8],
}

/// The notes of a section or segment with 4-byte alignment (the only one that GNU tools write for 64-bit files, except for
/// `.note.gnu.property`, whose sizes are multiples of 8). Ends at the first truncated note.
pub(crate) fn notes(bytes: &[u8]) -> impl Iterator<Item = Note<'_>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let (note, behind) = first_note(rest)?;
        rest = behind;
        Some(note)
    })
    .take(MAX_NOTES)
}

fn first_note(bytes: &[u8]) -> Option<(Note<'_>, &[u8])> {
    let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?));
    let (name_size, size, kind) = (word(0)? as usize, word(4)? as usize, word(8)?);
    let align = |size: usize| size.checked_next_multiple_of(4);
    let owner = bytes.get(12..12_usize.checked_add(name_size)?)?;
    let start = 12_usize.checked_add(align(name_size)?)?;
    let contents = bytes.get(start..start.checked_add(size)?)?;
    let end = start.checked_add(align(size)?)?.min(bytes.len());
    let owner = owner.strip_suffix(b"\0").unwrap_or(owner);
    Some((Note { owner, kind, contents }, bytes.get(end..)?))
}

/// The build id among the notes.
pub(crate) fn build_id_in(bytes: &[u8]) -> Option<BuildId> {
    /// SHA-1 has 20 bytes; the longest hash that linkers offer has 32.
    const MAX_BUILD_ID: usize = 64;
    let note = notes(bytes).find(|note| note.owner == b"GNU" && note.kind == elf::NT_GNU_BUILD_ID.0)?;
    let fits = !note.contents.is_empty() && note.contents.len() <= MAX_BUILD_ID;
    fits.then(|| BuildId::new(note.contents))
}

/// Whether the notes of `.note.gnu.property` declare that the code supports shadow stacks
/// (`GNU_PROPERTY_X86_FEATURE_1_SHSTK`, x86-64 psABI).
pub(crate) fn allows_shadow_stacks(bytes: &[u8]) -> bool {
    const NT_GNU_PROPERTY_TYPE_0: u32 = 5;
    const FEATURE_1_AND: u32 = 0xc000_0002;
    const SHSTK: u32 = 2;
    notes(bytes).filter(|note| note.owner == b"GNU" && note.kind == NT_GNU_PROPERTY_TYPE_0).any(|note| {
        let mut rest = note.contents;
        while let Some((head, behind)) = rest.split_first_chunk::<8>() {
            let word = |at: usize| head[at..at + 4].try_into().map_or(0, u32::from_le_bytes);
            let (kind, size) = (word(0), word(4) as usize);
            let Some(value) = behind.get(..size) else { return false };
            let flags = value.first_chunk::<4>().map_or(0, |bytes| u32::from_le_bytes(*bytes));
            if kind == FEATURE_1_AND && flags & SHSTK != 0 {
                return true;
            }
            rest = size.checked_next_multiple_of(8).and_then(|size| behind.get(size..)).unwrap_or_default();
        }
        false
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(owner: &[u8], kind: u32, contents: &[u8]) -> Vec<u8> {
        let mut bytes = (owner.len() as u32).to_le_bytes().to_vec();
        bytes.extend((contents.len() as u32).to_le_bytes());
        bytes.extend(kind.to_le_bytes());
        for part in [owner, contents] {
            bytes.extend(part);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes
    }

    /// The build id is found among other notes, and a truncated note ends the list.
    #[test]
    fn kinds() {
        let other = note(b"Go\0", 3, &[1; 24]);
        let bytes = [other.clone(), note(b"GNU\0", 3, &[0xab; 20]), other].concat();
        assert_eq!(build_id_in(&bytes), Some(BuildId::new(&[0xab; 20])));
        for end in 0..bytes.len() {
            assert!(notes(&bytes[..end]).count() < 3);
            let _ = build_id_in(&bytes[..end]);
        }
    }

    /// The property is found after others; without the bit the answer is no.
    #[test]
    fn shadow_stacks() {
        let property = |flags: u32| {
            let words: [u32; 8] = [0xc000_8002, 4, 1, 0, 0xc000_0002, 4, flags, 0];
            note(b"GNU\0", 5, &words.map(u32::to_le_bytes).concat())
        };
        assert!(allows_shadow_stacks(&property(3)));
        assert!(!allows_shadow_stacks(&property(1)));
        assert!(!allows_shadow_stacks(&property(3)[..20]));
    }
}
