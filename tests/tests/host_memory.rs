//! Allocation and memory in the profile formats, from the committed recordings: all readers find the same values.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::perfetto::Trace;
use gctrace_tests::pprof::Profile;
use gctrace_tests::report::Report;
use serde_json::{Map, Value};

/// Objects and bytes by the name of the allocating method.
type ByMethod = BTreeMap<String, (u64, u64)>;

/// The outputs of a recording.
struct Outputs {
    pprof: Profile,
    speedscope: Value,
    firefox: Value,
    perfetto: Trace,
    lines: Report,
}

fn recordings() -> Result<Vec<PathBuf>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/recordings");
    let entries = fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let found: Vec<_> =
        entries.into_iter().filter(|path| path.extension().is_some_and(|name| name == "gctrace")).collect();
    ensure!(found.len() >= 4, "{found:?}");
    Ok(found)
}

fn outputs(recording: &Path, dir: &Path) -> Result<Outputs> {
    let file = |name: &str| dir.join(name);
    let mut args: Vec<PathBuf> = ["report", "--format=jsonl"].map(PathBuf::from).into();
    for (flag, name) in [
        ("--pprof", "pb.gz"),
        ("--speedscope", "speedscope.json"),
        ("--firefox", "firefox.json"),
        ("--perfetto", "perfetto"),
    ] {
        args.extend([PathBuf::from(flag), file(name)]);
    }
    args.push(recording.to_owned());
    let finished = Invocation::new(args)?.run()?;
    ensure!(finished.status.success(), "{}", finished.errors());
    let json = |name| -> Result<Value> { Ok(serde_json::from_slice(&fs::read(file(name))?)?) };
    Ok(Outputs {
        pprof: Profile::open(&file("pb.gz"))?,
        speedscope: json("speedscope.json")?,
        firefox: json("firefox.json")?,
        perfetto: Trace::open(&file("perfetto"))?,
        lines: gctrace_tests::gctrace::read(&finished)?,
    })
}

fn list(value: &Value) -> Result<&Vec<Value>> {
    value.as_array().with_context(|| format!("no list: {value}"))
}

fn number(value: &Value) -> Result<u64> {
    value.as_u64().with_context(|| format!("no number: {value}"))
}

fn at<'a>(table: &'a Value, column: &str, row: &Value) -> Result<&'a Value> {
    table[column].get(number(row)? as usize).with_context(|| format!("no row {row} of {column}"))
}

fn of_pprof(profile: &Profile) -> Result<ByMethod> {
    let (objects, bytes) = (profile.index("alloc_objects/count")?, profile.index("alloc_space/bytes")?);
    let mut sums = ByMethod::new();
    for sample in profile.samples.iter().filter(|sample| sample.values[objects] > 0) {
        let leaf = sample.stack.first().context("no stack")?;
        let sum = sums.entry(leaf.name.clone()).or_default();
        *sum = (sum.0 + sample.values[objects], sum.1 + sample.values[bytes]);
    }
    Ok(sums)
}

fn of_speedscope(file: &Value) -> Result<ByMethod> {
    let mut sums = ByMethod::new();
    for profile in list(&file["profiles"])? {
        let name = profile["name"].as_str().context("no name")?;
        if !name.starts_with("allocation") {
            continue;
        }
        for (stack, weight) in list(&profile["samples"])?.iter().zip(list(&profile["weights"])?) {
            let leaf = at(&file["shared"], "frames", list(stack)?.last().context("no frame")?)?;
            let sum = sums.entry(leaf["name"].as_str().context("no name")?.to_owned()).or_default();
            match profile["unit"].as_str() {
                Some("bytes") => sum.1 += number(weight)?,
                Some("none") => sum.0 += number(weight)?,
                unit => anyhow::bail!("{unit:?}"),
            }
        }
    }
    Ok(sums)
}

/// Bytes only.
fn of_firefox(file: &Value) -> Result<BTreeMap<String, u64>> {
    let mut sums = BTreeMap::new();
    for thread in list(&file["threads"])? {
        let allocations = &thread["nativeAllocations"];
        if allocations.is_null() {
            continue;
        }
        for (stack, weight) in list(&allocations["stack"])?.iter().zip(list(&allocations["weight"])?) {
            let frame = at(&thread["stackTable"], "frame", stack)?;
            let func = at(&thread["frameTable"], "func", frame)?;
            let name = at(thread, "stringArray", at(&thread["funcTable"], "name", func)?)?;
            *sums.entry(name.as_str().context("no name")?.to_owned()).or_default() += number(weight)?;
        }
    }
    Ok(sums)
}

fn of_perfetto(trace: &Trace) -> Result<ByMethod> {
    let mut sums = ByMethod::new();
    for moment in trace.moments.iter().filter(|moment| moment.track.starts_with("allocation")) {
        let note = |name: &str| moment.notes.get(name).with_context(|| format!("{name}: {moment:?}"));
        let (objects, bytes): (u64, u64) = (note("objects")?.parse()?, note("bytes")?.parse()?);
        ensure!(objects * note("slot_size")?.parse::<u64>()? == bytes, "{moment:?}");
        ensure!(note("stack")?.starts_with(&moment.name), "{moment:?}");
        let sum = sums.entry(moment.name.clone()).or_default();
        *sum = (sum.0 + objects, sum.1 + bytes);
    }
    Ok(sums)
}

/// Each format has the objects and bytes of every method as `go tool pprof` finds them, and their sums equal those of the lines.
#[test]
fn formats_agree_about_allocation() -> Result<()> {
    for recording in recordings()? {
        let dir = tempfile::tempdir()?;
        let Outputs { pprof, speedscope, firefox, perfetto, lines } = outputs(&recording, dir.path())?;
        let expected = of_pprof(&pprof)?;
        ensure!(expected.len() > 1, "{}: {expected:?}", recording.display());
        let bytes: BTreeMap<String, u64> = expected.iter().map(|(name, sum)| (name.clone(), sum.1)).collect();
        assert_eq!(of_speedscope(&speedscope)?, expected, "speedscope, {}", recording.display());
        assert_eq!(of_firefox(&firefox)?, bytes, "Firefox, {}", recording.display());
        assert_eq!(of_perfetto(&perfetto)?, expected, "Perfetto, {}", recording.display());

        let counted: (u64, u64) =
            lines.allocs.iter().fold((0, 0), |sum, line| (sum.0 + line.objects, sum.1 + line.bytes));
        let stacks = expected.values().fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
        assert_eq!(stacks, counted, "{}", recording.display());
        let last = |name: &str| perfetto.counters.get(name).and_then(|points| Some(points.last()?.1));
        let counters = last("allocated objects").zip(last("allocated bytes of slots"));
        assert_eq!(counters, Some(counted), "{}", recording.display());
        let mut marked = (0, 0);
        for data in markers(&firefox, "Allocated")? {
            marked = (marked.0 + number(&data["objects"])?, marked.1 + number(&data["bytes"])?);
        }
        assert_eq!(marked, counted, "{}", recording.display());
    }
    Ok(())
}

/// The data of all markers of a kind.
fn markers<'a>(firefox: &'a Value, kind: &str) -> Result<Vec<&'a Value>> {
    let mut found = Vec::new();
    for thread in list(&firefox["threads"])? {
        found.extend(list(&thread["markers"]["data"])?.iter().filter(|data| data["type"] == kind));
    }
    Ok(found)
}

/// Whether `part` is a contiguous run of `all`.
fn has_run<T: PartialEq>(all: &[T], part: &[T]) -> bool {
    all.windows(part.len()).any(|window| window == part)
}

/// The values drawn over time equal those of the lines for the same events: `GC.stat` at each start and end of a cycle, `GC.stat_heap` at
/// each end, RSS at both.
#[test]
fn memory_is_that_of_the_events() -> Result<()> {
    for recording in recordings()? {
        let dir = tempfile::tempdir()?;
        let Outputs { perfetto, firefox, lines, .. } = outputs(&recording, dir.path())?;
        let values = |name: &str| -> Vec<u64> {
            perfetto.counters.get(name).into_iter().flatten().map(|point| point.1).collect()
        };
        let gcs = &lines.gcs;
        ensure!(gcs.len() > 5, "{}", recording.display());
        let stats = |key: &str| -> Result<Vec<u64>> {
            let of = gcs.iter().flat_map(|gc| std::iter::once(&gc.stat).chain(&gc.stat_end));
            of.map(|stat| number(&stat[key])).collect()
        };
        for key in ["heap_live_slots", "heap_free_slots", "malloc_increase_bytes", "oldmalloc_increase_bytes"]
        {
            let (drawn, told) = (values(key), stats(key)?);
            ensure!(has_run(&drawn, &told), "{key} of {}: {drawn:?}, {told:?}", recording.display());
            // Besides the cycles, there are the state when tracing began and the state at the end.
            ensure!(drawn.len() <= told.len() + 2, "{key}: {} for {}", drawn.len(), told.len());
        }
        let rss: Vec<u64> = gcs.iter().flat_map(|gc| gc.rss.into_iter().chain(gc.rss_end)).collect();
        ensure!(has_run(&values("RSS"), &rss), "RSS of {}", recording.display());
        let (live, marked) = (values("heap_live_slots"), markers(&firefox, "HeapSlots")?);
        let marked: Vec<u64> = marked.into_iter().map(|data| number(&data["live"])).collect::<Result<_>>()?;
        assert_eq!(marked, live, "{}", recording.display());
        let waiting = stats("heap_final_slots")?;
        let used: Vec<u64> =
            stats("heap_live_slots")?.iter().zip(waiting).map(|(live, last)| live + last).collect();
        let ends: Vec<_> = gcs.iter().filter_map(|gc| gc.stat_heap_end.as_ref()).collect();
        pools(&perfetto, &firefox, &ends, &used).with_context(|| recording.display().to_string())?;
    }
    Ok(())
}

/// Slots of each size, if the Ruby counts them (3.3 and later). Over all sizes they add up to `used` at each start and end of a cycle.
fn pools(perfetto: &Trace, firefox: &Value, ends: &[&Map<String, Value>], used: &[u64]) -> Result<()> {
    let drawn: Vec<&String> = perfetto.counters.keys().filter(|name| name.starts_with("slots of")).collect();
    let last = ends.last().and_then(|heaps| heaps.values().next());
    let Some(heap) = last.filter(|heap| heap.get("total_freed_objects").is_some()) else {
        ensure!(drawn.is_empty() && markers(firefox, "HeapPool")?.is_empty(), "{drawn:?}");
        return Ok(());
    };
    ensure!(heap["slot_size"] == 40 && drawn.len() == 10, "{heap}, {drawn:?}");
    let sizes: Vec<u64> = ends[0].values().map(|heap| number(&heap["slot_size"])).collect::<Result<_>>()?;
    let mut sums: BTreeMap<u64, u64> = BTreeMap::new();
    for size in sizes {
        let in_use = &perfetto.counters[&format!("slots of {size} bytes: in use")];
        let free = &perfetto.counters[&format!("slots of {size} bytes: free")];
        for (used, free) in in_use.iter().zip(free) {
            ensure!(used.0 == free.0 && used.1 % size == 0 && free.1 % size == 0, "{used:?}, {free:?}");
            *sums.entry(used.0).or_default() += used.1 / size;
        }
        let mut expected = Vec::new();
        for heaps in ends {
            let heap = heaps.values().find(|heap| heap["slot_size"] == size).context("no heap")?;
            let of = |key: &str| number(&heap[key]);
            let objects = of("total_allocated_objects")? - of("total_freed_objects")?;
            let slots = of("heap_eden_slots")? + heap.get("heap_tomb_slots").map_or(Ok(0), number)?;
            expected.push((objects * size, (slots - objects) * size));
        }
        let at_ends: Vec<(u64, u64)> = in_use.iter().zip(free).map(|(used, free)| (used.1, free.1)).collect();
        ensure!(expected.iter().all(|end| at_ends.contains(end)), "{size}: {expected:?}, {at_ends:?}");
    }
    let sums: Vec<u64> = sums.into_values().collect();
    ensure!(has_run(&sums, used), "{sums:?}, {used:?}");
    Ok(())
}
