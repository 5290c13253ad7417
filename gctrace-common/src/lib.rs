//! The ABI between the BPF object and the `gctrace` binary, and the logic that both run.
//!
//! Rules of this crate: `no_std`, no allocation, no I/O. Every record is `repr(C)` without implicit padding and
//! its size is asserted at compile time. Any edit of these files changes [`ABI_HASH`], and the loader refuses an
//! object whose hash differs, so an object and a binary that disagree about a field can never run together.
#![no_std]
#![forbid(unsafe_op_in_unsafe_fn)]

pub mod blocking;
pub mod config;
pub mod cookie;
pub mod event;
pub mod gvl;
pub mod job;
pub mod leak;
pub mod malloc;
pub mod memory;
#[cfg(feature = "user")]
mod pod;
pub mod request;
pub mod scope;
pub mod stack;
pub mod stats;
pub mod traceparent;
pub mod unwind;

/// Hash of the source text of the ABI modules (FNV-1a, 64 bit). Compiled into the BPF object as the symbol
/// `GCTRACE_ABI` and into the binary; both must be equal.
pub const ABI_HASH: u64 = {
    let mut hash = fnv1a(FNV_OFFSET, include_bytes!("blocking.rs"));
    hash = fnv1a(hash, include_bytes!("config.rs"));
    hash = fnv1a(hash, include_bytes!("cookie.rs"));
    hash = fnv1a(hash, include_bytes!("event.rs"));
    hash = fnv1a(hash, include_bytes!("gvl.rs"));
    hash = fnv1a(hash, include_bytes!("gvl/place.rs"));
    hash = fnv1a(hash, include_bytes!("gvl/task.rs"));
    hash = fnv1a(hash, include_bytes!("job.rs"));
    hash = fnv1a(hash, include_bytes!("leak.rs"));
    hash = fnv1a(hash, include_bytes!("malloc.rs"));
    hash = fnv1a(hash, include_bytes!("memory.rs"));
    hash = fnv1a(hash, include_bytes!("request.rs"));
    hash = fnv1a(hash, include_bytes!("scope.rs"));
    hash = fnv1a(hash, include_bytes!("stack.rs"));
    hash = fnv1a(hash, include_bytes!("stats.rs"));
    hash = fnv1a(hash, include_bytes!("traceparent.rs"));
    hash = fnv1a(hash, include_bytes!("traceparent/pieces.rs"));
    fnv1a(hash, include_bytes!("unwind.rs"))
};

const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;

const fn fnv1a(mut hash: u64, bytes: &[u8]) -> u64 {
    let mut i = 0;
    while i < bytes.len() {
        hash = (hash ^ bytes[i] as u64).wrapping_mul(0x0000_0100_0000_01b3);
        i += 1;
    }
    hash
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::{format, fs, path::Path, string::String, vec::Vec};

    fn sources(dir: &Path, below: &str, found: &mut Vec<String>) {
        for entry in fs::read_dir(dir).unwrap().flatten() {
            let name = format!("{below}{}", entry.file_name().to_str().unwrap());
            if entry.file_type().unwrap().is_dir() {
                sources(&entry.path(), &format!("{name}/"), found);
            } else {
                found.push(name);
            }
        }
    }

    /// The hash covers every file except this one, which has the list, and the one that only user space compiles.
    #[test]
    fn hash_covers_every_file() {
        let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let list = fs::read_to_string(src.join("lib.rs")).unwrap();
        let mut found = Vec::new();
        sources(&src, "", &mut found);
        assert!(found.len() > 10, "{found:?}");
        for name in found.iter().filter(|name| !["lib.rs", "pod.rs"].contains(&name.as_str())) {
            assert!(list.contains(&format!("include_bytes!(\"{name}\")")), "{name} is not in ABI_HASH");
        }
    }
}
