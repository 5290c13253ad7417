//! The CPU budget for watching the GVL, tested with made-up costs.

use gctrace_common::gvl::GvlState;

use super::*;

const MS: u64 = 1_000_000;

/// Simulates a program with `hits` hits per second, each of which costs a microsecond including its trap; attaching and
/// detaching take a while. Returns the cost and the stages after `seconds` seconds.
fn run(governor: &mut Governor, from_ns: u64, seconds: u64, hits: u64, stacks: u64) -> (Cost, Vec<Stage>) {
    let (mut cost, mut stages) = (Cost::default(), vec![governor.stage()]);
    let mut pending: Option<(u64, Act)> = None;
    let mut events = true;
    for step in 1..=seconds * 20 {
        let now = from_ns + step * 50 * MS;
        let attached = !matches!(governor.stage(), Stage::Slices(Slice::Waiting) | Stage::Off);
        let closed = !matches!(governor.stage(), Stage::Events | Stage::Sums | Stage::Slices(Slice::Open));
        if attached {
            cost.hits += hits / 20;
            cost.program_ns += hits / 20 * if closed { 60 } else { 300 };
            cost.stacks += if events { stacks / 20 } else { 0 };
        }
        let acts = match pending {
            Some((due, Act::Detach)) if due <= now => {
                pending = None;
                governor.detached();
                governor.tick(now, cost)
            }
            Some((due, _)) if due <= now => {
                pending = None;
                governor.attached(now, cost)
            }
            _ => governor.tick(now, cost),
        };
        for &act in acts {
            match act {
                Act::ReportWaits => events = true,
                Act::OnlySums => events = false,
                Act::Attach | Act::Detach => pending = Some((now + 500 * MS, act)),
                Act::Open | Act::Close => {}
            }
        }
        if stages.last() != Some(&governor.stage()) {
            stages.push(governor.stage());
        }
    }
    (cost, stages)
}

/// If watching costs little, everything is watched.
#[test]
fn cheap() {
    let mut governor = Governor::new(10_000, 2, 0);
    let (_, stages) = run(&mut governor, 0, 60, 10_000, 100);
    assert_eq!(stages, [Stage::Events]);
    assert_eq!(governor.watched(60_000 * MS), (60_000 * MS, 0));
}

/// If only the reports are expensive, only they are suspended, and they return when there are fewer.
#[test]
fn reports() {
    let mut governor = Governor::new(10_000, 2, 0);
    let (_, stages) = run(&mut governor, 0, 4, 5_000, 10_000);
    assert_eq!(stages, [Stage::Events, Stage::Sums]);
    // The costs start again from 0, because they must never decrease.
    governor.window = (4_000 * MS, Cost::default());
    let (_, stages) = run(&mut governor, 4_000 * MS, 20, 5_000, 0);
    assert_eq!(stages, [Stage::Sums, Stage::Events]);
}

/// In the long run, a storm of hits costs what the budget allows, and the watched part of the time is known.
#[test]
fn storm() {
    let mut governor = Governor::new(10_000, 2, 0);
    let (cost, stages) = run(&mut governor, 0, 300, 300_000, 0);
    assert!(stages.contains(&Stage::Slices(Slice::Open)), "{stages:?}");
    assert!(!stages.contains(&Stage::Off));
    let share = cost.ns() as f64 / (300_000.0 * MS as f64 * 2.0);
    assert!(share < 0.012, "{share}");
    let (watched, not) = governor.watched(300_000 * MS);
    assert_eq!(watched + not, 300_000 * MS);
    let share = watched as f64 / (watched + not) as f64;
    assert!(share > 0.005 && share < 0.05, "{share}");
}

/// On a host with many CPUs a process loses no more than on a small one.
#[test]
fn one_process() {
    let mut costliest = CostliestProcess::default();
    assert_eq!(costliest.add([(1, 100), (2, 50)]), 100);
    assert_eq!(costliest.add([(1, 110), (2, 90)]), 140);
    // One process has ended, and another one has the same pid.
    assert_eq!(costliest.add([(1, 30), (2, 90)]), 170);
    assert_eq!(costliest.add([]), 170);
    let mut governor = Governor::new(10_000, 64, 0);
    let mut cost = Cost::default();
    for step in 1..=10 {
        // 2 % of a CPU.
        cost.program_ns += 10 * MS;
        cost.dearest_ns += 2 * MS;
        governor.tick(step * 100 * MS, cost);
    }
    assert_eq!(governor.stage(), Stage::Slices(Slice::Detaching));
    let spread = Cost { program_ns: 1_000 * MS, dearest_ns: 5 * MS, ..Cost::default() };
    let mut governor = Governor::new(10_000, 64, 0);
    for step in 1..=10 {
        let part = |ns| ns * step / 10;
        let cost =
            Cost { program_ns: part(spread.program_ns) / 2, dearest_ns: part(spread.dearest_ns), ..spread };
        assert_eq!(governor.tick(step * 100 * MS, cost), &[]);
    }
}

/// A storm that leaves no budget for slices is not watched at all.
#[test]
fn hopeless() {
    let mut governor = Governor::new(100, 2, 0);
    let (_, stages) = run(&mut governor, 0, 30, 300_000, 0);
    assert_eq!(stages.last(), Some(&Stage::Off));
    let (watched, not) = governor.watched(30_000 * MS);
    assert!(watched < 2_000 * MS && watched + not == 30_000 * MS);
}

/// After a storm everything is watched again.
#[test]
fn calm() {
    let mut governor = Governor::new(100_000, 2, 0);
    run(&mut governor, 0, 30, 400_000, 0);
    let (mut now, mut cost) = (30_000 * MS, Cost { hits: 1 << 40, ..Cost::default() });
    governor.account = (now, cost);
    governor.opened = (now, cost);
    for _ in 0..2_000 {
        now += 50 * MS;
        cost.hits += 10;
        governor.detached();
        governor.tick(now, cost);
        governor.attached(now, cost);
    }
    assert_eq!(governor.stage(), Stage::Events);
}

/// A thread that sleeps all the time is blocked up to the end of the epoch in which it was seen; its state afterwards is unknown.
#[test]
fn asleep_all_the_time() {
    let mut times = OpenTimes::default();
    times.close(500);
    times.open(700);
    let mut thread =
        GvlThread { state: GvlState::Away as u32, reported_ns: 100, since_ns: 100, ..GvlThread::blank() };
    times.tell_rest(&mut thread, None, 1_000);
    assert_eq!(thread.split[GvlState::Away as usize], [0, 0, 400]);
    // A thread that has been seen again: its earlier clocks are gone.
    let mut thread = GvlThread { id: 5, reported_ns: 100, ..GvlThread::blank() };
    let task = GvlTask { owner: 5, epoch: 1, ..GvlTask::default() };
    times.tell_rest(&mut thread, Some(&task), 1_000);
    assert_eq!(thread.split, [[0; 3]; 4]);
}

/// If individual waits are too expensive, they are sampled throughout the run, within the budget, and the gaps are known.
#[test]
fn samples_of_waits() {
    let mut governor = Governor::new(10_000, 2, 0);
    let (cost, stages) = run(&mut governor, 0, 60, 5_000, 10_000);
    assert_eq!(stages, [Stage::Events, Stage::Sums]);
    let share = cost.ns() as f64 / (60_000.0 * MS as f64 * 2.0);
    assert!(share < 0.0105, "{share}");
    let gaps = governor.gaps(0, 60_000 * MS);
    assert!(gaps.iter().all(|gap| gap.summed && gap.from_ns < gap.to_ns), "{gaps:?}");
    // Something is reported in each sixth of the run.
    for sixth in 0..6 {
        let (from, to) = (sixth * 10_000 * MS, (sixth + 1) * 10_000 * MS);
        let within = |gap: &GvlGap| gap.to_ns.min(to).saturating_sub(gap.from_ns.max(from));
        let unreported: u64 = gaps.iter().map(within).sum();
        assert!(unreported < 10_000 * MS - 200 * MS, "{unreported} ns of {from} to {to}: {gaps:?}");
    }
}

/// Slices report individual waits, too, and the times between them are known to be unwatched.
#[test]
fn gaps_between_slices() {
    let mut governor = Governor::new(10_000, 2, 0);
    run(&mut governor, 0, 100, 300_000, 1_000);
    let gaps = governor.gaps(0, 100_000 * MS);
    let unwatched: u64 = gaps.iter().filter(|gap| !gap.summed).map(|gap| gap.to_ns - gap.from_ns).sum();
    assert_eq!(governor.watched(100_000 * MS).1, unwatched);
    assert!(gaps.iter().filter(|gap| !gap.summed).count() > 3, "{gaps:?}");
    assert!(gaps.is_sorted_by(|a, b| a.to_ns <= b.from_ns), "{gaps:?}");
    // While the run lasts, each part is known once it is over: together they are the same gaps.
    let mut parts = Vec::new();
    for at in (0..100_000).step_by(500).map(|ms| ms * MS) {
        for part in governor.gaps(at, at + 500 * MS) {
            part.add_to(&mut parts);
        }
    }
    assert_eq!(parts, gaps);
}

/// Closed intervals are known to the nanosecond, and so are the ends of epochs.
#[test]
fn times() {
    let mut times = OpenTimes::default();
    assert_eq!((times.epoch(), times.closed_within(0, 100), times.end_of(0)), (0, 0, None));
    times.close(10);
    assert_eq!((times.epoch(), times.end_of(0), times.closed_within(0, 25)), (0, Some(10), 15));
    times.open(30);
    times.close(50);
    times.open(60);
    assert_eq!((times.epoch(), times.end_of(1), times.end_of(2)), (2, Some(50), None));
    assert_eq!(times.closed_within(0, 100), 30);
    assert_eq!(times.closed_within(20, 55), 15);
    assert_eq!(times.closed_within(30, 50), 0);
    assert_eq!(times.closed_within(10, 10), 0);
}
