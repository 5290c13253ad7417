//! The privileges that gctrace drops after its start, and those that it keeps.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::{Live, gctrace_binary};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use gctrace_tests::{compare, ledger};
use rustix::io::Errno;

/// Bits of capabilities (include/uapi/linux/capability.h).
const DAC_OVERRIDE: u64 = 1 << 1;
const NET_ADMIN: u64 = 1 << 12;
const DAC_READ_SEARCH: u64 = 1 << 2;
const SYS_PTRACE: u64 = 1 << 19;
const SYS_ADMIN: u64 = 1 << 21;
const SYSLOG: u64 = 1 << 34;
const LEASE: u64 = 1 << 28;

/// A field of `/proc/.../status`.
fn field(status: &str, name: &str) -> Result<String> {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    Ok(line.with_context(|| format!("no {name} in {status}"))?.trim().to_owned())
}

fn set(status: &str, name: &str) -> Result<u64> {
    Ok(u64::from_str_radix(&field(status, name)?, 16)?)
}

/// Each thread of gctrace keeps only what attaching needs and cannot regain anything. A Ruby that it sees later is traced.
#[test]
fn the_rest_is_dropped() -> Result<()> {
    let live = Live::begin()?;
    let own = std::fs::read_to_string("/proc/self/status")?;
    let own = set(&own, "CapEff")?;
    let dir = live.dir("sets")?;
    let output = dir.to_string_lossy().into_owned();
    let cases: [(&[&str], u64); 3] = [
        (&["--no-cache"], 0),
        (&["--no-cache", "--tunemygc", &output], DAC_OVERRIDE),
        (&["--no-cache", "--requests"], NET_ADMIN),
    ];
    for (flags, more) in cases {
        let gctrace = Invocation::jsonl([&["--all-ruby"], flags].concat())?.start_ready()?;
        let wanted = (SYS_ADMIN | SYS_PTRACE | DAC_READ_SEARCH | SYSLOG | LEASE | more) & own;
        let mut threads = 0;
        for thread in std::fs::read_dir(format!("/proc/{}/task", gctrace.pid()))? {
            let status = match std::fs::read_to_string(thread?.path().join("status")) {
                // A thread that has ended meanwhile, such as the one that looks for installed Rubies.
                Err(error)
                    if [Errno::NOENT, Errno::SRCH]
                        .iter()
                        .any(|gone| error.raw_os_error() == Some(gone.raw_os_error())) =>
                {
                    continue;
                }
                status => status?,
            };
            threads += 1;
            for name in ["CapEff", "CapPrm"] {
                ensure!(set(&status, name)? == wanted, "{name} is not {wanted:x}: {status}");
            }
            ensure!(set(&status, "CapInh")? == 0 && set(&status, "CapAmb")? == 0, "{status}");
            ensure!(field(&status, "NoNewPrivs")? == "1", "{status}");
        }
        ensure!(threads >= 3, "{threads} threads");
        // An image that was not present at the start.
        let ruby = Ruby::rooted()?.pop().context("no Ruby of the lab")?;
        let mut script = Script::new(&live, &ruby, "explicit.rb")?.arg("5").waiting().start()?;
        script.wait_for("ready")?;
        let mut gctrace = gctrace;
        gctrace.wait_line("process", script.pid())?;
        script.say("go")?;
        let done = script.finish()?;
        let report = gctrace.stop()?;
        ledger::check_lossless(&report)?;
        let lines: Vec<_> = report.gcs_of(done.pid).collect();
        compare::program(&lines, &done.report)?;
    }
    ensure!(std::fs::read_dir(&dir)?.count() > 0, "no set was written");
    Ok(())
}

/// A command has the privileges of its user.
#[test]
fn a_command_keeps_all() -> Result<()> {
    let _live = Live::beside_others()?;
    let own = std::fs::read_to_string("/proc/self/status")?;
    let mut args = vec!["--quiet".to_owned(), "--".to_owned()];
    args.push(Ruby::main()?.exe().to_string_lossy().into_owned());
    args.extend(["-e", "GC.start; puts File.read('/proc/self/status')"].map(ToOwned::to_owned));
    let finished = Invocation::new(args)?.run()?;
    ensure!(finished.status.success(), "{}", finished.errors());
    // The command's standard output goes to standard error, because standard output is for gctrace's reports.
    let its = finished.errors();
    for name in ["CapEff", "NoNewPrivs", "CapBnd"] {
        ensure!(field(&its, name)? == field(&own, name)?, "{name} of the command: {its}");
    }
    Ok(())
}

/// The readers of the manual page and of the completions accept them.
#[test]
fn documents() -> Result<()> {
    let live = Live::without_gctrace()?;
    let page = Invocation::new(["man"])?.run()?;
    ensure!(page.status.success() && page.stdout.iter().any(|line| line.starts_with(".TH")), "{page:?}");
    let script = Invocation::new(["completions", "bash"])?.run()?;
    ensure!(script.status.success(), "{script:?}");
    let path = live.path("completions.bash");
    std::fs::write(&path, script.stdout.join("\n"))?;
    let read = "source \"$0\"; COMP_WORDS=(gctrace --cont); COMP_CWORD=1; _gctrace gctrace --cont gctrace; \
                echo \"${COMPREPLY[@]}\"";
    let output = Command::new("bash").args(["-c", read]).arg(&path).output()?;
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    ensure!(said == "--container", "{said}: {}", String::from_utf8_lossy(&output.stderr));
    // Requested output that cannot be written is an error.
    for asked in ["--help", "-h", "--version", "man"] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full")?;
        let output = Command::new(gctrace_binary()?).arg(asked).stdout(full).output()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(2), "{asked}: {}: {errors}", output.status);
        ensure!(errors.starts_with("gctrace: writing to standard output: "), "{asked}: {errors}");
    }
    Ok(())
}

/// The files in `packaging/` work: the unit's capabilities are sufficient for its command, and the manifest's flags
/// exist in gctrace.
#[test]
fn packaging() -> Result<()> {
    let live = Live::begin()?;
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging");
    let unit = std::fs::read_to_string(packaging.join("gctrace.service"))?;
    let value = |key: &str| {
        let found = unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        found.with_context(|| format!("no {key} in the unit"))
    };
    let capabilities: Vec<String> = value("CapabilityBoundingSet")?
        .split(' ')
        .map(|name| format!("+{}", name.trim_start_matches("CAP_").to_lowercase()))
        .collect();
    let state = live.dir("state")?;
    let sets = live.dir("state/sets")?.to_string_lossy().into_owned();
    // systemd reads two percent signs as one.
    let start = value("ExecStart")?.replace("/var/lib/gctrace", &state.to_string_lossy()).replace("%%", "%");
    let arguments: Vec<&str> = start.split(' ').skip(1).collect();
    let mut command = vec!["--no-new-privs".to_owned(), "--inh-caps=-all".to_owned()];
    command.push(format!("--bounding-set=-all,{}", capabilities.join(",")));
    command.push(gctrace_binary()?.to_string_lossy().into_owned());
    command.extend(arguments.iter().map(ToString::to_string));
    let mut gctrace = Invocation::of(Path::new("setpriv"), command).start_ready()?;
    let done = Script::unwitnessed(&live, &Ruby::main()?, "explicit.rb")?.arg("3").run()?;
    ensure!(value("ExecReload")? == "/bin/kill -USR2 $MAINPID");
    gctrace.signal(rustix::process::Signal::USR2)?;
    gctrace.wait_error("-SIGUSR2.gctrace")?;
    let finished = gctrace.interrupt()?;
    ensure!(finished.status.success(), "{}", finished.errors());
    let names = std::fs::read_dir(&sets)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let names = names.collect::<Result<Vec<String>>>()?;
    ensure!(
        names.iter().any(|name| name.contains(&done.pid.to_string())),
        "no set of {}: {names:?}",
        done.pid
    );

    let read = "require 'yaml'; puts YAML.load_file(ARGV[0]).dig('spec', 'template', 'spec', 'containers', 0, 'command')";
    let manifest = packaging.join("daemonset.yaml");
    let output = Ruby::main()?.command()?.args(["-e", read]).arg(manifest).output()?;
    let help = Invocation::new(["--help"])?.run()?.stdout.join("\n");
    let words = String::from_utf8(output.stdout)?;
    let flags: Vec<&str> = words.lines().filter(|word| word.starts_with("--")).collect();
    ensure!(flags.len() >= 4 && flags.iter().all(|flag| help.contains(flag)), "{flags:?}: {help}");
    Ok(())
}
