//! A saved census: the output of `--format jsonl`, read back.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufRead, BufReader, Read as _},
    path::Path,
};

use serde::Deserialize;

use super::{count::NOT_SWEPT, jsonl, report::Report};

/// Maximum number of bytes read of a file; a row has about 200.
const LARGEST: u64 = 256 << 20;

/// Rows of a census by their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Saved {
    pub(super) pid: u32,
    /// The Ruby release; this and the command line are `None` if unknown.
    pub(super) ruby: Option<String>,
    pub(super) command: Option<String>,
    /// What a row represents.
    pub(super) by: String,
    pub(super) gc_count: u64,
    pub(super) consistent: bool,
    /// Whether it is inconsistent only because a collection had not swept all pages yet.
    pub(super) not_swept: bool,
    pub(super) rows: BTreeMap<String, Amount>,
}

/// Objects of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Amount {
    pub(super) count: u64,
    /// Bytes of slots, plus those owned outside them.
    pub(super) bytes: u64,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Line {
    Census {
        pid: u32,
        #[serde(default)]
        ruby: Option<String>,
        #[serde(default)]
        command: Option<String>,
        gc_count: u64,
        #[serde(default)]
        gc_count_after: Option<u64>,
        #[serde(default)]
        allocated_meanwhile: Option<u64>,
        #[serde(default)]
        sweeping: bool,
        consistent: bool,
        #[serde(default)]
        live: Option<u64>,
    },
    Heap {
        by: String,
        name: String,
        count: u64,
        #[serde(default)]
        bytes: u64,
        #[serde(default)]
        owned_bytes: u64,
    },
    #[serde(other)]
    Other,
}

impl Saved {
    /// Converts a report.
    pub(super) fn of(report: &Report) -> Self {
        let rows = report.rows.iter().map(|row| {
            let owned = row.objects.map_or(0, |tally| tally.owned);
            (row.name.clone(), Amount { count: row.count, bytes: row.bytes.saturating_add(owned) })
        });
        Self {
            pid: report.who.pid,
            ruby: Some(report.who.ruby.clone()),
            command: report.who.command.clone(),
            by: report.who.by.name().to_owned(),
            gc_count: report.gc_count[0],
            consistent: report.consistent,
            not_swept: !report.consistent && report.inconsistent == NOT_SWEPT,
            rows: rows.collect(),
        }
    }

    /// What shows that a later census is of another program, in words: a process may have been restarted, or its pid may have been reused;
    /// `None` if nothing does.
    pub(super) fn other_program(&self, later: &Self) -> Option<String> {
        let differ = |one: &Option<String>, other: &Option<String>| {
            one.as_ref()
                .zip(other.as_ref())
                .filter(|(one, other)| one != other)
                .map(|(one, other)| format!("{one} before, {other} after"))
        };
        if self.pid != later.pid {
            return Some(format!("of two processes: {} before, {} after", self.pid, later.pid));
        }
        let other = differ(&self.ruby, &later.ruby).map(|both| format!("Ruby {both}"));
        let other = other.or_else(|| differ(&self.command, &later.command));
        let other = other.or_else(|| {
            let fell = later.gc_count < self.gc_count;
            fell.then(|| format!("its GC count has fallen from {} to {}", self.gc_count, later.gc_count))
        });
        other.map(|why| format!("of another program with the same pid: {why}"))
    }

    /// Reads a file.
    pub(super) fn read(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        // A pipe or a device may never end.
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        Self::parse(BufReader::new(file.take(LARGEST)))
    }

    /// Parses one census; unknown lines are skipped.
    fn parse(lines: impl BufRead) -> io::Result<Self> {
        let mut saved = Self::default();
        let mut heads = 0;
        let mut all = None;
        for (number, line) in lines.lines().enumerate() {
            let line = line?;
            if line.trim().is_empty() {
                continue;
            }
            let bad = |why: String| io::Error::other(format!("line {}: {why}", number + 1));
            match jsonl::parsed(&line).map_err(|error| bad(error.to_string()))? {
                Line::Census {
                    pid,
                    ruby,
                    command,
                    gc_count,
                    gc_count_after,
                    allocated_meanwhile,
                    sweeping,
                    consistent,
                    live,
                } => {
                    heads += 1;
                    all = live;
                    (saved.pid, saved.gc_count, saved.consistent) = (pid, gc_count, consistent);
                    saved.not_swept = !consistent
                        && sweeping
                        && allocated_meanwhile == Some(0)
                        && gc_count_after == Some(gc_count);
                    (saved.ruby, saved.command) = (ruby, command);
                }
                Line::Heap { by, name, count, bytes, owned_bytes } => {
                    if saved.by.is_empty() {
                        saved.by.clone_from(&by);
                    }
                    if by != saved.by {
                        return Err(bad(format!("a row by {by} among rows by {}", saved.by)));
                    }
                    // These rows are sums, not objects.
                    if by == "type" && ["FREE", "TOTAL"].contains(&name.as_str()) {
                        continue;
                    }
                    let amount = Amount { count, bytes: bytes.saturating_add(owned_bytes) };
                    if saved.rows.insert(name, amount).is_some() {
                        return Err(bad("it is the second row of that name".to_owned()));
                    }
                }
                Line::Other => {}
            }
        }
        let counted: u128 = saved.rows.values().map(|row| u128::from(row.count)).sum();
        match heads {
            1 if all.is_some_and(|all| counted != u128::from(all)) => {
                let all = all.unwrap_or_default();
                let why =
                    format!("its rows have {counted} objects, its census {all}: it was cut off or changed");
                Err(io::Error::other(why))
            }
            1 if ["type", "class", "line"].contains(&saved.by.as_str()) => Ok(saved),
            1 => Err(io::Error::other("only censuses by type, class or line can be compared")),
            0 => Err(io::Error::other("it contains no census; gctrace heap --format jsonl writes one")),
            _ => Err(io::Error::other("it contains more than one census")),
        }
    }
}

/// How a row has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) name: String,
    pub(super) before: Amount,
    pub(super) after: Amount,
}

impl Change {
    /// Change of the number of objects.
    pub(super) fn count(&self) -> i128 {
        i128::from(self.after.count) - i128::from(self.before.count)
    }

    /// Change of the number of bytes.
    pub(super) fn bytes(&self) -> i128 {
        i128::from(self.after.bytes) - i128::from(self.before.bytes)
    }

    /// Whether there are more objects, or the same or fewer with more bytes: a cache of strings grows without new objects.
    pub(super) fn has_grown(&self) -> bool {
        self.count() > 0 || self.bytes() > 0
    }
}

/// Rows that differ, largest growth first.
pub(super) fn changes(before: &Saved, after: &Saved) -> Vec<Change> {
    let names = before.rows.keys().chain(after.rows.keys().filter(|name| !before.rows.contains_key(*name)));
    let of = |saved: &Saved, name: &str| saved.rows.get(name).copied().unwrap_or_default();
    let all =
        names.map(|name| Change { name: name.clone(), before: of(before, name), after: of(after, name) });
    let mut changes: Vec<Change> = all.filter(|change| change.before != change.after).collect();
    changes.sort_by(|one, two| {
        let rank = |change: &Change| (change.count(), change.bytes());
        rank(two).cmp(&rank(one)).then_with(|| one.name.cmp(&two.name))
    });
    changes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEAD: &str = r#"{"type":"census","pid":7,"gc_count":3,"consistent":true,"pages":1}"#;

    fn row(name: &str, count: u64) -> String {
        format!(
            r#"{{"type":"heap","pid":7,"by":"class","name":"{name}","count":{count},"bytes":{}}}"#,
            count * 40
        )
    }

    fn parse(lines: &[String]) -> io::Result<Saved> {
        Saved::parse(lines.join("\n").as_bytes())
    }

    /// What grew comes first, what shrank last; unchanged rows are omitted, new and missing ones are not.
    #[test]
    fn what_changed() {
        let before = parse(&[HEAD.into(), row("A", 5), row("B", 9), row("C", 1), row("D", 2)]).unwrap();
        let after = parse(&[HEAD.into(), row("A", 5), row("B", 2), row("C", 4), row("E", 1)]).unwrap();
        let found: Vec<(String, i128)> =
            changes(&before, &after).iter().map(|change| (change.name.clone(), change.count())).collect();
        let expected = [("C", 3), ("E", 1), ("D", -2), ("B", -7)];
        assert_eq!(found, expected.map(|(name, count)| (name.to_owned(), count)));
        assert_eq!(changes(&before, &before), []);
    }

    /// What has more objects or more bytes has grown: strings that are appended to are the same objects.
    #[test]
    fn what_has_grown() {
        let grown = |before: (u64, u64), after: (u64, u64)| {
            let [before, after] = [before, after].map(|(count, bytes)| Amount { count, bytes });
            Change { name: "A".to_owned(), before, after }.has_grown()
        };
        assert!(grown((5, 200), (6, 240)) && grown((5, 200), (5, 90_000)) && grown((5, 200), (4, 90_000)));
        assert!(grown((5, 200), (6, 100)));
        assert!(!grown((5, 200), (5, 200)) && !grown((5, 200), (5, 100)) && !grown((5, 200), (4, 200)));
    }

    /// A census of another program is recognised by its pid, Ruby or name, or by a decrease of a count that only grows.
    #[test]
    fn of_another_program() {
        let head = |text: &str| parse(&[text.to_owned(), row("A", 1)]).unwrap();
        let whole =
            r#"{"type":"census","pid":7,"ruby":"3.1.2","command":"puma","gc_count":3,"consistent":true}"#;
        let before = head(whole);
        assert_eq!(before.other_program(&head(HEAD)), None, "files of earlier releases say less");
        assert_eq!(before.other_program(&head(&whole.replace(":3,", ":9,"))), None);
        for (changed, why) in [
            (whole.replace(":7,", ":8,"), "of two processes: 7 before, 8 after"),
            (
                whole.replace("3.1.2", "3.4.1"),
                "of another program with the same pid: Ruby 3.1.2 before, 3.4.1 after",
            ),
            (whole.replace("puma", "rake"), "of another program with the same pid: puma before, rake after"),
            (
                whole.replace(":3,", ":2,"),
                "of another program with the same pid: its GC count has fallen from 3 to 2",
            ),
        ] {
            assert_eq!(before.other_program(&head(&changed)).as_deref(), Some(why));
        }
    }

    /// A heap that did not change while it was read has a different reason than one that did.
    #[test]
    fn why_not_of_one_moment() {
        let head = HEAD.replace(r#""consistent":true"#, r#""consistent":false,"sweeping":true"#);
        let not_swept = |more: &str| {
            let head = head.replace(r#""pages":1"#, &format!(r#""pages":1{more}"#));
            parse(&[head, row("A", 1)]).unwrap().not_swept
        };
        assert!(not_swept(r#","gc_count_after":3,"allocated_meanwhile":0"#));
        assert!(!not_swept(r#","gc_count_after":3,"allocated_meanwhile":9"#));
        assert!(!not_swept(r#","gc_count_after":4,"allocated_meanwhile":0"#));
        assert!(!not_swept(""), "files of earlier releases say less");
        assert!(!parse(&[HEAD.into(), row("A", 1)]).unwrap().not_swept);
    }

    /// A census that lacks its last rows is refused, because it would look like growth.
    #[test]
    fn cut_off() {
        let head = r#"{"type":"census","pid":7,"gc_count":3,"consistent":true,"live":5}"#;
        let row = |name: &str, count: u64| {
            format!(r#"{{"type":"heap","by":"class","name":"{name}","count":{count},"bytes":40}}"#)
        };
        let parse = |lines: &[String]| {
            let text = [&[head.to_owned()], lines].concat().join("\n");
            Saved::parse(text.as_bytes()).map(|saved| saved.rows.len()).map_err(|error| error.to_string())
        };
        assert_eq!(parse(&[row("A", 3), row("B", 2)]), Ok(2));
        let why = "its rows have 3 objects, its census 5: it was cut off or changed";
        assert_eq!(parse(&[row("A", 3)]), Err(why.to_owned()));
        assert!(parse(&[]).is_err());
        assert!(parse(&[row("A", u64::MAX), row("B", 6)]).is_err(), "nor does the sum wrap around");
    }

    /// A file that is not a saved census is refused with an explanation.
    #[test]
    fn refused() {
        let why = |lines: &[String]| parse(lines).unwrap_err().to_string();
        assert!(why(&[]).contains("no census"));
        assert!(why(&[HEAD.into(), HEAD.into(), row("A", 1)]).contains("more than one"));
        assert!(why(&["garbage".into()]).starts_with("line 1:"));
        assert!(why(&[HEAD.into(), row("A", 1), row("A", 2)]).starts_with("line 3:"));
        assert!(why(&[HEAD.into(), row("A", 1).replace("class", "page")]).contains("by type, class or line"));
        let other = row("B", 1).replace("class", "type");
        assert!(why(&[HEAD.into(), row("A", 1), other]).contains("among rows"));
        assert!(Saved::read(Path::new("/dev/zero")).is_err());
    }

    proptest! {
        /// Any file content is parsed or refused, and numbers do not overflow.
        #[test]
        fn garbage(text in ".{0,200}", count in any::<u64>(), bytes in any::<u64>()) {
            let row = format!(
                r#"{{"type":"heap","by":"type","name":"x","count":{count},"bytes":{bytes},"owned_bytes":{bytes}}}"#
            );
            let saved = parse(&[HEAD.into(), row]).unwrap();
            let none = Saved { rows: BTreeMap::new(), ..saved.clone() };
            prop_assert_eq!(changes(&none, &saved).len(), usize::from(count > 0 || bytes > 0));
            let _refused = parse(&[HEAD.into(), text]);
        }
    }
}
