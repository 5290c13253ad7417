//! `--fields`: JSON lines with only some of their members.

use std::{fmt, mem, str::FromStr};

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};
use serde_json::value::RawValue;

/// Which parts of each line are written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Whether cycles are written without their details.
    pub brief: bool,
    /// If set, only these members are written.
    pub fields: Option<Fields>,
}

/// The member that every line keeps.
const KIND: &str = "type";

/// The members of a line to write: names such as `pid`, or `stat.heap_live_slots` for a nested member (for a list: of
/// each of its objects). `type` is always written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fields(Vec<Field>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Field {
    name: String,
    /// Whether the member is written with all its nested members.
    whole: bool,
    members: Fields,
    /// Whether any line had this member.
    seen: bool,
}

/// Why a list of fields is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an empty name; names are separated by commas, e.g. ts,pid,pause_ns,stat.heap_live_slots")]
pub struct EmptyName;

impl FromStr for Fields {
    type Err = EmptyName;

    fn from_str(text: &str) -> Result<Self, EmptyName> {
        let mut fields = Self::default();
        for path in text.split(',') {
            let names: Vec<&str> = path.trim().split('.').collect();
            if names.iter().any(|name| name.is_empty()) {
                return Err(EmptyName);
            }
            fields.add(&names);
        }
        Ok(fields)
    }
}

impl Fields {
    fn add(&mut self, path: &[&str]) {
        let [name, rest @ ..] = path else { return };
        let at = self.0.iter().position(|field| field.name == *name).unwrap_or_else(|| {
            let members = Self::default();
            self.0.push(Field { name: (*name).to_owned(), whole: false, members, seen: false });
            self.0.len() - 1
        });
        let field = &mut self.0[at];
        field.whole |= rest.is_empty();
        field.members.add(rest);
    }

    /// Reduces a line to these members. The line is one JSON object, without a line feed.
    ///
    /// # Errors
    ///
    /// The line is not a JSON object.
    pub fn keep(&mut self, line: &mut Vec<u8>) -> serde_json::Result<()> {
        let whole = mem::take(line);
        let Members(members) = serde_json::from_slice(&whole)?;
        self.write(&members, Some(KIND), line);
        Ok(())
    }

    /// Writes an object with these members and the one that is always kept.
    fn write(&mut self, members: &[(String, &RawValue)], always: Option<&str>, out: &mut Vec<u8>) {
        out.push(b'{');
        let start = out.len();
        for (name, value) in members {
            let field = self.0.iter_mut().find(|field| field.name == *name);
            let field = field.filter(|field| field.whole || !field.members.is_empty_in(value));
            if field.is_none() && always != Some(name) {
                continue;
            }
            if out.len() > start {
                out.push(b',');
            }
            out.extend(serde_json::Value::from(name.as_str()).to_string().as_bytes());
            out.push(b':');
            match field {
                Some(field) => {
                    field.seen = true;
                    if field.whole {
                        field.members.look(value);
                        out.extend(value.get().as_bytes());
                    } else {
                        field.members.write_value(value, out);
                    }
                }
                None => out.extend(value.get().as_bytes()),
            }
        }
        out.push(b'}');
    }

    fn write_value(&mut self, value: &RawValue, out: &mut Vec<u8>) {
        if let Some(members) = object(value) {
            return self.write(&members, None, out);
        }
        out.push(b'[');
        for (at, item) in list(value).unwrap_or_default().into_iter().enumerate() {
            if at > 0 {
                out.push(b',');
            }
            self.write(&object(item).unwrap_or_default(), None, out);
        }
        out.push(b']');
    }

    /// Whether a value has none of these members.
    fn is_empty_in(&self, value: &RawValue) -> bool {
        let none = |members: Vec<(String, &RawValue)>| {
            members.iter().all(|(name, value)| {
                self.0
                    .iter()
                    .find(|field| field.name == *name)
                    .is_none_or(|field| !field.whole && field.members.is_empty_in(value))
            })
        };
        match object(value) {
            Some(members) => none(members),
            None => {
                list(value).is_none_or(|items| items.into_iter().all(|item| object(item).is_none_or(none)))
            }
        }
    }

    /// Marks the members found in a value that is written as a whole.
    fn look(&mut self, value: &RawValue) {
        if !self.0.is_empty() {
            self.write_value(value, &mut Vec::new());
        }
    }

    /// Names of members that no line had.
    #[must_use]
    pub fn unseen(&self) -> Vec<String> {
        let of = |field: &Field| -> Vec<String> {
            if !field.seen && field.whole {
                return vec![field.name.clone()];
            }
            field.members.unseen().into_iter().map(|name| format!("{}.{name}", field.name)).collect()
        };
        self.0.iter().flat_map(of).collect()
    }
}

/// The members of an object, in order.
struct Members<'a>(Vec<(String, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Members<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct All;
        impl<'de> Visitor<'de> for All {
            type Value = Vec<(String, &'de RawValue)>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(members)
            }
        }
        deserializer.deserialize_map(All).map(Self)
    }
}

fn object(value: &RawValue) -> Option<Vec<(String, &RawValue)>> {
    serde_json::from_str::<Members<'_>>(value.get()).ok().map(|Members(members)| members)
}

fn list(value: &RawValue) -> Option<Vec<&RawValue>> {
    serde_json::from_str(value.get()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"type":"gc","pid":7,"comm":"a\"b","stat":{"count":3,"heap":{"live":9,"free":1}},"pauses":[{"ns":1,"end":2},{"ns":3}],"none":null}"#;

    fn kept(fields: &str) -> (String, Vec<String>) {
        let mut fields: Fields = fields.parse().unwrap();
        let mut line = LINE.as_bytes().to_vec();
        fields.keep(&mut line).unwrap();
        (String::from_utf8(line).unwrap(), fields.unseen())
    }

    #[test]
    fn members() {
        let cases = [
            ("pid", r#"{"type":"gc","pid":7}"#, &[][..]),
            ("comm, pid,type", r#"{"type":"gc","pid":7,"comm":"a\"b"}"#, &[]),
            ("stat.count", r#"{"type":"gc","stat":{"count":3}}"#, &[]),
            ("stat.heap.live,stat.count", r#"{"type":"gc","stat":{"count":3,"heap":{"live":9}}}"#, &[]),
            ("stat.heap,stat.heap.live", r#"{"type":"gc","stat":{"heap":{"live":9,"free":1}}}"#, &[]),
            ("pauses.end", r#"{"type":"gc","pauses":[{"end":2},{}]}"#, &[]),
            ("none", r#"{"type":"gc","none":null}"#, &[]),
            ("type.nothing", r#"{"type":"gc"}"#, &["type.nothing"]),
            ("stat.count,stat.nothing", r#"{"type":"gc","stat":{"count":3}}"#, &["stat.nothing"]),
            (
                "nothing,stat.nothing,pid.nothing",
                r#"{"type":"gc"}"#,
                &["nothing", "stat.nothing", "pid.nothing"],
            ),
        ];
        for (fields, expected, unseen) in cases {
            assert_eq!(kept(fields), (expected.to_owned(), unseen.iter().map(ToString::to_string).collect()));
        }
    }

    #[test]
    fn another_line_has_it() {
        let mut fields: Fields = "ns,count".parse().unwrap();
        for text in [r#"{"type":"a","ns":1}"#, r#"{"type":"b","count":2}"#] {
            let mut line = text.as_bytes().to_vec();
            fields.keep(&mut line).unwrap();
            assert_eq!(String::from_utf8(line).unwrap(), text);
        }
        assert!(fields.unseen().is_empty());
    }

    #[test]
    fn names_that_are_none() {
        for text in ["", "pid,", "stat.", ".count", "a,,b"] {
            assert_eq!(text.parse::<Fields>(), Err(EmptyName), "{text}");
        }
        assert!(Fields::default().keep(&mut b"[1]".to_vec()).is_err());
    }
}
