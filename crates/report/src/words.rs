//! Numbers in sentences for people.

/// `1 cycle`, `2 cycles`, `0 processes`.
pub fn plural(n: u64, noun: &str) -> String {
    if n == 1 {
        return format!("1 {noun}");
    }
    let ending = if noun.ends_with(['s', 'x']) || noun.ends_with("ch") { "es" } else { "s" };
    format!("{n} {noun}{ending}")
}

/// The size of a file: `236 kB`.
pub fn file_size(bytes: u64) -> String {
    match bytes {
        ..1000 => plural(bytes, "byte"),
        1000..1_000_000 => format!("{:.0} kB", bytes as f64 / 1e3),
        _ => format!("{:.1} MB", bytes as f64 / 1e6),
    }
}

/// A part of a whole in percent, with one digit; small parts are not rounded to nothing.
pub fn percent(part: u64, whole: u64) -> String {
    let share = if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 };
    match share {
        0.0 => "0 %".to_owned(),
        ..0.1 => "below 0.1 %".to_owned(),
        _ => format!("{share:.1} %"),
    }
}

/// A value without its percent-encoding.
pub fn percent_decoded(value: &str) -> String {
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let [first, tail @ ..] = rest {
        let byte = (*first == b'%')
            .then(|| {
                std::str::from_utf8(tail.get(..2)?).ok().and_then(|hex| u8::from_str_radix(hex, 16).ok())
            })
            .flatten();
        bytes.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nouns follow their numbers.
    #[test]
    fn plurals() {
        assert_eq!(plural(0, "cycle"), "0 cycles");
        assert_eq!(plural(1, "process"), "1 process");
        assert_eq!(plural(2, "process"), "2 processes");
        assert_eq!(plural(3, "branch"), "3 branches");
    }

    /// Sizes and shares in few digits.
    #[test]
    fn numbers() {
        assert_eq!((file_size(1), file_size(999)), ("1 byte".into(), "999 bytes".into()));
        assert_eq!((file_size(236_400), file_size(2_350_000)), ("236 kB".into(), "2.4 MB".into()));
        assert_eq!((percent(1, 13), percent(0, 13)), ("7.7 %".into(), "0 %".into()));
        assert_eq!((percent(1, 1_000_000), percent(0, 0)), ("below 0.1 %".into(), "0 %".into()));
    }
}
