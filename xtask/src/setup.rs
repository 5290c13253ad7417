//! `cargo xtask setup`: installs what the other commands need.

use std::{path::Path, process::Command};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;

use crate::{
    toolchain,
    util::{as_root, is_root, output, progress, run_quiet, which},
};

/// Arguments of `setup`.
#[derive(clap::Args)]
pub struct Args {
    /// What to prepare for (default: everything).
    #[arg(long = "for", value_enum, value_name = "PURPOSE")]
    purpose: Vec<Purpose>,
}

/// What a machine is prepared for.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Purpose {
    /// Building gctrace: a C linker.
    Build,
    /// The demonstration: Ruby.
    Demo,
    /// The tests: Ruby with headers, a C compiler, make, Go's pprof, containers, web servers, Sidekiq with Redis, and the export targets:
    /// Prometheus, PostgreSQL, Python; a browser for the pages.
    Test,
    /// The application of `cargo xtask bench --tune --app`: Puma, Sinatra, SQLite, wrk.
    App,
    /// The roots with other Rubies: mmdebstrap.
    Lab,
    /// Other kernels: QEMU, `BusyBox` and cpio for their guests.
    Vm,
    /// Guests of the processor aarch64: its emulator, compilers for it, the headers of its C library.
    #[value(name = "vm-aarch64")]
    VmAarch64,
    /// Rebuilding the BPF objects: Debian's rustc with its BPF standard library, and bpf-linker.
    Ebpf,
}

/// A Debian package, with the command that shows whether its contents are already present from another source.
struct Need {
    package: &'static str,
    command: Option<&'static str>,
}

const fn package(package: &'static str) -> Need {
    Need { package, command: None }
}

const fn command(package: &'static str, command: &'static str) -> Need {
    Need { package, command: Some(command) }
}

const CC: Need = command("gcc", "cc");
const LIBC: Need = package("libc6-dev");
const MAKE: Need = command("make", "make");
const RUBY: Need = package("ruby");
const RUBY_DEV: Need = package("ruby-dev");
const GO: Need = command("golang-go", "go");
const BINUTILS: Need = command("binutils", "objcopy");
const DWZ: Need = command("dwz", "dwz");
const XZ: Need = command("xz-utils", "xz");
const PROMETHEUS: Need = command("prometheus", "promtool");
const POSTGRES: Need = package("postgresql");
const VENV: Need = package("python3-venv");
const PODMAN: Need = command("podman", "podman");
const RUNC: Need = command("runc", "runc");
const CONMON: Need = package("conmon");
const PUMA: Need = command("puma", "puma");
const UNICORN: Need = command("unicorn", "unicorn");
const THIN: Need = command("thin", "thin");
const SIDEKIQ: Need = command("ruby-sidekiq", "sidekiq");
const REDIS: Need = command("redis-server", "redis-server");
const SINATRA: Need = package("ruby-sinatra");
const RAILS: Need = package("ruby-actionpack");
const GRAPE: Need = package("ruby-grape");
const SQLITE: Need = package("ruby-sqlite3");
const WRK: Need = command("wrk", "wrk");
const TMUX: Need = command("tmux", "tmux");
const CHROMIUM: Need = command("chromium", "chromium");
// Without a font, text in a page has no size.
const FONTS: Need = package("fonts-dejavu-core");
const MMDEBSTRAP: Need = command("mmdebstrap", "mmdebstrap");
const QEMU: Need = command("qemu-system-x86", "qemu-system-x86_64");
const QEMU_ARM: Need = command("qemu-system-arm", "qemu-system-aarch64");
const CC_AARCH64: Need = command("gcc-aarch64-linux-gnu", "aarch64-linux-gnu-gcc");
const LIBC_AARCH64: Need = package("libc6-dev-arm64-cross");
const BUSYBOX: Need = package("busybox-static");
const CPIO: Need = command("cpio", "cpio");
const RUSTC: Need = package("rustc-web");
const CARGO: Need = package("cargo-web");
const BPF_CORE: Need = package("libstd-rust-web-dev-bpf");

impl Purpose {
    const fn needs(self) -> &'static [Need] {
        match self {
            Self::Build => &[CC, LIBC],
            Self::Demo => &[CC, LIBC, RUBY],
            Self::Test => &[
                CC, LIBC, MAKE, RUBY, RUBY_DEV, GO, BINUTILS, DWZ, XZ, PODMAN, RUNC, CONMON, PUMA, UNICORN,
                THIN, SIDEKIQ, REDIS, WRK, PROMETHEUS, POSTGRES, VENV, TMUX, SINATRA, RAILS, GRAPE, CHROMIUM,
                FONTS,
            ],
            Self::App => &[CC, LIBC, RUBY, PUMA, SINATRA, SQLITE, WRK],
            Self::Lab => &[MMDEBSTRAP],
            Self::Vm => &[MMDEBSTRAP, QEMU, BUSYBOX, CPIO],
            Self::VmAarch64 => {
                &[CC, LIBC, MMDEBSTRAP, QEMU_ARM, CPIO, RUSTC, CARGO, CC_AARCH64, LIBC_AARCH64]
            }
            Self::Ebpf => &[CC, LIBC, RUSTC, CARGO, BPF_CORE],
        }
    }
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let all = [Purpose::Build, Purpose::Demo, Purpose::Test, Purpose::Lab, Purpose::Vm, Purpose::Ebpf];
    ensure(if args.purpose.is_empty() { &all } else { &args.purpose })?;
    progress("setup: everything needed is installed");
    Ok(())
}

/// Installs what is missing for these purposes.
pub fn ensure(purposes: &[Purpose]) -> Result<()> {
    let mut missing: Vec<&str> = Vec::new();
    for need in purposes.iter().flat_map(|purpose| purpose.needs()) {
        if !missing.contains(&need.package) && !is_there(need) {
            missing.push(need.package);
        }
    }
    if !missing.is_empty() {
        install(&missing)?;
    }
    if purposes.contains(&Purpose::Ebpf) {
        toolchain::ensure_linker()?;
    }
    Ok(())
}

fn is_there(need: &Need) -> bool {
    if need.command.is_some_and(|name| which(name).is_some()) {
        return true;
    }
    let mut query = Command::new("dpkg-query");
    query.args(["--show", "--showformat=${db:Status-Status}", need.package]);
    output(&mut query).is_ok_and(|status| status.trim() == "installed")
}

fn install(packages: &[&str]) -> Result<()> {
    let list = packages.join(" ");
    if !Path::new("/usr/bin/apt-get").exists() {
        bail!(
            "these Debian packages are missing and there is no apt-get here: {list}. Install their contents by hand"
        );
    }
    if !is_root() && which("sudo").is_none() {
        bail!("these packages are missing: {list}. As root: apt-get update && apt-get install {list}");
    }
    progress(format!("setup: installing {list} (apt-get, may take minutes)"));
    if let Err(error) = run_quiet(apt()?.arg("update")) {
        progress(format!("setup: continuing with the existing package lists: {error:#}"));
    }
    run_quiet(apt()?.args(["install", "--no-install-recommends"]).args(packages))
        .with_context(|| format!("cannot install {list}"))
}

fn apt() -> Result<Command> {
    let mut command = as_root("env", "install packages")?;
    command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "-y", "-q", "-o", "DPkg::Lock::Timeout=300"]);
    Ok(command)
}
