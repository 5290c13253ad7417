//! `cargo xtask vm`: the live tests on other kernels, each in a machine that QEMU emulates.
//!
//! A guest has no disk and no network: only a kernel, and one archive that is unpacked into its memory. It is emulated (TCG)
//! unless `--kvm` is given, because on some hosts KVM accepts a guest and then hangs it. An emulated
//! CPU is about twenty times slower, so these tests check what loads and what is counted, never durations.

mod arch;
mod cross;
mod initramfs;
mod kernels;

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fmt::Write as _,
    fs,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};

use self::{
    arch::Arch,
    initramfs::Files,
    kernels::{KERNELS, Kernel},
};
use crate::{
    lab,
    programs::test_programs,
    setup::{self, Purpose},
    util::{Running, line, output, progress, root, run, target_dir, which},
};

/// Arguments of `vm`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Which kernels. Default: all.
    #[arg(value_parser = KERNELS.iter().map(|kernel| kernel.name).collect::<Vec<_>>())]
    kernels: Vec<String>,
    /// Run these tests (file and name, such as `live_gc::fork`) instead of the usual ones.
    #[arg(long = "test", value_name = "FILE::NAME")]
    tests: Vec<String>,
    /// Run this shell command instead of tests, with `$GCTRACE_BIN` and `$GCTRACE_RUBIES` set.
    #[arg(long = "command", value_name = "COMMAND", conflicts_with = "tests")]
    command: Option<String>,
    /// The Rubies of these roots of the lab.
    /// Default: bullseye and experimental, or of aarch64 bookworm.
    #[arg(long = "ruby", value_name = "ROOT")]
    rubies: Vec<String>,
    /// The processor of the guest.
    #[arg(long, value_enum, default_value = "x86_64")]
    arch: Arch,
    /// Let KVM run the guest.
    #[arg(long, conflicts_with = "arch")]
    kvm: bool,
    /// Take the witnesses that the tests before have built, so that no Ruby runs on this machine, where others count what Rubies do.
    #[arg(long, conflicts_with = "arch")]
    witnesses_built: bool,
}

/// The tests that run in a guest: some of everything that depends on the kernel.
const TESTS: &[&str] = &[
    "live_gc::pressure_equals_the_witness",
    "live_gc::explicit_cycles_without_witness",
    "live_discovery::fork",
    "live_discovery::exec",
    "live_stacks::recursion_is_whole",
    "live_profile::stacks_equal_callers",
    "live_profile::triggers_are_the_allocating_lines",
    "live_containers::cgroup_v2",
    "live_kernel::verifier_is_far_from_its_limit",
    "live_memory::memory_equals_the_witness",
    "live_memory::short_programs_have_memory",
    "live_gvl::waits_add_up_in_lock_step",
    "live_gvl_futex::waits_add_up_in_lock_step",
    "live_runs::whole_runs",
];

/// Test files that a kernel cannot pass: gctrace traces neither the GVL nor requests without attach cookies (Linux 5.15).
const WITHOUT: &[(&str, &str)] = &[("5.10", "live_gvl"), ("5.10", "live_requests"), ("5.10", "live_runs")];
/// The tests on aarch64, where gctrace neither walks stacks nor shows lines.
const TESTS_AARCH64: &[&str] = &[
    "live_gc::pressure_equals_the_witness",
    "live_gc::explicit_cycles_without_witness",
    "live_gc::stat_heap_equals_the_program",
    "live_discovery::fork",
    "live_discovery::exec",
];

/// Timeout for a guest; it usually takes two to five minutes.
const LIMIT: Duration = Duration::from_mins(20);

/// The first lines of the guest's `/init`. The contents of the serial line for results are copied to this machine unchanged.
const INIT: &str = r#"
/bin/busybox --install -s /bin
export PATH=/bin:/usr/bin:/usr/local/bin HOME=/root TMPDIR=/tmp RUST_BACKTRACE=0
mkdir -p /proc /sys /dev /tmp /root
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mount -t tracefs tracefs /sys/kernel/tracing
mount -t bpf bpf /sys/fs/bpf
mount -t cgroup2 cgroup2 /sys/fs/cgroup
ip link set lo up
stty -F /dev/RESULTS raw
exec >/dev/RESULTS 2>&1
echo "guest: Linux $(uname -r), up for $(cut -d' ' -f1 /proc/uptime) s"
status=0
"#;

/// The last lines of `/init`. If there is no verdict, the guest has crashed.
const VERDICT: &str = r#"
echo "guest: up for $(cut -d' ' -f1 /proc/uptime) s"
echo "guest-status $status"
sync
sleep 1
poweroff -f
"#;

/// Runs the command.
pub(crate) fn run_matrix(args: &Args) -> Result<ExitCode> {
    setup::ensure(match args.arch {
        Arch::X86_64 => &[Purpose::Test, Purpose::Vm],
        Arch::Aarch64 => &[Purpose::VmAarch64],
    })?;
    let chosen: Vec<&Kernel> = KERNELS
        .iter()
        .filter(|kernel| match &args.kernels[..] {
            [] => args.arch.loads_on(kernel.name),
            named => named.iter().any(|name| name == kernel.name),
        })
        .collect();
    let dir = target_dir()?.join("xtask/vm").join(args.arch.folder());
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    // Two concurrent runs would boot each other's guests, and read each other's verdicts.
    let lock = dir.join(".lock");
    let lock = fs::File::create(&lock).with_context(|| format!("cannot create {}", lock.display()))?;
    if lock.try_lock().is_err() {
        progress("vm: waiting for another run in this checkout");
        lock.lock().context("cannot lock the guests")?;
    }
    let images = chosen.iter().map(|kernel| kernel.image(args.arch)).collect::<Result<Vec<_>>>()?;
    let archive = dir.join("initramfs.cpio");
    match args.arch {
        Arch::X86_64 => guest(args, &archive)?,
        Arch::Aarch64 => foreign_guest(args, &archive)?,
    }

    // Emulated x86-64 uses one thread (see `Arch::emulator`); all other guests use as many as they have CPUs.
    let one_thread = args.arch == Arch::X86_64 && !args.kvm;
    let processors = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let at_a_time = if one_thread { processors } else { 1 };
    let waiting = Mutex::new(chosen.iter().zip(images));
    let failed = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..at_a_time {
            scope.spawn(|| {
                loop {
                    // A separate statement: otherwise the lock would be held until the guest has ended.
                    let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
                    let Some((kernel, image)) = next else { return };
                    if !passes(args, kernel, &image, &archive, &dir) {
                        failed.lock().unwrap_or_else(PoisonError::into_inner).push(kernel.name);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    if failed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    progress(format!("vm: failed on {}", failed.join(", ")));
    Ok(ExitCode::FAILURE)
}

/// Runs the tests on a kernel and reports the result.
fn passes(args: &Args, kernel: &Kernel, image: &Path, archive: &Path, dir: &Path) -> bool {
    let started = Instant::now();
    progress(format!("vm: booting Linux {}", kernel.name));
    let outcome = boot(args, kernel, image, archive, dir);
    let seconds = started.elapsed().as_secs();
    match &outcome {
        Ok(()) => progress(format!("vm: Linux {}: passed ({seconds} s)", kernel.name)),
        Err(error) => progress(format!("vm: Linux {}: FAILED ({seconds} s): {error:#}", kernel.name)),
    }
    outcome.is_ok()
}

/// Packs what the guests need.
fn guest(args: &Args, archive: &Path) -> Result<()> {
    progress("vm: building the tests");
    crate::test::build()?;
    let programs = test_programs()?;
    let rubies = if args.rubies.is_empty() {
        lab::available(args.arch.usual_rubies())?
    } else {
        lab::ensure(&args.rubies)?
    };
    ensure!(!rubies.is_empty(), "none of the usual Rubies is available: name others with --ruby");

    let mut files = Files::default();
    let gctrace = target_dir()?.join("debug/gctrace");
    files.add_program(&gctrace)?;
    files.add_tree(&root().canonicalize()?.join("tests/rubies"))?;
    files.add_tree(&root().canonicalize()?.join("tests/fixtures"))?;
    // Needed to read profiles.
    files.add_program(&which("go").context("there is no go")?)?;
    files.add_program(Path::new(output(Command::new("go").args(["tool", "-n", "pprof"]))?.trim()))?;
    for ruby in &rubies {
        files.add_tree(lab::root_of(ruby)?)?;
    }
    let rubies =
        std::env::join_paths(&rubies).context("the path of a Ruby cannot be put into GCTRACE_RUBIES")?;
    // Each name must match a test: a name without a test would pass.
    for test in args.tests() {
        let (_, program, name) = program_of(test)?;
        let path = programs.get(program).with_context(|| format!("there is no test program {program}"))?;
        let listed = output(Command::new(path).args(["--list", "--include-ignored", "--exact", name]))?;
        ensure!(
            listed.contains(": test"),
            "{program} has no test {name}: give its whole name, such as {}",
            TESTS[0]
        );
    }
    let (init, needed) = args.script(&gctrace, &rubies, &programs)?;
    for program in needed {
        files.add_program(program)?;
    }
    // The witness is compiled on this machine: a guest has no compiler.
    let build = programs.get("host_witness").context("there is no test program host_witness")?;
    if !args.witnesses_built {
        progress("vm: building the witness");
        let mut witness = Command::new(build);
        run(witness
            .args(["--quiet", "--exact", "witness_agrees_with_the_program", "gvl_witness_is_built"])
            .env("GCTRACE_RUBIES", rubies)
            .current_dir(root().join("tests")))?;
    }
    let results =
        build.parent().and_then(Path::parent).context("no target folder")?.join("tmp/gctrace-tests");
    for entry in fs::read_dir(&results).with_context(|| format!("cannot read {}", results.display()))? {
        let name = entry?.file_name();
        // The directory also contains temporary files of tests that are running.
        if name.to_string_lossy().starts_with("witness") {
            files.add_tree(&results.join(name))?;
        }
    }
    let busybox = Path::new("/bin/busybox");
    files.add(busybox)?;
    files.pack(&(init + VERDICT), None, archive)
}

/// Packs what the guests of another architecture need: the same, but compiled for it, on a small root with its packages.
fn foreign_guest(args: &Args, archive: &Path) -> Result<()> {
    let tests = args.tests();
    let mut wanted = tests.iter().map(|test| Ok(program_of(test)?.1)).collect::<Result<Vec<_>>>()?;
    wanted.dedup();
    let built = cross::build(args.arch, &wanted)?;
    let rubies = cross::rubies(args.arch, &args.rubies())?;
    let witnesses = cross::witnesses(args.arch, &rubies)?;

    let mut files = Files::default();
    files.add(&built.gctrace)?;
    files.add_tree(&root().canonicalize()?.join("tests/rubies"))?;
    files.add_tree(&witnesses)?;
    for ruby in &rubies {
        files.add_tree(lab::root_of(ruby)?)?;
    }
    let rubies =
        std::env::join_paths(&rubies).context("the path of a Ruby cannot be put into GCTRACE_RUBIES")?;
    let (init, needed) = args.script(&built.gctrace, &rubies, &built.programs)?;
    for program in needed {
        files.add(program)?;
    }
    let ready = format!("export GCTRACE_WITNESSES='{}'\n", witnesses.display());
    let init = init.replacen("status=0\n", &format!("status=0\n{ready}"), 1);
    files.pack(&(init + VERDICT), Some(&cross::base(args.arch)?), archive)
}

impl Args {
    fn rubies(&self) -> Vec<String> {
        if self.rubies.is_empty() {
            return self.arch.usual_rubies().iter().map(ToString::to_string).collect();
        }
        self.rubies.clone()
    }

    fn tests(&self) -> Vec<&str> {
        match (&self.command, self.arch) {
            (Some(_), _) => Vec::new(),
            (None, Arch::X86_64) if self.tests.is_empty() => TESTS.to_vec(),
            (None, Arch::Aarch64) if self.tests.is_empty() => TESTS_AARCH64.to_vec(),
            _ => self.tests.iter().map(String::as_str).collect(),
        }
    }

    /// The `/init` of a guest up to the verdict, and the test programs that it runs.
    fn script<'a>(
        &self,
        gctrace: &Path,
        rubies: &OsStr,
        programs: &'a BTreeMap<String, PathBuf>,
    ) -> Result<(String, Vec<&'a PathBuf>)> {
        let (_, terminal) = self.arch.terminals();
        let mut init = INIT.replace("RESULTS", terminal);
        writeln!(
            init,
            "export GCTRACE_BIN='{}' GCTRACE_RUBIES='{}' GCTRACE_SLOWNESS=30",
            gctrace.display(),
            rubies.to_string_lossy()
        )?;
        if let Some(command) = &self.command {
            writeln!(init, "({command}) || status=1")?;
        }
        let mut run = Vec::new();
        for test in self.tests() {
            let (file, program, name) = program_of(test)?;
            let path =
                programs.get(program).with_context(|| format!("there is no test program {program}"))?;
            if !run.contains(&path) {
                run.push(path);
            }
            let without: Vec<_> = WITHOUT
                .iter()
                .filter(|(_, other)| *other == file)
                .map(|(series, _)| format!("{series}.*"))
                .collect();
            writeln!(
                init,
                "case $(uname -r) in {}) ;; *) '{}' --test-threads=1 --include-ignored --exact {name} || {{ status=1; echo 'guest: failed: {test}'; }} ;; esac",
                if without.is_empty() { "none".to_owned() } else { without.join("|") },
                path.display()
            )?;
        }
        Ok((init, run))
    }
}

/// The file of a test, its program, and its name in that program: files of live tests are modules of one program.
fn program_of(test: &str) -> Result<(&str, &str, &str)> {
    let (file, name) =
        test.split_once("::").with_context(|| format!("{test} is not of the form FILE::NAME"))?;
    Ok(if file.starts_with("live_") { (file, "live", test) } else { (file, file, name) })
}

/// Boots a kernel on the archive and reads the verdict.
fn boot(args: &Args, kernel: &Kernel, image: &Path, archive: &Path, dir: &Path) -> Result<()> {
    let console = dir.join(format!("{}.console", kernel.name));
    let results = dir.join(format!("{}.out", kernel.name));
    let mut qemu = args.arch.emulator(args.kvm, &console, &results);
    qemu.args([
        "-m",
        "2048",
        "-smp",
        "2",
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
    ]);
    qemu.arg("-kernel").arg(image).arg("-initrd").arg(archive);
    let (terminal, _) = args.arch.terminals();
    qemu.arg("-append").arg(format!("console={terminal} panic=-1 quiet")).stdin(Stdio::null());

    // An earlier run's verdict must not count for this one if the emulator does not even start.
    for file in [&console, &results] {
        fs::write(file, "").with_context(|| format!("cannot empty {}", file.display()))?;
    }
    let ended = Running::start(&mut qemu)?.wait(LIMIT);
    let said = fs::read(&results).unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    for said in said.lines() {
        println!("{:>6} | {said}", kernel.name);
    }
    let status = ended?;
    match said.lines().find_map(|line| line.strip_prefix("guest-status ")).map(str::trim) {
        Some("0") => Ok(()),
        Some(_) => bail!("a test failed, see above"),
        None => bail!(
            "the guest died without a verdict (`{}`: {status}); the end of its console:\n{}",
            line(&qemu),
            last_words(&String::from_utf8_lossy(&fs::read(&console).unwrap_or_default()))
        ),
    }
}

/// The end of a guest's console; if its kernel crashed, from the line that names the cause.
fn last_words(console: &str) -> String {
    const OF: [&str; 5] = ["BUG: ", "Oops: ", "general protection fault", "int3: ", "kernel BUG at "];
    let lines: Vec<_> = console.lines().collect();
    let died = lines.iter().position(|line| OF.iter().any(|of| line.contains(of)));
    let from = lines.len().saturating_sub(30);
    lines[died.map_or(from, |died| died.min(from))..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A crash is reported from its first line on, however long the following text is.
    #[test]
    fn deaths() {
        let quiet = (0..50).map(|at| format!("line {at}")).collect::<Vec<_>>().join("\n") + "\n";
        assert!(last_words(&quiet).starts_with("line 20\n"));
        let died = format!("{quiet}[ 1.0] Oops: int3: 0000 [#1]\n{quiet}");
        assert!(last_words(&died).starts_with("[ 1.0] Oops: int3"));
        assert_eq!(last_words(""), "");
    }
}
