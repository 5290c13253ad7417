//! Facts that the kernel's records do not contain: wall time, memory, the identity of the process.

pub mod called;
pub mod container;
pub mod doing;
pub mod environ;
pub mod identity;
pub mod last_run;
pub mod listens;
pub mod mappings;
mod maps;
pub mod mem;
pub mod names;
pub mod origin;
pub mod proc;
pub mod proc_root;
mod process_context;
pub mod residency;
pub mod rest;
pub mod root_file;
pub mod sharing;
pub mod tasks;
