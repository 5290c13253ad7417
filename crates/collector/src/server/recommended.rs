//! Recommendations for an application, as people read them.

use std::collections::BTreeSet;

use gctrace_pages::{setting_lines, settings};
use maud::{Markup, html};

use super::{Shared, advice::Advice, history};
use crate::{
    printable::printable_lines,
    store::{App, Group, StoreError},
    tune::{Series, Strategy},
};

/// The recommendations for an application.
pub(super) struct Recommended {
    /// The Ruby that they are for.
    pub(super) series: Series,
    /// Lines for a shell, for each strategy.
    pub(super) exports: [(Strategy, String); 2],
    /// A message if several environments are in force at the same time.
    pub(super) concurrent: Option<String>,
    /// The reasons.
    pub(super) report: String,
    /// Earlier advice and its effect.
    pub(super) history: Vec<history::Event>,
}

/// The recommendations for an application, for the Ruby of its latest set if none is named; `None` if no such set has arrived yet.
pub(super) fn recommended(
    shared: &Shared,
    app: App,
    series: Option<Series>,
) -> Result<Option<Recommended>, StoreError> {
    let group = match series {
        Some(series) => Some(Group { app, series }),
        None => shared.store.latest_group(app)?,
    };
    let advice = group.map(|group| Advice::of(shared, group, None)).transpose()?.flatten();
    let Some(advice) = advice else { return Ok(None) };
    history::give(shared, &advice, &advice.report.plans);
    let own = |name: &str, value: f64| advice.is_own(name, value);
    let exports = Strategy::ALL.map(|strategy| (strategy, advice.report.to_exports(strategy, &own)));
    let report = printable_lines(&advice.report.to_string()).into_owned();
    let concurrent = advice.report.concurrent();
    let series = advice.group.series;
    Ok(Some(Recommended { series, exports, concurrent, report, history: history::of(shared, &advice)? }))
}

/// Recommendations as a section of a page. `all`: the Rubies of the application; `to`: the address of the page with those for one of them.
pub(super) fn section(
    advice: Option<&Recommended>,
    all: &BTreeSet<Series>,
    to: &dyn Fn(Series) -> String,
) -> Markup {
    html! {
        h2 { "What to set" }
        @if all.len() > 1 {
            nav aria-label="Ruby" {
                @for series in all {
                    @let shown = advice.is_some_and(|advice| advice.series == *series);
                    a href=(to(*series)) aria-current=[shown.then_some("true")] { "Ruby " (series) }
                }
            }
        }
        @match advice {
            None if all.is_empty() => p { "Nothing has arrived yet." },
            None => p { "Nothing has arrived for this Ruby." },
            Some(Recommended { exports, concurrent, report, .. }) => {
                @if let Some(concurrent) = concurrent { p role="status" { (settings(concurrent)) } }
                @for (strategy, lines) in exports {
                    @let what = match strategy { Strategy::Speed => "speed", Strategy::Memory => "less memory" };
                    @if lines.is_empty() {
                        p { "Nothing to set for " (what) " now." }
                    } @else {
                        p { "For " (what) ", for a shell:" }
                        (setting_lines(lines))
                    }
                }
                details { summary { "Reasons, and why nothing else is advised" } (setting_lines(report)) }
            },
        }
    }
}
