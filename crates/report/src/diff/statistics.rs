//! What the variation of a figure between blocks of a recording says about it.

/// Number of resamplings of a bootstrap.
const RESAMPLES: usize = 200;
/// Fixed seed, so that the same files always give the same answer.
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;
/// Maximum correlation of neighbouring blocks that is taken into account.
const MOST_CORRELATED: f64 = 0.8;

/// A figure of one recording.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Estimate {
    pub(super) value: f64,
    /// Variance of the value.
    pub(super) variance: f64,
    /// Degrees of freedom of the variance.
    pub(super) freedom: f64,
}

impl Estimate {
    /// The same with at least this variance.
    pub(super) fn at_least(self, variance: f64) -> Self {
        Self { variance: self.variance.max(variance), ..self }
    }

    /// The estimate of this value times a constant.
    pub(super) fn scaled(self, factor: f64) -> Self {
        Self { value: self.value * factor, variance: self.variance * factor * factor, ..self }
    }
}

/// The ratio of two sums, given as a pair for each block. Its variance is that of the linearised ratio (Cochran, Sampling
/// Techniques, 6.4); if neighbouring blocks are correlated, the effective number of blocks is lower.
///
/// `None`: fewer than two blocks have a positive divisor.
pub(super) fn ratio(blocks: impl Iterator<Item = (f64, f64)>) -> Option<Estimate> {
    let blocks: Vec<(f64, f64)> = blocks.filter(|(_, of)| *of > 0.0).collect();
    let n = blocks.len() as f64;
    if blocks.len() < 2 {
        return None;
    }
    let (part, whole) = blocks.iter().fold((0.0, 0.0), |sum, block| (sum.0 + block.0, sum.1 + block.1));
    let value = part / whole;
    let off: Vec<f64> = blocks.iter().map(|(part, of)| part - value * of).collect();
    let squares: f64 = off.iter().map(|off| off * off).sum();
    let neighbours: f64 = off.windows(2).map(|pair| pair[0] * pair[1]).sum();
    let alike = if squares > 0.0 { (neighbours / squares).clamp(0.0, MOST_CORRELATED) } else { 0.0 };
    let inflation = (1.0 + alike) / (1.0 - alike);
    let variance = inflation * n / (n - 1.0) * squares / (whole * whole);
    Some(Estimate { value, variance, freedom: ((n - 1.0) / inflation).max(1.0) })
}

/// The variance of a statistic by a bootstrap over blocks: `of` computes it for the number of times that each block is taken. `None` if a
/// resampling has no value.
pub(super) fn bootstrap(blocks: usize, mut of: impl FnMut(&[u32]) -> Option<f64>) -> Option<f64> {
    let mut random = Random(SEED);
    let mut taken = vec![0_u32; blocks];
    let (mut sum, mut squares, mut count) = (0.0, 0.0, 0.0);
    let middle = of(&vec![1; blocks])?;
    for _ in 0..RESAMPLES {
        taken.fill(0);
        for _ in 0..blocks {
            taken[random.below(blocks)] += 1;
        }
        let value = of(&taken)? - middle;
        sum += value;
        squares += value * value;
        count += 1.0;
    }
    let mean: f64 = sum / count;
    // A resampling takes n blocks of n, so its variance is (n - 1) / n of the true one.
    let n = blocks.max(2) as f64;
    Some((squares / count - mean * mean).max(0.0) * n / (n - 1.0))
}

/// `SplitMix64`.
struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        // The high half of the product: as uniform as 64 bits allow.
        ((u128::from(mixed) * most as u128) >> 64) as usize
    }
}

/// Standard error of the difference of two figures, and its degrees of freedom (Welch–Satterthwaite).
pub(super) fn difference(a: &Estimate, b: &Estimate) -> (f64, f64) {
    let both = a.variance + b.variance;
    if both <= 0.0 {
        return (0.0, a.freedom + b.freedom);
    }
    let freedom = both * both / (a.variance.powi(2) / a.freedom + b.variance.powi(2) / b.freedom);
    (both.sqrt(), freedom.max(1.0))
}

/// Probability of a difference at least this large if the true difference is at most `least` in either direction: a minimum-effect
/// test with Welch's t.
pub(super) fn p_value(a: &Estimate, b: &Estimate, least: f64) -> f64 {
    let beyond = (b.value - a.value).abs() - least;
    if beyond.is_nan() || beyond <= 0.0 {
        return 1.0;
    }
    let (error, freedom) = difference(a, b);
    if error == 0.0 {
        return 0.0;
    }
    (2.0 * upper_tail(beyond / error, freedom)).min(1.0)
}

/// Probability of a value at least this far beyond `bound` if the true value is not beyond it.
pub(super) fn p_beyond(of: &Estimate, bound: f64, above: bool) -> f64 {
    let beyond = if above { of.value - bound } else { bound - of.value };
    if beyond.is_nan() || beyond <= 0.0 {
        return 1.0;
    }
    if of.variance <= 0.0 {
        return 0.0;
    }
    upper_tail(beyond / of.variance.sqrt(), of.freedom)
}

/// Half of the width of the 95 % confidence interval of the difference.
pub(super) fn margin(a: &Estimate, b: &Estimate) -> f64 {
    let (error, freedom) = difference(a, b);
    let (mut low, mut high) = (0.0, 20.0);
    for _ in 0..50 {
        let middle = f64::midpoint(low, high);
        if upper_tail(middle, freedom) > 0.025 { low = middle } else { high = middle }
    }
    high * error
}

/// Selects the significant ones of these probabilities, so that the expected share of false ones among them is at most `level` (Benjamini
/// and Hochberg, 1995). If nothing has changed, the probability of selecting any is at most `level`.
pub(super) fn stand_out(p: &[f64], level: f64) -> Vec<bool> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|a, b| p[*a].total_cmp(&p[*b]));
    let many = p.len() as f64;
    let last = order.iter().enumerate().rfind(|(rank, at)| p[**at] <= level * (*rank as f64 + 1.0) / many);
    let called = last.map_or(0, |(rank, _)| rank + 1);
    let mut found = vec![false; p.len()];
    for &at in &order[..called] {
        found[at] = true;
    }
    found
}

/// P(T > t) of Student's t, for t >= 0: half of the regularised incomplete beta function.
fn upper_tail(t: f64, freedom: f64) -> f64 {
    0.5 * incomplete_beta(freedom / (freedom + t * t), freedom / 2.0, 0.5)
}

/// The regularised incomplete beta function, by its continued fraction (Numerical Recipes, 6.4; Lentz).
fn incomplete_beta(x: f64, a: f64, b: f64) -> f64 {
    if x <= 0.0 {
        return 0.0;
    }
    if x >= 1.0 {
        return 1.0;
    }
    let front = (ln_gamma(a + b) - ln_gamma(a) - ln_gamma(b) + a * x.ln() + b * (-x).ln_1p()).exp();
    if x < (a + 1.0) / (a + b + 2.0) {
        front * fraction(x, a, b) / a
    } else {
        1.0 - front * fraction(1.0 - x, b, a) / b
    }
}

fn fraction(x: f64, a: f64, b: f64) -> f64 {
    const TINY: f64 = 1e-300;
    let away_from_zero = |value: f64| if value.abs() < TINY { TINY } else { value };
    let mut above = 1.0;
    let mut below = 1.0 / away_from_zero(1.0 - (a + b) * x / (a + 1.0));
    let mut sum = below;
    for step in 1..300 {
        let m = f64::from(step);
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        for term in [even, odd] {
            below = 1.0 / away_from_zero(1.0 + term * below);
            above = away_from_zero(1.0 + term / above);
            sum *= below * above;
        }
        if (below * above - 1.0).abs() < 1e-12 {
            break;
        }
    }
    sum
}

/// ln Γ(x) for positive x (Lanczos; Numerical Recipes, 6.1).
fn ln_gamma(x: f64) -> f64 {
    const TERMS: [f64; 6] = [
        76.180_091_729_471_46,
        -86.505_320_329_416_77,
        24.014_098_240_830_91,
        -1.231_739_572_450_155,
        0.120_865_097_386_617_5e-2,
        -0.539_523_938_495_3e-5,
    ];
    let above = x + 5.5;
    let sum = TERMS
        .iter()
        .enumerate()
        .fold(1.000_000_000_190_015, |sum, (at, term)| sum + term / (x + 1.0 + at as f64));
    (x + 0.5) * above.ln() - above + (2.506_628_274_631_000_5 * sum / x).ln()
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "sums of whole numbers are exact")]
mod tests {
    use super::*;

    /// Values from printed tables of Student's t.
    #[test]
    fn students_t() {
        for (t, freedom, expected) in [
            (0.0, 5.0, 0.5),
            (2.015, 5.0, 0.05),
            (2.571, 5.0, 0.025),
            (6.869, 5.0, 0.0005),
            (1.812, 10.0, 0.05),
            (2.457, 30.0, 0.01),
            (12.706, 1.0, 0.025),
            (2.576, 1e6, 0.005),
        ] {
            let found = upper_tail(t, freedom);
            assert!((found - expected).abs() < 2e-4 * (1.0 + expected), "{t} {freedom}: {found}");
        }
        let one = Estimate { value: 1.0, variance: 0.5, freedom: 15.0 };
        // t(30) at 2.5 % is 2.042.
        assert!((margin(&one, &one) - 2.042).abs() < 1e-3, "{}", margin(&one, &one));
    }

    /// The worked example of the paper: with 15 tests at 5 %, the four smallest are selected.
    #[test]
    fn many_tests() {
        let p = [
            0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719,
            0.6528, 0.7590, 1.0,
        ];
        let called = stand_out(&p, 0.05);
        assert_eq!(called.iter().filter(|called| **called).count(), 4);
        assert!(called[..4].iter().all(|called| *called));
        assert_eq!(stand_out(&[], 0.05), Vec::<bool>::new());
        assert_eq!(stand_out(&[0.04], 0.01), [false]);
    }

    /// Ratios of equal blocks are means, and their variance is that of the mean.
    #[test]
    fn ratios() {
        let found = ratio([(1.0, 2.0), (3.0, 2.0), (1.0, 2.0), (3.0, 2.0), (9.0, 0.0)].into_iter()).unwrap();
        assert_eq!((found.value, found.freedom), (1.0, 3.0));
        // Of 0.5, 1.5, 0.5, 1.5: (1/3) / 4.
        assert!((found.variance - 1.0 / 12.0).abs() < 1e-12, "{}", found.variance);
        assert_eq!(ratio([(1.0, 1.0), (1.0, 0.0)].into_iter()), None);
        // Blocks that drift carry less information than blocks that jump.
        let drifts = ratio((0..20).map(|at| (f64::from(at), 1.0))).unwrap();
        let jumps = ratio((0..20).map(|at| (f64::from(at * 7 % 20), 1.0))).unwrap();
        assert!(drifts.variance > 3.0 * jumps.variance && drifts.freedom < jumps.freedom);
    }

    /// The bootstrap of a mean has the variance of a mean.
    #[test]
    fn resampling() {
        let values: Vec<f64> = (0..30).map(|at| f64::from(at * 17 % 30)).collect();
        let mean = |taken: &[u32]| {
            let sum: f64 = values.iter().zip(taken).map(|(value, times)| value * f64::from(*times)).sum();
            Some(sum / 30.0)
        };
        let found = bootstrap(30, mean).unwrap();
        // Variance of 0 to 29, with n - 1: 77.5.
        assert!((found / (77.5 / 30.0) - 1.0).abs() < 0.25, "{found}");
        assert_eq!(bootstrap(3, |_| None), None);
    }

    /// A difference up to the minimum effect is never called, a certain one always is.
    #[test]
    fn least_effect() {
        let of = |value| Estimate { value, variance: 0.01, freedom: 20.0 };
        assert_eq!(p_value(&of(1.0), &of(1.2), 0.2), 1.0);
        assert!(p_value(&of(1.0), &of(1.3), 0.2) > 0.3);
        assert!(p_value(&of(1.0), &of(2.5), 0.2) < 1e-6);
        let certain = |value| Estimate { value, variance: 0.0, freedom: 1.0 };
        assert_eq!(p_value(&certain(1.0), &certain(2.0), 0.5), 0.0);
        assert_eq!(p_value(&certain(1.0), &certain(f64::NAN), 0.5), 1.0);
        assert!(p_beyond(&of(1.5), 1.0, true) < 0.01 && p_beyond(&of(1.5), 1.0, false) == 1.0);
    }
}
