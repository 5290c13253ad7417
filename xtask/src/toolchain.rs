//! The compiler and linker of the BPF objects.
//!
//! Debian's `rustc-web` is the only compiler that a fresh Debian 12 can install itself and that has its standard library for
//! the BPF target as a package. bpf-linker is built once; it loads LLVM at run time, and is given the same library that
//! this rustc uses, so that the two always agree.

use std::{
    env, fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::util::{cache_dirs, output, progress, run_quiet, which};

/// Later releases no longer use the LLVM of the compiler.
const LINKER_VERSION: &str = "0.10.3";
/// The major version of LLVM for which this bpf-linker release is built.
const LLVM_MAJOR: &str = "22";
const RUSTC: &str = "/usr/bin/rustc";
const CARGO: &str = "/usr/bin/cargo";

/// The tools that build the objects, with their versions as recorded in `BUILD_INFO`.
pub(crate) struct Toolchain {
    /// Version of rustc.
    pub(crate) rustc: String,
    /// Version of the LLVM that rustc uses.
    pub(crate) llvm: String,
    /// Version of cargo.
    pub(crate) cargo: String,
    /// Version of bpf-linker.
    pub(crate) linker: String,
    linker_dir: PathBuf,
    llvm_library: PathBuf,
}

impl Toolchain {
    /// Finds the toolchain that `setup --for ebpf` has installed.
    pub(crate) fn find() -> Result<Self> {
        let verbose = output(clean(Command::new(RUSTC)).arg("-vV"))?;
        let llvm =
            verbose.lines().find_map(|l| l.strip_prefix("LLVM version: ")).unwrap_or("unknown").to_owned();
        if llvm.split('.').next() != Some(LLVM_MAJOR) {
            bail!(
                "{RUSTC} uses LLVM {llvm}; bpf-linker {LINKER_VERSION} needs LLVM {LLVM_MAJOR} (rustc-web 1.96 of \
                 bookworm-security): enable Debian's security updates and run `apt-get update && apt-get install rustc-web`"
            );
        }
        let linker = linker().context("no bpf-linker: run `cargo xtask setup --for ebpf`")?;
        Ok(Self {
            rustc: verbose.lines().next().unwrap_or_default().trim_start_matches("rustc ").to_owned(),
            llvm,
            cargo: output(clean(Command::new(CARGO)).arg("-V"))?
                .trim()
                .trim_start_matches("cargo ")
                .to_owned(),
            linker: LINKER_VERSION.to_owned(),
            linker_dir: linker.parent().map(Path::to_path_buf).unwrap_or_default(),
            llvm_library: llvm_library()?,
        })
    }

    /// A cargo command of this toolchain, isolated from the caller's settings. In `scratch` it creates a directory with
    /// the only LLVM library that bpf-linker can find.
    pub(crate) fn cargo(&self, scratch: &Path) -> Result<Command> {
        let llvm = scratch.join("llvm");
        fs::create_dir_all(&llvm).with_context(|| format!("cannot create {}", llvm.display()))?;
        let link = llvm.join("libLLVM.so");
        if fs::read_link(&link).ok().as_ref() != Some(&self.llvm_library) {
            if link.symlink_metadata().is_ok() {
                fs::remove_file(&link).with_context(|| format!("cannot remove {}", link.display()))?;
            }
            symlink(&self.llvm_library, &link)
                .with_context(|| format!("cannot create {}", link.display()))?;
        }
        let path = env::join_paths([self.linker_dir.as_path(), Path::new("/usr/bin"), Path::new("/bin")])
            .context("the folder of bpf-linker cannot be put on PATH")?;
        let mut command = clean(Command::new(CARGO));
        command
            .env("PATH", path)
            .env("LD_LIBRARY_PATH", llvm)
            .env("RUSTC", RUSTC)
            .env("RUSTC_BOOTSTRAP", "1");
        Ok(command)
    }
}

/// Installs bpf-linker if it is missing.
pub(crate) fn ensure_linker() -> Result<()> {
    if linker().is_some() {
        return Ok(());
    }
    let tools = cache_dirs("tools")?.into_iter().next().context("no folder to install bpf-linker into")?;
    progress(format!("setup: building bpf-linker {LINKER_VERSION} (about two minutes)"));
    let mut command = clean(Command::new(CARGO));
    // LLVM does the work: the linker's own code need not be fast, but its build must be short.
    command.env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1").env("CARGO_PROFILE_RELEASE_DEBUG", "0");
    command.env("CARGO_PROFILE_RELEASE_LTO", "off").env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
    command.env("RUSTC", RUSTC);
    command.args(["install", "bpf-linker", "--version", LINKER_VERSION, "--locked", "--no-default-features"]);
    command.args(["--features", &format!("rust-llvm-{LLVM_MAJOR}"), "--root"]).arg(&tools);
    run_quiet(&mut command).context("cannot build bpf-linker")
}

/// The bpf-linker of the required version: where `ensure_linker` puts it, or on `PATH`.
fn linker() -> Option<PathBuf> {
    let own = cache_dirs("tools").unwrap_or_default().into_iter().map(|dir| dir.join("bin/bpf-linker"));
    own.chain(which("bpf-linker")).find(|path| {
        let version = output(clean(Command::new(path)).arg("--version"));
        version.is_ok_and(|text| text.split_whitespace().last() == Some(LINKER_VERSION))
    })
}

/// The LLVM library that rustc itself loads.
fn llvm_library() -> Result<PathBuf> {
    let libraries = output(clean(Command::new("ldd")).arg(RUSTC))?;
    let line = libraries.lines().map(str::trim).find(|line| line.starts_with("libLLVM"));
    let path = line.and_then(|line| line.split_whitespace().nth(2)).filter(|path| path.starts_with('/'));
    path.map(PathBuf::from)
        .with_context(|| format!("`ldd {RUSTC}` names no libLLVM; bpf-linker needs the compiler's own"))
}

/// Cargo with Debian's rustc, isolated in the same way, for targets whose standard library Debian provides.
pub(crate) fn plain_cargo() -> Command {
    let mut command = clean(Command::new(CARGO));
    command.env("RUSTC", RUSTC);
    command
}

/// The full version of Debian's rustc, which cannot use the standard library of another version.
pub(crate) fn rustc_version() -> Result<String> {
    output(clean(Command::new(RUSTC)).arg("-vV"))
}

/// Clears the environment of a command, except for what cargo needs to find its home and the network.
fn clean(mut command: Command) -> Command {
    const NAMES: [&str; 6] =
        ["HOME", "CARGO_HOME", "TERM", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"];
    const PREFIXES: [&str; 5] =
        ["CARGO_HTTP_", "CARGO_NET_", "CARGO_REGISTRY_", "CARGO_REGISTRIES_", "CARGO_SOURCE_"];
    command.env_clear().env("PATH", "/usr/bin:/bin").env("LC_ALL", "C.UTF-8");
    for (name, value) in env::vars_os() {
        let text = name.to_string_lossy();
        let wanted = NAMES.contains(&&*text)
            || PREFIXES.iter().any(|prefix| text.starts_with(prefix))
            || text.to_ascii_lowercase().ends_with("_proxy");
        if wanted {
            command.env(&name, value);
        }
    }
    command
}
