//! Deletes sets that are too old, and sums older figures into slots of hours: a chart of a month does not show ten minutes.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use tokio::time::{MissedTickBehavior, interval, sleep};

use super::{Shared, advice, now};
use crate::{digest::WIDTHS, store::BATCH};

/// Interval between searches for old sets.
const EVERY: Duration = Duration::from_mins(10);
/// Pause between two batches, during which sets can be stored.
const PAUSE: Duration = Duration::from_millis(50);

/// By how much the clock may differ from the time that has passed since the last tick, seconds.
const STEP: f64 = 60.0;

/// Whether the clock can be relied on to say what is old. A host may start with a wrong clock, and set it later: all sets that it has would be too
/// old.
#[derive(Debug, Default)]
struct Reliance {
    /// The clock, epoch seconds, and the time of the last tick.
    last: Option<(f64, Instant)>,
    /// Whether the log says that it is not relied on.
    told: bool,
}

impl Reliance {
    /// Whether a tick at which the clock is `now` (epoch seconds) may delete what is older than `keep` (seconds). The first tick may, if the
    /// latest set, of time `newest`, has not yet to arrive and is not too old itself (clocks of collectors that share a store differ a little). A
    /// later tick may, if the clock has not been set since the
    /// last one: so it confirms what the first one doubted.
    fn is_reliable(&mut self, (now, at): (f64, Instant), newest: Option<f64>, keep: f64) -> bool {
        let plausible = newest.is_none_or(|newest| (newest - STEP..=newest + keep).contains(&now));
        let reliable = match self.last.replace((now, at)) {
            None => plausible,
            Some((before, then)) => {
                (now - before - at.saturating_duration_since(then).as_secs_f64()).abs() < STEP
            }
        };
        if !reliable && !self.told {
            let minutes = EVERY.as_secs() / 60;
            let why = if plausible {
                "was set"
            } else {
                "does not fit the times of the stored sets, or all of them are old"
            };
            log::warn!(
                "the clock {why}: no old sets are deleted for {minutes} minutes, and until it runs steadily"
            );
        }
        self.told = !reliable;
        reliable
    }
}

/// Deletes old sets and sums figures every [`EVERY`], as long as the collector runs.
pub(super) async fn run(shared: Arc<Shared>) {
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut added_up = [0; WIDTHS.len()];
    let mut reliance = Reliance::default();
    loop {
        ticks.tick().await;
        shared.failures.catch_up();
        let store = Arc::clone(&shared);
        match tokio::task::spawn_blocking(move || advice::summarize(&store)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => log::warn!("keeping the evidence of sets: {error}"),
            Err(error) => log::error!("keeping the evidence of sets: {error}"),
        }
        if let Some(keep) = shared.options.keep
            && may_delete(&shared, &mut reliance, keep).await
        {
            let before = now() - keep.as_secs_f64();
            while batch(&shared, before).await == u64::from(BATCH) {
                sleep(PAUSE).await;
            }
            let store = Arc::clone(&shared);
            let slots = tokio::task::spawn_blocking(move || store.store.prune_slots(before as i64)).await;
            if let Ok(Err(error)) = slots {
                log::warn!("deleting old figures: {error}");
            }
        }
        roll_up(&shared, &mut added_up).await;
    }
}

async fn may_delete(shared: &Arc<Shared>, reliance: &mut Reliance, keep: Duration) -> bool {
    let store = Arc::clone(shared);
    match tokio::task::spawn_blocking(move || store.store.newest()).await {
        Ok(Ok(newest)) => reliance.is_reliable((now(), Instant::now()), newest, keep.as_secs_f64()),
        Ok(Err(error)) => {
            log::warn!("deleting old sets: {error}; trying again in {} minutes", EVERY.as_secs() / 60);
            false
        }
        Err(error) => {
            log::error!("deleting old sets: {error}");
            false
        }
    }
}

/// Sums the figures of all applications. `done`: the time up to which this was done, for each of [`WIDTHS`].
async fn roll_up(shared: &Arc<Shared>, done: &mut [i64; WIDTHS.len()]) {
    for ((age, width), from) in WIDTHS.into_iter().zip(done) {
        let before = (now() as i64 - age).div_euclid(width) * width;
        if before <= *from {
            continue;
        }
        let begin = *from;
        let work = move |shared: &Shared, app| shared.store.roll_up(app, begin, before, width);
        let store = Arc::clone(shared);
        let apps = tokio::task::spawn_blocking(move || store.store.apps()).await;
        let mut failed = !matches!(apps, Ok(Ok(_)));
        for info in apps.into_iter().flatten().flatten() {
            let store = Arc::clone(shared);
            match tokio::task::spawn_blocking(move || work(&store, info.app)).await {
                // The pause gives other work access to the store.
                Ok(Ok(0)) => {}
                Ok(Ok(_)) => sleep(PAUSE).await,
                Ok(Err(error)) => {
                    log::warn!(
                        "adding up figures: {error}; trying again in {} minutes",
                        EVERY.as_secs() / 60
                    );
                    failed = true;
                }
                Err(error) => {
                    log::error!("adding up figures: {error}");
                    failed = true;
                }
            }
        }
        if !failed {
            *from = before;
        }
    }
}

async fn batch(shared: &Arc<Shared>, before: f64) -> u64 {
    let store = Arc::clone(shared);
    match tokio::task::spawn_blocking(move || store.store.prune(before, None)).await {
        Ok(Ok(deleted)) => {
            shared.metrics.expired.fetch_add(deleted, Ordering::Relaxed);
            deleted
        }
        Ok(Err(error)) => {
            log::warn!("deleting old sets: {error}; trying again in {} minutes", EVERY.as_secs() / 60);
            0
        }
        Err(error) => {
            log::error!("deleting old sets: {error}");
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        digest::Digest,
        store::{Group, NewApp, NewSet, Quota, Rights, SetId, Sqlite, Store as _, TokenHash},
        tune::{Evidence, Series},
    };

    const DAY: f64 = 86_400.0;

    /// A wrong clock at the start deletes nothing, whichever way it is wrong; a right one does at once, and an odd one once it is confirmed.
    #[test]
    fn clocks() {
        let dir = tempfile::tempdir().unwrap();
        let store = Sqlite::open(&dir.path().join("sets.db")).unwrap();
        let newest = || store.newest().unwrap();
        assert_eq!(newest(), None);
        let app = NewApp { name: "shop", email: "a@b", parent: None, created: 1.0 };
        let app = store.register(&app, TokenHash::of("t"), Rights::Both).unwrap();
        let today = 1.79e9;
        for (byte, days) in [(1, 0.0), (2, 40.0), (3, 2.0)] {
            let set = NewSet {
                id: &SetId::of(&[byte; 32]),
                group: Group { app, series: Series(3, 4) },
                in_force: "",
                received: today - days * DAY,
                evidence: &Evidence::default(),
                digest: &Digest::default(),
                body: b"",
            };
            assert!(store.insert(&set, Quota::NONE).unwrap().new);
        }
        assert_eq!(newest(), Some(today));
        let begin = Instant::now();
        // Each tick: minutes since the start, and the clock.
        let ticks = |ticks: &[(u64, f64)]| -> Vec<bool> {
            let mut reliance = Reliance::default();
            let tick = |(minutes, now): &(u64, f64)| {
                let at = begin + Duration::from_mins(*minutes);
                reliance.is_reliable((*now, at), newest(), 30.0 * DAY)
            };
            ticks.iter().map(tick).collect()
        };
        let minutes = |minutes: u64| minutes as f64 * 60.0;
        assert_eq!(ticks(&[(0, today + 9.0), (10, today + 9.0 + minutes(10) + 0.2)]), [true, true]);
        for wrong in [today - 900.0 * DAY, today - 100.0, today + 900.0 * DAY] {
            let right = today + 50.0;
            assert_eq!(
                ticks(&[(0, wrong), (10, right), (20, right + minutes(10))]),
                [false, false, true],
                "set right after the start"
            );
            assert_eq!(ticks(&[(0, wrong), (10, wrong + minutes(10))]), [false, true], "confirmed");
        }
        let year = 365.0 * DAY;
        assert_eq!(
            ticks(&[
                (0, today),
                (10, today + year),
                (20, today + year + minutes(10)),
                (35, today + minutes(35))
            ]),
            [true, false, true, false],
            "set while it runs"
        );
        let mut empty = Reliance::default();
        assert!(empty.is_reliable((1.0, begin), None, DAY));
    }
}
