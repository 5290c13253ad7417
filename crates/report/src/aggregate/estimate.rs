//! Estimates of sums from a sample of their parts. Each part is taken with a probability of its own, independently of the others
//! (D. G. Horvitz and D. J. Thompson, "A generalization of sampling without replacement from a finite universe", 1952).

/// An estimate of a sum, and its uncertainty.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimate {
    /// The sum. Its expectation is the sum of all parts, including those that were not taken.
    pub sum: f64,
    /// An estimate of the variance of `sum`, also unbiased.
    pub variance: f64,
}

impl Estimate {
    /// Adds a part that was taken with this probability.
    pub fn add(&mut self, value: f64, probability: f64) {
        self.sum += value / probability;
        self.variance += value * value * (1.0 - probability) / (probability * probability);
    }

    /// The standard error: the square root of the variance.
    pub fn error(&self) -> f64 {
        self.variance.sqrt()
    }

    /// The sum, rounded to a whole number.
    pub fn rounded(&self) -> u64 {
        self.sum.round() as u64
    }
}

/// Numbers of calls, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CallsAndBytes {
    /// Number of calls that were taken.
    pub taken: u64,
    /// Estimated number of all calls.
    pub calls: Estimate,
    /// Estimated bytes of all calls.
    pub bytes: Estimate,
}

impl CallsAndBytes {
    /// Adds a call that was taken with this probability.
    pub fn add(&mut self, bytes: u64, probability: f64) {
        self.taken += 1;
        self.calls.add(1.0, probability);
        self.bytes.add(bytes as f64, probability);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts that are always taken are exact; over many draws the mean is the sum, and the spread is that of the estimated variance.
    #[test]
    fn without_bias() {
        const RUNS: u32 = 4_000;
        let mut exact = CallsAndBytes::default();
        exact.add(300, 1.0);
        assert_eq!((exact.calls.sum, exact.bytes.sum, exact.bytes.error()), (1.0, 300.0, 0.0));

        let sizes: Vec<u64> = (1..=200).map(|n| n * 7 % 90 + 10).collect();
        let (truth, period) = (sizes.iter().sum::<u64>() as f64, 200.0);
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1_u64 << 53) as f64
        };
        let (mut sum, mut squares, mut variance) = (0.0, 0.0, 0.0);
        for _ in 0..RUNS {
            let mut all = CallsAndBytes::default();
            for &size in &sizes {
                let probability = size as f64 / period;
                if random() < probability {
                    all.add(size, probability);
                }
            }
            sum += all.bytes.sum;
            squares += (all.bytes.sum - truth).powi(2);
            variance += all.bytes.variance;
        }
        let runs = f64::from(RUNS);
        let (spread, estimated) = (squares / runs, variance / runs);
        // Five standard errors of a mean of that many runs; the variance of the variance of a nearly normal variable is 2/n of its square.
        assert!((sum / runs - truth).abs() < 5.0 * (estimated / runs).sqrt(), "{} {truth}", sum / runs);
        assert!((spread / estimated - 1.0).abs() < 5.0 * (2.0 / runs).sqrt() + 0.02, "{spread} {estimated}");
    }
}
