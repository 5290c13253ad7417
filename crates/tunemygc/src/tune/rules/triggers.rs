//! Causes of cycles other than a full heap.

use super::{Case, GC_SHARE, Verdict, hundredths, percent, price, quantile, share, trade_off::worth};
use crate::tune::{Advice, Effect, Measure, Price, Setting, Strategy};

/// Adjusts the number of old objects that are allowed before all of them are marked.
pub(super) fn old_objects(case: &Case<'_>) -> Verdict {
    const NAME: &str = "RUBY_GC_HEAP_OLDOBJECT_LIMIT_FACTOR";
    let evidence = case.evidence;
    let (n, all) = (evidence.majors_by("oldgen"), evidence.all_majors());
    case.often(n, "major cycles because of old objects")?;
    if share(n, all) <= 0.5 {
        return Err(format!(
            "only {} of the major cycles are because of old objects",
            percent(share(n, all))
        ));
    }
    let kept = quantile(&evidence.old_kept, 0.5, "ends of such cycles")? as f64 / 1000.0;
    let found = (1.0 - kept).max(0.0);
    let current = case.value(NAME);
    if current <= 1.0 {
        return Err(format!("{NAME} is {current:.2}: every cycle is a major one by choice"));
    }
    let factor = match case.strategy {
        Strategy::Speed if found < 0.10 => (current * (1.0 + (0.10 - found) * 10.0)).min(4.0),
        Strategy::Speed => {
            return Err(format!("these cycles find {} of the old objects dead", percent(found)));
        }
        Strategy::Memory if found > 0.5 => 1.3,
        Strategy::Memory => {
            return Err(format!("these cycles find only {} of the old objects dead", percent(found)));
        }
    };
    if case.strategy == Strategy::Memory {
        let time = evidence.counted_time();
        let major = time.map(|time| time.major_ms as f64 / 1000.0 / time.seconds);
        match major {
            None => return Err(case.no_time()),
            Some(major) if major > GC_SHARE => {
                return Err(format!("major cycles take {} of the time already", percent(major)));
            }
            Some(_) => {}
        }
    }
    let value = hundredths(factor);
    let factor = value.number();
    if (factor - current).abs() < 0.5 || (case.strategy == Strategy::Memory) != (factor < current) {
        return Err(format!("{NAME} is {current:.2} already"));
    }
    let majors = (current - 1.0) / (factor - 1.0);
    Ok(Advice {
        rule: "",
        set: vec![case.change(NAME, value)?],
        why: format!(
            "{} of the major cycles are because of old objects, and they find {} of them dead",
            percent(share(n, all)),
            percent(found)
        ),
        evidence: vec![
            Measure { metric: "share of major cycles by oldgen", value: share(n, all), n: all },
            Measure { metric: "old objects found dead (median)", value: found, n: evidence.old_kept.n() },
        ],
        effect: Effect {
            text: format!(
                "{majors:.2} times as many major cycles because of old objects, which may become {factor} times as many before one"
            ),
            metric: "major cycles by oldgen",
            factor: Some(majors),
            price: Price { majors: Some([majors.min(1.0), majors.max(1.0)]), ..price::nothing(evidence) },
        },
        confidence: case.confidence(n),
    })
}

/// Avoids minor cycles that are caused by memory outside the heap.
pub(super) fn malloc(case: &Case<'_>) -> Verdict {
    /// The largest limit if the time in the GC is not measured: the effect of a larger one is not visible then.
    const LARGEST_UNSEEN: f64 = 67_108_864.0;
    const LARGEST: f64 = 134_217_728.0;
    let (n, all) = (case.evidence.minors_by("malloc"), case.evidence.all_minors());
    case.often(n, "minor cycles because of malloc")?;
    if share(n, all) <= 0.10 {
        return Err(format!("only {} of the minor cycles are because of malloc", percent(share(n, all))));
    }
    case.speed()?;
    case.is_busy()?;
    let (limit, max) = (case.value("RUBY_GC_MALLOC_LIMIT"), case.value("RUBY_GC_MALLOC_LIMIT_MAX"));
    let largest = if case.share_of_time().is_some() { LARGEST } else { LARGEST_UNSEEN };
    if limit >= largest {
        return Err(format!("RUBY_GC_MALLOC_LIMIT is {limit} already"));
    }
    // A large step is worth it if these cycles take much of the time; if its price is too high, a smaller one may be.
    let much = share(n, all) > 0.5 && case.share_of_time().is_some_and(|time| time > 0.20);
    let steps: &[f64] = if much { &[4.0, 2.0, 1.5] } else { &[2.0, 1.5] };
    let mut poor = None;
    for times in steps {
        let new = (limit * times).min(largest);
        let new_max = (max * times).max(new * 2.0).min(largest * 2.0).max(max);
        let advice = Advice {
            rule: "",
            set: vec![
                case.change("RUBY_GC_MALLOC_LIMIT", Setting::Size(new as u64))?,
                case.change("RUBY_GC_MALLOC_LIMIT_MAX", Setting::Size(new_max as u64))?,
            ],
            why: format!("{} of the minor cycles are because of malloc", percent(share(n, all))),
            evidence: vec![Measure {
                metric: "share of minor cycles by malloc",
                value: share(n, all),
                n: all,
            }],
            effect: Effect {
                text: format!(
                    "about {:.2} times as many cycles because of malloc; for each cycle saved, half a cycle more because no free slot is left; each may leave {:.0} MiB more garbage outside the heap, and several wait to be swept",
                    max / new_max,
                    (new_max - max) / 1_048_576.0
                ),
                metric: "minor cycles by malloc",
                factor: Some(max / new_max),
                price: price::garbage(case, new_max - max, max / new_max),
            },
            confidence: case.confidence(n),
        };
        match worth(case, advice) {
            Ok(advice) => return Ok(advice),
            Err(reason) => _ = poor.get_or_insert(reason),
        }
    }
    Err(poor.unwrap_or_default())
}

/// Avoids major cycles that are caused by memory that old objects hold outside the heap.
pub(super) fn oldmalloc(case: &Case<'_>) -> Verdict {
    /// The largest limit. Without one, nothing frees the memory of dead old objects in a program that has no other major cycles.
    const LARGEST: f64 = 536_870_912.0;
    let evidence = case.evidence;
    let (n, all) = (evidence.majors_by("oldmalloc"), evidence.all_majors());
    case.often(n, "major cycles because of malloc of old objects")?;
    if share(n, all) <= 0.05 {
        return Err(format!(
            "only {} of the major cycles are because of malloc of old objects",
            percent(share(n, all))
        ));
    }
    if case.strategy == Strategy::Memory {
        return Err("these cycles are what frees the memory of dead old objects".to_owned());
    }
    case.is_busy()?;
    let (limit, max) = (case.value("RUBY_GC_OLDMALLOC_LIMIT"), case.value("RUBY_GC_OLDMALLOC_LIMIT_MAX"));
    if max >= LARGEST {
        return Err(format!("RUBY_GC_OLDMALLOC_LIMIT_MAX is {max} already"));
    }
    // As with the limits of other memory: a large step only if its price is weighed.
    let steps: &[f64] = if case.share_of_time().is_some() { &[4.0, 2.0, 1.5] } else { &[2.0, 1.5] };
    let mut poor = None;
    for times in steps {
        let new_max = (max * times).min(LARGEST);
        let new = (limit * times).min(new_max);
        let fewer = max / new_max;
        let advice = Advice {
            rule: "",
            set: vec![
                case.change("RUBY_GC_OLDMALLOC_LIMIT", Setting::Size(new as u64))?,
                case.change("RUBY_GC_OLDMALLOC_LIMIT_MAX", Setting::Size(new_max as u64))?,
            ],
            why: format!(
                "{} of the major cycles are because of malloc of old objects",
                percent(share(n, all))
            ),
            evidence: vec![Measure {
                metric: "share of major cycles by oldmalloc",
                value: share(n, all),
                n: all,
            }],
            effect: Effect {
                text: format!(
                    "about {fewer:.2} times as many such cycles, and for each of them that is saved half a cycle more because no free slot is left; until the next one dead old objects may keep {:.0} MiB more",
                    (new_max - max) / 1_048_576.0
                ),
                metric: "major cycles by oldmalloc",
                factor: Some(fewer),
                price: price::old_garbage(evidence, new_max - max, fewer),
            },
            confidence: case.confidence(n),
        };
        match worth(case, advice) {
            Ok(advice) => return Ok(advice),
            Err(reason) => _ = poor.get_or_insert(reason),
        }
    }
    Err(poor.unwrap_or_default())
}

/// Avoids major cycles that are caused by objects without write barriers.
pub(super) fn unprotected(case: &Case<'_>) -> Verdict {
    const NAME: &str = "RUBY_GC_HEAP_REMEMBERED_WB_UNPROTECTED_OBJECTS_LIMIT_RATIO";
    let (n, all) = (case.evidence.majors_by("shady"), case.evidence.all_majors());
    case.often(n, "major cycles because of objects without write barriers")?;
    if share(n, all) <= 0.10 {
        return Err(format!(
            "only {} of the major cycles are because of such objects",
            percent(share(n, all))
        ));
    }
    case.speed()?;
    let ratio = (case.value(NAME) * 2.0).max(0.02);
    if ratio > 0.08 {
        return Err(format!("{NAME} is {:.2} already", case.value(NAME)));
    }
    Ok(Advice {
        rule: "",
        set: vec![case.change(NAME, hundredths(ratio))?],
        why: format!(
            "{} of the major cycles are because of objects without write barriers (an extension's, mostly)",
            percent(share(n, all))
        ),
        evidence: vec![Measure { metric: "share of major cycles by shady", value: share(n, all), n: all }],
        effect: Effect {
            text: "about half as many such cycles; minor ones scan more of these objects".to_owned(),
            metric: "major cycles by shady",
            factor: Some(0.5),
            price: price::nothing(case.evidence),
        },
        confidence: case.confidence(n),
    })
}

/// Reports cycles that the program requests; they cannot be tuned away.
pub(super) fn explicit(case: &Case<'_>) -> Verdict {
    let evidence = case.evidence;
    let n = evidence.majors_by("force") + evidence.minors_by("method");
    Err(if n == 0 {
        "the program does not call GC.start".to_owned()
    } else {
        format!(
            "{n} cycles were asked for (such as by GC.start): no variable changes that; `by` in gctrace's lines names the caller"
        )
    })
}
