//! The walk of Ruby stacks is implemented twice: in the BPF programs, and in user space for sleeping threads. The kernel side's walk, compiled
//! for this host, and user space's walk must give the same result on the same memory, valid or not.

use std::{collections::BTreeMap, fs::File, rc::Rc};

use anyhow::{Context as _, Result};
use gctrace_common::stack::{MAX_RUBY_FRAMES, RubyFrame, StackEvent};
use gctrace_cruby::{
    elf::ElfImage,
    ruby::{
        self,
        frames::Memory,
        plan::{AttachPlan, plan},
        threads::{RubyThread, Walked},
    },
};
use gctrace_tests::ruby::Ruby;
use proptest::prelude::*;

#[path = "product/kernel_side.rs"]
mod kernel_side;
use kernel_side::Sent;

const THREAD: u64 = 0x10_000;
const CONTEXT: u64 = 0x20_000;
const STACK: u64 = 0x100_000;
/// Number of words of the VM stack: more than the window that the kernel side reads at once.
const WORDS: u64 = 2_000;
/// Addresses of environments on the heap, and of values that may be method entries.
const ENVIRONMENTS: u64 = 0x900_000;
const ENTRIES: u64 = 0xa00_000;
/// An unmapped address.
const NOWHERE: u64 = 0xdead_0000;

const LOCAL: u64 = 2;
const FINISH: u64 = 0x20;
const CFUNC: u64 = 0x5555_0001;
const IMEMO: u64 = 0x1a;
const MENT: u64 = IMEMO | 6 << 12;
const SVAR: u64 = IMEMO | 2 << 12;
const CREF: u64 = IMEMO | 1 << 12;

/// Memory made of 8-byte words.
#[derive(Clone, Default)]
struct Words(BTreeMap<u64, u64>);

impl Words {
    fn put(&mut self, address: u64, words: &[u64]) {
        self.0.extend((address..).step_by(8).zip(words.iter().copied()));
    }
}

impl Memory for Words {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        buffer.chunks_mut(8).zip((address..).step_by(8)).all(|(chunk, at)| {
            let word = self.0.get(&at);
            word.inspect(|word| chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()])).is_some()
        })
    }
}

/// A control frame: its pc, its code and its environment.
#[derive(Clone, Copy, Debug)]
struct Control {
    pc: u64,
    iseq: u64,
    ep: u64,
    jit: u64,
}

/// A stack of these frames, leaf first, on a VM stack that is completely mapped.
fn stacked(plan: &AttachPlan, frames: &[Control]) -> (Words, u64) {
    let path = &plan.config.stack;
    let mut words = Words::default();
    let last = STACK + 8 * WORDS - u64::from(path.frame_size);
    let first = last - u64::from(path.frame_size) * frames.len() as u64;
    words.put(STACK, &vec![0; WORDS as usize]);
    words.put(THREAD + u64::from(path.thread_ec), &[CONTEXT]);
    for (offset, value) in [
        (path.ec_thread, THREAD),
        (path.ec_stack, STACK),
        (path.ec_stack_size, WORDS),
        (path.ec_frame, first),
    ] {
        words.put(CONTEXT + u64::from(offset), &[value]);
    }
    for (frame, at) in frames.iter().zip((first..).step_by(path.frame_size as usize)) {
        for (offset, value) in
            [(path.frame_pc, frame.pc), (path.frame_iseq, frame.iseq), (path.frame_ep, frame.ep)]
        {
            words.put(at + u64::from(offset), &[value]);
        }
        if path.frame_jit != 0 {
            words.put(at + u64::from(path.frame_jit), &[frame.jit]);
        }
    }
    (words, first)
}

fn sent(plan: &AttachPlan, words: &Words, first: u64) -> Sent {
    let path = &plan.config.stack;
    let last = STACK + 8 * WORDS - u64::from(path.frame_size);
    kernel_side::walk(Rc::new(words.clone()), path, STACK, (first, last))
}

fn walked(plan: &AttachPlan, words: &Words) -> Walked {
    let threads = plan.threads.as_ref().expect("a layout of threads");
    threads.walk(words, RubyThread { address: THREAD, tid: 1 })
}

/// The plans of the available Rubies whose stacks can be walked. Their layouts of control frames differ.
fn plans() -> Result<Vec<AttachPlan>> {
    let mut plans = Vec::new();
    for ruby in Ruby::all()? {
        let image = ElfImage::read(&File::open(ruby.library()?)?)?;
        let plan = plan(image.segments(), ruby::analyse(&image)?, true)?;
        if plan.threads.is_some() {
            plans.push(plan);
        }
    }
    plans.first().context("no Ruby whose stacks can be walked")?;
    Ok(plans)
}

/// The known result of the walk for each kind of frame.
#[test]
fn golden() -> Result<()> {
    for plan in plans()? {
        let env = |number: u64| ENVIRONMENTS + 0x100 * number + 16;
        let on_stack = STACK + 0x100;
        let frames = [
            // A C function; a method; a block in it, nested two levels; a C function without an entry; code that is being set up; a C block;
            // a method behind an svar; one whose environment is gone; one whose outer environment is at no valid user address.
            Control { pc: 1, iseq: 0, ep: env(0), jit: 0 },
            Control { pc: 0x51, iseq: 0x5000, ep: on_stack, jit: 0 },
            Control { pc: 0x61, iseq: 0x6000, ep: env(1), jit: 9 },
            Control { pc: 2, iseq: 0, ep: env(3), jit: 0 },
            Control { pc: 0, iseq: 0x7000, ep: env(0), jit: 0 },
            Control { pc: 3, iseq: 0, ep: env(4), jit: 0 },
            Control { pc: 0x81, iseq: 0x8000, ep: env(5), jit: 0 },
            Control { pc: 0x91, iseq: 0x9000, ep: NOWHERE, jit: 0 },
            Control { pc: 0xa1, iseq: 0xa000, ep: STACK + 0x2100, jit: 0 },
        ];
        let (mut words, first) = stacked(&plan, &frames);
        let entry = ENTRIES;
        words.put(entry, &[MENT, 0, 0xdef]);
        words.put(ENTRIES + 0x100, &[SVAR, entry, 0]);
        words.put(env(0) - 16, &[entry, 0, CFUNC | LOCAL]);
        words.put(on_stack - 16, &[entry, 0, LOCAL | FINISH]);
        words.put(env(1) - 16, &[0, env(2) | 1, FINISH]);
        words.put(env(2) - 16, &[0, on_stack | 1, 0]);
        words.put(env(3) - 16, &[0, 0, CFUNC | LOCAL]);
        words.put(env(4) - 16, &[0, 0, 0x6666_0001 | LOCAL]);
        words.put(env(5) - 16, &[ENTRIES + 0x100, 0, 0]);
        words.put(STACK + 0x2100 - 16, &[0, 4, 0]);
        // Where the outer environment would be if addresses wrapped around.
        words.put(STACK + 0x1ff0, &[0, 0, LOCAL]);
        let jit = if plan.config.stack.frame_jit == 0 { 0 } else { RubyFrame::JIT };
        let raw = RubyFrame::METHOD_RAW;
        let expected = [
            RubyFrame { iseq: RubyFrame::CFUNC, pc: 0xdef, method: entry },
            RubyFrame { iseq: 0x5000 | RubyFrame::FINISH, pc: 0x51, method: entry | raw },
            RubyFrame { iseq: 0x6000 | RubyFrame::FINISH | jit, pc: 0x61, method: entry | raw },
            RubyFrame { iseq: RubyFrame::CFUNC, pc: 0, method: 0 },
            // An svar is followed only in the environment of a method itself; this one belongs to a block without an outer environment.
            RubyFrame { iseq: 0x8000, pc: 0x81, method: RubyFrame::METHOD_LOST },
            RubyFrame { iseq: 0x9000, pc: 0x91, method: RubyFrame::METHOD_LOST },
            RubyFrame { iseq: 0xa000, pc: 0xa1, method: RubyFrame::METHOD_LOST },
        ];
        let sent = sent(&plan, &words, first);
        assert_eq!(sent.frames, expected, "{}", plan.analysis.version);
        assert_eq!((sent.flags, sent.counts), (0, [("method_lost", 3)].into()));
        assert_eq!(walked(&plan, &words), Walked { frames: expected.to_vec(), flags: 0 });
    }
    Ok(())
}

/// A stack deeper than a record: the root end is missing, and the record is marked as truncated.
#[test]
fn too_deep() -> Result<()> {
    let plan = plans()?.swap_remove(0);
    let depth = MAX_RUBY_FRAMES + 10;
    let frame = Control { pc: 0x51, iseq: 0x5000, ep: ENVIRONMENTS + 16, jit: 0 };
    let path = plan.config.stack;
    let size = u64::from(path.frame_size);
    let (base, all) = stacked(&plan, &[]);
    let mut words = base;
    words.put(ENVIRONMENTS, &[0, 0, LOCAL]);
    // The VM stack starts at a lower address than in the other tests, to make room for the frames.
    let start = STACK - size * depth as u64;
    words.put(start, &vec![0; (size / 8) as usize * depth]);
    for at in (all - size * depth as u64..all).step_by(size as usize) {
        for (offset, value) in
            [(path.frame_pc, frame.pc), (path.frame_iseq, frame.iseq), (path.frame_ep, frame.ep)]
        {
            words.put(at + u64::from(offset), &[value]);
        }
    }
    words.put(CONTEXT + u64::from(path.ec_stack), &[start]);
    words.put(CONTEXT + u64::from(path.ec_stack_size), &[(STACK + 8 * WORDS - start) / 8]);
    words.put(CONTEXT + u64::from(path.ec_frame), &[all - size * depth as u64]);
    let sent = kernel_side::walk(Rc::new(words.clone()), &path, start, (all - size * depth as u64, all));
    assert_eq!((sent.frames.len(), sent.flags), (MAX_RUBY_FRAMES, StackEvent::TRUNCATED));
    assert_eq!(walked(&plan, &words), Walked { frames: sent.frames, flags: sent.flags });
    Ok(())
}

/// Possible addresses of an environment or a method entry: on the VM stack, in the heap, unmapped.
fn environment_address() -> impl Strategy<Value = u64> {
    prop_oneof![
        1 => Just(0),
        1 => Just(NOWHERE),
        6 => (2..WORDS - 1).prop_map(|word| STACK + 8 * word),
        6 => (0_u64..40).prop_map(|number| ENVIRONMENTS + 0x20 * number + 16),
    ]
}

fn entry_address() -> impl Strategy<Value = u64> {
    prop_oneof![2 => Just(0), 1 => Just(NOWHERE), 8 => (0_u64..20).prop_map(|number| ENTRIES + 0x20 * number)]
}

fn control() -> impl Strategy<Value = Control> {
    let iseq = prop_oneof![1 => Just(0), 2 => (1_u64..100).prop_map(|number| number << 12)];
    let pc = prop_oneof![1 => Just(0), 5 => 1_u64..0x1000];
    (pc, iseq, environment_address(), 0_u64..2).prop_map(|(pc, iseq, ep, jit)| Control { pc, iseq, ep, jit })
}

fn three_words() -> impl Strategy<Value = [u64; 3]> {
    let flags = prop_oneof![
        Just(0),
        Just(LOCAL),
        Just(FINISH),
        Just(LOCAL | FINISH),
        Just(CFUNC),
        Just(CFUNC | LOCAL),
        any::<u64>()
    ];
    (entry_address(), environment_address(), 0_u64..4, flags)
        .prop_map(|(entry, previous, mark, flags)| [entry, previous | mark, flags])
}

fn entry() -> impl Strategy<Value = [u64; 3]> {
    let flags = prop_oneof![4 => Just(MENT), 2 => Just(SVAR), 1 => Just(CREF), 1 => any::<u64>()];
    (flags, entry_address(), 1_u64..0x1000).prop_map(|(flags, second, third)| [flags, second, third])
}

/// On any memory, both sides give the same result.
#[test]
fn both_sides_agree() -> Result<()> {
    let plans = plans()?;
    let memory = (
        prop::collection::vec(control(), 0..120),
        prop::collection::vec(three_words(), 40),
        prop::collection::vec((2..WORDS - 1, three_words()), 0..60),
        prop::collection::vec(prop::option::weighted(0.9, entry()), 20),
        0..plans.len(),
    );
    let config = ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |((frames, environments, on_stack, entries, index) in memory)| {
        let plan = &plans[index];
        let (mut words, first) = stacked(plan, &frames);
        // The control frames are above; the environments of blocks and methods are below.
        for (word, three) in on_stack.into_iter().filter(|(word, _)| STACK + 8 * (word + 1) < first) {
            words.put(STACK + 8 * (word - 2), &three);
        }
        for (number, three) in environments.iter().enumerate() {
            words.put(ENVIRONMENTS + 0x20 * number as u64, three);
        }
        for (number, three) in entries.iter().enumerate() {
            if let Some(three) = three {
                words.put(ENTRIES + 0x20 * number as u64, three);
            }
        }
        let (sent, walked) = (sent(plan, &words, first), walked(plan, &words));
        prop_assert_eq!((&sent.frames, sent.flags), (&walked.frames, walked.flags));
        let lost = sent.frames.iter().filter(|frame| frame.method & RubyFrame::METHOD_LOST != 0).count() as u64;
        prop_assert_eq!(sent.counts.get("method_lost").copied().unwrap_or_default(), lost);
    });
    Ok(())
}
