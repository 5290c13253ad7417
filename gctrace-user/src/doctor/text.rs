//! The report as text: verdicts first, then problems and their remedies; the rest only on request.

use std::{
    collections::BTreeSet,
    io::{self, Write},
};

use gctrace_tunemygc::printable::printable;

use super::report::{
    Confidence, Feature, HostCheck, HostReport, ImageReport, Looked, ProcessReport, Proof, Report, Status,
    Summary, Tracing, subject,
};

use crate::ruby::fallback::Method;

/// Options of the text.
#[derive(Clone, Copy, Debug, Default)]
pub struct Style {
    /// Whether to use colours.
    pub colour: bool,
    /// Whether to show every check.
    pub verbose: bool,
}

/// Number of working processes shown per image unless verbose.
const SHOWN: usize = 10;
/// Number of processes that cannot be inspected shown unless verbose.
const DENIED: usize = 3;
/// Maximum number of characters shown of a command line.
const COMMAND: usize = 70;
const GREEN: &str = "32";
const YELLOW: &str = "33";
const RED: &str = "31";
const BOLD: &str = "1";

impl Style {
    fn paint(self, colour: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Writes a report.
pub(super) fn write(out: &mut impl Write, report: &Report, style: Style) -> io::Result<()> {
    let mut page = Page { out, style };
    page.host(&report.host)?;
    for (index, image) in report.images.iter().enumerate() {
        let processes: Vec<&ProcessReport> = report.processes.iter().filter(|p| p.image == index).collect();
        page.image(image, &processes, &report.summary)?;
    }
    page.end(report)
}

struct Page<'a, W> {
    out: &'a mut W,
    style: Style,
}

impl<W: Write> Page<'_, W> {
    /// A verdict: its subject and the word for it.
    fn verdict(&mut self, about: &str, colour: &str, verdict: &str) -> io::Result<()> {
        let about = self.style.paint(BOLD, &clean(about));
        writeln!(self.out, "{about}: {}", self.style.paint(colour, &clean(verdict)))
    }

    /// A labelled line.
    fn line(&mut self, label: &str, text: &str) -> io::Result<()> {
        writeln!(self.out, "  {label:<14} {}", clean(text))
    }

    /// The same for a problem.
    fn problem(&mut self, label: &str, colour: &str, text: &str) -> io::Result<()> {
        let label = self.style.paint(colour, &format!("{label:<14}"));
        writeln!(self.out, "  {label} {}", clean(text))
    }

    fn remedy(&mut self, remedy: &str) -> io::Result<()> {
        let what = self.style.paint(BOLD, "what to do:");
        writeln!(self.out, "  {:<14} {what} {}", "", clean(remedy))
    }

    fn host(&mut self, host: &HostReport) -> io::Result<()> {
        let worst = host.checks.iter().map(|check| check.status).max().unwrap_or(Status::Ok);
        let (colour, verdict) = match worst {
            Status::Missing => (RED, "gctrace cannot run"),
            Status::Limited => (YELLOW, "gctrace can run, with limits"),
            Status::Ok | Status::Info | Status::Unknown => (GREEN, "gctrace can run"),
        };
        self.verdict(&format!("Host {}", host.hostname), colour, verdict)?;
        self.line("kernel", &format!("Linux {} {}", host.kernel, host.machine))?;
        let inside = |check: &HostCheck| check.name == "user_namespace" && check.status == Status::Missing;
        let of = if host.checks.iter().any(inside) { " of a user namespace" } else { "" };
        let who = if host.uid == 0 { format!("root{of}") } else { format!("uid {}{of}", host.uid) };
        self.line("running as", &who)?;
        if self.style.verbose {
            for check in &host.checks {
                self.host_check(check)?;
                if let Some(remedy) = &check.remedy {
                    self.remedy(remedy)?;
                }
            }
            return Ok(());
        }
        let tried = host.checks.iter().filter(|check| check.status == Status::Ok).count();
        self.line("checks", &format!("{tried} passed (all with -v)"))?;
        self.host_problems(&host.checks)
    }

    /// Prints problems; each remedy appears once, below all problems that it solves. Of checks that could not be made only
    /// the names are shown: the reason is one of the problems above.
    fn host_problems(&mut self, checks: &[HostCheck]) -> io::Result<()> {
        let mut problems: Vec<&HostCheck> =
            checks.iter().filter(|check| check.status > Status::Unknown).collect();
        // The worst come first; equally bad ones keep their order.
        problems.sort_by_key(|check| std::cmp::Reverse(check.status));
        while let Some(first) = problems.first().copied() {
            let (same, others): (Vec<_>, Vec<_>) =
                problems.into_iter().partition(|check| check.remedy == first.remedy);
            for check in same {
                self.host_check(check)?;
            }
            if let Some(remedy) = &first.remedy {
                self.remedy(remedy)?;
            }
            problems = others;
        }
        let unknown = checks.iter().filter(|check| check.status == Status::Unknown);
        let unknown: Vec<&str> = unknown.map(|check| check.name.as_str()).collect();
        if unknown.is_empty() {
            return Ok(());
        }
        self.problem("not checked", YELLOW, &format!("{} (why, with -v)", unknown.join(", ")))
    }

    fn host_check(&mut self, check: &HostCheck) -> io::Result<()> {
        let colour = match check.status {
            Status::Ok => GREEN,
            Status::Info => BOLD,
            Status::Unknown | Status::Limited => YELLOW,
            Status::Missing => RED,
        };
        let word = self.style.paint(colour, &format!("{:<8}", check.status.name()));
        writeln!(self.out, "  {word} {}: {}", check.name, clean(&check.detail))
    }

    fn image(
        &mut self,
        image: &ImageReport,
        processes: &[&ProcessReport],
        summary: &Summary,
    ) -> io::Result<()> {
        let (colour, verdict) = match image.method {
            None => (RED, "is not traced"),
            Some(Method::UsdtPauses | Method::Functions | Method::Usdt) => {
                (YELLOW, "only the time of its GC work is seen")
            }
            Some(Method::Sites) if !summary.host_ready => (YELLOW, "would work if gctrace could run"),
            Some(Method::Sites) if image.works() => (GREEN, "works"),
            Some(Method::Sites) => (YELLOW, "works in part"),
        };
        let version = image.version.as_deref().unwrap_or("of unknown version");
        writeln!(self.out)?;
        self.verdict(&format!("Ruby {version}"), colour, verdict)?;
        match &image.refused {
            Some(refused) => {
                self.problem("because", colour, &refused.reason)?;
                self.remedy(&refused.remedy)?;
            }
            None => self.features(&image.features)?,
        }
        if image.refused.is_some() && image.method.is_some() {
            self.line("seen", &image.confidence.1)?;
        }
        self.line("file", &image.path.display().to_string())?;
        if let Some(description) = &image.description {
            self.line("ruby -v", description)?;
        }
        self.line("build id", image.build_id.as_deref().unwrap_or("none (its analysis is not stored)"))?;
        if let Some((probes, slow)) = image.fallback {
            self.line("probes", &format!("{probes}, {}", cost(slow)))?;
        }
        if let Some(tracing) = &image.tracing {
            self.tracing(tracing, &image.confidence)?;
        }
        if processes.is_empty() {
            return self.line("processes", &summary.looked.none());
        }
        self.processes(processes, image)
    }

    fn features(&mut self, features: &[Feature]) -> io::Result<()> {
        let working: Vec<&str> =
            features.iter().filter(|feature| feature.lack.is_none()).map(|f| label(f.name)).collect();
        self.line("works", &working.join(", "))?;
        for feature in features {
            let Some((reason, remedy)) = &feature.lack else { continue };
            self.problem("limited", YELLOW, &format!("{}: {reason}", label(feature.name)))?;
            self.remedy(remedy)?;
        }
        Ok(())
    }

    fn tracing(&mut self, tracing: &Tracing, (confidence, reason): &(Confidence, String)) -> io::Result<()> {
        let total: usize = tracing.sites.iter().map(super::report::SiteCount::total).sum();
        let symbols = match &tracing.symbols_from {
            None => "stripped file".to_owned(),
            Some(_) if tracing.symbols => "file with symbols, which agree".to_owned(),
            Some(origin) => format!("stripped file, whose symbols agree: {origin}"),
        };
        self.line("probe sites", &format!("{total}, {}; {symbols}", cost(tracing.slow_sites)))?;
        self.line("confidence", &format!("{}: {reason}", confidence.name()))?;
        let source = if tracing.cached { "taken from the cache, verified" } else { "made now" };
        let took = tracing.took_us as f64 / 1000.0;
        self.line("analysis", &format!("{source} in {took:.1} ms; {} checks passed", passed(tracing)))?;
        if !self.style.verbose {
            return Ok(());
        }
        for count in &tracing.sites {
            let mut found = Vec::new();
            for (sites, how) in [
                (count.guard, "found from the hook call"),
                (count.scan, "found by the test alone"),
                (count.call, "at the call of the hook"),
            ] {
                if sites > 0 {
                    found.push(format!("{sites} {how}"));
                }
            }
            let text = format!("{} ({} with the heap in a register)", found.join(", "), count.with_register);
            self.line(count.event, &text)?;
        }
        self.line("layout", &tracing.layout)?;
        for (name, reason) in &tracing.checks {
            let (word, reason) = match reason {
                None => (self.style.paint(GREEN, &format!("{:<8}", "ok")), String::new()),
                Some(reason) => (self.style.paint(BOLD, &format!("{:<8}", "n/a")), format!(": {reason}")),
            };
            writeln!(self.out, "  {word} {name}{}", clean(&reason))?;
        }
        let sources: BTreeSet<&str> = tracing.stat_keys.iter().map(|key| key.known_by).collect();
        for source in sources {
            let keys = tracing.stat_keys.iter().filter(|key| key.known_by == source);
            let keys: Vec<&str> = keys.map(|key| key.name).collect();
            self.line("GC.stat keys", &format!("{} by {source}: {}", keys.len(), keys.join(" ")))?;
        }
        Ok(())
    }

    fn processes(&mut self, processes: &[&ProcessReport], image: &ImageReport) -> io::Result<()> {
        let is_fine =
            |process: &&ProcessReport| matches!(process.proof, Proof::Passed { .. } | Proof::Later(_));
        let (fine, wrong): (Vec<_>, Vec<_>) = processes.iter().copied().partition(is_fine);
        let shown = if self.style.verbose { fine.len() } else { fine.len().min(SHOWN) };
        for process in wrong.iter().chain(&fine[..shown]) {
            self.process(process, image)?;
        }
        if fine.len() > shown {
            self.line("", &format!("and {} more like these (all with -v)", fine.len() - shown))?;
        }
        Ok(())
    }

    fn process(&mut self, process: &ProcessReport, image: &ImageReport) -> io::Result<()> {
        let command: String =
            process.command.as_deref().unwrap_or("(it has exited)").chars().take(COMMAND).collect();
        let (colour, text) = match &process.proof {
            Proof::Passed { count, live_slots, available_slots } => {
                let slots = live_slots.zip(*available_slots);
                let slots =
                    slots.map_or(String::new(), |(live, all)| format!(", {live} of {all} slots live"));
                (GREEN, format!("proven on its memory: GC.count {count}{slots}"))
            }
            Proof::Later(reason) => (GREEN, format!("will be proven at its first GC: {reason}")),
            Proof::Unreadable(error) => (YELLOW, format!("not proven: its memory cannot be read: {error}")),
            Proof::Failed(reason) => (RED, format!("not traced: {reason}")),
            Proof::NotTried if image.method.is_some() => {
                (YELLOW, "only the time of its GC work is seen".to_owned())
            }
            Proof::NotTried => (RED, "not traced".to_owned()),
        };
        let pid = self.style.paint(colour, &format!("{:<14}", format!("pid {}", process.pid)));
        writeln!(self.out, "  {pid} {}  [{}]", clean(&text), clean(&command))
    }

    fn end(&mut self, report: &Report) -> io::Result<()> {
        let summary = &report.summary;
        if !report.misses.is_empty() {
            writeln!(self.out)?;
        }
        for miss in &report.misses {
            self.verdict(&subject(&miss.subject), RED, &miss.reason)?;
        }
        writeln!(self.out)?;
        self.denied(report)?;
        let (colour, verdict) = match summary.exit_status {
            0 if report.host.checks.iter().any(|check| check.status == Status::Limited) => {
                (YELLOW, "works, but not everything: see `Host` above")
            }
            0 if summary.images_working < summary.images => {
                (GREEN, "what runs works; an installed Ruby does not in every respect, see above")
            }
            0 => (GREEN, "everything works"),
            1 if report.images.is_empty() => (YELLOW, "nothing matched: no CRuby was found"),
            1 => (YELLOW, "a named file or process is not a Ruby"),
            2 => (RED, "not everything works: see the errors above"),
            _ => (RED, "gctrace cannot run here; see `Host` above"),
        };
        let plural =
            |count: usize, one: &str, many: &str| format!("{count} {}", if count == 1 { one } else { many });
        let processes = match summary.looked.known(summary.processes) {
            Some(known) => format!(", {}", plural(known, "process", "processes")),
            None if summary.images == 0 => String::new(),
            None if summary.looked.searched => ", processes unknown".to_owned(),
            None => ", processes not looked for".to_owned(),
        };
        let about = format!("{}{processes}", plural(summary.images, "Ruby", "Rubies"));
        self.verdict(&about, colour, verdict)
    }

    /// Processes that could not be inspected. A user other than root does not need the reasons unless asked for.
    fn denied(&mut self, report: &Report) -> io::Result<()> {
        let Looked { at, denied, .. } = report.summary.looked;
        if denied == 0 {
            return Ok(());
        }
        let whose = if report.host.uid == 0 { "" } else { " (other users', or protected by the system)" };
        let text = format!("{denied} of {at} processes cannot be inspected{whose}");
        self.verdict("Not everything was seen", YELLOW, &text)?;
        let shown = match (self.style.verbose, report.host.uid) {
            (true, _) => denied,
            (false, 0) => denied.min(DENIED),
            (false, _) => 0,
        };
        for found in report.denied.iter().take(shown) {
            self.problem(&format!("pid {}", found.pid), YELLOW, &found.reason)?;
        }
        if shown > 0 && shown < denied {
            self.line("", &format!("and {} more (all with -v)", denied - shown))?;
        }
        if !report.summary.host_ready && report.host.uid != 0 {
            self.remedy("run gctrace doctor with sudo")?;
        }
        Ok(())
    }
}

/// Paths, descriptions and command lines come from files and processes that may be hostile: escapes them so that they
/// cannot control the terminal.
fn clean(text: &str) -> String {
    printable(text).into_owned()
}

fn passed(tracing: &Tracing) -> usize {
    tracing.checks.iter().filter(|(_, reason)| reason.is_none()).count()
}

/// The cost of probe hits; `slow` is the number of single-stepped probes.
fn cost(slow: usize) -> String {
    match slow {
        0 => "all cheap (emulated by the kernel)".to_owned(),
        slow => format!("{slow} of them slow (single-stepped by the kernel, about 20 µs per hit)"),
    }
}

/// The label of a feature.
fn label(name: &str) -> &str {
    match name {
        "gc_work" => "time of GC work",
        "gc_cycles" => "GC cycles",
        "gc_pauses" => "pauses",
        "gc_stat" => "GC.stat",
        "latest_gc_info" => "GC.latest_gc_info",
        "tunemygc" => "TuneMyGC sample sets",
        "pprof" => "pprof profile",
        "ruby_stacks" => "Ruby stacks",
        "gvl_waits" => "waits for the GVL",
        "gvl_holds" => "how long the GVL is held",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::{
        discover::{Denied, Miss, Subject},
        doctor::report::Refused,
    };

    fn check(name: &str, status: Status, remedy: Option<&str>) -> HostCheck {
        HostCheck {
            name: name.to_owned(),
            status,
            detail: "detail".to_owned(),
            remedy: remedy.map(str::to_owned),
        }
    }

    fn report(checks: Vec<HostCheck>) -> Report {
        let image = ImageReport {
            path: PathBuf::from("/lib/\x1b[31mruby.so"),
            version: None,
            description: Some("ruby\n3.1.2".to_owned()),
            build_id: None,
            confidence: (Confidence::None, "not traced".to_owned()),
            method: None,
            fallback: None,
            tracing: None,
            refused: Some(Refused { reason: "the reason".to_owned(), remedy: "the remedy".to_owned() }),
            features: Vec::new(),
            processes: 1,
            named: false,
        };
        let process = ProcessReport {
            pid: 7,
            image: 0,
            command: Some("evil\x07 title".to_owned()),
            proof: Proof::NotTried,
        };
        let misses = vec![Miss { subject: Subject::Pid(9), reason: "gone".to_owned(), denied: false }];
        let host = HostReport {
            hostname: "web-1".to_owned(),
            kernel: "6.1.0".to_owned(),
            machine: "x86_64".to_owned(),
            uid: 0,
            checks,
            verified: Vec::new(),
        };
        let (images, processes) = (vec![image], vec![process]);
        let looked = Looked { at: 10, denied: 0, searched: true };
        let summary = Summary::of(&host, &images, &processes, &misses, looked);
        Report { host, images, processes, misses, denied: Vec::new(), summary }
    }

    fn print(report: &Report, colour: bool, verbose: bool) -> String {
        let mut out = Vec::new();
        write(&mut out, report, Style { colour, verbose }).unwrap();
        String::from_utf8(out).unwrap()
    }

    /// The worst problem comes first, a remedy appears once after all problems that it solves, and passed checks take one line.
    #[test]
    fn problems_with_their_remedies() {
        let report = report(vec![
            check("fine", Status::Ok, None),
            check("slower", Status::Limited, Some("wait")),
            check("first", Status::Missing, Some("use sudo")),
            check("dark", Status::Unknown, Some("look")),
            check("second", Status::Missing, Some("use sudo")),
        ]);
        assert_eq!(report.summary.exit_status, 3);
        let text = print(&report, false, false);
        let at = |word: &str| text.find(word).unwrap_or_else(|| panic!("no {word} in\n{text}"));
        assert!(at("gctrace cannot run") < at("first"));
        assert!(at("first") < at("second") && at("second") < at("use sudo") && at("use sudo") < at("slower"));
        assert_eq!(text.matches("use sudo").count(), 1);
        assert!(!text.contains("fine") && text.contains("1 passed") && text.contains("dark (why, with -v)"));
        assert!(print(&report, false, true).contains("fine"));
    }

    /// "Everything works" appears only if nothing is restricted.
    #[test]
    fn last_line() {
        let last = |status, working| {
            let mut report = report(vec![check("types", status, Some("boot another kernel"))]);
            (report.summary.exit_status, report.summary.images_working) = (0, working);
            print(&report, false, false).lines().last().map(str::to_owned).unwrap()
        };
        assert!(last(Status::Ok, 1).ends_with("everything works"), "{}", last(Status::Ok, 1));
        assert!(last(Status::Ok, 0).contains("an installed Ruby does not"), "{}", last(Status::Ok, 0));
        assert!(last(Status::Limited, 1).contains("not everything"), "{}", last(Status::Limited, 1));
    }

    /// A Ruby that is not traced yields status 2 with reason and remedy; colours appear only on request; and text from a
    /// file or a process cannot control the terminal.
    #[test]
    fn refused_and_hostile() {
        let report = report(vec![check("fine", Status::Ok, None)]);
        assert_eq!(report.summary.exit_status, 2);
        let text = print(&report, false, true);
        for word in
            ["is not traced", "the reason", "the remedy", "pid 7", "pid 9", "gone", "not everything works"]
        {
            assert!(text.contains(word), "{word}:\n{text}");
        }
        assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
        assert!(!text.contains("ruby\n3"));
        let coloured = print(&report, true, false);
        assert!(
            coloured.contains("\x1b[31m")
                && !coloured.contains("\x1b[31mruby.so")
                && !coloured.contains('\x07')
        );
    }
    /// If no process was seen, but some were not searched or could not be inspected, the number is unknown instead of 0.
    #[test]
    fn unknown_processes() {
        let shown = |denied: u32, searched, uid, verbose| {
            let mut report = report(vec![check("fine", Status::Ok, None)]);
            report.host.uid = uid;
            report.processes.clear();
            report.summary.processes = 0;
            report.summary.looked = Looked { at: 140, denied: denied as usize, searched };
            report.denied =
                (0..denied).map(|pid| Denied { pid, reason: format!("the why of {pid}") }).collect();
            let mut json = Vec::new();
            crate::doctor::jsonl::write_jsonl(&mut json, &report).unwrap();
            (print(&report, false, verbose), String::from_utf8(json).unwrap())
        };
        let (text, json) = shown(0, true, 0, false);
        assert!(text.contains("no process runs it now") && text.contains("1 Ruby, 0 processes:"), "{text}");
        assert!(json.contains(r#""images_cached":0,"processes":0,"#), "{json}");
        let (text, json) = shown(0, false, 0, false);
        assert!(
            text.contains("not looked for\n") && text.contains("1 Ruby, processes not looked for:"),
            "{text}"
        );
        assert!(json.contains(r#""images_cached":0,"processes":null,"#), "{json}");
        let (text, json) = shown(5, true, 0, false);
        assert!(text.contains("none seen; 5 of 140 processes cannot be inspected"), "{text}");
        assert!(text.contains("1 Ruby, processes unknown:"), "{text}");
        // For root some are named with the reason.
        assert!(
            text.contains("pid 2          the why of 2") && text.contains("and 2 more (all with -v)"),
            "{text}"
        );
        assert!(!text.contains("the why of 3"), "{text}");
        assert!(json.contains(r#"{"pid":4,"reason":"the why of 4"}"#), "{json}");
        assert!(shown(5, true, 0, true).0.contains("the why of 4"));
        let (text, _) = shown(5, true, 1000, false);
        assert!(!text.contains("the why") && text.contains("other users'"), "{text}");
        assert!(shown(5, true, 1000, true).0.contains("the why of 4"));
    }
}
