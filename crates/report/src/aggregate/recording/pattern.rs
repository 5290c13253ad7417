//! Patterns of filters.

use std::str::FromStr;

use regex_lite::Regex;

/// A substring, or a regular expression between slashes: `Order#`, `/^Order(Line)?#/`. Case-sensitive.
#[derive(Clone, Debug)]
pub struct Pattern {
    text: String,
    regex: Option<Regex>,
}

impl Pattern {
    /// Whether the text contains a match.
    pub fn is_in(&self, text: &str) -> bool {
        self.regex.as_ref().map_or_else(|| text.contains(&self.text), |regex| regex.is_match(text))
    }

    /// The pattern as it was written.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for Pattern {}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("give a part of a name, or a regular expression between slashes".to_owned());
        }
        let between = text.strip_prefix('/').and_then(|rest| rest.strip_suffix('/'));
        let regex = match between {
            Some("") => return Err("give a regular expression between the slashes".to_owned()),
            Some(between) => Some(Regex::new(between).map_err(|error| error.to_string())?),
            None => None,
        };
        Ok(Self { text: text.to_owned(), regex })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of methods are matched literally; slashes enclose a regular expression.
    #[test]
    fn patterns() {
        let found = |pattern: &str, text: &str| pattern.parse::<Pattern>().unwrap().is_in(text);
        assert!(found("Order#paid?", "block in Order#paid?") && !found("Order#paid?", "Order#pai"));
        assert!(found("(eval", "(eval at a.rb:3)") && !found("order", "Order"));
        assert!(
            found("/^Order(Line)?#/", "OrderLine#price") && !found("/^Order(Line)?#/", "block in Order#x")
        );
        assert!(found("/app/models/", "/srv/app/models/order.rb"));
        assert!(found("/", "a/b") && found("a//b", "a//b"));
        for wrong in ["", "//", "/(/", "/[z-a]/"] {
            assert!(wrong.parse::<Pattern>().is_err(), "{wrong:?}");
        }
    }
}
