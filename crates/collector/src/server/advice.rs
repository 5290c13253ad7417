//! Recommendations for an application, from the environment in force and the earlier ones.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Mutex, PoisonError, atomic::Ordering},
};

use super::Shared;
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
/// Settings that are advised repeatedly, or followed, are stored again after this time, seconds: otherwise they would be forgotten for later
/// ones.
const AGAIN: f64 = 600.0;

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
            // Otherwise the sets in it were deleted, and set numbers restarted, as in stores of earlier releases.
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
        // If all sets were deleted, set numbers may have restarted in stores of earlier releases.
        let until = environment.summarized.filter(|until| *until <= environment.latest).unwrap_or(i64::MIN);
        let old = sets.partition_point(|(number, _)| *number <= until);
        let mut sum =
            Self { latest: environment.latest, seen: environment.seen, sets: sets.len(), ..Self::default() };
        let of = |summary: &Evidence| (summary.sets + summary.impossible) as usize;
        let summary = store.summary(environment.id)?.filter(|summary| of(summary) > old);
        let new = match summary {
            // Otherwise it would never forget: a summary that is continued becomes the next summary.
            Some(summary)
                if sets.len() < SETS as usize && of(&summary) + sets.len() - old <= 2 * SETS as usize =>
            {
                sum.sets = of(&summary) + sets.len() - old;
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
    /// `NAME=VALUE`, and when it was advised last, epoch seconds.
    advised: HashMap<String, f64>,
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
        Ok(Some(Self { group, report, advised: store.advised(group.app)? }))
    }

    /// Whether this value was advised, and so is not the user's own choice. A program keeps its settings when its Ruby is updated, so the
    /// series for which it was advised does not matter.
    pub(super) fn is_own(&self, name: &str, value: f64) -> bool {
        self.advised.contains_key(&setting(name, value))
    }

    /// Remembers the settings that are advised at the time `now` (epoch seconds), and those in force that were.
    pub(super) fn remember(&self, store: &dyn Store, plans: &[Plan], now: f64) -> Result<(), StoreError> {
        let advised = plans.iter().flat_map(Plan::settings);
        let advised = advised.map(|change| setting(change.variable, change.value.number()));
        let followed = self.report.in_force.iter().map(|(name, value)| setting(name, value));
        let followed = followed.filter(|setting| self.advised.contains_key(setting));
        let settings: BTreeSet<String> = advised.chain(followed).collect();
        let is_fresh = |setting| self.advised.get(setting).is_some_and(|given| now < given + AGAIN);
        if settings.iter().all(is_fresh) {
            return Ok(());
        }
        // All of them: what is left out now could be the oldest.
        store.advise(self.group, &settings.into_iter().collect::<Vec<_>>(), now, MOST_ADVISED)
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
        // All sets were deleted: those that arrive later are new.
        summarize();
        store.prune(100.0, None).unwrap();
        (10..=20).for_each(insert);
        assert_eq!(anew(), 180);
    }

    /// A store with a group, and its directory.
    fn store() -> (tempfile::TempDir, Sqlite, Group) {
        let dir = tempfile::tempdir().unwrap();
        let store = Sqlite::open(&dir.path().join("sets.db")).unwrap();
        let app = NewApp { name: "shop", email: "a@b", parent: None, created: 1.0 };
        let app = store.register(&app, TokenHash::of("t"), Rights::Both).unwrap();
        (dir, store, Group { app, series: Series(3, 4) })
    }

    /// What deleted sets said is forgotten in time, also if an environment never has many sets at a time.
    #[test]
    fn sums_forget() {
        let (_dir, store, group) = store();
        let sums = Sums::default();
        let mut n = 0_u32;
        for _ in 0..130 {
            for in_force in ["", "RUBY_GC_MALLOC_LIMIT=1"] {
                for _ in 0..10 {
                    n += 1;
                    let id: [u8; 32] = std::array::from_fn(|at| n.to_le_bytes()[at % 4]);
                    let set = NewSet {
                        id: &SetId::of(&id),
                        group,
                        in_force,
                        received: f64::from(n),
                        evidence: &Evidence { sets: 1, ..Evidence::default() },
                        digest: &Digest::default(),
                        body: b"",
                    };
                    assert!(store.insert(&set, Quota::NONE).unwrap().new);
                }
                for environment in store.unsummarized().unwrap() {
                    let evidence = sums.add_up(&store, &environment).unwrap();
                    store.summarize(&environment, &evidence).unwrap();
                }
            }
            store.prune(f64::from(n) - 100.0, None).unwrap();
            for environment in store.environments(group, 9).unwrap() {
                for sums in [&sums, &Sums::default()] {
                    let sets = sums.get(&store, &environment).unwrap().sets;
                    assert!((10..=2 * u64::from(SETS)).contains(&sets), "{sets} after {n}");
                }
            }
        }
    }

    /// What is advised now, to programs with these settings.
    fn advice(store: &Sqlite, group: Group, in_force: &[(&str, &str)]) -> Advice {
        let environment = in_force.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let evidence = Evidence { environment: environment.collect(), ..Evidence::default() };
        let report = tune::recommend(group.series, &evidence);
        Advice { group, report, advised: store.advised(group.app).unwrap() }
    }

    fn plan(variable: &'static str, value: u64) -> Plan {
        let change =
            tune::Change { variable, value: tune::Setting::Size(value), current: 1.0, default: false };
        let effect =
            tune::Effect { text: String::new(), metric: "", factor: None, price: tune::Price::default() };
        let advice = tune::Advice {
            rule: "malloc",
            set: vec![change],
            why: String::new(),
            evidence: Vec::new(),
            effect,
            confidence: tune::Confidence::Low,
        };
        Plan {
            strategy: tune::Strategy::Speed,
            advice: vec![advice],
            refusals: Vec::new(),
            withdrawal: None,
            price: None,
        }
    }

    /// A value that is still advised, or followed, is known as advised, however many others are advised meanwhile.
    #[test]
    fn advised_values() {
        const LIMIT: &str = "RUBY_GC_MALLOC_LIMIT";
        const SLOTS: &str = "RUBY_GC_HEAP_0_INIT_SLOTS";
        let (_dir, store, group) = store();
        let first = [plan(LIMIT, 64), plan(SLOTS, 20_000)];
        advice(&store, group, &[]).remember(&store, &first, 0.0).unwrap();
        let mut now = 0.0;
        for n in 0..300 {
            now += 60.0;
            // To other programs of this application.
            let other = [plan("RUBY_GC_OLDMALLOC_LIMIT", 1000 + n)];
            advice(&store, group, &[]).remember(&store, &other, now).unwrap();
            // One value is followed, so it is no longer advised; the other one still is.
            let here = advice(&store, group, &[(LIMIT, "64")]);
            here.remember(&store, &[plan(SLOTS, 20_000)], now).unwrap();
        }
        let now_known = advice(&store, group, &[]);
        assert!(now_known.is_own(LIMIT, 64.0) && now_known.is_own(SLOTS, 20_000.0));
        assert!(!now_known.is_own("RUBY_GC_OLDMALLOC_LIMIT", 1000.0), "the oldest is forgotten");
        assert_eq!(now_known.advised.len(), 256);
        // What is known is not stored again at once.
        let kept = now_known.advised.clone();
        now_known.remember(&store, &first, now + 1.0).unwrap();
        assert_eq!(store.advised(group.app).unwrap(), kept);
        // Its Ruby is updated.
        let later = advice(&store, Group { series: Series(4, 0), ..group }, &[(LIMIT, "64")]);
        assert!(later.is_own(LIMIT, 64.0));
        let other = NewApp { name: "other", email: "a@b", parent: None, created: 1.0 };
        let other = store.register(&other, TokenHash::of("o"), Rights::Both).unwrap();
        assert!(!advice(&store, Group { app: other, ..group }, &[]).is_own(LIMIT, 64.0));
    }
}
