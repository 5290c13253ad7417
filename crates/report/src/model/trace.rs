//! The trace that a request belongs to.

use gctrace_common::traceparent::{VALUE_BYTES, VALUE_WORDS, is_valid, words};

/// Where a trace id was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TraceOrigin {
    /// The program's tracing library, which publishes the active span of each thread (OTEP 4947).
    Thread,
    /// The `traceparent` header of the request.
    Traceparent,
    /// The `traceparent` member of the job.
    Job,
}

impl TraceOrigin {
    /// The word used in outputs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Thread => "thread",
            Self::Traceparent => "traceparent",
            Self::Job => "job",
        }
    }
}

/// A span that was active on a thread, as its tracing library published it (OTEP 4947).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span {
    /// Trace id; not zero.
    pub trace_id: u128,
    /// Span id; not zero.
    pub span_id: u64,
}

impl Span {
    /// Makes a span of the bytes of both ids, given as words; `None` if an id is zero.
    pub fn of_words(trace_id: [u64; 2], span_id: u64) -> Option<Self> {
        let [high, low] = trace_id.map(|word| u128::from(word.swap_bytes()));
        let span = Self { trace_id: high << 64 | low, span_id: span_id.swap_bytes() };
        (span.trace_id != 0 && span.span_id != 0).then_some(span)
    }
}

/// The span that something belongs to: the span in which it happened, or the span of the caller that made the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Link {
    /// The span.
    pub span: Span,
    /// Where the span was found. Only for [`TraceOrigin::Thread`] it is the span in which the event happened; otherwise it is the caller's span.
    pub origin: TraceOrigin,
}

impl Link {
    /// The trace id in its text form: 32 hexadecimal digits.
    pub fn trace_id_text(&self) -> String {
        format!("{:032x}", self.span.trace_id)
    }

    /// The span id in its text form: 16 hexadecimal digits.
    pub fn span_id_text(&self) -> String {
        format!("{:016x}", self.span.span_id)
    }
}

/// The trace of a request. The span of the request itself is unknown: the application creates it, if anything does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Trace {
    /// Trace id; not zero.
    pub trace_id: u128,
    /// The caller that made the request, if the trace id came from it.
    pub caller: Option<Caller>,
    /// Where the trace id was found.
    pub origin: TraceOrigin,
}

/// What a request says about its caller (W3C Trace Context, 3.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Caller {
    /// The caller's span id; not zero.
    pub span_id: u64,
    /// Whether the caller may have recorded the trace.
    pub sampled: bool,
}

impl Trace {
    /// Parses the first 55 bytes of a value; the 56th is ignored. Later versions have the same layout there (4.3).
    pub fn parse(value: &[u64; VALUE_WORDS]) -> Option<Self> {
        if !is_valid(value, false) {
            return None;
        }
        let bytes: Vec<u8> = value.iter().flat_map(|word| word.to_le_bytes()).take(VALUE_BYTES).collect();
        let text = std::str::from_utf8(&bytes).ok()?;
        let flags = u8::from_str_radix(&text[53..55], 16).ok()?;
        Some(Self {
            trace_id: u128::from_str_radix(&text[3..35], 16).ok()?,
            caller: Some(Caller {
                span_id: u64::from_str_radix(&text[36..52], 16).ok()?,
                sampled: flags & 1 != 0,
            }),
            origin: TraceOrigin::Traceparent,
        })
    }

    /// The trace of a request whose threads published `trace_id`. What its caller said is used if it names the same trace.
    #[must_use]
    pub fn published(trace_id: u128, said: Option<Self>) -> Self {
        let same = said.filter(|said| said.trace_id == trace_id);
        same.unwrap_or(Self { trace_id, caller: None, origin: TraceOrigin::Thread })
    }

    /// Parses a complete value.
    pub fn of_text(text: &[u8]) -> Option<Self> {
        let value = words(text.first_chunk::<VALUE_BYTES>()?);
        let goes_on = match text.get(VALUE_BYTES) {
            None => false,
            Some(b'-') => true,
            Some(_) => return None,
        };
        is_valid(&value, goes_on).then(|| Self::parse(&value)).flatten()
    }

    /// The trace id in its text form: 32 hexadecimal digits.
    pub fn trace_id_text(&self) -> String {
        format!("{:032x}", self.trace_id)
    }

    /// The caller's span id in its text form: 16 hexadecimal digits.
    pub fn parent_span_id_text(&self) -> Option<String> {
        self.caller.map(|caller| format!("{:016x}", caller.span_id))
    }

    /// Links what belongs to the request to the span of its caller; `None` if the caller is unknown.
    pub fn link(&self) -> Option<Link> {
        let span_id = self.caller?.span_id;
        Some(Link { span: Span { trace_id: self.trace_id, span_id }, origin: self.origin })
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
        let caller = trace.caller.unwrap();
        assert_eq!(
            (trace.parent_span_id_text().unwrap().as_str(), caller.sampled),
            ("00f067aa0ba902b7", true)
        );
        assert_eq!(trace.link().unwrap().span_id_text(), "00f067aa0ba902b7");
        let mut other = *VALUE;
        other[54] = b'2';
        assert!(!Trace::parse(&words(&other)).unwrap().caller.unwrap().sampled);
        other[54] = b'A';
        assert_eq!(Trace::parse(&words(&other)), None);
    }

    /// The words hold the bytes as they are in memory (OTEP 4947: both ids in network byte order).
    #[test]
    fn spans() {
        let word = |bytes: [u8; 8]| u64::from_le_bytes(bytes);
        let ids = [word([1, 2, 3, 4, 5, 6, 7, 8]), word([9, 10, 11, 12, 13, 14, 15, 16])];
        let span = Span::of_words(ids, word([0xa1, 2, 3, 4, 5, 6, 7, 0xb8])).unwrap();
        let link = Link { span, origin: TraceOrigin::Thread };
        assert_eq!(link.trace_id_text(), "0102030405060708090a0b0c0d0e0f10");
        assert_eq!(link.span_id_text(), "a1020304050607b8");
        assert_eq!((Span::of_words([0; 2], 1), Span::of_words([0, 1], 0)), (None, None));
    }

    /// The trace that the program published takes precedence over the caller's.
    #[test]
    fn published() {
        let said = Trace::parse(&words(VALUE)).unwrap();
        assert_eq!(Trace::published(said.trace_id, Some(said)), said);
        let other = Trace { trace_id: 7, caller: None, origin: TraceOrigin::Thread };
        assert_eq!((Trace::published(7, Some(said)), Trace::published(7, None)), (other, other));
        assert_eq!(other.link(), None);
    }

    proptest! {
        /// Arbitrary bytes are either rejected or parsed to the ids that they contain.
        #[test]
        fn hostile(at in 0..VALUE_BYTES, byte: u8, bytes in proptest::collection::vec(any::<u8>(), VALUE_BYTES)) {
            let bytes: [u8; VALUE_BYTES] = bytes.try_into().unwrap();
            let mut changed = *VALUE;
            changed[at] = byte;
            for value in [bytes, changed] {
                if let Some(trace) = Trace::parse(&words(&value)) {
                    let again = format!("-{}-{}-", trace.trace_id_text(), trace.parent_span_id_text().unwrap());
                    prop_assert_eq!(again.as_bytes(), &value[2..53]);
                    prop_assert!(trace.trace_id != 0 && trace.caller.unwrap().span_id != 0);
                }
            }
        }
    }
}
