//! Procs and lambdas: the code of a block, its `self`, and the variables that it captures (`rb_proc_t`, `vm_core.h`).

use super::{
    Environment, HeapLayout, Slot,
    data_types::{DataTypes, fill},
    walk::word,
};
use crate::ruby::{RubyVersion, frames::Memory};

/// `wrap_struct_name` of `proc_data_type` (proc.c).
const NAMES: &[(&[u8], ())] = &[(b"proc\0", ())];
/// Byte offsets in `struct rb_block` (`vm_core.h`, 2.7 to 4.0), the first member of `rb_proc_t`.
const OWN_SELF: usize = 0;
const POINTER: usize = 8;
const CODE: usize = 16;
const KIND: usize = 24;
const BLOCK: usize = 32;
/// `block_type_iseq`: a block of Ruby code.
const RUBY: u64 = 0;

/// A Proc of Ruby code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closure {
    /// Address of the code of the block.
    pub code: u64,
    /// `self` in it.
    own_self: u64,
    /// The captured variables.
    environment: u64,
    /// The object with the instance variables of the Proc itself (4.0), 0 if it has none.
    fields: u64,
}

impl Closure {
    /// Passes what the collector marks through it to `visit` (`block_mark`, proc.c), except the code.
    pub fn each(&self, visit: &mut dyn FnMut(u64)) {
        let found = [self.own_self, self.environment, self.fields].into_iter();
        found.filter(|value| value.is_multiple_of(8) && *value > 0x1000).for_each(visit);
    }
}

/// Finds the Procs of one process.
#[derive(Debug)]
pub struct Procs {
    version: RubyVersion,
    layout: HeapLayout,
    types: DataTypes<()>,
}

impl Procs {
    /// For a release; `None` if its layout of Procs is not known (2.7 to 4.0 are).
    pub fn of(version: RubyVersion, layout: &HeapLayout) -> Option<Self> {
        let known = version.at_least(2, 7) && !version.at_least(4, 1);
        known.then(|| Self { version, layout: *layout, types: DataTypes::new(version, NAMES) })
    }

    /// The Proc in a slot. `None`: the slot holds something else, a Proc of a symbol, a method or a C function, or up to 3.4 a Proc with
    /// instance variables; or it has changed meanwhile. Two facts identify a Proc: the name of its type, and an environment that points back to
    /// its variables.
    pub fn closure<M: Memory>(&mut self, memory: &M, slot: &Slot<'_>) -> Option<Closure> {
        let ((), typed) = self.types.look(memory, slot)?;
        // From 4.0 on, the object with the instance variables is one of the references.
        if !self.version.at_least(4, 0) && slot.has_other_variables(&self.layout) {
            return None;
        }
        let mut block = [0; BLOCK];
        fill(memory, slot, typed, &mut block)?;
        if word(&block, KIND) & 0xffff_ffff != RUBY {
            return None;
        }
        let environment = Environment::at(memory, word(&block, POINTER), self.version)?;
        Some(Closure {
            code: word(&block, CODE),
            own_self: word(&block, OWN_SELF),
            environment,
            fields: typed.fields,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ruby::frames::words::Words;

    const DATA_TYPE: u64 = 0xc;
    const IS_TYPED: u64 = 1 << 6;
    const OLD: RubyVersion = RubyVersion { major: 3, minor: 1, teeny: 2 };
    const NEW: RubyVersion = RubyVersion { major: 3, minor: 3, teeny: 8 };
    const NEWEST: RubyVersion = RubyVersion { major: 4, minor: 0, teeny: 5 };

    fn at(word: u64) -> u64 {
        0x10000 + word * 8
    }

    /// Type, name, block, variables, environment.
    fn memory() -> Vec<u64> {
        let name = u64::from_le_bytes(*b"proc\0abc");
        let block = [0x7000, at(7), 0x5000, 7 << 32];
        let variables = [0, 2, at(9)];
        let environment = [0x1a, 0x5008, at(7), at(6), 3];
        [&[at(1), name][..], &block, &variables, &environment].concat()
    }

    fn find(version: RubyVersion, memory: Vec<u64>, slot: &[u64]) -> Option<Closure> {
        later(version, memory, slot, slot)
    }

    /// The slot as it was, and as it is when the data is read.
    fn later(version: RubyVersion, memory: Vec<u64>, slot: &[u64], now: &[u64]) -> Option<Closure> {
        let layout = HeapLayout::of(version).ok()?;
        let bytes: Vec<u8> = slot.iter().flat_map(|word| word.to_le_bytes()).collect();
        let slot_at = at(memory.len() as u64);
        let memory = [memory, now.to_vec()].concat();
        let slot = Slot { address: slot_at, bytes: &bytes, marks: None };
        Procs::of(version, &layout)?.closure(&Words(memory), &slot)
    }

    /// An object that is a Proc in every respect is recognised; one that differs in any respect is not.
    #[test]
    fn closures() {
        let slot = [DATA_TYPE, 0x8000, at(0), 1, at(2)];
        let expected = Closure { code: 0x5000, own_self: 0x7000, environment: at(9), fields: 0 };
        assert_eq!(find(OLD, memory(), &slot), Some(expected));
        assert_eq!(find(NEW, memory(), &slot), Some(expected));
        let mut found = Vec::new();
        expected.each(&mut |value| found.push(value));
        assert_eq!(found, [0x7000, at(9)]);

        assert_eq!(later(OLD, memory(), &slot, &[0; 5]), None, "swept meanwhile");

        let mut embedded = [DATA_TYPE, 0x8000, at(0), 3, 0, 0, 0, 0];
        embedded[4..].copy_from_slice(&memory()[2..6]);
        assert_eq!(find(NEW, memory(), &embedded), Some(expected));
        assert_eq!(find(OLD, memory(), &embedded), None, "no data is embedded there");
        assert_eq!(find(NEW, memory(), &embedded[..5]), None, "a slot that is too small");

        for (word, value, why) in [
            (0, 0x7, "an array"),
            (0, DATA_TYPE | 1 << 10, "with instance variables"),
            (2, 0x3000, "of a type that is not there"),
            (3, 0, "without a type"),
            (4, 0x3000, "without data"),
        ] {
            let mut slot = slot;
            slot[word] = value;
            assert_eq!(find(OLD, memory(), &slot), None, "{why}");
        }
        for (word, value, why) in [
            (1, u64::from_le_bytes(*b"process\0"), "of another type"),
            (3, at(6), "variables elsewhere"),
            (5, 1, "of a C function"),
            (8, 0x34, "on a stack"),
            (9, 0x7, "not an environment"),
            (11, at(8), "an environment of others"),
        ] {
            let mut memory = memory();
            memory[word] = value;
            assert_eq!(find(OLD, memory, &slot), None, "{why}");
        }
    }

    /// In 4.0 the type is elsewhere, and the object with the instance variables is one more reference.
    #[test]
    fn with_fields() {
        let slot = [DATA_TYPE | IS_TYPED, 0x8000, 0, at(0), at(2)];
        let expected = Closure { code: 0x5000, own_self: 0x7000, environment: at(9), fields: 0 };
        assert_eq!(find(NEWEST, memory(), &slot), Some(expected));
        assert_eq!(later(NEWEST, memory(), &slot, &[0; 5]), None, "swept meanwhile");
        // A shape other than the root shape.
        let own = [DATA_TYPE | IS_TYPED | 7 << 32, 0x8000, 0x6000, at(0), at(2)];
        let expected_of_own = Closure { fields: 0x6000, ..expected };
        assert_eq!(find(NEWEST, memory(), &own), Some(expected_of_own));
        let mut found = Vec::new();
        expected_of_own.each(&mut |value| found.push(value));
        assert_eq!(found, [0x7000, at(9), 0x6000]);

        let mut embedded = [DATA_TYPE | IS_TYPED, 0x8000, 0, at(0) | 1, 0, 0, 0, 0];
        embedded[4..].copy_from_slice(&memory()[2..6]);
        assert_eq!(find(NEWEST, memory(), &embedded), Some(expected));
        assert_eq!(find(NEWEST, memory(), &embedded[..5]), None, "a slot that is too small");
        for (word, value, why) in [
            (0, 0x7 | IS_TYPED, "an array"),
            (0, DATA_TYPE, "without a type"),
            (3, 0x3000, "of a type that is not there"),
            (4, 0x3000, "without data"),
        ] {
            let mut slot = slot;
            slot[word] = value;
            assert_eq!(find(NEWEST, memory(), &slot), None, "{why}");
        }
        let old = [DATA_TYPE | IS_TYPED, 0x8000, at(0), 1, at(2)];
        assert_eq!(find(NEWEST, memory(), &old), None, "as up to 3.4");
        assert_eq!(find(NEW, memory(), &slot), None, "as in 4.0");
    }

    proptest! {
        /// Whatever the memory contains, reading ends.
        #[test]
        fn anything(words in prop::collection::vec(prop_oneof![any::<u64>(), (0_u64..40).prop_map(at), 0_u64..9], 1..40)) {
            for version in [OLD, NEW, NEWEST] {
                let mut slot = words.clone();
                slot[0] = DATA_TYPE | IS_TYPED;
                let _found = find(version, words.clone(), &slot);
            }
        }
    }
}
