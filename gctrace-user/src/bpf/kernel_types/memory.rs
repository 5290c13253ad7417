//! Location of a process's memory counters in this kernel. Two layouts are supported: four words (before Linux 6.2, and on
//! kernels for one CPU), and four `struct percpu_counter`. Any other is rejected, and memory is read from `/proc`.

use std::fs;

use gctrace_common::memory::{
    MAX_COUNTER_BYTES, MAX_SUMMED_CPUS, MEMORY_COUNTERS, MM_ANON, MM_FILE, MM_SHMEM, MM_SWAP, MemoryLayout,
};

use super::{Btf, BtfError};

/// The same layout with the maximum number of CPUs: the worst case for the verifier.
pub(in crate::bpf) fn deepest(layout: MemoryLayout) -> MemoryLayout {
    if layout.shape == MemoryLayout::PER_CPU {
        MemoryLayout { cpus: MAX_SUMMED_CPUS, ..layout }
    } else {
        layout
    }
}

/// The list of CPUs that this machine can have.
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";

/// The number of possible CPUs, if an event can read the per-CPU parts of a counter on all of them.
pub(super) fn summed_cpus() -> Option<u32> {
    consecutive(&fs::read_to_string(POSSIBLE).ok()?).filter(|number| *number <= MAX_SUMMED_CPUS)
}

/// The number of CPUs in a list such as `0-7`; `None` if it has gaps: an impossible CPU has no per-CPU memory.
fn consecutive(cpus: &str) -> Option<u32> {
    match cpus.trim().split_once('-') {
        None => (cpus.trim() == "0").then_some(1),
        Some(("0", last)) => last.parse::<u32>().ok()?.checked_add(1),
        Some(_) => None,
    }
}

/// The layout of the counters. `task`: the type `task_struct`; `cpus`: see [`summed_cpus`].
pub(super) fn layout(btf: &Btf<'_>, task: u32, cpus: Option<u32>) -> Result<MemoryLayout, BtfError> {
    let order = [
        ("MM_FILEPAGES", MM_FILE),
        ("MM_ANONPAGES", MM_ANON),
        ("MM_SWAPENTS", MM_SWAP),
        ("MM_SHMEMPAGES", MM_SHMEM),
        ("NR_MM_COUNTERS", MEMORY_COUNTERS),
    ];
    let indices = btf.enumeration("MM_FILEPAGES");
    let indices = indices.ok_or_else(|| BtfError::Missing("MM_FILEPAGES".to_owned()))?;
    if order.iter().any(|&(name, index)| btf.enumerator(indices, name) != Some(index as u32)) {
        return Err(BtfError::Malformed("the memory counters are not the expected ones"));
    }
    let mm = btf.structure("mm_struct").ok_or_else(|| BtfError::Missing("mm_struct".to_owned()))?;
    let (counters, kept) = btf.place_in(mm, "mm_struct", &["rss_stat"])?;
    let known = MemoryLayout {
        task_mm: btf.offset_in(task, "task_struct", &["mm"])?,
        counters,
        peak: btf.offset_in(mm, "mm_struct", &["hiwater_rss"])?,
        ..MemoryLayout::default()
    };
    match btf.array(kept) {
        Some((element, LENGTH)) if btf.type_name(element) == Some(b"percpu_counter") => {
            per_cpu(btf, known, element, cpus)
        }
        None if btf.type_name(kept) == Some(b"mm_rss_stat") => words(btf, known, task, kept),
        _ => Err(BtfError::Malformed("`mm_struct.rss_stat` is stored in an unknown way")),
    }
}

const LENGTH: u32 = MEMORY_COUNTERS as u32;

/// `struct mm_rss_stat { atomic_long_t count[NR_MM_COUNTERS]; }`.
fn words(btf: &Btf<'_>, known: MemoryLayout, task: u32, kept: u32) -> Result<MemoryLayout, BtfError> {
    let list_of = |list: u32, size: u32| {
        btf.array(list).is_some_and(|(element, length)| length == LENGTH && btf.size(element) == Some(size))
    };
    let (offset, count) = btf.place_in(kept, "mm_rss_stat", &["count"])?;
    if !list_of(count, 8) {
        return Err(BtfError::Malformed("`struct mm_rss_stat` is not four words"));
    }
    // Kernels without split page table locks have no per-thread counts.
    let pending = match btf.place_in(task, "task_struct", &["rss_stat", "count"]) {
        Err(_) => 0,
        Ok((pending, count)) if list_of(count, 4) => pending,
        Ok(_) => return Err(BtfError::Malformed("`task_struct.rss_stat` is not four numbers")),
    };
    Ok(MemoryLayout { shape: MemoryLayout::WORDS, counters: known.counters + offset, pending, ..known })
}

/// `struct percpu_counter rss_stat[NR_MM_COUNTERS]`.
fn per_cpu(
    btf: &Btf<'_>,
    known: MemoryLayout,
    element: u32,
    cpus: Option<u32>,
) -> Result<MemoryLayout, BtfError> {
    let stride = btf.size(element).filter(|size| size % 8 == 0 && *size <= MAX_COUNTER_BYTES);
    let stride = stride.ok_or(BtfError::Malformed("`struct percpu_counter` is too large"))?;
    let (count, number) = btf.place_in(element, "percpu_counter", &["count"])?;
    if btf.size(number) != Some(8) || count % 8 != 0 || count + 8 > stride {
        return Err(BtfError::Malformed("`percpu_counter.count` is not a word"));
    }
    let counts = MemoryLayout { shape: MemoryLayout::COUNTS, stride, count, ..known };
    let Ok(parts) = btf.offset_in(element, "percpu_counter", &["counters"]) else {
        // On a kernel for one CPU the counter has only the count.
        let only = stride == 8 && count == 0;
        return Ok(if only {
            MemoryLayout { shape: MemoryLayout::WORDS, stride: 0, ..counts }
        } else {
            counts
        });
    };
    if parts % 8 != 0 || parts + 8 > stride {
        return Err(BtfError::Malformed("`percpu_counter.counters` is not a pointer"));
    }
    let array_parts = btf.structure("bpf_array").map(|array| btf.offset_in(array, "bpf_array", &["pptrs"]));
    Ok(match (cpus, array_parts) {
        (Some(cpus), Some(Ok(array_parts))) => {
            MemoryLayout { shape: MemoryLayout::PER_CPU, parts, array_parts, cpus, ..counts }
        }
        _ => counts,
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::bpf::kernel_types::{self, VMLINUX, tests::Sample};

    const CPUS: Option<u32> = Some(2);

    /// The types common to all kernels, with the given type of `rss_stat` and additional members of `task_struct`.
    fn kernel(mut btf: Sample, kept: u32, more: &[(&'static str, u32, u32)]) -> Vec<u8> {
        btf.enumeration(&[
            ("MM_FILEPAGES", 0),
            ("MM_ANONPAGES", 1),
            ("MM_SWAPENTS", 2),
            ("MM_SHMEMPAGES", 3),
            ("NR_MM_COUNTERS", 4),
        ]);
        let long = btf.number("long", 8);
        btf.structure("mm_struct", 1472, &[("hiwater_rss", long, 344), ("rss_stat", kept, 960)]);
        let task: Vec<_> = [("mm", long, 1136)].into_iter().chain(more.iter().copied()).collect();
        btf.structure("task_struct", 4096, &task);
        btf.structure("bpf_array", 312, &[("pptrs", long, 312)]);
        btf.bytes()
    }

    fn parsed(bytes: &[u8], cpus: Option<u32>) -> Result<MemoryLayout, BtfError> {
        let btf = Btf::parse(bytes).unwrap();
        layout(&btf, btf.structure("task_struct").unwrap_or(1), cpus)
    }

    /// As in Linux 5.10 and 6.1, with and without per-thread counts.
    #[test]
    fn four_words() {
        let sample = |elements: u32| {
            let mut btf = Sample::default();
            let (long, int) = (btf.number("long", 8), btf.number("int", 4));
            let (words, ints) = (btf.array(long, elements), btf.array(int, 4));
            let kept = btf.structure("mm_rss_stat", 8 * elements, &[("count", words, 0)]);
            let pending = btf.structure("task_rss_stat", 20, &[("events", int, 0), ("count", ints, 4)]);
            (btf, kept, pending)
        };
        let (btf, kept, pending) = sample(4);
        let expected = MemoryLayout {
            shape: MemoryLayout::WORDS,
            task_mm: 1136,
            counters: 960,
            peak: 344,
            pending: 2116,
            ..MemoryLayout::default()
        };
        assert_eq!(parsed(&kernel(btf, kept, &[("rss_stat", pending, 2112)]), CPUS).unwrap(), expected);
        let (btf, kept, _) = sample(4);
        let expected = MemoryLayout { pending: 0, ..expected };
        assert_eq!(parsed(&kernel(btf, kept, &[]), CPUS).unwrap(), expected);
        let (btf, kept, _) = sample(5);
        assert!(parsed(&kernel(btf, kept, &[]), CPUS).is_err());
    }

    /// As from Linux 6.2 on; with too many CPUs the per-CPU parts are left out.
    #[test]
    fn per_cpu_counters() {
        let sample = |name: &'static str, number: u32| {
            let mut btf = Sample::default();
            let long = btf.number("s64", 8);
            let counter = btf.structure(name, 40, &[("count", long, 8), ("counters", long, 32)]);
            let kept = btf.array(counter, number);
            (btf, kept)
        };
        let (btf, kept) = sample("percpu_counter", 4);
        let bytes = kernel(btf, kept, &[]);
        let counts = MemoryLayout {
            shape: MemoryLayout::COUNTS,
            task_mm: 1136,
            counters: 960,
            peak: 344,
            stride: 40,
            count: 8,
            ..MemoryLayout::default()
        };
        let whole =
            MemoryLayout { shape: MemoryLayout::PER_CPU, parts: 32, array_parts: 312, cpus: 2, ..counts };
        assert_eq!(parsed(&bytes, CPUS).unwrap(), whole);
        assert_eq!(parsed(&bytes, None).unwrap(), counts);
        assert_eq!(deepest(whole).cpus, MAX_SUMMED_CPUS);
        for (name, number) in [("percpu_counter", 5), ("percpu_counter_tree", 4)] {
            let (btf, kept) = sample(name, number);
            assert!(parsed(&kernel(btf, kept, &[]), CPUS).is_err(), "{name}[{number}]");
        }
    }

    /// A kernel for one CPU has only the counts.
    #[test]
    fn one_cpu() {
        let mut btf = Sample::default();
        let long = btf.number("s64", 8);
        let counter = btf.structure("percpu_counter", 8, &[("count", long, 0)]);
        let kept = btf.array(counter, 4);
        let layout = parsed(&kernel(btf, kept, &[]), CPUS).unwrap();
        assert_eq!((layout.shape, layout.counters), (MemoryLayout::WORDS, 960));
    }

    /// Counters in another order are rejected, not guessed.
    #[test]
    fn another_order_is_refused() {
        let mut btf = Sample::default();
        btf.enumeration(&[("MM_FILEPAGES", 1), ("MM_ANONPAGES", 0)]);
        assert!(parsed(&btf.bytes(), CPUS).is_err());
    }

    /// Only a list of CPUs without gaps yields a number.
    #[test]
    fn lists_of_cpus() {
        let lists = ["0\n", "0-1\n", "0-255", "1-2", "0-1,4-5", "0,2", "", "0-4294967295"];
        let expected = [Some(1), Some(2), Some(256), None, None, None, None, None];
        assert_eq!(lists.map(consecutive), expected);
    }

    /// This machine's kernel, if it has BTF.
    #[test]
    fn this_kernel() {
        if Path::new(VMLINUX).exists() {
            assert_ne!(kernel_types::memory().unwrap().shape, MemoryLayout::NONE);
        }
    }
}
