//! The interpreter loop (`vm_exec_core`, `vm_exec.c)`: where Ruby code runs in a native stack.
//!
//! Its instructions end with a jump through the table of instructions (`DISPATCH_ARCH_DEPEND_WAY`, `vm_exec.h`, with
//! `OPT_DIRECT_THREADED_CODE`, the default with GCC and Clang in every version from 2.6 to 4.0), so it has about 120 to 150
//! jumps of the form `jmp *offset(register)`. Jumps of `switch` statements have an index or go through a register:
//! no other function has more than one or two such jumps.

use std::ops::Range;

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, OpKind, Register};

use crate::address::Svma;
use crate::elf::{ElfImage, FunctionRange, Machine};

/// Minimum number of indirect jumps in the loop.
const MIN_JUMPS: usize = 60;

/// Why the loop was not found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoInterpreter {
    /// Only x86-64 is supported.
    #[error("not x86-64")]
    Machine,
    /// No function has enough such jumps.
    #[error("no function dispatches like the interpreter loop ({0} jumps at most)")]
    Few(usize),
    /// Two functions have about the same number.
    #[error("two functions have {0} and {1} such jumps: either could be the interpreter loop")]
    Ambiguous(usize, usize),
    /// The symbol table names another function.
    #[error(
        "the function that dispatches like the interpreter loop is not the one that is called vm_exec_core"
    )]
    Symbol,
}

/// Finds the loop. If symbols name it, they must agree.
pub fn find(image: &ElfImage) -> Result<Range<Svma>, NoInterpreter> {
    if image.machine() != Machine::X86_64 {
        return Err(NoInterpreter::Machine);
    }
    let mut best: [(usize, Option<&FunctionRange>); 2] = [(0, None); 2];
    for function in image.functions().iter().filter(|function| function.entry) {
        let Some(bytes) = image.read_bytes(function.start, function.size() as usize) else { continue };
        let jumps = indirect_jumps(bytes, function.start);
        if jumps > best[0].0 {
            best = [(jumps, Some(function)), best[0]];
        } else if jumps > best[1].0 {
            best[1] = (jumps, Some(function));
        }
    }
    let [(most, function), (second, _)] = best;
    let Some(function) = function.filter(|_| most >= MIN_JUMPS) else { return Err(NoInterpreter::Few(most)) };
    if second * 5 > most {
        return Err(NoInterpreter::Ambiguous(most, second));
    }
    match image.symbol("vm_exec_core") {
        Some(named) if !function.contains(named.address) => Err(NoInterpreter::Symbol),
        _ => Ok(function.start..function.end),
    }
}

fn indirect_jumps(bytes: &[u8], start: Svma) -> usize {
    // `jmp r/m64` is ff /4: most functions have no such byte at all.
    if !bytes.windows(2).any(|pair| pair[0] == 0xff && pair[1] >> 3 & 7 == 4) {
        return 0;
    }
    let dispatches = |instruction: &Instruction| {
        instruction.flow_control() == FlowControl::IndirectBranch
            && instruction.op0_kind() == OpKind::Memory
            && instruction.memory_index() == Register::None
            && instruction.memory_base().is_gpr64()
    };
    Decoder::with_ip(64, bytes, start.0, DecoderOptions::NONE).into_iter().filter(dispatches).count()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::debian::libruby_image;

    /// In the stripped library of Debian 12 the loop is where its source build places it.
    #[test]
    fn stripped_library() {
        let image = libruby_image();
        let started = Instant::now();
        let found = find(&image).unwrap();
        let took = started.elapsed();
        println!("{found:?} in {took:?}");
        assert!(image.symbol("rb_vm_exec").unwrap().address != found.start);
        assert!(found.end.0 - found.start.0 > 10_000);
        assert!(took < Duration::from_secs(1), "{took:?}");
    }

    /// A library that is not a Ruby has no such function.
    #[test]
    fn other_libraries() {
        let image = ElfImage::read(&std::fs::File::open("/lib/x86_64-linux-gnu/libc.so.6").unwrap()).unwrap();
        assert!(matches!(find(&image), Err(NoInterpreter::Few(_))));
    }
}
