//! The share of off-CPU time without a stack, in words.

use super::StackCounts;

/// Smallest share that is reported.
const LEAST: f64 = 0.001;

/// The share of the reported off-CPU time that has no stack, 0 to 1; `None` if no time was reported.
pub fn share_without_stack(counts: &StackCounts) -> Option<f64> {
    (counts.off_cpu_ns > 0).then(|| counts.off_cpu_ns_without_stack as f64 / counts.off_cpu_ns as f64)
}

/// The same as text, if it is large enough to report.
pub fn without_stack(counts: &StackCounts) -> Option<String> {
    let share = share_without_stack(counts).filter(|share| *share >= LEAST)?;
    Some(format!(
        "{:.1} % of off-CPU time has no stack (sampling limit; raise it with --off-cpu-stacks)",
        share * 100.0
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        let counts = |off_cpu_ns, off_cpu_ns_without_stack| StackCounts {
            off_cpu_ns,
            off_cpu_ns_without_stack,
            ..StackCounts::default()
        };
        assert_eq!(share_without_stack(&counts(0, 0)), None);
        assert_eq!(without_stack(&counts(1_000_000, 10)), None);
        let words = without_stack(&counts(1_000, 301)).unwrap();
        assert_eq!(
            words,
            "30.1 % of off-CPU time has no stack (sampling limit; raise it with --off-cpu-stacks)"
        );
    }
}
