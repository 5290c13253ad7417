//! The outputs of a run, from its settings.

use std::io::BufWriter;

use super::Failure;
use crate::{
    cli::{Format, Reports, Settings},
    clock::{WallClock, monotonic_ns},
    console::say,
    export::{
        Exporter, VERSION,
        csv::Csv,
        digest::OneScreen,
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
    heap::Accounts,
    host::proc_root,
    terminal::Screen,
    top::{Top, Traced},
    trace_file::{FlightRecorder, Header, Host, Recorder, Subjects},
};

/// The header of a recording.
pub(super) fn header(settings: &Settings, clock: WallClock) -> Header {
    let subjects = Subjects {
        samples: settings.stacks.is_some(),
        wall: settings.stacks.is_some_and(|stacks| stacks.wall),
        gvl: settings.gvl.is_some(),
        requests: settings.requests.is_some(),
        alloc: settings.alloc,
    };
    let system = rustix::system::uname();
    let text = |of: &std::ffi::CStr| Some(of.to_string_lossy().into_owned());
    let host = Host {
        name: text(system.nodename()),
        kernel: text(system.release()),
        machine: text(system.machine()),
        boot: boot_id(),
        cpus: std::thread::available_parallelism().ok().and_then(|cpus| u32::try_from(cpus.get()).ok()),
    };
    Header { gctrace: VERSION.to_owned(), clock, begun_ns: monotonic_ns(), subjects, host, dump: None }
}

/// The id of the host's current boot.
fn boot_id() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned())
}

/// The requested exporters, in the order in which they receive data and end. `requests`: whether the run traces requests.
pub(super) fn exporters(
    settings: &Settings,
    clock: WallClock,
    requests: bool,
) -> Result<Vec<Box<dyn Exporter>>, Failure> {
    let sink = Sink::open(settings.output.as_deref())?;
    let lines = || BufWriter::with_capacity(64 << 10, sink.clone());
    let mut exporters: Vec<Box<dyn Exporter>> = vec![Box::new(Environment::new(say))];
    if let Some(path) = &settings.record {
        let header = header(settings, clock);
        exporters.push(match &settings.keep {
            None if path.as_os_str() == "-" => {
                // The recording is all that is written to standard output.
                return Ok(vec![Box::new(Recorder::to_stdout(&header)?.until(settings.record_most))]);
            }
            None => Box::new(Recorder::create(path, &header)?.until(settings.record_most)),
            Some(keep) => Box::new(FlightRecorder::create(path, &header, keep.clone())?),
        });
    }
    if settings.live.is_some() {
        // The live page is the output.
        return Ok(exporters);
    }
    if let Some(show) = settings.top {
        let traced = Traced { requests: settings.requests.is_some(), gvl: settings.gvl.is_some() };
        exporters.push(Box::new(Top::new(show, traced, settings.cache_dir.clone())));
        return Ok(exporters);
    }
    let Reports { format, lines: which, slower_than_ns, by, ref shape, .. } = settings.reports;
    // Without lines, none is omitted because of its length.
    let least_ns = if which.none { 0 } else { which.min_pause_ns };
    let screen = if settings.output.is_some() { Screen::none() } else { Screen::stdout() };
    // It replaces lines and summaries.
    let one_screen = settings.one_screen.clone();
    let summary = format == Format::Text && one_screen.is_none();
    match format {
        Format::Text if one_screen.is_some() => {
            exporters.extend(one_screen.map(|of| Box::new(OneScreen::new(lines(), screen, of)) as _));
        }
        Format::Text => {
            let which = Lines { none: which.none || slower_than_ns.is_some(), ..which };
            exporters.push(Box::new(Text::new(lines(), clock, screen, which)));
            if let Some(least_ns) = slower_than_ns {
                exporters.push(Box::new(SlowRequests::new(lines(), clock, least_ns)));
            }
        }
        Format::Jsonl => exporters.push(Box::new(Jsonl::new(lines(), clock, which, shape.clone()))),
    }
    if let Some(dir) = &settings.tunemygc {
        exporters.push(Box::new(TuneMyGc::new(
            dir,
            settings.tunemygc_most,
            settings.tunemygc_dialect,
            clock,
        )?));
    }
    if let Some(path) = &settings.csv {
        exporters.push(Box::new(Csv::new(path, clock)?));
    }
    if let Some(path) = &settings.stack_log {
        exporters.push(Box::new(StackLog::new(path)?));
    }
    let hottest = settings.hottest.then(|| sink.clone());
    let wall = settings.stacks.is_some_and(|stacks| stacks.wall);
    let watched = (settings.gvl.is_some(), wall);
    exporters.extend(profile::exporters(&settings.profiles, &settings.filter, hottest, watched, clock)?);
    if summary {
        exporters.push(Box::new(Summary::new(lines(), clock, screen, least_ns).by(by).requests(requests)));
    }
    if settings.memory_account {
        exporters.push(Box::new(Accounts::new(lines(), settings.cache_dir.clone())?));
    }
    exporters.extend(sink.kept());
    if settings.output.is_some() && settings.selection.command.is_none() {
        // The lines go to a file: print the summary on standard output nevertheless, unless that is the command's.
        let out = BufWriter::new(Sink::Stdout);
        exporters
            .push(Box::new(Summary::new(out, clock, Screen::stdout(), least_ns).by(by).requests(requests)));
    }
    if let Some(prometheus) = &settings.prometheus {
        exporters.push(Box::new(Prometheus::start(prometheus.address, prometheus.by_pid, say)?));
    }
    let agent = push::Agent { pid: proc_root::own_pid(), boot: boot_id() };
    exporters.extend(push::exporters(&settings.push, clock, &agent, say)?);
    // Last of all: the files are complete before the run waits for a collector.
    if let Some(target) = &settings.tunemygc_target {
        exporters.push(Box::new(TuneMyGc::sending(target, settings.tunemygc_dialect, clock, say)?));
    }
    Ok(exporters)
}
