//! Pseudonyms: equal texts of a recording have the same pseudonym, and no pseudonym leads back to its text.

use std::collections::{BTreeMap, HashSet};

use ring::{
    hmac::{HMAC_SHA256, Key, sign},
    rand::SystemRandom,
};

use super::{Kind, ScrubError};

/// Makes pseudonyms with a random key, which is discarded with this value.
pub(super) struct Pseudonyms {
    key: Key,
    /// Digests of the distinct texts that were replaced.
    replaced: BTreeMap<Kind, HashSet<u64>>,
}

impl Pseudonyms {
    pub(super) fn new() -> Result<Self, ScrubError> {
        let key = Key::generate(HMAC_SHA256, &SystemRandom::new()).map_err(|_| ScrubError::Random)?;
        Ok(Self { key, replaced: BTreeMap::new() })
    }

    fn digest(&mut self, kind: Kind, text: &str) -> [u8; 32] {
        let tag = sign(&self.key, text.as_bytes());
        let mut digest = [0; 32];
        digest.iter_mut().zip(tag.as_ref()).for_each(|(byte, of)| *byte = *of);
        let first = digest.iter().take(8).fold(0, |first, byte| first << 8 | u64::from(*byte));
        self.replaced.entry(kind).or_default().insert(first);
        digest
    }

    /// 16 hexadecimal digits that replace a text.
    pub(super) fn short(&mut self, kind: Kind, text: &str) -> String {
        hex(&self.digest(kind, text)[..8])
    }

    /// 64 hexadecimal digits, like a container id.
    pub(super) fn long(&mut self, kind: Kind, text: &str) -> String {
        hex(&self.digest(kind, text))
    }

    /// Number of distinct texts replaced, by kind.
    pub(super) fn replaced(&self) -> Vec<(Kind, u64)> {
        self.replaced.iter().map(|(kind, texts)| (*kind, texts.len() as u64)).collect()
    }
}

fn hex(bytes: &[u8]) -> String {
    let digit = |half: u8| char::from_digit(half.into(), 16).unwrap_or_default();
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}
