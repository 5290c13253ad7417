//! `cargo xtask lab --built`: the same Rubies, compiled from Debian's sources by the suite's own compiler.
//!
//! Debian's builds are reproducible: the compiled code equals that of the shipped library, but symbols and DWARF are
//! still present, so that results from the stripped library can be checked against them. Each build has a full root
//! with its build dependencies; every completed stage is marked and not repeated.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context as _, Result, bail};

use crate::{
    elf::loaded_sections,
    lab::{self, Suite},
    setup::{self, Purpose},
    util::{as_root, line, progress, run_quiet, short},
};

/// The sections that are compared with those of the shipped library.
const COMPARED: [&str; 4] = [".text", ".rodata", ".eh_frame", ".data.rel.ro"];
/// The script's exit status if the mirror does not have the source.
const NO_SOURCE: i32 = 42;

/// Runs inside the root. Arguments: the stage, the source package, the package of its library.
const STAGES: &str = r#"
set -e
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 HOME=/tmp
export DEB_BUILD_OPTIONS="nocheck nodoc parallel=$(nproc)" DEB_BUILD_PROFILES="nocheck nodoc"
mkdir -p /build
cd /build
case "$1" in
dependencies)
    [ -e dependencies ] && exit 0
    apt-get -q -y build-dep --no-install-recommends "$2"
    touch dependencies
    ;;
source)
    [ -d source ] && exit 0
    apt-get -q update
    if ! apt-get -q source --download-only "$2" >download.log 2>&1; then
        cat download.log
        if grep -q ' 404 ' download.log; then exit 42; fi
        exit 1
    fi
    rm -rf source.part
    dpkg-source -x --no-check ./*.dsc source.part
    mv source.part source
    ;;
compile)
    [ -e compiled ] && exit 0
    cd source
    # Not the parts for all architectures, which are documentation.
    debian/rules build-arch
    touch ../compiled
    ;;
results)
    version=$(dpkg-parsechangelog -l source/debian/changelog -S Version)
    rm -rf results.part shipped
    mkdir -p results.part shipped
    apt-get -q download "$3=$version"
    dpkg -x ./"$3"_*.deb shipped
    cp "$(find shipped -name 'libruby-*.so.*.*.*' -type f)" results.part/shipped.so
    cp "$(find source -maxdepth 1 -name 'libruby-*.so.*.*.*' -type f)" results.part/built.so
    printf '%s' "$version" >results.part/version
    cc --version | head -n 1 >results.part/compiler
    rm -rf results
    mv results.part results
    ;;
esac
"#;

/// Enters the root in its own mount namespace, which ends with its last process.
const ENTER: &str = r#"root=$1; shift; mount -t proc proc "$root/proc"; exec chroot "$root" "$@""#;

/// A Ruby that was built from source.
pub(crate) struct Built {
    /// Name of the suite.
    pub(crate) suite: &'static str,
    /// Version of the source package.
    pub(crate) version: String,
    /// First line of the compiler's version.
    pub(crate) compiler: String,
    /// The library with symbols and DWARF.
    pub(crate) library: PathBuf,
    /// The Ruby executable of a root in which that library replaces the shipped one.
    pub(crate) ruby: PathBuf,
    /// For each compared section: its name, and the number of bytes that differ from the shipped library's.
    pub(crate) differing: Vec<(&'static str, usize)>,
}

/// The outcome for one suite.
pub(crate) enum Outcome {
    /// It was built.
    Built(Box<Built>),
    /// The mirror does not have its source.
    NoSource(Missing),
}

/// A source that the mirror lists but does not have.
pub(crate) struct Missing {
    pub(crate) suite: &'static str,
    /// The source package.
    source: String,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} cannot be built: the mirror answers 404 for the source package {}, although its lists name it; try \
             again when the mirror has caught up, or name the other suites",
            self.suite, self.source
        )
    }
}

/// Builds the named suites (all if none is named) that are not built yet.
pub(crate) fn ensure(names: &[String]) -> Result<Vec<Outcome>> {
    let dir = lab::dir()?.join("built");
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let lock = dir.join(".lock");
    let lock = fs::File::create(&lock).with_context(|| format!("cannot create {}", lock.display()))?;
    lock.lock().context("cannot lock the builds")?;
    lab::chosen(names)
        .filter_map(|suite| suite.source().map(|source| (suite, source)))
        .map(|(suite, source)| {
            build(suite, &source, &dir).with_context(|| format!("cannot build the Ruby of {}", suite.name))
        })
        .collect()
}

fn build(suite: &'static Suite, source: &str, dir: &Path) -> Result<Outcome> {
    let stripped = lab::ensure(&[suite.name.to_owned()])?.into_iter().next().context("no root")?;
    let root = dir.join(suite.name);
    if !root.join("build-root-is-complete").exists() {
        make_root(suite, &root)?;
    }
    let results = root.join("build/results");
    if !results.is_dir() {
        let log = dir.join(suite.name).with_extension("log");
        for (stage, what) in [
            ("source", "fetching the source"),
            ("dependencies", "installing what the build needs (some minutes)"),
            ("compile", "compiling (10 to 40 minutes)"),
            ("results", "comparing with the shipped library"),
        ] {
            progress(format!("lab: {source} of {}: {what}; log: {}", suite.name, short(&log)));
            match run_stage(&root, stage, source, &log)? {
                Some(0) => {}
                Some(NO_SOURCE) => {
                    return Ok(Outcome::NoSource(Missing { suite: suite.name, source: source.to_owned() }));
                }
                code => bail!("stage {stage} failed with status {code:?}; see {}", log.display()),
            }
        }
    }
    let library = results.join("built.so");
    let ruby = unstripped_root(suite, &stripped, dir, &library)?;
    let text = |name: &str| {
        let path = results.join(name);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok::<_, anyhow::Error>(text.trim().to_owned())
    };
    Ok(Outcome::Built(Box::new(Built {
        suite: suite.name,
        version: text("version")?,
        compiler: text("compiler")?,
        differing: differing(&library, &results.join("shipped.so"))?,
        library,
        ruby,
    })))
}

/// Creates a root with a compiler and Debian's tools, whose apt has the sources.
fn make_root(suite: &Suite, root: &Path) -> Result<()> {
    setup::ensure(&[Purpose::Lab])?;
    progress(format!("lab: making a root to build in, {} (about a minute)", suite.name));
    let started = Instant::now();
    let part = root.with_extension("part");
    run_quiet(as_root("rm", "make the lab's roots")?.args(["-rf", "--"]).args([&part, root]))?;
    let mut command = lab::mmdebstrap("buildd", lab::AMD64)?;
    let sources = suite.archive_sources()?;
    command.arg(suite.archive[0]).arg(&part).args(&sources);
    command.args(sources.iter().map(|line| line.replacen("deb ", "deb-src ", 1)));
    run_quiet(&mut command)?;
    run_quiet(as_root("touch", "make the lab's roots")?.arg(part.join("build-root-is-complete")))?;
    run_quiet(as_root("mv", "make the lab's roots")?.args([part.as_path(), root]))?;
    progress(format!("lab: {} was ready after {:.0} s", short(root), started.elapsed().as_secs_f64()));
    Ok(())
}

/// Runs one stage at the lowest priority and returns its exit status.
fn run_stage(root: &Path, stage: &str, source: &str, log: &Path) -> Result<Option<i32>> {
    let file = fs::File::options().create(true).append(true).open(log);
    let file = file.with_context(|| format!("cannot write {}", log.display()))?;
    let mut command: Command = as_root("nice", "build in a root")?;
    command.args(["-n", "19", "unshare", "--mount", "sh", "-ec", ENTER, "enter"]).arg(root);
    command.args(["sh", "-c", STAGES, "stages", stage, source, &format!("lib{source}")]);
    command.stdin(std::process::Stdio::null()).stdout(file.try_clone()?).stderr(file);
    let status = command.status().with_context(|| format!("cannot run `{}`", line(&command)))?;
    Ok(status.code())
}

/// Creates a copy of the suite's small root in which this library replaces the shipped one; returns the path of its Ruby.
fn unstripped_root(suite: &Suite, ruby: &Path, dir: &Path, library: &Path) -> Result<PathBuf> {
    let small = lab::dir()?.join(suite.name);
    let copy = dir.join(format!("{}-unstripped", suite.name));
    let script = r#"
set -e
rm -rf "$2"
cp -a --link -- "$1" "$2" 2>/dev/null || { rm -rf "$2"; cp -a -- "$1" "$2"; }
old=$(find "$2/usr/lib" -name 'libruby-*.so.*.*.*' -type f -name "*-$4.so*")
cp -- "$3" "$old.part"
mv -- "$old.part" "$old"
"#;
    let mut command = as_root("sh", "make the lab's roots")?;
    command.args(["-c", script, "copy"]).args([small.as_path(), copy.as_path(), library]).arg(suite.series);
    run_quiet(&mut command)?;
    Ok(copy.join(ruby.strip_prefix(&small).context("the Ruby is not in its root")?))
}

/// The number of differing bytes of each compared section.
fn differing(built: &Path, shipped: &Path) -> Result<Vec<(&'static str, usize)>> {
    let read = |path: &Path| {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        loaded_sections(&bytes).with_context(|| format!("{}", path.display()))
    };
    let (built, shipped) = (read(built)?, read(shipped)?);
    let empty = Vec::new();
    let count = |name: &'static str| {
        let (a, b) = (built.get(name).unwrap_or(&empty), shipped.get(name).unwrap_or(&empty));
        let common = a.iter().zip(b).filter(|(a, b)| a != b).count();
        (name, common + a.len().abs_diff(b.len()))
    };
    Ok(COMPARED.map(count).into())
}
