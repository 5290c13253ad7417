//! Rows by method.

use std::collections::BTreeSet;

use super::{
    blocks::Series,
    figures::{FEW, Figure, Least, Measured, SHORT, Unit, Verdict},
    methods::{ByMethod, Method, Sums},
    prepared::Prepared,
    statistics,
};

/// Minimum share of the total weight of both recordings for a method to have a row.
const LEAST_PART: f64 = 0.005;
/// Minimum number of stacks in both recordings together for a change to be tested.
const LEAST_STACKS: u64 = 20;

/// What a row is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// All processes together; the figure has the description.
    All,
    /// A method.
    Method(Method),
    /// An endpoint.
    Endpoint(String),
}

/// A row of a table.
#[derive(Clone, Debug)]
pub struct Row {
    /// What the row is about.
    pub kind: Kind,
    /// Its figures, most important first.
    pub figures: Vec<Figure>,
}

/// What the weight of a method is divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Per {
    /// The total weight: the figure is a share.
    All,
    /// The processes' time: the figure is a number of threads.
    Time,
}

/// One by-method table of a recording.
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    pub(super) of: &'a Prepared<'a>,
    pub(super) sums: &'a ByMethod,
}

impl Part<'_> {
    /// What a method's weight is divided by.
    fn whole(&self, per: Per) -> &Series {
        if per == Per::All { &self.sums.all } else { &self.of.side.time }
    }

    fn measured(&self, series: Option<&Series>, per: Per, least_variance: f64) -> Measured {
        let whole = self.whole(per);
        let total = whole.total();
        if total <= 0.0 {
            return Measured::default();
        }
        let value = series.map_or(0.0, Series::total) / total;
        let Some(cut) = &self.of.cut else { return Measured::bare(Some(value)) };
        let parts = series.map_or_else(|| vec![0.0; cut.blocks], |series| series.blocks(cut));
        match statistics::ratio(parts.into_iter().zip(whole.blocks(cut))) {
            Some(estimate) => Measured::of(estimate.at_least(least_variance)),
            None => Measured::bare(Some(value)),
        }
    }
}

/// One figure of a method: its own weight, or its weight including callees.
fn figure(
    what: &'static str,
    method: &Method,
    parts: [Part<'_>; 2],
    series: fn(&Sums) -> &Series,
    per: Per,
    least: Least,
) -> Figure {
    let sums = parts.map(|part| part.sums.get(method));
    let found = sums.map(|sums| sums.map(series));
    let stacks: u64 = sums.into_iter().flatten().map(|sums| sums.stacks).sum();
    let weight: f64 = found.into_iter().flatten().map(Series::total).sum();
    let wholes = parts.map(|part| part.whole(per).total());
    let pooled = weight / wholes.iter().sum::<f64>().max(1.0);
    // The minimum variance of each recording, that of independent stacks: the true one may be higher, and it is not lower
    // because a recording has no such stacks.
    let least_variance = |at: usize| match per {
        Per::All => pooled * (1.0 - pooled).max(0.0) / parts[at].sums.stacks.max(1) as f64,
        Per::Time => pooled * (weight / stacks.max(1) as f64) / wholes[at].max(1.0),
    };
    let measured = [0, 1].map(|at| parts[at].measured(found[at], per, least_variance(at)));
    let unit = if per == Per::All { Unit::Share } else { Unit::Number };
    let mut figure = Figure::new("", what, unit, measured.into(), least, SHORT);
    if stacks < LEAST_STACKS {
        figure.untested(FEW);
    }
    figure
}

/// Rows of the methods whose share of the total of both recordings is at least [`LEAST_PART`]: their own weight and, with `with_total`,
/// their weight including callees.
pub(super) fn rows(parts: [Part<'_>; 2], per: Per, least: Least, with_total: bool) -> Vec<Row> {
    let methods: BTreeSet<&Method> = parts.iter().flat_map(|part| part.sums.methods()).collect();
    let all: f64 = parts.iter().map(|part| part.sums.all.total()).sum();
    let weight = |method: &Method| -> f64 {
        parts.iter().filter_map(|part| part.sums.get(method)).map(|sums| sums.total.total()).sum()
    };
    let rows = methods.into_iter().filter(|method| weight(method) >= all * LEAST_PART && all > 0.0);
    rows.map(|method| {
        let own = figure("self", method, parts, |sums| &sums.own, per, least);
        let total = with_total.then(|| figure("total", method, parts, |sums| &sums.total, per, least));
        Row { kind: Kind::Method(method.clone()), figures: std::iter::once(own).chain(total).collect() }
    })
    .collect()
}

/// Sorts rows: real changes first, increases before decreases, larger before smaller.
pub(super) fn sort(rows: &mut [Row]) {
    let rank = |row: &Row| {
        let of = |figure: &Figure| match figure.verdict {
            Verdict::Grew => 0,
            Verdict::Shrank => 2,
            Verdict::Noise | Verdict::Untested(_) => 4,
        };
        // A method that grew itself comes before methods that only call one that did.
        row.figures
            .iter()
            .enumerate()
            .map(|(at, figure)| of(figure) + u8::from(at > 0 && of(figure) < 4))
            .min()
    };
    let size = |row: &Row| {
        let real = row.figures.iter().find(|figure| figure.verdict.is_real()).or(row.figures.first());
        let of = |figure: &Figure| figure.a.unwrap_or(0.0).max(figure.b.unwrap_or(0.0));
        let change = real.and_then(Figure::change).unwrap_or(0.0).abs();
        if real.is_some_and(|figure| figure.verdict.is_real()) {
            change
        } else {
            // Rows without a change are sorted by size.
            row.figures.iter().map(of).fold(0.0, f64::max)
        }
    };
    rows.sort_by(|one, other| rank(one).cmp(&rank(other)).then_with(|| size(other).total_cmp(&size(one))));
}
