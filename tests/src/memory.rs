//! The memory of a process: whether its code equals its file (a probe is a changed byte), and its size.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use anyhow::{Context as _, Result, ensure};

/// One mapping of a file.
#[derive(Clone, Debug)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// Address after the last.
    pub end: u64,
    /// Offset of the first address in the file.
    pub offset: u64,
    /// The file.
    pub path: String,
}

/// The executable mappings of the Ruby in a process: those of libruby, or of the program if Ruby is built into it.
pub fn ruby_code(pid: u32) -> Result<Vec<Mapping>> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))
        .context("cannot read the maps of the process")?;
    let code = maps.lines().filter_map(executable).collect::<Vec<_>>();
    let library = |mapping: &&Mapping| mapping.path.contains("/libruby");
    let found = if code.iter().any(|mapping| library(&mapping)) {
        code.iter().filter(library).cloned().collect::<Vec<_>>()
    } else {
        code.into_iter().filter(|mapping| mapping.path.contains("/ruby")).collect()
    };
    ensure!(!found.is_empty(), "process {pid} maps no Ruby:\n{maps}");
    Ok(found)
}

const PAGE: usize = 4096;

/// The file offsets at which the code of the Ruby in a process differs from its file.
pub fn changed_code(pid: u32) -> Result<Vec<u64>> {
    changed(pid, ruby_code(pid)?)
}

/// Like [`changed_code`], for a library that a process has mapped.
pub fn changed_library(pid: u32, name: &str) -> Result<Vec<u64>> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let found: Vec<Mapping> =
        maps.lines().filter_map(executable).filter(|mapping| mapping.path.ends_with(name)).collect();
    ensure!(!found.is_empty(), "process {pid} maps no {name}:\n{maps}");
    changed(pid, found)
}

fn changed(pid: u32, code: Vec<Mapping>) -> Result<Vec<u64>> {
    let memory = File::open(format!("/proc/{pid}/mem")).context("cannot read the memory of the process")?;
    let mut changed = Vec::new();
    for mapping in code {
        let length = usize::try_from(mapping.end - mapping.start)?;
        let mut mapped = vec![0; length];
        memory.read_exact_at(&mut mapped, mapping.start).context("cannot read the code of the process")?;
        let file = File::open(&mapping.path).with_context(|| format!("cannot open {}", mapping.path))?;
        // The last page may extend beyond the end of the file.
        let mut stored = vec![0; length];
        let mut filled = 0;
        while filled < length {
            match file.read_at(&mut stored[filled..], mapping.offset + filled as u64)? {
                0 => break,
                n => filled += n,
            }
        }
        // Compare whole pages first: this is fast even without optimization.
        let pages = mapped[..filled].chunks(PAGE).zip(stored[..filled].chunks(PAGE)).enumerate();
        for (page, (mapped, stored)) in pages.filter(|(_, (mapped, stored))| mapped != stored) {
            let bytes = mapped.iter().zip(stored).enumerate().filter(|(_, (a, b))| a != b);
            changed.extend(bytes.map(|(at, _)| mapping.offset + (page * PAGE + at) as u64));
        }
    }
    Ok(changed)
}

fn executable(line: &str) -> Option<Mapping> {
    let mut words = line.split_whitespace();
    let (range, mode, offset) = (words.next()?, words.next()?, words.next()?);
    let path = words.nth(2)?;
    let (start, end) = range.split_once('-')?;
    (mode.as_bytes().get(2) == Some(&b'x')).then_some(())?;
    Some(Mapping {
        start: u64::from_str_radix(start, 16).ok()?,
        end: u64::from_str_radix(end, 16).ok()?,
        offset: u64::from_str_radix(offset, 16).ok()?,
        path: path.to_owned(),
    })
}

/// The probes that tracefs lists, one per line.
pub fn uprobe_events() -> Result<String> {
    let paths = ["/sys/kernel/tracing/uprobe_events", "/sys/kernel/debug/tracing/uprobe_events"];
    let found = paths.iter().find_map(|path| std::fs::read_to_string(path).ok());
    found.context("no uprobe_events: is tracefs mounted at /sys/kernel/tracing?")
}

/// A value of `/proc/PID/status` in kB, such as `VmRSS`, `VmHWM` or `RssAnon` (proc(5)).
pub fn status_kb(pid: u32, name: &str) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let value =
        |line: &str| line.strip_prefix(name)?.strip_prefix(':')?.trim().strip_suffix(" kB")?.parse().ok();
    status.lines().find_map(value).with_context(|| format!("no {name} of process {pid}"))
}
