//! Reports about a peer: text from peers is made safe to display, and repeated trouble is reported once, with a count.

use std::{
    fmt,
    time::{Duration, Instant},
};

use gctrace_tunemygc::printable::printable_part;

/// Repeated trouble is reported again after this time, with the number of occurrences since.
const AGAIN: Duration = Duration::from_mins(10);
/// Maximum number of kinds of trouble distinguished; the one reported longest ago is dropped.
const KINDS: usize = 16;
/// Maximum number of characters of a peer's text shown.
const SHOWN: usize = 200;

/// Why something was not accepted: what happened, and what the peer said about it. Both are safe to display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::export) struct Reason {
    what: String,
    quoted: String,
}

impl Reason {
    /// What happened. Repeated trouble should have the same text.
    pub(in crate::export) fn new(what: &str) -> Self {
        Self::quoting(what, "")
    }

    /// With the peer's own text, which may differ each time.
    pub(in crate::export) fn quoting(what: &str, said: &str) -> Self {
        let clean = |text: &str| printable_part(text.trim(), SHOWN);
        Self { what: clean(what), quoted: clean(said) }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        if self.quoted.is_empty() { Ok(()) } else { write!(f, " ({})", self.quoted) }
    }
}

/// A kind of trouble.
#[derive(Debug)]
struct Notice {
    kind: String,
    /// Its most recent text.
    text: String,
    said: Instant,
    /// Number of occurrences without a report.
    more: u64,
}

/// What has been reported.
#[derive(Debug)]
pub(super) struct Notices {
    name: &'static str,
    say: fn(&str),
    said: Vec<Notice>,
}

impl Notices {
    pub(super) fn new(name: &'static str, say: fn(&str)) -> Self {
        Self { name, say, said: Vec::new() }
    }

    /// Reports a line that is new each time.
    pub(super) fn say(&self, text: &str) {
        (self.say)(&format!("gctrace: {}: {text}", self.name));
    }

    /// Reports trouble of a kind; one kind has one `what`.
    pub(super) fn report(&mut self, what: &str, error: &str) {
        self.because(what, &Reason::new(error));
    }

    /// Reports trouble and its reason; one kind has one `what` and one [`Reason::new`].
    pub(super) fn because(&mut self, what: &str, reason: &Reason) {
        let join = |reason: &str| match reason {
            "" => what.to_owned(),
            reason => format!("{what}: {reason}"),
        };
        let (kind, text) = (join(&reason.what), join(&reason.to_string()));
        if let Some(known) = self.said.iter_mut().find(|known| known.kind == kind) {
            known.text = text;
            known.more += 1;
            if known.said.elapsed() < AGAIN {
                return;
            }
            known.said = Instant::now();
            let (text, more) = (known.text.clone(), std::mem::take(&mut known.more));
            self.say(&repeated(&text, more));
            return;
        }
        if self.said.len() >= KINDS {
            let oldest = self.said.iter().enumerate().min_by_key(|(_, known)| known.said);
            if let Some(index) = oldest.map(|(index, _)| index) {
                let oldest = self.said.swap_remove(index);
                self.account(&oldest);
            }
        }
        self.say(&text);
        self.said.push(Notice { kind, text, said: Instant::now(), more: 0 });
    }

    /// Reports the number of occurrences of each kind beyond its last report.
    pub(super) fn finish(&mut self) {
        for notice in std::mem::take(&mut self.said) {
            self.account(&notice);
        }
    }

    fn account(&self, notice: &Notice) {
        if notice.more > 0 {
            self.say(&repeated(&notice.text, notice.more));
        }
    }
}

fn repeated(text: &str, more: u64) -> String {
    format!("{text} [{more} more {}]", if more == 1 { "time" } else { "times" })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Repeated trouble is reported once and counted, whatever the peer says about it; kinds are bounded, and no count is lost.
    #[test]
    fn said_once() {
        static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
        let mut notices = Notices::new("X", |line| SAID.lock().unwrap().push(line.to_owned()));
        for n in 0..5 {
            notices.because("h refused a request", &Reason::quoting("answered 400", &format!("\x1b[{n}J")));
        }
        notices.report("h finds a request too large", "");
        for n in 0..2 * KINDS {
            notices.report(&format!("other {n}"), "");
        }
        notices.finish();
        let said = std::mem::take(&mut *SAID.lock().unwrap());
        assert_eq!(said[0], "gctrace: X: h refused a request: answered 400 (\\u{1b}[0J)");
        assert_eq!(said[1], "gctrace: X: h finds a request too large");
        let counted: Vec<&String> = said.iter().filter(|line| line.contains("more")).collect();
        assert_eq!(
            counted,
            ["gctrace: X: h refused a request: answered 400 (\\u{1b}[4J) [4 more times]"],
            "{said:?}"
        );
        assert_eq!(said.len(), 3 + 2 * KINDS);
    }
}
