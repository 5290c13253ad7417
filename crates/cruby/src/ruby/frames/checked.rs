//! Data that was read from objects of the VM, and how long it stays valid.

use std::sync::Arc;

use gctrace_common::stack::same_majors;

use super::read::Failure;

/// Data that was read, and when it was last found unchanged.
pub(super) struct Checked<T> {
    epoch: u64,
    /// Whether it was read from old objects, which do not change until the next major GC.
    old: bool,
    pub(super) known: Arc<T>,
}

impl<T> Checked<T> {
    pub(super) fn new(epoch: u64, old: bool, known: T) -> Self {
        Self { epoch, old, known: Arc::new(known) }
    }

    /// It was read again and is unchanged.
    pub(super) fn found_again(&mut self, epoch: u64, old: bool) -> Arc<T> {
        (self.epoch, self.old) = (epoch, old);
        Arc::clone(&self.known)
    }

    /// The data, if it need not be read again in this epoch.
    pub(super) fn at(&self, epoch: u64, trust: &mut Trust) -> Option<Arc<T>> {
        if self.epoch != epoch {
            if trust.refused || !self.old || !same_majors(self.epoch, epoch) {
                return None;
            }
            trust.used = true;
        }
        Some(Arc::clone(&self.known))
    }
}

/// Whether data that was read from old objects is assumed to be still valid. It must match what the kernel side saw: if it does not, a GC
/// was missed, or one has moved objects without an event (`GC.compact` of 2.7), and everything is read again.
#[derive(Debug, Default)]
pub(super) struct Trust {
    refused: bool,
    used: bool,
}

impl Trust {
    /// Whether to retry without trust after this result.
    pub(super) fn retries<T>(&mut self, found: &Result<T, Failure>) -> bool {
        let again = self.used && matches!(found, Err(Failure::Stale));
        *self = Self { refused: again, used: false };
        again
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Data from old objects is valid until a major GC, other data until any GC; after a mismatch nothing is valid for one retry.
    #[test]
    fn holds() {
        const MAJOR: u64 = gctrace_common::stack::MAJOR_EPOCH;
        for (old, epoch, holds) in
            [(true, 7, true), (true, 8, true), (true, MAJOR | 7, false), (false, 7, true), (false, 8, false)]
        {
            let checked = Checked::new(7, old, "code");
            let mut trust = Trust::default();
            assert_eq!(checked.at(epoch, &mut trust).is_some(), holds, "{old} {epoch}");
            let stale: Result<(), Failure> = Err(Failure::Stale);
            let retries = trust.retries(&stale);
            assert_eq!(retries, old && epoch == 8);
            assert_eq!(checked.at(epoch, &mut trust).is_some(), holds && !retries);
            assert!(!trust.retries(&stale), "once");
            assert_eq!(checked.at(epoch, &mut trust).is_some(), holds, "the next frame");
        }
        let mut trust = Trust { used: true, refused: false };
        assert!(!trust.retries(&Err::<(), _>(Failure::Unreadable)) && !trust.retries(&Ok(())));
    }
}
