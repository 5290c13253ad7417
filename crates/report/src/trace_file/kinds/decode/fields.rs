//! Fields of a protocol buffers message, borrowed from its bytes. The most frequent parts of a recording are read with
//! these: nothing is copied or allocated on the way to the model.

use super::Invalid;

/// The value of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::trace_file) enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// Of a fixed number of bytes.
    Fixed,
}

impl<'a> Value<'a> {
    pub(in crate::trace_file) fn number(self) -> Result<u64, Invalid> {
        match self {
            Self::Number(number) => Ok(number),
            Self::Bytes(_) | Self::Fixed => Err(other_type()),
        }
    }

    pub(in crate::trace_file) fn bytes(self) -> Result<&'a [u8], Invalid> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            Self::Number(_) | Self::Fixed => Err(other_type()),
        }
    }

    pub(in crate::trace_file) fn message<M: prost::Message + Default>(self) -> Result<M, Invalid> {
        message(self.bytes()?)
    }

    /// Appends the numbers of a repeated field, packed or not.
    pub(in crate::trace_file) fn numbers(self, to: &mut Vec<u64>) -> Result<(), Invalid> {
        let mut bytes = match self {
            Self::Number(number) => {
                to.push(number);
                return Ok(());
            }
            packed => packed.bytes()?,
        };
        // In the last byte of each number this bit is clear.
        to.reserve(bytes.iter().filter(|byte| **byte < 0x80).count());
        while !bytes.is_empty() {
            to.push(varint(&mut bytes)?);
        }
        Ok(())
    }

    /// [`Self::numbers`] for 32-bit values.
    pub(in crate::trace_file) fn small_numbers(self, to: &mut Vec<u32>) -> Result<(), Invalid> {
        let mut bytes = match self {
            Self::Number(number) => {
                to.push(number as u32);
                return Ok(());
            }
            packed => packed.bytes()?,
        };
        to.reserve(bytes.iter().filter(|byte| **byte < 0x80).count());
        while !bytes.is_empty() {
            to.push(varint(&mut bytes)? as u32);
        }
        Ok(())
    }
}

/// A message whose fields are not read individually.
pub(in crate::trace_file) fn message<M: prost::Message + Default>(bytes: &[u8]) -> Result<M, Invalid> {
    M::decode(bytes).map_err(|error| Invalid::new(error.to_string()))
}

fn other_type() -> Invalid {
    Invalid::new("a field has a value of another type".to_owned())
}

fn cut_off() -> Invalid {
    Invalid::new("a message is cut off".to_owned())
}

/// A number of 1 to 10 bytes, with 7 bits in each, least significant first.
fn varint(bytes: &mut &[u8]) -> Result<u64, Invalid> {
    if let [first, rest @ ..] = *bytes
        && *first < 0x80
    {
        *bytes = rest;
        return Ok((*first).into());
    }
    // Times take 7 bytes.
    if let Some(eight) = bytes.first_chunk() {
        let word = u64::from_le_bytes(*eight);
        let ends = !word & 0x8080_8080_8080_8080;
        if ends != 0 {
            let length = ends.trailing_zeros() / 8 + 1;
            *bytes = &bytes[length as usize..];
            return Ok(sevens(word & (u64::MAX >> (64 - 8 * length))));
        }
    }
    let mut number = 0;
    for (at, byte) in bytes.iter().take(10).enumerate() {
        number |= u64::from(byte & 0x7f) << (7 * at);
        if *byte < 0x80 {
            if at == 9 && *byte > 1 {
                break;
            }
            *bytes = &bytes[at + 1..];
            return Ok(number);
        }
    }
    Err(if bytes.len() < 10 { cut_off() } else { Invalid::new("a number has more than 64 bits".to_owned()) })
}

/// Concatenates the lower 7 bits of each byte.
fn sevens(word: u64) -> u64 {
    let of_7 = word & 0x7f7f_7f7f_7f7f_7f7f;
    let of_14 = (of_7 & 0x007f_007f_007f_007f) | ((of_7 & 0x7f00_7f00_7f00_7f00) >> 1);
    let of_28 = (of_14 & 0x0000_3fff_0000_3fff) | ((of_14 & 0x3fff_0000_3fff_0000) >> 2);
    (of_28 & 0x0000_0000_0fff_ffff) | ((of_28 & 0x0fff_ffff_0000_0000) >> 4)
}

/// Takes this number of bytes from the start.
fn take<'a>(bytes: &mut &'a [u8], length: u64) -> Result<&'a [u8], Invalid> {
    let length = usize::try_from(length).ok().filter(|length| *length <= bytes.len()).ok_or_else(cut_off)?;
    let (taken, rest) = bytes.split_at(length);
    *bytes = rest;
    Ok(taken)
}

/// The fields of a message: their numbers and values.
pub(super) struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    pub(in crate::trace_file) fn of(message: &'a [u8]) -> Self {
        Self(message)
    }

    fn field(&mut self) -> Result<(u32, Value<'a>), Invalid> {
        let key = varint(&mut self.0)?;
        let number = u32::try_from(key >> 3).ok().filter(|number| *number > 0);
        let number = number.ok_or_else(|| Invalid::new(format!("a field has the key {key}")))?;
        let value = match key & 7 {
            0 => Value::Number(varint(&mut self.0)?),
            1 => take(&mut self.0, 8).map(|_| Value::Fixed)?,
            2 => {
                let length = varint(&mut self.0)?;
                Value::Bytes(take(&mut self.0, length)?)
            }
            5 => take(&mut self.0, 4).map(|_| Value::Fixed)?,
            // Groups are obsolete.
            kind => return Err(Invalid::new(format!("field {number} is of the type {kind}"))),
        };
        Ok((number, value))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u32, Value<'a>), Invalid>;

    fn next(&mut self) -> Option<Self::Item> {
        (!self.0.is_empty()).then(|| {
            let field = self.field();
            if field.is_err() {
                self.0 = &[];
            }
            field
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;
    use crate::trace_file::kinds::wire::{GcInfo, GcState, Values};

    #[derive(Clone, PartialEq, prost::Message)]
    struct All {
        #[prost(uint64, tag = "1")]
        number: u64,
        #[prost(uint64, repeated, tag = "2")]
        packed: Vec<u64>,
        #[prost(uint32, repeated, packed = "false", tag = "3")]
        each: Vec<u32>,
        #[prost(string, tag = "700")]
        text: String,
        #[prost(fixed64, tag = "5")]
        fixed: u64,
        #[prost(fixed32, tag = "6")]
        short: u32,
    }

    proptest! {
        /// The output of the library is read as the library reads it.
        #[test]
        fn same(number: u64, packed: Vec<u64>, each: Vec<u32>, text: String, fixed: u64, short: u32) {
            let all = All { number, packed, each, text, fixed, short };
            let mut read = All { fixed, short, ..All::default() };
            for field in Fields::of(&all.encode_to_vec()) {
                match field.unwrap() {
                    (1, value) => read.number = value.number().unwrap(),
                    (2, value) => value.numbers(&mut read.packed).unwrap(),
                    (3, value) => value.small_numbers(&mut read.each).unwrap(),
                    (700, value) => {
                        read.text = std::str::from_utf8(value.bytes().unwrap()).unwrap().to_owned();
                    }
                    (at, value) => assert!(matches!((at, value), (5 | 6, Value::Fixed))),
                }
            }
            prop_assert_eq!(read, all);
        }

        /// Any bytes are finite, and numbers are those of the library.
        #[test]
        fn any(bytes: Vec<u8>) {
            prop_assert!(Fields::of(&bytes).count() <= bytes.len());
            let mut rest = &bytes[..];
            let expected = prost::encoding::decode_varint(&mut &bytes[..]).ok();
            prop_assert_eq!(varint(&mut rest).ok(), expected);
            // A state has no groups, so both decoders accept the same bytes.
            let of = crate::trace_file::kinds::decode::gc::gc_state(&bytes);
            if let (Ok(one), Ok(other)) = (&of, GcState::decode(&bytes[..])) {
                prop_assert_eq!(&one.stat, &other.stat);
                prop_assert_eq!(one.ts_ns, other.ts_ns);
            }
        }

        /// States, which are read field by field, equal those of the library.
        #[test]
        fn states(ts_ns: u64, tid: u32, stat: Vec<u64>, heaps: Vec<Vec<u64>>) {
            let heaps = heaps.into_iter().map(|values| Values { values }).collect();
            let state = GcState { ts_ns, tid, stat, heaps, info: Some(GcInfo::default()), memory: None };
            prop_assert_eq!(crate::trace_file::kinds::decode::gc::gc_state(&state.encode_to_vec()).unwrap(), state);
        }
    }

    /// Impossible messages are refused.
    #[test]
    fn refused() {
        for (bytes, why) in [
            (&[0x08_u8][..], "a message is cut off"),
            (&[0x0a, 2, 1], "a message is cut off"),
            (&[0x09, 1, 2], "a message is cut off"),
            (&[0x0b], "field 1 is of the type 3"),
            (&[0x00, 0x00], "a field has the key 0"),
            (&[0x08, 255, 255, 255, 255, 255, 255, 255, 255, 255, 2], "a number has more than 64 bits"),
        ] {
            let error = Fields::of(bytes).find_map(Result::err).unwrap();
            assert_eq!(error, Invalid::new(why.to_owned()), "{bytes:?}");
        }
        assert!(Value::Fixed.number().is_err() && Value::Number(1).bytes().is_err());
    }
}
