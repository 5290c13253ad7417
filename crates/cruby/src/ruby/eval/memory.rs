//! The values that the code has stored so far.

use std::collections::BTreeMap;

use super::Operator;
use super::value::Value;

/// A store to memory outside the stack.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    /// Address of the store, less `offset`.
    pub(crate) base: Value,
    /// Bytes added to `base`.
    pub(crate) offset: i64,
    /// Bytes written.
    pub(crate) size: u8,
    /// The stored value.
    pub(crate) value: Value,
}

/// Contents of a memory location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Nothing was stored there.
    Untouched,
    /// This value.
    Known(Value),
    /// An unknown value, or only part of it, was stored there.
    Mixed,
}

/// Maximum number of words that a run may store; a run that stores more is in a loop.
const MAX_WORDS: usize = 4096;

/// A stored word: bytes and value.
type Word = (u8, Value);

/// Words by the object they lie in and their offset there; they do not overlap. Different objects are assumed not to
/// overlap either.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    places: BTreeMap<Value, BTreeMap<i64, Word>>,
    words: usize,
}

impl Memory {
    pub(super) fn read(&self, place: &Value, offset: i64, size: u8) -> Content {
        let Some(words) = self.places.get(place) else { return Content::Untouched };
        let end = offset.saturating_add(size.into());
        let mut overlapping = overlapping(words, offset, end);
        let Some((start, (stored, value))) = overlapping.next() else { return Content::Untouched };
        if start > offset || start.saturating_add((*stored).into()) < end || overlapping.next().is_some() {
            return Content::Mixed;
        }
        let part = match (offset - start) * 8 {
            0 => value.clone(),
            bits => Value::binary(Operator::ShiftRight, value.clone(), Value::Constant(bits)),
        };
        match part.truncated(size) {
            Value::Unknown => Content::Mixed,
            value => Content::Known(value),
        }
    }

    pub(super) fn write(&mut self, place: Value, offset: i64, size: u8, value: Value) {
        let words = self.places.entry(place).or_default();
        let end = offset.saturating_add(size.into());
        let before = words.len();
        let old: Vec<(i64, u8)> =
            overlapping(words, offset, end).map(|(start, (size, _))| (start, *size)).collect();
        for (start, size) in old {
            let Some((_, value)) = words.remove(&start) else { continue };
            // The remaining bytes at the start are its low bytes; its high bytes are no longer known.
            if start < offset {
                let left = (offset - start) as u8;
                let value = if matches!(left, 1 | 2 | 4) { value.truncated(left) } else { Value::Unknown };
                words.insert(start, (left, value));
            }
            let old_end = start.saturating_add(size.into());
            if old_end > end {
                words.insert(end, ((old_end - end) as u8, Value::Unknown));
            }
        }
        words.insert(offset, (size, value));
        self.words = self.words + words.len() - before;
    }

    /// Whether more words are stored than the limit allows.
    pub(super) fn is_full(&self) -> bool {
        self.words > MAX_WORDS
    }

    /// Forgets the words for which `keep` returns `false`, by object and offset.
    pub(super) fn retain(&mut self, keep: impl Fn(&Value, i64) -> bool) {
        self.places.retain(|place, words| {
            words.retain(|&offset, _| keep(place, offset));
            !words.is_empty()
        });
        self.words = self.places.values().map(BTreeMap::len).sum();
    }

    /// The words in an object, by offset.
    pub(super) fn words(&self, place: &Value) -> impl Iterator<Item = (i64, &Word)> {
        self.places.get(place).into_iter().flatten().map(|(offset, word)| (*offset, word))
    }
}

fn overlapping(words: &BTreeMap<i64, Word>, offset: i64, end: i64) -> impl Iterator<Item = (i64, &Word)> {
    /// Bytes of the longest word.
    const LONGEST: i64 = u8::MAX as i64;
    let near = words.range(offset.saturating_sub(LONGEST)..end.max(offset));
    near.filter(move |(start, (size, _))| start.saturating_add((*size).into()) > offset)
        .map(|(start, word)| (*start, word))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A read inside a store gives its part; a read that the store covers only partly gives nothing definite.
    #[test]
    fn overlaps() {
        let mut memory = Memory::default();
        let place = Value::Argument(0);
        let mut write = |offset, size, value| {
            memory.write(place.clone(), offset, size, Value::Constant(value));
        };
        write(8, 8, 0x1122_3344_5566_7788);
        write(32, 8, 0x1_0000_0001);
        write(36, 4, 2);
        write(48, 8, 3);
        write(44, 8, 4);
        let read = |offset, size| memory.read(&place, offset, size);
        assert_eq!(read(8, 8), Content::Known(Value::Constant(0x1122_3344_5566_7788)));
        assert_eq!(read(12, 2), Content::Known(Value::Constant(0x3344)));
        assert_eq!(read(12, 8), Content::Mixed);
        assert_eq!(read(16, 8), Content::Untouched);
        assert_eq!(read(36, 4), Content::Known(Value::Constant(2)));
        assert_eq!(read(32, 4), Content::Known(Value::Constant(1)));
        assert_eq!(read(32, 8), Content::Mixed);
        assert_eq!(read(44, 8), Content::Known(Value::Constant(4)));
        assert_eq!(read(52, 4), Content::Mixed);
        assert_eq!(memory.read(&Value::Argument(1), 8, 8), Content::Untouched);
    }

    /// A run that keeps storing is detected; overwritten words do not count.
    #[test]
    fn fullness() {
        let mut memory = Memory::default();
        for _ in 0..2 * MAX_WORDS {
            memory.write(Value::Stack(0), 8, 8, Value::Unknown);
        }
        assert!(!memory.is_full());
        for offset in 0..=MAX_WORDS as i64 {
            memory.write(Value::Stack(0), 8 * offset, 8, Value::Unknown);
        }
        assert!(memory.is_full());
        memory.retain(|_, offset| offset < 64);
        assert!(!memory.is_full());
        assert_eq!(memory.words(&Value::Stack(0)).count(), 8);
    }
}
