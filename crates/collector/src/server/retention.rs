//! Sets that are too old are deleted.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::time::{MissedTickBehavior, interval, sleep};

use super::{Shared, now};
use crate::store::BATCH;

/// Between two looks for old sets.
const EVERY: Duration = Duration::from_mins(10);
/// Between two batches: sets come in meanwhile.
const PAUSE: Duration = Duration::from_millis(50);

/// Deletes what is older than it may be, now and then, as long as the collector runs.
pub(super) async fn run(shared: Arc<Shared>) {
    let Some(keep) = shared.options.keep else { return };
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
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
