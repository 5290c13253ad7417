//! A symbolic evaluator for straight-line machine code: it runs an accessor function of the VM and returns what the
//! function returns as an expression over memory, such as `[[[@ruby_current_vm_ptr]+0x450]+0x1b8]`.
//!
//! It derives struct offsets from the very code that runs, so that nothing about the build has to be guessed.
//! Conditional jumps follow a given choice; anything it does not understand becomes [`Value::Unknown`], never a guess.

mod machine;
mod value;

pub(crate) use machine::{Machine, Store};
pub(crate) use value::{Operator, Value};
