//! The process context that an OpenTelemetry SDK publishes for external readers (OTEP 4719): a header in a mapping with a known name,
//! and a payload anywhere in the memory of the process.

use std::{
    fs::File,
    io::{BufRead as _, BufReader, Read as _},
};

use super::{maps::Mapping, mem::ProcessMemory, proc_root};
use crate::{export::process_context::attributes, ruby::frames::Memory};

/// Names of the mapping: with and without `memfd_create`, with and without a name by `prctl`.
const NAMES: [&str; 3] = ["[anon_shmem:OTEL_CTX]", "[anon:OTEL_CTX]", "/memfd:OTEL_CTX"];
const SIGNATURE: [u8; 8] = *b"OTEL_CTX";
const VERSION: u32 = 2;
/// Maximum size in bytes of a payload that is read: the context is "in the KB range".
const MAX_PAYLOAD: u32 = 64 << 10;
/// Maximum number of bytes of a process's list of mappings that are searched.
const MAX_MAPS: u64 = 4 << 20;
/// Maximum number of attempts to read a context that is being changed.
const ATTEMPTS: usize = 3;

/// The resource attributes that the process currently publishes. `None`: it publishes none, or they cannot be read.
pub(super) fn read(pid: u32) -> Option<Vec<(String, String)>> {
    let maps = BufReader::new(File::open(proc_root::path(pid, "maps")).ok()?.take(MAX_MAPS));
    let memory = ProcessMemory::open(pid).ok()?;
    let lines = maps.split(b'\n').map_while(Result::ok);
    let mut contexts = lines.filter_map(|line| header_address(&line));
    contexts.find_map(|address| consistent(&memory, address))
}

/// The address of a mapping, if a line of the maps has one of the names (`proc_pid_maps(5)`).
fn header_address(line: &[u8]) -> Option<u64> {
    let mapping = Mapping::of_line(line)?;
    NAMES.iter().any(|known| mapping.name.starts_with(known.as_bytes())).then_some(mapping.range.0)
}

/// The header (OTEP 4719, "Header Structure").
#[derive(PartialEq, Eq)]
struct Header {
    payload_size: u32,
    /// 0: the context is being changed.
    published_at_ns: u64,
    payload: u64,
}

impl Header {
    /// Reads the header; `None` if there is none of a known version.
    fn read(memory: &impl Memory, address: u64) -> Option<Self> {
        let mut bytes = [0; 32];
        if !memory.read(address, &mut bytes) || bytes[..8] != SIGNATURE {
            return None;
        }
        let (words, _) = bytes[8..].as_chunks::<8>();
        let [versions, published_at, payload] = words else { return None };
        let versions = u64::from_ne_bytes(*versions).to_ne_bytes();
        let (halves, _) = versions.as_chunks::<4>();
        let version = u32::from_ne_bytes(halves[0]);
        let payload_size = u32::from_ne_bytes(halves[1]);
        (version == VERSION).then_some(Self {
            payload_size,
            published_at_ns: u64::from_ne_bytes(*published_at),
            payload: u64::from_ne_bytes(*payload),
        })
    }
}

/// The attributes of a payload, if its header did not change while it was read (OTEP 4719, "Reading Protocol").
fn consistent(memory: &impl Memory, address: u64) -> Option<Vec<(String, String)>> {
    for _ in 0..ATTEMPTS {
        let header = Header::read(memory, address)?;
        if header.published_at_ns == 0 || header.payload_size > MAX_PAYLOAD {
            continue;
        }
        let mut payload = vec![0; header.payload_size as usize];
        if memory.read(header.payload, &mut payload) && Header::read(memory, address)? == header {
            return attributes(&payload);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// The names that OTEP 4719 lists, and similar lines.
    #[test]
    fn lines_of_maps() {
        let of = |name: &str| {
            let line = format!("7f00-8f00 rw-p 00000000 00:01 99                       {name}");
            header_address(line.as_bytes())
        };
        for name in
            ["[anon_shmem:OTEL_CTX]", "[anon:OTEL_CTX]", "/memfd:OTEL_CTX (deleted)", "/memfd:OTEL_CTX"]
        {
            assert_eq!(of(name), Some(0x7f00), "{name}");
        }
        for name in ["/srv/OTEL_CTX", "[anon:x OTEL_CTX]", "[heap]", ""] {
            assert_eq!(of(name), None, "{name}");
        }
        assert_eq!(header_address(b"7f00-8f00 rw-p 00000000 00:00 0"), None);
        assert_eq!(header_address(b"x"), None);
    }

    /// Memory with a header at 0 followed by its payload; the publisher changes the time in the header from read to read.
    struct Changing {
        bytes: Vec<u8>,
        reads: Cell<usize>,
        /// The time in the header at each read; the last one repeats.
        times: Vec<u64>,
    }

    impl Memory for Changing {
        fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
            let mut bytes = self.bytes.clone();
            if address == 0 {
                let nth = self.reads.replace(self.reads.get() + 1);
                let time = self.times[nth.min(self.times.len() - 1)];
                bytes[16..24].copy_from_slice(&time.to_ne_bytes());
            }
            let from = address as usize;
            let Some(part) = bytes.get(from..from + buffer.len()) else { return false };
            buffer.copy_from_slice(part);
            true
        }
    }

    fn published(version: u32, size: u32, payload: u64, times: &[u64]) -> Option<Vec<(String, String)>> {
        let mut bytes = SIGNATURE.to_vec();
        bytes.extend(version.to_ne_bytes());
        bytes.extend(size.to_ne_bytes());
        bytes.extend(0_u64.to_ne_bytes());
        bytes.extend(payload.to_ne_bytes());
        // Resource{attributes: [{key: "k", value: {string_value: "v"}}]}
        bytes.extend(b"\x0a\x0a\x0a\x08\x0a\x01k\x12\x03\x0a\x01v");
        consistent(&Changing { bytes, reads: Cell::new(0), times: times.to_vec() }, 0)
    }

    /// A context that changes during a read is read again; one that never settles, has another version or a bad address is not used.
    #[test]
    fn headers() {
        let expected = Some(vec![("k".to_owned(), "v".to_owned())]);
        assert_eq!(published(2, 12, 32, &[7]), expected);
        assert_eq!(published(2, 12, 32, &[0, 0, 7]), expected, "being changed");
        assert_eq!(published(2, 12, 32, &[7, 8]), expected, "changed meanwhile");
        assert_eq!(published(2, 12, 32, &[1, 2, 3, 4, 5, 6, 7]), None, "always changing");
        assert_eq!(published(2, 12, 32, &[0]), None);
        assert_eq!(published(1, 12, 32, &[7]), None);
        assert_eq!(published(2, 13, 32, &[7]), None, "longer than the memory");
        assert_eq!(published(2, u32::MAX, 32, &[7]), None);
        assert_eq!(published(2, 12, 1 << 40, &[7]), None);
        assert_eq!(published(2, 11, 32, &[7]), None, "no message");
    }
}
