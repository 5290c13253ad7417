//! Pairing of `GC_ENTER` and `GC_EXIT` on one thread: a pure state machine, run by the BPF programs on a map entry
//! keyed by thread and by the host tests on plain values.

/// The pause of one thread. Entries outlive their pauses (depth 0): reusing an entry in place is much cheaper than inserting
/// and deleting a map entry for every pause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Scope {
    /// Stack pointer at the outermost `GC_ENTER`, address in the traced process.
    pub sp: u64,
    /// Time of the outermost `GC_ENTER`, nanoseconds.
    pub begin_ns: u64,
    /// Time of `GC_START` inside the pause, nanoseconds, or 0.
    pub start_ns: u64,
    /// Time of the last `GC_END_MARK` inside the pause, nanoseconds, or 0.
    pub end_mark_ns: u64,
    /// Time of the last `GC_END_SWEEP` inside the pause, nanoseconds, or 0.
    pub end_sweep_ns: u64,
    /// `profile.count` at the outermost `GC_ENTER`.
    pub count: u64,
    /// Stated address of the outermost `GC_ENTER` site.
    pub enter_site: u64,
    /// `objspace->flags` at the outermost `GC_ENTER`.
    pub flags: u32,
    /// Enters not yet exited: 0 between pauses, 1 for the outermost alone.
    pub depth: u32,
    /// Nested enters seen.
    pub nested: u32,
    /// Index of the image whose probe saw the outermost `GC_ENTER`.
    pub image: u32,
}

const _: () = assert!(size_of::<Scope>() == 72);

/// What a `GC_ENTER` means on a thread that has had a pause before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reenter {
    /// No pause is open: a new one begins.
    Fresh,
    /// It comes from inside the open pause.
    Nested,
    /// The open pause is stale: the stack has unwound past it (an exception left the GC), so its exit never comes.
    Stale,
}

/// What a `GC_EXIT` means on a thread that has had a pause before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// No pause is open: the enter was not seen.
    Orphan,
    /// The exit of a nested enter; the pause continues.
    Inner,
    /// The pause ends.
    Outermost,
}

impl Scope {
    /// Whether a pause is open.
    pub fn is_open(&self) -> bool {
        self.depth > 0
    }

    /// Discards an open pause that began under the probes of another image, and returns whether there was one. While a file is probed again
    /// under a new index, the exit of a pause is not seen; without this, pauses from deeper stack frames would be taken for parts of it.
    pub fn discard_of_other(&mut self, image: u32) -> bool {
        let is_other = self.is_open() && self.image != image;
        if is_other {
            self.depth = 0;
        }
        is_other
    }

    /// A further enter with the stack pointer `sp`. Stacks grow down: a nested enter is strictly below the first.
    /// For `Fresh` and `Stale` the caller replaces the scope.
    pub fn reenter(&mut self, sp: u64) -> Reenter {
        if self.depth == 0 {
            return Reenter::Fresh;
        }
        if sp >= self.sp {
            return Reenter::Stale;
        }
        self.depth = self.depth.saturating_add(1);
        self.nested = self.nested.saturating_add(1);
        Reenter::Nested
    }

    /// An exit on this thread.
    pub fn leave(&mut self) -> Leave {
        match self.depth {
            0 => return Leave::Orphan,
            1 => {
                self.depth = 0;
                return Leave::Outermost;
            }
            _ => self.depth -= 1,
        }
        Leave::Inner
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;

    fn open(sp: u64) -> Scope {
        Scope { sp, depth: 1, ..Scope::default() }
    }

    /// Nested enters are closed one by one and only the last exit ends the pause.
    #[test]
    fn nesting() {
        let mut scope = open(0x1000);
        assert_eq!(scope.reenter(0x0f00), Reenter::Nested);
        assert_eq!(scope.reenter(0x0e00), Reenter::Nested);
        assert_eq!(scope.leave(), Leave::Inner);
        assert_eq!(scope.leave(), Leave::Inner);
        assert_eq!(scope.leave(), Leave::Outermost);
        assert_eq!(scope.nested, 2);
        assert!(!scope.is_open());
        assert_eq!(scope.leave(), Leave::Orphan);
        assert_eq!(scope.reenter(0x0f00), Reenter::Fresh);
    }

    /// An enter at or above the stack pointer of the open pause shows that the pause was left without an exit.
    #[test]
    fn unwound_pause_is_stale() {
        assert_eq!(open(0x1000).reenter(0x1000), Reenter::Stale);
        assert_eq!(open(0x1000).reenter(0x2000), Reenter::Stale);
    }

    /// A pause whose exit was not seen because its image was probed again neither contains later pauses nor ends with one of them.
    #[test]
    fn pause_of_another_image_is_discarded() {
        let mut scope = Scope { image: 1, ..open(0x1000) };
        assert!(!scope.discard_of_other(1));
        assert!(scope.discard_of_other(2));
        assert!(!scope.discard_of_other(2));
        assert_eq!(scope.reenter(0x0f00), Reenter::Fresh);
        let mut scope = Scope { image: 1, ..open(0x1000) };
        assert!(scope.discard_of_other(2));
        assert_eq!(scope.leave(), Leave::Orphan);
    }

    /// Any sequence of enters and exits (with lost exits and unwinding) keeps enters = nested + opened and never
    /// leaves more pauses than were opened.
    #[test]
    fn random_sequences_balance() {
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed
        };
        for _ in 0..2_000 {
            let (mut opened, mut nested, mut stale, mut closed) = (0_u32, 0_u32, 0_u32, 0_u32);
            let mut scope = Scope::default();
            let mut orphans = 0_u32;
            let mut exits = 0_u32;
            let mut inner = 0_u32;
            for _ in 0..64 {
                let r = next();
                if r & 1 == 0 {
                    let sp = 0x1000 + (r >> 8) % 0x100;
                    match scope.reenter(sp) {
                        Reenter::Nested => nested += 1,
                        other => {
                            stale += u32::from(other == Reenter::Stale);
                            opened += 1;
                            scope = open(sp);
                        }
                    }
                } else {
                    exits += 1;
                    match scope.leave() {
                        Leave::Outermost => closed += 1,
                        Leave::Inner => inner += 1,
                        Leave::Orphan => orphans += 1,
                    }
                }
            }
            assert_eq!(opened, closed + stale + u32::from(scope.is_open()));
            assert_eq!(exits, closed + inner + orphans);
            assert!(inner <= nested);
            assert!(nested < 64);
        }
    }
}
