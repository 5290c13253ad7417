//! Measures where the tests spend their time.

use std::{
    cell::RefCell,
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};

use crate::util::{progress, target_dir};

/// The environment variable with the path of the file to which each live test appends a line when it ends (`Turn` in tests/src/live.rs), and one
/// if a comparison of times was repeated before it succeeded (`settled` in tests/src/timing.rs).
pub(super) const VARIABLE: &str = "GCTRACE_TEST_TIMES";
/// Number of the slowest tests that are listed.
const LISTED: usize = 10;

/// The consecutive stages of a run.
#[derive(Default)]
pub(super) struct Stages(RefCell<Vec<(&'static str, Instant)>>);

impl Stages {
    /// Starts a stage, which ends the previous one.
    pub(super) fn begin(&self, name: &'static str) {
        self.0.borrow_mut().push((name, Instant::now()));
    }

    /// Prints the duration of each stage; the last one ends now.
    pub(super) fn print(&self) {
        let begun = self.0.borrow();
        let ends = begun.iter().skip(1).map(|(_, at)| *at).chain([Instant::now()]);
        let took: Vec<_> = begun.iter().zip(ends).map(|((name, at), end)| (*name, end - *at)).collect();
        progress(stages(&took));
    }
}

fn stages(took: &[(&str, Duration)]) -> String {
    let sum: Duration = took.iter().map(|(_, took)| *took).sum();
    let parts: Vec<_> = took.iter().map(|(name, took)| format!("{name} {} s", took.as_secs())).collect();
    format!("test: all took {} s: {}", sum.as_secs(), parts.join(", "))
}

/// The times of the live tests of a run.
pub(super) struct Times {
    path: PathBuf,
    begun: Instant,
}

impl Times {
    /// Starts with an empty file.
    pub(super) fn begin() -> Result<Self> {
        let path = target_dir()?.join("xtask").join("live-times.txt");
        fs::create_dir_all(path.with_file_name(""))
            .with_context(|| format!("cannot create the directory of {}", path.display()))?;
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", path.display()));
            }
            _ => {}
        }
        Ok(Self { path, begun: Instant::now() })
    }

    /// The path of the file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Prints the sums and the slowest tests. If the file does not exist, no test has ended.
    pub(super) fn print(&self) {
        match fs::read_to_string(&self.path) {
            Ok(lines) => progress(text(&lines, self.begun.elapsed())),
            Err(error) => progress(format!("test: no times of live tests: {}: {error}", self.path.display())),
        }
    }
}

/// Parses a line of the file: duration, whether the test ran alone, name of the test.
fn line(line: &str) -> Option<(Duration, bool, &str)> {
    let mut words = line.splitn(3, ' ');
    let took = Duration::from_millis(words.next()?.parse().ok()?);
    let alone = match words.next()? {
        "alone" => true,
        "beside" => false,
        _ => return None,
    };
    Some((took, alone, words.next()?))
}

/// Parses a line about a comparison of times that was repeated: how often, name of the test.
fn repeated(line: &str) -> Option<(u32, &str)> {
    let (count, name) = line.strip_prefix("repeated ")?.split_once(' ')?;
    Some((count.parse().ok()?, name))
}

fn text(lines: &str, took: Duration) -> String {
    let mut tests: Vec<_> = lines.lines().filter_map(line).collect();
    let sum = |which: bool| -> (usize, Duration) {
        let of: Vec<Duration> =
            tests.iter().filter(|(_, alone, _)| *alone == which).map(|(took, ..)| *took).collect();
        (of.len(), of.iter().sum())
    };
    let ((alone, alone_took), (beside, beside_took)) = (sum(true), sum(false));
    let mut text = format!(
        "test: live tests took {} s: {alone} tests that have the machine for themselves {} s, {beside} beside each other {} s. The slowest:",
        took.as_secs(),
        alone_took.as_secs(),
        beside_took.as_secs(),
    );
    tests.sort_by_key(|(took, ..)| std::cmp::Reverse(*took));
    for (took, alone, name) in tests.iter().take(LISTED) {
        let alone = if *alone { "" } else { " (beside others)" };
        let _infallible = write!(text, "\n  {:5.1} s  {name}{alone}", took.as_secs_f64());
    }
    let again: Vec<_> =
        lines.lines().filter_map(repeated).map(|(count, name)| format!("{name} ({count})")).collect();
    let again = if again.is_empty() { "none".to_owned() } else { again.join(", ") };
    let _infallible = write!(text, "\ntest: comparisons of times that were repeated: {again}");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The duration of each stage, and their sum.
    #[test]
    fn parts() {
        let took =
            [("building", Duration::from_millis(61_500)), ("live tests", Duration::from_millis(100_600))];
        assert_eq!(stages(&took), "test: all took 162 s: building 61 s, live tests 100 s");
    }

    /// Sums of both kinds, and the slowest tests first; invalid lines are skipped.
    #[test]
    fn account() {
        let lines = "1500 alone live_gc::a\n63000 beside live_killed::b\n\n12 other x\nx alone y\nrepeated 2 live_diff::c\n\
                     20500 alone live_diff::c\nrepeated x y\nrepeated 1 live_gc::d\n";
        let text = |lines| text(lines, Duration::from_secs(80));
        let expected = [
            "test: live tests took 80 s: 2 tests that have the machine for themselves 22 s, 1 beside each other 63 s. The slowest:",
            "   63.0 s  live_killed::b (beside others)",
            "   20.5 s  live_diff::c",
            "    1.5 s  live_gc::a",
            "test: comparisons of times that were repeated: live_diff::c (2), live_gc::d (1)",
        ];
        assert_eq!(text(lines).lines().collect::<Vec<_>>(), expected);
        assert!(text("1500 alone live_gc::a\n").ends_with("repeated: none"));
    }
}
