//! Local variables that outlive their method or block because a closure uses them (`rb_env_t`, `vm_core.h`).

use super::{
    Slot,
    walk::{is_still, word},
};
use crate::ruby::{RubyVersion, frames::Memory};

/// `imemo_env` (`internal/imemo.h`), and the position of an internal object's kind in its flags.
const ENVIRONMENT: u64 = 0;
const KIND_SHIFT: u32 = 12;
const KIND_MASK: u64 = 0xf;
/// Byte offsets of `iseq`, `env` and `env_size`.
const CODE: usize = 8;
const POINTER: usize = 16;
const VALUES: usize = 24;
const COUNT: usize = 32;
/// Number of bytes of `rb_env_t` that are read.
const HEAD: usize = 40;
/// `VM_ENV_DATA_INDEX_SPECVAL`, `_FLAGS` and `_ENV` (`vm_core.h`), counted from index -1.
const SPECIAL: usize = 0;
const FLAGS: usize = 1;
const ITSELF: usize = 2;
/// `VM_ENV_FLAG_LOCAL`: the environment is a method's, not a block's.
const LOCAL: u64 = 2;
/// Maximum plausible number of variables.
const MOST: u64 = 1 << 16;

/// The variables of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Environment {
    /// Address of the code of the method or block.
    pub code: u64,
    /// Address of the environment object.
    address: u64,
    pointer: u64,
    values: u64,
    count: u64,
}

impl Environment {
    /// The environment in a slot; `None` if the slot holds something else, or the release is not supported (2.7 to 4.0 are).
    pub fn of(slot: &Slot<'_>, version: RubyVersion) -> Option<Self> {
        if !version.at_least(2, 7) || version.at_least(4, 1) || slot.kind().name() != "T_IMEMO" {
            return None;
        }
        let is_environment = slot.flags() >> KIND_SHIFT & KIND_MASK == ENVIRONMENT;
        let count = slot.word(COUNT) & 0xffff_ffff;
        (is_environment && count <= MOST).then(|| Self {
            code: slot.word(CODE),
            address: slot.address,
            pointer: slot.word(POINTER),
            values: slot.word(VALUES),
            count,
        })
    }

    /// The environment object that holds the variables at this pointer (`ep`). `None`: the variables are on a stack, or the contents of memory
    /// contradict this: the environment must point back.
    pub(super) fn at<M: Memory>(memory: &M, pointer: u64, version: RubyVersion) -> Option<u64> {
        let address = of_pointer(memory, pointer)?[ITSELF];
        let mut bytes = [0; HEAD];
        if !address.is_multiple_of(8) || !memory.read(address, &mut bytes) {
            return None;
        }
        let found = Self::of(&Slot { address, bytes: &bytes, marks: None }, version)?;
        (found.pointer == pointer).then_some(address)
    }

    /// Passes what the collector marks through it to `visit`, except its code; `None` if it no longer exists: the values passed may then
    /// belong to something else that reuses its memory.
    pub fn each<M: Memory>(&self, memory: &M, visit: &mut dyn FnMut(u64)) -> Option<()> {
        let mut bytes = vec![0; self.count as usize * 8];
        if !memory.read(self.values, &mut bytes) {
            return None;
        }
        let outer = self.outer(memory)?;
        is_still(memory, self.address.checked_add(VALUES as u64)?, self.values)?;
        let values = bytes.chunks_exact(8).map(|value| word(value, 0));
        values.chain([outer]).filter(|value| value.is_multiple_of(8) && *value > 0x1000).for_each(visit);
        Some(())
    }

    /// The environment of the method or block that contains a block (`rb_vm_env_prev_env`, vm.c): 0 for a method's own. `None`: it no
    /// longer exists.
    fn outer<M: Memory>(&self, memory: &M) -> Option<u64> {
        let own = of_pointer(memory, self.pointer)?;
        if own[ITSELF] != self.address {
            return None;
        }
        if own[FLAGS] & LOCAL != 0 {
            return Some(0);
        }
        // GC_GUARDED_PTR_REF (`vm_core.h`).
        of_pointer(memory, own[SPECIAL] & !3).map(|outer| outer[ITSELF])
    }
}

/// The three words from index -1 on at a pointer to variables.
fn of_pointer<M: Memory>(memory: &M, pointer: u64) -> Option<[u64; 3]> {
    let mut bytes = [0; 24];
    let first = pointer.checked_sub(8).filter(|first| first.is_multiple_of(8))?;
    memory.read(first, &mut bytes).then(|| [0, 8, 16].map(|at| word(&bytes, at)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ruby::frames::words::Words;

    const IMEMO: u64 = 0x1a;
    const VERSION: RubyVersion = RubyVersion { major: 3, minor: 1, teeny: 0 };
    /// Four values; from index -1 of the pointer on: no block, a method's own.
    const OWN: [u64; 7] = [0x20000, 3, 0x8, 0x20008, 0, LOCAL, 0x9000];
    const POINTER_TO_OWN: u64 = 0x10000 + 5 * 8;

    fn of(memory: &[u64], head: [u64; 4], version: RubyVersion) -> Option<Result<Vec<u64>, &'static str>> {
        later(memory, head, head, version)
    }

    /// The environment as it was, and as it is when its values are read: after the other memory, at the address given as 0x9000 there.
    fn later(
        memory: &[u64],
        before: [u64; 4],
        now: [u64; 4],
        version: RubyVersion,
    ) -> Option<Result<Vec<u64>, &'static str>> {
        let address = 0x10000 + memory.len() as u64 * 8;
        let words = |[flags, pointer, values, count]: [u64; 4]| [flags, 0x5000, pointer, values, count];
        let bytes: Vec<u8> = words(before).iter().flat_map(|word| word.to_le_bytes()).collect();
        let slot = Slot { address, bytes: &bytes, marks: None };
        let environment = Environment::of(&slot, version)?;
        let itself = |word: &u64| if *word == 0x9000 { address } else { *word };
        let memory = memory.iter().map(itself).chain(words(now)).collect();
        let mut found = Vec::new();
        let read = environment.each(&Words(memory), &mut |value| found.push(value));
        Some(read.map(|()| found).ok_or("gone"))
    }

    /// Objects among the values, of environments only; invalid sizes and addresses are refused.
    #[test]
    fn values() {
        let of = |flags: u64, values: u64, count: u64, version| {
            of(&OWN, [flags, POINTER_TO_OWN, values, count], version)
        };
        assert_eq!(of(IMEMO, 0x10000, 4, VERSION), Some(Ok(vec![0x20000, 0x20008])));
        // The upper half of the word is not part of the count.
        assert_eq!(of(IMEMO, 0x10000, 7 << 32 | 1, VERSION), Some(Ok(vec![0x20000])));
        assert_eq!(of(IMEMO, 0x10000, 1 << 10, VERSION), Some(Err("gone")), "not there");
        assert_eq!(of(IMEMO, u64::MAX, 4, VERSION), Some(Err("gone")));
        assert_eq!(of(IMEMO, 0x10000, MOST + 1, VERSION), None);
        assert_eq!(of(IMEMO | 1 << KIND_SHIFT, 0x10000, 4, VERSION), None, "another kind");
        assert_eq!(of(0x7, 0x10000, 4, VERSION), None, "an array");
        assert_eq!(of(IMEMO, 0x10000, 4, RubyVersion { major: 4, minor: 1, teeny: 0 }), None);
    }

    /// Memory that now belongs to another object is not read as this one's.
    #[test]
    fn reused() {
        let head = [IMEMO, POINTER_TO_OWN, 0x10000, 4];
        assert_eq!(later(&OWN, head, head, VERSION), Some(Ok(vec![0x20000, 0x20008])));
        let swept = [0, 0, 0, 0];
        assert_eq!(later(&OWN, head, swept, VERSION), Some(Err("gone")), "the slot is free");
        let mut of_another = OWN;
        of_another[6] = 0x34000;
        assert_eq!(
            later(&of_another, head, head, VERSION),
            Some(Err("gone")),
            "the values are of another one"
        );
    }

    /// The environment of a block refers to that of the enclosing method or block.
    #[test]
    fn outer() {
        let outer = 0x10000 + 8 * 8;
        // A value; index -1: the outer environment, guarded; flags; itself. Then the same for the outer one.
        let mut memory = vec![0x20000, 0, 0, 0, outer | 1, 0, 0x9000, 0, 0, 0x30000];
        let head = [IMEMO, POINTER_TO_OWN, 0x10000, 1];
        assert_eq!(of(&memory, head, VERSION), Some(Ok(vec![0x20000, 0x30000])));
        memory[5] = LOCAL;
        assert_eq!(of(&memory, head, VERSION), Some(Ok(vec![0x20000])), "a method's own");
        memory[5] = 0;
        memory[4] = 0;
        assert_eq!(of(&memory, head, VERSION), Some(Err("gone")), "leads nowhere");
    }

    /// Variables belong to the environment that points back to them.
    #[test]
    fn itself() {
        let address = 0x10000 + 8 * 8;
        let pointer = 0x10000 + 8;
        let mut memory = vec![0, LOCAL, address, 0, 0, 0, 0, 0, IMEMO, 0x5000, pointer, 0x10000, 3];
        assert_eq!(Environment::at(&Words(memory.clone()), pointer, VERSION), Some(address));
        memory[10] += 8;
        assert_eq!(Environment::at(&Words(memory.clone()), pointer, VERSION), None, "to others");
        (memory[10], memory[2]) = (pointer, 0x34);
        assert_eq!(Environment::at(&Words(memory.clone()), pointer, VERSION), None, "on a stack");
        assert_eq!(Environment::at(&Words(memory), 3, VERSION), None);
    }
}
