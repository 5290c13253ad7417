//! Control frames of all threads of a sleeping Ruby, read through `/proc/PID/mem` by the same code with which the kernel side reads those
//! of a running Ruby.

use std::{collections::BTreeMap, rc::Rc};

use anyhow::{Context as _, Result, ensure};
pub(crate) use gctrace_common::stack::RubyFrame;
use gctrace_cruby::ruby::{
    RubyVersion,
    frames::Memory as _,
    plan::AttachPlan,
    tables::{self, Struct},
    threads::RubyThread,
};
use gctrace_user::host::mem::ProcessMemory;

use super::kernel_side;

/// Maximum number of elements of one list; a longer list is an error.
const MANY: usize = 100_000;

pub(crate) struct Walker<'a> {
    memory: Rc<ProcessMemory>,
    version: RubyVersion,
    plan: &'a AttachPlan,
}

impl<'a> Walker<'a> {
    pub(crate) fn new(memory: ProcessMemory, plan: &'a AttachPlan) -> Self {
        Self { memory: Rc::new(memory), version: plan.analysis.version, plan }
    }

    /// The layout of a structure in the newest known release of the series.
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

    /// The elements of a list (`ccan/list`), given the offset of the list node in them.
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

    /// The stacks of all threads, by Ractor and by number of the thread in it.
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
        threads.into_iter().map(|(key, thread)| Ok((key, self.stack(thread)?))).collect()
    }

    /// The stack of a thread as the kernel side sends it. It must equal the stack that user space reads.
    fn stack(&self, thread: u64) -> Result<Vec<RubyFrame>> {
        let ec = self.word(thread + self.offset("rb_thread_struct", "ec")?)?;
        let of_ec = |member| Ok::<_, anyhow::Error>(ec + self.offset("rb_execution_context_struct", member)?);
        let size: u64 = self.structure("rb_control_frame_struct")?.size.into();
        let base = self.word(of_ec("vm_stack")?)?;
        let end = base + 8 * self.word(of_ec("vm_stack_size")?)?;
        // The last control frame is a dummy.
        let bounds = (self.word(of_ec("cfp")?)?, end - size);
        let sent = kernel_side::walk(self.memory.clone(), &self.plan.config.stack, base, bounds);
        ensure!(sent.flags == 0 && sent.counts.is_empty(), "{thread:#x}: {sent:?}");
        let threads = self.plan.threads.as_ref().context("no layout of threads")?;
        let walked = threads.walk(&*self.memory, RubyThread { address: thread, tid: 0 });
        ensure!(walked.frames == sent.frames, "{thread:#x}: {walked:?} in user space, {sent:?}");
        Ok(sent.frames)
    }
}
