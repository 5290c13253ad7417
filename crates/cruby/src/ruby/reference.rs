//! A reference from code to an address, whatever the processor.

use crate::address::Svma;

/// An instruction that refers to a wanted address (on x86-64 by its last four bytes).
#[derive(Clone, Copy, Debug)]
pub(super) struct Reference {
    /// Index of the function extent that holds the instruction.
    pub(super) function: usize,
    /// Address of the instruction.
    pub(super) address: Svma,
    /// How it goes on.
    pub(super) flow: Flow,
    /// The wanted address it refers to.
    pub(super) target: Svma,
}

/// How the code goes on behind a reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    /// A conditional jump there.
    Conditional,
    /// A jump there.
    Jump,
    /// A call.
    Call,
    /// With the next instruction, or elsewhere.
    Other,
}

/// Which instructions to look for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Direct calls and jumps, conditional or not.
    Branch,
    /// Also memory operands and address computations.
    Any,
}
