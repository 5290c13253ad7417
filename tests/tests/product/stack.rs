//! Control frames of all threads of a sleeping Ruby, read through `/proc/PID/mem` as the kernel side reads those of a
//! running one.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
pub(crate) use gctrace_common::stack::RubyFrame;
use gctrace_cruby::ruby::{
    RubyVersion,
    frames::Memory as _,
    tables::{self, Struct},
};
use gctrace_user::host::mem::ProcessMemory;

/// Frames of one stack, elements of one list, environments between a block and its method: more are a mistake.
const MANY: usize = 100_000;

pub(crate) struct Walker {
    memory: ProcessMemory,
    version: RubyVersion,
}

impl Walker {
    pub(crate) fn new(memory: ProcessMemory, version: RubyVersion) -> Self {
        Self { memory, version }
    }

    /// A structure in the youngest release of the series that is known.
    fn structure(&self, tag: &str) -> Result<&'static Struct> {
        let series = tables::tables()
            .iter()
            .filter(|table| (table.from.0, table.from.1) == (self.version.major, self.version.minor));
        let fitting = |table: &&tables::Table| {
            table.from <= (self.version.major, self.version.minor, self.version.teeny)
        };
        let found = series.filter(fitting).rev().find_map(|table| table.structure(tag));
        found.with_context(|| format!("no layout of {tag} in {}", self.version))
    }

    fn offset(&self, tag: &str, member: &str) -> Result<u64> {
        let field = self.structure(tag)?.field(member);
        Ok(field.with_context(|| format!("no {tag}.{member}"))?.offset.into())
    }

    fn word(&self, address: u64) -> Result<u64> {
        let mut bytes = [0; 8];
        ensure!(self.memory.read(address, &mut bytes), "cannot read {address:#x}");
        Ok(u64::from_le_bytes(bytes))
    }

    /// The elements of a list (`ccan/list`), by the place of the node in them.
    fn list(&self, head: u64, node: u64) -> Result<Vec<u64>> {
        let mut found = Vec::new();
        let mut at = self.word(head)?;
        while at != head {
            found.push(at - node);
            ensure!(found.len() < MANY, "an endless list");
            at = self.word(at)?;
        }
        Ok(found)
    }

    /// The stacks of all threads, by Ractor and number in it.
    pub(crate) fn stacks(&self, vm_ptr: u64) -> Result<BTreeMap<(usize, usize), Vec<RubyFrame>>> {
        let vm = self.word(vm_ptr)?;
        let mut threads = Vec::new();
        if self.version >= RubyVersion::new(3, 0, 0) {
            let ractors = vm + self.offset("rb_vm_struct", "ractor.set")?;
            let ractors = self.list(ractors, self.offset("rb_ractor_struct", "vmlr_node")?)?;
            for (index, ractor) in ractors.into_iter().enumerate() {
                let list = ractor + self.offset("rb_ractor_struct", "threads.set")?;
                let list = self.list(list, self.offset("rb_thread_struct", "lt_node")?)?;
                threads
                    .extend(list.into_iter().enumerate().map(|(number, thread)| ((index, number), thread)));
            }
        } else {
            let list = vm + self.offset("rb_vm_struct", "living_threads")?;
            let list = self.list(list, self.offset("rb_thread_struct", "vmlt_node")?)?;
            threads.extend(list.into_iter().enumerate().map(|(number, thread)| ((0, number), thread)));
        }
        let ec = self.offset("rb_thread_struct", "ec")?;
        threads.into_iter().map(|(key, thread)| Ok((key, self.stack(self.word(thread + ec)?)?))).collect()
    }

    fn stack(&self, ec: u64) -> Result<Vec<RubyFrame>> {
        let of_ec = |member| Ok::<_, anyhow::Error>(ec + self.offset("rb_execution_context_struct", member)?);
        let size: u64 = self.structure("rb_control_frame_struct")?.size.into();
        let base = self.word(of_ec("vm_stack")?)?;
        let end = base + 8 * self.word(of_ec("vm_stack_size")?)?;
        let mut at = self.word(of_ec("cfp")?)?;
        let mut frames = Vec::new();
        // The last one is a dummy.
        while at + size < end {
            ensure!(frames.len() < MANY, "an endless stack");
            let [pc, _, iseq, _, ep] = [0, 8, 16, 24, 32].map(|offset| self.word(at + offset));
            let (pc, iseq, ep) = (pc?, iseq?, ep?);
            let method = self.method(ep)?;
            if iseq != 0 {
                frames.push(RubyFrame { iseq, pc, method });
            } else if self.word(ep)? & 0x7fff_0001 == 0x5555_0001 {
                let definition = self.offset("rb_callable_method_entry_struct", "def")?;
                let definition = if method == 0 { 0 } else { self.word(method + definition)? };
                frames.push(RubyFrame { iseq: RubyFrame::CFUNC, pc: definition, method });
            }
            at += size;
        }
        Ok(frames)
    }

    /// The method entry of a frame (`rb_vm_frame_method_entry`, `vm_insnhelper.c`).
    fn method(&self, mut ep: u64) -> Result<u64> {
        const LOCAL: u64 = 2;
        for _ in 0..MANY {
            let [holder, outer, flags] = [ep - 16, ep - 8, ep].map(|address| self.word(address));
            let (holder, outer, flags) = (holder?, outer?, flags?);
            if let Some(method) = self.method_in(holder, flags & LOCAL != 0)? {
                return Ok(method);
            }
            if flags & LOCAL != 0 {
                return Ok(0);
            }
            ep = outer & !3;
        }
        Ok(RubyFrame::METHOD_LOST)
    }

    /// The method entry that a word beside a frame is or holds (`check_method_entry`).
    fn method_in(&self, holder: u64, may_hold: bool) -> Result<Option<u64>> {
        const IMEMO: u64 = 0x1a;
        if holder == 0 || holder & 7 != 0 {
            return Ok(None);
        }
        let flags = self.word(holder)?;
        Ok(match (flags & 0x1f, flags >> 12 & 0xf) {
            (IMEMO, 6) => Some(holder),
            (IMEMO, 2) if may_hold => self.method_in(self.word(holder + 8)?, false)?,
            _ => None,
        })
    }
}
