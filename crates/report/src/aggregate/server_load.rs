//! The load of a server over a time.

use crate::model::load::ServerLoad;

/// What readings of a load come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadSummary {
    /// Threads that were serving.
    pub busy: Readings,
    /// Connections in accept queues.
    pub waiting: Readings,
}

/// Readings of one number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readings {
    /// How many there were, those included that do not show the number.
    pub all: u64,
    /// How many show it.
    pub count: u64,
    /// Their sum.
    pub sum: u64,
    /// The largest.
    pub most: u64,
}

impl LoadSummary {
    /// Adds what was read at one moment.
    pub fn add(&mut self, load: &ServerLoad) {
        self.busy.add(load.busy.map(u64::from));
        self.waiting.add(load.waiting());
    }
}

impl Readings {
    fn add(&mut self, value: Option<u64>) {
        self.all += 1;
        if let Some(value) = value {
            self.count += 1;
            self.sum = self.sum.saturating_add(value);
            self.most = self.most.max(value);
        }
    }

    /// Their average; `None` without any.
    pub fn average(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum as f64 / self.count as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::load::AcceptQueue;

    /// What is not known is not zero.
    #[test]
    fn readings() {
        let mut summary = LoadSummary::default();
        summary.add(&ServerLoad::default());
        assert_eq!((summary.busy.average(), summary.waiting.average()), (None, None));
        let queue = |waiting| AcceptQueue { inode: u64::from(waiting), waiting };
        summary.add(&ServerLoad { ts_ns: 1, busy: Some(0), queues: vec![queue(3), queue(4)] });
        summary.add(&ServerLoad { ts_ns: 2, busy: Some(5), queues: Vec::new() });
        assert_eq!(summary.busy, Readings { all: 3, count: 2, sum: 5, most: 5 });
        assert_eq!(summary.waiting, Readings { all: 3, count: 1, sum: 7, most: 7 });
        assert_eq!((summary.busy.average(), summary.waiting.average()), (Some(2.5), Some(7.0)));
    }
}
