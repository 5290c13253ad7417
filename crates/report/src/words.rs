//! Numbers in sentences for people.

/// Units in which users give times, in nanoseconds. Outputs print `µs` (micro sign); keyboards and editors also produce the Greek letter.
pub const TIME_UNITS: [(&str, u64); 9] = [
    ("ns", 1),
    ("us", 1_000),
    ("\u{b5}s", 1_000),
    ("\u{3bc}s", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
    ("d", 86_400_000_000_000),
];

/// Shown in place of a missing name: of a thread without one, or of a process that was gone before its name could be read.
pub const UNNAMED: &str = "(unnamed)";

/// `1 cycle`, `2 cycles`, `0 processes`.
pub fn plural(n: u64, noun: &str) -> String {
    if n == 1 {
        return format!("1 {noun}");
    }
    let ending = if noun.ends_with(['s', 'x']) || noun.ends_with("ch") { "es" } else { "s" };
    format!("{n} {noun}{ending}")
}

/// The size of a file or of memory, in the units that options accept and other outputs show: `231 KiB`, `2.2 MiB`.
pub fn data_size(bytes: u64) -> String {
    let in_units = |shift: u32| bytes as f64 / (1_u64 << shift) as f64;
    match bytes {
        ..0x400 => plural(bytes, "byte"),
        0x400..0x10_0000 => format!("{:.0} KiB", in_units(10)),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", in_units(20)),
        _ => format!("{:.2} GiB", in_units(30)),
    }
}

/// A time in its two largest units: `45 s`, `9 min 58 s`, `2 h 5 min`.
pub fn span(ns: u64) -> String {
    let seconds = ns / 1_000_000_000;
    let two = |large: u64, one: &str, small: u64, other: &str| match small {
        0 => format!("{large} {one}"),
        small => format!("{large} {one} {small} {other}"),
    };
    match seconds {
        0 => format!("{} ms", ns / 1_000_000),
        1..60 => format!("{seconds} s"),
        60..3600 => two(seconds / 60, "min", seconds % 60, "s"),
        3600..86_400 => two(seconds / 3600, "h", seconds / 60 % 60, "min"),
        _ => two(seconds / 86_400, "d", seconds / 3600 % 24, "h"),
    }
}

/// Epoch seconds as `2026-11-23T14:30:00Z`.
pub fn utc(epoch_s: i64) -> String {
    let (days, second) = (epoch_s.div_euclid(86_400), epoch_s.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Year, month and day of a number of days since 1970, in the Gregorian calendar (`civil_from_days` in Howard Hinnant's "chrono-compatible
/// low-level date algorithms"). Years begin in March here, so that the leap day is the last day of its year and all eras of 400 years have
/// the same number of days.
fn civil(days: i64) -> (i64, i64, i64) {
    const ERA: i64 = 146_097;
    let since_march = days + 719_468;
    let (era, of_era) = (since_march.div_euclid(ERA), since_march.rem_euclid(ERA));
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / (ERA - 1)) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + i64::from(month <= 2), month, day)
}

/// A part of a whole in percent, with one decimal; small shares are not rounded to zero.
pub fn percent(part: u64, whole: u64) -> String {
    let share = if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 };
    match share {
        0.0 => "0 %".to_owned(),
        ..0.1 => "below 0.1 %".to_owned(),
        _ => format!("{share:.1} %"),
    }
}

/// An epoch time as `2026-11-23 09:12:04Z`.
pub fn date_time(epoch_seconds: f64) -> String {
    let seconds = epoch_seconds.floor() as i64;
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}Z")
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

    /// Nouns agree with their numbers.
    #[test]
    fn plurals() {
        assert_eq!(plural(0, "cycle"), "0 cycles");
        assert_eq!(plural(1, "process"), "1 process");
        assert_eq!(plural(2, "process"), "2 processes");
        assert_eq!(plural(3, "branch"), "3 branches");
    }

    /// What `date -u -d @…` prints.
    #[test]
    fn dates() {
        for (epoch, expected) in [
            (0.0, "1970-01-01 00:00:00Z"),
            (951_782_400.5, "2000-02-29 00:00:00Z"),
            (1_709_251_199.0, "2024-02-29 23:59:59Z"),
            (4_107_542_400.0, "2100-03-01 00:00:00Z"),
            (-1.0, "1969-12-31 23:59:59Z"),
        ] {
            assert_eq!(date_time(epoch), expected);
        }
    }

    /// Dates as `date -u` prints them.
    #[test]
    fn utc_dates() {
        for (epoch, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_868_799, "2000-02-29T23:59:59Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_795_444_200, "2026-11-23T14:30:00Z"),
            (4_107_542_399, "2100-02-28T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
            (-1, "1969-12-31T23:59:59Z"),
        ] {
            assert_eq!(utc(epoch), text, "{epoch}");
        }
    }

    /// Times in two units.
    #[test]
    fn spans() {
        for (seconds, text) in [
            (0, "0 ms"),
            (59, "59 s"),
            (60, "1 min"),
            (598, "9 min 58 s"),
            (7_530, "2 h 5 min"),
            (90_000, "1 d 1 h"),
        ] {
            assert_eq!(span(seconds * 1_000_000_000 + 999_999), text);
        }
        assert_eq!(span(250_000_000), "250 ms");
    }

    /// Sizes and shares in few digits.
    #[test]
    fn numbers() {
        let sizes = [1, 1023, 1024, 236_400, 2_350_000, 3 << 30].map(data_size);
        assert_eq!(sizes, ["1 byte", "1023 bytes", "1 KiB", "231 KiB", "2.2 MiB", "3.00 GiB"]);
        assert_eq!((percent(1, 13), percent(0, 13)), ("7.7 %".into(), "0 %".into()));
        assert_eq!((percent(1, 1_000_000), percent(0, 0)), ("below 0.1 %".into(), "0 %".into()));
    }
}
