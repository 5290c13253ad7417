//! Lists and stacks in synthetic memory; real ones are in `tests/tests/live_hung.rs`.

use std::collections::BTreeMap;

use super::*;
use gctrace_common::{
    gvl::FutexPath,
    stack::{RubyFrame, StackEvent},
};

/// Memory of words.
#[derive(Default)]
struct Words(BTreeMap<u64, u64>);

impl Memory for Words {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        buffer.chunks_mut(8).enumerate().all(|(at, chunk)| {
            let word = self.0.get(&(address + 8 * at as u64));
            word.inspect(|word| chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()])).is_some()
        })
    }
}

const VM_PTR: u64 = 0x1000;
const VM: u64 = 0x2000;
const RACTOR: u64 = 0x3000;

fn layout() -> ThreadsLayout {
    ThreadsLayout {
        vm_ptr: Svma(VM_PTR - 0x800),
        lists: Lists::Ractors { head: 8, node: 16, threads: 32, thread_node: 0 },
        native: Native { nt: Some(24), thread_id: 0, tid: Some(8), glibc: true },
        path: StackPath {
            place: StackPath::TLS,
            ec_stack: 0,
            ec_stack_size: 8,
            ec_frame: 16,
            ec_thread: 24,
            thread_ec: 16,
            frame_size: 56,
            frame_pc: 0,
            frame_iseq: 16,
            frame_ep: 32,
            ..StackPath::default()
        },
        state: None,
    }
}

/// A VM of one Ractor with three threads: the first uses glibc, the second another C library, the third has no native thread.
fn vm() -> Words {
    let mut words = Words::default();
    let threads = [0x10_000_u64, 0x20_000, 0x30_000];
    words.0.extend([(VM_PTR, VM), (VM + 8, RACTOR + 16), (RACTOR + 16, VM + 8)]);
    let mut node = RACTOR + 32;
    for thread in threads {
        words.0.insert(node, thread);
        node = thread;
    }
    words.0.insert(node, RACTOR + 32);
    words.0.extend([(0x10_018, 0x11_000), (0x11_000, 0x12_000), (0x11_008, 7)]);
    words.0.extend([(0x12_000, 0x12_000), (0x12_010, 0x12_000), (0x12_000 + 720, 41)]);
    words.0.extend([(0x20_018, 0x21_000), (0x21_000, 0x22_000), (0x21_008, 42), (0x22_000, 0)]);
    words.0.insert(0x30_018, 0);
    words
}

/// Each thread with a native thread is found, with the id from the C library, or else from the VM.
#[test]
fn lists() {
    let found = layout().threads(&vm(), 0x800).unwrap();
    let expected = [(0x10_000, 41), (0x20_000, 42)].map(|(address, tid)| RubyThread { address, tid });
    assert_eq!(found, expected);
    let all = layout().all(&vm(), 0x800).unwrap();
    assert_eq!(all, [(0x10_000, Some(41)), (0x20_000, Some(42)), (0x30_000, None)]);
    assert!(all.iter().all(|&(address, tid)| layout().native(&vm(), address) == tid));
    // With musl the previous thread of the only one is itself, and what glibc has as its id is another object's memory.
    let mut musl = layout();
    musl.native.glibc = false;
    let mut only = vm();
    only.0.extend([(0x12_000 + 720, 99), (0x11_008, 41)]);
    assert_eq!(musl.native(&only, 0x10_000), Some(41));
    musl.native.tid = None;
    assert_eq!(musl.native(&only, 0x10_000), None);
    // Not set up, or being changed: no list at all rather than part of one.
    assert_eq!(layout().threads(&Words::default(), 0x800), None);
    let mut broken = vm();
    broken.0.insert(RACTOR + 16, 0);
    assert_eq!(layout().threads(&broken, 0x800), None);
}

/// Memory that counts its reads.
struct Counted(Words, std::cell::Cell<usize>);

impl Memory for Counted {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.1.set(self.1.get() + 1);
        self.0.read(address, buffer)
    }
}

/// Many Ractors whose lists of threads never end: the work is bounded for all of them together.
#[test]
fn endless_lists() {
    let mut words = vm();
    let ractors = 2_000_u64;
    let ractor = |number: u64| 0x100_000 + number * 0x100;
    words.0.insert(VM + 8, ractor(0) + 16);
    for number in 0..ractors {
        let next = if number + 1 < ractors { ractor(number + 1) + 16 } else { VM + 8 };
        words.0.insert(ractor(number) + 16, next);
        let node = ractor(number) + 64;
        words.0.extend([(ractor(number) + 32, node), (node, node)]);
    }
    let counted = Counted(words, std::cell::Cell::new(0));
    assert_eq!(layout().threads(&counted, 0x800), None);
    assert!(counted.1.get() < 1 << 18, "{} reads", counted.1.get());
}

/// A thread with a block in a method (whose environment is reached through that of the block), called by a C function.
fn stacked() -> Words {
    let mut words = vm();
    let (thread, ec, stack) = (0x10_000, 0x40_000, 0x50_000);
    words.0.extend([(thread + 16, ec), (ec + 24, thread), (ec, stack), (ec + 8, 100)]);
    let last = stack + 800 - 56;
    let frames = [(0x9_000, 0x60_000, 0x70_000), (0, 0, 0x71_000), (0, 0x60_100, 0x72_000)];
    let first = last - 56 * frames.len() as u64;
    words.0.insert(ec + 16, first);
    for (number, (pc, iseq, ep)) in frames.into_iter().enumerate() {
        let at = first + 56 * number as u64;
        words.0.extend((0..7).map(|word| (at + 8 * word, 0)));
        words.0.extend([(at, pc), (at + 16, iseq), (at + 32, ep)]);
    }
    // The block: no method of its own; its outer environment is that of a method.
    words.0.extend([(0x70_000 - 16, 0), (0x70_000 - 8, 0x73_001), (0x70_000, 0x20)]);
    words.0.extend([(0x73_000 - 16, 0x80_000), (0x73_000 - 8, 0), (0x73_000, 2)]);
    // The C function: its method entry and its definition.
    words.0.extend([(0x71_000 - 16, 0x80_000), (0x71_000 - 8, 0), (0x71_000, 0x5555_0001 | 2)]);
    words.0.extend([(0x80_000, 0x1a | 6 << 12), (0x80_008, 0), (0x80_010, 0x90_000)]);
    words
}

/// Frames are returned as the kernel side sends them; a frame that is being set up is skipped.
#[test]
fn stacks() {
    let thread = RubyThread { address: 0x10_000, tid: 41 };
    let walked = layout().walk(&stacked(), thread);
    let method = 0x80_000 | RubyFrame::METHOD_RAW;
    let block = RubyFrame { iseq: 0x60_000 | RubyFrame::FINISH, pc: 0x9_000, method };
    assert_eq!(walked.flags, 0);
    assert_eq!(walked.frames.len(), 2, "{walked:?}");
    assert_eq!(walked.frames[1], RubyFrame { iseq: RubyFrame::CFUNC, pc: 0x90_000, method: 0x80_000 });
    assert_eq!(walked.frames[0], block);
}

/// Inconsistent data is not a stack.
#[test]
fn unsound() {
    let thread = RubyThread { address: 0x10_000, tid: 41 };
    for (address, value) in [(0x40_000 + 24, 0x20_000), (0x40_000 + 16, 0x50_001), (0x40_000 + 8, 0)] {
        let mut words = stacked();
        words.0.insert(address, value);
        let walked = layout().walk(&words, thread);
        assert_eq!((walked.flags, walked.frames.len()), (StackEvent::BAD_CONTEXT, 0), "{address:#x}");
    }
    let mut words = stacked();
    words.0.remove(&(0x71_000 - 8));
    let walked = layout().walk(&words, thread);
    assert_eq!((walked.flags, walked.frames.len()), (StackEvent::READ_FAILED, 1));
}

/// Every release with a table has everything needed to find its threads.
#[test]
fn every_table() {
    for table in tables::tables() {
        let (major, minor, teeny) = table.to;
        let version = RubyVersion::new(major, minor, teeny);
        let path = StackPath { place: StackPath::TLS, ..StackPath::default() };
        let layout = ThreadsLayout::with(version, table, Svma(0), &path, true);
        let state = layout.as_ref().and_then(|layout| layout.state.as_ref());
        assert!(state.is_some_and(|state| state.waits.is_some()), "{version}");
        // `keeping_mutexes` follows `locking_mutex`, so no other known member may have that offset.
        let thread = table.structure("rb_thread_struct");
        let thread = thread.or_else(|| tables::newest_structure(version, "rb_thread_struct")).unwrap();
        let behind = thread.field("locking_mutex").unwrap().offset + 8;
        assert!(thread.fields.iter().all(|field| field.offset != behind), "{version}");
    }
}

/// Two threads hold a lock each and want the other's; the third is not queued for the GVL, the first is.
#[test]
fn states() {
    let mut layout = layout();
    layout.state = Some(StateLayout {
        main: 40,
        owner_in: 100,
        owner: 200,
        name: 108,
        locking: 120,
        embedded: 2,
        waits: Some(FutexPath { cond: 300, native: 24, ready: 136, ..FutexPath::default() }),
    });
    let mut words = vm();
    let (gvl, a, b) = (0x70_000, 0x80_000, 0x90_000);
    words.0.extend([(VM + 40, 0x10_000), (gvl + 200, 0x10_000)]);
    for (thread, wants, holds, next) in [(0x10_000, b, a, 0x10_500), (0x20_000, a, b, 0)] {
        let value = thread + 0x800;
        words.0.extend([(thread + 100, gvl), (thread + 108, 8), (thread + 120, value), (value, 0x0c)]);
        words.0.extend([
            (value + 24, 1),
            (value + 32, wants),
            (thread + 128, holds),
            (holds + 8, 0),
            (thread + 136, next),
        ]);
    }
    // The list of waiters follows the next lock: one word after it in one mutex, two words in the other.
    words.0.extend([(a + 8, 0), (a + 16, a + 16), (a + 24, a + 16)]);
    words.0.extend([
        (b + 8, 0x77_000),
        (b + 16, a),
        (b + 24, 0x99_000),
        (b + 32, 0x99_000),
        (0x99_008, b + 24),
    ]);
    let read = |thread: u64| layout.state(&words, 0x800, RubyThread { address: thread, tid: 1 });
    let first = read(0x10_000).unwrap();
    assert_eq!(
        first,
        ThreadState {
            gvl: gvl + 200,
            holder: Some(0x10_000),
            wanted: Some(b),
            locked: Some(vec![a]),
            name: 8,
            main: true
        }
    );
    let second = read(0x20_000).unwrap();
    assert_eq!((second.wanted, second.locked, second.main), (Some(a), Some(vec![b, a]), false));
    assert_eq!(read(0x30_000), None);
    let waits =
        |thread: u64, futex| layout.waits_for_gvl(&words, RubyThread { address: thread, tid: 1 }, futex);
    // Its own condition variable, while queued; another futex; its own, but not queued; no native thread.
    assert_eq!(waits(0x10_000, 0x11_000 + 300 + 40), Some(true));
    assert_eq!(waits(0x10_000, 0x11_000 + 300 + 48), Some(false));
    assert_eq!(waits(0x20_000, 0x21_000 + 300), Some(false));
    assert_eq!(waits(0x30_000, 300), None);
    // A list that is a loop, and one of unknown shape.
    words.0.insert(a + 8, a);
    let locked = |words: &Words| {
        layout.state(words, 0x800, RubyThread { address: 0x10_000, tid: 1 }).map(|state| state.locked)
    };
    assert_eq!(locked(&words), Some(None));
    words.0.extend([(a + 8, 0), (a + 24, 0)]);
    assert_eq!(locked(&words), Some(None));
}

/// Two reads that agree are the stack, wherever the thread is in the innermost frame; otherwise their common part is.
#[test]
fn running() {
    let frame = |iseq, pc| RubyFrame { iseq, pc, method: 0 };
    let walked = |frames: &[RubyFrame]| Walked { frames: frames.to_vec(), flags: 0 };
    let root = [frame(0x20, 7), frame(0x30, 8)];
    let at = |pc| walked(&[&[frame(0x10, pc)], &root[..]].concat());
    let mut pc = 0;
    let moving = || {
        pc += 8;
        at(pc)
    };
    assert_eq!(walk::agreed(4, moving), (at(16), Agreed::Whole));
    // A method that is called repeatedly: its caller's line is that of the call, or another one.
    let mut turn = 0;
    let changing = || {
        turn += 1;
        if turn % 2 == 0 { at(8) } else { walked(&root) }
    };
    assert_eq!(walk::agreed(4, changing), (walked(&root), Agreed::Root));
    let mut turn = 0;
    let never = || {
        turn += 8;
        walked(&[frame(turn, 0)])
    };
    assert_eq!(walk::agreed(4, never), (walked(&[]), Agreed::Root));
}
