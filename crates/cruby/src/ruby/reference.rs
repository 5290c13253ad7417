//! A reference from code to an address, on either processor.

use crate::address::Svma;

/// An instruction that refers to a wanted address (on x86-64 by its last four bytes).
#[derive(Clone, Copy, Debug)]
pub(super) struct Reference {
    /// Index of the function extent that holds the instruction.
    pub(super) function: usize,
    /// Address of the instruction.
    pub(super) address: Svma,
    /// Where execution continues.
    pub(super) flow: Flow,
    /// The wanted address it refers to.
    pub(super) target: Svma,
}

/// Where execution continues after a reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    /// A conditional jump to the address.
    Conditional,
    /// A jump to the address.
    Jump,
    /// A call.
    Call,
    /// At the next instruction, or elsewhere.
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
