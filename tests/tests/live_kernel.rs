//! The work of the kernel's verifier, and how the kernel attaches probes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::PATIENCE;
use gctrace_tests::child::Guarded;
use gctrace_tests::doctor::{self, diagnose};
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::ledger;
use gctrace_tests::live::Live;
use gctrace_tests::pprof::Profile;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;

/// The file with the counts of known kernels: `MACHINE SERIES PROGRAM INSTRUCTIONS` per line.
const TABLE: &str = "fixtures/verified.txt";
/// Maximum number of instructions per program. The kernel gives up at a million, but each processed instruction is time for which the user
/// waits (about 0.8 µs).
const MOST: u64 = 150_000;
/// Growth of a program that is allowed without a review: percent, and instructions.
const GROWTH: (u64, u64) = (15, 500);

/// Machine and series, such as `x86_64 6.18`, and whether that kernel reports counts at all (since 5.16).
fn series(diagnosis: &doctor::Diagnosis) -> Result<(String, bool)> {
    let text = |key: &str| diagnosis.host[key].as_str().with_context(|| format!("no {key}"));
    let mut numbers = text("kernel")?.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
        anyhow::bail!("kernel {:?}", diagnosis.host["kernel"])
    };
    Ok((format!("{} {major}.{minor}", text("machine")?), (major, minor) >= (5, 16)))
}

/// Every program stays far below the limit, and does not grow unnoticed on a kernel whose counts are known.
#[test]
fn verifier_is_far_from_its_limit() -> Result<()> {
    let live = Live::begin()?;
    let diagnosis = diagnose(&live.path("cache"), ["--verbose"])?;
    ensure!(diagnosis.check("bpf_programs")?["status"] == "ok", "{:?}", diagnosis.host);
    let (series, tells) = series(&diagnosis)?;
    let walked = diagnosis.verified()?;
    ensure!(walked.len() >= 20 || !tells, "only {} programs are reported on {series}", walked.len());
    for (program, count) in &walked {
        ensure!(
            *count <= MOST,
            "the verifier walks {count} instructions of {program} on {series}; at most {MOST}"
        );
    }

    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(TABLE);
    let table = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let of_series = table.lines().filter_map(|line| line.strip_prefix(&series)?.strip_prefix(' '));
    let known: BTreeMap<&str, u64> = of_series
        .map(|rest| {
            let (program, count) = rest.split_once(' ').with_context(|| format!("line `{series} {rest}`"))?;
            Ok((program, count.parse()?))
        })
        .collect::<Result<_>>()?;
    let now: Vec<String> = walked.iter().map(|(name, count)| format!("{series} {name} {count}")).collect();
    let now = now.join("\n");
    if known.is_empty() {
        // A kernel without known counts.
        println!("{series} is not in {TABLE}; its lines are\n{now}");
        return Ok(());
    }
    let grown: Vec<String> = walked
        .iter()
        .filter_map(|(program, count)| match known.get(program.as_str()) {
            None => Some(format!("{program} is new")),
            Some(known) if *count > known + known * GROWTH.0 / 100 + GROWTH.1 => {
                Some(format!("{program} has grown from {known} to {count}"))
            }
            Some(_) => None,
        })
        .chain(known.keys().filter(|name| !walked.contains_key(**name)).map(|name| format!("{name} is gone")))
        .collect();
    ensure!(
        grown.is_empty(),
        "what the verifier walks on {series} has changed: {}. If that is meant, put these lines in tests/{TABLE}:\n{now}",
        grown.join(", ")
    );
    Ok(())
}

/// Number of programs that a process has loaded, and of instructions that the verifier processed for all of them (0 before Linux 5.16).
fn loaded(pid: u32) -> Result<(usize, u64)> {
    let mut programs = BTreeMap::new();
    for descriptor in std::fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        let text = std::fs::read_to_string(descriptor?.path()).unwrap_or_default();
        let value =
            |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.trim().parse::<u64>().ok());
        // A link also names its program, but does not have the count.
        if let (Some(id), true) =
            (value("prog_id:"), text.contains("prog_tag:") && !text.contains("link_id:"))
        {
            programs.insert(id, value("verified_insns:").unwrap_or(0));
        }
    }
    Ok((programs.len(), programs.values().sum()))
}

/// A run loads only what its options need, and gives the verifier little to do at its start.
#[test]
fn a_run_loads_what_it_needs() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    // A run that sees no Ruby fails.
    let mut idle = Script::unwitnessed(&live, &ruby, "idle.rb")?.start()?;
    idle.wait_for("idle")?;
    let svg = live.path("cpu.svg");
    let svg = svg.to_str().context("the path")?;
    let is_counted = kernel()? >= (5, 16);
    let mut seen = BTreeMap::new();
    for (name, args, most) in [
        ("gc", vec!["--all-ruby"], 150_000),
        ("cpu", vec!["--all-ruby", "--flamegraph", svg], 250_000),
        ("wall", vec!["--all-ruby", "--wall", "--flamegraph", svg], 300_000),
        ("gvl", vec!["--all-ruby", "--gvl"], 400_000),
    ] {
        let gctrace = Invocation::jsonl(args)?.start_ready()?;
        let (programs, walked) = loaded(gctrace.pid())?;
        gctrace.stop()?;
        println!("{name}: {programs} programs, {walked} instructions");
        ensure!(
            (walked > 0 || !is_counted) && walked <= most,
            "{name}: the verifier walks {walked} instructions, at most {most} are expected"
        );
        seen.insert(name, programs);
    }
    let [gc, cpu, wall] = ["gc", "cpu", "wall"].map(|name| seen[name]);
    ensure!(gc == 9, "{gc} programs follow the GC; those of stacks and of the GVL are not needed");
    ensure!(gc < cpu && cpu < wall, "{seen:?}");
    idle.say("end")?;
    idle.finish()?;
    Ok(())
}

/// The two numbers of this kernel's series.
fn kernel() -> Result<(u32, u32)> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Ok((major, minor)),
        _ => anyhow::bail!("kernel {release:?}"),
    }
}

/// Number of links of a process with many uprobes each (`uprobe_multi`).
fn links_of_many(pid: u32) -> Result<usize> {
    let mut links = 0;
    for descriptor in std::fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        let text = std::fs::read_to_string(descriptor?.path()).unwrap_or_default();
        links += usize::from(text.lines().any(|line| line == "link_type:\tuprobe_multi"));
    }
    Ok(links)
}

/// If the kernel supports it, one link has many probes; otherwise the end of a run takes 0.1 s per probe. Cycles are seen in both cases.
#[test]
fn links_have_many_probes() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let release = kernel()?;
    let can = release >= (6, 11);
    let mut idle = Script::unwitnessed(&live, &ruby, "idle.rb")?.start()?;
    idle.wait_for("idle")?;
    for (args, expected) in [(vec!["--all-ruby"], can), (vec!["--all-ruby", "--without-multi"], false)] {
        let gctrace = Invocation::jsonl(args)?.start_ready()?;
        let links = links_of_many(gctrace.pid())?;
        ensure!((links > 0) == expected, "{links} links of many on {release:?}");
        let done = Script::new(&live, &ruby, "explicit.rb")?.run()?;
        let report = gctrace.stop()?;
        ledger::check_lossless(&report)?;
        ensure!(report.gcs_of(done.pid).count() > 0, "no cycles of {}", done.pid);
    }
    Ok(())
}

/// Takes a CPU offline, and brings it back when dropped.
struct Offline(PathBuf);

impl Offline {
    fn cpu(number: usize) -> Result<Self> {
        let path = PathBuf::from(format!("/sys/devices/system/cpu/cpu{number}/online"));
        std::fs::write(&path, "0").with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Offline {
    fn drop(&mut self) {
        if let Err(error) = std::fs::write(&self.0, "1") {
            eprintln!("CPU stays offline: {}: {error}", self.0.display());
        }
    }
}

/// The sampled CPU time of a program that computes for a second on CPU 1 from its first instruction on, and its own CPU time, nanoseconds.
fn sampled_on_cpu_1(ruby: &Ruby, gctrace: Gctrace, profile: &Path) -> Result<(u64, u64)> {
    let mut command = Command::new("taskset");
    let argv = ruby.argv()?;
    command.args(["-c", "1"]).args(&argv);
    // On an emulated machine, Ruby needs seconds before it gets here.
    let program = "def used = Process.clock_gettime(Process::CLOCK_PROCESS_CPUTIME_ID, :nanosecond)\n\
                   at = used; nil until used > at + 1_000_000_000; puts $$, used";
    command.args(["-e", program]);
    let done = Guarded::start("computes", &mut command)?.finish(PATIENCE)?;
    ensure!(done.status.success(), "{}", done.errors());
    ledger::check_lossless(&gctrace.stop()?)?;
    let profile = Profile::open(profile)?;
    let [pid, used] = done.stdout.as_slice() else { anyhow::bail!("{:?}", done.stdout) };
    let index = profile.index("cpu/nanoseconds")?;
    let of_program = profile.samples.iter().filter(|sample| sample.label("pid") == Some(pid.as_str()));
    Ok((of_program.map(|sample| sample.values[index]).sum(), used.parse()?))
}

/// A CPU that comes online while gctrace runs is watched for new Rubies, and sampled; so is one that goes offline and comes back.
#[test]
#[ignore = "takes a CPU of the machine offline; ask for it where that does no harm, or in a guest (`cargo xtask vm --test`)"]
fn cpus_that_come_online() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    for away_at_first in [true, false] {
        let profile = live.path(&format!("{away_at_first}.pb.gz"));
        let away = away_at_first.then(|| Offline::cpu(1)).transpose()?;
        let args = ["--all-ruby", "--rate", "199", "--pprof"].map(AsRef::as_ref);
        let gctrace = Invocation::jsonl(args.into_iter().chain([profile.as_os_str()]))?
            .envs(vec![("RUST_LOG".into(), "info".into())]);
        let mut gctrace = gctrace.start_ready()?;
        let away = if let Some(away) = away {
            away
        } else {
            let away = Offline::cpu(1)?;
            gctrace.wait_error("CPU 1 has gone offline")?;
            away
        };
        drop(away);
        gctrace.wait_error("CPU 1 has come online: sampled")?;
        let (sampled, used) = sampled_on_cpu_1(&ruby, gctrace, &profile)?;
        ensure!(
            (800_000_000..used + 100_000_000).contains(&sampled),
            "{sampled} of {used} ns, a second at least"
        );
    }
    Ok(())
}
