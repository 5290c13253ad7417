//! docs/ledger.md is generated from the tables of counters.

use std::fmt::Write as _;

use gctrace_common::stats::{Counter, Family, IDENTITIES};

use super::{UserCounter, identities};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/ledger.md");
/// If this environment variable is set, the test writes the file.
const WRITE: &str = "GCTRACE_WRITE_DOCS";

const HEAD: &str = "# The ledger

Every run ends with an account of what each stage counted: the `ledger` line of JSON lines, `gctrace_*` metrics, and with `-v` two
lines of text. What is lost, dropped, filtered or refused is counted by kind, and the sums below hold at the end of every run; a
sum that does not hold is reported. This page is made from the tables in `gctrace-common/src/stats.rs` and
`crates/report/src/ledger/stages.rs` (`GCTRACE_WRITE_DOCS=1 cargo test -p gctrace-report ledger_page`).
";

fn names(kernel: &[Counter], user: &[UserCounter]) -> String {
    let kernel = kernel.iter().map(|counter| counter.name());
    let all: Vec<&str> = kernel.chain(user.iter().map(|counter| counter.name())).collect();
    all.join(" + ")
}

fn row(text: &mut String, name: &str, lost: Option<bool>, doc: &str) {
    let lost = lost.map_or("", |lost| if lost { " yes |" } else { "  |" });
    writeln!(text, "| `{name}` |{lost} {} |", doc.trim().replace('|', "\\|")).unwrap();
}

fn page() -> String {
    let mut text = HEAD.to_owned();
    text.push_str("\n## Sums that balance\n\n```\n");
    for sum in IDENTITIES {
        writeln!(text, "{} = {}", names(sum.left, &[]), names(sum.right, &[])).unwrap();
    }
    for sum in identities::ALL {
        let (left, right) = (&sum.left, &sum.right);
        writeln!(text, "{} = {}", names(left.kernel, left.user), names(right.kernel, right.user)).unwrap();
    }
    text.push_str("```\n");
    for family in Family::ALL {
        write!(text, "\n## Kernel: {}\n\n| counter | lost | counts |\n|---|---|---|\n", family.title())
            .unwrap();
        for counter in Counter::ALL.iter().filter(|counter| counter.family() == family) {
            row(&mut text, counter.name(), Some(counter.is_loss()), counter.doc());
        }
    }
    for (about, counters) in UserCounter::STAGES {
        let title = about.trim().trim_end_matches('.');
        write!(text, "\n## User space: {title}\n\n| counter | counts |\n|---|---|\n").unwrap();
        for counter in *counters {
            row(&mut text, counter.name(), None, counter.doc());
        }
    }
    text
}

/// The page lists every counter and every sum.
#[test]
fn ledger_page() {
    let page = page();
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(FILE, &page).unwrap();
    }
    let known = std::fs::read_to_string(FILE).unwrap();
    assert!(known == page, "docs/ledger.md is not of these counters: run this test with {WRITE}=1");
}
