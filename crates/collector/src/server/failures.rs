//! Failures in the log. A failure that occurs for each of thousands of requests gives one line, and later a count.

use std::{
    fmt::Display,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// A kind of failure is logged again after this time, with the number of occurrences since.
const AGAIN: Duration = Duration::from_mins(10);
/// Maximum number of kinds that are distinguished; all further kinds count as one.
const KINDS: usize = 16;
/// The kind of all further failures.
const OTHERS: &str = "further kinds of failures";

/// The kinds of failures that were logged.
#[derive(Debug, Default)]
pub(super) struct Failures(Mutex<Vec<Failure>>);

/// A kind of failure.
#[derive(Debug)]
struct Failure {
    kind: String,
    /// The text of the latest occurrence.
    text: String,
    logged: Instant,
    /// Number of occurrences since it was logged.
    more: u64,
}

impl Failures {
    /// Reports a failure. All failures with the same text are of one kind.
    pub(super) fn report(&self, failure: &impl Display) {
        let text = failure.to_string();
        log_all(self.note(&text, &text, Instant::now()));
    }

    /// Reports a failure of this kind, whatever its text.
    pub(super) fn report_as(&self, kind: &str, failure: &impl Display) {
        log_all(self.note(kind, &format!("{kind}: {failure}"), Instant::now()));
    }

    /// Logs the counts of failures that are not in the log yet, if they are due.
    pub(super) fn catch_up(&self) {
        log_all(due(&mut self.known(), Instant::now()));
    }

    /// Logs all remaining counts at shutdown, whether or not they are due.
    pub(super) fn finish(&self) {
        let rest = std::mem::take(&mut *self.known());
        log_all(rest.iter().filter_map(Failure::account).collect());
    }

    fn known(&self) -> MutexGuard<'_, Vec<Failure>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an occurrence. Returns the lines to log.
    fn note(&self, kind: &str, text: &str, now: Instant) -> Vec<String> {
        let mut known = self.known();
        if let Some(failure) = known.iter_mut().find(|known| known.kind == kind) {
            failure.again(text);
            return due(&mut known, now);
        }
        let mut lines = due(&mut known, now);
        let kind = if known.len() < KINDS { kind } else { OTHERS };
        if let Some(others) = known.iter_mut().find(|known| known.kind == kind) {
            others.again(text);
        } else {
            lines.push(text.to_owned());
            known.push(Failure { kind: kind.to_owned(), text: text.to_owned(), logged: now, more: 0 });
        }
        lines
    }
}

impl Failure {
    fn again(&mut self, text: &str) {
        text.clone_into(&mut self.text);
        self.more += 1;
    }

    /// A line with the number of occurrences since the last log line; `None` if there were none.
    fn account(&self) -> Option<String> {
        let times = if self.more == 1 { "time" } else { "times" };
        (self.more > 0).then(|| format!("{} [{} more {times}]", self.text, self.more))
    }
}

/// The counts of the kinds that were logged at least [`AGAIN`] ago. Kinds that have not occurred since are removed.
fn due(known: &mut Vec<Failure>, now: Instant) -> Vec<String> {
    let mut lines = Vec::new();
    known.retain_mut(|failure| {
        if now.duration_since(failure.logged) < AGAIN {
            return true;
        }
        let account = failure.account();
        let again = account.is_some();
        lines.extend(account);
        (failure.logged, failure.more) = (now, 0);
        again
    });
    lines
}

fn log_all(lines: Vec<String>) {
    for line in lines {
        log::error!("{line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first failure of a kind is logged at once, the further ones as a count, at most every ten minutes. No count is lost, and neither an
    /// unlimited number of kinds nor texts that differ each time cause more lines.
    #[test]
    fn logged_once() {
        let failures = Failures::default();
        let begin = Instant::now();
        let at = |minutes: u64| begin + Duration::from_mins(minutes);
        let full = |minutes: u64| failures.note("the disk is full", "the disk is full", at(minutes));
        assert_eq!(full(0), ["the disk is full"]);
        for _ in 0..1000 {
            assert_eq!(full(9), [""; 0]);
        }
        assert_eq!(failures.note("a panic", "a panic in task 1", at(9)), ["a panic in task 1"]);
        assert_eq!(failures.note("a panic", "a panic in task 2", at(9)), [""; 0]);
        assert_eq!(full(10), ["the disk is full [1001 more times]"]);
        assert_eq!(full(18), [""; 0]);
        // Counts are logged without waiting for the next failure of their kind.
        let mut lines = due(&mut failures.known(), at(20));
        lines.sort();
        assert_eq!(lines, ["a panic in task 2 [1 more time]", "the disk is full [1 more time]"]);
        assert_eq!(due(&mut failures.known(), at(29)), [""; 0]);
        assert_eq!(due(&mut failures.known(), at(30)), [""; 0]);
        // It has not occurred for ten minutes, and counts as new.
        assert_eq!(full(31), ["the disk is full"]);
        assert_eq!(failures.known().len(), 1);

        let mut lines = 0;
        for n in 0..1000 {
            let text = format!("kind {n}");
            lines += failures.note(&text, &text, at(32)).len();
        }
        assert_eq!(lines, KINDS, "the others are one kind");
        let known = failures.known();
        let others = known.iter().find(|known| known.kind == OTHERS).unwrap();
        assert_eq!(others.account().unwrap(), format!("kind 999 [{} more times]", 1000 - KINDS));
        let counted: u64 = known.iter().map(|known| known.more).sum();
        assert_eq!(counted as usize + lines, 1000);
    }
}
