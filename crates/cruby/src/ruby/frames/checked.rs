//! What was read of objects of the VM, and for how long it holds.

use std::sync::Arc;

use gctrace_common::stack::same_majors;

use super::read::Failure;

/// Something that was read, and when it was last found to be still the same.
pub(super) struct Checked<T> {
    epoch: u64,
    /// Whether it was read from old objects, which stay as they are until the next major GC.
    old: bool,
    pub(super) known: Arc<T>,
}

impl<T> Checked<T> {
    pub(super) fn new(epoch: u64, old: bool, known: T) -> Self {
        Self { epoch, old, known: Arc::new(known) }
    }

    /// It was read again, and is the same.
    pub(super) fn found_again(&mut self, epoch: u64, old: bool) -> Arc<T> {
        (self.epoch, self.old) = (epoch, old);
        Arc::clone(&self.known)
    }

    /// What is known in an epoch, if it need not be read again.
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

/// Whether what was read from old objects is taken for what they still are. What it names must fit what the kernel side saw: if it does not, a GC was
/// missed, or one has moved objects without an event (`GC.compact` of 2.7), and all is read again.
#[derive(Debug, Default)]
pub(super) struct Trust {
    refused: bool,
    used: bool,
}

impl Trust {
    /// Whether to try once more after this result, and without trust.
    pub(super) fn retries<T>(&mut self, found: &Result<T, Failure>) -> bool {
        let again = self.used && matches!(found, Err(Failure::Stale));
        *self = Self { refused: again, used: false };
        again
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is of old objects holds until a major GC, the rest until any; and once something does not fit, nothing holds for one more try.
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
