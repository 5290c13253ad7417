//! Off-CPU times.

use super::*;

/// A recording that was cut off lacks the off-CPU times that had not ended, and is not compared by those that had.
#[test]
fn cut_off() {
    for (extent, lacks) in [
        (Extent::CutOff, "B was cut off: threads that were off the CPU at that point are missing"),
        (Extent::Part, ""),
        (Extent::Run, ""),
    ] {
        let (mut a, mut b) = (record("A", AS_EVER, 1), record("B", AS_EVER, 2));
        (a.looked.wall, b.looked.wall) = (true, true);
        b.account(&Ledger { kernel: Some(vec![0; Counter::ALL.len()]), extent, ..Ledger::default() });
        let comparison = Comparison::of(&mut a, &mut b);
        let table = comparison.tables.iter().find(|table| table.key == "off_cpu").unwrap();
        assert_eq!(table.absent.join("; "), lacks);
    }
}
