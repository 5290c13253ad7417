//! Two parts of an application's figures side by side, by environment, Ruby version or host.

use std::{borrow::Cow, collections::BTreeMap};

use gctrace_pages::{
    Column, chart, table,
    words::{bytes, count, percent},
};
use maud::{Markup, html};

use super::{COLUMNS, Latest, Seen, Sum, Wanted, ago, environment_name, environment_text, named};
use crate::{printable::printable, store::Slot};

/// Maximum number of values offered for selection: those seen last.
const MAX_CHOICES: usize = 100;

/// The property in which the two parts differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    Environment,
    Ruby,
    Host,
}

impl By {
    const ALL: [Self; 3] = [Self::Environment, Self::Ruby, Self::Host];

    /// Its name in queries.
    fn key(self) -> &'static str {
        match self {
            Self::Environment => "env",
            Self::Ruby => "ruby",
            Self::Host => "host",
        }
    }

    fn noun(self) -> &'static str {
        match self {
            Self::Environment => "environments",
            Self::Ruby => "versions of Ruby",
            Self::Host => "hosts",
        }
    }

    /// The slot's value of this property. It is made printable, as a page cannot hold other characters.
    fn value(self, slot: &Slot) -> Cow<'_, str> {
        match self {
            Self::Environment => printable(&slot.environment),
            Self::Ruby => Cow::Owned(slot.series.to_string()),
            Self::Host => printable(&slot.host),
        }
    }

    /// Formats a value for display.
    fn shown(self, value: &str) -> String {
        match self {
            Self::Environment => environment_name(value),
            Self::Ruby => format!("Ruby {}", named(value)),
            Self::Host => named(value),
        }
    }

    /// Formats a value for a place where there may be little room.
    fn text(self, value: &str) -> Markup {
        match self {
            Self::Environment => environment_text(value),
            Self::Ruby | Self::Host => html! { (self.shown(value)) },
        }
    }
}

/// Two values to compare.
#[derive(Clone, Debug)]
pub(super) struct Pair {
    by: By,
    values: [String; 2],
}

impl Pair {
    /// Parses the parameters of a query such as `compare=host&a=web1&b=web2`.
    pub(super) fn parse(by: &str, one: String, other: String) -> Option<Self> {
        let by = By::ALL.into_iter().find(|known| known.key() == by)?;
        Some(Self { by, values: [one, other] })
    }
}

/// A form for each property with at least two values, and the comparison of the chosen pair.
pub(super) fn section(slots: &[Slot], seen: &Seen<'_>, since: i64, now: f64, wanted: &Wanted) -> Markup {
    let pair = wanted.compared.as_ref();
    let forms: Vec<Markup> =
        By::ALL.into_iter().filter_map(|by| form(by, &choices(slots, seen, by), wanted.days, pair)).collect();
    html! {
        @if !forms.is_empty() || pair.is_some() {
            h2 id="compare" { "Compare" }
            @for form in &forms { (form) }
            @if let Some(pair) = pair { (compared(slots, since, now, pair)) }
        }
    }
}

/// The values of all slots, those seen last first.
fn choices<'a>(slots: &'a [Slot], seen: &Seen<'_>, by: By) -> Vec<Cow<'a, str>> {
    let mut last: BTreeMap<Cow<'_, str>, Latest> = BTreeMap::new();
    for slot in slots {
        let at = seen.at(slot);
        last.entry(by.value(slot)).and_modify(|latest| *latest = latest.max(at)).or_insert(at);
    }
    let mut choices: Vec<_> = last.into_iter().collect();
    choices.sort_by(|(_, one), (_, other)| one.after(*other));
    choices.truncate(MAX_CHOICES);
    choices.into_iter().map(|(value, _)| value).collect()
}

fn form(by: By, choices: &[Cow<'_, str>], days: u32, pair: Option<&Pair>) -> Option<Markup> {
    if choices.len() < 2 {
        return None;
    }
    let pair = pair.filter(|pair| pair.by == by);
    let chosen = |at: usize| pair.map_or(&*choices[1 - at], |pair| &pair.values[at]);
    let select = |at: usize, name: &str, label: &str| {
        html! {
            label {
                (label) " "
                select name=(name) {
                    @for value in choices {
                        option value=(value) selected[*value == chosen(at)] { (by.shown(value)) }
                    }
                }
            }
        }
    };
    Some(html! {
        form method="get" action="?#compare" aria-label=(format!("Compare {}", by.noun())) {
            input type="hidden" name="days" value=(days);
            input type="hidden" name="compare" value=(by.key());
            (select(0, "a", &format!("Two {}:", by.noun())))
            (select(1, "b", "and"))
            button { "Compare" }
        }
    })
}

fn compared(slots: &[Slot], since: i64, now: f64, Pair { by, values }: &Pair) -> Markup {
    let names = values.each_ref().map(|value| by.text(value));
    let parts = values.each_ref().map(|value| {
        let of = |slot: &&Slot| by.value(slot) == value.as_str();
        slots.iter().filter(of).collect::<Vec<&Slot>>()
    });
    if let Some(at) = parts.iter().position(Vec::is_empty) {
        return html! { p { "No sample set of " strong { (names[at]) } " arrived in this time." } };
    }
    let sums = parts.each_ref().map(|slots| {
        let mut sum = Sum::default();
        for slot in slots {
            sum.add(slot);
        }
        sum
    });
    html! {
        p { "A: " strong { (names[0]) } "." br; "B: " strong { (names[1]) } "." }
        (side_by_side(["A", "B"], [&sums[0], &sums[1]]))
        div.charts {
            @for (name, slots) in ["A", "B"].iter().zip(&parts) {
                (share(&format!("{name}: share of the time in GC"), slots, since, now))
            }
        }
    }
}

/// A chart of the share of the time in GC over time.
fn share(title: &str, slots: &[&Slot], since: i64, now: f64) -> Markup {
    let span = (now - since as f64).max(1.0);
    let mut columns = vec![Sum::default(); COLUMNS];
    for slot in slots {
        columns[super::column(slot.at, since, span)].add(slot);
    }
    let axis = chart::Axis { columns: COLUMNS, ends: [ago(span), "now".to_owned()] };
    let values: Vec<_> = columns.iter().map(|sum| sum.figures.share().map(|share| share * 100.0)).collect();
    chart::line(title, &axis, &values, |value| format!("{value:.1} %"))
}

/// A table of the figures of two parts, under these names.
pub(super) fn side_by_side(names: [&'static str; 2], [one, other]: [&Sum; 2]) -> Markup {
    let per_cycle = |sum: &Sum| {
        let all: u64 = sum.figures.classes.iter().sum();
        (all > 0).then(|| sum.figures.gc_ms as f64 / all as f64)
    };
    let factor = |before: Option<f64>, after: Option<f64>| match (before, after) {
        (Some(before), Some(after)) if before > 0.0 => format!("× {:.2}", after / before),
        _ => "–".to_owned(),
    };
    let shown = |value: Option<f64>, text: fn(f64) -> String| value.map_or_else(|| "–".to_owned(), text);
    let known = |value: u64| (value > 0).then_some(value as f64);
    let of = |what: &str, before: Option<f64>, after: Option<f64>, text: fn(f64) -> String| {
        vec![
            html! { (what) },
            html! { (shown(before, text)) },
            html! { (shown(after, text)) },
            html! { (factor(before, after)) },
        ]
    };
    let (b, a) = (&one.figures, &other.figures);
    let rows = [
        of("Share of the time in GC", b.share(), a.share(), percent),
        of("Time in GC per cycle", per_cycle(one), per_cycle(other), |ms| format!("{ms:.2} ms")),
        of("Largest heap, slots", known(b.slots), known(a.slots), |slots| count(slots as u64)),
        of("Most memory of a process", known(b.rss), known(a.rss), |rss| bytes(rss as u64)),
    ];
    let columns = [
        Column::Text("Figure"),
        Column::Number(names[0]),
        Column::Number(names[1]),
        Column::Number("Change"),
    ];
    table("Other load makes other figures, too", &columns, &rows)
}
