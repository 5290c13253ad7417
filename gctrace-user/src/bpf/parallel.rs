//! Running work in parallel.

use std::{
    num::NonZero,
    sync::{Mutex, PoisonError},
    thread,
};

/// Runs `work` on each thing, with as many threads as there are CPUs, including the caller's: if no further threads can be spawned (because of a
/// container's limit, say), the caller does all of it. The results are in the order of the things.
pub(super) fn each<T: Send, R: Send>(
    things: impl ExactSizeIterator<Item = T> + Send,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let others = thread::available_parallelism().map_or(1, NonZero::get).min(things.len()).saturating_sub(1);
    let things = Mutex::new(things.enumerate());
    let done = Mutex::new(Vec::new());
    let turn = || {
        loop {
            let next = things.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((at, thing)) = next else { return };
            let result = work(thing);
            done.lock().unwrap_or_else(PoisonError::into_inner).push((at, result));
        }
    };
    thread::scope(|scope| {
        for _ in 0..others {
            if let Err(error) = thread::Builder::new().spawn_scoped(scope, turn) {
                log::debug!("starting a thread: {error}; this one does its work");
                break;
            }
        }
        turn();
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_unstable_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order() {
        let squares = each((0..100_u64).collect::<Vec<_>>().into_iter(), |n| n * n);
        assert_eq!(squares, (0..100).map(|n| n * n).collect::<Vec<_>>());
        assert!(each(Vec::<u8>::new().into_iter(), |n| n).is_empty());
    }
}
