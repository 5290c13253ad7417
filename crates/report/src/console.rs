//! Standard error: diagnostics and, on a terminal, a progress line that stays below them.
//!
//! All diagnostics go through here, log messages included, so that no two messages share a line. Names and texts in them may
//! come from outside: control characters are escaped.

use std::{
    collections::VecDeque,
    io::{self, IsTerminal as _, Write},
    sync::{Mutex, MutexGuard, PoisonError},
};

use gctrace_tunemygc::printable::{Printable, printable};

use crate::tls;

/// The progress line on the screen, if any.
static PROGRESS: Mutex<Option<String>> = Mutex::new(None);

/// Messages queued while something else uses the terminal; `None`: the terminal is free.
static DIVERTED: Mutex<Option<VecDeque<String>>> = Mutex::new(None);
/// Maximum number of queued messages; the oldest are dropped above it.
const MOST_DIVERTED: usize = 200;

/// Erases the line that the cursor is on.
const ERASE: &str = "\r\x1b[K";

fn shown() -> MutexGuard<'static, Option<String>> {
    PROGRESS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn waiting() -> MutexGuard<'static, Option<VecDeque<String>>> {
    DIVERTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Queues messages from now on, because something else draws on the terminal.
pub fn divert() {
    waiting().get_or_insert_default();
}

/// The last queued message.
pub fn diverted() -> Option<String> {
    waiting().as_ref()?.back().cloned()
}

/// Ends the queueing, because the terminal is free again: writes the queued messages.
pub fn revert() {
    let lines = waiting().take();
    for line in lines.into_iter().flatten() {
        write(&format!("{line}\n"));
    }
}

/// Writes one diagnostic line.
pub fn say(line: &str) {
    print(shown().as_deref(), &printable(line));
}

/// Shows this line below all others, in place of the previous progress line.
pub fn progress(line: &str) {
    if waiting().is_some() {
        return;
    }
    // A line that wraps could not be erased.
    let width =
        rustix::termios::tcgetwinsize(io::stderr()).map_or(80, |size| usize::from(size.ws_col.max(2)));
    let line: String = line.chars().take(width - 1).collect();
    let mut shown = shown();
    write(&format!("{ERASE}{line}"));
    *shown = Some(line);
}

/// Shows what the user is waiting for at start-up: on a terminal only, until the next progress line or [`end_progress`].
pub fn starting(what: &str) {
    if io::stderr().is_terminal() {
        progress(&format!("gctrace: {what} …"));
    }
}

/// Removes the progress line.
pub fn end_progress() {
    if shown().take().is_some() {
        write(ERASE);
    }
}

/// Removes the progress line if standard output is the same terminal, so that the next output begins on a new
/// line.
pub fn make_way_for_data() {
    let mut shown = shown();
    if shown.is_some() && io::stdout().is_terminal() {
        *shown = None;
        write(ERASE);
    }
}

/// Sends log messages to the console, in the style of all other messages.
pub fn init_logging() {
    env_logger::Builder::from_env(
        env_logger::Env::default().default_filter_or(format!("warn,{}=off", tls::VERIFIER_LOG)),
    )
    .format(|out, record| {
        let message = Printable(record.args());
        match record.level() {
            log::Level::Error | log::Level::Warn => writeln!(out, "gctrace: {message}"),
            level => writeln!(out, "gctrace: {level} {}: {message}", record.target()),
        }
    })
    .target(env_logger::Target::Pipe(Box::new(Log)))
    .init();
}

fn print(shown: Option<&str>, line: &str) {
    if let Some(lines) = waiting().as_mut() {
        if lines.len() >= MOST_DIVERTED {
            lines.pop_front();
        }
        lines.push_back(line.to_owned());
        return;
    }
    write(&with_progress(shown, line));
}

/// A message in place of the progress line, which moves down.
fn with_progress(progress: Option<&str>, line: &str) -> String {
    match progress {
        Some(progress) => format!("{ERASE}{line}\n{progress}"),
        None => format!("{line}\n"),
    }
}

fn write(text: &str) {
    // If standard error is closed, the message cannot be shown anywhere.
    let _closed = io::stderr().write_all(text.as_bytes());
}

/// The logger's writer. It receives a whole message at a time.
struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        print(shown().as_deref(), String::from_utf8_lossy(bytes).trim_end_matches('\n'));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message never continues the progress line, which is drawn again below the message.
    #[test]
    fn messages_and_progress() {
        assert_eq!(with_progress(None, "a"), "a\n");
        assert_eq!(with_progress(Some("3 cycles"), "a"), "\r\x1b[Ka\n3 cycles");
    }
}
