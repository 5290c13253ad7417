//! Numbers for the variants of the model's enumerations in recordings. A number is never reused.

use gctrace_common::event::WorkPhase;

use super::Invalid;
use crate::{
    ledger::Extent,
    model::{
        EndReason, MemorySource, Runtime,
        gvl::GvlDoing,
        stack::{FrameKind, GcActivity, ThreadState},
    },
    ruby::{PauseKind, fallback::Method},
};

/// A variant that has a number.
pub(super) trait Code: Copy + 'static {
    /// Its name in errors.
    const NAME: &'static str;
    /// The variants in the order of their numbers, starting at 0.
    const ALL: &'static [Self];

    /// The number of the variant. A variant without a number does not compile: see `codes`.
    fn code(self) -> u32;

    /// The variant with this number.
    fn of(code: u32) -> Result<Self, Invalid> {
        let found = usize::try_from(code).ok().and_then(|at| Self::ALL.get(at).copied());
        found.ok_or_else(|| Invalid::unknown(&format!("{} {code}", Self::NAME)))
    }
}

macro_rules! codes {
    ($($Type:ident $name:literal { $($code:literal = $Variant:ident,)* })*) => {
        $(impl Code for $Type {
            const NAME: &'static str = $name;
            const ALL: &'static [Self] = &[$(Self::$Variant,)*];

            fn code(self) -> u32 {
                match self { $(Self::$Variant => $code,)* }
            }
        })*

        #[cfg(test)]
        mod tests {
            use super::*;

            /// A number is the index of the variant.
            #[test]
            fn numbers() {
                $(for (at, one) in $Type::ALL.iter().enumerate() {
                    assert_eq!(one.code() as usize, at, "{}", $name);
                    assert!($Type::of(one.code()).is_ok());
                }
                assert!($Type::of($Type::ALL.len() as u32).is_err());)*
            }
        }
    };
}

codes! {
    FrameKind "kind of frame" { 0 = Ruby, 1 = CFunction, 2 = Native, 3 = Kernel, 4 = Vm, 5 = Missing, }
    Method "method of tracing" { 0 = Sites, 1 = UsdtPauses, 2 = Functions, 3 = Usdt, }
    Runtime "container runtime" { 0 = Docker, 1 = Containerd, 2 = CriO, 3 = Podman, }
    MemorySource "source of memory" { 0 = Kernel, 1 = KernelApproximate, 2 = Proc, }
    PauseKind "kind of pause" { 0 = Start, 1 = Continue, 2 = Rest, 3 = Finalizer, }
    WorkPhase "phase" { 0 = Mark, 1 = Sweep, 2 = Start, 3 = Rest, 4 = Continue, 5 = Pause, }
    ThreadState "state of a thread" { 0 = Running, 1 = Runnable, 2 = Blocked, 3 = GvlWait, 4 = OtherWait, }
    GcActivity "GC activity" { 0 = None, 1 = Other, 2 = Marking, 3 = Sweeping, 4 = Compacting, }
    EndReason "reason of an end" { 0 = Exited, 1 = Execed, 2 = Detached, }
    GvlDoing "GVL state" { 0 = Waiting, 1 = Holding, 2 = Away, }
    Extent "extent of an account" { 0 = Run, 1 = CutOff, 2 = Part, }
}
