//! Recommendations for an application, from the environment in force and the earlier ones.

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

/// Number of the latest sets of an environment that recommendations use. Up to twice as many are used before the oldest are left out.
const SETS: u32 = 500;
/// Maximum number of environments of a group that are used.
pub(super) const ENVIRONMENTS: u32 = 16;
/// Maximum number of environments of a group that are kept without sets: at least as many as the history shows.
const MOST_SUMMARIES: u32 = 64;
/// Maximum number of sums kept in memory.
const MOST_SUMS: usize = 256;
/// Maximum number of settings advised to a group that are remembered.
const MOST_ADVISED: u32 = 256;

/// The sums of environments, by environment id, so that each further set costs only its own work.
#[derive(Debug, Default)]
pub(super) struct Sums(Mutex<HashMap<i64, Sum>>);

/// The evidence of the sets of an environment.
#[derive(Clone, Debug, Default)]
struct Sum {
    /// Number of the latest set included.
    latest: i64,
    /// When the latest known set arrived, epoch seconds.
    seen: f64,
    /// Number of sets included.
    sets: usize,
    evidence: Evidence,
}

impl Sums {
    /// The evidence of an environment's sets: from its summary if that is complete, else from the sets.
    pub(super) fn get(&self, store: &dyn Store, environment: &Environment) -> Result<Evidence, StoreError> {
        if environment.summarized == Some(environment.latest)
            && let Some(evidence) = store.summary(environment.id)?
        {
            return Ok(evidence);
        }
        self.add_up(store, environment)
    }

    /// The evidence of an environment, summed from its sets.
    fn add_up(&self, store: &dyn Store, environment: &Environment) -> Result<Evidence, StoreError> {
        let kept = self.sums().remove(&environment.id);
        let sum = match kept {
            // Another request may have added more sets meanwhile.
            Some(sum) if sum.latest >= environment.latest && sum.seen >= environment.seen => Some(sum),
            Some(mut sum) if sum.latest < environment.latest => {
                sum.add(store, environment)?;
                Some(sum)
            }
            // Otherwise the sets in it were deleted, and set numbers restarted.
            _ => None,
        };
        let sum = match sum {
            Some(sum) if (1..=2 * SETS as usize).contains(&sum.sets) => sum,
            _ => Sum::anew(store, environment)?,
        };
        let evidence = sum.evidence.clone();
        let mut sums = self.sums();
        if sums.len() >= MOST_SUMS {
            // Evict an arbitrary one: a sum that is still needed is computed again.
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
    /// Computes the sum from the stored sets, and from the summary if it includes sets that were deleted since.
    fn anew(store: &dyn Store, environment: &Environment) -> Result<Self, StoreError> {
        let mut sets = store.evidence(environment.id, 0, SETS)?;
        sets.retain(|(number, _)| *number <= environment.latest);
        // If all sets were deleted, set numbers may have restarted.
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

    /// Adds the sets that arrived since, up to the latest known one.
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

/// Stores the evidence of environments that are no longer in force: their sets will be deleted, but the effect of the change must still
/// be known afterwards.
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
                // A failure does not prevent the other environments from being summarized.
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
    /// The advice for this environment of a group, or for the one in force; `None` if there are no sets.
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
            // Among equal candidates, always choose the same one, whatever the order in which their sets arrived.
            let mut by_key: Vec<usize> = (0..all.len()).collect();
            by_key.sort_by(|a, b| all[*a].key.cmp(&all[*b].key));
            in_force(&by_key.iter().map(|at| all[*at].times).collect::<Vec<_>>()).map(|at| by_key[at])
        };
        let now = match (at, environment) {
            (Some(at), _) => all.remove(at),
            // More than `ENVIRONMENTS` others have been in force since.
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

    /// Whether this value was advised, and so is not the user's own choice.
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

    /// For a known environment, only the new sets are read and added.
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
        // If the sets were summed again, this would be lost.
        sums.sums().values_mut().for_each(|sum| sum.evidence.samples += 1000);
        assert_eq!(samples(), 1030);
        insert(4);
        assert_eq!(samples(), 1040);
        // A restart after some sets were deleted: the summary still includes them, and sets that arrived since are added to it.
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
