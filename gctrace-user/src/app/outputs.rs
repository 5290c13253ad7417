//! What a run writes, by its settings.

use std::io::BufWriter;

use super::Failure;
use crate::{
    cli::{Format, Reports, Settings},
    clock::WallClock,
    console::say,
    export::{
        Exporter,
        environment::Environment,
        jsonl::Jsonl,
        profile,
        prometheus::Prometheus,
        push,
        sink::Sink,
        slow_requests::SlowRequests,
        stack_log::StackLog,
        summary::Summary,
        text::{Lines, Text},
        tunemygc::TuneMyGc,
    },
    host::proc_root,
    terminal::Screen,
    top::Top,
};

/// The exporters that were asked for, in the order in which they see things and end.
pub(super) fn exporters(settings: &Settings, clock: WallClock) -> Result<Vec<Box<dyn Exporter>>, Failure> {
    let sink = Sink::open(settings.output.as_deref())?;
    let lines = || BufWriter::with_capacity(64 << 10, sink.clone());
    let mut exporters: Vec<Box<dyn Exporter>> = vec![Box::new(Environment::new(say))];
    if let Some(show) = settings.top {
        exporters.push(Box::new(Top::new(show, settings.cache_dir.clone())));
        return Ok(exporters);
    }
    let Reports { format, lines: which, slower_than_ns, brief, .. } = settings.reports;
    let screen = if settings.output.is_some() { Screen::none() } else { Screen::stdout() };
    match format {
        Format::Text => {
            let which = Lines { none: which.none || slower_than_ns.is_some(), ..which };
            exporters.push(Box::new(Text::new(lines(), clock, screen, which)));
            if let Some(least_ns) = slower_than_ns {
                exporters.push(Box::new(SlowRequests::new(lines(), clock, least_ns)));
            }
        }
        Format::Jsonl => exporters.push(Box::new(Jsonl::new(lines(), clock, which, brief))),
    }
    if let Some(dir) = &settings.tunemygc {
        exporters.push(Box::new(TuneMyGc::new(dir, settings.tunemygc_dialect, clock)?));
    }
    if let Some(path) = &settings.stack_log {
        exporters.push(Box::new(StackLog::new(path)?));
    }
    let hottest = settings.hottest.then(|| sink.clone());
    let wall = settings.stacks.is_some_and(|stacks| stacks.wall);
    let watched = (settings.gvl.is_some(), wall);
    exporters.extend(profile::exporters(&settings.profiles, hottest, watched, clock)?);
    if format == Format::Text {
        exporters.push(Box::new(Summary::new(lines(), clock, screen, which.min_pause_ns)));
    }
    if settings.output.is_some() && settings.selection.command.is_none() {
        // The lines are in a file: the answer is on standard output nevertheless, unless that is the command's.
        let out = BufWriter::new(Sink::Stdout);
        exporters.push(Box::new(Summary::new(out, clock, Screen::stdout(), which.min_pause_ns)));
    }
    if let Some(prometheus) = &settings.prometheus {
        exporters.push(Box::new(Prometheus::start(prometheus.address, prometheus.by_pid, say)?));
    }
    exporters.extend(push::exporters(&settings.push, clock, proc_root::own_pid(), say)?);
    // Last of all: the files are complete before anybody waits for a collector.
    if let Some(target) = &settings.tunemygc_target {
        exporters.push(Box::new(TuneMyGc::sending(target, settings.tunemygc_dialect, clock, say)?));
    }
    Ok(exporters)
}
