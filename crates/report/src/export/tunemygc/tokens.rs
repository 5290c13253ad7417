//! Which application the sets of a process belong to.

use std::{collections::BTreeMap, fs, path::Path};

use serde::Deserialize;

/// Tokens by service, and one for all others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tokens {
    /// For services that have none of their own.
    pub default: Option<String>,
    /// By service.
    #[serde(default)]
    pub services: BTreeMap<String, String>,
}

impl Tokens {
    /// Reads a TOML file: `default = "TOKEN"` and `[services]` with lines `NAME = "TOKEN"`. An error says what is wrong with it, and
    /// quotes no token.
    pub fn read(path: &Path) -> Result<Self, String> {
        Self::parse(&fs::read_to_string(path).map_err(|error| error.to_string())?)
    }

    fn parse(text: &str) -> Result<Self, String> {
        // The library's errors quote the line, and its messages names and numbers: a token where a name should be, for instance.
        let parsed: Result<Self, toml::de::Error> = toml::from_str(text);
        let tokens = parsed.map_err(|error| {
            let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
            let line = before.matches('\n').count() + 1;
            format!("line {line}: is neither `default = \"TOKEN\"` nor, below `[services]`, `\"NAME\" = \"TOKEN\"`, or comes twice")
        })?;
        if tokens.services.values().chain(&tokens.default).any(String::is_empty) {
            return Err("a token is empty".to_owned());
        }
        Ok(tokens)
    }

    /// The token for a service.
    pub fn of(&self, service: &str) -> Option<&str> {
        self.services.get(service).or(self.default.as_ref()).map(String::as_str)
    }

    /// Whether there is none at all.
    pub fn is_empty(&self) -> bool {
        self.default.is_none() && self.services.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A service's own token comes first; errors name the line and no token.
    #[test]
    fn files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens.toml");
        let read = |text: &str| {
            fs::write(&path, text).unwrap();
            Tokens::read(&path)
        };
        let tokens = read("default = 'aa'\n[services]\nshop = 'bb'\n'sidekiq mail' = 'cc'\n").unwrap();
        assert_eq!(
            (tokens.of("shop"), tokens.of("sidekiq mail"), tokens.of("x")),
            (Some("bb"), Some("cc"), Some("aa"))
        );
        let tokens = read("[services]\nshop = 'bb'\n").unwrap();
        assert_eq!((tokens.of("shop"), tokens.of("x"), tokens.is_empty()), (Some("bb"), None, false));
        for text in [
            "secret = 'shop'",
            "[services]\nshop = secret\n",
            "[services]\nshop = 'secret\n",
            "\nsecret = 1",
            "default = ''",
        ] {
            let error = read(text).unwrap_err();
            assert!(!error.contains("secret"), "{error}");
        }
        assert!(read("[services]\nshop = secret\n").unwrap_err().starts_with("line 2: "));
    }

    proptest::proptest! {
        /// No damage makes the reader panic, or an error quote a token. (`PROPTEST_CASES=1000000` for longer.)
        #[test]
        fn damaged(changes in proptest::collection::vec((0_usize..80, 0_usize..6, "[\\[\\]='\"#.\n\\\\a-z0-9é]{0,4}"), 0..6)) {
            let mut text = "default = 'SECRETSECRET'\n[services]\nshop = \"SECRETSECRET\"\n'a b' = 'SECRETSECRET'\n".to_owned();
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
