//! Recommendations for an application: from the environment in force, and from those before it.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError, atomic::Ordering},
};

use super::{Shared, now};
use crate::{
    store::{BATCH, Environment, Group, Store, StoreError},
    tune::{
        self, Episode, Evidence, InForce, Plan, Report,
        history::{FORGOTTEN, in_force},
        in_force::shown,
    },
};

/// Latest sets of an environment that recommendations use; up to twice as many before the oldest are left out.
const SETS: u32 = 500;
/// Most environments of a group that are used.
pub(super) const ENVIRONMENTS: u32 = 16;
/// Environments of a group that are kept without sets: as many as history shows, and more.
const MOST_SUMMARIES: u32 = 64;
/// Sums that are kept in memory.
const MOST_SUMS: usize = 256;
/// Most settings advised to a group that are remembered.
const MOST_ADVISED: u32 = 256;

/// The sums of environments, so that a further set costs only its own work.
#[derive(Debug, Default)]
pub(super) struct Sums(Mutex<HashMap<i64, Sum>>);

/// The evidence of the sets of an environment.
#[derive(Clone, Debug, Default)]
struct Sum {
    /// The number of the last set in it.
    latest: i64,
    /// When the latest known set came.
    seen: f64,
    /// Sets in it.
    sets: usize,
    evidence: Evidence,
}

impl Sums {
    /// The evidence of the sets of an environment.
    pub(super) fn get(&self, store: &dyn Store, environment: &Environment) -> Result<Evidence, StoreError> {
        if environment.summarized == Some(environment.latest)
            && let Some(evidence) = store.summary(environment.id)?
        {
            return Ok(evidence);
        }
        self.add_up(store, environment)
    }

    /// The same, computed from the sets.
    fn add_up(&self, store: &dyn Store, environment: &Environment) -> Result<Evidence, StoreError> {
        let kept = self.sums().remove(&environment.id);
        let sum = match kept {
            // Another request may have added more sets meanwhile.
            Some(sum) if sum.latest >= environment.latest && sum.seen >= environment.seen => Some(sum),
            Some(mut sum) if sum.latest < environment.latest => {
                sum.add(store, environment)?;
                Some(sum)
            }
            // Or the sets in it were deleted, and numbers started again.
            _ => None,
        };
        let sum = match sum {
            Some(sum) if (1..=2 * SETS as usize).contains(&sum.sets) => sum,
            _ => Sum::anew(store, environment)?,
        };
        let evidence = sum.evidence.clone();
        let mut sums = self.sums();
        if sums.len() >= MOST_SUMS {
            // Any one: a sum that is still needed is computed again.
            let some = sums.keys().next().copied();
            some.map(|some| sums.remove(&some));
        }
        sums.insert(environment.id, sum);
        Ok(evidence)
    }

    fn sums(&self) -> std::sync::MutexGuard<'_, HashMap<i64, Sum>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sum {
    /// From the sets of the store, and from the summary if that knows sets that were deleted since.
    fn anew(store: &dyn Store, environment: &Environment) -> Result<Self, StoreError> {
        let mut sets = store.evidence(environment.id, 0, SETS)?;
        sets.retain(|(number, _)| *number <= environment.latest);
        // If all sets were deleted, numbers may have started again.
        let until = environment.summarized.filter(|until| *until <= environment.latest).unwrap_or(i64::MIN);
        let old = sets.partition_point(|(number, _)| *number <= until);
        let mut sum =
            Self { latest: environment.latest, seen: environment.seen, sets: sets.len(), ..Self::default() };
        let summary =
            store.summary(environment.id)?.filter(|summary| summary.sets + summary.impossible > old as u64);
        let new = match summary {
            Some(summary) if sets.len() < SETS as usize => {
                sum.evidence = summary;
                &sets[old..]
            }
            _ => &sets[..],
        };
        for (_, evidence) in new {
            sum.evidence.merge(evidence);
        }
        Ok(sum)
    }

    /// Adds the sets that came since, up to the latest known one.
    fn add(&mut self, store: &dyn Store, environment: &Environment) -> Result<(), StoreError> {
        let sets = store.evidence(environment.id, self.latest, SETS)?;
        for (_, evidence) in sets.iter().filter(|(number, _)| *number <= environment.latest) {
            self.evidence.merge(evidence);
            self.sets += 1;
        }
        (self.latest, self.seen) = (environment.latest, environment.seen);
        Ok(())
    }
}

/// Keeps the evidence of environments that are no longer in force: their sets will be deleted, and the effect of the change must still
/// be known then.
pub(super) fn summarize(shared: &Shared) -> Result<(), StoreError> {
    loop {
        let environments = shared.store.unsummarized()?;
        let mut kept = 0;
        for environment in &environments {
            let summarized = shared
                .sums
                .add_up(&*shared.store, environment)
                .and_then(|evidence| shared.store.summarize(environment, &evidence));
            match summarized {
                Ok(()) => kept += 1,
                // It does not keep the others from theirs.
                Err(error) => log::warn!("keeping the evidence of environment {}: {error}", environment.id),
            }
        }
        shared.metrics.summarized.fetch_add(kept, Ordering::Relaxed);
        if environments.len() < BATCH as usize || kept == 0 {
            break;
        }
    }
    for info in shared.store.apps()? {
        shared.store.forget_environments(info.app, MOST_SUMMARIES)?;
    }
    Ok(())
}

/// What is recommended, and what was advised before.
pub(super) struct Advice {
    pub(super) group: Group,
    pub(super) report: Report,
    /// `NAME=VALUE`.
    advised: Vec<String>,
}

impl Advice {
    /// For this environment of a group, or for the one in force; `None` if there are no sets.
    pub(super) fn of(
        shared: &Shared,
        group: Group,
        environment: Option<i64>,
    ) -> Result<Option<Self>, StoreError> {
        let store = &*shared.store;
        let mut all = store.environments(group, ENVIRONMENTS)?;
        let at = if let Some(id) = environment {
            all.iter().position(|known| known.id == id)
        } else {
            // Of equals, the same one, in whichever order their sets came.
            let mut by_key: Vec<usize> = (0..all.len()).collect();
            by_key.sort_by(|a, b| all[*a].key.cmp(&all[*b].key));
            in_force(&by_key.iter().map(|at| all[*at].times).collect::<Vec<_>>()).map(|at| by_key[at])
        };
        let now = match (at, environment) {
            (Some(at), _) => all.remove(at),
            // Many others were in force since.
            (None, Some(id)) => match store.environment(id)? {
                Some(known) => known,
                None => return Ok(None),
            },
            (None, None) => return Ok(None),
        };
        all.retain(|other| other.times.until >= now.times.until - FORGOTTEN);
        all.reverse();
        let episode = |environment: &Environment| {
            let evidence = shared.sums.get(store, environment)?;
            let in_force = InForce::parse(&environment.key, group.series);
            Ok(Episode { in_force, evidence, times: environment.times })
        };
        let others = all.iter().map(episode).collect::<Result<Vec<_>, StoreError>>()?;
        let report = tune::recommend_after(group.series, &episode(&now)?, &others);
        Ok(Some(Self { group, report, advised: store.advised(group)? }))
    }

    /// Whether this value was advised: then it is not the user's choice.
    pub(super) fn is_own(&self, name: &str, value: f64) -> bool {
        self.advised.contains(&setting(name, value))
    }

    /// Remembers the settings that are advised now.
    pub(super) fn remember(&self, shared: &Shared, plans: &[Plan]) -> Result<(), StoreError> {
        let settings = plans.iter().flat_map(Plan::settings);
        let mut new: Vec<String> = settings
            .map(|change| setting(change.variable, change.value.number()))
            .filter(|setting| !self.advised.contains(setting))
            .collect();
        new.sort();
        new.dedup();
        if new.is_empty() { Ok(()) } else { shared.store.advise(self.group, &new, now(), MOST_ADVISED) }
    }
}

fn setting(name: &str, value: f64) -> String {
    format!("{name}={}", shown(name, value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        digest::Digest,
        store::{NewApp, NewSet, Quota, Rights, SetId, Sqlite, TokenHash},
        tune::Series,
    };

    /// Of an environment that is known, only the new sets are read and added.
    #[test]
    fn sums_grow() {
        let dir = tempfile::tempdir().unwrap();
        let store = Sqlite::open(&dir.path().join("sets.db")).unwrap();
        let app = NewApp { name: "shop", email: "a@b", parent: None, created: 1.0 };
        let app = store.register(&app, TokenHash::of("t"), Rights::Both).unwrap();
        let group = Group { app, series: Series(3, 4) };
        let insert = |byte: u8| {
            let set = NewSet {
                id: &SetId::of(&[byte; 32]),
                group,
                in_force: "",
                received: f64::from(byte),
                evidence: &Evidence { sets: 1, samples: 10, ..Evidence::default() },
                digest: &Digest::default(),
                body: b"body",
            };
            assert!(store.insert(&set, Quota::NONE).unwrap().new);
        };
        let sums = Sums::default();
        let samples = || {
            let environment = store.environments(group, 1).unwrap().remove(0);
            sums.get(&store, &environment).unwrap().samples
        };
        (1..=3).for_each(insert);
        assert_eq!(samples(), 30);
        // Were the sets added up again, this would be gone.
        sums.sums().values_mut().for_each(|sum| sum.evidence.samples += 1000);
        assert_eq!(samples(), 1030);
        insert(4);
        assert_eq!(samples(), 1040);
        // A restart after some sets were deleted: the summary still knows them, and sets that came since are added to it.
        let environment = || store.environments(group, 1).unwrap().remove(0);
        let summarize = || {
            let environment = environment();
            let evidence = Sums::default().get(&store, &environment).unwrap();
            store.summarize(&environment, &evidence).unwrap();
        };
        summarize();
        store.prune(4.0, None).unwrap();
        (5..=6).for_each(insert);
        let anew = || Sums::default().get(&store, &environment()).unwrap().samples;
        assert_eq!(anew(), 60);
        summarize();
        assert_eq!(anew(), 60);
        store.prune(6.0, None).unwrap();
        insert(7);
        assert_eq!(anew(), 70);
    }
}
