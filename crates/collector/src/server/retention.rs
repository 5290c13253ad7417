//! Deletes sets that are too old, and sums older figures into slots of hours: a chart of a month does not show ten minutes.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::time::{MissedTickBehavior, interval, sleep};

use super::{Shared, advice, now};
use crate::{digest::WIDTHS, store::BATCH};

/// Interval between searches for old sets.
const EVERY: Duration = Duration::from_mins(10);
/// Pause between two batches, during which sets can be stored.
const PAUSE: Duration = Duration::from_millis(50);

/// Deletes old sets and sums figures every [`EVERY`], as long as the collector runs.
pub(super) async fn run(shared: Arc<Shared>) {
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut added_up = [0; WIDTHS.len()];
    loop {
        ticks.tick().await;
        shared.failures.catch_up();
        let store = Arc::clone(&shared);
        match tokio::task::spawn_blocking(move || advice::summarize(&store)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => log::warn!("keeping the evidence of sets: {error}"),
            Err(error) => log::error!("keeping the evidence of sets: {error}"),
        }
        if let Some(keep) = shared.options.keep {
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
