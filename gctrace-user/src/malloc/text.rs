//! A window as text.

use std::io::{self, Write};

use gctrace_common::malloc::{MALLOC_AGES, MallocCount};
use gctrace_tunemygc::printable::printable;

use super::{
    report::{Ended, FUNCTIONS, Report, Sums},
    sampling::SiteRow,
};
use crate::{
    aggregate::estimate::Estimate,
    heap::Line,
    words::{data_size, plural},
};

/// Writes a heading, sizes, ages, the first `top` allocation sites, and what is missing.
pub(super) fn write(out: &mut impl Write, report: &Report, top: usize) -> io::Result<()> {
    head(out, report)?;
    if report.sums.sizes.is_empty() {
        writeln!(out, "\nNothing was allocated.")?;
        return missing(out, report);
    }
    sizes(out, &report.sums)?;
    ages(out, &report.sums)?;
    places(out, report, top)?;
    missing(out, report)
}

fn head(out: &mut impl Write, report: &Report) -> io::Result<()> {
    let who = &report.who;
    let command = printable(who.command.as_deref().unwrap_or("ruby"));
    let seconds = report.lasted.as_secs_f64();
    let collections = match report.gc_count {
        [Some(before), Some(after)] => format!(", {}", plural(after.saturating_sub(before), "collection")),
        _ => String::new(),
    };
    writeln!(out, "{command} (pid {}), Ruby {}, in {seconds:.1} s{collections}", who.pid, who.ruby)?;
    match report.ended {
        Ended::Time => {}
        Ended::Signal => writeln!(out, "counting was ended by a signal")?,
        Ended::Process => writeln!(out, "the process ended")?,
        Ended::Budget { ppm } => writeln!(
            out,
            "counting ended early: its {} cost the process more than {} % of a CPU; --budget allows more",
            plural(report.sums.count(MallocCount::Hits) + report.sums.count(MallocCount::OtherHits), "hit"),
            ppm as f64 / 10_000.0
        )?,
    }
    calls(out, &report.sums)
}

/// Writes the sums over all processes.
pub(super) fn total(out: &mut impl Write, sums: &Sums, processes: usize) -> io::Result<()> {
    writeln!(out, "\nall {processes} processes")?;
    calls(out, sums)?;
    if sums.sizes.is_empty() {
        return Ok(());
    }
    sizes(out, sums)?;
    ages(out, sums)
}

fn calls(out: &mut impl Write, sums: &Sums) -> io::Result<()> {
    let totals = sums.totals();
    let mut parts: Vec<String> = FUNCTIONS
        .iter()
        .zip(totals)
        .map(|(name, tally)| format!("{} {name} ({})", tally.calls, data_size(tally.bytes)))
        .collect();
    parts.push(format!("{} free", sums.count(MallocCount::Frees)));
    writeln!(out, "{}", parts.join(", "))
}

fn sizes(out: &mut impl Write, sums: &Sums) -> io::Result<()> {
    writeln!(
        out,
        "\n{:>12}{:>11}{:>11}{:>11}{:>15}{:>11}",
        "SIZE UP TO", "MALLOC", "CALLOC", "REALLOC", "BYTES", "LEFT"
    )?;
    for row in &sums.sizes {
        let [malloc, calloc, realloc] = row.calls.map(|tally| tally.calls);
        let bytes = row.all().bytes;
        let (up_to, left) = (row.up_to, row.live.calls);
        writeln!(out, "{up_to:>12}{malloc:>11}{calloc:>11}{realloc:>11}{bytes:>15}{left:>11}")?;
    }
    writeln!(out, "\nLEFT: allocated meanwhile and not freed")
}

fn ages(out: &mut impl Write, sums: &Sums) -> io::Result<()> {
    let ages = sums.ages();
    if ages.iter().all(|tally| tally.calls == 0) {
        return Ok(());
    }
    writeln!(out, "\n{:>12}{:>11}{:>15}", "AGE", "FREED", "BYTES")?;
    for (age, tally) in ages.iter().enumerate().filter(|(_, tally)| tally.calls > 0) {
        let more = if age + 1 == MALLOC_AGES as usize { " and more" } else { "" };
        let age = format!("{age}{more}");
        writeln!(out, "{age:>12}{:>11}{:>15}", tally.calls, tally.bytes)?;
    }
    writeln!(
        out,
        "\nAGE: collections that began between allocation and free, of memory that was allocated meanwhile"
    )
}

/// Writes the allocation sites.
fn places(out: &mut impl Write, report: &Report, top: usize) -> io::Result<()> {
    let Some(sampled) = &report.sampled else { return Ok(()) };
    if sampled.rows.is_empty() {
        return stacks_lost(out, report);
    }
    writeln!(
        out,
        "\n{:>20}  {:>18}  {:>20}  RUBY LINE, AND THE C FUNCTION THAT CALLS malloc",
        "BYTES", "CALLS", "BYTES LEFT"
    )?;
    for SiteRow { site, asked, left } in sampled.rows.iter().take(top) {
        let place = match site {
            None => "(stack lost)".to_owned(),
            Some(site) => {
                let line = site
                    .line
                    .as_ref()
                    .map_or_else(|| "(outside Ruby code, or unknown line)".into(), Line::text);
                let caller = site.caller.as_ref().map(|caller| format!("  {}", caller.text()));
                format!("{line}{}", caller.unwrap_or_default())
            }
        };
        let (bytes, calls, left) = (size(&asked.bytes), number(&asked.calls), size(&left.bytes));
        writeln!(out, "{bytes:>20}  {calls:>18}  {left:>20}  {place}")?;
    }
    if let Some(more) = sampled.rows.len().checked_sub(top).filter(|more| *more > 0) {
        writeln!(out, "{:>20}  {:>18}  {:>20}  {}", "", "", "", plural(more as u64, "more place"))?;
    }
    writeln!(
        out,
        "\n± one standard error: estimated from {}, of a call of n bytes with the probability n / {}",
        plural(sampled.stacks, "stack"),
        sampled.period
    )?;
    stacks_lost(out, report)
}

/// Writes what the allocation sites lack.
fn stacks_lost(out: &mut impl Write, report: &Report) -> io::Result<()> {
    let lost = report.stacks_lost();
    if lost.calls > 0 {
        let (stacks, bytes) = (plural(lost.calls, "stack"), data_size(lost.bytes));
        writeln!(out, "{stacks} lost: {bytes} are missing from the places (a higher --sample takes fewer)")?;
    }
    Ok(())
}

/// Bytes with their standard error, which is omitted for exact values.
fn size(estimate: &Estimate) -> String {
    let bytes = |value: f64| data_size(value.round() as u64);
    match estimate.error() {
        error if error < 0.5 => bytes(estimate.sum),
        error => format!("{} ± {}", bytes(estimate.sum), bytes(error)),
    }
}

/// The same for a number.
fn number(estimate: &Estimate) -> String {
    match estimate.error() {
        error if error < 0.5 => format!("{:.0}", estimate.sum),
        error => format!("{:.0} ± {error:.0}", estimate.sum),
    }
}

/// Writes what is not in the tables.
fn missing(out: &mut impl Write, report: &Report) -> io::Result<()> {
    let notes = [
        (MallocCount::Failed, "failed: the C library had no memory"),
        (MallocCount::FreesUnknown, "free of memory allocated before the window, or not followed"),
        (MallocCount::ReallocsUnknown, "realloc of memory allocated before the window, or not followed"),
        (MallocCount::ReallocsUnpaired, "realloc not counted: its start was not seen"),
        (
            MallocCount::Overflow,
            "not followed to the free, because too many were already (missing from LEFT and ages)",
        ),
        (
            MallocCount::Unread,
            "not followed, because GC.count could not be read (missing from LEFT and ages)",
        ),
        (
            MallocCount::Replaced,
            "freed in a way that is not seen: the address was handed out again (missing from ages)",
        ),
        (
            MallocCount::Lost,
            "no longer followed after a realloc, or GC.count could not be read (missing from LEFT and ages)",
        ),
    ];
    let some = notes.into_iter().filter(|&(count, _)| report.sums.count(count) > 0);
    for (at, (count, note)) in some.enumerate() {
        let blank = if at == 0 { "\n" } else { "" };
        writeln!(out, "{blank}{:>12}  {note}", report.sums.count(count))?;
    }
    if !report.sums.adds_up() {
        writeln!(out, "\nLEFT and ages do not add up to the allocations that were followed")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::malloc::report::tests::sample;

    fn text(ended: Ended) -> String {
        let mut out = Vec::new();
        write(&mut out, &sample(ended), 20).unwrap();
        String::from_utf8(out).unwrap()
    }

    /// The tables and what is missing are printed, and names contain no control characters.
    #[test]
    fn tables() {
        let text = text(Ended::Time);
        assert!(
            text.starts_with("ruby \\u{1b}[31mapp.rb (pid 42), Ruby 3.4.1, in 2.5 s, 2 collections\n"),
            "{text}"
        );
        let has = |line: &str| text.lines().any(|one| one.split_whitespace().eq(line.split(' ')));
        assert!(has("3 malloc (5 KiB), 0 calloc (0 bytes), 1 realloc (9 KiB), 2 free"), "{text}");
        assert!(has("128 2 0 0 220 1") && has("16384 0 0 1 9000 1") && has("2 1 100"), "{text}");
        assert!(has("1 free of memory allocated before the window, or not followed"), "{text}");
        assert!(!text.contains("add up") && !text.contains("early"), "{text}");
    }

    /// Estimates are printed with their error, unless they are exact.
    #[test]
    fn errors() {
        let mut sum = Estimate::default();
        sum.add(2_000_000.0, 1.0);
        assert_eq!((size(&sum).as_str(), number(&sum).as_str()), ("1.9 MiB", "2000000"));
        sum.add(40.0, 0.01);
        assert_eq!(size(&sum), "1.9 MiB ± 4 KiB");
        let mut calls = Estimate::default();
        calls.add(1.0, 0.01);
        assert_eq!(number(&calls), "100 ± 99");
    }

    /// A window that ends early says so.
    #[test]
    fn budget() {
        let text = text(Ended::Budget { ppm: 100_000 });
        assert!(text.contains("ended early: its 7 hits cost the process more than 10 % of a CPU"), "{text}");
    }
}
