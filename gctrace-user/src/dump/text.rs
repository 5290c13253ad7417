//! A dump as text, in the style of `jstack`.

use std::io::{self, Write};

use gctrace_tunemygc::printable::printable;

use super::found::{Dump, RubySide, StackRead, State, Thread};
use crate::{
    model::stack::{Frame, FrameKind},
    words::{plural, span},
};

/// Writes one process. `native`: whether threads that are not Ruby threads are included.
pub(super) fn write(out: &mut impl Write, dump: &Dump, native: bool) -> io::Result<()> {
    let command = dump.command.as_deref().unwrap_or("ruby");
    let ruby: Vec<&Thread> = dump.threads.iter().filter(|thread| thread.ruby.is_some()).collect();
    let others = dump.threads.len() - ruby.len();
    writeln!(out, "pid {}  {}", dump.pid, printable(command))?;
    write!(out, "Ruby {}, {}", dump.ruby, plural(ruby.len() as u64, "Ruby thread"))?;
    if others > 0 {
        write!(out, ", {others} other")?;
    }
    writeln!(out, "{}", if dump.collecting == Some(true) { "; it is collecting garbage" } else { "" })?;
    if let Some(why) = &dump.no_stacks {
        writeln!(out, "no Ruby stacks: {}", printable(why))?;
    }
    for circle in &dump.deadlocks {
        write!(out, "DEADLOCK: ")?;
        for at in circle {
            write!(out, "{} waits for ", named(dump, Some(*at)))?;
        }
        writeln!(out, "{}", named(dump, circle.first().copied()))?;
    }
    let unknown =
        dump.threads.iter().filter(|thread| thread.state() == State::Detached && thread.wants_lock());
    if let waiting @ 1.. = unknown.count() as u64 {
        let them = plural(waiting, "thread");
        writeln!(
            out,
            "deadlocks: unknown for {them} on no native thread (M:N), which may have run meanwhile"
        )?;
    }
    for thread in &dump.threads {
        match &thread.ruby {
            Some(ruby) => ruby_thread(out, dump, thread, ruby)?,
            None if native || dump.no_stacks.is_some() => {
                writeln!(out, "\n{}: {}", title(thread), doing(dump, thread))?;
                stack(out, thread)?;
            }
            None => {}
        }
    }
    writeln!(out)
}

fn ruby_thread(out: &mut impl Write, dump: &Dump, thread: &Thread, ruby: &RubySide) -> io::Result<()> {
    let main = if ruby.main { " (main)" } else { "" };
    writeln!(out, "\n{}{main}: {}", title(thread), doing(dump, thread))?;
    if ruby.read == StackRead::RootOnly {
        writeln!(out, "    (it runs, and its inner frames changed while they were read)")?;
    }
    stack(out, thread)
}

/// Frames, and which ones are missing.
fn stack(out: &mut impl Write, thread: &Thread) -> io::Result<()> {
    for frame in thread.frames() {
        writeln!(out, "    {}", line(frame))?;
    }
    if let Some(missing) = thread.native.as_ref().and_then(|native| native.read.missing()) {
        writeln!(out, "    ({missing})")?;
    }
    Ok(())
}

fn title(thread: &Thread) -> String {
    let own = thread.own_tid.filter(|own| thread.tid.is_some_and(|tid| tid != *own));
    let own = own.map(|own| format!(" [{own} in its container]")).unwrap_or_default();
    let name = match printable(thread.name()) {
        // It has no name, and is on no native thread whose name could be used.
        name if name.is_empty() && thread.tid.is_none() => String::new(),
        name => format!(" \"{name}\""),
    };
    format!("thread {}{own}{name}", thread.id())
}

fn line(frame: &Frame) -> String {
    let name = printable(&frame.name);
    match (&frame.file, frame.kind) {
        (Some(file), FrameKind::Ruby) => format!("{name}  {}{}", printable(file), frame.colon_line()),
        (Some(file), FrameKind::Native) => {
            let file = file.rsplit('/').next().unwrap_or(file);
            format!("{name}  [{}]", printable(file))
        }
        (_, FrameKind::CFunction) => format!("{name}  [C]"),
        _ => name.into_owned(),
    }
}

/// A reference to a thread: `thread 77 "worker"`.
fn named(dump: &Dump, at: Option<usize>) -> String {
    match at.and_then(|at| dump.threads.get(at)) {
        Some(thread) => title(thread),
        None => "an unknown thread".to_owned(),
    }
}

/// The state of a thread in words.
pub fn doing(dump: &Dump, thread: &Thread) -> String {
    let gvl = thread.ruby.as_ref().and_then(|ruby| ruby.gvl);
    let mut text = match thread.state() {
        State::Running => {
            let ms = thread.cpu_ns.unwrap_or_default() as f64 / 1e6;
            format!("running ({ms:.1} ms of CPU time meanwhile)")
        }
        State::Runnable => "runnable: on a CPU, or waiting for one".to_owned(),
        State::GvlWait => match gvl.and_then(|gvl| gvl.holder) {
            Some(holder) => format!("waiting for the GVL, held by {}", named(dump, Some(holder))),
            None => "waiting for the GVL".to_owned(),
        },
        State::MutexWait => mutex_wait(dump, thread),
        State::Blocked => format!("blocked{}", call(thread)),
        State::Uninterruptible => format!("blocked, uninterruptible{}", call(thread)),
        State::Stopped => "stopped by a signal".to_owned(),
        State::Traced => "stopped by a debugger".to_owned(),
        State::Ended => "ended".to_owned(),
        State::Detached if thread.wants_lock() => {
            format!("on no native thread now (M:N), {}", mutex_wait(dump, thread))
        }
        State::Detached => "on no native thread now (M:N)".to_owned(),
        State::Unknown => "its state cannot be read".to_owned(),
    };
    if let Some(ns) = thread.not_run_ns.filter(|&ns| ns >= 1_000_000) {
        text.extend([", has not run for ", &at_least(ns)]);
    }
    if gvl.is_some_and(|gvl| gvl.held) {
        text.push_str(", holds the GVL");
    }
    if let Some(locks) = thread.ruby.as_ref().and_then(|ruby| ruby.locks).filter(|&locks| locks > 0) {
        text.extend([", holds ", &plural(locks as u64, "Mutex")]);
    }
    text
}

fn mutex_wait(dump: &Dump, thread: &Thread) -> String {
    let holder = thread.ruby.as_ref().and_then(|ruby| ruby.wants?.holder);
    format!("waiting for a Mutex, held by {}", named(dump, holder))
}

/// A time, rounded down: `230 ms`, `3.2 s`, `9 min 58 s`.
fn at_least(ns: u64) -> String {
    match ns / 100_000_000 {
        tenths @ 10..600 => format!("{}.{} s", tenths / 10, tenths % 10),
        _ => span(ns),
    }
}

/// The system call in which a thread sleeps: ` in read of pipe:[77] (pipe_read)`.
fn call(thread: &Thread) -> String {
    let mut text = String::new();
    if let Some(call) = &thread.doing.call {
        match call.name() {
            Some(name) => text.extend([" in ", name]),
            None => text.extend([" in system call ", &call.number.to_string()]),
        }
        if let Some(descriptor) = call.descriptor() {
            let on = thread.open_on.as_deref().map_or_else(|| "?".into(), printable);
            text.extend([" of ", &on, &format!(" (fd {descriptor})")]);
        }
    }
    if let Some(wchan) = &thread.doing.wchan {
        text.extend([" [", &printable(wchan), "]"]);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::found::{Gvl, LockWait};
    use super::*;
    use crate::host::doing::Doing;

    fn frame(name: &str, at: Option<(&str, u32)>) -> std::sync::Arc<Frame> {
        let kind = if at.is_some() { FrameKind::Ruby } else { FrameKind::CFunction };
        let file = at.map(|(file, _)| file.into());
        let line = at.map_or(0, |(_, line)| line);
        Frame { kind, name: name.into(), file, line, first_line: 0, address: 0 }.into()
    }

    /// Holders and waiters are named; names from the process cannot control the terminal.
    #[test]
    fn page() {
        let thread = |tid, state, ruby: RubySide| Thread {
            tid: Some(tid),
            own_tid: Some(tid),
            comm: "ruby".to_owned(),
            doing: Doing { state: Some(state), ..Doing::default() },
            cpu_ns: Some(2_300_000),
            ruby: Some(ruby),
            ..Thread::default()
        };
        let gvl = |held, waits| Some(Gvl { held, waits, holder: Some(1) });
        let waiting =
            RubySide { main: true, gvl: gvl(false, true), read: StackRead::Slept, ..RubySide::default() };
        let running = RubySide {
            name: Some("a\x1b[2Jb".into()),
            gvl: gvl(true, false),
            locks: Some(1),
            read: StackRead::RootOnly,
            frames: vec![frame("Integer#times", None), frame("Foo#bar", Some(("/a.rb", 7)))],
            ..RubySide::default()
        };
        let locked = RubySide {
            wants: Some(LockWait { holder: Some(1) }),
            gvl: gvl(false, false),
            ..RubySide::default()
        };
        let dump = Dump {
            pid: 5,
            ruby: "3.1.2".to_owned(),
            threads: vec![
                Thread { not_run_ns: Some(59_990_000_000), ..thread(5, 'S', waiting) },
                thread(6, 'R', running),
                Thread { not_run_ns: Some(999_999), ..thread(7, 'S', locked) },
            ],
            deadlocks: vec![vec![0, 1]],
            ..Dump::default()
        };
        let mut out = Vec::new();
        write(&mut out, &dump, false).unwrap();
        let text = String::from_utf8(out).unwrap();
        let escaped = printable("a\x1b[2Jb");
        let expected = format!(
            "pid 5  ruby\nRuby 3.1.2, 3 Ruby threads\n\
             DEADLOCK: thread 5 \"ruby\" waits for thread 6 \"{escaped}\" waits for thread 5 \"ruby\"\n\
             \nthread 5 \"ruby\" (main): waiting for the GVL, held by thread 6 \"{escaped}\", has not run for 59.9 s\n\
             \nthread 6 \"{escaped}\": running (2.3 ms of CPU time meanwhile), holds the GVL, holds 1 Mutex\n\
             \x20   (it runs, and its inner frames changed while they were read)\n\
             \x20   Integer#times  [C]\n    Foo#bar  /a.rb:7\n\
             \nthread 7 \"ruby\": waiting for a Mutex, held by thread 6 \"{escaped}\"\n\n"
        );
        assert_eq!(text, expected);
        assert!(!text.contains('\x1b'));
    }

    /// Threads that are on no native thread and have no name are distinguishable, in text and JSON.
    #[test]
    fn without_native_threads() {
        let thread = |address, wants: Option<usize>| Thread {
            ruby: Some(RubySide {
                address,
                wants: wants.map(|holder| LockWait { holder: Some(holder) }),
                locks: Some(1),
                ..RubySide::default()
            }),
            ..Thread::default()
        };
        let named = RubySide { name: Some("three".into()), address: 0x7f30, ..RubySide::default() };
        let dump = Dump {
            threads: vec![
                thread(0x7f10, Some(1)),
                thread(0x7f20, Some(2)),
                Thread { ruby: Some(named), ..Thread::default() },
            ],
            deadlocks: vec![vec![0, 1]],
            ..Dump::default()
        };
        let mut out = Vec::new();
        write(&mut out, &dump, false).unwrap();
        let text = String::from_utf8(out).unwrap();
        for part in [
            "thread 0x7f10: on no native thread now (M:N), waiting for a Mutex, held by thread 0x7f20, holds 1 Mutex",
            "thread 0x7f20: on no native thread now (M:N), waiting for a Mutex, held by thread 0x7f30 \"three\", holds",
            "\nthread 0x7f30 \"three\": on no native thread now (M:N)",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        let mut json = Vec::new();
        super::super::jsonl::write(&mut json, &dump).unwrap();
        let json = String::from_utf8(json).unwrap();
        let lines: Vec<&str> = json.lines().collect();
        for (line, field) in [
            (0, r#""deadlock_addresses":[["0x7f10","0x7f20"]]"#),
            (1, r#""address":"0x7f10""#),
            (1, r#""mutex_holder_address":"0x7f20""#),
            (1, r#""gvl_holder_address":null"#),
        ] {
            assert!(lines[line].contains(field), "{field}: {json}");
        }
    }
}
