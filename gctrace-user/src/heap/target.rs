//! The process whose heap is read.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use super::failure::HeapFailure;
use crate::{
    cache::Cache,
    discover::{
        Abilities, DebugInfo, ImageFound, ProcessFound, Selection, Subjects, Survey, objspace_of, survey,
    },
    elf::ImageHead,
    host::{
        mappings,
        mem::{ProcessMemory, is_gone},
        proc::is_running,
    },
    ruby::{
        frames::Memory,
        heap::{ClassNames, HeapError, HeapLayout, References, Shapes},
        plan::AttachPlan,
    },
};

/// Surveys processes.
pub(crate) fn looked_at(pids: Vec<u32>, cache_dir: Option<&Path>) -> Survey {
    let subjects = Subjects {
        selection: Selection { pids, ..Selection::default() },
        files: Vec::new(),
        // Abilities of the kernel matter to events only; frames, and with them names, are planned if threads can be
        // read.
        abilities: Abilities { reads_threads: true, cookies: true },
        debug: DebugInfo::of_servers(std::env::var("DEBUGINFOD_URLS").ok().as_deref()),
    };
    survey(&subjects, &mut cache_dir.map_or_else(Cache::none, Cache::at))
}

/// A Ruby process that can be read.
pub(crate) struct Target {
    pub(crate) pid: u32,
    pub(crate) command: Option<String>,
    pub(crate) memory: ProcessMemory,
    pub(crate) bias: u64,
    pub(crate) plan: AttachPlan,
}

impl Target {
    /// Finds the process, and determines how its Ruby is read.
    pub(crate) fn find(pid: u32, cache_dir: Option<&Path>) -> Result<Self, HeapFailure> {
        let not_ruby = |reason: String, denied| HeapFailure::NotRuby { pid, reason, denied };
        let mut found = looked_at(vec![pid], cache_dir);
        let Some(process) = found.processes.into_iter().next() else {
            let miss = found.misses.into_iter().next();
            let (reason, denied) = miss.map_or(("no such process".into(), false), |m| (m.reason, m.denied));
            return Err(not_ruby(reason, denied));
        };
        let image = found.images.swap_remove(process.image);
        Self::of(process, image).map_err(|failure| if is_running(pid) { failure } else { ended(pid) })
    }

    /// How a found process is read. It may have ended since.
    fn of(process: ProcessFound, image: ImageFound) -> Result<Self, HeapFailure> {
        let pid = process.pid;
        let not_ruby = |reason: String, denied| HeapFailure::NotRuby { pid, reason, denied };
        let refusals: Vec<String> = image.choice.refusals.iter().map(ToString::to_string).collect();
        let (Some(plan), Some(bias)) = (image.into_plan(), process.bias) else {
            return Err(not_ruby(format!("this Ruby cannot be read: {}", refusals.join("; ")), false));
        };
        if let Some(Err(failed)) = &process.state {
            return Err(not_ruby(format!("this Ruby cannot be read: {failed}"), false));
        }
        let memory = ProcessMemory::open_in_bursts(pid).map_err(|error| {
            if is_gone(&error) {
                return ended(pid);
            }
            let denied = error.kind() == io::ErrorKind::PermissionDenied;
            not_ruby(format!("its memory cannot be read: {error}"), denied)
        })?;
        Ok(Self { pid, command: process.command, memory, bias, plan })
    }

    /// The layout of its heap.
    pub(crate) fn layout(&self) -> Result<HeapLayout, HeapError> {
        HeapLayout::of(self.plan.analysis.version)
    }

    /// The release of its Ruby.
    pub(crate) fn ruby(&self) -> String {
        self.plan.analysis.version.to_string()
    }

    /// The file that the process has mapped as its Ruby, and its path in the process.
    pub(crate) fn file(&self) -> Result<(File, PathBuf), String> {
        let mappings = mappings::of_process(self.pid).map_err(|error| error.to_string())?;
        let mut last = "it is not mapped any more".to_owned();
        for mapping in &mappings {
            let opened = mapping.open_path(self.pid).and_then(File::open);
            let file = match opened {
                Ok(file) => file,
                Err(error) => {
                    last = error.to_string();
                    continue;
                }
            };
            let Ok(head) = ImageHead::read(&file) else { continue };
            if mappings::load_bias(mapping, &head.segments) == Some(self.bias)
                && head.build_id == self.plan.analysis.build_id
            {
                return Ok((file, Path::to_owned(&mapping.path)));
            }
        }
        Err(last)
    }

    /// Address and current state of the objspace.
    pub(crate) fn state(&self) -> Result<(u64, Vec<u8>), HeapError> {
        let read = |address, buffer: &mut [u8]| self.memory.read(address, buffer);
        objspace_of(read, self.bias, &self.plan)
            .ok_or(HeapError::Unreadable { what: "the objspace", address: self.bias })
    }

    /// The reader of class names; `None` if they cannot be read.
    pub(crate) fn names(&self) -> Option<ClassNames<&ProcessMemory>> {
        let frames = self.plan.frames.as_ref().ok().filter(|frames| frames.names_classes().is_ok())?.clone();
        Some(ClassNames::new(&self.memory, frames, self.bias))
    }

    /// The reader of references of its objects; `None` if their layout is unknown for this Ruby.
    pub(crate) fn references(&self, layout: &HeapLayout) -> Option<References> {
        let shapes = self.plan.analysis.derived.shapes.as_ref().ok();
        References::of(self.plan.analysis.version, layout, shapes.map(|list| Shapes::new(*list, self.bias)))
    }

    /// Refuses a Ruby whose class names cannot be read.
    pub(crate) fn needs_names(&self) -> Result<(), HeapFailure> {
        let named = match &self.plan.frames {
            Ok(frames) => frames.names_classes(),
            Err(reason) => Err(reason.to_string()),
        };
        named.map_err(|reason| HeapFailure::NoNames { pid: self.pid, ruby: self.ruby(), reason })
    }

    /// The failure that an error means: the heap could not be read, or the process has ended.
    pub(crate) fn failure(&self, source: HeapError) -> HeapFailure {
        if self.is_there() { HeapFailure::Heap { pid: self.pid, source } } else { self.ended() }
    }

    /// Whether the process still runs.
    pub(crate) fn is_there(&self) -> bool {
        is_running(self.pid)
    }

    /// Whether the process runs another program now: the opened memory is that of a program that is gone.
    pub(crate) fn is_replaced(&self) -> bool {
        self.state().is_err() && self.is_there()
    }

    /// The failure of a process that has ended.
    pub(crate) fn ended(&self) -> HeapFailure {
        ended(self.pid)
    }
}

fn ended(pid: u32) -> HeapFailure {
    HeapFailure::NotRuby { pid, reason: "it has ended".to_owned(), denied: false }
}

/// The value of a key of `GC.stat`.
pub(super) fn key(plan: &AttachPlan, name: &str, data: &[u8]) -> Option<u64> {
    plan.layout.keys.iter().find(|key| key.name == name).and_then(|key| key.value(data))
}
