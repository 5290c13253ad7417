//! A dump as JSON lines: one `process`, then a `thread` line for each thread. Documented in docs/dump.md.

use std::io::{self, Write};

use serde::Serialize;

use super::found::{Dump, Thread};
use crate::model::stack::{Frame, FrameKind};

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Line<'a> {
    Process {
        pid: u32,
        command: Option<&'a str>,
        ruby: &'a str,
        collecting: Option<bool>,
        no_stacks: Option<&'a str>,
        threads: usize,
        /// Tids; each thread waits for the next one.
        deadlocks: Vec<Vec<Option<u32>>>,
        /// The same by address.
        deadlock_addresses: Vec<Vec<Option<String>>>,
    },
    Thread(Box<ThreadLine<'a>>),
}

#[derive(Serialize)]
struct ThreadLine<'a> {
    pid: u32,
    tid: Option<u32>,
    own_tid: Option<u32>,
    address: Option<String>,
    name: &'a str,
    comm: &'a str,
    ruby: bool,
    main: bool,
    state: &'static str,
    cpu_ns: Option<u64>,
    not_run_ns: Option<u64>,
    syscall: Option<&'static str>,
    syscall_number: Option<i64>,
    descriptor: Option<i32>,
    open_on: Option<&'a str>,
    wchan: Option<&'a str>,
    holds_gvl: Option<bool>,
    gvl_holder: Option<u32>,
    gvl_holder_address: Option<String>,
    waits_for_mutex: bool,
    mutex_holder: Option<u32>,
    mutex_holder_address: Option<String>,
    mutexes_held: Option<usize>,
    stack_read: &'static str,
    native_read: Option<&'static str>,
    native_missing: Option<String>,
    stack: Vec<FrameLine<'a>>,
}

#[derive(Serialize)]
struct FrameLine<'a> {
    kind: &'static str,
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<u32>,
}

pub(super) fn write(out: &mut impl Write, dump: &Dump) -> io::Result<()> {
    let tid = |at: usize| dump.threads.get(at).and_then(|thread| thread.tid);
    let address = |at: usize| dump.threads.get(at).and_then(Thread::address);
    line(
        out,
        &Line::Process {
            pid: dump.pid,
            command: dump.command.as_deref(),
            ruby: &dump.ruby,
            collecting: dump.collecting,
            no_stacks: dump.no_stacks.as_deref(),
            threads: dump.threads.len(),
            deadlocks: dump
                .deadlocks
                .iter()
                .map(|circle| circle.iter().map(|&at| tid(at)).collect())
                .collect(),
            deadlock_addresses: dump
                .deadlocks
                .iter()
                .map(|circle| circle.iter().map(|&at| address(at)).collect())
                .collect(),
        },
    )?;
    for thread in &dump.threads {
        line(out, &Line::Thread(Box::new(of(dump.pid, thread, tid, address))))?;
    }
    Ok(())
}

fn of(
    pid: u32,
    thread: &Thread,
    tid: impl Fn(usize) -> Option<u32>,
    address: impl Fn(usize) -> Option<String>,
) -> ThreadLine<'_> {
    let ruby = thread.ruby.as_ref();
    let gvl = ruby.and_then(|ruby| ruby.gvl);
    let wants = ruby.and_then(|ruby| ruby.wants);
    let call = thread.doing.call;
    ThreadLine {
        pid,
        tid: thread.tid,
        own_tid: thread.own_tid,
        address: thread.address(),
        name: thread.name(),
        comm: &thread.comm,
        ruby: ruby.is_some(),
        main: ruby.is_some_and(|ruby| ruby.main),
        state: thread.state().name(),
        cpu_ns: thread.cpu_ns,
        not_run_ns: thread.not_run_ns,
        syscall: call.and_then(|call| call.name()),
        syscall_number: call.map(|call| call.number),
        descriptor: call.and_then(|call| call.descriptor()),
        open_on: thread.open_on.as_deref(),
        wchan: thread.doing.wchan.as_deref(),
        holds_gvl: gvl.map(|gvl| gvl.held),
        gvl_holder: gvl.and_then(|gvl| tid(gvl.holder?)),
        gvl_holder_address: gvl.and_then(|gvl| address(gvl.holder?)),
        waits_for_mutex: wants.is_some(),
        mutex_holder: wants.and_then(|wants| tid(wants.holder?)),
        mutex_holder_address: wants.and_then(|wants| address(wants.holder?)),
        mutexes_held: ruby.and_then(|ruby| ruby.locks),
        stack_read: ruby.map_or("none", |ruby| ruby.read.name()),
        native_read: thread.native.as_ref().map(|native| native.read.name()),
        native_missing: thread.native.as_ref().and_then(|native| native.read.missing()),
        stack: thread.frames().iter().map(|frame| frame_line(frame)).collect(),
    }
}

fn frame_line(frame: &Frame) -> FrameLine<'_> {
    let kind = match frame.kind {
        FrameKind::Ruby => "ruby",
        FrameKind::CFunction => "cfunction",
        FrameKind::Native => "native",
        FrameKind::Kernel => "kernel",
        FrameKind::Vm => "vm",
        FrameKind::Missing => "missing",
    };
    let line = (frame.line > 0).then_some(frame.line);
    FrameLine { kind, name: &frame.name, file: frame.file.as_deref(), line }
}

fn line(out: &mut impl Write, line: &Line<'_>) -> io::Result<()> {
    let text = serde_json::to_string(line)?;
    writeln!(out, "{}", gctrace_tunemygc::printable::printable_json(&text))
}
