//! What a thread is doing, according to the VM itself: the holder of its GVL, the `Mutex` it waits for, those it holds.
//!
//! Everything here is one read of the memory of a running process. A caller that needs more than a momentary value reads twice and
//! compares.

use gctrace_common::gvl::FutexPath;

use super::{Memory, RubyThread, word};
use crate::ruby::{
    RubyVersion, gvl_plan,
    tables::Table,
    typed_data::{DATA, EMBEDDED_AT, TypedDataLayout},
};

/// `sizeof(pthread_cond_t)` of glibc.
const COND_BYTES: u64 = 48;
/// Possible byte offsets of `waitq` in `rb_mutex_t`, after one or two words and `next_mutex`.
const WAITQ: [u64; 2] = [16, 24];
/// Maximum number of mutexes of one thread that are followed: the list changes while it is read.
const MOST_HELD: usize = 1024;
/// `T_DATA` and the mask of types in `RBasic.flags`.
const T_MASK: u64 = 0x1f;
const T_DATA: u64 = 0x0c;

/// What a thread is doing, according to the VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadState {
    /// The GVL that it needs: the address of the word with the holder. Threads of one Ractor share it; up to 2.7 all threads do.
    pub gvl: u64,
    /// The `rb_thread_t *` that holds that GVL.
    pub holder: Option<u64>,
    /// The `rb_mutex_t *` that it is waiting to lock.
    pub wanted: Option<u64>,
    /// The `rb_mutex_t *` of each `Mutex` that it has locked; `None`: the list changed while it was read.
    pub locked: Option<Vec<u64>>,
    /// The `VALUE` of its name, a `String` or `nil`.
    pub name: u64,
    /// Whether it is the main thread of the process.
    pub main: bool,
}

/// Where this state is; byte offsets.
#[derive(Clone, Copy, Debug)]
pub(super) struct StateLayout {
    /// In `rb_vm_t`: the main thread.
    pub(super) main: u32,
    /// In `rb_thread_t`: the pointer to the VM or the Ractor, which contains the GVL.
    pub(super) owner_in: u32,
    /// In the VM or the Ractor: the holder.
    pub(super) owner: u32,
    pub(super) name: u32,
    pub(super) locking: u32,
    /// The bit of the word at [`EMBEDDED_AT`] that marks an embedded structure; 0 before 3.3.
    pub(super) embedded: u64,
    /// How a thread that waits for the GVL is identified; `None` if unknown for this libc or release.
    pub(super) waits: Option<FutexPath>,
}

impl StateLayout {
    /// The layout of a release; `None` if a member is not known. `glibc`: whether its condition variables can be read.
    pub(super) fn of(
        version: RubyVersion,
        table: &Table,
        member: impl Fn(&'static str, &str) -> Option<u32>,
        glibc: bool,
    ) -> Option<Self> {
        let ractors = version.at_least(3, 0);
        let main = if ractors { "ractor.main_thread" } else { "main_thread" };
        let (owner_in, tag, owner) = match (version.at_least(3, 2), ractors) {
            (true, _) => ("ractor", "rb_ractor_struct", "threads.sched.running"),
            (false, true) => ("ractor", "rb_ractor_struct", "threads.gvl.owner"),
            (false, false) => ("vm", "rb_vm_struct", "gvl.owner"),
        };
        Some(Self {
            main: member("rb_vm_struct", main)?,
            owner_in: member("rb_thread_struct", owner_in)?,
            owner: member(tag, owner)?,
            name: member("rb_thread_struct", "name")?,
            locking: member("rb_thread_struct", "locking_mutex")?,
            embedded: TypedDataLayout::of(version).embedded,
            waits: gvl_plan::futex_path(version, Some(table)).ok().filter(|_| glibc),
        })
    }

    /// The state of a thread of the VM at `vm`; `None` if it cannot be read.
    pub(super) fn read(&self, memory: &impl Memory, vm: u64, thread: u64) -> Option<ThreadState> {
        let gvl = word(memory, thread, self.owner_in).filter(|&at| at != 0)?;
        let gvl = gvl.checked_add(u64::from(self.owner))?;
        let wanted = word(memory, thread, self.locking)?;
        Some(ThreadState {
            gvl,
            holder: Some(word(memory, gvl, 0)?).filter(|&holder| holder != 0),
            wanted: self.mutex(memory, wanted),
            locked: self.locked(memory, thread),
            name: word(memory, thread, self.name)?,
            main: word(memory, vm, self.main)? == thread,
        })
    }

    /// The `rb_mutex_t *` of a `Mutex`.
    fn mutex(&self, memory: &impl Memory, value: u64) -> Option<u64> {
        if value < 0x1000 || !value.is_multiple_of(8) || word(memory, value, 0)? & T_MASK != T_DATA {
            return None;
        }
        if self.embedded != 0 && word(memory, value, EMBEDDED_AT)? & self.embedded != 0 {
            return value.checked_add(u64::from(DATA));
        }
        word(memory, value, DATA).filter(|&mutex| mutex != 0)
    }

    /// `keeping_mutexes`, which follows `locking_mutex` (`vm_core.h`, 2.6–4.0).
    fn locked(&self, memory: &impl Memory, thread: u64) -> Option<Vec<u64>> {
        let mut found = Vec::new();
        let mut next = word(memory, thread, self.locking.checked_add(8)?)?;
        while next != 0 {
            if found.len() >= MOST_HELD {
                return None;
            }
            found.push(next);
            next = next_held(memory, next)?;
        }
        Some(found)
    }

    /// Whether a thread that waits on the futex at this address waits for the GVL, as in `gctrace-ebpf/src/futex.rs`; `None`
    /// if unknown.
    pub(super) fn waits_for_gvl(&self, memory: &impl Memory, thread: RubyThread, futex: u64) -> Option<bool> {
        let path = self.waits.as_ref()?;
        let owner = match path.native {
            0 => thread.address,
            native => word(memory, thread.address, native).filter(|&native| native != 0)?,
        };
        let cond = owner.checked_add(u64::from(path.cond))?;
        if futex.wrapping_sub(cond) >= COND_BYTES {
            return Some(false);
        }
        if path.ready == 0 {
            return Some(word(memory, thread.address, path.unblock)? == 0);
        }
        let node = thread.address.checked_add(u64::from(path.ready))?;
        let next = word(memory, node, 0)?;
        Some(next != 0 && next != node)
    }
}

/// `next_mutex` of an `rb_mutex_t`. Patch releases have moved it, but it is always before `waitq`, which is recognised by its
/// contents: a list (ccan/list) whose first node points back to its head (`thread_sync.c`, 2.6–4.0).
fn next_held(memory: &impl Memory, mutex: u64) -> Option<u64> {
    let is_head = |at: u64| {
        let first = word(memory, at, 0).filter(|&first| first != 0)?;
        (word(memory, first, 8)? == at).then_some(())
    };
    let waitq = WAITQ.into_iter().find(|&waitq| is_head(mutex.wrapping_add(waitq)).is_some())?;
    word(memory, mutex.wrapping_add(waitq - 8), 0)
}
