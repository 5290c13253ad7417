//! Sizes of LRU maps.

/// Number of free elements that each CPU may keep for itself, times two: `LOCAL_FREE_TARGET` (`kernel/bpf/bpf_lru_list.c`) is 128 up to Linux 6.15.
const PER_CPU: u32 = 256;

/// Number of entries of an LRU map that must hold `least`. With fewer than the CPUs keep for themselves, the kernel would evict entries that are
/// in use while most elements are free; later kernels scale what a CPU keeps.
pub(super) fn entries(least: u32, cpus: u32) -> u32 {
    least.max(cpus.saturating_mul(PER_CPU))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only hosts with many CPUs need more.
    #[test]
    fn hosts_with_many_cpus_need_more() {
        let of = |cpus| entries(16_384, cpus);
        assert_eq!((of(1), of(64), of(65), of(512)), (16_384, 16_384, 16_640, 131_072));
        assert_eq!(entries(1, u32::MAX), u32::MAX);
    }
}
