//! The path to the VM's per-thread and per-Ractor data (from 4.0 on), as the formulas of `GC.stat` follow it.

use gctrace_common::config::ThreadPath;
use serde::{Deserialize, Serialize};

use super::ec::{CurrentEc, EcLayout, dtv_entry};
use super::{NotDerived, Session};
use crate::address::Svma;
use crate::ruby::eval::Value;

const NO_LIBC: &str = "the C library that the image needs is neither glibc nor musl";

/// Upper bound of plausible offsets in the structures read here.
const MAX_OFFSET: i64 = 1 << 16;

/// Where the object cache of the running Ractor and the thread's own count of allocated bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadLayout {
    /// The slot with the image's TLS module id; `None` if the variables are addressed from the thread pointer. For a GC
    /// library: the slot of its Ruby, as a distance from `rb_mGC`, modulo 2⁶⁴.
    pub module: Option<Svma>,
    /// Byte offset of `ruby_current_ec` in the TLS block, or from the thread pointer.
    pub ec: i64,
    /// Byte offset of `malloc_increase_local` there.
    pub local: i64,
    /// Byte offset of `thread_ptr` in `rb_execution_context_t`.
    pub ec_thread: u32,
    /// Byte offset of `ractor` in `rb_thread_t`.
    pub thread_ractor: u32,
    /// Byte offset of `newobj_cache` in `rb_ractor_t`.
    pub ractor_cache: u32,
    /// Size of an entry of the dynamic thread vector, bytes.
    pub dtv_entry: u32,
    /// For a GC library: the slot with its own TLS module id, for `local`.
    pub local_module: Option<Svma>,
}

impl ThreadLayout {
    /// In the form that the kernel side uses.
    pub fn path(&self) -> ThreadPath {
        ThreadPath {
            module: self.module.map_or(0, |slot| slot.0),
            ec: self.ec,
            local: self.local,
            ec_thread: self.ec_thread,
            thread_ractor: self.thread_ractor,
            ractor_cache: self.ractor_cache,
            dtv_entry: self.dtv_entry,
        }
    }
}

/// What the formulas have shown so far.
#[derive(Debug, Default)]
pub(super) struct Seen {
    chain: Option<Chain>,
    shortcut: Option<Shortcut>,
    local: Option<CurrentEc>,
}

impl Seen {
    /// Whether the chain equals the one that all formulas so far follow; the first call sets it.
    pub(super) fn meets(&mut self, chain: Chain) -> bool {
        *self.chain.get_or_insert(chain) == chain
    }

    /// The same for the shortcut.
    pub(super) fn meets_shortcut(&mut self, shortcut: Shortcut) -> bool {
        *self.shortcut.get_or_insert(shortcut) == shortcut
    }

    /// The same for the thread-local variable.
    pub(super) fn meets_local(&mut self, place: CurrentEc) -> bool {
        *self.local.get_or_insert(place) == place
    }
}

/// The path from the running context to the object cache: `ec->thread_ptr->ractor->newobj_cache`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chain {
    ec: CurrentEc,
    offsets: [u32; 3],
}

impl Chain {
    /// Reads a value as the pointer at the end of the chain.
    pub(super) fn of(value: &Value) -> Option<Self> {
        let mut offsets = [0; 3];
        let mut value = value;
        for slot in offsets.iter_mut().rev() {
            let Value::Load { base, offset: offset @ 0..MAX_OFFSET, size: 8 } = value else { return None };
            *slot = *offset as u32;
            value = base;
        }
        let Value::Load { base, offset, size: 8 } = value else { return None };
        match CurrentEc::at(base, *offset)? {
            CurrentEc::Global(_) => None,
            ec => Some(Self { ec, offsets }),
        }
    }
}

/// As long as there is only one Ractor, `rb_current_ractor` takes it from a global variable
/// (`ruby_single_main_ractor`). The longer path, which is always valid, is taken when the condition on that variable is
/// tried the other way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shortcut {
    variable: u64,
    ractor_cache: u32,
}

impl Shortcut {
    /// Reads a value as `[[@variable] + ractor_cache]`.
    pub(super) fn of(value: &Value, session: &Session<'_>) -> Option<Self> {
        let Value::Load { base: ractor, offset: offset @ 0..MAX_OFFSET, size: 8 } = value else {
            return None;
        };
        let Value::Load { base: variable, offset: 0, size: 8 } = &**ractor else { return None };
        let Value::Image(variable) = **variable else { return None };
        let is_vm = matches!(&session.objspace, Value::Load { base, .. } if base == ractor);
        (!is_vm).then_some(Self { variable, ractor_cache: *offset as u32 })
    }
}

pub(super) fn layout(session: &Session<'_>, ec: &EcLayout) -> Result<ThreadLayout, NotDerived> {
    let seen = session.thread.borrow();
    let Some(chain) = seen.chain else { return Err(NotDerived::NoSuch) };
    let contradiction = |what: &str| Err(NotDerived::Contradiction(what.to_owned()));
    if ec.current_ec.as_ref().is_ok_and(|current| *current != chain.ec)
        || ec.thread_ptr.as_ref().is_ok_and(|offset| *offset != chain.offsets[0])
    {
        return contradiction("rb_gc_stat reaches the running thread on another way than rb_thread_current");
    }
    if seen.shortcut.is_some_and(|shortcut| shortcut.ractor_cache != chain.offsets[2]) {
        return contradiction("rb_gc_stat takes the object cache from different places in a Ractor");
    }
    // If no key needs the thread's own count, its place does not matter.
    let (module, ec, local) = match (chain.ec, seen.local.unwrap_or(chain.ec), session.program.tls_module()) {
        (CurrentEc::Tls(ec), CurrentEc::Tls(local), Some(module)) => (Some(module), ec, local),
        (CurrentEc::ThreadPointer(ec), CurrentEc::ThreadPointer(local), _) => (None, ec, local),
        _ => return contradiction("the thread-local variables are not reached in one way"),
    };
    let [ec_thread, thread_ractor, ractor_cache] = chain.offsets;
    let dtv_entry = dtv_entry(session.image());
    if module.is_some() && dtv_entry == 0 {
        return contradiction(NO_LIBC);
    }
    let local_module = None;
    Ok(ThreadLayout { module, ec, local, ec_thread, thread_ractor, ractor_cache, dtv_entry, local_module })
}

/// The same for a GC library; the path to the object cache is that of its Ruby, which has `rb_mGC` at `landmark`.
pub(super) fn library_layout(
    session: &Session<'_>,
    ruby: &Result<ThreadLayout, NotDerived>,
    landmark: Svma,
) -> Result<ThreadLayout, NotDerived> {
    let local = session.thread.borrow().local.ok_or(NotDerived::NoSuch)?;
    let (CurrentEc::Tls(local), Some(local_module)) = (local, session.program.tls_module()) else {
        return Err(NotDerived::Contradiction(
            "the thread-local variable is reached in another way".to_owned(),
        ));
    };
    let ruby = ruby.clone()?;
    if ruby.dtv_entry == 0 {
        return Err(NotDerived::Contradiction(NO_LIBC.to_owned()));
    }
    let module = ruby.module.map(|slot| Svma(slot.0.wrapping_sub(landmark.0)));
    Ok(ThreadLayout { module, local, local_module: Some(local_module), ..ruby })
}
