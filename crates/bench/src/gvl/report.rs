//! The printed report.

use serde_json::{Value, json};

use super::{
    Plan, Round, Turn,
    costs::{self, Cost, Kernel},
    figures::{Ledger, Quartiles, share},
    load::ENDPOINTS,
};

/// A figure of a turn, if the turn has it.
type Figure = fn(&Turn) -> Option<f64>;

/// The compared figures; for some more is better, for others less.
const COMPARED: [(&str, Figure); 3] = [
    ("requests/s", |turn| Some(turn.load.per_second)),
    ("99th percentile", |turn| turn.load.p99_us),
    ("CPU/request", |turn| Some(turn.cpu_us)),
];

/// By round, the ratio of a figure of an arm to that of GC alone; `None` if a turn lacks it.
fn ratios(rounds: &[Round], arm: usize, figure: Figure) -> Option<Vec<f64>> {
    rounds.iter().map(|turns| Some(figure(&turns[arm])? / figure(&turns[0])?)).collect()
}

/// The sum of all runs of an arm.
fn ledger(rounds: &[Round], arm: usize) -> Ledger {
    Ledger::sum(rounds.iter().map(|turns| turns[arm].ledger))
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".into(), |value| format!("{value:.digits$}"))
}

/// Prints the report as tables.
pub(super) fn print(plan: &Plan, all: &[Vec<Round>], costs: &[Cost]) {
    println!("GVL watched / GC only, by rounds ({} s a turn, {} rounds)", plan.seconds, plan.rounds);
    println!("{:<6}{:<8}{:<17}{:>8}{:>8}{:>8}   rounds", "load", "arm", "", "median", "lower", "upper");
    for ((endpoint, _), rounds) in ENDPOINTS.iter().zip(all) {
        for (place, arm) in plan.arms.iter().enumerate().skip(1) {
            for (what, figure) in COMPARED {
                let Some(ratios) = ratios(rounds, place, figure) else { continue };
                let Some(Quartiles { lower, median, upper }) = Quartiles::of(&ratios) else { continue };
                let ratios: Vec<String> = ratios.iter().map(|ratio| format!("{ratio:.3}")).collect();
                println!(
                    "{endpoint:<6}{:<8}{what:<17}{median:>8.4}{lower:>8.4}{upper:>8.4}   {}",
                    arm.name(),
                    ratios.join(" ")
                );
            }
        }
    }
    println!("\nTurns (medians), and the ledgers of all runs together, including the time before the turns");
    println!(
        "{:<6}{:<8}{:>12}{:>10}{:>12}{:>11}{:>11}{:>10}{:>10}{:>9}{:>13}",
        "load",
        "arm",
        "requests/s",
        "p99 ms",
        "gctrace CPU",
        "% watched",
        "hits/s *",
        "shed %",
        ">10 µs %",
        "ns/hit",
        "µs/hand-over"
    );
    for ((endpoint, _), rounds) in ENDPOINTS.iter().zip(all) {
        for (place, arm) in plan.arms.iter().enumerate() {
            let median = |figure: Figure| {
                let values: Option<Vec<f64>> = rounds.iter().map(|turns| figure(&turns[place])).collect();
                Some(Quartiles::of(&values?)?.median)
            };
            let sums = ledger(rounds, place);
            println!(
                "{endpoint:<6}{:<8}{:>12}{:>10}{:>10} %{:>11}{:>11}{:>10}{:>10}{:>9}{:>13}",
                arm.name(),
                number(median(|turn| Some(turn.load.per_second)), 1),
                number(median(|turn| Some(turn.load.p99_us? / 1e3)), 2),
                number(median(|turn| Some(turn.agent_percent)), 2),
                number(sums.watched_percent(), 1),
                number(sums.hits_per_second(), 0),
                number(sums.shed_percent(), 1),
                number(sums.held_percent(), 1),
                number(sums.ns_per_hit(), 0),
                number(sums.us_per_hand_over(), 2),
            );
        }
    }
    println!(
        "* in a second that is watched; shed: of all hits, those of probes that were being detached, which are not used"
    );
    print_costs(costs);
}

fn print_costs(costs: &[Cost]) {
    println!(
        "\nTime in BPF programs, in short runs that are watched all the time: µs per acquisition of the GVL"
    );
    println!(
        "{:<6}{:<8}{:>10}{:>6}{:>10}{:>8}{:>8}{:>11}   {:>11}{:>8}{:>13}{:>7}",
        "load",
        "arm",
        "hand-overs",
        "hits",
        ">10 µs %",
        "reported",
        "ns/hit",
        "gctrace's",
        "kernel's",
        "points",
        "tracepoints",
        "runs"
    );
    for Cost { target, arm, ledger, with_statistics, kernel } in costs {
        let us = |ns: u64| share(ns, with_statistics.resumed).map(|ns| ns / 1e3);
        // The futex arm has no GVL points.
        let points = |value: Option<f64>| value.filter(|_| kernel.points > 0);
        println!(
            "{target:<6}{:<8}{:>10}{:>6}{:>10}{:>8}{:>8}{:>11}   {:>11}{:>8}{:>13}{:>7}",
            arm.name(),
            ledger.resumed,
            number(share(ledger.hits, ledger.resumed), 2),
            number(ledger.held_percent(), 1),
            ledger.reported,
            number(ledger.ns_per_hit(), 0),
            number(ledger.us_per_hand_over(), 2),
            number(us(kernel.points_ns + kernel.others_ns), 2),
            number(points(us(kernel.points_ns)), 2),
            number(us(kernel.others_ns), 2),
            number(points(share(kernel.points, with_statistics.hits)), 3),
        );
    }
    for (name, what) in costs::targets() {
        println!("{name}: {what}");
    }
    println!(
        ">10 µs: waits of more than 10 µs: the GVL was held; where a wait was shorter, it may have been free\n\
         reported: waits that came out one by one, each with a stack, which is in the kernel's figure and not in gctrace's\n\
         gctrace's: the programs' own clock, at GVL points and where the scheduler meets a watched thread (gvl_ns)\n\
         kernel's: run statistics, in a run of their own: at GVL points, and on tracepoints for all threads of the host\n\
         runs: runs of programs at GVL points for each hit that gctrace counted; 1 if none is missing"
    );
    for Cost { target, arm, ledger, with_statistics, kernel } in costs {
        if *arm == super::Arm::Sums {
            println!(
                "aggregate mode, {target}: {} µs of BPF time for each hand-over by gctrace's clock, {} by the kernel's",
                number(ledger.us_per_hand_over(), 2),
                number(kernel_us(*kernel, *with_statistics), 2)
            );
        }
    }
}

/// Time of all programs per acquisition of the GVL, microseconds.
fn kernel_us(kernel: Kernel, run: Ledger) -> Option<f64> {
    share(kernel.points_ns + kernel.others_ns, run.resumed).map(|ns| ns / 1e3)
}

fn ledger_json(ledger: &Ledger) -> Value {
    json!({
        "gvl_hits": ledger.hits, "gvl_shed": ledger.shed, "gvl_resumed": ledger.resumed, "gvl_ns": ledger.program_ns, "gvl_wait_submitted": ledger.reported,
        "gvl_watched_ns": ledger.watched_ns, "gvl_unwatched_ns": ledger.unwatched_ns, "waits": ledger.waits,
        "waits_over_10us": ledger.held,
    })
}

/// All raw figures, and their summaries.
pub(super) fn to_json(plan: &Plan, all: &[Vec<Round>], costs: &[Cost]) -> Value {
    let turn = |turn: &Turn| {
        json!({
            "requests": turn.load.requests, "requests_per_s": turn.load.per_second, "p99_us": turn.load.p99_us,
            "cpu_us_per_request": turn.cpu_us, "gctrace_cpu_percent": turn.agent_percent, "ledger": ledger_json(&turn.ledger),
        })
    };
    let mut turns = Vec::new();
    for ((endpoint, _), rounds) in ENDPOINTS.iter().zip(all) {
        for (place, arm) in plan.arms.iter().enumerate() {
            let compared: serde_json::Map<String, Value> = COMPARED
                .iter()
                .filter(|_| place > 0)
                .filter_map(|(what, figure)| {
                    let ratios = ratios(rounds, place, *figure)?;
                    let Quartiles { lower, median, upper } = Quartiles::of(&ratios)?;
                    let value = json!({ "median": median, "lower": lower, "upper": upper, "rounds": ratios });
                    Some(((*what).to_owned(), value))
                })
                .collect();
            let rounds: Vec<Value> = rounds.iter().map(|turns| turn(&turns[place])).collect();
            turns.push(
                json!({ "load": endpoint, "arm": arm.name(), "turns": rounds, "to_gc_only": compared }),
            );
        }
    }
    let costs: Vec<Value> = costs
        .iter()
        .map(|cost| {
            let kernel = cost.kernel;
            json!({
                "load": cost.target, "arm": cost.arm.name(), "ledger": ledger_json(&cost.ledger),
                "us_per_hand_over": cost.ledger.us_per_hand_over(),
                "kernel": {
                    "ledger": ledger_json(&cost.with_statistics), "points_ns": kernel.points_ns, "points": kernel.points,
                    "others_ns": kernel.others_ns, "others": kernel.others,
                    "us_per_hand_over": kernel_us(kernel, cost.with_statistics),
                },
            })
        })
        .collect();
    json!({ "seconds": plan.seconds, "rounds": plan.rounds, "arms": turns, "costs": costs })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gvl::load::Load;

    /// Each turn is compared with the turn of its own round; one missing figure drops the figures of all rounds.
    #[test]
    fn pairs() {
        let turn = |per_second, p99_us| Turn {
            load: Load { requests: 10, per_second, p50_us: None, p99_us },
            cpu_us: 1.0,
            agent_percent: 0.0,
            ledger: Ledger::default(),
        };
        let rounds = [
            vec![turn(100.0, Some(2.0)), turn(90.0, Some(4.0))],
            vec![turn(200.0, Some(2.0)), turn(100.0, None)],
        ];
        assert_eq!(ratios(&rounds, 1, COMPARED[0].1), Some(vec![0.9, 0.5]));
        assert_eq!(ratios(&rounds, 1, COMPARED[1].1), None);
        assert_eq!(ratios(&rounds[..1], 1, COMPARED[1].1), Some(vec![2.0]));
    }
}
