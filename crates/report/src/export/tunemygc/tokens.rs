//! Selects the application that the sets of a process belong to.

use std::{collections::BTreeMap, fs, path::Path};

use serde::Deserialize;

use crate::model::Process;

/// Tokens by properties of a process, and a default.
///
/// Units, control groups and users come from the kernel. Service names come from the processes themselves: any user who may start
/// a process can choose its name, and could send samples to the application of another user, which takes its settings from them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tokens {
    /// Token for processes without a more specific one.
    pub default: Option<String>,
    /// By system service, e.g. `shop.service`; for instances also by template, `shop@.service`.
    #[serde(default)]
    pub units: BTreeMap<String, String>,
    /// By path of a control group, including everything below it, e.g. `/kubepods.slice`; the longest match wins.
    #[serde(default)]
    pub cgroups: BTreeMap<String, String>,
    /// By user id.
    #[serde(default)]
    pub users: BTreeMap<String, String>,
    /// By service name, if `trust_environment`.
    #[serde(default)]
    pub services: BTreeMap<String, String>,
    /// Whether service names are trusted.
    #[serde(default)]
    pub trust_environment: bool,
}

impl Tokens {
    /// Reads a TOML file: `default = "TOKEN"` and `[units]`, `[cgroups]`, `[users]` and `[services]` with lines
    /// `NAME = "TOKEN"`. An error says what is wrong with the file, and quotes no token.
    pub fn read(path: &Path) -> Result<Self, String> {
        Self::parse(&fs::read_to_string(path).map_err(|error| error.to_string())?)
    }

    fn parse(text: &str) -> Result<Self, String> {
        // The library's errors quote the line, and its messages contain names and numbers, which may be misplaced tokens.
        let parsed: Result<Self, toml::de::Error> = toml::from_str(text);
        let tokens = parsed.map_err(|error| {
            let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
            let line = before.matches('\n').count() + 1;
            format!(
                "line {line}: is neither `default = \"TOKEN\"` nor, below `[units]`, `[cgroups]`, `[users]` or `[services]`, `\"NAME\" = \"TOKEN\"`, or appears twice"
            )
        })?;
        if tokens.all().any(String::is_empty) {
            return Err("a token is empty".to_owned());
        }
        if !tokens.services.is_empty() && !tokens.trust_environment {
            return Err("[services] selects by names that processes give themselves: use [units], [cgroups] or [users], or, where all \
                        users of this host may feed these applications, say `trust_environment = true` at the top"
                .to_owned());
        }
        // Other names would never match, without a message.
        if tokens.units.keys().any(|unit| unit.strip_suffix(".service").is_none_or(str::is_empty)) {
            return Err("[units] takes names of services as systemd has them, with `.service`; what is in a scope or a slice is selected by \
                        its path in [cgroups]"
                .to_owned());
        }
        if tokens.cgroups.keys().any(|path| !path.starts_with('/')) {
            return Err("[cgroups] takes paths that begin with `/`, as in /proc/PID/cgroup".to_owned());
        }
        if tokens.users.keys().any(|user| user.parse::<u32>().is_err()) {
            return Err("[users] takes user ids (`id -u NAME`)".to_owned());
        }
        Ok(tokens)
    }

    fn all(&self) -> impl Iterator<Item = &String> {
        let lists = [&self.units, &self.cgroups, &self.users, &self.services];
        lists.into_iter().flat_map(BTreeMap::values).chain(&self.default)
    }

    /// The token for a process. None for one that ended before it was known whether a more specific token is for it.
    pub fn of(&self, process: &Process) -> Option<&str> {
        let selected = match process.container.cgroup.as_deref() {
            Some(path) => self.of_unit(path).or_else(|| self.of_cgroup(path)),
            None if self.units.is_empty() && self.cgroups.is_empty() => None,
            None => return None,
        };
        if let Some(token) = selected {
            return Some(token);
        }
        let of_user = match process.uid {
            Some(user) => self.users.get(&user.to_string()),
            None if self.users.is_empty() => None,
            None => return None,
        };
        of_user
            .or_else(|| self.services.get(&process.origin.service).filter(|_| self.trust_environment))
            .or(self.default.as_ref())
            .map(String::as_str)
    }

    fn of_unit(&self, path: &str) -> Option<&String> {
        let unit = system_unit(path)?;
        self.units.get(unit).or_else(|| {
            let (template, _) = unit.split_once('@')?;
            self.units.get(&format!("{template}@.service"))
        })
    }

    fn of_cgroup(&self, path: &str) -> Option<&String> {
        let inside = |group: &str| {
            let group = group.trim_end_matches('/');
            path.strip_prefix(group).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        let found = self.cgroups.iter().filter(|(group, _)| inside(group));
        found.max_by_key(|(group, _)| group.len()).map(|(_, token)| token)
    }

    /// Whether there are no tokens at all.
    pub fn is_empty(&self) -> bool {
        self.all().next().is_none()
    }
}

/// The unit created by the system manager: the outermost one. Anything below it was created by the unit itself, or by
/// a user manager, whose user can name units freely.
fn system_unit(path: &str) -> Option<&str> {
    let unit = path.split('/').find(|part| !part.is_empty() && part.strip_suffix(".slice").is_none())?;
    unit.strip_suffix(".service").map(|_| unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Tokens, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens.toml");
        fs::write(&path, text).unwrap();
        Tokens::read(&path)
    }

    /// Errors name the line and no token; names that processes give themselves must be trusted explicitly.
    #[test]
    fn files() {
        let tokens = read("trust_environment = true\n[services]\nshop = 'bb'\n").unwrap();
        assert!(!tokens.is_empty() && Tokens::default().is_empty());
        for text in [
            "secret = 'shop'",
            "[units]\nshop = secret\n",
            "[units]\nshop = 'secret\n",
            "\nsecret = 1",
            "default = ''",
            "[users]\nsecret = 'aa'",
            "[services]\nshop = 'secret'",
            "[units]\nsecret = 'secret'",
            "[units]\n'secret.service' = 'aa'\n'secret.scope' = 'bb'",
            "[units]\n'.service' = 'secret'",
            "[cgroups]\n'secret' = 'aa'\n'/system.slice' = 'secret'",
            "[cgroups]\n'' = 'secret'",
        ] {
            let error = read(text).unwrap_err();
            assert!(!error.contains("secret"), "{error}");
        }
        assert!(read("[units]\nshop = secret\n").unwrap_err().starts_with("line 2: "));
        for (text, wanted) in [
            ("[units]\nshop = 'aa'\n", "[units] takes names of services"),
            ("[units]\n'machine.slice' = 'aa'\n", "with `.service`"),
            ("[cgroups]\n'system.slice/shop.service' = 'aa'\n", "[cgroups] takes paths that begin with `/`"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(wanted), "{error}");
        }
        assert!(read("[services]\nshop = 'aa'\n").unwrap_err().contains("trust_environment"));
    }

    /// What the kernel says about a process is used; what the process says about itself is used only if trusted.
    #[test]
    fn whose() {
        let tokens = read(
            "default = 'default'\n[units]\n'shop.service' = 'unit'\n'job@.service' = 'template'\n'job@1.service' = 'one'\n\
             [cgroups]\n'/kubepods.slice' = 'pods'\n'/kubepods.slice/x/' = 'x'\n[users]\n1001 = 'user'\n",
        )
        .unwrap();
        let trusting = read("trust_environment = true\n[services]\nshop = 'service'\n").unwrap();
        let mut process = crate::aggregate::services::tests::process(7, "shop");
        for (cgroup, uid, token) in [
            ("/system.slice/shop.service", 1001, "unit"),
            ("/system.slice/system-job.slice/job@1.service/worker", 0, "one"),
            ("/system.slice/system-job.slice/job@2.service", 0, "template"),
            ("/user.slice/user-1000.slice/user@1000.service/app.slice/shop.service", 1000, "default"),
            ("/system.slice/evil.service/shop.service", 1000, "default"),
            ("/user.slice/user-1001.slice/session-1.scope", 1001, "user"),
            ("/kubepods.slice/x", 0, "x"),
            ("/kubepods.slice/xy", 0, "pods"),
            ("/kubepods.slicer", 0, "default"),
            ("/", 0, "default"),
        ] {
            process.container.cgroup = Some(cgroup.to_owned());
            process.uid = Some(uid);
            assert_eq!(tokens.of(&process), Some(token), "{cgroup}");
            assert_eq!(trusting.of(&process), Some("service"));
        }
        // The process ended before these were read: it may be one of those that have a token of their own.
        for (cgroup, uid) in [(None, Some(1001)), (None, None), (Some("/".to_owned()), None)] {
            (process.container.cgroup, process.uid) = (cgroup, uid);
            assert_eq!(tokens.of(&process), None);
            assert_eq!(trusting.of(&process), Some("service"));
        }
        process.container.cgroup = Some("/kubepods.slice".to_owned());
        assert_eq!(tokens.of(&process), Some("pods"), "its user does not matter");
    }

    proptest::proptest! {
        /// No damage makes the reader panic, or an error quote a token. (`PROPTEST_CASES=1000000` for a longer run.)
        #[test]
        fn damaged(changes in proptest::collection::vec((0_usize..80, 0_usize..6, "[\\[\\]='\"#.\n\\\\a-z0-9é]{0,4}"), 0..6)) {
            let mut text = "default = 'SECRETSECRET'\ntrust_environment = true\n[services]\nshop = \"SECRETSECRET\"\n'a b' = 'SECRETSECRET'\n".to_owned();
            for (at, length, with) in changes {
                let at = text.floor_char_boundary(at.min(text.len()));
                let end = text.floor_char_boundary((at + length).min(text.len())).max(at);
                text.replace_range(at..end, &with);
            }
            if let Err(error) = Tokens::parse(&text) {
                proptest::prop_assert!(!error.contains("SECRETSECRET"), "{error}");
            }
        }
    }
}
