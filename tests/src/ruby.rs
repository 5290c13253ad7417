//! The Ruby builds that the tests run on.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

/// One Ruby executable.
#[derive(Clone, Debug)]
pub struct Ruby {
    exe: PathBuf,
    config: BTreeMap<String, String>,
}

impl Ruby {
    /// The Ruby that most tests use: the first of [`Ruby::all`].
    pub fn main() -> Result<Self> {
        Self::all()?.into_iter().next().context("GCTRACE_RUBIES names no Ruby")
    }

    /// All Rubies to test on: those in `GCTRACE_RUBIES`, or `ruby`.
    pub fn all() -> Result<Vec<Self>> {
        let list = std::env::var_os("GCTRACE_RUBIES").unwrap_or_else(|| "ruby".into());
        std::env::split_paths(&list)
            .filter(|exe| !exe.as_os_str().is_empty())
            .map(|exe| Self::at(&exe))
            .collect()
    }

    /// The Ruby at `exe`.
    pub fn at(exe: &Path) -> Result<Self> {
        let keys =
            ["ruby_version", "RUBY_PROGRAM_VERSION", "bindir", "CC", "rubyhdrdir", "rubyarchhdrdir", "DLEXT"];
        let script = "ARGV.each { |key| puts RbConfig::CONFIG[key].to_s }";
        let output = Command::new(exe)
            .args(["--disable-gems", "-rrbconfig", "-e", script])
            .args(keys)
            .stdin(Stdio::null())
            .output()
            .with_context(|| {
                format!("cannot run {}: run `cargo xtask test`, which installs Ruby", exe.display())
            })?;
        ensure!(
            output.status.success(),
            "{} failed: {}",
            exe.display(),
            String::from_utf8_lossy(&output.stderr)
        );
        let values = String::from_utf8(output.stdout)?;
        let config =
            keys.iter().map(ToString::to_string).zip(values.lines().map(ToOwned::to_owned)).collect();
        Ok(Self { exe: exe.to_path_buf(), config })
    }

    /// The executable.
    pub fn exe(&self) -> &OsStr {
        self.exe.as_os_str()
    }

    /// `RUBY_VERSION`, e.g. `3.1.2`.
    pub fn version(&self) -> &str {
        self.config("RUBY_PROGRAM_VERSION")
    }

    /// A value of `RbConfig::CONFIG`, or an empty string.
    pub fn config(&self, key: &str) -> &str {
        self.config.get(key).map_or("", String::as_str)
    }
}
