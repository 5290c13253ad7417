//! What `go tool pprof` makes of a profile.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

/// The samples of a profile as `go tool pprof -raw` prints them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Profile {
    /// Sample types as `type/unit`.
    pub types: Vec<String>,
    /// Values of each sample, in the order of the types, with its labels.
    pub samples: Vec<Sample>,
}

/// One sample.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// One value per sample type.
    pub values: Vec<u64>,
    /// Its labels as `key:[value]` text, numbers included.
    pub labels: String,
}

impl Sample {
    /// The value of a label.
    pub fn label(&self, key: &str) -> Option<&str> {
        let from = self.labels.find(&format!("{key}:["))? + key.len() + 2;
        let rest = &self.labels[from..];
        rest.find(']').map(|to| rest[..to].trim())
    }
}

impl Profile {
    /// Opens a profile with `go tool pprof`.
    pub fn open(path: &Path) -> Result<Self> {
        let raw = go_tool_pprof(&["-raw"], path)?;
        let profile = Self::parse(&raw);
        ensure!(!profile.types.is_empty(), "no sample types in:\n{raw}");
        Ok(profile)
    }

    fn parse(raw: &str) -> Self {
        let mut profile = Self::default();
        let mut lines = raw.lines().skip_while(|line| *line != "Samples:").skip(1);
        profile.types = lines
            .next()
            .unwrap_or_default()
            .split_whitespace()
            // The default sample type is marked.
            .map(|name| name.trim_end_matches("[dflt]").to_owned())
            .collect();
        for line in lines.take_while(|line| *line != "Locations") {
            let values = line.split_once(':').and_then(|(values, _)| {
                values.split_whitespace().map(|value| value.parse().ok()).collect::<Option<Vec<u64>>>()
            });
            match (values.filter(|values| values.len() == profile.types.len()), profile.samples.last_mut()) {
                (Some(values), _) => profile.samples.push(Sample { values, labels: String::new() }),
                (None, Some(sample)) => {
                    sample.labels.push(' ');
                    sample.labels.push_str(line.trim());
                }
                (None, None) => {}
            }
        }
        profile
    }

    /// Sum of the values of one sample type.
    pub fn total(&self, name: &str) -> Result<u64> {
        let index = self.types.iter().position(|known| known == name);
        let index = index.with_context(|| format!("no sample type {name} in {:?}", self.types))?;
        Ok(self.samples.iter().map(|sample| sample.values[index]).sum())
    }
}

/// Runs `go tool pprof` with the given options on a profile and returns what it prints.
pub fn go_tool_pprof(options: &[&str], path: &Path) -> Result<String> {
    let output = Command::new("go")
        .args(["tool", "pprof"])
        .args(options)
        .arg(path)
        // It wants directories of its own for a cache and for remote profiles.
        .env("PPROF_TMPDIR", path.parent().unwrap_or(Path::new("/")))
        .output()
        .context("cannot run `go tool pprof`: run `cargo xtask test`, which installs golang-go")?;
    ensure!(
        output.status.success(),
        "go tool pprof {options:?} {}: {}",
        path.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values and labels are read from the text form of a profile, whose samples may lack a stack.
    #[test]
    fn raw_text() {
        let raw = "PeriodType: gc-pauses count\nPeriod: 1\nSamples:\ngc-pauses/count gc-pause-time/nanoseconds[dflt]\n\
                   \x20         2       1500: 1 2 \n                comm:[ruby] gc kind:[minor]\n                pid:[77]\n\
                   \x20         1        250: \n                gc kind:[major]\nLocations\n     1: 0x0 x :0 s=0\n";
        let profile = Profile::parse(raw);
        assert_eq!(profile.types, ["gc-pauses/count", "gc-pause-time/nanoseconds"]);
        assert_eq!(profile.total("gc-pauses/count").unwrap(), 3);
        assert_eq!(profile.total("gc-pause-time/nanoseconds").unwrap(), 1750);
        assert_eq!(profile.samples[0].label("gc kind"), Some("minor"));
        assert_eq!(profile.samples[0].label("pid"), Some("77"));
        assert_eq!(profile.samples[1].label("comm"), None);
        assert!(profile.total("other/count").is_err());
    }
}
