use super::*;

/// A run that only traces the GC loads no programs for sampled stacks, off-CPU threads or the GVL; those of the last
/// resort wait until they are needed; and a program that two options need is loaded once.
#[test]
fn only_what_is_needed() {
    let stacks = StackOptions {
        rate: 99,
        wall: false,
        off_cpu_min: std::time::Duration::ZERO,
        off_cpu_stacks: 0,
        native: false,
        only_blockers: false,
    };
    let gvl = GvlOptions {
        futex: false,
        threshold: std::time::Duration::from_millis(1),
        spans: false,
        budget_ppm: 0,
    };
    let gc = needed(None, None, false, &[], false);
    assert_eq!(gc.len(), 9, "{gc:?}");
    for name in &gc {
        let other = ["gvl_", "tick_", "cpu_", "switch_", "sched_switch", "futex_", "phase_"];
        assert!(!other.iter().any(|prefix| name.starts_with(prefix)), "{name}");
    }
    let ticks = needed(Some(stacks), None, false, &[], false);
    assert!(ticks.contains(&"tick_ruby") && !ticks.contains(&"tick_native"), "{ticks:?}");
    assert!(!ticks.contains(&"sched_switch") && !ticks.contains(&"switch_ruby"), "{ticks:?}");
    let native = needed(Some(StackOptions { native: true, ..stacks }), None, false, &[], false);
    assert_eq!(native.len(), ticks.len() + 1);
    let futex = GvlOptions { futex: true, ..gvl };
    let wall = StackOptions { wall: true, ..stacks };
    for (stacks, gvl) in [(None, Some(gvl)), (None, Some(futex)), (Some(wall), Some(futex))] {
        let names = needed(stacks, gvl, false, &[], false);
        let distinct: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(distinct.len(), names.len(), "{names:?}");
    }
    assert!(needed(None, None, false, &[], true).contains(&"phase_begin"));
}
