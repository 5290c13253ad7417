//! Recommendations for an application, as people read them.

use super::{Shared, advice::Advice, history};
use crate::{
    printable::printable_lines,
    store::{App, StoreError},
    tune::Strategy,
};

/// The recommendations for an application.
pub(super) struct Recommended {
    /// Lines for a shell.
    pub(super) exports: String,
    /// A message if several environments are in force at the same time.
    pub(super) concurrent: Option<String>,
    /// The reasons.
    pub(super) report: String,
    /// Earlier advice and its effect.
    pub(super) history: Vec<history::Event>,
}

/// The recommendations for an application; `None` if no set has arrived yet.
pub(super) fn recommended(shared: &Shared, app: App) -> Result<Option<Recommended>, StoreError> {
    let group = shared.store.latest_group(app)?;
    let advice = group.map(|group| Advice::of(shared, group, None)).transpose()?.flatten();
    let Some(advice) = advice else { return Ok(None) };
    history::give(shared, &advice, &advice.report.plans);
    let own = |name: &str, value: f64| advice.is_own(name, value);
    let exports = advice.report.to_exports(Strategy::Speed, &own);
    let report = printable_lines(&advice.report.to_string()).into_owned();
    let concurrent = advice.report.concurrent();
    Ok(Some(Recommended { exports, concurrent, report, history: history::of(shared, &advice)? }))
}
