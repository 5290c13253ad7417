//! The load of a server over a period.

use crate::model::load::ServerLoad;

/// Summary of load readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadSummary {
    /// Number of threads that were serving.
    pub busy: Readings,
    /// Number of connections in accept queues.
    pub waiting: Readings,
}

/// Readings of one number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readings {
    /// Number of readings, including those in which the number is unknown.
    pub all: u64,
    /// Number of readings in which it is known.
    pub count: u64,
    /// Their sum.
    pub sum: u64,
    /// The largest.
    pub most: u64,
}

impl LoadSummary {
    /// Adds the readings of one moment.
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

    /// Average of the readings; `None` if there are none.
    pub fn average(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum as f64 / self.count as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::load::AcceptQueue;

    /// Unknown is not zero.
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
