//! Objects of threads and fibers, and where they hold what `Thread#[]` and `Fiber[]` read (`rb_execution_context_t`, `vm_core.h`).

use super::{
    Slot,
    data_types::{DataTypes, address},
};
use crate::ruby::{
    RubyVersion,
    frames::{LocalTable, Memory},
    tables::{self, Table},
};

/// `wrap_struct_name` of `ruby_threadptr_data_type` (vm.c) and of `fiber_data_type` (cont.c).
const NAMES: &[(&[u8], Kind)] = &[(b"VM/thread\0", Kind::Thread), (b"fiber\0", Kind::Fiber)];
/// `THREAD_LOCAL_STORAGE_INITIALISED` (thread.c, 2.7 to 4.0): `FL_USER13`.
const VARIABLES: u64 = 1 << 25;

/// A thread or fiber that Ruby code can access as an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FiberLocals {
    /// Its `rb_thread_t *`, or that of the fiber's thread.
    pub thread: u64,
    /// Whether it was found through the fiber object. If found through the thread object, it is the fiber that runs on the thread.
    pub by_fiber: bool,
    /// The table that `Thread#[]` reads there.
    pub table: LocalTable,
    /// The hash that `Fiber[]` reads, from 3.2 on.
    pub storage: Option<u64>,
    /// Whether the thread has variables (`Thread#thread_variable_set`).
    pub has_variables: bool,
}

/// Finds the threads and fibers of one process.
#[derive(Debug)]
pub struct Threads {
    version: RubyVersion,
    at: Offsets,
    types: DataTypes<Kind>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Thread,
    Fiber,
}

/// Byte offsets.
#[derive(Clone, Copy, Debug)]
struct Offsets {
    /// In `rb_thread_t`.
    thread_self: u32,
    thread_ec: u32,
    /// In `rb_fiber_t`.
    fiber_self: u32,
    fiber_ec: u32,
    /// In `rb_execution_context_t`.
    ec_thread: u32,
    ec_locals: u32,
    ec_storage: Option<u32>,
}

impl Threads {
    /// For a release; `None` if its layout of them is not known (2.7 to 4.0 are).
    pub fn of(version: RubyVersion) -> Option<Self> {
        if !version.at_least(2, 7) || version.at_least(4, 1) {
            return None;
        }
        let own = Table::of(version).ok();
        let member = |tag, name: &str| {
            let known = own.and_then(|table| table.structure(tag));
            let known = known.or_else(|| tables::newest_structure(version, tag))?;
            known.field(name).map(|field| field.offset)
        };
        let ec = |name: &str| member("rb_execution_context_struct", name);
        let (ec_thread, ec_locals) = (ec("thread_ptr")?, ec("local_storage")?);
        let at = Offsets {
            thread_self: member("rb_thread_struct", "self")?,
            thread_ec: member("rb_thread_struct", "ec")?,
            fiber_self: member("rb_fiber_struct", "cont.self")?,
            fiber_ec: member("rb_fiber_struct", "cont.saved_ec.thread_ptr")?.checked_sub(ec_thread)?,
            ec_thread,
            ec_locals,
            // `storage` follows `local_storage` and two objects.
            ec_storage: version.at_least(3, 2).then(|| ec_locals + 24),
        };
        Some(Self { version, at, types: DataTypes::new(version, NAMES) })
    }

    /// The thread or fiber in a slot. `None`: the slot holds something else, or the thread or fiber has ended or changed meanwhile. Two
    /// facts identify it: the name of its type, and that the structure it points to points back to it.
    pub fn locals<M: Memory>(&mut self, memory: &M, slot: &Slot<'_>) -> Option<FiberLocals> {
        let (kind, typed) = self.types.look(memory, slot)?;
        let (at, data) = (self.at, address(slot, typed)?);
        let word = |address: u64, offset: u32| {
            let mut bytes = [0; 8];
            let there = memory.read(address.checked_add(offset.into())?, &mut bytes);
            there.then(|| u64::from_le_bytes(bytes)).filter(|word| *word != 0)
        };
        let (own_self, ec) = match kind {
            Kind::Thread => (word(data, at.thread_self)?, word(data, at.thread_ec)?),
            Kind::Fiber => (word(data, at.fiber_self)?, data.checked_add(at.fiber_ec.into())?),
        };
        let thread = word(ec, at.ec_thread)?;
        if own_self != slot.address || (kind == Kind::Thread && thread != data) {
            return None;
        }
        let table = word(ec, at.ec_locals).unwrap_or(0);
        Some(FiberLocals {
            thread,
            by_fiber: kind == Kind::Fiber,
            table: if self.version.at_least(3, 0) { LocalTable::Ids(table) } else { LocalTable::Hash(table) },
            storage: at.ec_storage.and_then(|offset| word(ec, offset)),
            has_variables: kind == Kind::Thread && slot.flags() & VARIABLES != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ruby::frames::words::Words;

    const VERSION: RubyVersion = RubyVersion { major: 3, minor: 3, teeny: 8 };
    const BASE: u64 = 0x10000;

    fn at(word: u64) -> u64 {
        BASE + word * 8
    }

    /// Two types and their names, then a thread, a context and a fiber; the slots of thread and fiber are at word 150.
    fn memory(threads: &Threads) -> Vec<u64> {
        let o = threads.at;
        let mut words = vec![0; 170];
        let name = |name: &[u8; 8]| u64::from_le_bytes(*name);
        (words[0], words[1], words[2]) = (at(1), name(b"VM/threa"), name(b"d\0......"));
        (words[3], words[4]) = (at(4), name(b"fiber\0.."));
        // The data of the thread is at 10, its context at 70, the fiber at 90: byte offsets are all multiples of 8.
        for (base, offset, value) in [
            (10, o.thread_self, at(150)),
            (10, o.thread_ec, at(70)),
            (70, o.ec_thread, at(10)),
            (70, o.ec_locals, 0x5000),
            (70, o.ec_storage.unwrap(), 0x7000),
            (90, o.fiber_self, at(160)),
            (90, o.fiber_ec + o.ec_thread, at(10)),
            (90, o.fiber_ec + o.ec_locals, 0x6000),
        ] {
            words[base + offset as usize / 8] = value;
        }
        words[150..155].copy_from_slice(&[0xc | VARIABLES, 0x8000, at(0), 1, at(10)]);
        words[160..165].copy_from_slice(&[0xc, 0x8000, at(3), 1, at(90)]);
        words
    }

    fn find(words: &[u64], slot: usize) -> Option<FiberLocals> {
        let bytes: Vec<u8> = words[slot..slot + 5].iter().flat_map(|word| word.to_le_bytes()).collect();
        let slot = Slot { address: at(slot as u64), bytes: &bytes, marks: None };
        Threads::of(VERSION)?.locals(&Words(words.to_vec()), &slot)
    }

    /// A thread and a fiber are recognised; an object that differs in one respect is not.
    #[test]
    fn threads_and_fibers() {
        let threads = Threads::of(VERSION).unwrap();
        let words = memory(&threads);
        let thread = FiberLocals {
            thread: at(10),
            by_fiber: false,
            table: LocalTable::Ids(0x5000),
            storage: Some(0x7000),
            has_variables: true,
        };
        assert_eq!(find(&words, 150), Some(thread));
        let fiber = FiberLocals {
            by_fiber: true,
            storage: None,
            table: LocalTable::Ids(0x6000),
            has_variables: false,
            ..thread
        };
        assert_eq!(find(&words, 160), Some(fiber));
        let o = threads.at;
        for (word, value, why) in [
            (150, 7, "an array"),
            (152, 0x30, "of a type that is not there"),
            (1, 5, "of another type"),
            (10 + o.thread_self as usize / 8, at(160), "of another object"),
            (10 + o.thread_ec as usize / 8, 0, "ended"),
            (70 + o.ec_thread as usize / 8, at(11), "a context of another thread"),
            (154, 0x30, "without data"),
        ] {
            let mut words = words.clone();
            words[word] = value;
            assert_eq!(find(&words, 150), None, "{why}");
        }
        let mut words = words;
        words[70 + o.ec_locals as usize / 8] = 0;
        assert_eq!(find(&words, 150).map(|found| found.table), Some(LocalTable::Ids(0)));
    }

    /// Every release with a table has these members from 2.7 on.
    #[test]
    fn every_table() {
        for table in tables::tables() {
            let version = RubyVersion::new(table.to.0, table.to.1, table.to.2);
            assert_eq!(Threads::of(version).is_some(), version.at_least(2, 7), "{version}");
        }
    }

    proptest! {
        /// Whatever the memory contains, reading ends.
        #[test]
        fn anything(words in prop::collection::vec(prop_oneof![any::<u64>(), (0_u64..40).prop_map(at), 0_u64..9], 5..40)) {
            let mut words = words;
            words[0] = 0xc;
            let _found = find(&words, 0);
        }
    }
}
