//! Where the threads of a process publish their active span (OTEP 4947), if one of its libraries does.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use gctrace_common::config::ThreadContext;

use super::code::{Mapped, VARIABLE};
use crate::{
    bpf::ThreadContexts,
    elf::{ThreadLocal, TlsSlot},
    host::mem::ProcessMemory,
    ruby::frames::Memory,
};

/// The dynamic linker stores the location of a variable some time after it has mapped the library's code: the delay until the next lookup.
const SOON: Duration = Duration::from_millis(20);
/// Number of such lookups, which take two seconds; then the missing location is reported. Some dynamic linkers store it at the first use of the
/// variable, so lookups continue.
const TRIES: u32 = 100;
/// Interval of lookups from then on, for the first minute and later.
const LATER: Duration = Duration::from_secs(1);
const MUCH_LATER: Duration = Duration::from_mins(1);

/// A process whose variable was not found yet.
#[derive(Clone)]
struct Waiting {
    /// Number of lookups so far.
    tries: u32,
    /// When the next lookup is due.
    next: Instant,
    mapped: Vec<Mapped>,
}

/// Delay after this number of lookups.
fn pause(tries: u32) -> Duration {
    match tries.checked_sub(TRIES) {
        None => SOON,
        Some(more) if more < 60 => LATER,
        Some(_) => MUCH_LATER,
    }
}

/// The processes with a library that publishes spans.
pub(super) struct Contexts {
    map: ThreadContexts,
    known: HashMap<u32, ThreadContext>,
    waiting: HashMap<u32, Waiting>,
    /// Libraries and processes whose variable has been reported as not found.
    said: HashSet<String>,
}

impl Contexts {
    /// Starts without any process.
    pub(super) fn new(map: ThreadContexts) -> Self {
        Self { map, known: HashMap::new(), waiting: HashMap::new(), said: HashSet::new() }
    }

    /// Handles the code that a process has mapped.
    pub(super) fn mapped(&mut self, pid: u32, mapped: &[Mapped]) {
        self.look(pid, mapped, 0);
    }

    /// Time until the next lookup; `None`: none is pending.
    pub(super) fn wait(&self) -> Option<Duration> {
        self.waiting.values().map(|waiting| waiting.next.saturating_duration_since(Instant::now())).min()
    }

    /// Repeats the lookups that are due.
    pub(super) fn try_again(&mut self) {
        let now = Instant::now();
        let due = |(pid, waiting): (&u32, &Waiting)| (waiting.next <= now).then_some(*pid);
        let pids: Vec<u32> = self.waiting.iter().filter_map(due).collect();
        for pid in pids {
            if let Some(Waiting { tries, mapped, .. }) = self.waiting.remove(&pid) {
                self.look(pid, &mapped, tries);
            }
        }
    }

    /// Handles a fork of a known process: the child's threads publish at the same location.
    pub(super) fn forked(&mut self, parent: u32, child: u32) {
        if let Some(&place) = self.known.get(&parent) {
            self.set(child, place);
        }
        // The child has a copy of what the dynamic linker has stored so far.
        if let Some(waiting) = self.waiting.get(&parent).cloned() {
            self.waiting.insert(child, waiting);
        }
    }

    /// Forgets a process that has ended or is no longer traced.
    pub(super) fn forget(&mut self, pid: u32) {
        self.waiting.remove(&pid);
        self.forget_place(pid);
    }

    fn forget_place(&mut self, pid: u32) {
        if self.known.remove(&pid).is_some()
            && let Err(error) = self.map.forget(pid)
        {
            log::debug!("spans of pid {pid}: {error}");
        }
    }

    fn look(&mut self, pid: u32, mapped: &[Mapped], tries: u32) {
        let publishers: Vec<&Mapped> = mapped.iter().filter(|code| code.image.published.is_some()).collect();
        if publishers.is_empty() {
            return self.forget(pid);
        }
        let Ok(memory) = ProcessMemory::open(pid) else { return self.forget(pid) };
        // In glibc, a thread's vector entry has a second word, for glibc's own use.
        let musl = mapped.iter().any(|code| is_musl(&code.image.path));
        let dtv_entry = if musl { 8 } else { 16 };
        let mut places = Vec::new();
        let mut missing = Vec::new();
        for code in publishers {
            let Some(variable) = &code.image.published else { continue };
            match locate(&memory, variable, code.bias, dtv_entry) {
                Ok(place) => places.push(place),
                Err(why) => missing.push((Arc::clone(&code.image.path), why)),
            }
        }
        places.dedup();
        self.waiting.remove(&pid);
        if !missing.is_empty() {
            let (tries, next) = (tries.saturating_add(1), Instant::now() + pause(tries));
            self.waiting.insert(pid, Waiting { tries, next, mapped: mapped.to_vec() });
        }
        match places[..] {
            [place] => self.set(pid, place),
            [] => self.forget_place(pid),
            [..] => {
                if self.says(format!("several {pid}")) {
                    log::warn!(
                        "pid {pid}: several libraries export {VARIABLE}; it is unknown which one publishes the active span, so its stacks have \
                         no spans"
                    );
                }
                self.forget_place(pid);
            }
        }
        if tries == TRIES {
            for (path, why) in &missing {
                self.refuse(path, why);
            }
        }
    }

    fn set(&mut self, pid: u32, place: ThreadContext) {
        match self.map.set(pid, place) {
            Ok(()) => {
                if self.known.insert(pid, place) != Some(place) {
                    log::info!("pid {pid} publishes the spans that are active on its threads");
                }
            }
            Err(error) => log::warn!("the spans of pid {pid} are not read: {error}"),
        }
    }

    /// Reports once per library that its variable cannot be found.
    fn refuse(&mut self, path: &str, why: &str) {
        if self.says(path.to_owned()) {
            log::warn!("{path} exports {VARIABLE}, but {why}: stacks of its processes have no spans");
        }
    }

    /// Whether to report this: only once, and only up to a limit.
    fn says(&mut self, what: String) -> bool {
        /// Maximum number of remembered reports.
        const MAX: usize = 1024;
        self.said.len() < MAX && self.said.insert(what)
    }
}

/// Whether a file is musl's dynamic linker, which is also its C library. By default it is installed as `libc.so`; glibc's `libc.so` is a text file.
fn is_musl(path: &str) -> bool {
    let is_its =
        |name: &str| name == "libc.so" || ["ld-musl-", "libc.musl-"].iter().any(|of| name.starts_with(of));
    path.rsplit('/').next().is_some_and(is_its)
}

/// Finds the location of the variable in a process that has mapped its image with this load bias, or returns why it is unknown. `dtv_entry`: see
/// [`ThreadContext`].
fn locate(
    memory: &impl Memory,
    variable: &ThreadLocal,
    bias: u64,
    dtv_entry: u32,
) -> Result<ThreadContext, &'static str> {
    /// Lower bound of the offset: static TLS of all libraries together is far smaller.
    const LOWEST: i64 = -(1 << 24);
    const UNREADABLE: &str = "what the dynamic linker stores about it cannot be read";
    let (kind, slot) = variable.slot.ok_or("no relocation gives its location")?;
    let static_at = |offset: u64| match offset.cast_signed() {
        // Static TLS blocks end at the thread pointer (x86-64).
        offset @ LOWEST..=-8 => Ok(ThreadContext { offset, ..ThreadContext::default() }),
        _ => Err("the dynamic linker has not stored its offset from the thread pointer"),
    };
    let in_module = |[module, offset]: [u64; 2]| {
        if module == 0 || module > u64::from(u16::MAX) || offset != variable.offset {
            return Err("the dynamic linker has not stored its module and its offset");
        }
        Ok(ThreadContext { module, offset: offset.cast_signed(), dtv_entry, reserved: 0 })
    };
    let [first, second] = words(memory, bias.wrapping_add(slot.0)).ok_or(UNREADABLE)?;
    match kind {
        TlsSlot::ThreadPointer => static_at(first),
        TlsSlot::Module => in_module([first, second]),
        TlsSlot::Descriptor if is_static(memory, first).ok_or(UNREADABLE)? => static_at(second),
        // The argument is the address of module and offset (glibc, struct tlsdesc_dynamic_arg; musl, struct { size_t modidx, off; }).
        TlsSlot::Descriptor => in_module(words(memory, second).ok_or(UNREADABLE)?),
    }
}

/// Whether the function of a descriptor returns its argument: then the argument is the variable's offset from the thread pointer.
fn is_static(memory: &impl Memory, function: u64) -> Option<bool> {
    const ENDBR64: &[u8] = &[0xf3, 0x0f, 0x1e, 0xfa];
    /// `mov 0x8(%rax),%rax; ret` (glibc, `sysdeps/x86_64/dl-tlsdesc.S`; musl, `src/ldso/x86_64/tlsdesc.s`).
    const RETURNS: &[u8] = &[0x48, 0x8b, 0x40, 0x08, 0xc3];
    let mut code = [0; 9];
    memory.read(function, &mut code).then(|| code.strip_prefix(ENDBR64).unwrap_or(&code).starts_with(RETURNS))
}

fn words(memory: &impl Memory, address: u64) -> Option<[u64; 2]> {
    let mut bytes = [0; 16];
    memory.read(address, &mut bytes).then(|| {
        let (words, _) = bytes.as_chunks::<8>();
        [u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])]
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::Svma;
    use proptest::prelude::*;

    const BIAS: u64 = 0x7000_0000;

    struct Pages(HashMap<u64, Vec<u8>>);

    impl Memory for Pages {
        fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
            let found = self.0.iter().find_map(|(start, bytes)| {
                let at = usize::try_from(address.checked_sub(*start)?).ok()?;
                bytes.get(at..at.checked_add(buffer.len())?)
            });
            found.inspect(|bytes| buffer.copy_from_slice(bytes)).is_some()
        }
    }

    fn pages(slot: [u64; 2]) -> Pages {
        let bytes = |words: [u64; 2]| words.map(u64::to_le_bytes).concat();
        let plain = [&[0x48, 0x8b, 0x40, 0x08, 0xc3][..], &[0x90; 8]].concat();
        let marked = [&[0xf3, 0x0f, 0x1e, 0xfa, 0x48, 0x8b, 0x40, 0x08, 0xc3][..], &[0x90; 8]].concat();
        Pages(HashMap::from([
            (BIAS + 0x100, bytes(slot)),
            (0x1000, plain),
            (0x2000, marked),
            (0x3000, vec![0x90; 32]),
            (0x4000, bytes([7, 0x20])),
            (0x5000, bytes([7, 0x28])),
        ]))
    }

    fn located(kind: TlsSlot, slot: [u64; 2]) -> Result<ThreadContext, &'static str> {
        let variable = ThreadLocal { offset: 0x20, slot: Some((kind, Svma(0x100))) };
        locate(&pages(slot), &variable, BIAS, 16)
    }

    /// Each way of storing the location, before it is stored, and with values that do not fit.
    #[test]
    fn slots() {
        let at = |module, offset| {
            Ok(ThreadContext { module, offset, dtv_entry: if module == 0 { 0 } else { 16 }, reserved: 0 })
        };
        let below = |offset: i64| offset.cast_unsigned();
        for (kind, slot, expected) in [
            (TlsSlot::ThreadPointer, [below(-64), 0], at(0, -64)),
            (TlsSlot::Module, [3, 0x20], at(3, 0x20)),
            (TlsSlot::Descriptor, [0x1000, below(-64)], at(0, -64)),
            (TlsSlot::Descriptor, [0x2000, below(-8)], at(0, -8)),
            (TlsSlot::Descriptor, [0x3000, 0x4000], at(7, 0x20)),
        ] {
            assert_eq!(located(kind, slot), expected, "{kind:?} {slot:x?}");
        }
        for (kind, slot) in [
            // Not stored yet, or only partly.
            (TlsSlot::ThreadPointer, [0, 0]),
            (TlsSlot::Module, [0, 0]),
            (TlsSlot::Module, [3, 0]),
            (TlsSlot::Descriptor, [0, 0]),
            (TlsSlot::Descriptor, [0x1000, 0]),
            (TlsSlot::Descriptor, [0x3000, 0]),
            // Values that do not fit.
            (TlsSlot::ThreadPointer, [64, 0]),
            (TlsSlot::ThreadPointer, [below(-1 << 40), 0]),
            (TlsSlot::Module, [3, 0x28]),
            (TlsSlot::Module, [1 << 40, 0x20]),
            (TlsSlot::Descriptor, [0x3000, 0x5000]),
            (TlsSlot::Descriptor, [0x9999, 0x5000]),
        ] {
            assert!(located(kind, slot).is_err(), "{kind:?} {slot:x?}");
        }
        let nowhere = ThreadLocal { offset: 0x20, slot: None };
        assert!(locate(&pages([0; 2]), &nowhere, BIAS, 16).is_err());
    }

    #[test]
    fn c_libraries() {
        for path in ["/lib/ld-musl-x86_64.so.1", "/lib/libc.musl-x86_64.so.1", "/usr/lib/musl/lib/libc.so"] {
            assert!(is_musl(path), "{path}");
        }
        assert!(!is_musl("/lib/x86_64-linux-gnu/libc.so.6") && !is_musl("[vdso]"));
    }

    proptest! {
        /// An accepted location is plausible: in the variable's module, or below the thread pointer.
        #[test]
        fn hostile(kind in 0..3_usize, first: u64, second in prop_oneof![any::<u64>(), Just(0x4000), Just(0x20)]) {
            let kind = [TlsSlot::Descriptor, TlsSlot::ThreadPointer, TlsSlot::Module][kind];
            if let Ok(place) = located(kind, [first, second]) {
                let can_be = if place.module == 0 { place.offset < 0 } else { place.offset == 0x20 };
                prop_assert!(can_be, "{place:?}");
            }
        }
    }
}
