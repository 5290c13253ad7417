//! When settings were advised, when settings were in force, and the effect of each change.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::{
    Shared,
    advice::{Advice, ENVIRONMENTS, Sums},
    now,
};
use crate::{
    store::{Given, Group, Period, Store, StoreError},
    tune::{Comparison, Episode, InForce, Plan, Strategy},
};

/// Maximum number of entries of advice kept per group, and of periods shown.
const MOST: u32 = 64;
/// Advice that is requested repeatedly is recorded again after this time, seconds.
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
        /// Whether the advice was to revert the last change.
        withdrawal: bool,
    },
    /// Sets arrived from programs with these settings.
    InForce {
        settings: InForce,
        /// Whether every difference from the previous settings was advised; `None` if the previous settings are unknown.
        advised: Option<bool>,
        /// The comparison with the previous settings, if they are known.
        brought: Option<Box<Comparison>>,
    },
}

/// All known events of a group, oldest first.
pub(super) fn of(shared: &Shared, advice: &Advice) -> Result<Vec<Event>, StoreError> {
    let (store, group) = (&*shared.store, advice.group);
    let given = store.given(group)?;
    let mut events: Vec<Event> = given.iter().map(|given| event(given, advice)).collect();
    let is_own = |name: &str, value: f64| advice.is_own(name, value);
    events.extend(in_force(store, &shared.sums, group, &given, &is_own)?);
    events.sort_by(|a, b| a.at.total_cmp(&b.at));
    Ok(events)
}

/// The periods in which settings were in force. The figures of an environment are those of all its periods.
fn in_force(
    store: &dyn Store,
    sums: &Sums,
    group: Group,
    given: &[Given],
    is_own: &dyn Fn(&str, f64) -> bool,
) -> Result<Vec<Event>, StoreError> {
    let mut episodes = HashMap::new();
    for environment in store.environments(group, ENVIRONMENTS)? {
        let evidence = sums.get(store, &environment)?;
        let in_force = InForce::parse(&environment.key, group.series);
        let episode = Episode { in_force, evidence, times: environment.times };
        episodes.insert(environment.id, (environment.key, episode));
    }
    let mut events = Vec::new();
    let mut known: Vec<Period> = Vec::new();
    for period in store.periods(group, MOST)? {
        let Some((key, now)) = episodes.get(&period.environment) else { continue };
        let taken_back = given
            .iter()
            .any(|given| given.withdrawal && given.settings == *key && given.first <= period.first);
        let is_advised = |before: &Episode| {
            let mut differences = now.in_force.differences(&before.in_force);
            taken_back || differences.all(|variable| is_own(variable.name, now.in_force.value(variable)))
        };
        // The environment seen last before this period began; others may be seen again later.
        let before = known
            .iter()
            .filter(|other| other.environment != period.environment)
            .max_by(|a, b| a.last.min(period.first).total_cmp(&b.last.min(period.first)))
            .and_then(|before| episodes.get(&before.environment))
            .map(|(_, before)| before);
        let advised = before.map(is_advised);
        let brought = before.map(|before| Box::new(Comparison::of(before, now)));
        let what = What::InForce { settings: now.in_force.clone(), advised, brought };
        events.push(Event { at: period.first, until: period.last, what });
        known.push(period);
    }
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

/// Remembers the advice that is given now. A store that cannot be written, such as on a full disk, does not prevent the advice: the failure is
/// reported.
pub(super) fn give(shared: &Shared, advice: &Advice, plans: &[Plan]) {
    for done in [note(shared, advice, plans), advice.remember(&*shared.store, plans, now())] {
        if let Err(error) = done {
            shared.failures.report(&error);
        }
    }
}

/// Records the advice that is given now. Advice with the same variables but refined values stays one entry.
fn note(shared: &Shared, advice: &Advice, plans: &[Plan]) -> Result<(), StoreError> {
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

/// The names of the variables in a key.
fn names(key: &str) -> impl Iterator<Item = &str> {
    key.split(' ').filter_map(|setting| Some(setting.split_once('=')?.0))
}

/// The events as JSON.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        digest::Digest,
        store::{NewApp, NewSet, Quota, Rights, SetId, Sqlite, TokenHash},
        tune::{Evidence, Series},
    };

    /// A return to earlier settings is an entry of its own, compared with the settings before it, and changes none of the earlier entries.
    #[test]
    fn returns() {
        let dir = tempfile::tempdir().unwrap();
        let store = Sqlite::open(&dir.path().join("sets.db")).unwrap();
        let app = NewApp { name: "shop", email: "a@b", parent: None, created: 1.0 };
        let app = store.register(&app, TokenHash::of("t"), Rights::Both).unwrap();
        let group = Group { app, series: Series(3, 4) };
        let insert = |hour: u8, limit: u32| {
            let set = NewSet {
                id: &SetId::of(&[hour; 32]),
                group,
                in_force: &if limit == 0 { String::new() } else { format!("RUBY_GC_MALLOC_LIMIT={limit}") },
                received: f64::from(hour) * 3600.0,
                evidence: &Evidence { sets: 1, ..Evidence::default() },
                digest: &Digest::default(),
                body: b"body",
            };
            assert!(store.insert(&set, Quota::NONE).unwrap().new);
        };
        let told = || -> Vec<(f64, f64, String, Option<String>)> {
            let events = in_force(&store, &Sums::default(), group, &[], &|_, _| false).unwrap();
            let brief = |event: Event| {
                let What::InForce { settings, brought, .. } = event.what else { panic!("it is in force") };
                let before = brought.map(|brought| {
                    let [change] = &brought.changed[..] else { panic!("one change: {brought}") };
                    format!("{} to {}", change.before, change.after)
                });
                (event.at / 3600.0, event.until / 3600.0, settings.to_string(), before)
            };
            events.into_iter().map(brief).collect()
        };
        for (hour, limit) in [(1, 64 << 20), (5, 64 << 20), (7, 32 << 20), (10, 32 << 20)] {
            insert(hour, limit);
        }
        let first = told();
        assert_eq!(first.len(), 2, "{first:?}");
        assert_eq!((first[0].0, first[0].1, first[1].0, first[1].1), (1.0, 5.0, 7.0, 10.0));
        insert(12, 64 << 20);
        insert(20, 64 << 20);
        let all = told();
        assert_eq!(all[..2], first[..]);
        assert_eq!(all.len(), 3, "{all:?}");
        let (at, until, settings, before) = &all[2];
        assert_eq!((*at, *until, settings), (12.0, 20.0, &first[0].2));
        assert_eq!(before.as_deref(), Some("33554432 to 67108864"));
    }
}
