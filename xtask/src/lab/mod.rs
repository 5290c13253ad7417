//! `cargo xtask lab`: Debian's Rubies of several generations, each in a small root, for tests.
//!
//! A root contains the Ruby packages of one suite with their dependencies, unpacked and not configured: the same files
//! that users have, in about 75 MB. It is never booted; the tests start its Ruby in a chroot.

pub(crate) mod built;

use std::{
    collections::BTreeMap,
    fmt,
    fs::{self, File},
    panic::resume_unwind,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Instant,
};

use anyhow::{Context as _, Result, bail, ensure};

use self::built::Outcome;
use crate::{
    setup::{self, Purpose},
    util::{as_root, cache_dirs, output, progress, run_quiet, short},
};

/// Arguments of `lab`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Which roots: bullseye (Ruby 2.7), bookworm (3.1), trixie (3.3), experimental (3.4); bookworm-security and
    /// trixie-security have the patch releases of the security updates. Default: all that are available.
    #[arg(value_parser = SUITES.iter().map(|suite| suite.name).collect::<Vec<_>>())]
    names: Vec<String>,
    /// Compile the same Rubies from source, too, for symbols and DWARF (20 to 60 minutes each).
    #[arg(long)]
    built: bool,
}

/// One suite of Debian and the Ruby in it.
pub(crate) struct Suite {
    /// Its name, and the name of its root.
    pub(crate) name: &'static str,
    /// The suites of the archive that its packages come from.
    pub(crate) archive: &'static [&'static str],
    /// The suite with its security updates.
    security: Option<&'static str>,
    /// The series of its Ruby.
    pub(crate) series: &'static str,
    /// The packages to unpack.
    packages: &'static [&'static str],
}

const SUITES: &[Suite] = &[
    Suite {
        name: "bullseye",
        archive: &["bullseye"],
        security: Some("bullseye-security"),
        series: "2.7",
        packages: &["ruby2.7", "ruby2.7-dev"],
    },
    // These two suites have two roots each: the Ruby of the release, and the later one of its security updates.
    Suite {
        name: "bookworm",
        archive: &["bookworm"],
        security: None,
        series: "3.1",
        packages: &["ruby3.1", "ruby3.1-dev"],
    },
    Suite {
        name: "bookworm-security",
        archive: &["bookworm"],
        security: Some("bookworm-security"),
        series: "3.1",
        packages: &["ruby3.1", "ruby3.1-dev"],
    },
    Suite {
        name: "trixie",
        archive: &["trixie"],
        security: None,
        series: "3.3",
        packages: &["ruby3.3", "ruby3.3-dev", "ruby-sidekiq", "puma", "unicorn"],
    },
    Suite {
        name: "trixie-security",
        archive: &["trixie"],
        security: Some("trixie-security"),
        series: "3.3",
        packages: &["ruby3.3", "ruby3.3-dev"],
    },
    // Experimental is not a complete suite: the dependencies of its packages are in sid.
    Suite {
        name: "experimental",
        archive: &["sid", "experimental"],
        security: None,
        series: "3.4",
        packages: &["ruby3.4", "ruby3.4-dev"],
    },
];

/// The file in a root that records how it was made; a root without it is incomplete. The tests recognise a root by it, and
/// read from its first line which Ruby is meant.
pub(crate) const STAMP: &str = ".gctrace-lab";

/// The steps after unpacking: the links that the essential packages of a merged /usr would create, and the
/// stamp. Arguments: the directory, its final name, the stamp's text.
const FINISH: &str = r#"
set -e
cd "$1"
for dir in bin lib lib64 sbin; do
    [ -e "$dir" ] || ln -s "usr/$dir" "$dir"
done
printf '%s' "$3" > .gctrace-lab
chmod 755 .
rm -rf "$2"
mv "$1" "$2"
"#;

impl Suite {
    /// The path of the executable inside its root.
    fn ruby(&self) -> String {
        format!("/usr/bin/ruby{}", self.series)
    }

    /// The recipe of the root. A root with another recipe is rebuilt.
    fn recipe(&self) -> String {
        format!(
            "{}\nsuites {} {}\npackages {}\n",
            self.ruby(),
            self.archive.join(" "),
            self.security.unwrap_or_default(),
            self.packages.join(" ")
        )
    }

    fn is_complete(&self, root: &Path) -> bool {
        fs::read_to_string(root.join(STAMP)).is_ok_and(|stamp| stamp == self.recipe())
    }

    /// The source package of its Ruby as in the release; `None` for security updates, which are not a release.
    pub(crate) fn source(&self) -> Option<String> {
        (!self.name.ends_with("-security")).then(|| format!("ruby{}", self.series))
    }

    /// The lines of `sources.list` for the release itself.
    pub(crate) fn archive_sources(&self) -> Result<Vec<String>> {
        release_sources(self.archive)
    }

    /// The lines of `sources.list`, including security updates if the suite has them.
    pub(crate) fn sources(&self) -> Result<Vec<String>> {
        let mut lines = self.archive_sources()?;
        if let Some(suite) = self.security {
            lines.push(format!("deb {} {suite} main", security_mirror()?));
        }
        Ok(lines)
    }
}

/// The lines of `sources.list` for these suites, without security updates.
pub(crate) fn release_sources(suites: &[&str]) -> Result<Vec<String>> {
    let archive = mirror("Debian")?;
    Ok(suites.iter().map(|suite| format!("deb {archive} {suite} main")).collect())
}

/// The lines of `sources.list` for this suite with its security updates.
pub(crate) fn updated_sources(suite: &str) -> Result<Vec<String>> {
    let mut lines = release_sources(&[suite])?;
    lines.push(format!("deb {} {suite}-security main", security_mirror()?));
    Ok(lines)
}

/// Debian no longer has the packages of a root. Suites end and packages move: that is not a fault of this machine, and the
/// other roots do not depend on it.
#[derive(Debug)]
struct NotAvailable {
    suite: &'static str,
    answer: String,
}

impl fmt::Display for NotAvailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the mirror does not have the packages of {}: {}", self.suite, self.answer)
    }
}

impl std::error::Error for NotAvailable {}

/// The line in which apt reports that the mirror does not have a package or a suite.
fn absence(error: &str) -> Option<&str> {
    const ANSWERS: [&str; 4] = [
        "Unable to locate package",
        "has no installation candidate",
        "does not have a Release file",
        " 404 ",
    ];
    error.lines().find(|line| ANSWERS.iter().any(|answer| line.contains(answer))).map(str::trim)
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    let rubies = if args.names.is_empty() { available(&[])? } else { ensure(&args.names)? };
    for ruby in rubies {
        println!("{}", ruby.display());
    }
    if args.built {
        let mut missing = Vec::new();
        for outcome in built::ensure(&args.names)? {
            match outcome {
                Outcome::Built(built) => println!("{} {:?}", built.library.display(), built.differing),
                Outcome::NoSource(source) => missing.push(source.to_string()),
            }
        }
        // A root that was requested by name must exist.
        ensure!(missing.is_empty() || args.names.is_empty(), "{}", missing.join("\n"));
        for missing in &missing {
            progress(format!("lab: {missing}"));
        }
    }
    Ok(())
}

/// The suites with these names, or all if there are no names.
pub(crate) fn chosen(names: &[String]) -> impl Iterator<Item = &'static Suite> {
    SUITES.iter().filter(move |suite| names.is_empty() || names.iter().any(|name| name == suite.name))
}

/// The directory of the lab.
pub(crate) fn dir() -> Result<PathBuf> {
    cache_dirs("lab")?.into_iter().next().context("no folder for the lab")
}

/// Debian's name for the architecture of most roots.
pub(crate) const AMD64: &str = "amd64";

/// The command that creates a root of this variant for this architecture; with the variant `extract`, nothing in it is run.
pub(crate) fn mmdebstrap(variant: &str, architecture: &str) -> Result<Command> {
    let mut command = as_root("mmdebstrap", "make the lab's roots")?;
    // Not `--quiet`: that hides the reason of an apt failure.
    command.arg("--mode=root");
    command.args([format!("--architectures={architecture}"), format!("--variant={variant}")]);
    // The signatures of an old suite are no longer renewed.
    let options = ["APT::Install-Recommends \"false\"", "Acquire::Check-Valid-Until \"false\""];
    command.args(options.iter().chain(&["Acquire::Languages \"none\""]).map(|o| format!("--aptopt={o}")));
    Ok(command)
}

/// Creates the missing roots (of all suites if none is named) and returns the path of each one's Ruby.
pub(crate) fn ensure(names: &[String]) -> Result<Vec<PathBuf>> {
    ensure_in(&dir()?, AMD64, names)
}

/// Like [`ensure()`], but skips and reports the roots whose packages Debian no longer has.
pub(crate) fn available(names: &[&str]) -> Result<Vec<PathBuf>> {
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    let mut rubies = Vec::new();
    for found in each_in(&dir()?, AMD64, &names)? {
        match found {
            Ok(ruby) => rubies.push(ruby),
            Err(error) => match error.downcast::<NotAvailable>() {
                Ok(absent) => progress(format!("lab: not available: {absent}")),
                Err(error) => return Err(error),
            },
        }
    }
    Ok(rubies)
}

/// Like [`ensure()`], in another directory and for another architecture.
pub(crate) fn ensure_in(lab: &Path, architecture: &str, names: &[String]) -> Result<Vec<PathBuf>> {
    each_in(lab, architecture, names)?.into_iter().collect()
}

/// Number of roots created at a time: one waits for the network while another is unpacked.
const AT_ONCE: usize = 3;

/// The Ruby in each of these roots, in order, or why it does not exist.
fn each_in(lab: &Path, architecture: &str, names: &[String]) -> Result<Vec<Result<PathBuf>>> {
    fs::create_dir_all(lab).with_context(|| format!("cannot create {}", lab.display()))?;
    // Two concurrent runs would each remove what the other one is unpacking.
    let lock = lab.join(".lock");
    let lock = File::create(&lock).with_context(|| format!("cannot create {}", lock.display()))?;
    lock.lock().context("cannot lock the lab")?;
    let suites: Vec<_> = chosen(names).map(|suite| (suite, lab.join(suite.name))).collect();
    let (there, missing): (Vec<_>, Vec<_>) = suites.iter().partition(|(suite, root)| suite.is_complete(root));
    let mut made: Vec<_> = there.into_iter().map(|(suite, _)| (suite.name, Ok(()))).collect();
    if !missing.is_empty() {
        setup::ensure(&[Purpose::Lab])?;
    }
    for some in missing.chunks(AT_ONCE) {
        thread::scope(|scope| {
            let making = some
                .iter()
                .map(|(suite, root)| (suite.name, scope.spawn(|| make(suite, root, architecture))));
            let making: Vec<_> = making.collect();
            for (name, thread) in making {
                let outcome = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
                made.push((name, outcome.with_context(|| format!("cannot make the {name} root"))));
            }
        });
    }
    let mut made: BTreeMap<_, _> = made.into_iter().collect();
    let outcome = |(suite, root): &(&Suite, PathBuf)| {
        let ruby = root.join(suite.ruby().trim_start_matches('/'));
        made.remove(suite.name).map(|outcome| outcome.map(|()| ruby))
    };
    Ok(suites.iter().filter_map(outcome).collect())
}

/// The root that contains a Ruby.
pub(crate) fn root_of(ruby: &Path) -> Result<&Path> {
    let root = ruby.ancestors().find(|dir| dir.join(STAMP).is_file());
    root.with_context(|| format!("{} is in no root", ruby.display()))
}

fn make(suite: &Suite, root: &Path, architecture: &str) -> Result<()> {
    progress(format!("lab: unpacking Ruby {} of {} (10 to 20 s)", suite.series, suite.name));
    let started = Instant::now();
    let part = root.with_extension("part");
    run_quiet(as_root("rm", "make the lab's roots")?.args(["-rf", "--"]).arg(&part))?;
    let mut command = mmdebstrap("extract", architecture)?;
    command.arg(format!("--include={}", suite.packages.join(",")));
    command.arg(suite.archive[0]).arg(&part).args(suite.sources()?);
    if let Err(error) = run_quiet(&mut command) {
        return Err(match absence(&error.to_string()) {
            Some(answer) => NotAvailable { suite: suite.name, answer: answer.to_owned() }.into(),
            None => error,
        });
    }
    let mut finish = as_root("sh", "make the lab's roots")?;
    run_quiet(finish.args(["-c", FINISH, "finish"]).args([&part, root]).arg(suite.recipe()))?;
    progress(format!("lab: {} was ready after {:.0} s", short(root), started.elapsed().as_secs_f64()));
    Ok(())
}

/// This machine's mirror for the archive with this label, according to its own apt.
fn mirror(label: &str) -> Result<String> {
    match known_mirror(label)? {
        Some(uri) => Ok(uri),
        None => bail!(
            "apt on this machine knows no mirror of \"{label}\" to make the root from: add one to \
             /etc/apt/sources.list, or name the Rubies to test on in GCTRACE_RUBIES"
        ),
    }
}

/// This machine's mirror for security updates, or Debian's own, since a machine may have none configured.
fn security_mirror() -> Result<String> {
    Ok(known_mirror("Debian-Security")?.unwrap_or_else(|| "http://deb.debian.org/debian-security".to_owned()))
}

fn known_mirror(label: &str) -> Result<Option<String>> {
    let ask = || {
        let mut query = Command::new("apt-get");
        query.args(["indextargets", "--format", "$(LABEL) $(COMPONENT) $(REPO_URI)", "Created-By: Packages"]);
        let text = output(&mut query)?;
        let found = text.lines().find_map(|line| line.strip_prefix(&format!("{label} main ")));
        Ok::<_, anyhow::Error>(found.map(ToOwned::to_owned))
    };
    if let Some(uri) = ask()? {
        return Ok(Some(uri));
    }
    // A fresh machine has no package lists yet; without them apt does not know labels.
    run_quiet(as_root("apt-get", "read the package lists")?.args(["-q", "update"]))?;
    ask()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// apt's messages about missing packages and suites are distinguished from other failures.
    #[test]
    fn absent_packages() {
        for answer in [
            "E: Unable to locate package ruby3.4",
            "E: Package 'ruby3.4' has no installation candidate",
            "E: The repository 'http://deb.debian.org/debian bullseye Release' does not have a Release file.",
            "E: Failed to fetch http://deb.debian.org/debian/pool/r.deb  404  Not Found [IP: 1.2.3.4 80]",
        ] {
            let error = format!(
                "`mmdebstrap` failed; its last lines:\nReading package lists...\n{answer}\nE: apt failed"
            );
            assert_eq!(absence(&error), Some(answer));
        }
        for error in ["E: Could not resolve 'deb.debian.org'", "E: No space left on device", ""] {
            assert_eq!(absence(error), None);
        }
    }

    /// No two roots have the same name, and the security updates of each one are those of its release.
    #[test]
    fn suites() {
        for (index, suite) in SUITES.iter().enumerate() {
            assert!(SUITES[..index].iter().all(|other| other.name != suite.name));
            assert!(suite.security.is_none_or(|security| security.starts_with(suite.archive[0])));
        }
    }
}
