//! A symbolic evaluator for machine code: it runs a function of the VM and gives the function's return value as an
//! expression over memory, such as `[[[@ruby_current_vm_ptr]+0x450]+0x1b8]`.
//!
//! It derives struct offsets from the very code that runs, so that nothing about the build has to be guessed. A
//! condition that the code leaves open is decided by a given choice, or by numbers assumed for the contents of memory;
//! in the latter case it is recorded as a [`Guard`]. Anything that is not understood becomes [`Value::Unknown`], never a
//! guess. Steps, call depth and the size of expressions are bounded.

mod aarch64;
mod compute;
mod condition;
mod known;
mod machine;
mod memory;
#[cfg(test)]
mod tests;
mod value;
mod vector;

pub(crate) use condition::{Assumptions, Flags};
pub(crate) use known::{OBJECT_CACHE, STATIC_SYMBOL, SYMBOL_SHIFT};
pub(crate) use machine::{Ending, Guard, Limits, Machine, Program};
pub(crate) use memory::Store;
pub(crate) use value::{Operator, Sum, Value};
