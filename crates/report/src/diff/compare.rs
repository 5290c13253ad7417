//! The tables of a comparison.

use gctrace_common::stats::Family;

use super::{
    blocks::{LEAST_SECONDS, Series, Times},
    by_method::{self, Kind, Part, Per, Row},
    figures::{self, CPUS, FEW, Figure, Least, Measured, NO_TIMES, SHORT, SINGLE, STEP, Unit, WAITED, WAITS},
    gather::{Requests, Side},
    lost::either,
    methods::ByMethod,
    prepared::Prepared,
    statistics,
};
use crate::words::plural;

/// Probability of calling anything in a table changed although nothing has changed. Six groups are judged separately, so it is below
/// 5 % for all of them.
pub const LEVEL: f64 = 0.005;

/// Smallest changes that are reported as such.
const LEAST_SHARE: Least = Least { absolute: 0.002, relative: 0.1 };
const LEAST_RATE: Least = Least { absolute: 0.02, relative: 0.1 };
const LEAST_TIME: Least = Least { absolute: 50_000.0, relative: 0.1 };
const LEAST_NUMBER: Least = Least { absolute: 0.01, relative: 0.1 };
const LEAST_METHOD: Least = Least { absolute: 0.005, relative: 0.05 };

/// Number of events below which the number is assumed to vary randomly.
const REGULAR: f64 = 30.0;
/// Minimum number of events beyond a quantile.
const BEYOND: f64 = 5.0;
/// Number of endpoints that are compared: those with the most requests.
const ENDPOINTS: usize = 30;

/// Rows about one subject.
#[derive(Clone, Debug)]
pub struct Table {
    /// Its name on the wire.
    pub key: &'static str,
    /// Its heading.
    pub title: &'static str,
    /// Its rows.
    pub rows: Vec<Row>,
    /// Why it has no rows.
    pub absent: Vec<String>,
    /// Which of its figures it lacks, and why.
    pub lacks: Vec<String>,
    /// Notes on what is compared.
    pub notes: Vec<String>,
}

impl Table {
    fn absent(key: &'static str, title: &'static str, absent: Vec<String>) -> Self {
        Self { key, title, rows: Vec::new(), absent, lacks: Vec::new(), notes: Vec::new() }
    }

    fn of(key: &'static str, title: &'static str, figures: impl IntoIterator<Item = Figure>) -> Self {
        let rows = figures.into_iter().map(|figure| Row { kind: Kind::All, figures: vec![figure] }).collect();
        Self { key, title, rows, absent: Vec::new(), lacks: Vec::new(), notes: Vec::new() }
    }
}

/// The comparison of two recordings.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// The tables.
    pub tables: Vec<Table>,
    /// Number of blocks of each recording, and their length in nanoseconds; `None`: it is too short for tests.
    pub blocks: [Option<(usize, u64)>; 2],
    /// Programs that only one of the recordings has, A's first.
    pub only: [Vec<String>; 2],
    /// Why nothing can be compared.
    pub nothing: Vec<String>,
}

/// Both recordings.
struct Both<'a> {
    a: Prepared<'a>,
    b: Prepared<'a>,
}

impl Both<'_> {
    fn both(&self, of: impl Fn(&Prepared<'_>) -> Measured) -> (Measured, Measured) {
        (of(&self.a), of(&self.b))
    }

    fn lacks(&self, of: impl Fn(&Side) -> Option<String>) -> Vec<String> {
        either(self.a.side, self.b.side, of)
    }

    fn share(&self, metric: &'static str, what: &'static str, of: fn(&Side) -> (&Series, &Series)) -> Figure {
        let measured = self.both(|of_one| {
            let (part, whole) = of(of_one.side);
            of_one.per_time(part, whole)
        });
        Figure::new(metric, what, Unit::Share, measured, LEAST_SHARE, SHORT)
    }

    /// Rate per second and process.
    fn rate(&self, metric: &'static str, what: &'static str, unit: Unit, of: fn(&Side) -> &Series) -> Figure {
        self.rate_of_part(metric, what, unit, of, |_| 1.0)
    }

    /// The same for events that were observed only in this part of the time.
    fn rate_of_part(
        &self,
        metric: &'static str,
        what: &'static str,
        unit: Unit,
        of: fn(&Side) -> &Series,
        part: fn(&Side) -> f64,
    ) -> Figure {
        let totals =
            [&self.a, &self.b].map(|one| (of(one.side).total(), one.side.time.total() * part(one.side)));
        let pooled = (totals[0].0 + totals[1].0) / (totals[0].1 + totals[1].1).max(1.0);
        let few = totals.iter().any(|(count, _)| *count < REGULAR) && unit == Unit::PerSecond;
        let measured = self.both(|one| {
            let mut measured = one.per_time(of(one.side), &one.side.time);
            let part = part(one.side);
            let by_chance = if few { pooled / (one.side.time.total() * part).max(1.0) } else { 0.0 };
            measured.estimate =
                measured.estimate.map(|of| of.scaled(1.0 / part).at_least(by_chance).scaled(1e9));
            Measured { value: measured.value.map(|value| value * 1e9 / part), ..measured }
        });
        Figure::new(metric, what, unit, measured, LEAST_RATE, SHORT)
    }

    fn quantile(
        &self,
        metric: &'static str,
        what: &'static str,
        quantile: f64,
        of: impl Fn(&Side) -> Option<&Times>,
    ) -> Figure {
        let measured =
            self.both(|one| of(one.side).map_or(Measured::default(), |times| one.quantile(times, quantile)));
        let mut figure = Figure::new(metric, what, Unit::Time, measured, LEAST_TIME, SHORT);
        let few = |side: &Side| of(side).is_none_or(|times| times.count as f64 * (1.0 - quantile) < BEYOND);
        if (few(self.a.side) || few(self.b.side)) && figure.change().is_some() {
            figure.untested(FEW);
        }
        if few(self.b.side) {
            // Nor can the figure be compared with a bound.
            figure.of_b = None;
            if figure.b.is_some() {
                figure.why_b = FEW;
            }
        } else if !metric.is_empty()
            && let (Some(times), Some(cut)) = (of(self.b.side), &self.b.cut)
        {
            figure.tail_of_b = Some(times.tail(quantile, cut));
        }
        figure
    }

    fn single(&self, what: &'static str, unit: Unit, of: fn(&Side) -> Option<f64>) -> Figure {
        let measured = self.both(|one| Measured::bare(of(one.side)));
        Figure::new("", what, unit, measured, LEAST_TIME, SINGLE)
    }

    fn process(&self) -> Table {
        let mut figures = Vec::new();
        let without = self.lacks(|side| side.without_samples().err());
        let mut lacks = Vec::new();
        if without.is_empty() {
            let measured = self.both(|one| one.per_time(&one.side.cpu.all, &one.side.time));
            figures.push(Figure::new(
                "cpu",
                "CPUs in use, per process",
                Unit::Number,
                measured,
                LEAST_NUMBER,
                SHORT,
            ));
        } else {
            lacks = without.iter().map(|why| format!("{CPUS}: {why}")).collect();
        }
        for side in [self.a.side, self.b.side] {
            let lost = side.ledger.lost_of(Family::Life);
            if lost > 0 {
                lacks.push(format!("some processes: {} lost {}", side.name, plural(lost, "process event")));
            }
        }
        figures.push(self.single("peak memory", Unit::Bytes, |side| side.peak_rss.map(|bytes| bytes as f64)));
        Table { lacks, ..Table::of("process", "PROCESS", figures) }
    }

    fn gc(&self) -> Table {
        let absent = self.lacks(Side::without_gc);
        if !absent.is_empty() {
            return Table::absent("gc", "GC", absent);
        }
        let pauses =
            |side: &Side| -> Option<f64> { (side.pauses.count > 0).then_some(side.pauses.max_ns as f64) };
        Table::of(
            "gc",
            "GC",
            [
                self.share("gc.share", "share of time in GC", |side| (&side.pause_ns, &side.time)),
                self.rate("gc.minor.rate", "minor cycles a second", Unit::PerSecond, |side| &side.minor),
                self.rate("gc.major.rate", "major cycles a second", Unit::PerSecond, |side| &side.major),
                self.quantile("gc.pause.p50", "pause, p50", 0.5, |side| Some(&side.pauses)),
                self.quantile("gc.pause.p99", "pause, p99", 0.99, |side| Some(&side.pauses)),
                self.single("pause, longest", Unit::Time, pauses),
            ],
        )
    }

    fn gvl(&self) -> Table {
        let mut absent = self.lacks(Side::without_gvl);
        if self.a.side.gvl.only_blocked != self.b.side.gvl.only_blocked && absent.is_empty() {
            absent.push("A and B watch different waits (--gvl and --gvl=futex)".to_owned());
        }
        if !absent.is_empty() {
            return Table::absent("gvl", "GVL", absent);
        }
        let share = self.both(|one| {
            let gvl = &one.side.gvl;
            let value = (gvl.watched_ns > 0).then(|| gvl.wait_ns as f64 / gvl.watched_ns as f64);
            if !gvl.has_blocks() {
                return Measured::bare(value);
            }
            // The value comes from the sums of threads; its variation comes from what was reported each second.
            let estimate = one.per_time(&gvl.waited, &gvl.time).estimate;
            let scaled = estimate.zip(value).map(|(estimate, value)| {
                let factor = if estimate.value > 0.0 { value / estimate.value } else { 1.0 };
                statistics::Estimate { value, ..estimate.scaled(factor) }
            });
            scaled.map_or(Measured::bare(value), Measured::of)
        });
        let why = |reported: bool| if reported { SHORT } else { NO_TIMES };
        let reported = [self.a.side, self.b.side].map(|side| side.gvl.has_blocks());
        let lacks = self.lacks(Side::without_gvl_sums);
        let mut figures = Vec::new();
        if lacks.is_empty() {
            let all = why(reported[0] && reported[1]);
            let mut figure = Figure::new("gvl.wait.share", WAITED, Unit::Share, share, LEAST_SHARE, all);
            if figure.b.is_some() {
                figure.why_b = why(reported[1]);
            }
            figures.push(figure);
        }
        let mut lacks_rates = self.lacks(Side::without_gvl_rates);
        if lacks_rates.is_empty() {
            lacks_rates = self.lacks(|side| {
                (!side.gvl.has_blocks()).then(|| side.lacks("has no waits by second of the chosen processes"))
            });
        }
        if lacks_rates.is_empty() {
            figures.push(self.rate_of_part(
                "gvl.wait.rate",
                WAITS,
                Unit::PerSecond,
                |side| &side.gvl.waits,
                |side| side.gvl_watched().unwrap_or(1.0),
            ));
        }
        // One reason for both is given once.
        let same = lacks == lacks_rates;
        let shares = lacks.iter().map(|why| format!("{WAITED}: {why}"));
        let rates = lacks_rates.iter().map(|why| format!("{WAITS}: {why}"));
        let each: Vec<String> = shares.chain(rates).collect();
        if figures.is_empty() {
            return Table::absent("gvl", "WAITING FOR THE GVL", if same { lacks } else { each });
        }
        let watched = [&self.a, &self.b].into_iter().filter_map(|one| {
            let part = one.side.gvl_watched().filter(|part| *part < 1.0)?;
            Some(one.side.lacks(&format!("was watched for {:.1} % of the time (CPU budget)", part * 100.0)))
        });
        Table { lacks: each, notes: watched.collect(), ..Table::of("gvl", "WAITING FOR THE GVL", figures) }
    }

    fn alloc(&self) -> Table {
        let absent = self.lacks(Side::without_alloc);
        if !absent.is_empty() {
            return Table::absent("alloc", "ALLOCATION", absent);
        }
        let objects =
            self.rate("alloc.objects.rate", "objects a second", Unit::PerSecond, |side| &side.objects);
        let bytes = self.rate("alloc.bytes.rate", "bytes a second", Unit::BytesPerSecond, |side| &side.bytes);
        Table::of("alloc", "ALLOCATION", [objects, bytes])
    }

    fn requests(&self) -> Table {
        let absent = self.lacks(Side::without_requests);
        if !absent.is_empty() {
            return Table::absent("requests", "REQUESTS", absent);
        }
        Table::of(
            "requests",
            "REQUESTS",
            [
                self.rate("request.rate", "requests a second", Unit::PerSecond, |side| &side.requests.count),
                self.quantile("request.p50", "duration, p50", 0.5, |side| Some(&side.requests.times)),
                self.quantile("request.p95", "duration, p95", 0.95, |side| Some(&side.requests.times)),
                self.share("request.gc.share", "share in GC", |side| {
                    (&side.requests.gc_ns, &side.requests.known_ns)
                }),
            ],
        )
    }

    fn endpoints(&self) -> Table {
        let (a, b) = (&self.a.side.endpoints, &self.b.side.endpoints);
        let count = |name: &String| -> u64 {
            [a, b].iter().filter_map(|all| all.get(name)).map(|of| of.times.count).sum()
        };
        let mut names: Vec<&String> =
            a.keys().chain(b.keys().filter(|name| !a.contains_key(*name))).collect();
        names.sort_by_key(|name| std::cmp::Reverse(count(name)));
        let shown = names.len().min(ENDPOINTS);
        let rows = names[..shown].iter().map(|name| {
            let share = self.both(|one| {
                let of = one.side.endpoints.get(*name);
                of.map_or(Measured::default(), |of| one.per_time(&of.gc_ns, &of.known_ns))
            });
            let rate = self.both(|one| {
                let value = |of: &Requests| of.count.total() * 1e9 / one.side.time.total().max(1.0);
                Measured::bare(one.side.endpoints.get(*name).map(value))
            });
            let figures = vec![
                self.endpoint_quantile("p50", 0.5, name),
                self.endpoint_quantile("p95", 0.95, name),
                Figure::new("", "GC", Unit::Share, share, LEAST_SHARE, SHORT),
                Figure::new("", "a second", Unit::PerSecond, rate, LEAST_RATE, NO_TIMES),
            ];
            Row { kind: Kind::Endpoint((*name).clone()), figures }
        });
        let rows = rows.collect();
        let lacks = match names.len() - shown {
            0 => Vec::new(),
            more => vec![format!("{} with fewer requests", plural(more as u64, "endpoint"))],
        };
        Table { key: "endpoints", title: "ENDPOINTS", rows, absent: Vec::new(), lacks, notes: Vec::new() }
    }

    fn endpoint_quantile(&self, what: &'static str, quantile: f64, name: &str) -> Figure {
        self.quantile("", what, quantile, |side| side.endpoints.get(name).map(|of| &of.times))
    }

    fn methods(&self, of: fn(&Side) -> &ByMethod, per: Per, least: Least, with_total: bool) -> Vec<Row> {
        let parts = [&self.a, &self.b].map(|one| Part { of: one, sums: of(one.side) });
        by_method::rows(parts, per, least, with_total)
    }

    fn by_method(&self) -> Vec<Table> {
        let mut tables = Vec::new();
        let mut table = |key, title, absent: Vec<String>, rows: &dyn Fn() -> Vec<Row>| {
            let rows = if absent.is_empty() { rows() } else { Vec::new() };
            tables.push(Table { key, title, rows, absent, lacks: Vec::new(), notes: Vec::new() });
        };
        let lost = [self.a.side, self.b.side].map(|side| side.without_samples().unwrap_or_default());
        let least = Least { absolute: LEAST_METHOD.absolute + lost[0] + lost[1], ..LEAST_METHOD };
        table("methods", "METHODS, CPU TIME", self.lacks(|side| side.without_samples().err()), &|| {
            self.methods(|side| &side.cpu, Per::All, least, true)
        });
        table("triggers", "WHAT STARTS GC, TIME OF PAUSES", self.lacks(Side::without_gc), &|| {
            let mut rows = self.methods(|side| &side.triggers, Per::All, LEAST_METHOD, false);
            // A loop and the growth of its heap lock into step, at a different line in each run.
            for figure in rows.iter_mut().flat_map(|row| &mut row.figures) {
                figure.untested(STEP);
            }
            rows
        });
        table("holders", "WHO HELD THE GVL IN LONG WAITS", self.lacks(Side::without_holders), &|| {
            self.methods(|side| &side.gvl.holders, Per::Time, LEAST_NUMBER, false)
        });
        table("off_cpu", "METHODS, OFF THE CPU", self.lacks(Side::without_wall), &|| {
            self.methods(|side| &side.off_cpu, Per::Time, LEAST_NUMBER, true)
        });
        table("allocating", "METHODS, ALLOCATION", self.lacks(Side::without_alloc), &|| {
            self.methods(|side| &side.allocating, Per::All, LEAST_METHOD, true)
        });
        tables
    }
}

impl Comparison {
    /// Compares two recordings.
    pub fn of(a: &mut Side, b: &mut Side) -> Self {
        let cuts = [&mut *a, &mut *b].map(|side| side.grid.cut(side.closed_ns));
        let (a, b) = (&*a, &*b);
        let only = |of: &Side, other: &Side| -> Vec<String> {
            of.programs.keys().filter(|name| !other.programs.contains_key(*name)).cloned().collect()
        };
        let mut comparison = Self {
            tables: Vec::new(),
            blocks: cuts.map(|cut| cut.map(|cut| (cut.blocks, cut.block_ns))),
            only: [only(a, b), only(b, a)],
            nothing: either(a, b, Side::empty),
        };
        if !comparison.nothing.is_empty() {
            return comparison;
        }
        let both = Both { a: Prepared { side: a, cut: cuts[0] }, b: Prepared { side: b, cut: cuts[1] } };
        let mut overall = vec![both.process(), both.gc(), both.gvl(), both.alloc(), both.requests()];
        let figures = overall.iter_mut().flat_map(|table| &mut table.rows).flat_map(|row| &mut row.figures);
        figures::judge(figures, LEVEL);
        let mut apart = both.by_method();
        if overall.iter().any(|table| table.key == "requests" && table.absent.is_empty()) {
            apart.insert(1, both.endpoints());
        }
        for table in &mut apart {
            figures::judge(table.rows.iter_mut().flat_map(|row| &mut row.figures), LEVEL);
            by_method::sort(&mut table.rows);
        }
        comparison.tables = overall;
        comparison.tables.extend(apart);
        comparison
    }

    /// Minimum length of a recording for changes to be tested, seconds.
    pub const fn least_seconds() -> f64 {
        LEAST_SECONDS
    }

    /// Every figure, with its row and table.
    pub fn figures(&self) -> impl Iterator<Item = (&Table, &Row, &Figure)> {
        self.tables.iter().flat_map(|table| {
            table.rows.iter().flat_map(move |row| row.figures.iter().map(move |figure| (table, row, figure)))
        })
    }
}
