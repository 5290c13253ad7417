//! The results of `--leaks` as text and as JSON lines (docs/heap.md).

use std::io::{self, Write};

use gctrace_tunemygc::printable::printable;
use serde::Serialize;

use super::{
    super::{
        holders::{ClassVariable, End, Holder, Local, Several},
        jsonl,
        line::Line,
        origins::{Account, Allocated},
        trend::{FEWEST_STEPS, Growth},
    },
    Ended, Found, Heap, PATHS, Suspect,
    unwatched::{More, owned_words, unprotected_words},
    words::{end_words, words},
};
use crate::words::{data_size, plural};

/// Maximum number of allocation sites of a class in text.
const SITES: usize = 3;
/// Note on the numbers of samples: each refill counts once, and there is one after each GC.
const NO_SHARES: &str = "samples are the first objects of pages: a line that often allocates first after a GC has more than its share";
/// Unit in which growth of RSS is judged, bytes.
const PAGE: u64 = 4096;

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    Growth,
    NoLeak,
    TooFewMajors,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Record<'a> {
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
        ended_by: Ended,
        /// Bytes; present if it grows.
        #[serde(skip_serializing_if = "Option::is_none")]
        rss: Option<u64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        rss_before: Option<u64>,
        heap_bytes: Option<u64>,
        heap_bytes_before: Option<u64>,
        /// Classes whose number of objects without a write barrier grew; these objects are not watched.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        unprotected: Vec<More>,
        /// Classes whose memory outside their slots grew, bytes.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        owned_bytes: Vec<More>,
        fragmented: bool,
        #[serde(skip_serializing_if = "Option::is_none")]
        allocations: Option<Account>,
        /// Why it is unknown where objects were allocated.
        #[serde(skip_serializing_if = "Option::is_none")]
        no_sites: Option<&'a str>,
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
        variable: Option<&'a ClassVariable>,
        #[serde(skip_serializing_if = "Option::is_none")]
        global: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        thread_local: Option<&'a Local>,
        #[serde(skip_serializing_if = "Option::is_none")]
        thread_variable: Option<&'a Local>,
        #[serde(skip_serializing_if = "Option::is_none")]
        fiber_storage: Option<&'a Local>,
        /// Named holders of the last objects of the path, if these are several.
        #[serde(skip_serializing_if = "Option::is_none")]
        several: Option<&'a Several>,
        #[serde(skip_serializing_if = "Option::is_none")]
        end: Option<End>,
        /// Why the heap could not be read again.
        #[serde(skip_serializing_if = "Option::is_none")]
        unread: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        sites: Option<Vec<Site<'a>>>,
        #[serde(skip_serializing_if = "Option::is_none")]
        generations: Option<Vec<Generation>>,
    },
}

/// Sampled objects that have survived the same number of major collections.
#[derive(Serialize)]
struct Generation {
    survived: u64,
    survivors: u64,
}

/// An allocation site of remaining objects.
#[derive(Serialize)]
struct Site<'a> {
    method: Option<&'a str>,
    file: Option<&'a str>,
    line: Option<u32>,
    survivors: u64,
}

impl<'a> Site<'a> {
    fn of((line, survivors): &'a (Option<Line>, u64)) -> Self {
        let line = line.as_ref();
        Self {
            method: line.map(|line| &*line.method),
            file: line.map(|line| &*line.file),
            line: line.map(|line| line.number),
            survivors: *survivors,
        }
    }
}

impl Found<'_> {
    fn verdict(&self) -> Verdict {
        match () {
            () if !self.suspects.is_empty() => Verdict::Growth,
            () if self.watched.censuses.len() <= FEWEST_STEPS => Verdict::TooFewMajors,
            () => Verdict::NoLeak,
        }
    }

    /// RSS of the first and the last group of censuses and its growth per minute, bytes; `None` unless it grows like a reported class.
    fn rss_growth(&self) -> Option<(u64, u64, f64)> {
        let censuses = &self.watched.censuses;
        let pages: Vec<u64> =
            censuses.iter().map(|census| census.rss.map(|rss| rss / PAGE)).collect::<Option<_>>()?;
        let growth = Growth::of(&pages)?;
        let per_minute = super::per_minute(censuses, growth)?;
        Some((growth.first * PAGE, growth.last * PAGE, per_minute * PAGE as f64))
    }

    /// Bytes of the pages of objects at the first and the last census.
    fn heap_bytes(&self) -> Option<(u64, u64)> {
        let censuses = &self.watched.censuses;
        censuses.first().zip(censuses.last()).map(|(first, last)| (first.heap.bytes, last.heap.bytes))
    }

    fn unprotected(&self) -> Vec<More> {
        let ends = self.watched.censuses.first().zip(self.watched.censuses.last());
        ends.map_or(Vec::new(), |(first, last)| More::unprotected(&first.unprotected, &last.unprotected))
    }

    fn owned(&self) -> Vec<More> {
        let ends = self.watched.censuses.first().zip(self.watched.censuses.last());
        ends.map_or(Vec::new(), |(first, last)| More::owned(&first.owned, &last.owned))
    }

    /// The pages at the end, if most were nearly empty in each of the last censuses.
    fn fragmented(&self) -> Option<Heap> {
        let censuses = &self.watched.censuses;
        let last = censuses.get(censuses.len().checked_sub(FEWEST_STEPS + 1)?..)?;
        let sparse = last.iter().all(|census| census.heap.nearly_empty * 2 > census.heap.pages);
        censuses.last().map(|census| census.heap).filter(|_| sparse)
    }

    pub(super) fn jsonl(&self, out: &mut impl Write) -> io::Result<()> {
        let Self { target, watched, suspects, origins } = self;
        let rounded = |number: f64| (number * 1e3).round() / 1e3;
        let line = Record::Leaks {
            pid: target.pid,
            command: target.command.as_deref(),
            ruby: &target.ruby(),
            verdict: self.verdict(),
            majors: watched.majors,
            censuses: watched.censuses.len(),
            discarded: watched.discarded,
            seconds: rounded(watched.lasted.as_secs_f64()),
            ended: watched.ended_by.gone().is_some(),
            ended_by: watched.ended_by,
            rss: self.rss_growth().map(|(_, last, _)| last),
            rss_before: self.rss_growth().map(|(first, ..)| first),
            heap_bytes: self.heap_bytes().map(|(_, last)| last),
            heap_bytes_before: self.heap_bytes().map(|(first, _)| first),
            unprotected: self.unprotected(),
            owned_bytes: self.owned(),
            fragmented: self.fragmented().is_some(),
            allocations: origins.account,
            no_sites: origins.lines.as_ref().err().map(String::as_str),
        };
        jsonl::line(out, &line)?;
        for Suspect { name, growth, per_minute, path } in suspects {
            let line = Record::Leak {
                pid: target.pid,
                name,
                old: growth.last,
                old_before: growth.first,
                per_minute: rounded(*per_minute),
                holders: path.as_ref().map(|path| path.holders.as_slice()),
                constant: path.as_ref().and_then(|path| path.constant.as_deref()),
                variable: path.as_ref().and_then(|path| path.variable.as_ref()),
                global: path.as_ref().and_then(|path| path.global.as_deref()),
                thread_local: path.as_ref().and_then(|path| path.local_at(End::ThreadLocal)),
                thread_variable: path.as_ref().and_then(|path| path.local_at(End::ThreadVariable)),
                fiber_storage: path.as_ref().and_then(|path| path.local_at(End::FiberStorage)),
                several: path.as_ref().and_then(|path| path.several.as_ref()),
                end: path.as_ref().map(|path| path.end),
                unread: path.as_ref().and_then(|path| path.unread.as_deref()),
                sites: origins.of(name).map(|allocated| allocated.lines.iter().map(Site::of).collect()),
                generations: origins.of(name).map(|allocated| {
                    let survived = allocated.survived.iter();
                    survived.map(|(&survived, &survivors)| Generation { survived, survivors }).collect()
                }),
            };
            jsonl::line(out, &line)?;
        }
        Ok(())
    }

    pub(super) fn text(&self, out: &mut impl Write, top: usize) -> io::Result<()> {
        let Self { target, watched, suspects, origins } = self;
        let command = printable(target.command.as_deref().unwrap_or("ruby"));
        writeln!(out, "{command} (pid {}), Ruby {}", target.pid, target.ruby())?;
        let majors = plural(watched.majors, "major GC");
        let seconds = watched.lasted.as_secs_f64();
        let counted = plural(watched.censuses.len() as u64, "census");
        if let Some(end) = watched.ended_by.words() {
            writeln!(out, "{end} after {seconds:.1} s")?;
        }
        match self.verdict() {
            Verdict::TooFewMajors => {
                writeln!(out, "too few censuses in {seconds:.1} s: {counted}, {majors}")?;
                let needed = FEWEST_STEPS + 1;
                if watched.discarded > watched.censuses.len() as u64 {
                    writeln!(
                        out,
                        "no result: {needed} are needed, and no GC may run during a census: watch when the program"
                    )?;
                    writeln!(out, "collects less often, or for longer")?;
                } else {
                    writeln!(
                        out,
                        "no result: {needed} are needed, one after each major GC, so watch for longer"
                    )?;
                }
            }
            Verdict::NoLeak => writeln!(out, "no leak seen in {majors} over {seconds:.1} s ({counted})")?,
            Verdict::Growth => {
                writeln!(out, "old objects that grew in {majors} over {seconds:.1} s ({counted})\n")?;
            }
        }
        for Suspect { name, growth, per_minute, path } in suspects.iter().take(top) {
            writeln!(
                out,
                "{} objects: {per_minute:+.0}/min, {} to {}",
                printable(name),
                growth.first,
                growth.last
            )?;
            if let Some(lines) = origins.of(name) {
                allocated(out, lines)?;
            }
            let Some(path) = path else { continue };
            for holder in &path.holders {
                writeln!(out, "  held by {}", words(holder))?;
            }
            writeln!(out, "  {}", end_words(path))?;
        }
        let lines = |suspect: &Suspect| origins.of(&suspect.name).map_or(0, |of| of.lines.len());
        if suspects.iter().take(top).any(|suspect| lines(suspect) > 1) {
            writeln!(out, "{NO_SHARES}")?;
        }
        let shown = suspects.iter().take(top);
        let others = shown.filter(|suspect| suspect.path.is_none()).count() as u64;
        if others > 0 && watched.ended_by.gone().is_none() {
            let others = plural(others, "other class");
            writeln!(
                out,
                "what holds the objects of {others} was not looked for (only of the first {PATHS})"
            )?;
        }
        if suspects.len() > top {
            writeln!(out, "({} more; --top N shows more)", suspects.len() - top)?;
        }
        if let Err(why) = &origins.lines
            && !suspects.is_empty()
        {
            writeln!(out, "where they were allocated is not known: {}", printable(why))?;
        }
        for line in unprotected_words(&self.unprotected()).into_iter().flatten() {
            writeln!(out, "{line}")?;
        }
        self.memory(out)?;
        if watched.discarded > 0 {
            let discarded = plural(watched.discarded, "census");
            writeln!(out, "{discarded} discarded, because a GC ran or pages could not be read meanwhile")?;
        }
        Ok(())
    }

    /// Writes about the memory of the process apart from classes whose number of objects grows.
    fn memory(&self, out: &mut impl Write) -> io::Result<()> {
        if let (Some((first, last, per_minute)), Some((heap_before, heap))) =
            (self.rss_growth(), self.heap_bytes())
        {
            let (first, last, rate) = (data_size(first), data_size(last), data_size(per_minute as u64));
            writeln!(out, "RSS grew from {first} to {last} ({rate}/min)")?;
            let (heap_before, heap) = (data_size(heap_before), data_size(heap));
            writeln!(out, "  pages of objects: {heap_before} to {heap}")?;
            if let Some(owned) = owned_words(&self.owned()) {
                writeln!(out, "{owned}")?;
            }
            if self.suspects.is_empty() {
                writeln!(
                    out,
                    "  no class of old objects grows in number: the memory is outside of the heap, or of objects that grow"
                )?;
                writeln!(
                    out,
                    "  or are not watched; gctrace malloc --pid {} shows where it is asked for",
                    self.target.pid
                )?;
            }
        }
        if let Some(Heap { pages, nearly_empty, bytes }) = self.fragmented() {
            let bytes = data_size(bytes);
            writeln!(
                out,
                "the heap is fragmented: of {pages} pages ({bytes}), {nearly_empty} are at most a quarter full"
            )?;
            writeln!(out, "  gctrace heap --pid {} --by page shows what keeps them", self.target.pid)?;
        }
        Ok(())
    }
}

/// The lines that allocated the remaining objects of a class.
fn allocated(out: &mut impl Write, allocated: &Allocated) -> io::Result<()> {
    let (of, lines) = (allocated.all(), &allocated.lines);
    if of == 0 {
        return writeln!(out, "  no object that was sampled at its allocation is left of them");
    }
    for (line, count) in lines.iter().take(SITES) {
        let share = format!("({count} of {})", plural(of, "sampled survivor"));
        match line {
            Some(line) => {
                writeln!(out, "  allocated at {} in {} {share}", line.place(), printable(&line.method))?;
            }
            None => writeln!(out, "  allocated outside Ruby code, or at an unknown line {share}")?,
        }
    }
    match allocated.range() {
        Some((fewest, most, _)) if fewest == most => {
            writeln!(out, "  these have survived {}", plural(most, "major GC"))
        }
        Some((fewest, most, half)) => {
            writeln!(out, "  these have survived {fewest} to {most} major GCs, half of them {half} or more")
        }
        None => Ok(()),
    }
}
