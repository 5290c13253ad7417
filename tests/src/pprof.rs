//! A profile as read by `go tool pprof`.

use std::collections::HashMap;
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
    /// Type and unit of the period, as `cpu nanoseconds`; empty: it has none.
    pub period_type: String,
}

/// One sample.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// One value per sample type.
    pub values: Vec<u64>,
    /// Its labels as `key:[value]` text, numbers included.
    pub labels: String,
    /// Its frames, leaf first.
    pub stack: Vec<Frame>,
}

/// One frame of a stack.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Frame {
    /// Function, without the place that the names of blocks contain.
    pub name: String,
    /// That place, e.g. `app.rb:40`.
    pub place: Option<String>,
    /// File, or empty.
    pub file: String,
    /// Line, or 0.
    pub line: u32,
    /// Whether it is machine code, identified by its address.
    pub native: bool,
}

impl Frame {
    /// Reads the rest of a line after `N: ADDRESS M=MAPPING ` in the list of locations: `name file:line[:column] s=start`.
    fn parse(text: &str, native: bool) -> Option<Self> {
        let text = text.rsplit_once(" s=").map_or(text, |(text, _)| text);
        let (name, place) = text.rsplit_once(' ')?;
        // Go 1.21 and later also print a column; a line number always follows the file.
        let mut parts = place.rsplitn(3, ':');
        let (last, before, rest) = (parts.next()?, parts.next()?, parts.next());
        // `<internal:gc>` is also a file.
        let (file, line) = match (before.parse(), rest) {
            (Ok(line), Some(file)) => (file, line),
            _ => (place.rsplit_once(':').map_or(before, |(file, _)| file), last.parse().ok()?),
        };
        let base = file.rsplit('/').next().unwrap_or(file);
        let base = if file.starts_with("<internal:/") { base.trim_end_matches('>') } else { base };
        let placed = name.rsplit_once(' ').filter(|(_, place)| place.split(':').next() == Some(base));
        let (name, place) = placed.map_or((name, None), |(name, place)| (name, Some(place.to_owned())));
        Some(Self { name: name.to_owned(), place, file: file.to_owned(), line, native })
    }
}

impl Sample {
    /// The names of its labels.
    pub fn label_names(&self) -> impl Iterator<Item = &str> {
        self.labels.split(']').filter_map(|label| Some(label.split_once(":[")?.0.trim()))
    }

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
        let locations = locations(raw);
        let period = raw.lines().find_map(|line| line.strip_prefix("PeriodType:"));
        period.unwrap_or_default().trim().clone_into(&mut profile.period_type);
        let mut lines = raw.lines().skip_while(|line| *line != "Samples:").skip(1);
        profile.types = lines
            .next()
            .unwrap_or_default()
            .split_whitespace()
            // The default sample type has a mark.
            .map(|name| name.trim_end_matches("[dflt]").to_owned())
            .collect();
        for line in lines.take_while(|line| *line != "Locations") {
            let sample = line.split_once(':').and_then(|(values, ids)| {
                let values = values
                    .split_whitespace()
                    .map(|value| value.parse().ok())
                    .collect::<Option<Vec<u64>>>()?;
                let stack =
                    ids.split_whitespace().map(|id| locations.get(id).cloned().unwrap_or_default()).collect();
                (values.len() == profile.types.len()).then_some(Sample {
                    values,
                    labels: String::new(),
                    stack,
                })
            });
            match (sample, profile.samples.last_mut()) {
                (Some(sample), _) => profile.samples.push(sample),
                (None, Some(sample)) => {
                    sample.labels.push(' ');
                    sample.labels.push_str(line.trim());
                }
                (None, None) => {}
            }
        }
        profile
    }

    /// The index of a sample type in the values of a sample.
    pub fn index(&self, name: &str) -> Result<usize> {
        let index = self.types.iter().position(|known| known == name);
        index.with_context(|| format!("no sample type {name} in {:?}", self.types))
    }

    /// The sum of the values of one sample type.
    pub fn total(&self, name: &str) -> Result<u64> {
        let index = self.index(name)?;
        Ok(self.samples.iter().map(|sample| sample.values[index]).sum())
    }

    /// Like [`Self::total`], for one process.
    pub fn total_of(&self, pid: u32, name: &str) -> Result<u64> {
        let (index, pid) = (self.index(name)?, pid.to_string());
        let its = self.samples.iter().filter(|sample| sample.label("pid") == Some(&pid));
        Ok(its.map(|sample| sample.values[index]).sum())
    }
}

/// The locations of a profile by their ids.
fn locations(raw: &str) -> HashMap<&str, Frame> {
    let lines = raw.lines().skip_while(|line| *line != "Locations").skip(1);
    lines
        .take_while(|line| *line != "Mappings")
        .filter_map(|line| {
            let (id, rest) = line.trim_start().split_once(": ")?;
            // An address, then possibly a mapping.
            let (address, rest) = rest.split_once(' ').unwrap_or_default();
            let native = address.trim_start_matches("0x").chars().any(|digit| digit != '0');
            let rest = rest
                .strip_prefix("M=")
                .map_or(rest, |rest| rest.split_once(' ').map_or("", |(_, rest)| rest));
            Some((id, Frame::parse(rest.trim(), native).unwrap_or_default()))
        })
        .collect()
}

/// Runs `go tool pprof` with the given options on a profile and returns what it prints.
pub fn go_tool_pprof(options: &[&str], path: &Path) -> Result<String> {
    let output = Command::new("go")
        .args(["tool", "pprof"])
        .args(options)
        .arg(path)
        // It needs its own directories for its cache and for remote profiles.
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

    /// Values and labels are parsed from the text form of a profile, whose samples may lack a stack.
    #[test]
    fn raw_text() {
        let raw = "PeriodType: gc_pauses count\nPeriod: 1\nSamples:\ngc_pauses/count gc-pause-time/nanoseconds[dflt]\n\
                   \x20         2       1500: 1 2 3 \n                comm:[ruby] gc kind:[minor]\n                pid:[77]\n\
                   \x20         1        250: \n                gc kind:[major]\nLocations\n     1: 0x0 M=1 block in A#b lib/a b.rb:12 s=10\n\
                   \x20    2: 0x0 Array#each :0:0 s=0\n     3: 0x77 M=2 rb_ary_each c.c:7:1 s=0\n\
                   \x20    4: 0x0 M=1 GC.start <internal:gc>:35 s=34\nMappings\n1: 0x0/0x0/0x0 ruby\n";
        let profile = Profile::parse(raw);
        assert_eq!(profile.types, ["gc_pauses/count", "gc-pause-time/nanoseconds"]);
        assert_eq!(profile.total("gc_pauses/count").unwrap(), 3);
        assert_eq!(profile.total("gc-pause-time/nanoseconds").unwrap(), 1750);
        assert_eq!(profile.samples[0].label("gc kind"), Some("minor"));
        assert_eq!(profile.samples[0].label("pid"), Some("77"));
        assert_eq!(profile.samples[1].label("comm"), None);
        assert!(profile.total("other/count").is_err());
        let frames: Vec<_> =
            profile.samples[0].stack.iter().map(|f| (f.name.as_str(), f.file.as_str(), f.line)).collect();
        assert_eq!(
            frames,
            [("block in A#b lib/a", "b.rb", 12), ("Array#each", "", 0), ("rb_ary_each", "c.c", 7)],
            "a file with a blank in its name cannot be distinguished from the function's"
        );
        assert!(profile.samples[1].stack.is_empty());
        let block = Frame::parse("block in <main> app.rb:4 /srv/app.rb:7:0 s=4", false).unwrap();
        assert_eq!(
            (block.name.as_str(), block.place.as_deref(), block.line),
            ("block in <main>", Some("app.rb:4"), 7)
        );
    }
}
