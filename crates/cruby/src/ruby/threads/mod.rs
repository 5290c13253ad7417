//! The threads of a VM and their stacks, read from the memory of a process that is not stopped.
//!
//! This is for threads that sleep: they cause no event at which the kernel side could read their stacks, and nothing changes their stacks
//! while they sleep. The caller must prove that a thread slept during the whole read (by its counts of context switches, read
//! before and after). The data read here is checked as on the kernel side: context and thread point to each other, and the
//! control frames lie inside the thread's VM stack.

mod list;
mod state;
#[cfg(test)]
mod tests;
mod walk;

use gctrace_common::config::StackPath;

use super::{
    RubyAnalysis, RubyVersion,
    frames::Memory,
    gvl_plan::GLIBC_DTV_ENTRY,
    tables::{self, Table},
};
use crate::address::Svma;

use state::StateLayout;
pub use state::ThreadState;
pub use walk::{Agreed, Walked, loops};

/// How the threads of an image's VM are found and their stacks walked.
#[derive(Clone, Debug)]
pub struct ThreadsLayout {
    vm_ptr: Svma,
    lists: Lists,
    native: Native,
    path: StackPath,
    /// Where the state of a thread is; `None` if a member is not known.
    state: Option<StateLayout>,
}

/// Where the VM's lists of threads are; byte offsets.
#[derive(Clone, Copy, Debug)]
enum Lists {
    /// Up to 2.7: one list. Its head in `rb_vm_t` and its node in `rb_thread_t`.
    Vm { head: u32, node: u32 },
    /// A list of Ractors in `rb_vm_t`, and one of threads in each `rb_ractor_t`.
    Ractors { head: u32, node: u32, threads: u32, thread_node: u32 },
}

/// Where the native thread of a thread is; byte offsets.
#[derive(Clone, Copy, Debug)]
struct Native {
    /// The pointer to `struct rb_native_thread` in `rb_thread_t` (3.2 and later); `None` up to 3.1, where the members are in `rb_thread_t`.
    nt: Option<u32>,
    /// The `pthread_t`.
    thread_id: u32,
    /// The thread's id (3.1 and later).
    tid: Option<u32>,
    /// Whether the C library is glibc.
    glibc: bool,
}

/// A Ruby thread that has a native thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RubyThread {
    /// Its `rb_thread_t *`.
    pub address: u64,
    /// Its native thread, in the pid namespace of the process.
    pub tid: u32,
}

impl ThreadsLayout {
    /// The layout for an image whose stacks are walked with `path`; `None` if a structure of its release is not known.
    pub(super) fn of(analysis: &RubyAnalysis, own: Option<&Table>, path: &StackPath) -> Option<Self> {
        let table = match own {
            Some(table) => table,
            None => Table::of(analysis.version).ok()?,
        };
        let glibc = analysis.derived.ec.dtv_entry == GLIBC_DTV_ENTRY;
        Self::with(analysis.version, table, analysis.vm.vm_ptr, path, glibc)
    }

    fn with(
        version: RubyVersion,
        table: &Table,
        vm_ptr: Svma,
        path: &StackPath,
        glibc: bool,
    ) -> Option<Self> {
        if path.place == StackPath::NONE {
            return None;
        }
        let member = |tag, name: &str| {
            let known = table.structure(tag).or_else(|| tables::newest_structure(version, tag));
            known?.field(name).map(|field| field.offset)
        };
        let lists = if version.at_least(3, 0) {
            Lists::Ractors {
                head: member("rb_vm_struct", "ractor.set")?,
                node: member("rb_ractor_struct", "vmlr_node")?,
                threads: member("rb_ractor_struct", "threads.set")?,
                thread_node: member("rb_thread_struct", "lt_node")?,
            }
        } else {
            Lists::Vm {
                head: member("rb_vm_struct", "living_threads")?,
                node: member("rb_thread_struct", "vmlt_node")?,
            }
        };
        let nt = member("rb_thread_struct", "nt");
        let of = if nt.is_some() { "rb_native_thread" } else { "rb_thread_struct" };
        let native = Native { nt, thread_id: member(of, "thread_id")?, tid: member(of, "tid"), glibc };
        let state = StateLayout::of(version, table, member, glibc);
        Some(Self { vm_ptr, lists, native, path: *path, state })
    }

    /// The threads of the VM in the process behind `memory`, whose image has this load bias. Threads that start or end meanwhile may be
    /// missing. `None`: the VM is not set up, or cannot be read.
    pub fn threads(&self, memory: &impl Memory, bias: u64) -> Option<Vec<RubyThread>> {
        let all = self.all(memory, bias)?;
        Some(all.into_iter().filter_map(|(address, tid)| Some(RubyThread { address, tid: tid? })).collect())
    }

    /// The `rb_thread_t *` of all threads, and their native threads as in [`ThreadsLayout::native`]. `None` as for [`ThreadsLayout::threads`].
    pub fn all(&self, memory: &impl Memory, bias: u64) -> Option<Vec<(u64, Option<u32>)>> {
        list::threads(self, memory, bias)
    }

    /// The current native thread of a thread, in the pid namespace of the process. `None`: it has none (threads of Ractors other than
    /// the main one share native threads and change between them: M:N, from 3.3 on), or it cannot be read.
    pub fn native(&self, memory: &impl Memory, address: u64) -> Option<u32> {
        list::tid(memory, self.native, address)
    }

    /// What a thread is doing at this moment, according to the VM; `None`: it cannot be read, or the release is not known.
    pub fn state(&self, memory: &impl Memory, bias: u64, thread: RubyThread) -> Option<ThreadState> {
        let vm = word(memory, bias.wrapping_add(self.vm_ptr.0), 0).filter(|&vm| vm != 0)?;
        self.state.as_ref()?.read(memory, vm, thread.address)
    }

    /// Whether a thread that sleeps on the futex at this address waits for the GVL; `None` if unknown.
    pub fn waits_for_gvl(&self, memory: &impl Memory, thread: RubyThread, futex: u64) -> Option<bool> {
        self.state.as_ref()?.waits_for_gvl(memory, thread, futex)
    }

    /// The stack of a running thread. It is read until two reads in a row agree, except for the position in the innermost frame; after
    /// `tries` attempts only the frames that the last two have in common are returned, from the root on.
    pub fn walk_running(&self, memory: &impl Memory, thread: RubyThread, tries: u32) -> (Walked, Agreed) {
        walk::agreed(tries, || walk::walk(memory, &self.path, thread.address))
    }

    /// The stack of a sleeping thread.
    pub fn walk(&self, memory: &impl Memory, thread: RubyThread) -> Walked {
        walk::walk(memory, &self.path, thread.address)
    }
}

/// Reads one number; `None` if it cannot be read.
fn word(memory: &impl Memory, address: u64, offset: u32) -> Option<u64> {
    let mut bytes = [0; 8];
    memory.read(address.checked_add(u64::from(offset))?, &mut bytes).then(|| u64::from_le_bytes(bytes))
}
