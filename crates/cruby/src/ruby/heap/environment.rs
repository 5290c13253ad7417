//! Local variables that outlive their method or block because a closure uses them (`rb_env_t`, `vm_core.h`).

use super::{Slot, walk::word};
use crate::ruby::{RubyVersion, frames::Memory};

/// `imemo_env` (`internal/imemo.h`) and where the kind of an internal object is in its flags.
const ENVIRONMENT: u64 = 0;
const KIND_SHIFT: u32 = 12;
const KIND_MASK: u64 = 0xf;
/// Byte offsets of `iseq`, `env` and `env_size`.
const CODE: usize = 8;
const VALUES: usize = 24;
const COUNT: usize = 32;
/// More variables than this are not plausible.
const MOST: u64 = 1 << 16;

/// The variables of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Environment {
    /// Address of the code of the method or block.
    pub code: u64,
    values: u64,
    count: u64,
}

impl Environment {
    /// That of a slot; `None` if it is something else, or the release is not known (2.7 to 4.0 are).
    pub fn of(slot: &Slot<'_>, version: RubyVersion) -> Option<Self> {
        if !version.at_least(2, 7) || version.at_least(4, 1) || slot.kind().name() != "T_IMEMO" {
            return None;
        }
        let is_environment = slot.flags() >> KIND_SHIFT & KIND_MASK == ENVIRONMENT;
        let count = slot.word(COUNT) & 0xffff_ffff;
        (is_environment && count <= MOST).then(|| Self {
            code: slot.word(CODE),
            values: slot.word(VALUES),
            count,
        })
    }

    /// Hands what the collector marks through it to `visit`; `None` if it is not there any more.
    pub fn each<M: Memory>(&self, memory: &M, visit: &mut dyn FnMut(u64)) -> Option<()> {
        let mut bytes = vec![0; self.count as usize * 8];
        if !memory.read(self.values, &mut bytes) {
            return None;
        }
        let values = bytes.chunks_exact(8).map(|value| word(value, 0));
        values.filter(|value| value.is_multiple_of(8) && *value > 0x1000).for_each(visit);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Words from address 0x10000 on.
    struct Words([u64; 4]);

    impl Memory for Words {
        fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
            let bytes: Vec<u8> = self.0.iter().flat_map(|word| word.to_le_bytes()).collect();
            let at = address.checked_sub(0x10000).and_then(|at| usize::try_from(at).ok());
            let Some(bytes) = at.and_then(|at| bytes.get(at..at.checked_add(buffer.len())?)) else {
                return false;
            };
            buffer.copy_from_slice(bytes);
            true
        }
    }

    /// Objects among the values, of environments only; sizes and addresses that lead nowhere are refused.
    #[test]
    fn values() {
        const IMEMO: u64 = 0x1a;
        let version = RubyVersion { major: 3, minor: 1, teeny: 0 };
        let of = |flags: u64, values: u64, count: u64, version| {
            let bytes: Vec<u8> =
                [flags, 0x5000, 0x6000, values, count].iter().flat_map(|word| word.to_le_bytes()).collect();
            let slot = Slot { address: 0x9000, bytes: &bytes, marks: None };
            let environment = Environment::of(&slot, version)?;
            let mut found = Vec::new();
            let read = environment.each(&Words([0x20000, 3, 0x8, 0x20008]), &mut |value| found.push(value));
            Some(read.map(|()| found))
        };
        assert_eq!(of(IMEMO, 0x10000, 4, version), Some(Some(vec![0x20000, 0x20008])));
        // The upper half of the word is no part of the count.
        assert_eq!(of(IMEMO, 0x10000, 7 << 32 | 1, version), Some(Some(vec![0x20000])));
        assert_eq!(of(IMEMO, 0x10000, 5, version), Some(None), "not there");
        assert_eq!(of(IMEMO, u64::MAX, 4, version), Some(None));
        assert_eq!(of(IMEMO, 0x10000, MOST + 1, version), None);
        assert_eq!(of(IMEMO | 1 << KIND_SHIFT, 0x10000, 4, version), None, "another kind");
        assert_eq!(of(0x7, 0x10000, 4, version), None, "an array");
        assert_eq!(of(IMEMO, 0x10000, 4, RubyVersion { major: 4, minor: 1, teeny: 0 }), None);
    }
}
