//! A process for which there was no room at first.

use super::*;

/// The end of a process at this time.
pub(super) fn exited(ts_ns: u64) -> ProcessEnd {
    ProcessEnd {
        reason: EndReason::Exited,
        ts_ns,
        since_ns: 100 * S,
        outside_ns: 0,
        beyond_ns: 0,
        shutdown: None,
        cycles: 0,
        before: CyclesBefore::Unknown,
        lost: 0,
    }
}

/// It is shown when there is room. What it waited for the GVL before that is of earlier seconds.
#[test]
fn earlier_waits() {
    let mut board = board();
    for pid in 0..4097 {
        board.see(&process(pid, "many"), Seen::Process { state: None, now_ns: 100 * S, since_ns: 100 * S });
    }
    let late = (0..4097).find(|pid| board.detail(*pid, 0).is_none()).unwrap();
    let end = exited(101 * S);
    board.see(&process((late + 1) % 4097, "many"), Seen::Ended(&end));
    let mut so_far = GvlSoFar::default();
    let mut waited = |board: &mut Board, seconds: u64| {
        board.tick(seconds * S, true, |_| Sample { cpu_ns: None, rss: None });
        so_far.wait_ns += if seconds == 102 { 900 * S } else { S / 2 };
        board.see(&process(late, "many"), Seen::GvlSoFar(&so_far));
    };
    waited(&mut board, 102);
    waited(&mut board, 103);
    let rows = board.rows(104 * S, Group::Process);
    let gvl = rows.iter().find(|row| row.pid == Some(late)).and_then(|row| row.gvl).unwrap();
    assert!((20.0..=50.0).contains(&gvl), "{gvl} %");
}
