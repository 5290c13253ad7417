//! The three kinds of address, as types, so that no interface can mix them up.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! address {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

address! {
    /// Stated virtual address: the address in the ELF file (`p_vaddr` space).
    Svma
}
address! {
    /// Actual virtual address in one running process.
    Avma
}
address! {
    /// Byte offset in the ELF file, where uprobes are attached.
    FileOffset
}

impl Svma {
    /// The address in a process that has the image loaded at `bias` (actual minus stated).
    pub fn in_process(self, bias: u64) -> Avma {
        Avma(self.0.wrapping_add(bias))
    }
}
