//! Uprobes attached by multi-uprobe links (`BPF_TRACE_UPROBE_MULTI`).
//!
//! A uprobe that is attached individually is a perf event, and closing it waits until all CPUs have left the probe: 0.1 s and more each, one
//! after the other, while traps continue. A multi-uprobe link waits once, and several can be closed at the same time. Aya does not support
//! such programs, so the uprobes are relocated and loaded here; Aya loads the maps and all other programs.

use std::{
    collections::{HashMap, HashSet},
    io,
    num::NonZeroU32,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
    path::Path,
};

use aya::{
    Ebpf,
    maps::{Map, MapData},
};
use aya_obj::{Function, Object};

use super::{errors::uninterrupted, gvl, parallel, raw};

/// Why programs could not be loaded for multi-uprobe links.
#[derive(Debug, thiserror::Error)]
pub(super) enum MultiError {
    /// The kernel has no such links, or its links confuse threads with processes.
    #[error("the kernel has no multi-uprobe links (Linux 6.11 has them)")]
    Unsupported,
    /// The object could not be parsed or relocated, although Aya had done so.
    #[error("relocating the BPF object: {0}")]
    Object(String),
    /// The kernel refused a program.
    #[error("loading `{program}`: {source}")]
    Load {
        /// The program.
        program: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

/// A probe of a link: file offset and attach cookie.
pub(super) type ProbeOffset = (u64, u64);

/// The uprobe programs of a run.
pub(super) struct Multi(HashMap<&'static str, OwnedFd>);

impl Multi {
    /// Loads these programs with the maps that Aya has created.
    pub(super) fn load(ebpf: &Ebpf, object: &[u8], names: &[&'static str]) -> Result<Self, MultiError> {
        if !supported().unwrap_or(false) {
            return Err(MultiError::Unsupported);
        }
        let failed = |error: &dyn std::fmt::Display| MultiError::Object(error.to_string());
        let mut object = Object::parse(object).map_err(|error| failed(&error))?;
        let sections: HashSet<usize> = object.functions.keys().map(|(section, _)| *section).collect();
        let maps: Vec<(&str, i32, aya_obj::Map)> = ebpf
            .maps()
            .filter_map(|(name, map)| {
                let fd = data(map)?.fd().as_fd().as_raw_fd();
                Some((name, fd, object.maps.get(name)?.clone()))
            })
            .collect();
        let maps = maps.iter().map(|(name, fd, map)| (*name, *fd, map));
        object.relocate_maps(maps, &sections).map_err(|error| failed(&error))?;
        object.relocate_calls(&sections).map_err(|error| failed(&error))?;
        // Describes the functions: global functions are verified only once.
        let types = object.btf.as_ref().ok_or_else(|| failed(&"it has no BTF"))?.to_bytes();
        let types = raw::load_btf(&types).map_err(|error| failed(&error))?;
        let code = |name: &'static str| {
            let program = object.programs.get(name).ok_or_else(|| failed(&format!("no program `{name}`")))?;
            let function = object.functions.get(&program.function_key());
            let function = function.ok_or_else(|| failed(&format!("no code of `{name}`")))?;
            Ok((name, function))
        };
        let code = names.iter().map(|name| code(name)).collect::<Result<Vec<_>, _>>()?;
        let load = |(program, function): (&'static str, &Function)| {
            let functions = (types.as_fd(), function.func_info.func_info.as_slice());
            let loaded = uninterrupted(|| raw::load_multi(program, &function.instructions, Some(functions)));
            loaded.map(|fd| (program, fd)).map_err(|source| MultiError::Load { program, source })
        };
        parallel::each(code.into_iter(), load).into_iter().collect::<Result<_, _>>().map(Self)
    }

    /// The descriptor of a program.
    pub(super) fn program(&self, name: &str) -> Option<BorrowedFd<'_>> {
        // Whether a probe fires at the return is a property of the link, not of the program.
        self.0.get(if name == gvl::AT_RETURN { gvl::RESUMED } else { name }).map(|fd| fd.as_fd())
    }

    /// Attaches a program at all of these places of a file, or at none.
    pub(super) fn attach(
        program: BorrowedFd<'_>,
        at_return: bool,
        path: &Path,
        places: &[ProbeOffset],
        pid: Option<NonZeroU32>,
    ) -> io::Result<OwnedFd> {
        raw::link_multi(program, at_return, path, places, pid.map_or(0, NonZeroU32::get))
    }
}

/// Whether the kernel has multi-uprobe links that filter by process correctly.
fn supported() -> io::Result<bool> {
    let program = raw::load_multi("gctrace_try", &raw::return_zero(), None)?;
    // The kernel checks last whether the path can be probed (`bpf_uprobe_multi_link_attach`, kernel/trace/bpf_trace.c).
    let refused = |pid| {
        let link = raw::link_multi(program.as_fd(), false, Path::new("/"), &[(0, 0)], pid);
        link.err().and_then(|error| error.raw_os_error())
    };
    // Up to Linux 6.10 a link for one process covered only its first thread. Since the fix ("bpf: fix multi-uprobe PID filtering
    // logic"), an invalid pid has its own error, which comes before that of the path.
    Ok(refused(0) == Some(libc::EBADF) && refused(u32::MAX) == Some(libc::EINVAL))
}

/// The data of a map that the uprobes may use.
pub(super) fn data(map: &Map) -> Option<&MapData> {
    match map {
        Map::Array(data)
        | Map::HashMap(data)
        | Map::LruHashMap(data)
        | Map::PerCpuArray(data)
        | Map::PerCpuHashMap(data)
        | Map::PerCpuLruHashMap(data)
        | Map::ProgramArray(data)
        | Map::RingBuf(data)
        | Map::CgroupArray(data)
        | Map::LpmTrie(data) => Some(data),
        // A program that uses such a map then fails to load, which is reported.
        _ => None,
    }
}
