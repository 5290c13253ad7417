//! The sums that must balance at the end of every run.

use anyhow::{Context as _, Result, bail, ensure};

use gctrace_common::stats::Counter;
use serde_json::{Map, Value};

use crate::report::Report;

/// Sums of kernel counters: left = right, as documented at the counters.
const KERNEL: &[(&[&str], &[&str])] = &[
    (&["hits"], &["self_hits", "filtered", "no_image", "admitted"]),
    (
        &["admitted"],
        &[
            "starts",
            "end_marks",
            "end_sweeps",
            "enters",
            "exits",
            "phase_begins",
            "phase_ends",
            "refills",
            "refill_no_page",
        ],
    ),
    (&["refills"], &["refill_submitted", "refill_ring_full", "refill_unread"]),
    (&["phase_ends"], &["phase_submitted", "phase_ring_full", "phase_orphan"]),
    (
        &["starts", "end_sweeps", "shutdowns"],
        &["snapshot_submitted", "snapshot_ring_full", "snapshot_read_failed"],
    ),
    (&["starts", "end_marks", "end_sweeps"], &["mark_noted", "orphan_mark"]),
    (&["enters"], &["scope_opened", "scope_nested", "scope_map_full", "enter_read_failed"]),
    (&["exits"], &["pause_submitted", "pause_ring_full", "exit_nested", "orphan_exit"]),
    (&["lives"], &["life_submitted", "life_ring_full"]),
    (&["off_cpu_wanted"], &["off_cpu_stacks", "off_cpu_shed"]),
    (&["switch_ins"], &["off_cpu_short", "off_cpu_orphan", "off_cpu_submitted", "off_cpu_ring_full"]),
    (
        &["ticks", "trigger_stacks", "off_cpu_stacks", "gvl_stacks", "gvl_holder_stacks", "refill_stacks"],
        &["stack_submitted", "stack_ring_full", "stack_busy", "stack_not_walked"],
    ),
    (&["native_stacks"], &["native_submitted", "native_ring_full"]),
    (
        &["gvl_hits"],
        &[
            "gvl_shed",
            "gvl_filtered",
            "gvl_no_thread",
            "gvl_thread_map_full",
            "gvl_started",
            "gvl_ready",
            "gvl_resumed",
            "gvl_suspended",
            "gvl_exited",
        ],
    ),
    (&["gvl_ready"], &["gvl_aways", "gvl_yields", "gvl_orphan_ready"]),
    (&["gvl_resumed"], &["gvl_waits", "gvl_orphan_resumed"]),
    (&["gvl_suspended"], &["gvl_holds", "gvl_called_off", "gvl_orphan_suspended"]),
    (&["gvl_long_waits"], &["gvl_wait_submitted", "gvl_wait_ring_full", "gvl_wait_shed"]),
    (&["unit_states"], &["unit_state_submitted", "unit_state_ring_full", "unit_state_read_failed"]),
    (&["gvl_long_spans"], &["gvl_span_submitted", "gvl_span_ring_full", "gvl_span_shed"]),
];

/// User space decodes as many records as the kernel submitted.
const HANDED_OVER: &[(&str, &str)] = &[
    ("snapshot_submitted", "decoded_snapshots"),
    ("pause_submitted", "decoded_pauses"),
    ("phase_submitted", "decoded_phases"),
    ("life_submitted", "decoded_lives"),
    ("request_submitted", "decoded_requests"),
    ("unit_state_submitted", "decoded_unit_states"),
    ("stack_submitted", "decoded_stacks"),
    ("native_submitted", "decoded_natives"),
    ("off_cpu_submitted", "decoded_off_cpu"),
    ("gvl_wait_submitted", "decoded_gvl_waits"),
    ("gvl_thread_submitted", "decoded_gvl_threads"),
    ("gvl_span_submitted", "decoded_gvl_spans"),
    ("refill_submitted", "decoded_refills"),
];

/// The filters of profiles pass or drop everything: each total equals the sum of its parts.
const PROFILES: &[(&str, &[&str])] = &[
    (
        "profile_samples",
        &[
            "profile_samples_recorded",
            "profile_samples_other_threads",
            "profile_samples_out_of_focus",
            "profile_samples_other_endpoints",
        ],
    ),
    (
        "profile_ns",
        &[
            "profile_ns_recorded",
            "profile_ns_other_threads",
            "profile_ns_out_of_focus",
            "profile_ns_other_endpoints",
        ],
    ),
    (
        "profile_events",
        &[
            "profile_events_recorded",
            "profile_events_other_threads",
            "profile_events_out_of_focus",
            "profile_events_other_endpoints",
        ],
    ),
];

/// Counters that count missing data although they are not marked as losses; like those, they stay zero on a machine that is not starved.
const MORE_LOSSES: &[&str] =
    &["memory_read_failed", "phase_orphan", "register_mismatch", "request_faults_unread"];
/// Stacks that uprobes take where threads change places thousands of times per second: waits for the GVL, and refills of slots. A thread that
/// is preempted in the middle of a walk keeps one of the few places of its CPU (`PROBE_SLOTS`) meanwhile; if all are taken, a stack is lost.
/// That needs many threads. The other stacks are those of collections, which do not overlap, and of clocks and switches, which have places of
/// their own and cannot be interrupted by each other.
const OVERLAP: &[&str] = &["gvl_stacks", "gvl_holder_stacks", "refill_stacks"];

/// The names of the counters that stay zero.
fn losses(kernel: &Map<String, Value>) -> Result<impl Iterator<Item = &'static str>> {
    let overlap = sum(kernel, OVERLAP)? > 0;
    let stays = move |counter: &&Counter| counter.is_loss() && !(overlap && **counter == Counter::StackBusy);
    let marked = Counter::ALL.iter().filter(stays);
    Ok(marked.map(|counter| counter.name()).chain(MORE_LOSSES.iter().copied()))
}

/// Checks that the ledger is present and balances. `balanced` covers the sums that gctrace checks itself and that are not repeated here.
pub fn check(report: &Report) -> Result<()> {
    let ledger = report.ledger.as_ref().context("no ledger line")?;
    let (kernel, user) = (&ledger.kernel, &ledger.user);
    for (left, right) in KERNEL {
        let (a, b) = (sum(kernel, left)?, sum(kernel, right)?);
        ensure!(a == b, "{} = {a}, but {} = {b} in {kernel:?}", left.join(" + "), right.join(" + "));
    }
    for (submitted, decoded) in HANDED_OVER {
        let (a, b) = (counter(kernel, submitted)?, counter(user, decoded)?);
        ensure!(a == b, "{submitted} = {a}, but {decoded} = {b} in {user:?}");
    }
    let undecodable = sum(user, &["undecodable", "undecodable_stacks", "undecodable_requests"])?;
    ensure!(undecodable == 0, "records that could not be decoded: {user:?}");
    let frames = sum(user, &["native_frames_named", "native_frames_by_offset", "native_frames_unmapped"])?;
    ensure!(counter(user, "native_frames")? == frames, "native frames are missing: {user:?}");
    for (all, parts) in PROFILES {
        let (a, b) = (counter(user, all)?, sum(user, parts)?);
        ensure!(a == b, "{all} = {a}, but {} = {b} in {user:?}", parts.join(" + "));
    }
    let kept = sum(user, &["recorded_kept", "recorded_expired", "recorded_displaced"])?;
    let recorded = kept + sum(user, &["recorded_written", "recorded_waiting", "recorded_dropped"])?;
    ensure!(counter(user, "recorded")? == recorded, "entries of the recording are missing: {user:?}");
    let dumps = sum(user, &["dumps_written", "dumps_waiting", "dumps_failed", "dumps_suppressed"])?;
    ensure!(counter(user, "dump_requests")? == dumps, "requests for dumps are missing: {user:?}");
    let threads =
        counter(user, "gvl_threads_read")? + sum(kernel, &["gvl_thread_submitted", "gvl_thread_ring_full"])?;
    ensure!(counter(kernel, "gvl_threads")? == threads, "threads are missing: {kernel:?}, {user:?}");
    let waits = counter(user, "gvl_thread_waits")? + counter(kernel, "gvl_waits_lost")?;
    ensure!(counter(kernel, "gvl_waits")? == waits, "waits are missing: {kernel:?}, {user:?}");
    let reported = (report.gvl_waits.len() as u64, report.gvl_threads.len() as u64);
    ensure!(
        reported == (counter(user, "gvl_waits")?, counter(user, "gvl_threads")?),
        "{reported:?} gvl lines: {user:?}"
    );
    let cycles = counter(user, "cycles")?;
    ensure!(cycles == report.gcs.len() as u64, "cycles = {cycles}, but {} gc lines", report.gcs.len());
    ensure!(ledger.balanced, "gctrace's own sums do not hold: {kernel:?}, {user:?}");
    Ok(())
}

/// Checks that the run lost nothing at all.
pub fn check_lossless(report: &Report) -> Result<()> {
    check(report)?;
    let ledger = report.ledger.as_ref().context("no ledger line")?;
    for name in losses(&ledger.kernel)? {
        let value = counter(&ledger.kernel, name)?;
        ensure!(value == 0, "{name} = {value}");
    }
    let lost = report.gcs.iter().filter(|gc| gc.lost > 0);
    let lost =
        lost.map(|gc| format!("{} before cycle {} of {}", gc.lost, gc.count, gc.pid)).collect::<Vec<_>>();
    if lost.is_empty() {
        return Ok(());
    }
    let first = |pid| report.gcs_of(pid).next().map(|gc| gc.count);
    let processes = report.processes.iter().map(|process| {
        format!("{} (child of {:?}, first line of cycle {:?})", process.pid, process.ppid, first(process.pid))
    });
    let ends = report.exits.iter().map(|exit| format!("{exit:?}"));
    bail!(
        "events lost: {}; processes {}; {}; the kernel lost none: {:?}; {:?}",
        lost.join(", "),
        processes.collect::<Vec<_>>().join(", "),
        ends.collect::<Vec<_>>().join(", "),
        ledger.kernel,
        ledger.user
    )
}

/// Number of GC records that the kernel numbered but could not submit.
pub fn kernel_losses(report: &Report) -> Result<u64> {
    let ledger = report.ledger.as_ref().context("no ledger line")?;
    sum(&ledger.kernel, &["snapshot_ring_full", "snapshot_read_failed", "pause_ring_full"])
}

/// The value of a kernel-side counter.
pub fn kernel(report: &Report, name: &str) -> Result<u64> {
    counter(&report.ledger.as_ref().context("no ledger line")?.kernel, name)
}

/// The value of a user-space counter.
pub fn user(report: &Report, name: &str) -> Result<u64> {
    counter(&report.ledger.as_ref().context("no ledger line")?.user, name)
}

fn sum(counters: &Map<String, Value>, names: &[&str]) -> Result<u64> {
    names.iter().map(|name| counter(counters, name)).sum()
}

fn counter(counters: &Map<String, Value>, name: &str) -> Result<u64> {
    counters.get(name).and_then(Value::as_u64).with_context(|| format!("no counter {name} in {counters:?}"))
}
