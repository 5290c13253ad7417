//! Rows of the table: what a column shows, and how rows are sorted and filtered. Pure.

use std::{cmp::Ordering, sync::Arc};

/// What a row represents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Group {
    /// A process.
    #[default]
    Process,
    /// All processes of a service.
    Service,
    /// All processes in a container.
    Container,
    /// All requests of an endpoint, over all processes.
    Endpoint,
}

/// Optional events that are traced, because they cost more than the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traced {
    /// Requests and jobs.
    pub requests: bool,
    /// The GVL.
    pub gvl: bool,
}

impl Group {
    /// The next kind of group.
    pub(super) fn next(self, traced: Traced) -> Self {
        match self {
            Self::Process => Self::Service,
            Self::Service => Self::Container,
            Self::Container if traced.requests => Self::Endpoint,
            Self::Container | Self::Endpoint => Self::Process,
        }
    }

    /// Its name in the singular.
    pub(super) fn singular(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Service => "service",
            Self::Container => "container",
            Self::Endpoint => "endpoint",
        }
    }

    /// Its name in the plural.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Process => "processes",
            Self::Service => "services",
            Self::Container => "containers",
            Self::Endpoint => "endpoints",
        }
    }
}

/// A row. Unknown values are `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Row {
    /// Pid, if it represents a process.
    pub pid: Option<u32>,
    /// Number of processes that it represents.
    pub processes: usize,
    /// Program, service, container or endpoint.
    pub name: String,
    /// Its service.
    pub service: String,
    /// Its container.
    pub container: Option<String>,
    /// Ruby's version.
    pub ruby: String,
    /// CPU time of the last second, percent of one CPU.
    pub cpu: Option<f64>,
    /// Time stopped for GC in the last 10 s, percent; for an endpoint, relative to the time of its requests.
    pub gc: Option<f64>,
    /// 99th percentile of the pauses of the last minute, nanoseconds.
    pub p99_ns: Option<u64>,
    /// The longest of these pauses, nanoseconds.
    pub max_ns: Option<u64>,
    /// Total time that threads waited for the GVL in the last 10 s, percent of that time; for an endpoint, relative to the time of its
    /// requests.
    pub gvl: Option<f64>,
    /// Objects allocated per second between cycles of the last five seconds, or between the last two.
    pub alloc: Option<f64>,
    /// Resident set size, bytes.
    pub rss: Option<u64>,
    /// Live slots at the end of the last cycle.
    pub live: Option<u64>,
    /// Free slots at that time.
    pub free: Option<u64>,
    /// Requests and jobs that ended per second, in the last ten seconds.
    pub requests: Option<f64>,
    /// 99th percentile of the times of those that ended in the last minute, nanoseconds.
    pub request_p99_ns: Option<u64>,
    /// Number of requests seen since the process is traced; for an endpoint, of those whose times are kept.
    pub requests_seen: u64,
    /// Endpoints of the last minute, if it represents a process.
    pub endpoints: Vec<Arc<str>>,
    /// Number of cycles seen, if this Ruby's cycles are.
    pub cycles: Option<u64>,
    /// Microseconds of pauses in each second of the last minute, oldest first.
    pub spark: Vec<u64>,
}

/// A column by which rows can be sorted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Column {
    /// Pid.
    Pid,
    /// CPU.
    #[default]
    Cpu,
    /// Share of GC.
    Gc,
    /// 99th percentile of pauses.
    P99,
    /// Longest pause.
    Max,
    /// Waiting for the GVL.
    Gvl,
    /// Allocation rate.
    Alloc,
    /// Memory.
    Rss,
    /// Live slots.
    Live,
    /// Free slots.
    Free,
    /// Requests per second.
    Requests,
    /// 99th percentile of the times of requests.
    RequestP99,
    /// Name.
    Name,
}

impl Column {
    /// All columns, in the order of the screen.
    pub(super) const ALL: [Self; 13] = [
        Self::Pid,
        Self::Cpu,
        Self::Gc,
        Self::P99,
        Self::Max,
        Self::Gvl,
        Self::Alloc,
        Self::Rss,
        Self::Live,
        Self::Free,
        Self::Requests,
        Self::RequestP99,
        Self::Name,
    ];

    /// The columns of a screen of this width, including `sort`. A wider screen has all columns of a narrower one.
    pub(super) fn shown(width: u16, group: Group, traced: Traced, sort: Self) -> Vec<Self> {
        let fits = |without: &[Self]| {
            let all = Self::ALL.into_iter().filter(|column| !without.contains(column));
            all.clone().map(Self::width).sum::<u16>() <= width
        };
        let mut without = Vec::new();
        if !traced.requests {
            without.extend([Self::Requests, Self::RequestP99]);
        }
        if group == Group::Endpoint {
            without.extend([Self::Cpu, Self::P99, Self::Max, Self::Alloc, Self::Rss, Self::Live, Self::Free]);
        }
        // The least informative columns are removed first.
        let gvl = if traced.gvl { Self::Alloc } else { Self::Gvl };
        for column in [
            gvl,
            Self::Free,
            Self::Live,
            Self::P99,
            Self::Rss,
            Self::Alloc,
            Self::Max,
            Self::Pid,
            Self::Requests,
            Self::Cpu,
            Self::RequestP99,
            Self::Gvl,
            Self::Gc,
        ] {
            if column != sort && !fits(&without) {
                without.push(column);
            }
        }
        Self::ALL.into_iter().filter(|column| !without.contains(column)).collect()
    }

    /// Its heading.
    pub(super) fn heading(self) -> &'static str {
        match self {
            Self::Pid => "PID",
            Self::Cpu => "CPU%",
            Self::Gc => "GC%",
            Self::P99 => "P99",
            Self::Max => "MAX",
            Self::Gvl => "GVL%",
            Self::Alloc => "ALLOC/s",
            Self::Rss => "RSS",
            Self::Live => "LIVE",
            Self::Free => "FREE",
            Self::Requests => "REQ/s",
            Self::RequestP99 => "REQ99",
            Self::Name => "PROGRAM",
        }
    }

    /// Its width; the name gets the rest.
    pub(super) fn width(self) -> u16 {
        match self {
            Self::Pid => 8,
            Self::Cpu | Self::Gc | Self::Gvl => 6,
            Self::Alloc => 9,
            Self::Requests
            | Self::RequestP99
            | Self::P99
            | Self::Max
            | Self::Rss
            | Self::Live
            | Self::Free => 7,
            Self::Name => 10,
        }
    }

    /// The column `by` columns to the right, or to the left if negative, among `shown`.
    pub(super) fn moved(self, by: isize, shown: &[Self]) -> Self {
        let at = shown.iter().position(|column| *column == self).unwrap_or(0) as isize;
        let at = (at + by).rem_euclid(shown.len().max(1) as isize);
        shown.get(at as usize).copied().unwrap_or(self)
    }

    /// The text of a row in this column.
    pub(super) fn text(self, row: &Row) -> String {
        let shown = match self {
            Self::Pid => row.pid.map(|pid| pid.to_string()).or_else(|| Some(format!("×{}", row.processes))),
            Self::Cpu => row.cpu.map(share),
            Self::Gc => row.gc.map(share),
            Self::P99 => row.p99_ns.map(time),
            Self::Max => row.max_ns.map(time),
            Self::Gvl => row.gvl.map(share),
            Self::Alloc => row.alloc.map(count),
            Self::Rss => row.rss.map(|bytes| memory(bytes as f64)),
            Self::Live => row.live.map(|slots| count(slots as f64)),
            Self::Free => row.free.map(|slots| count(slots as f64)),
            Self::Requests => row.requests.map(rate),
            Self::RequestP99 => row.request_p99_ns.map(time),
            Self::Name => Some(gctrace_tunemygc::printable::printable(&row.name).into_owned()),
        };
        shown.unwrap_or_else(|| "-".to_owned())
    }

    fn compare(self, one: &Row, two: &Row) -> Ordering {
        fn known<T: PartialOrd>(one: Option<&T>, two: Option<&T>) -> Ordering {
            two.partial_cmp(&one).unwrap_or(Ordering::Equal)
        }
        match self {
            Self::Pid => one.pid.cmp(&two.pid),
            Self::Cpu => known(one.cpu.as_ref(), two.cpu.as_ref()),
            Self::Gc => known(one.gc.as_ref(), two.gc.as_ref()),
            Self::P99 => known(one.p99_ns.as_ref(), two.p99_ns.as_ref()),
            Self::Max => known(one.max_ns.as_ref(), two.max_ns.as_ref()),
            Self::Gvl => known(one.gvl.as_ref(), two.gvl.as_ref()),
            Self::Alloc => known(one.alloc.as_ref(), two.alloc.as_ref()),
            Self::Rss => known(one.rss.as_ref(), two.rss.as_ref()),
            Self::Live => known(one.live.as_ref(), two.live.as_ref()),
            Self::Free => known(one.free.as_ref(), two.free.as_ref()),
            Self::Requests => known(one.requests.as_ref(), two.requests.as_ref()),
            Self::RequestP99 => known(one.request_p99_ns.as_ref(), two.request_p99_ns.as_ref()),
            Self::Name => one.name.cmp(&two.name),
        }
    }
}

/// Sorts rows: largest first, unknown values last, names and pids ascending; `reversed` reverses this.
pub(super) fn sort(rows: &mut [Row], by: Column, reversed: bool) {
    rows.sort_by(|one, two| {
        let order = by.compare(one, two);
        let order = if reversed { order.reverse() } else { order };
        order.then_with(|| one.pid.cmp(&two.pid)).then_with(|| one.name.cmp(&two.name))
    });
}

/// The group of processes outside containers.
pub(super) const ON_HOST: &str = "(host)";

/// Whether the row of a process belongs to a group: its service, its container, or an endpoint that it serves.
pub(super) fn belongs(row: &Row, (group, name): &(Group, String)) -> bool {
    match group {
        Group::Process => row.name == *name,
        Group::Service => row.service == *name,
        Group::Container => row.container.as_deref().unwrap_or(ON_HOST) == name,
        Group::Endpoint => row.endpoints.iter().any(|endpoint| **endpoint == **name),
    }
}

/// Whether a row contains the text in its name, service, container, version, pid or endpoints.
pub(super) fn matches(row: &Row, filter: &str) -> bool {
    let filter = filter.to_lowercase();
    let pid = row.pid.map(|pid| pid.to_string());
    let texts = [Some(&row.name), Some(&row.service), row.container.as_ref(), Some(&row.ruby), pid.as_ref()];
    let has = |text: &str| text.to_lowercase().contains(&filter);
    texts.into_iter().flatten().any(|text| has(text)) || row.endpoints.iter().any(|endpoint| has(endpoint))
}

/// A share in percent: `7.3`, `100`.
pub(super) fn share(percent: f64) -> String {
    if percent >= 99.95 { format!("{percent:.0}") } else { format!("{percent:.1}") }
}

/// A rate: `0.4`, `37.5`; larger ones as [`count`] formats them.
pub(super) fn rate(number: f64) -> String {
    if number < 99.95 { format!("{number:.1}") } else { count(number) }
}

/// A time with at least three digits, at most six characters up to 27 hours: `870us`, `12.3ms`, `1.20s`, `234.6s`.
pub(super) fn time(ns: u64) -> String {
    let us = ns as f64 / 1e3;
    match us {
        ..9.995 => format!("{us:.1}us"),
        ..999.5 => format!("{us:.0}us"),
        ..9_995.0 => format!("{:.2}ms", us / 1e3),
        ..99_950.0 => format!("{:.1}ms", us / 1e3),
        ..999_500.0 => format!("{:.0}ms", us / 1e3),
        ..99_995_000.0 => format!("{:.2}s", us / 1e6),
        ..999_950_000.0 => format!("{:.1}s", us / 1e6),
        _ => format!("{:.0}s", us / 1e6),
    }
}

/// A number with three digits: `870`, `12.3k`, `1.20M`.
pub(super) fn count(number: f64) -> String {
    scaled(number, 1000.0)
}

/// A number of bytes; `M` is 2^20, as in all texts.
pub(super) fn memory(bytes: f64) -> String {
    scaled(bytes, 1024.0)
}

fn scaled(mut number: f64, step: f64) -> String {
    let mut unit = "";
    for larger in ["k", "M", "G"] {
        if number < 999.5 {
            break;
        }
        (number, unit) = (number / step, larger);
    }
    if unit.is_empty() {
        return format!("{number:.0}");
    }
    match number {
        ..9.995 => format!("{number:.2}{unit}"),
        ..99.95 => format!("{number:.1}{unit}"),
        _ => format!("{number:.0}{unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A long time keeps its first digit.
    #[test]
    fn long_times() {
        let seconds = [88.888, 99.994, 99.995, 234.56, 999.94, 999.95, 86_400.0];
        let texts = seconds.map(|seconds: f64| time((seconds * 1e9) as u64));
        assert_eq!(texts, ["88.89s", "99.99s", "100.0s", "234.6s", "999.9s", "1000s", "86400s"]);
    }

    /// Every number fits its column; an unknown value is a dash.
    #[test]
    fn texts() {
        let numbers = [0, 999, 1000, 9_999, 99_999, 999_999, 99_999_999, 999_999_999, 88_888_888_888];
        for n in numbers {
            let row = Row {
                p99_ns: Some(n),
                max_ns: Some(n),
                alloc: Some(n as f64),
                rss: Some(n),
                live: Some(n),
                free: Some(n),
                requests: Some(n as f64),
                request_p99_ns: Some(n),
                ..Row::default()
            };
            for column in Column::ALL {
                let text = column.text(&row);
                assert!(text.chars().count() < usize::from(column.width()), "{column:?} {n}: {text}");
            }
        }
        assert_eq!(
            (time(870_400), time(12_345_678), time(1_204_000_000)),
            ("870us".into(), "12.3ms".into(), "1.20s".into())
        );
        assert_eq!(
            (count(870.0), count(12_345.0), count(1_204_000.0)),
            ("870".into(), "12.3k".into(), "1.20M".into())
        );
        assert_eq!((share(7.34), share(100.0)), ("7.3".into(), "100".into()));
        let empty = Row::default();
        let unknown = Column::ALL.into_iter().filter(|column| column.text(&empty) == "-");
        assert_eq!(unknown.count(), 11);
        assert!(!Column::Name.text(&Row { name: "a\x1b[2J".into(), ..Row::default() }).contains('\x1b'));
    }

    /// 80 columns have room for a name whatever is traced, and requested columns are shown. 40 columns have room for a name, too.
    #[test]
    fn columns() {
        for (requests, gvl) in [(false, false), (false, true), (true, false), (true, true)] {
            let traced = Traced { requests, gvl };
            for (width, group) in [(80, Group::Process), (80, Group::Endpoint), (200, Group::Process)] {
                let shown = Column::shown(width, group, traced, Column::Gc);
                assert!(shown.iter().map(|column| column.width()).sum::<u16>() <= width, "{shown:?}");
                assert_eq!(shown.contains(&Column::Requests), requests);
                assert!(shown.contains(&Column::Gvl) || !gvl);
                assert_eq!(shown.last(), Some(&Column::Name));
            }
            for group in [Group::Process, Group::Endpoint] {
                for sort in Column::shown(u16::MAX, group, traced, Column::Gc) {
                    let shown = Column::shown(40, group, traced, sort);
                    assert!(shown.iter().map(|column| column.width()).sum::<u16>() <= 40, "{shown:?}");
                    assert!(shown.contains(&Column::Gc) && shown.contains(&sort), "{sort:?} {shown:?}");
                    assert_eq!(shown.last(), Some(&Column::Name));
                }
            }
        }
        let all = Traced { requests: true, gvl: true };
        assert_eq!(Column::shown(200, Group::Process, all, Column::Cpu), Column::ALL);
        assert_eq!(Group::Container.next(Traced::default()), Group::Process);
    }

    /// The largest value is first, and unknown ones are last; equal rows keep their order.
    #[test]
    fn sorting() {
        let row = |pid, gc| Row { pid: Some(pid), gc, name: format!("n{pid}"), ..Row::default() };
        let mut rows = vec![row(3, None), row(2, Some(1.0)), row(1, Some(5.0)), row(4, Some(1.0))];
        let order = |rows: &[Row]| rows.iter().filter_map(|row| row.pid).collect::<Vec<_>>();
        sort(&mut rows, Column::Gc, false);
        assert_eq!(order(&rows), [1, 2, 4, 3]);
        sort(&mut rows, Column::Pid, true);
        assert_eq!(order(&rows), [4, 3, 2, 1]);
        assert_eq!(Column::Pid.moved(-1, &Column::ALL), Column::Name);
        assert_eq!(Column::Cpu.moved(1, &Column::ALL), Column::Gc);
        assert_eq!(Column::Free.moved(1, &[Column::Pid, Column::Cpu]), Column::Cpu);
        assert!(matches(&rows[0], "N4") && matches(&rows[0], "4") && !matches(&rows[0], "x"));
    }
}
