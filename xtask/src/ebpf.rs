//! `cargo xtask ebpf`: builds or checks the committed BPF objects.
//!
//! The objects must be byte for byte the same wherever the checkout is; otherwise it could not be checked whether a committed
//! object belongs to its sources. Rust hashes the path of a crate into its symbols, so the sources are copied to one
//! fixed place and built there, with one toolchain, under a lock.

use std::{
    collections::BTreeMap,
    env,
    fs::{self, File},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::{
    elf,
    setup::{self, Purpose},
    toolchain::Toolchain,
    util::{progress, root, run_quiet, sha256, target_dir},
};

/// Arguments of `ebpf`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Change nothing; fail when the committed objects are not what the sources give.
    #[arg(long)]
    check: bool,
    /// Build objects whose programs send lines through aya-log, into target/bpf-log; the committed ones stay.
    #[arg(long, conflicts_with = "check")]
    log: bool,
}

/// Values of `cfg(bpf_target_arch)`; the objects differ in the layout of the registers.
const ARCHITECTURES: [&str; 2] = ["x86_64", "aarch64"];
/// The directory in which the objects are built, on every machine.
const PLACE: &str = "/tmp/gctrace-bpf-build";
const TARGET: &str = "bpfel-unknown-none";
const REMEDY: &str = "run `cargo xtask ebpf` and commit gctrace-ebpf/prebuilt";

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    match args {
        Args { check: true, .. } => check(),
        Args { log: true, .. } => with_lines(),
        _ => rebuild(),
    }
}

/// Builds objects for debugging, which are not committed.
fn with_lines() -> Result<()> {
    let folder = target_dir()?.join("bpf-log");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    for (name, bytes) in Build::run(&["--features", "bpf-log"])?.objects {
        let path = folder.join(name);
        write(&path, &bytes)?;
        progress(format!("ebpf: {}, {} bytes", path.display(), bytes.len()));
    }
    Ok(())
}

fn rebuild() -> Result<()> {
    let build = Build::run(&[])?;
    let folder = prebuilt();
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    for (name, bytes) in &build.objects {
        write(&folder.join(name), bytes)?;
        progress(format!("ebpf: {name}, {} bytes", bytes.len()));
    }
    write(&folder.join("BUILD_INFO"), build.info.render().as_bytes())
}

fn check() -> Result<()> {
    let recorded =
        Info::parse(&fs::read_to_string(prebuilt().join("BUILD_INFO")).with_context(|| {
            format!("cannot read {}: {REMEDY}", prebuilt().join("BUILD_INFO").display())
        })?)?;
    // First the checks that do not need a compiler.
    let (lock, sources) = source_hashes()?;
    ensure!(
        recorded.get("lock") == lock,
        "gctrace-ebpf/Cargo.lock has changed since the BPF objects were built: {REMEDY}"
    );
    ensure!(
        recorded.get("sources") == sources,
        "the sources have changed since the BPF objects were built: {REMEDY}"
    );
    let mut committed = BTreeMap::new();
    for name in ARCHITECTURES.map(object_name) {
        let path = prebuilt().join(&name);
        let bytes = fs::read(&path).with_context(|| format!("cannot read {}: {REMEDY}", path.display()))?;
        ensure!(
            recorded.get(&name) == sha256(&bytes)?,
            "{name} is not the object that BUILD_INFO records: {REMEDY}"
        );
        committed.insert(name, bytes);
    }

    let build = Build::run(&[])?;
    let differing: Vec<&String> = build
        .objects
        .iter()
        .filter(|(name, bytes)| committed.get(*name) != Some(*bytes))
        .map(|(name, _)| name)
        .collect();
    if differing.is_empty() {
        progress("ebpf: the committed objects are byte for byte what the sources give");
        return Ok(());
    }
    let other = recorded.other_tools(&build.info);
    for name in differing {
        let sections = elf::loaded_sections(&build.objects[name])?;
        if other.is_empty() {
            bail!("{name} is not what the sources give: {REMEDY}");
        }
        ensure!(
            sections == elf::loaded_sections(&committed[name])?,
            "the code of {name} is not what the sources give here. The tools differ too ({}), so this alone may be the \
             reason: {REMEDY}",
            other.join(", ")
        );
        progress(format!(
            "ebpf: {name}: code and maps are equal; the rest cannot be compared ({})",
            other.join(", ")
        ));
    }
    Ok(())
}

/// A finished build of all objects.
struct Build {
    objects: BTreeMap<String, Vec<u8>>,
    info: Info,
}

impl Build {
    fn run(features: &[&str]) -> Result<Self> {
        setup::ensure(&[Purpose::Ebpf])?;
        let tools = Toolchain::find()?;
        let place = Path::new(PLACE);
        let _lock = occupy(place)?;
        let (lock, sources) = source_hashes()?;
        copy_sources(&place.join("src"))?;
        let crate_dir = place.join("src/gctrace-ebpf");
        let target_dir = place.join("target");

        run_quiet(tools.cargo(place)?.args(["fetch", "--locked"]).current_dir(&crate_dir))
            .context("cannot fetch the dependencies of the BPF programs")?;
        let mut objects = BTreeMap::new();
        for arch in ARCHITECTURES {
            progress(format!("ebpf: building for {arch}"));
            let mut command = tools.cargo(place)?;
            command.args(["build", "--release", "--locked", "--offline", "--target", TARGET]).args(features);
            command.env("CARGO_ENCODED_RUSTFLAGS", flags(arch)?).env("CARGO_TARGET_DIR", &target_dir);
            run_quiet(command.current_dir(&crate_dir)).context("cannot build the BPF programs")?;
            let path = target_dir.join(TARGET).join("release/gctrace");
            let linked = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            objects.insert(object_name(arch), elf::strip(&linked)?);
        }
        let mut info = Info::default();
        for (key, value) in [
            ("rustc", &tools.rustc),
            ("llvm", &tools.llvm),
            ("cargo", &tools.cargo),
            ("bpf-linker", &tools.linker),
            ("lock", &lock),
            ("sources", &sources),
        ] {
            info.set(key, value);
        }
        for (name, bytes) in &objects {
            info.set(name, &sha256(bytes)?);
        }
        Ok(Self { objects, info })
    }
}

/// The compiler flags, in cargo's encoding. Paths of this machine are replaced by names, since they would end up in the
/// line information.
fn flags(arch: &str) -> Result<String> {
    let mut flags = vec![
        format!("--cfg=bpf_target_arch=\"{arch}\""),
        // No line information: BTF would carry the text of the standard library's lines where its sources happen to
        // be installed, and the object would differ from machine to machine.
        "-Cdebuginfo=0".to_owned(),
        "-Clink-arg=--btf".to_owned(),
        format!("--remap-path-prefix={PLACE}/src=."),
    ];
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| env::var_os("HOME").map(|home| Path::new(&home).join(".cargo")));
    let registry = home.context("neither CARGO_HOME nor HOME is set")?.join("registry/src");
    let mut registries = Vec::new();
    for entry in fs::read_dir(&registry).with_context(|| format!("cannot read {}", registry.display()))? {
        registries.push(entry.with_context(|| format!("cannot read {}", registry.display()))?.path());
    }
    registries.sort();
    flags.extend(registries.iter().map(|path| format!("--remap-path-prefix={}=/deps", path.display())));
    Ok(flags.join("\x1f"))
}

/// Reserves the build directory for this process; it is released when the returned file is dropped.
fn occupy(place: &Path) -> Result<File> {
    match fs::DirBuilder::new().mode(0o700).create(place) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(error).with_context(|| format!("cannot create {PLACE}"));
        }
        _ => {}
    }
    let metadata = place.symlink_metadata().with_context(|| format!("cannot read {PLACE}"))?;
    ensure!(
        metadata.is_dir() && metadata.uid() == rustix::process::geteuid().as_raw(),
        "{PLACE} belongs to user {} or is not a folder; the BPF objects are always built there: remove it",
        metadata.uid()
    );
    let lock = File::create(place.join("lock")).context("cannot create the lock file of the build place")?;
    if lock.try_lock().is_err() {
        progress(format!("ebpf: waiting for another build in {PLACE}"));
        lock.lock().context("cannot lock the build place")?;
    }
    Ok(lock)
}

fn copy_sources(to: &Path) -> Result<()> {
    if to.exists() {
        fs::remove_dir_all(to).with_context(|| format!("cannot remove {}", to.display()))?;
    }
    for path in source_files()? {
        let target = to.join(&path);
        let folder = target.parent().unwrap_or(to);
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        fs::copy(root().join(&path), &target).with_context(|| format!("cannot copy {path}"))?;
    }
    let manifest = root().join("Cargo.toml");
    let text =
        fs::read_to_string(&manifest).with_context(|| format!("cannot read {}", manifest.display()))?;
    write(&to.join("Cargo.toml"), reduced_workspace(&text).as_bytes())
}

/// A workspace that contains only `gctrace-common`, with the tables that it inherits.
fn reduced_workspace(manifest: &str) -> String {
    let mut text = String::from(
        "[workspace]\nresolver = \"3\"\nmembers = [\"gctrace-common\"]\nexclude = [\"gctrace-ebpf\"]\n\n",
    );
    let mut inherited = false;
    for line in manifest.lines() {
        if line.starts_with('[') {
            inherited = line.starts_with("[workspace.");
        }
        if inherited {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

/// Hash of the lock file, and of all source files of the objects: the latter is the hash of the list that `sha256sum` would print for
/// them, sorted by name.
fn source_hashes() -> Result<(String, String)> {
    let (mut lock, mut list) = (String::new(), String::new());
    for path in source_files()? {
        let bytes = fs::read(root().join(&path)).with_context(|| format!("cannot read {path}"))?;
        let hash = sha256(&bytes)?;
        list += &[hash.as_str(), "  ", &path, "\n"].concat();
        if path == "gctrace-ebpf/Cargo.lock" {
            lock = hash;
        }
    }
    Ok((lock, sha256(list.as_bytes())?))
}

/// Source files of the objects, relative to the root directory, sorted by name.
fn source_files() -> Result<Vec<String>> {
    let mut files: Vec<String> =
        ["gctrace-ebpf/Cargo.toml", "gctrace-ebpf/Cargo.lock", "gctrace-common/Cargo.toml"]
            .map(String::from)
            .to_vec();
    let mut folders = vec!["gctrace-ebpf/src".to_owned(), "gctrace-common/src".to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(root().join(&folder)).with_context(|| format!("cannot read {folder}"))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot read {folder}"))?;
            let path = format!("{folder}/{}", entry.file_name().to_string_lossy());
            if entry.path().is_dir() {
                folders.push(path);
            } else if entry.path().extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

fn prebuilt() -> PathBuf {
    root().join("gctrace-ebpf/prebuilt")
}

fn object_name(arch: &str) -> String {
    format!("gctrace.bpfel.{arch}.o")
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

/// `BUILD_INFO`: the sources and tools of the objects, as `key: value` lines.
#[derive(Default)]
struct Info(Vec<(String, String)>);

impl Info {
    fn parse(text: &str) -> Result<Self> {
        let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        let pairs =
            lines.map(|line| line.split_once(": ").map(|(key, value)| (key.to_owned(), value.to_owned())));
        pairs.collect::<Option<_>>().map(Self).with_context(|| format!("BUILD_INFO is damaged: {REMEDY}"))
    }

    fn render(&self) -> String {
        let lines = self.0.iter().map(|(key, value)| format!("{key}: {value}\n"));
        let head = "# Written by `cargo xtask ebpf`, compared by `cargo xtask ebpf --check`.\n".to_owned();
        std::iter::once(head).chain(lines).collect()
    }

    fn set(&mut self, key: &str, value: &str) {
        self.0.push((key.to_owned(), value.to_owned()));
    }

    fn get(&self, key: &str) -> &str {
        self.0.iter().find(|(name, _)| name == key).map_or("", |(_, value)| value)
    }

    /// Sentences about tools whose version here differs from the recorded one.
    fn other_tools(&self, here: &Self) -> Vec<String> {
        ["rustc", "llvm", "cargo", "bpf-linker"]
            .iter()
            .filter(|tool| self.get(tool) != here.get(tool))
            .map(|tool| format!("{tool} {} then, {} here", self.get(tool), here.get(tool)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only the inherited tables remain, and the members are reduced.
    #[test]
    fn workspace_is_reduced() {
        let text = reduced_workspace(
            "[workspace]\nmembers = [\"a\",\n \"b\"]\n\n[workspace.package]\nedition = \"2024\"\n\n[profile.release]\nlto = true\n",
        );
        assert!(text.contains("[workspace.package]\nedition = \"2024\""));
        assert!(text.contains("members = [\"gctrace-common\"]"));
        assert!(!text.contains("\"b\"") && !text.contains("lto"));
    }

    /// What is written is read back; a changed tool is reported, an unchanged one is not.
    #[test]
    fn info_round_trip() {
        let mut then = Info::default();
        then.set("rustc", "1.96.0");
        then.set("llvm", "22.1.8");
        let read = Info::parse(&then.render()).unwrap();
        assert_eq!(read.get("llvm"), "22.1.8");
        let mut here = Info::default();
        here.set("rustc", "1.97.0");
        here.set("llvm", "22.1.8");
        assert_eq!(read.other_tools(&here), ["rustc 1.96.0 then, 1.97.0 here"]);
        assert!(Info::parse("no colon").is_err());
    }
}
