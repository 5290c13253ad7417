//! When environments were last seen, more exactly than slots show it.

use std::collections::{BTreeMap, BTreeSet};

use super::MAX_ENVIRONMENTS;
use crate::{
    store::{App, Group, Slot, Store, StoreError},
    tune::{InForce, Series},
};

/// The time of the latest set, epoch seconds, by a slot's environment and series.
#[derive(Debug, Default)]
pub(super) struct Seen<'a>(BTreeMap<(&'a str, Series), f64>);

impl<'a> Seen<'a> {
    /// Looks up the environments of these slots.
    pub(super) fn of(store: &dyn Store, app: App, slots: &'a [Slot]) -> Result<Self, StoreError> {
        let environments: BTreeSet<(&str, Series)> =
            slots.iter().map(|slot| (slot.environment.as_str(), slot.series)).collect();
        let all_series: BTreeSet<Series> = environments.iter().map(|(_, series)| *series).collect();
        let mut kept = BTreeMap::new();
        for series in all_series {
            for environment in store.environments(Group { app, series }, MAX_ENVIRONMENTS as u32)? {
                kept.insert((environment.key, series), environment.times.until);
            }
        }
        let seen = environments.into_iter().filter_map(|(text, series)| {
            let at = kept.get(&(InForce::parse(text, series).key(), series))?;
            Some(((text, series), *at))
        });
        Ok(Self(seen.collect()))
    }

    /// When the latest set of a slot's environment ends, as a sort key: the slot, then the set's own time. If all sets of the environment are
    /// deleted, only the slot is known.
    pub(super) fn at(&self, slot: &Slot) -> Latest {
        let seen = self.0.get(&(slot.environment.as_str(), slot.series)).copied();
        Latest { at: slot.at, seen: seen.unwrap_or_default() }
    }
}

/// A time that orders slots within the same ten minutes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Latest {
    at: i64,
    seen: f64,
}

impl Latest {
    /// When the latest set of the environment ends, epoch seconds; `None` if unknown.
    pub(super) fn seen(self) -> Option<f64> {
        (self.seen > 0.0).then_some(self.seen)
    }

    /// The later of two.
    pub(super) fn max(self, other: Self) -> Self {
        if other.after(self).is_lt() { other } else { self }
    }

    /// Orders the later one first.
    pub(super) fn after(self, other: Self) -> std::cmp::Ordering {
        other.at.cmp(&self.at).then(other.seen.total_cmp(&self.seen))
    }
}
