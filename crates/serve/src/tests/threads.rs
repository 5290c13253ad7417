//! Threads that run one after the other on one native thread.

use std::sync::{Arc, Mutex};

use gctrace_common::event::WorkPhase;
use gctrace_cruby::ruby::{RubyVersion, fallback::Method};
use gctrace_report::{
    export::{ExportError, Exporter, Outputs},
    ledger::Ledger,
    model::{
        GcWork, Process,
        gvl::{GvlCoverage, GvlSums, GvlThreadSummary, GvlTimes, GvlWho},
        seen::Seen,
    },
    trace_file::{self, Recording, Subjects},
};

use super::GOLDEN;
use crate::{
    columns::Columns,
    figures::Figures,
    page::{
        charts,
        tables::{self, seen_of_gc},
    },
};

/// Keeps the first process that it sees.
#[derive(Clone, Default)]
struct First(Arc<Mutex<Option<Process>>>);

impl Exporter for First {
    fn see(&mut self, process: &Process, _: Seen<'_>) -> Result<(), ExportError> {
        self.0.lock().unwrap().get_or_insert_with(|| process.clone());
        Ok(())
    }

    fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
        Ok(())
    }
}

/// A process with this version of Ruby, whose GC is traced by this method.
fn process(version: RubyVersion, method: Method) -> Process {
    let first = First::default();
    let mut outputs = Outputs::new(vec![Box::new(first.clone())]);
    trace_file::replay(&mut Recording::open(GOLDEN.as_ref()).unwrap(), &mut outputs).unwrap();
    let mut process = first.0.lock().unwrap().clone().unwrap();
    let image = Arc::make_mut(&mut process.image);
    (image.version, image.method) = (version, method);
    process
}

/// What is known of the GC of a Ruby without event sites: a part that lies inside another one counts once.
#[test]
fn parts_of_pauses() {
    const MS: u64 = 1_000_000;
    let seen = |version, method, parts: &[(WorkPhase, u64, u64)]| {
        let process = process(version, method);
        let mut figures = Figures::new(Columns::new(0, Some(10 * MS)));
        for &(phase, from, to) in parts {
            let (begin_ns, ns) = (from * MS, (to - from) * MS);
            figures.see(&process, Seen::Work(&GcWork { phase, tid: 7, comm: "ruby".into(), begin_ns, ns }));
        }
        let own = figures.threads[&(process.pid, 7)].did.as_ref().unwrap().sum().gc;
        let drawn = figures.lanes.columns.sum().pause_ns;
        assert_eq!(own, drawn);
        (figures.processes[0].gc_ns() / MS, drawn / MS, figures.stops.max_ns() / MS)
    };
    let nested = [(WorkPhase::Continue, 4, 9), (WorkPhase::Start, 0, 10)];
    assert_eq!(seen(RubyVersion::new(3, 1, 2), Method::Functions, &nested), (10, 10, 0));
    // `gc_continue` of later versions is not inside another one.
    let after = [(WorkPhase::Start, 0, 4), (WorkPhase::Continue, 4, 9)];
    assert_eq!(seen(RubyVersion::new(3, 2, 0), Method::Functions, &after), (5, 9, 0));
    let pauses = [(WorkPhase::Pause, 0, 4), (WorkPhase::Pause, 6, 8)];
    assert_eq!(seen(RubyVersion::new(4, 1, 0), Method::UsdtPauses, &pauses), (6, 6, 4));
}

/// Cycles and pauses that are not seen of a Ruby are not shown as 0.
#[test]
fn unseen() {
    for (method, expected) in [
        (Method::Sites, ["0", "0", "0"]),
        (Method::UsdtPauses, ["–", "0", "0"]),
        (Method::Usdt, ["–", "0", "–"]),
    ] {
        let process = process(RubyVersion::new(3, 1, 2), method);
        let mut figures = Figures::new(Columns::new(0, Some(1)));
        figures.see(&process, Seen::Process { state: None, now_ns: 0, since_ns: 0 });
        let shown = seen_of_gc(&figures.processes[0]).map(|shown| shown.0);
        assert_eq!(shown, expected, "{method:?}");
        assert_eq!(figures.sees_cycles(), method == Method::Sites);
    }
}

/// Nor are those of threads, and the longest pauses have no lane.
#[test]
fn unseen_of_threads() {
    const MS: u64 = 1_000_000;
    let subjects = Subjects { samples: false, wall: false, gvl: false, requests: false, alloc: false };
    let shown = |method, parts: &[(WorkPhase, u64, u64)]| {
        let process = process(RubyVersion::new(3, 1, 2), method);
        let mut figures = Figures::new(Columns::new(0, Some(10 * MS)));
        figures.see(&process, Seen::Process { state: None, now_ns: 0, since_ns: 0 });
        for &(phase, from, to) in parts {
            let (begin_ns, ns) = (from * MS, (to - from) * MS);
            figures.see(&process, Seen::Work(&GcWork { phase, tid: 7, comm: "ruby".into(), begin_ns, ns }));
        }
        figures.settle(10 * MS);
        let page = tables::threads(&figures, subjects).0;
        let row = page.split("<tr>").find(|row| row.contains("ruby")).unwrap();
        let cells = row.split("</td>").filter_map(|cell| cell.rsplit('>').next()).map(str::to_owned);
        let cells: Vec<String> = cells.filter(|cell| !cell.trim().is_empty()).collect();
        let times = charts::over_time(&figures, subjects, (0.0, 0.01), &[]).0;
        (cells, times.contains("GC: longest pause"))
    };
    let cells = |pauses: &str, time: &str| vec![pauses.to_owned(), time.to_owned()];
    let nested = [(WorkPhase::Continue, 4, 8), (WorkPhase::Start, 0, 10)];
    assert_eq!(shown(Method::Functions, &nested), (cells("–", "10.00 ms"), false));
    assert_eq!(shown(Method::Functions, &nested[..1]), (cells("–", "–"), false));
    let marked = [(WorkPhase::Mark, 0, 5)];
    assert_eq!(shown(Method::Usdt, &marked), (cells("–", "5.00 ms"), false));
    let pauses = [(WorkPhase::Pause, 0, 4), (WorkPhase::Pause, 6, 8)];
    assert_eq!(shown(Method::UsdtPauses, &pauses), (cells("2", "6.00 ms"), true));
}

/// The GVL shares of a native thread are those of all Ruby threads that it ran.
#[test]
fn shares_of_all() {
    let process = process(RubyVersion::new(3, 1, 2), Method::Sites);
    let mut figures = Figures::new(Columns::new(0, None));
    for (id, seconds, waited) in [(1, 60, 54), (2, 1, 0)] {
        let ns = |seconds: u64| seconds * 1_000_000_000;
        let thread = GvlThreadSummary {
            coverage: GvlCoverage::default(),
            who: GvlWho { tid: 7, comm: "worker".into() },
            id,
            last: None,
            thread: None,
            begin_ns: 1,
            end_ns: 1 + ns(seconds),
            ended: true,
            sums: GvlSums {
                wall_ns: ns(seconds),
                watched_ns: ns(seconds),
                wait: GvlTimes { count: 1, ns: ns(waited), max_ns: ns(waited) },
                ..GvlSums::default()
            },
        };
        figures.see(&process, Seen::GvlThread(&thread));
    }
    let of = &figures.threads[&(process.pid, 7)];
    let sums = of.gvl.as_ref().unwrap();
    assert_eq!((sums.watched_ns, sums.wait.ns), (61_000_000_000, 54_000_000_000));
}
