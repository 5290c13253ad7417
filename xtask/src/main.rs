//! `cargo xtask COMMAND`: see the crate's library.

use std::process::ExitCode;

fn main() -> ExitCode {
    xtask::main()
}
