//! What failed, and why, for the very end of a run: tools that keep only the end of an output then have it.

use std::{
    collections::VecDeque,
    io::{self, Read as _, Write},
    panic::resume_unwind,
    process::{Command, Stdio},
    sync::{Mutex, PoisonError},
    thread,
};

use anyhow::{Context as _, Result};

use crate::util::line;

/// Number of the first lines of one failed test that are printed again, and of its last lines, which contain its error.
const LINES_OF_TEST: usize = 20;
const CHARS_OF_LINE: usize = 1000;

/// The failures of the commands that ran so far.
#[derive(Default)]
pub(super) struct Failures(Vec<String>);

impl Failures {
    /// Runs test programs on our terminal and keeps the output of failed tests. Returns whether all passed.
    pub(super) fn run(&mut self, command: &mut Command) -> Result<bool> {
        let (passed, text) = run(command, &mut io::stdout())?;
        if !passed {
            self.add(&text, command);
        }
        Ok(passed)
    }

    /// Runs two commands at the same time. The output of the first is held until the second has ended, because on the terminal lines of the two would
    /// mix. From then on it is forwarded: a test that does not end is named.
    pub(super) fn run_both(&mut self, unseen: &mut Command, seen: &mut Command) -> Result<bool> {
        let held = Mutex::new(Some(Vec::new()));
        let (ran, passed) = thread::scope(|scope| {
            let ran = scope.spawn(|| run(unseen, &mut Behind { held: &held, to: io::stdout() }));
            let passed = self.run(seen);
            release(&held, &mut io::stdout());
            (ran.join().unwrap_or_else(|panic| resume_unwind(panic)), passed)
        });
        let (unseen_passed, text) = ran?;
        if !unseen_passed {
            self.add(&text, unseen);
        }
        Ok(passed? && unseen_passed)
    }

    fn add(&mut self, text: &str, command: &Command) {
        let found = lines(text);
        if found.is_empty() {
            // The build failed, the program was killed, or the harness did not finish.
            self.0.push(format!("`{}` failed and named no test", line(command)));
        }
        self.0.extend(found);
    }

    /// Prints the failures.
    pub(super) fn print(&self) {
        for line in &self.0 {
            eprintln!("  {line}");
        }
    }
}

/// Runs a command, forwards its standard output and returns that, too, with whether it succeeded.
fn run(command: &mut Command, to: &mut impl Write) -> Result<(bool, String)> {
    let cannot_run = |command: &Command| format!("cannot run `{}`", line(command));
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| cannot_run(command))?;
    let mut printed = child.stdout.take().context("the output of a command is not a pipe")?;
    let mut text = Vec::new();
    let mut part = [0; 8192];
    // Forwarded in parts: the harness prints the name of a test before the test runs, without a newline.
    loop {
        let length = match printed.read(&mut part) {
            Ok(0) => break,
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error).with_context(|| cannot_run(command)),
        };
        show(to, &part[..length]);
        text.extend_from_slice(&part[..length]);
    }
    let passed = child.wait().with_context(|| cannot_run(command))?.success();
    Ok((passed, String::from_utf8_lossy(&text).into_owned()))
}

/// What a command printed while another one had the terminal; `None` from then on.
type Held = Mutex<Option<Vec<u8>>>;

/// Holds an output until it is released, then forwards it.
struct Behind<'a, W> {
    held: &'a Held,
    to: W,
}

impl<W: Write> Write for Behind<'_, W> {
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        match &mut *self.held.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(held) => held.extend_from_slice(part),
            None => self.to.write_all(part)?,
        }
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Prints what was held. What comes later is printed after it.
fn release(held: &Held, to: &mut impl Write) {
    let mut held = held.lock().unwrap_or_else(PoisonError::into_inner);
    show(to, &held.take().unwrap_or_default());
}

/// Prints a part of an output. A closed terminal is no reason to stop the tests.
fn show(to: &mut impl Write, part: &[u8]) {
    let _gone = to.write_all(part).and_then(|()| to.flush());
}

/// The lines that say what failed: the output of failed tests, guests that crashed, and commands that did not start. Each line of a guest begins with
/// the name of its kernel and ` | `.
pub(super) fn lines(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut inside = false;
    let mut of_test = OfTest::default();
    for line in text.lines() {
        let said = line.split_once(" | ").map_or(line, |(_, said)| said);
        inside = (inside || said == "failures:") && !said.starts_with("test result:");
        // The harness prints the output of all failed tests, then their names, below the same title.
        let title = said == "failures:" || (said.starts_with("---- ") && said.ends_with(" stdout ----"));
        if title || !inside {
            of_test.end(&mut found);
        }
        let verdict = ["guest: failed: ", "error", "Error: "].iter().any(|start| said.starts_with(start));
        let guest = line.contains(": FAILED (") || line.contains("vm: failed on ");
        if inside && !said.trim().is_empty() {
            of_test.add(line, &mut found);
        } else if verdict || guest {
            found.push(cut(line));
        }
    }
    of_test.end(&mut found);
    found
}

/// What is printed again of one test; its first lines are already in `found`.
#[derive(Default)]
struct OfTest {
    lines: usize,
    last: VecDeque<String>,
}

impl OfTest {
    fn add(&mut self, line: &str, found: &mut Vec<String>) {
        self.lines += 1;
        if self.lines <= LINES_OF_TEST {
            found.push(cut(line));
            return;
        }
        self.last.push_back(cut(line));
        if self.last.len() > LINES_OF_TEST {
            self.last.pop_front();
        }
    }

    /// Ends the current test: the next line belongs to another test, or to none.
    fn end(&mut self, found: &mut Vec<String>) {
        if self.lines > 2 * LINES_OF_TEST {
            found.push("[more of this test is above]".to_owned());
        }
        found.extend(self.last.drain(..));
        self.lines = 0;
    }
}

/// Truncates a line: an error may list everything that was examined.
fn cut(line: &str) -> String {
    match line.char_indices().nth(CHARS_OF_LINE) {
        Some((at, _)) => format!("{} [cut]", &line[..at]),
        None => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output of a failed test is included, and that of passed tests is not.
    #[test]
    fn reasons() {
        let text = "xtask: vm: booting Linux 5.10\n  5.10 | test a::b ... ok\n  5.10 | \n  5.10 | failures:\n  5.10 | \n\
                    5.10 | ---- a::c stdout ----\n  5.10 | Error: 1 Rubies fail.\n  5.10 | test result: FAILED. 0 passed\n\
                      5.10 | test a::d ... ok\n  5.10 | guest: failed: a::c\n\
                    xtask: vm: Linux 5.10: FAILED (121 s): a test failed, see above\nxtask: vm: failed on 5.10\n\
                    error: cannot find `cpio`\n";
        let expected = [
            "5.10 | failures:",
            "5.10 | ---- a::c stdout ----",
            "5.10 | Error: 1 Rubies fail.",
            "5.10 | guest: failed: a::c",
            "xtask: vm: Linux 5.10: FAILED (121 s): a test failed, see above",
            "xtask: vm: failed on 5.10",
            "error: cannot find `cpio`",
        ];
        assert_eq!(lines(text).iter().map(|line| line.trim()).collect::<Vec<_>>(), expected);
        assert!(lines("xtask: vm: booting Linux 6.1\n 6.1 | test a ... ok\n").is_empty());
    }

    /// A test that printed pages hides neither its own error at their end, nor the next test, nor the names at the end.
    #[test]
    fn long_ones() {
        let pages = "page\n".repeat(1000);
        let long = "x".repeat(5000);
        let text = format!(
            "failures:\n\n---- a stdout ----\n{pages}Error: a {long}\n\n---- b stdout ----\nError: b\n\n\
             failures:\n    a\n    b\n\ntest result: FAILED.\n"
        );
        let found = lines(&text);
        assert_eq!(found.iter().filter(|line| *line == "page").count(), 2 * LINES_OF_TEST - 2);
        assert_eq!(found[1 + LINES_OF_TEST], "[more of this test is above]");
        let error = format!("Error: a {} [cut]", &long[..CHARS_OF_LINE - 9]);
        let end = [&error, "---- b stdout ----", "Error: b", "failures:", "    a", "    b"];
        assert!(found.ends_with(&end.map(str::to_owned)), "{:?}", &found[20..]);
    }

    /// The output is forwarded in full; a command that fails silently is named.
    #[test]
    fn programs() {
        let mut failures = Failures::default();
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        };
        assert!(failures.run(&mut shell("echo error: of one that passed")).unwrap());
        assert!(failures.0.is_empty());
        assert!(!failures.run(&mut shell("echo failures:; echo '    a'; exit 1")).unwrap());
        assert!(!failures.run(&mut shell("exit 1")).unwrap());
        assert_eq!(failures.0, ["failures:", "    a", "`sh -c exit 1` failed and named no test"]);
        assert!(failures.run(&mut Command::new("/nonexistent")).is_err());
    }

    /// An output is held until it is released, then forwarded.
    #[test]
    fn held() {
        let held = Mutex::new(Some(Vec::new()));
        let mut behind = Behind { held: &held, to: Vec::new() };
        let mut terminal = Vec::new();
        show(&mut behind, b"test a ... ok\ntest b ... ");
        assert!(behind.to.is_empty());
        release(&held, &mut terminal);
        show(&mut behind, b"ok\n");
        assert_eq!((&terminal[..], &behind.to[..]), (&b"test a ... ok\ntest b ... "[..], &b"ok\n"[..]));
    }

    /// Both of two commands are run, also if one fails, and each failure is kept.
    #[test]
    fn two_programs() {
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        };
        let fails = |name: &str| shell(&format!("echo failures:; echo '    {name}'; exit 1"));
        let both = |unseen: Command, seen: Command| {
            let mut failures = Failures::default();
            let (mut unseen, mut seen) = (unseen, seen);
            let passed = failures.run_both(&mut unseen, &mut seen).unwrap();
            (passed, failures.0.join(""))
        };
        assert_eq!(both(shell("exit 0"), shell("exit 0")), (true, String::new()));
        assert_eq!(both(fails("a"), shell("exit 0")), (false, "failures:    a".to_owned()));
        assert_eq!(both(shell("exit 0"), fails("b")), (false, "failures:    b".to_owned()));
        assert_eq!(both(fails("a"), fails("b")), (false, "failures:    bfailures:    a".to_owned()));
        // They run at the same time: each waits for the other.
        let dir = std::env::temp_dir().join(format!("gctrace-xtask-both-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let meets = |own: &str, other: &str| {
            let mut command = shell(
                "touch \"$0\"; for _ in $(seq 2000); do [ -e \"$1\" ] && exit 0; sleep 0.01; done; exit 1",
            );
            command.args([dir.join(own), dir.join(other)]);
            command
        };
        assert!(both(meets("a", "b"), meets("b", "a")).0);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
