//! A process for which there was no room at first.

use super::*;

/// It is shown when there is room. What it waited for the GVL before that is of earlier seconds.
#[test]
fn earlier_waits() {
    let mut board = board();
    for pid in 0..4097 {
        board.see(&process(pid, "many"), Seen::Process { state: None, now_ns: 100 * S, since_ns: 100 * S });
    }
    let late = (0..4097).find(|pid| board.detail(*pid, 0).is_none()).unwrap();
    let end = ProcessEnd {
        reason: EndReason::Exited,
        ts_ns: 101 * S,
        since_ns: 100 * S,
        outside_ns: 0,
        beyond_ns: 0,
        shutdown: None,
        cycles: 0,
        before: CyclesBefore::Unknown,
        lost: 0,
    };
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
