//! `--leaks TIME`: what grows from one major collection to the next, and what holds it.
//!
//! Only old objects are counted, after a major collection and before its garbage can come back: what survives those is
//! held by something.

use std::{
    collections::BTreeMap,
    io::{self, BufWriter, Write},
    thread,
    time::{Duration, Instant},
};

use gctrace_tunemygc::printable::printable;
use serde::Serialize;

use super::{
    count::{self, key},
    failure::HeapFailure,
    holders::{self, Holder, Path},
    jsonl,
    report::{Report, class_label},
    target::Target,
    trend::{FEWEST_STEPS, Growth},
};
use crate::{
    cli::{By, Format, HeapSettings},
    console::say,
    ruby::{live_check, stat::Mode},
    words::plural,
};

/// Time between two looks at the number of major collections.
const LOOK: Duration = Duration::from_millis(20);
/// Censuses at most: they are the time apart that this makes.
const CENSUSES: u32 = 40;
/// Classes whose holders are looked for.
const PATHS: usize = 5;

/// Old objects by class, after a major collection.
struct Survivors {
    major: u64,
    at: Instant,
    old: BTreeMap<String, u64>,
}

/// What was seen.
#[derive(Default)]
struct Watched {
    censuses: Vec<Survivors>,
    /// Censuses that a GC or a sweep that was not done made useless.
    discarded: u64,
    majors: u64,
    lasted: Duration,
    ended: bool,
}

struct Suspect {
    name: String,
    growth: Growth,
    per_minute: f64,
    path: Option<Path>,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    Growth,
    NoLeak,
    TooFewMajors,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Line<'a> {
    Leaks {
        pid: u32,
        command: Option<&'a str>,
        ruby: &'a str,
        verdict: Verdict,
        majors: u64,
        censuses: usize,
        discarded: u64,
        seconds: f64,
        ended: bool,
    },
    Leak {
        pid: u32,
        name: &'a str,
        old: u64,
        old_before: u64,
        per_minute: f64,
        #[serde(skip_serializing_if = "Option::is_none")]
        holders: Option<&'a [Holder]>,
        #[serde(skip_serializing_if = "Option::is_none")]
        constant: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        end: Option<holders::End>,
    },
}

/// Watches for that time, then reports.
pub(super) fn watch(target: &Target, time: Duration, settings: &HeapSettings) -> Result<(), HeapFailure> {
    target.needs_names()?;
    let layout = target.layout().map_err(|source| target.failure(source))?;
    if !layout.knows_bits() {
        let why = format!("--leaks: it is not known where Ruby {} stores the age of objects", target.ruby());
        return Err(HeapFailure::Usage(why));
    }
    say(&format!("pid {}: watching the objects that survive major collections, for {time:?}", target.pid));
    let watched = watched(target, time)?;
    let mut suspects = suspects(&watched.censuses);
    for suspect in suspects.iter_mut().take(PATHS) {
        suspect.path = path(target, &suspect.name);
    }
    let mut out = BufWriter::new(io::stdout());
    let written = match settings.format {
        Format::Jsonl => watched.jsonl(&mut out, target, &suspects),
        Format::Text => watched.text(&mut out, target, &suspects, settings.top),
    };
    super::flushed(written, &mut out)
}

fn watched(target: &Target, time: Duration) -> Result<Watched, HeapFailure> {
    let begun = Instant::now();
    let mut watched = Watched::default();
    let mut known: Option<u64> = None;
    let mut next = begun;
    let mut first = None;
    let mut failed = None;
    while begun.elapsed() < time && !watched.ended {
        match look(target, known, Instant::now() >= next) {
            Ok(look) => {
                first.get_or_insert(look.major);
                known.get_or_insert(look.major);
                watched.majors = look.major.saturating_sub(first.unwrap_or_default());
                watched.discarded += u64::from(look.discarded);
                if let Some(survivors) = look.survivors {
                    known = Some(survivors.major);
                    next = survivors.at + time / CENSUSES;
                    watched.censuses.push(survivors);
                }
            }
            Err(HeapFailure::NotRuby { denied: false, .. }) if first.is_some() => watched.ended = true,
            // Pages come and go while they are read. What fails each time is an error.
            Err(failure @ HeapFailure::Heap { .. }) => {
                watched.discarded += 1;
                failed = Some(failure);
            }
            Err(failure) => return Err(failure),
        }
        thread::sleep(LOOK.min(time.saturating_sub(begun.elapsed())));
    }
    watched.lasted = begun.elapsed();
    match failed {
        Some(failure) if watched.censuses.is_empty() => Err(failure),
        _ => Ok(watched),
    }
}

struct Look {
    major: u64,
    discarded: bool,
    survivors: Option<Survivors>,
}

/// Counts if a major collection has ended since the one that is known.
fn look(target: &Target, known: Option<u64>, due: bool) -> Result<Look, HeapFailure> {
    let major = || -> Result<(u64, Mode), HeapFailure> {
        let (_, data) = target.state().map_err(|source| target.failure(source))?;
        let layout = &target.plan.layout;
        let flags = layout.flags.read(&data).unwrap_or_default() as u32;
        let major = key(&target.plan, "major_gc_count", &data).ok_or_else(|| {
            HeapFailure::Usage("--leaks: it is not known where this Ruby counts major collections".to_owned())
        })?;
        Ok((major, live_check::mode(layout, flags)))
    };
    let (before, mode) = major()?;
    let mut look = Look { major: before, discarded: false, survivors: None };
    if !due || mode != Mode::None || known.is_none_or(|known| known == before) {
        return Ok(look);
    }
    let counted = count::count(target).map_err(|source| target.failure(source))?;
    let report = Report::of(target, By::Class, &counted);
    look.major = major()?.0;
    if look.major != before || counted.sweeping || counted.gc_count[0] != counted.gc_count[1] {
        look.discarded = true;
        return Ok(look);
    }
    let old = report.rows.into_iter().map(|row| (row.name, row.objects.map_or(0, |tally| tally.old())));
    look.survivors =
        Some(Survivors { major: before, at: Instant::now(), old: old.filter(|(_, old)| *old > 0).collect() });
    Ok(look)
}

/// Classes that grow, those with most objects more first.
fn suspects(censuses: &[Survivors]) -> Vec<Suspect> {
    let Some(last) = censuses.last() else { return Vec::new() };
    let mut suspects: Vec<Suspect> = last
        .old
        .keys()
        .filter_map(|name| {
            let counts: Vec<u64> =
                censuses.iter().map(|census| census.old.get(name).copied().unwrap_or(0)).collect();
            let growth = Growth::of(&counts)?;
            let (from, to) = (censuses.get(growth.at.0)?, censuses.get(growth.at.1)?);
            let minutes = (to.at - from.at).as_secs_f64() / 60.0;
            let per_minute = growth.more() as f64 / minutes;
            Some(Suspect { name: name.clone(), growth, per_minute, path: None })
        })
        .collect();
    let internal = |suspect: &Suspect| suspect.name.starts_with("(internal ");
    suspects.sort_by_key(|suspect| (internal(suspect), std::cmp::Reverse(suspect.growth.more())));
    suspects
}

/// What holds old objects of a class; `None` if the heap could not be read again, as when the process has ended.
fn path(target: &Target, name: &str) -> Option<Path> {
    let mut names = target.names();
    let mut known: BTreeMap<u64, bool> = BTreeMap::new();
    holders::path(target, |slot| {
        let kind = slot.kind();
        if kind.is_internal() {
            return class_label(kind, 0, |_| None) == name;
        }
        let class = slot.class();
        *known.entry(class).or_insert_with(|| {
            class_label(kind, class, |class| names.as_mut().and_then(|names| names.name(class))) == name
        })
    })
    .ok()
}

impl Watched {
    fn verdict(&self, suspects: &[Suspect]) -> Verdict {
        match () {
            () if !suspects.is_empty() => Verdict::Growth,
            () if self.censuses.len() <= FEWEST_STEPS => Verdict::TooFewMajors,
            () => Verdict::NoLeak,
        }
    }

    fn jsonl(&self, out: &mut impl Write, target: &Target, suspects: &[Suspect]) -> io::Result<()> {
        let rounded = |number: f64| (number * 1e3).round() / 1e3;
        let line = Line::Leaks {
            pid: target.pid,
            command: target.command.as_deref(),
            ruby: &target.ruby(),
            verdict: self.verdict(suspects),
            majors: self.majors,
            censuses: self.censuses.len(),
            discarded: self.discarded,
            seconds: rounded(self.lasted.as_secs_f64()),
            ended: self.ended,
        };
        jsonl::line(out, &line)?;
        for Suspect { name, growth, per_minute, path } in suspects {
            let line = Line::Leak {
                pid: target.pid,
                name,
                old: growth.last,
                old_before: growth.first,
                per_minute: rounded(*per_minute),
                holders: path.as_ref().map(|path| path.holders.as_slice()),
                constant: path.as_ref().and_then(|path| path.constant.as_deref()),
                end: path.as_ref().map(|path| path.end),
            };
            jsonl::line(out, &line)?;
        }
        Ok(())
    }

    fn text(
        &self,
        out: &mut impl Write,
        target: &Target,
        suspects: &[Suspect],
        top: usize,
    ) -> io::Result<()> {
        let command = printable(target.command.as_deref().unwrap_or("ruby"));
        writeln!(out, "{command} ({}), Ruby {}", target.pid, target.ruby())?;
        let majors = plural(self.majors, "major GC");
        let seconds = self.lasted.as_secs_f64();
        let counted = plural(self.censuses.len() as u64, "census");
        if self.ended {
            writeln!(out, "the process has ended after {seconds:.1} s")?;
        }
        match self.verdict(suspects) {
            Verdict::TooFewMajors => {
                writeln!(
                    out,
                    "too few major GCs ({majors}) that could be counted ({counted}) in {seconds:.1} s:"
                )?;
                writeln!(out, "no result; {} are needed, so watch for longer", FEWEST_STEPS + 1)?;
            }
            Verdict::NoLeak => writeln!(out, "no leak seen in {majors} over {seconds:.1} s ({counted})")?,
            Verdict::Growth => {
                writeln!(out, "old objects that grew in {majors} over {seconds:.1} s ({counted})\n")?;
            }
        }
        for Suspect { name, growth, per_minute, path } in suspects.iter().take(top) {
            let name = printable(name);
            writeln!(out, "{name} objects: {per_minute:+.0}/min, {} to {}", growth.first, growth.last)?;
            let Some(path) = path else { continue };
            for holder in &path.holders {
                writeln!(out, "  held by {}", words(holder))?;
            }
            match &path.constant {
                Some(constant) => writeln!(out, "  held by the constant {}", printable(constant))?,
                None => writeln!(out, "  {}", path.end.words())?,
            }
        }
        if suspects.len() > top {
            writeln!(out, "({} more; --top N shows more)", suspects.len() - top)?;
        }
        if self.discarded > 0 {
            let discarded = plural(self.discarded, "census");
            writeln!(out, "{discarded} discarded, because a GC ran meanwhile")?;
        }
        Ok(())
    }
}

fn words(holder: &Holder) -> String {
    let Holder { address, kind, class, code, refers, holds, of } = holder;
    let class = match (class, code) {
        (_, Some(code)) => format!("a closure over the variables of {}", printable(code)),
        (Some(class), None) => printable(class).into_owned(),
        (None, None) => format!("a hidden {kind}"),
    };
    let share = if *of > 1 { format!(" ({holds} of {of} samples)") } else { String::new() };
    format!("{class} {:#x} with {}{share}", address.0, plural(*refers, "reference"))
}
