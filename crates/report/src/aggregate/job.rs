//! Parses the reply that delivered a job: its class, queue, id and time of the push. Arguments are skipped, and for any input the
//! result is visible ASCII of bounded length.
//!
//! The reply is `*2\r\n$13\r\nqueue:default\r\n$168\r\n{"retry":true,…}\r\n` (RESP 2 and 3), the job a JSON object written by
//! Sidekiq. Of a long reply only the beginning and the end are available. The end is parsed backwards from the last brace, so that
//! members of the job are distinguished from members of an argument.

use crate::model::{
    request::Job,
    trace::{Trace, TraceOrigin},
};

/// Maximum length of a class name.
const MAX_CLASS: usize = 200;
/// Maximum length of a queue name, and of a job id.
const MAX_WORD: usize = 64;
/// Classes of Rails and Sidekiq that run another class, which the job names in `wrapped`.
const WRAPPERS: [&[u8]; 2] =
    [b"ActiveJob::QueueAdapters::SidekiqAdapter::JobWrapper", b"Sidekiq::ActiveJob::Wrapper"];

/// A job, as far as its reply shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fetched {
    /// The class that the job's author wrote.
    pub class: Option<String>,
    /// The trace that it belongs to.
    pub trace: JobTrace,
    /// Everything else.
    pub job: Job,
}

/// What a job says about its trace, in its member `traceparent`: OpenTelemetry adds it when the job is pushed, in the format of
/// the header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum JobTrace {
    /// The job has no such member.
    #[default]
    Absent,
    /// The trace, and the span that pushed it.
    Known(Trace),
    /// The member is invalid, or present with different values.
    Invalid,
    /// The member may be in the part that is not available.
    Unread,
}

/// The available parts of a reply.
#[derive(Clone, Copy, Debug)]
pub struct Reply<'a> {
    /// Its first bytes.
    pub head: &'a [u8],
    /// The bytes before the tail, as far as they are available.
    pub before: &'a [u8],
    /// Its last bytes, if it is longer than the head.
    pub tail: &'a [u8],
    /// Total number of bytes.
    pub total: u64,
}

/// Parses a reply. `None`: it is not the whole reply, or it delivered
/// no job.
pub fn fetched(reply: &Reply<'_>) -> Option<Fetched> {
    let &Reply { head, before, tail, total } = reply;
    let mut rest = head.strip_prefix(b"*2\r\n")?;
    let key_len = length(&mut rest)?;
    let key = rest.get(..key_len)?;
    rest = rest.get(key_len..)?.strip_prefix(b"\r\n")?;
    // A namespace may precede it, which may end in `queue` itself.
    let begins = |at: &usize| at.checked_sub(1).is_none_or(|before| key[before] == b':');
    let at = (0..key.len()).filter(begins).find(|at| key[*at..].starts_with(b"queue:"))?;
    let payload_len = length(&mut rest)?;
    let begin = head.len() - rest.len();
    let whole = (begin as u64).checked_add(payload_len as u64)?.checked_add(2)?;
    if total < whole || !rest.starts_with(b"{") {
        return None;
    }
    let end = [before, tail].concat();
    let mut members = Members::default();
    let is_all = if let Some(payload) = rest.get(..payload_len) {
        forwards(payload, &mut members).is_none()
    } else {
        let until = forwards(rest, &mut members);
        // If more bytes were received, the end belongs to something else.
        match end.strip_suffix(b"\r\n").filter(|_| total == whole) {
            Some(end) => {
                let from = backwards(end, &mut members) + payload_len.saturating_sub(end.len());
                until.is_some_and(|until| from <= until)
            }
            None => false,
        }
    };
    Some(Fetched {
        class: members.class(),
        trace: members.trace(is_all),
        job: Job {
            queue: word(&key[at + 6..]),
            jid: members.jid.known().and_then(text).and_then(word),
            enqueued_us: members.enqueued_at.known().and_then(microseconds),
            latency_ns: None,
        },
    })
}

/// Parses a length such as `$168\r\n`.
fn length(bytes: &mut &[u8]) -> Option<usize> {
    let rest = bytes.strip_prefix(b"$")?;
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if !(1..=10).contains(&digits) {
        return None;
    }
    *bytes = rest[digits..].strip_prefix(b"\r\n")?;
    rest[..digits]
        .iter()
        .try_fold(0_usize, |sum, digit| sum.checked_mul(10)?.checked_add(usize::from(digit - b'0')))
}

/// The value of a member, as written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Value<'a> {
    #[default]
    Absent,
    Once(&'a [u8]),
    /// The member is present with different values: it is unknown which one counts.
    Several,
}

impl<'a> Value<'a> {
    fn set(&mut self, value: &'a [u8]) {
        *self = match *self {
            Self::Absent => Self::Once(value),
            Self::Once(before) if before == value => *self,
            _ => Self::Several,
        };
    }

    fn known(self) -> Option<&'a [u8]> {
        match self {
            Self::Once(value) => Some(value),
            Self::Absent | Self::Several => None,
        }
    }
}

/// The members of a job that are needed.
#[derive(Debug, Default)]
struct Members<'a> {
    class: Value<'a>,
    wrapped: Value<'a>,
    jid: Value<'a>,
    enqueued_at: Value<'a>,
    traceparent: Value<'a>,
}

impl<'a> Members<'a> {
    /// Adds a member; `key` and `value` are as written, with their quotes.
    fn add(&mut self, key: &[u8], value: &'a [u8]) {
        match key {
            b"\"class\"" => self.class.set(value),
            b"\"wrapped\"" => self.wrapped.set(value),
            b"\"jid\"" => self.jid.set(value),
            b"\"enqueued_at\"" => self.enqueued_at.set(value),
            b"\"traceparent\"" => self.traceparent.set(value),
            _ => {}
        }
    }

    fn class(&self) -> Option<String> {
        let class = text(self.class.known()?)?;
        match self.wrapped {
            Value::Absent if WRAPPERS.contains(&class) => None,
            Value::Absent => constant(class),
            wrapped => constant(text(wrapped.known()?)?),
        }
    }

    /// `is_all`: there are no further members.
    fn trace(&self, is_all: bool) -> JobTrace {
        match self.traceparent {
            Value::Absent if is_all => JobTrace::Absent,
            Value::Absent => JobTrace::Unread,
            value => value
                .known()
                .and_then(text)
                .and_then(Trace::of_text)
                .map(|trace| Trace { origin: TraceOrigin::Job, ..trace })
                .map_or(JobTrace::Invalid, JobTrace::Known),
        }
    }
}

/// Parses members from the opening brace on, as far as they are available. Returns the offset of the next member; `None`: these are all.
fn forwards<'a>(json: &'a [u8], members: &mut Members<'a>) -> Option<usize> {
    let Some(mut rest) = json.strip_prefix(b"{") else { return Some(0) };
    loop {
        let here = Some(json.len() - rest.len());
        let Some(key) = leading(rest).filter(|key| key.starts_with(b"\"")) else { return here };
        let Some(behind) = rest[key.len()..].strip_prefix(b":") else { return here };
        let Some(value) = leading(behind) else { return here };
        let behind = &behind[value.len()..];
        match behind.first() {
            Some(b',') => rest = &behind[1..],
            // The last member of an object that is complete.
            Some(b'}') if behind.len() == 1 => {
                members.add(key, value);
                return None;
            }
            _ => return here,
        }
        members.add(key, value);
    }
}

/// Parses members backwards from the closing brace, as far as they are available. Returns the offset of the first member parsed.
fn backwards<'a>(json: &'a [u8], members: &mut Members<'a>) -> usize {
    let Some(mut rest) = json.strip_suffix(b"}") else { return json.len() };
    let mut from = json.len();
    loop {
        let Some(value) = trailing(rest) else { return from };
        let Some(before) = rest[..rest.len() - value.len()].strip_suffix(b":") else { return from };
        let Some(key) = trailing(before).filter(|key| key.starts_with(b"\"")) else { return from };
        let begin = before.len() - key.len();
        let Some(before) = before[..begin].strip_suffix(b",") else { return from };
        members.add(key, value);
        (rest, from) = (before, begin);
    }
}

/// The value at the beginning of the text, if it is complete. Nested values are skipped, not parsed.
fn leading(text: &[u8]) -> Option<&[u8]> {
    let mut depth = 0_usize;
    let mut at = 0;
    loop {
        match text.get(at)? {
            b'"' => {
                at += 1;
                while *text.get(at)? != b'"' {
                    at += if text[at] == b'\\' { 2 } else { 1 };
                }
                at += 1;
            }
            b'{' | b'[' => {
                depth += 1;
                at += 1;
            }
            b'}' | b']' => {
                depth = depth.checked_sub(1)?;
                at += 1;
            }
            byte if is_scalar(*byte) => {
                at += text[at..].iter().take_while(|byte| is_scalar(**byte)).count();
                // The value may continue where the text is cut off.
                text.get(at)?;
            }
            b',' | b':' if depth > 0 => at += 1,
            _ => return None,
        }
        if depth == 0 {
            return Some(&text[..at]);
        }
    }
}

/// The value at the end of the text, if it is complete.
fn trailing(text: &[u8]) -> Option<&[u8]> {
    let mut depth = 0_usize;
    let mut end = text.len();
    loop {
        match text.get(end.checked_sub(1)?)? {
            b'"' => {
                end -= 1;
                loop {
                    end = text[..end].iter().rposition(|&byte| byte == b'"')?;
                    let escapes = text[..end].iter().rev().take_while(|&&byte| byte == b'\\').count();
                    if escapes == end {
                        // What precedes it is not available.
                        return None;
                    }
                    if escapes % 2 == 0 {
                        break;
                    }
                }
            }
            b'}' | b']' => {
                depth += 1;
                end -= 1;
            }
            b'{' | b'[' => {
                depth = depth.checked_sub(1)?;
                end -= 1;
            }
            byte if is_scalar(*byte) => {
                end -= text[..end].iter().rev().take_while(|byte| is_scalar(**byte)).count();
                text.get(end.checked_sub(1)?)?;
            }
            b',' | b':' if depth > 0 => end -= 1,
            _ => return None,
        }
        if depth == 0 {
            return Some(&text[end..]);
        }
    }
}

/// Whether it is a character of numbers, `true`, `false` or `null`.
fn is_scalar(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'+' | b'.')
}

/// The contents of a string without escapes.
fn text(value: &[u8]) -> Option<&[u8]> {
    let inner = value.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    (!inner.contains(&b'\\')).then_some(inner)
}

/// The qualified name of a class: `Shop::MailJob`.
fn constant(name: &[u8]) -> Option<String> {
    let name = std::str::from_utf8(name).ok().filter(|name| name.len() <= MAX_CLASS)?;
    let part = |part: &str| {
        part.starts_with(|first: char| first.is_ascii_uppercase())
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    name.split("::").all(part).then(|| name.to_owned())
}

/// The name of a queue, or the id of a job.
fn word(bytes: &[u8]) -> Option<String> {
    let word = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b':' | b'/');
    let fits = (1..=MAX_WORD).contains(&bytes.len()) && bytes.iter().all(word);
    fits.then(|| bytes.iter().map(|&byte| char::from(byte)).collect())
}

/// Parses a time since the epoch: seconds with a fraction or, from Sidekiq 8 on, milliseconds.
fn microseconds(value: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(value).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(fraction) {
        return None;
    }
    let number: u64 = whole.parse().ok()?;
    match (whole.len(), fraction.len()) {
        (13, 0) => number.checked_mul(1000),
        (9..=10, 1..=20) => {
            let micros: String = fraction.chars().chain("000000".chars()).take(6).collect();
            number.checked_mul(1_000_000)?.checked_add(micros.parse().ok()?)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEAD: usize = 1024;
    const TAIL: usize = 512;

    fn fetched(head: &[u8], tail: &[u8], total: u64) -> Option<Fetched> {
        super::fetched(&Reply { head, before: &[], tail, total })
    }

    /// The latency is that of the two clocks, and unknown where they disagree.
    #[test]
    fn latency() {
        let job = |enqueued_us| Job { enqueued_us, ..Job::default() };
        for (enqueued_us, epoch_ns, latency_ns) in [
            (Some(5_000_000), 5_250_000_001, Some(250_000_001)),
            (Some(5_000_000), 5_000_000_000, Some(0)),
            (Some(5_000_000), 4_999_999_999, None),
            (Some(u64::MAX), 5_000_000_000, None),
            (None, 5_000_000_000, None),
        ] {
            let mut job = job(enqueued_us);
            job.taken_at(epoch_ns);
            assert_eq!(job.latency_ns, latency_ns, "{enqueued_us:?} {epoch_ns}");
        }
    }

    /// Parses a reply as Redis sends it and the kernel's program cuts it.
    fn read(key: &str, json: &str) -> Option<Fetched> {
        let reply = format!("*2\r\n${}\r\n{key}\r\n${}\r\n{json}\r\n", key.len(), json.len());
        let bytes = reply.as_bytes();
        let head = &bytes[..bytes.len().min(HEAD)];
        let tail = if bytes.len() > HEAD { &bytes[bytes.len() - TAIL..] } else { &[] };
        fetched(head, tail, bytes.len() as u64)
    }

    fn sidekiq6(args: &str) -> String {
        format!(
            "{{\"retry\":true,\"queue\":\"default\",\"args\":{args},\"class\":\"HardJob\",\
             \"jid\":\"53a466413ce266648291135b\",\"created_at\":1795460659.7980363,\
             \"enqueued_at\":1795460659.7982645}}"
        )
    }

    fn hard() -> Fetched {
        Fetched {
            class: Some("HardJob".to_owned()),
            trace: JobTrace::Absent,
            job: Job {
                queue: Some("default".to_owned()),
                jid: Some("53a466413ce266648291135b".to_owned()),
                enqueued_us: Some(1_795_460_659_798_264),
                latency_ns: None,
            },
        }
    }

    /// Short and long jobs, whatever their arguments.
    #[test]
    fn of_sidekiq() {
        let long = "x".repeat(5000);
        for args in [
            "[]".to_owned(),
            r#"["SECRET",1,null,{"class":"Wrong"}]"#.to_owned(),
            r#"["\"class\":\"Wrong\",","\\"]"#.to_owned(),
            format!(r#"["{long}"]"#),
            format!(r#"["{long}\",\"class\":\"Wrong\",\"jid\":\"1\"}}"]"#),
            format!(r#"["{long}",{{"class":"Wrong","jid":"9","enqueued_at":1795460000.5}}]"#),
        ] {
            // With long arguments, a part that may contain another member is not available.
            let trace = if args.len() > 1024 { JobTrace::Unread } else { JobTrace::Absent };
            let hard = Some(Fetched { trace, ..hard() });
            assert_eq!(read("queue:default", &sidekiq6(&args)), hard, "{args}");
            for namespace in ["shop:", "a:b:", "jobqueue:", "jobqueue:b:"] {
                assert_eq!(read(&format!("{namespace}queue:default"), &sidekiq6(&args)), hard, "{args}");
            }
            assert_eq!(read("jobqueue:default", &sidekiq6(&args)), None);
        }
        let eight = r#"{"class":"A::B_2","jid":"1a","enqueued_at":1795460659798}"#;
        let job = read("queue:low", eight).unwrap();
        assert_eq!(job.class.as_deref(), Some("A::B_2"));
        assert_eq!(job.job.queue.as_deref(), Some("low"));
        assert_eq!(job.job.enqueued_us, Some(1_795_460_659_798_000));
    }

    /// A job of Active Job has the name of the class that the user wrote.
    #[test]
    fn of_active_job() {
        for wrapper in ["ActiveJob::QueueAdapters::SidekiqAdapter::JobWrapper", "Sidekiq::ActiveJob::Wrapper"]
        {
            let class = |rest: &str| {
                let json = format!("{{\"retry\":true,\"class\":\"{wrapper}\"{rest}}}");
                read("queue:default", &json).unwrap().class
            };
            assert_eq!(
                class(",\"wrapped\":\"Shop::Mail\",\"args\":[{\"job_class\":\"No\"}]").as_deref(),
                Some("Shop::Mail")
            );
            assert_eq!(class(",\"args\":[]"), None);
        }
    }

    /// As OpenTelemetry's instrumentation writes it: after Sidekiq's members except the time of the push. It is searched for only in the members of
    /// the job, and known if it is valid and has only one value.
    #[test]
    fn of_traces() {
        const VALUE: &str = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01";
        let trace = |before: &str, args: &str, rest: &str| {
            let json =
                format!("{{\"retry\":true{before},\"args\":{args},\"class\":\"A\"{rest},\"jid\":\"1\"}}");
            read("queue:q", &json).unwrap().trace
        };
        let member = |value: &str| format!(",\"traceparent\":{value}");
        let value = Trace::of_text(VALUE.as_bytes()).unwrap();
        let known = JobTrace::Known(Trace { origin: TraceOrigin::Job, ..value });
        let quoted = format!("\"{VALUE}\"");
        let inner = format!("[{{\"traceparent\":{quoted}}}]");
        let long = |len: usize| format!("[\"{}\",{{\"traceparent\":{quoted}}}]", "x".repeat(len));
        for args in ["[]", &inner, &long(1500), &long(5000)] {
            assert_eq!(trace("", args, &member(&quoted)), known, "{args}");
            assert_eq!(trace(&member(&quoted), args, ""), known, "{args}");
            assert_eq!(trace(&member(&quoted), args, &member(&quoted)), known, "the same twice");
            let other = member(&quoted.replace("0af", "1af"));
            assert_eq!(trace(&member(&quoted), args, &other), JobTrace::Invalid);
            for invalid in ["null", "7", "{}", "\"\"", &quoted.to_uppercase(), &quoted.replace("-01", "-01 ")]
            {
                assert_eq!(trace("", args, &member(invalid)), JobTrace::Invalid, "{invalid}");
            }
        }
        let later = member(&quoted.replace("\"00", "\"01").replace("-01\"", "-01-more\""));
        assert_eq!(trace("", "[]", &later), known);
        assert_eq!(trace("", "[]", &later.replace("\"01", "\"00")), JobTrace::Invalid);
        assert_eq!(trace("", &inner, ""), JobTrace::Absent);
        // The head and the tail touch, or do not.
        for len in 0..2000 {
            let expected = if len < 800 { JobTrace::Absent } else { JobTrace::Unread };
            let trace = trace("", &long(len), "");
            assert!(
                trace == expected || (800..1000).contains(&len) && trace == JobTrace::Absent,
                "{len} {trace:?}"
            );
        }
    }

    /// Ambiguous values are unknown, and what is not a job yields none.
    #[test]
    fn unknown() {
        let class = |json: &str| read("queue:q", json).and_then(|fetched| fetched.class);
        assert_eq!(class(r#"{"class":"A","class":"B"}"#), None);
        assert_eq!(class(r#"{"class":"lower"}"#), None);
        assert_eq!(class(r##"{"class":"#<Class:0x1>"}"##), None);
        assert_eq!(class(r#"{"class":"\u0041"}"#), None);
        assert_eq!(class(r#"{"args":[{"class":"A"}]}"#), None);
        assert_eq!(class(r#"{ "class":"A"}"#), None, "Sidekiq writes no spaces");
        assert_eq!(class(r#"{"class":"A"}}"#), None);
        assert_eq!(read("cache", &sidekiq6("[]")), None);
        assert_eq!(read("queue:q", "text"), None);
        let whole = b"*2\r\n$7\r\nqueue:q\r\n$13\r\n{\"class\":\"A\"}\r\n";
        for len in 0..whole.len() {
            assert_eq!(fetched(&whole[..len], &[], len as u64), None, "{len}");
        }
        assert_eq!(fetched(whole, &[], whole.len() as u64).unwrap().class.as_deref(), Some("A"));
        for none in
            [&b"*-1\r\n"[..], b"_\r\n", b"-ERR x\r\n", b"*2\r\n:1\r\n:2\r\n", b"*2\r\n$99999999999\r\n"]
        {
            assert_eq!(fetched(none, &[], none.len() as u64), None);
        }
    }

    /// If a reply is longer than its available parts, the tail must be its end.
    #[test]
    fn the_end() {
        let json = sidekiq6(&format!("[\"{}\"]", "x".repeat(2000)));
        let reply = format!("*2\r\n$7\r\nqueue:q\r\n${}\r\n{json}\r\n", json.len());
        let (bytes, len) = (reply.as_bytes(), reply.len() as u64);
        let of = |tail: &[u8], total| fetched(&bytes[..HEAD], tail, total).map(|fetched| fetched.class);
        assert_eq!(of(&bytes[bytes.len() - TAIL..], len), Some(Some("HardJob".to_owned())));
        assert_eq!(of(&bytes[bytes.len() - 30..], len), Some(None));
        for last in [1, 2, 3, 30, 100, 511] {
            let (before, tail) = bytes[bytes.len() - TAIL..].split_at(TAIL - last);
            let of =
                |before| super::fetched(&Reply { head: &bytes[..HEAD], before, tail, total: len }).unwrap();
            assert_eq!(of(before).class.as_deref(), Some("HardJob"), "{last}");
            assert_eq!(of(&[]).class.is_some(), last > 200, "{last}");
        }
        assert_eq!(of(&bytes[bytes.len() - TAIL..], len + 4), Some(None));
        assert_eq!(of(&bytes[bytes.len() - TAIL..], len - 1), None);
    }

    proptest! {
        /// Any bytes result in visible ASCII of bounded length.
        #[test]
        fn hostile(head in proptest::collection::vec(any::<u8>(), 0..300), tail in proptest::collection::vec(any::<u8>(), 0..100), total: u64) {
            let _any = fetched(&head, &tail, total);
            let text = String::from_utf8_lossy(&head).into_owned();
            if let Some(Fetched { class, job, .. }) = read("queue:q", &format!("{{{text}}}")) {
                for text in [class, job.queue, job.jid].into_iter().flatten() {
                    prop_assert!(text.bytes().all(|byte| matches!(byte, 0x21..=0x7e)) && text.len() <= MAX_CLASS);
                }
            }
        }

        /// Text of JSON's special characters: no argument is taken for a member of the job, wherever the reply is cut.
        #[test]
        fn arguments(text in "[\\[\\]{}\",:\\\\a1]{0,40}", pad in 0_usize..1600) {
            // Rust escapes these characters in the same way as JSON.
            let argument = format!("{:?}", format!("{}{text}\",\"class\":\"Wrong\",\"jid\":\"0\"", "x".repeat(pad)));
            let fetched = read("queue:default", &sidekiq6(&format!("[{argument},{{\"class\":\"Wrong\"}}]")));
            let trace = fetched.as_ref().map(|fetched| fetched.trace).unwrap_or_default();
            prop_assert!(matches!(trace, JobTrace::Absent | JobTrace::Unread), "{:?}", trace);
            prop_assert_eq!(fetched, Some(Fetched { trace, ..hard() }));
        }
    }
}
