//! Which settings were advised when, which were in force when, and their effect.

use serde_json::{Value, json};

use super::{
    Shared,
    advice::{Advice, ENVIRONMENTS},
    now,
};
use crate::{
    store::{Given, StoreError},
    tune::{Comparison, Episode, InForce, Plan, Strategy},
};

/// Entries of a group that are kept.
const MOST: u32 = 64;
/// Advice that is asked for repeatedly is recorded again after this time, seconds.
const AGAIN: f64 = 600.0;

/// Something that happened.
#[derive(Clone, Debug)]
pub(super) struct Event {
    /// When it happened first, epoch seconds.
    pub(super) at: f64,
    /// When it happened last, epoch seconds.
    pub(super) until: f64,
    pub(super) what: What,
}

#[derive(Clone, Debug)]
pub(super) enum What {
    /// Settings were advised.
    Advised {
        strategy: Strategy,
        /// The settings in force then.
        in_force: InForce,
        /// The advised settings.
        settings: InForce,
        /// Whether the advice was to take back the last change.
        withdrawal: bool,
    },
    /// Sets came from programs with these settings.
    InForce {
        settings: InForce,
        /// Whether every difference from the settings before was advised; `None`: the settings before are not known.
        advised: Option<bool>,
        /// Compared with the settings before, if there are sets of both.
        brought: Option<Box<Comparison>>,
    },
}

/// Everything that is known of a group, the earliest first.
pub(super) fn of(shared: &Shared, advice: &Advice) -> Result<Vec<Event>, StoreError> {
    let (store, group) = (&*shared.store, advice.group);
    let given = store.given(group)?;
    let mut events: Vec<Event> = given.iter().map(|given| event(given, advice)).collect();
    let mut environments = store.environments(group, ENVIRONMENTS)?;
    environments.sort_by(|a, b| a.first.total_cmp(&b.first));
    let mut known: Vec<Episode> = Vec::new();
    for environment in environments {
        let evidence = shared.sums.get(store, &environment)?;
        let in_force = InForce::parse(&environment.key, group.series);
        let now = Episode { in_force, evidence, seen: environment.seen };
        let taken_back = given.iter().any(|given| {
            given.withdrawal && given.settings == environment.key && given.first <= environment.first
        });
        let is_own = |before: &Episode| {
            let mut differences = now.in_force.differences(&before.in_force);
            taken_back
                || differences.all(|variable| advice.is_own(variable.name, now.in_force.value(variable)))
        };
        // Settings that were taken back were in force again: those before are the ones that were in force last until then.
        let before = known
            .iter()
            .max_by(|a, b| a.seen.min(environment.first).total_cmp(&b.seen.min(environment.first)));
        let advised = before.map(is_own);
        let brought = before.map(|before| Box::new(Comparison::of(before, &now)));
        let what = What::InForce { settings: now.in_force.clone(), advised, brought };
        events.push(Event { at: environment.first, until: environment.seen, what });
        known.push(now);
    }
    events.sort_by(|a, b| a.at.total_cmp(&b.at));
    Ok(events)
}

fn event(given: &Given, advice: &Advice) -> Event {
    let parse = |key: &str| InForce::parse(key, advice.group.series);
    let what = What::Advised {
        strategy: given.strategy,
        in_force: parse(&given.in_force),
        settings: parse(&given.settings),
        withdrawal: given.withdrawal,
    };
    Event { at: given.first, until: given.last, what }
}

/// Records the advice that is given now. Advice whose values only become more exact stays one entry.
pub(super) fn note(shared: &Shared, advice: &Advice, plans: &[Plan]) -> Result<(), StoreError> {
    let report = &advice.report;
    if !report.insufficient.is_empty() {
        return Ok(());
    }
    let own = |name: &str, value: f64| advice.is_own(name, value);
    let known = shared.store.given(advice.group)?;
    for plan in plans {
        let now = now();
        let given = Given {
            strategy: plan.strategy,
            in_force: report.in_force.key(),
            settings: plan.state(&report.in_force, &own).set.key(),
            withdrawal: plan.withdrawal.is_some(),
            first: now,
            last: now,
        };
        let latest = known
            .iter()
            .rev()
            .find(|known| known.strategy == given.strategy && known.in_force == given.in_force);
        let same = latest.filter(|latest| {
            latest.withdrawal == given.withdrawal && names(&latest.settings).eq(names(&given.settings))
        });
        if same.is_some_and(|same| same.settings == given.settings && now < same.last + AGAIN) {
            continue;
        }
        shared.store.note(advice.group, &given, same.is_some(), MOST)?;
    }
    Ok(())
}

/// The variables of a key.
fn names(key: &str) -> impl Iterator<Item = &str> {
    key.split(' ').filter_map(|setting| Some(setting.split_once('=')?.0))
}

/// As JSON.
pub(super) fn to_json(events: &[Event]) -> Value {
    let events = events.iter().map(|event| {
        let mut value = match &event.what {
            What::Advised { strategy, in_force, settings, withdrawal } => json!({
                "event": "advised",
                "strategy": strategy,
                "in_force": in_force,
                "set": settings,
                "withdrawal": withdrawal,
            }),
            What::InForce { settings, advised, brought } => json!({
                "event": "in_force",
                "set": settings,
                "advised": advised,
                "brought": brought,
            }),
        };
        (value["at"], value["until"]) = (json!(event.at), json!(event.until));
        value
    });
    Value::Array(events.collect())
}
