//! Decides whether advice is worth its price: time in the GC against memory, both as shares of what the program takes now.

use super::{Case, Verdict, percent};
use crate::tune::{Advice, Price, Strategy, TradeOff};

/// A smaller share of additional memory is not weighed: two runs of the same program differ by as much.
const FREE_MEMORY: f64 = 0.05;
/// A smaller share of the program's time is not worth a change that costs memory: the spread between runs hides it.
pub(super) const LEAST_TIME: f64 = 0.02;
/// Maximum share of memory spent per share of time saved: twice the memory for a tenth of the time.
const MEMORY_FOR_TIME: f64 = 10.0;
/// With the strategy for memory: maximum share of time spent per share of memory saved.
const TIME_FOR_MEMORY: f64 = 1.0;

/// The likely savings and costs; `None` if either is unknown. `share` is the GC's share of the time.
pub(super) fn trade_off(price: &Price, share: Option<f64>) -> Option<TradeOff> {
    let now = price.peak_rss_now.filter(|now| *now > 0.0)?;
    let (time_saved, memory_added) = (time_saved(price, share)?, price.likely_peak_rss? / now - 1.0);
    Some(TradeOff { time_saved, memory_added })
}

fn time_saved(price: &Price, share: Option<f64>) -> Option<f64> {
    Some(share? * (1.0 - price.likely_gc_time?))
}

/// Whether a change may cost more time than it likely saves, and likely saves little: long strings on 3.1 were likely × 0.96, at most × 1.20, and
/// measured × 1.29 (docs/collector.md).
pub(super) fn is_gamble(case: &Case<'_>, price: &Price) -> bool {
    let more = price.gc_time.zip(price.likely_gc_time).is_some_and(|([_, most], likely)| most + likely > 2.0);
    more && time_saved(price, case.share_of_time()).is_some_and(|saved| saved < LEAST_TIME)
}

/// The advice with its savings and costs, or why it is a poor trade-off. If the time in the GC
/// is not measured, or the sets have no memory figures, there is nothing to weigh.
pub(super) fn worth(case: &Case<'_>, mut advice: Advice) -> Verdict {
    let price = &advice.effect.price;
    let share = case.share_of_time();
    let saved = time_saved(price, share);
    if let Some(saved) = saved.filter(|saved| case.strategy == Strategy::Speed && *saved < LEAST_TIME)
        && price.peak_rss_now.is_some()
        && price.likely_peak_rss.is_none()
    {
        return Err(format!(
            "not worth it: about {} of the time would be saved, for an unknown amount of memory; at least {} must be",
            percent(saved.max(0.0)),
            percent(LEAST_TIME)
        ));
    }
    let Some(trade_off) = trade_off(price, share) else { return Ok(advice) };
    let TradeOff { time_saved, memory_added } = trade_off;
    let now = share.map_or_else(String::new, |share| format!(" of the {} in the GC", percent(share)));
    match case.strategy {
        Strategy::Speed if memory_added > FREE_MEMORY => {
            let priced = format!(
                "not worth it: about {} of the time{now} would be saved, for {:.0} % more memory",
                percent(time_saved.max(0.0)),
                memory_added * 100.0
            );
            if time_saved < LEAST_TIME {
                return Err(format!("{priced}; at least {} must be", percent(LEAST_TIME)));
            }
            if memory_added > MEMORY_FOR_TIME * time_saved {
                return Err(format!(
                    "{priced}; that may cost at most {:.0} %",
                    MEMORY_FOR_TIME * time_saved * 100.0
                ));
            }
        }
        Strategy::Memory if -time_saved > TIME_FOR_MEMORY * (-memory_added).max(0.0) + f64::EPSILON => {
            return Err(format!(
                "not worth it: about {:.0} % less memory, for {} more of the time than the {} in the GC now",
                (-memory_added).max(0.0) * 100.0,
                percent(-time_saved),
                share.map_or_else(String::new, percent)
            ));
        }
        _ => {}
    }
    advice.effect.price.trade_off = Some(trade_off);
    Ok(advice)
}
