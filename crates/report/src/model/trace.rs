//! The trace that a request belongs to.

use gctrace_common::traceparent::{VALUE_BYTES, VALUE_WORDS, is_valid, words};

/// What a request says of its trace (W3C Trace Context, 3.2.2). The span of the request itself is not known: it is the application that
/// makes it, if anyone does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Trace {
    /// The trace; not zero.
    pub trace_id: u128,
    /// The span of the caller that made the request; not zero.
    pub parent_span_id: u64,
    /// Whether the caller may have recorded the trace.
    pub sampled: bool,
}

impl Trace {
    /// Reads the first 55 bytes of a value, and one that does not matter. Later versions have the same there (4.3).
    pub fn parse(value: &[u64; VALUE_WORDS]) -> Option<Self> {
        if !is_valid(value, false) {
            return None;
        }
        let bytes: Vec<u8> = value.iter().flat_map(|word| word.to_le_bytes()).take(VALUE_BYTES).collect();
        let text = std::str::from_utf8(&bytes).ok()?;
        let flags = u8::from_str_radix(&text[53..55], 16).ok()?;
        Some(Self {
            trace_id: u128::from_str_radix(&text[3..35], 16).ok()?,
            parent_span_id: u64::from_str_radix(&text[36..52], 16).ok()?,
            sampled: flags & 1 != 0,
        })
    }

    /// Reads a value, all of it.
    pub fn of_text(text: &[u8]) -> Option<Self> {
        let value = words(text.first_chunk::<VALUE_BYTES>()?);
        let goes_on = match text.get(VALUE_BYTES) {
            None => false,
            Some(b'-') => true,
            Some(_) => return None,
        };
        is_valid(&value, goes_on).then(|| Self::parse(&value)).flatten()
    }

    /// Its id as it is written: 32 hexadecimal digits.
    pub fn trace_id_text(&self) -> String {
        format!("{:032x}", self.trace_id)
    }

    /// The span of the caller as it is written: 16 hexadecimal digits.
    pub fn parent_span_id_text(&self) -> String {
        format!("{:016x}", self.parent_span_id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const VALUE: &[u8; VALUE_BYTES] = b"00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-03";

    #[test]
    fn parsed() {
        let trace = Trace::parse(&words(VALUE)).unwrap();
        assert_eq!(trace.trace_id_text(), "0af7651916cd43dd8448eb211c80319c");
        assert_eq!((trace.parent_span_id_text().as_str(), trace.sampled), ("00f067aa0ba902b7", true));
        let mut other = *VALUE;
        other[54] = b'2';
        assert!(!Trace::parse(&words(&other)).unwrap().sampled);
        other[54] = b'A';
        assert_eq!(Trace::parse(&words(&other)), None);
    }

    proptest! {
        /// Any bytes give nothing, or what was written.
        #[test]
        fn hostile(at in 0..VALUE_BYTES, byte: u8, bytes in proptest::collection::vec(any::<u8>(), VALUE_BYTES)) {
            let bytes: [u8; VALUE_BYTES] = bytes.try_into().unwrap();
            let mut changed = *VALUE;
            changed[at] = byte;
            for value in [bytes, changed] {
                if let Some(trace) = Trace::parse(&words(&value)) {
                    let again = format!("-{}-{}-", trace.trace_id_text(), trace.parent_span_id_text());
                    prop_assert_eq!(again.as_bytes(), &value[2..53]);
                    prop_assert!(trace.trace_id != 0 && trace.parent_span_id != 0);
                }
            }
        }
    }
}
