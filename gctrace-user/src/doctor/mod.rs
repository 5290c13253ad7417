//! `gctrace doctor`: what works on this host and for each Ruby, and why the rest does not. It reads and tries; it attaches
//! nothing to Ruby and changes nothing.

mod confidence;
mod features;
mod host;
mod jsonl;
pub mod report;
mod ruby;
mod sought;
mod text;

use std::io::{self, BufWriter, IsTerminal as _, Write};

use crate::{
    bpf,
    cache::Cache,
    cli::{DoctorSettings, Format},
    console,
    discover::{self, Abilities, DebugInfo, Subjects, Survey},
    export::ExportError,
    host::mappings,
    preflight, terminal,
};

use self::{
    report::{Looked, Report, Summary},
    sought::Sought,
};
pub use text::Style;

/// Examines the host and its Rubies, prints the report, and returns the exit status.
pub fn run(settings: &DoctorSettings) -> Result<u8, ExportError> {
    let mut cache = settings.cache_dir.as_deref().map_or_else(Cache::none, Cache::at);
    let report = examine(settings, &mut cache);
    let stdout = io::stdout();
    let style = Style { colour: stdout.is_terminal() && terminal::colours(), verbose: settings.verbose };
    let mut out = BufWriter::new(stdout);
    let written = match settings.format {
        Format::Jsonl => jsonl::write_jsonl(&mut out, &report),
        Format::Text => text::write(&mut out, &report, style),
    };
    match written.and_then(|()| out.flush()) {
        // The reader has closed the pipe.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        written => written.map_err(ExportError::Stdout)?,
    }
    Ok(report.summary.exit_status)
}

fn examine(settings: &DoctorSettings, cache: &mut Cache) -> Report {
    let tracefs = preflight::mounted_tracefs();
    let mounted = tracefs.as_ref().ok().and_then(Option::as_deref);
    preflight::raise_locked_memory();
    preflight::raise_open_files();
    console::starting("loading all BPF programs to see whether this kernel accepts them");
    let kernel = bpf::check(mounted, mappings::own_code(), true);
    let sought = Sought::of(&settings.selection);
    let subjects = Subjects {
        selection: sought.with_named(&settings.selection),
        files: settings.files.clone(),
        abilities: Abilities {
            // An ability that could not be tested, for lack of privilege or of /sys, is assumed to exist.
            reads_threads: kernel.kernel_types.is_ok() || preflight::sys().is_err(),
            cookies: kernel.cookies.is_ok() || kernel.programs.is_err(),
        },
        debug: DebugInfo::of_servers(std::env::var("DEBUGINFOD_URLS").ok().as_deref()),
    };
    console::starting("looking for Ruby processes and installed Rubies");
    let mut survey = discover::survey(&subjects, cache);
    sought.judge(&settings.selection, &mut survey);
    console::end_progress();
    let host = host::examine(&tracefs, &kernel, cache.path());
    let (images, processes) = ruby::examine(&survey, subjects.abilities);
    let Survey { misses, looked_at, denied, searched, .. } = survey;
    let looked = Looked { at: looked_at, denied: denied.len(), searched };
    let summary = Summary::of(&host, &images, &processes, &misses, looked);
    Report { host, images, processes, misses, denied, summary }
}
