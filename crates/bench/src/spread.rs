//! Summaries of the figures of several rounds.

/// Median, minimum and maximum.
#[derive(Debug, PartialEq)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

impl Spread {
    pub(super) fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
        Self { median: f64::midpoint(low, high), min: values[0], max: values[values.len() - 1] }
    }
}

/// The interval that contains the median in at least 95 of 100 cases, by ranks (the sign test); for fewer than six values, their whole range.
pub(super) fn interval(values: &[f64]) -> (f64, f64) {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let count = values.len();
    let (mut outside, mut ways, mut skipped) = (0.0, 1.0, 0);
    for rank in 0..count / 2 {
        outside += ways * 0.5_f64.powi(count as i32);
        if outside > 0.025 {
            break;
        }
        skipped = rank;
        ways *= (count - rank) as f64 / (rank + 1) as f64;
    }
    (values[skipped], values[count - 1 - skipped])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Even and odd numbers of values.
    #[test]
    fn median() {
        assert_eq!(Spread::of([3.0, 1.0, 2.0].into_iter()), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 3.0].into_iter()), Spread { median: 2.5, min: 1.0, max: 4.0 });
    }

    /// The ranks in tables of the sign test: 1 for 6 to 8 values, 2 for 9 to 11, 3 for 12.
    #[test]
    fn intervals_of_medians() {
        let of = |count: usize| interval(&(1..=count).rev().map(|value| value as f64).collect::<Vec<_>>());
        for (count, expected) in [
            (3, (1.0, 3.0)),
            (6, (1.0, 6.0)),
            (8, (1.0, 8.0)),
            (9, (2.0, 8.0)),
            (11, (2.0, 10.0)),
            (12, (3.0, 10.0)),
        ] {
            assert_eq!(of(count), expected, "{count}");
        }
    }
}
