//! The VM's lists of threads.

use super::{Lists, Memory, Native, ThreadsLayout, word};

/// Maximum number of Ractors and threads, together, that are followed: lists that change while they are read may not end.
const MOST: usize = 1 << 16;
/// Byte offset of `tid` in glibc's `struct pthread` on x86-64 (nptl/descr.h: after a header of 704 bytes and a list node).
const GLIBC_TID: u32 = 720;
/// Byte offset of the pointer to itself in glibc's `tcbhead_t`, after `tcb` and `dtv`.
const GLIBC_SELF: u32 = 16;

/// The threads of a VM, each with its native thread if it has one.
pub(super) fn threads(
    layout: &ThreadsLayout,
    memory: &impl Memory,
    bias: u64,
) -> Option<Vec<(u64, Option<u32>)>> {
    let vm = word(memory, bias.wrapping_add(layout.vm_ptr.0), 0).filter(|&vm| vm != 0)?;
    let mut left = MOST;
    let addresses = match layout.lists {
        Lists::Vm { head, node } => nodes(memory, vm, head, node, &mut left)?,
        Lists::Ractors { head, node, threads, thread_node } => {
            let ractors = nodes(memory, vm, head, node, &mut left)?;
            let mut all = Vec::new();
            for ractor in ractors {
                // A Ractor that ends meanwhile no longer has any.
                all.extend(nodes(memory, ractor, threads, thread_node, &mut left).unwrap_or_default());
                if left == 0 {
                    return None;
                }
            }
            all
        }
    };
    Some(addresses.into_iter().map(|address| (address, tid(memory, layout.native, address))).collect())
}

/// The structures of a list (ccan/list): the head is at offset `head` in `owner`, the nodes at offset `node` in the structures. `left`: number
/// of nodes that may still be followed.
fn nodes(memory: &impl Memory, owner: u64, head: u32, node: u32, left: &mut usize) -> Option<Vec<u64>> {
    let head = owner.checked_add(u64::from(head))?;
    let mut found = Vec::new();
    let mut next = word(memory, head, 0)?;
    while next != head {
        *left = left.checked_sub(1)?;
        if next == 0 {
            return None;
        }
        found.push(next.checked_sub(u64::from(node))?);
        next = word(memory, next, 0)?;
    }
    Some(found)
}

/// The id of the native thread. The C library's own value is preferred: a fork updates it at once.
pub(super) fn tid(memory: &impl Memory, native: Native, thread: u64) -> Option<u32> {
    let at = match native.nt {
        Some(nt) => word(memory, thread, nt).filter(|&at| at != 0)?,
        None => thread,
    };
    let half =
        |address, offset| word(memory, address, offset).map(|word| word as u32).filter(|&tid| tid != 0);
    let pthread = word(memory, at, native.thread_id).filter(|&pthread| pthread != 0);
    // glibc's `pthread_t` is the address of a structure that contains its own address twice. So does musl's in a process with one thread, the
    // second time as the previous thread (`struct pthread`, src/internal/pthread_impl.h): that alone does not show which one it is.
    let glibc = pthread.filter(|&pthread| {
        native.glibc
            && word(memory, pthread, 0) == Some(pthread)
            && word(memory, pthread, GLIBC_SELF) == Some(pthread)
    });
    match glibc {
        Some(pthread) => half(pthread, GLIBC_TID),
        None => half(at, native.tid?),
    }
}
