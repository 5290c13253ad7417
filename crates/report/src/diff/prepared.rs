//! A recording of a comparison, with the blocks it is split into.

use super::{
    blocks::{Cut, Series, Times},
    figures::Measured,
    gather::Side,
    statistics,
};

/// A side with its blocks.
pub(super) struct Prepared<'a> {
    pub(super) side: &'a Side,
    pub(super) cut: Option<Cut>,
}

impl Prepared<'_> {
    /// The ratio of a sum to another, usually to the processes' time in nanoseconds.
    pub(super) fn per_time(&self, series: &Series, of: &Series) -> Measured {
        let total = of.total();
        let value = (total > 0.0).then(|| series.total() / total);
        let blocks = self
            .cut
            .as_ref()
            .and_then(|cut| statistics::ratio(series.blocks(cut).into_iter().zip(of.blocks(cut))));
        blocks.map_or(Measured::bare(value), Measured::of)
    }

    pub(super) fn quantile(&self, times: &Times, quantile: f64) -> Measured {
        match times.quantile(quantile, self.cut.as_ref()) {
            Some((value, Some(variance))) => {
                let freedom = self.cut.as_ref().map_or(1.0, |cut| cut.blocks as f64 - 1.0);
                Measured::of(statistics::Estimate { value, variance, freedom })
            }
            found => Measured::bare(found.map(|(value, _)| value)),
        }
    }
}
