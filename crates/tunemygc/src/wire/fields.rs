//! Deserialization seeds for the parts of headers and samples: which values each accepts, and their maximum size.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::{EventName, MAX_ENTRIES, MAX_STRING};

/// Implements a seed by a function of the deserializer.
macro_rules! seed {
    ($name:ident $(<$lt:lifetime>)?, $value:ty) => {
        impl<'de $(, $lt)?> DeserializeSeed<'de> for $name $(<$lt>)? {
            type Value = $value;
            fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<$value, D::Error> {
                deserializer.deserialize_seq(self)
            }
        }
    };
}
pub(super) use seed;

/// A value or null.
pub(super) struct Optional<T>(pub(super) T);

impl<'de, T: DeserializeSeed<'de>> DeserializeSeed<'de> for Optional<T> {
    type Value = Option<T::Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_option(self)
    }
}

impl<'de, T: DeserializeSeed<'de>> Visitor<'de> for Optional<T> {
    type Value = Option<T::Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value or null")
    }

    fn visit_none<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        self.0.deserialize(deserializer).map(Some)
    }
}

/// A seed for scalars: its name, and the value for each kind of JSON value.
macro_rules! scalar {
    ($name:ident, $value:ty, $call:ident, $expects:literal, { $($visit:item)* }) => {
        pub(super) struct $name;
        impl<'de> DeserializeSeed<'de> for $name {
            type Value = $value;
            fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<$value, D::Error> {
                deserializer.$call(self)
            }
        }
        impl<'de> Visitor<'de> for $name {
            type Value = $value;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str($expects)
            }
            $($visit)*
        }
    };
}

scalar!(Whole, u64, deserialize_u64, "a non-negative integer", {
    fn visit_u64<E>(self, value: u64) -> Result<u64, E> {
        Ok(value)
    }
});

scalar!(Real, f64, deserialize_f64, "a number", {
    fn visit_f64<E>(self, value: f64) -> Result<f64, E> {
        Ok(value)
    }
    fn visit_u64<E>(self, value: u64) -> Result<f64, E> {
        Ok(value as f64)
    }
    fn visit_i64<E>(self, value: i64) -> Result<f64, E> {
        Ok(value as f64)
    }
});

scalar!(Event, EventName, deserialize_str, "the name of an event", {
    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<EventName, E> {
        EventName::parse(value).ok_or_else(|| E::custom("is not one of the protocol's names"))
    }
});

scalar!(Text, Option<String>, deserialize_any, "a string", {
    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Option<String>, E> {
        short(value).map(Some)
    }
    fn visit_unit<E>(self) -> Result<Option<String>, E> {
        Ok(None)
    }
});

scalar!(TextOrWhole, Value, deserialize_any, "a string or a non-negative integer", {
    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Value, E> {
        short(value).map(Value::String)
    }
    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }
});

scalar!(Scalar, Value, deserialize_any, "a string, number, boolean or null", {
    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Value, E> {
        short(value).map(Value::String)
    }
    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }
});

fn short<E: serde::de::Error>(value: &str) -> Result<String, E> {
    if value.len() > MAX_STRING {
        return Err(E::custom(format!("has a string of more than {MAX_STRING} bytes")));
    }
    Ok(value.to_owned())
}

/// A list of at most this many strings.
pub(super) struct Strings(pub(super) usize);
seed!(Strings, Vec<String>);

impl<'de> Visitor<'de> for Strings {
    type Value = Vec<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an array of at most {} strings", self.0)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<String>, A::Error> {
        let mut list = Vec::new();
        while let Some(text) = seq.next_element_seed(Text)? {
            if list.len() == self.0 {
                return Err(A::Error::custom(format!("has more than {} entries", self.0)));
            }
            list.push(text.ok_or_else(|| A::Error::custom("has a null where a string should be"))?);
        }
        Ok(list)
    }
}

/// Exactly `count` integers, which replace the content of `list`.
pub(super) struct Wholes<'a> {
    pub(super) list: &'a mut Vec<u64>,
    pub(super) count: usize,
}
seed!(Wholes<'a>, ());

impl<'de> Visitor<'de> for Wholes<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an array of {} non-negative integers", self.count)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let Self { list, count } = self;
        let other = |than| A::Error::custom(format!("has {than} the header's {count} keys"));
        list.clear();
        list.reserve_exact(count);
        while let Some(value) = seq.next_element_seed(Whole)? {
            if list.len() == count {
                return Err(other("more values than"));
            }
            list.push(value);
        }
        if list.len() < count { Err(other("fewer values than")) } else { Ok(()) }
    }
}

/// A hash of scalars, or only of strings if `strings`.
pub(super) struct Hash {
    pub(super) strings: bool,
}

impl<'de> DeserializeSeed<'de> for Hash {
    type Value = Map<String, Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Hash {
    type Value = Map<String, Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key_seed(Text)? {
            if map.len() == MAX_ENTRIES {
                return Err(A::Error::custom(format!("has more than {MAX_ENTRIES} entries")));
            }
            let value = access.next_value_seed(Scalar)?;
            if self.strings && !value.is_string() {
                return Err(A::Error::custom("has a value that is not a string"));
            }
            map.insert(key.unwrap_or_default(), value);
        }
        Ok(map)
    }
}

/// A hash of scalars that replaces another one: leading entries with the same keys in the same order allocate no new memory.
pub(super) struct Info<'a>(pub(super) &'a mut Map<String, Value>);

impl<'de> DeserializeSeed<'de> for Info<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Info<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<(), A::Error> {
        let map = self.0;
        let length = map.len();
        let mut known = map.iter_mut();
        let mut same = 0;
        let mut other = None;
        for (name, value) in &mut known {
            match access.next_key_seed(Expected(name))? {
                Some(None) => access.next_value_seed(InPlace(value))?,
                Some(Some(key)) => {
                    other = Some(key);
                    break;
                }
                None => break,
            }
            same += 1;
        }
        if same < length {
            *map = std::mem::take(map).into_iter().take(same).collect();
        }
        loop {
            let key = match other.take() {
                Some(key) => key,
                None => match access.next_key_seed(Text)? {
                    Some(key) => key.unwrap_or_default(),
                    None => return Ok(()),
                },
            };
            if map.len() == MAX_ENTRIES {
                return Err(A::Error::custom(format!("has more than {MAX_ENTRIES} entries")));
            }
            map.insert(key, access.next_value_seed(Scalar)?);
        }
    }
}

/// A key; `None` if it is the expected one.
struct Expected<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Expected<'_> {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Expected<'_> {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E: serde::de::Error>(self, key: &str) -> Result<Self::Value, E> {
        if key == self.0 { Ok(None) } else { short(key).map(Some) }
    }
}

/// A scalar that replaces another one.
struct InPlace<'a>(&'a mut Value);

impl<'de> DeserializeSeed<'de> for InPlace<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Visitor<'_> for InPlace<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Scalar.expecting(f)
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<(), E> {
        if self.0.as_str() != Some(value) {
            *self.0 = Scalar.visit_str(value)?;
        }
        Ok(())
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<(), E> {
        *self.0 = Scalar.visit_bool(value)?;
        Ok(())
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<(), E> {
        *self.0 = Scalar.visit_u64(value)?;
        Ok(())
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<(), E> {
        *self.0 = Scalar.visit_i64(value)?;
        Ok(())
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<(), E> {
        *self.0 = Scalar.visit_f64(value)?;
        Ok(())
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<(), E> {
        *self.0 = Scalar.visit_unit()?;
        Ok(())
    }
}
