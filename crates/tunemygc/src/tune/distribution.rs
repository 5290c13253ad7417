//! Quantiles of values too numerous to keep, from counts per logarithmic bucket. Sums of distributions are exact.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Binary logarithm of the number of buckets per power of two: a quantile is at most 1/64 (1.6 %) above the true one.
const FINENESS: u32 = 6;

/// Counts of values by size.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Distribution {
    counts: BTreeMap<u16, u64>,
    max: u64,
}

impl Distribution {
    /// Adds a value.
    pub fn add(&mut self, value: u64) {
        *self.counts.entry(bucket(value)).or_default() += 1;
        self.max = self.max.max(value);
    }

    /// Adds all values of another distribution.
    pub fn merge(&mut self, other: &Self) {
        for (bucket, count) in &other.counts {
            let sum = self.counts.entry(*bucket).or_default();
            *sum = sum.saturating_add(*count);
        }
        self.max = self.max.max(other.max);
    }

    /// Number of values.
    pub fn n(&self) -> u64 {
        self.counts.values().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// The largest value; 0 if there are none.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The value at or below which this share of the values lies, rounded up by at most 1.6 %; `None` if there are no values.
    pub fn quantile(&self, share: f64) -> Option<u64> {
        let rank = ((self.n() as f64 * share).ceil() as u64).max(1);
        let mut seen = 0_u64;
        self.counts.iter().find_map(|(bucket, count)| {
            seen = seen.saturating_add(*count);
            (seen >= rank).then(|| upper(*bucket).min(self.max))
        })
    }

    /// The median, rounded as in [`Distribution::quantile`].
    pub fn median(&self) -> Option<u64> {
        self.quantile(0.5)
    }
}

fn bucket(value: u64) -> u16 {
    let log = 64 - value.leading_zeros();
    let shift = log.saturating_sub(FINENESS + 1);
    // `value >> shift` is below 2^(FINENESS + 1), and at least half of that unless the shift is 0.
    (u64::from(shift << FINENESS) + (value >> shift)) as u16
}

/// The largest value of a bucket.
fn upper(bucket: u16) -> u64 {
    let bucket = u64::from(bucket);
    let shift = (bucket >> FINENESS).saturating_sub(1);
    let base = bucket - (shift << FINENESS);
    if shift >= 64 - u64::from(FINENESS) {
        return u64::MAX;
    }
    (u128::from(base + 1) << shift).saturating_sub(1).min(u128::from(u64::MAX)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every quantile is at most 1.6 % above the true one, and never below; merged parts give the same as one distribution.
        #[test]
        fn quantiles(mut values in proptest::collection::vec(any::<u64>(), 1..200), shift in 0_u32..64) {
            for value in &mut values {
                *value >>= shift;
            }
            let (mut whole, mut parts) = (Distribution::default(), [Distribution::default(), Distribution::default()]);
            for (at, value) in values.iter().enumerate() {
                whole.add(*value);
                parts[at % 2].add(*value);
            }
            let [mut first, second] = parts;
            first.merge(&second);
            prop_assert_eq!(&first, &whole);
            values.sort_unstable();
            for share in [0.0, 0.1, 0.5, 0.9, 1.0] {
                let rank = ((values.len() as f64 * share).ceil() as usize).max(1);
                let (truth, reported) = (values[rank - 1], whole.quantile(share).unwrap());
                prop_assert!(reported >= truth && reported - truth <= truth / 64, "{truth} reported as {reported}");
            }
            prop_assert_eq!(whole.n(), values.len() as u64);
        }
    }

    /// An empty distribution has no quantiles; hostile counts do not overflow.
    #[test]
    fn edges() {
        assert_eq!(Distribution::default().median(), None);
        let mut both: Distribution =
            serde_json::from_str(r#"{"counts":{"65535":18446744073709551615},"max":7}"#).unwrap();
        both.merge(&both.clone());
        assert_eq!((both.n(), both.median()), (u64::MAX, Some(7)));
    }
}
