//! Parses values of flags.

use std::{
    net::{Ipv4Addr, SocketAddr, ToSocketAddrs as _},
    path::PathBuf,
    time::Duration,
};

use clap::builder::{PathBufValueParser, TypedValueParser};
use gctrace_common::malloc::MAX_MALLOC_PERIOD;

use crate::words::TIME_UNITS;

/// Pids given by one flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pids(pub Vec<u32>);

/// Longest accepted time: a year, which is more than any run takes.
const LONGEST: Duration = Duration::from_hours(366 * 24);

/// Parses pids separated by commas or white space: `4242`, `1,2`, the output of `pgrep`.
pub(super) fn pids(text: &str) -> Result<Pids, String> {
    let parse = |word: &str| match word.parse::<u32>() {
        Ok(pid) if pid > 0 => Ok(pid),
        _ => Err(format!("`{word}` is not a pid; programs are selected by name with --name")),
    };
    let pids: Vec<u32> = words(text).map(parse).collect::<Result<_, _>>()?;
    if pids.is_empty() {
        return Err("there is not a pid in it; is the program running?".to_owned());
    }
    Ok(Pids(pids))
}

/// Parses exactly one pid.
pub(super) fn pid(text: &str) -> Result<u32, String> {
    match pids(text)?.0[..] {
        [pid] => Ok(pid),
        _ => Err("give one pid".to_owned()),
    }
}

/// The words of a list, separated by commas or white space.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| c == ',' || c.is_whitespace()).filter(|word| !word.is_empty())
}

/// A time in nanoseconds; one that is too long for them is the longest.
pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Parses a time: `500us`, `500ms`, `30s`, `1.5m`, `1m30s`, `1d`; a number without a unit is in seconds.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    const USAGE: &str = "give a time such as 500us, 10ms, 30s, 1m30s, 2h or 1d";
    let mut rest = text.trim();
    if rest.starts_with('-') {
        return Err("a time cannot be negative; ".to_owned() + USAGE);
    }
    let mut sum = 0.0;
    while !rest.is_empty() {
        let split = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, tail) = rest.split_at(split);
        let end = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(end);
        let unit = match unit.trim() {
            "sec" => "s",
            "min" => "m",
            // A number without a unit is valid only if it is the whole text.
            "" if number.len() == text.trim().len() => "s",
            "" => return Err(USAGE.to_owned()),
            unit => unit,
        };
        let (_, ns) = TIME_UNITS
            .into_iter()
            .find(|(name, _)| *name == unit)
            .ok_or_else(|| format!("unknown unit `{unit}`; use ns, us, ms, s, m, h or d"))?;
        let number: f64 = number.parse().map_err(|_| USAGE.to_owned())?;
        sum += number * ns as f64;
        rest = tail.trim_start();
    }
    let time = Duration::try_from_secs_f64(sum / 1e9).ok().filter(|time| *time <= LONGEST);
    match time {
        Some(Duration::ZERO) => Err("give a time above zero, such as 10ms or 30s".to_owned()),
        Some(time) => Ok(time),
        None => Err("give at most 366d".to_owned()),
    }
}

/// A point in time of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// This long after its beginning.
    After(Duration),
    /// Epoch nanoseconds.
    At(i64),
    /// The first such time of a day (UTC), nanoseconds after midnight, from its beginning on.
    OfDay(i64),
}

/// Parses a point in time of a recording: `10s`, `1m30s` after its beginning, `0`, or `2026-11-23T14:00:00Z` (RFC 3339; the outputs of gctrace
/// have a space in place of the `T`, as the RFC permits), or `14:00:41.979Z`, as lines of recordings have it.
pub(super) fn moment(text: &str) -> Result<Moment, String> {
    // `0` and `0.0s`.
    let number = text.trim().trim_end_matches(char::is_alphabetic);
    if !number.is_empty()
        && number.bytes().all(|byte| matches!(byte, b'0' | b'.'))
        && duration(&text.replacen('0', "1", 1)).is_ok()
    {
        return Ok(Moment::After(Duration::ZERO));
    }
    if text.contains(['T', ':']) || text.trim().contains('-') && !text.trim().starts_with('-') {
        let usage = || {
            "give the date, the time and the time zone, such as 2026-11-23T14:00:00Z or 2026-11-23T15:00:00+01:00, a time of the day in UTC, \
             such as 14:00:41.979Z, or a time after the beginning of the recording, such as 90s"
                .to_owned()
        };
        let of_day = text.trim().strip_suffix('Z').and_then(time_of_day).map(Moment::OfDay);
        return of_day.or_else(|| rfc3339(text.trim()).map(Moment::At)).ok_or_else(usage);
    }
    let usage =
        |why| format!("{why}, after the beginning of the recording, or a date such as 2026-11-23T14:00:00Z");
    duration(text).map(Moment::After).map_err(usage)
}

/// Parses a date (RFC 3339, 5.6) to epoch nanoseconds.
fn rfc3339(text: &str) -> Option<i64> {
    let (date, time) = text.split_once(['T', ' '])?;
    let [year, month, day] = numbers(date, '-', [4, 2, 2])?;
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let longest = match month {
        4 | 6 | 9 | 11 => 30,
        2 => 28 + i64::from(leap),
        1..=12 => 31,
        _ => return None,
    };
    let at = time.find(['Z', '+', '-'])?;
    let (clock, zone) = time.split_at(at);
    let of_day_ns = time_of_day(clock)?;
    let offset = match zone {
        "Z" => 0,
        zone => {
            let [hours, minutes, _] = numbers(&format!("{}:00", &zone[1..]), ':', [2, 2, 2])?;
            (hours <= 23 && minutes <= 59).then_some(())?;
            (hours * 60 + minutes) * if zone.starts_with('-') { -60 } else { 60 }
        }
    };
    if !(1..=longest).contains(&day) {
        return None;
    }
    // Days before 1 March of the year, from 1 March of year 0 on.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = year * 365 + year.div_euclid(4) - year.div_euclid(100)
        + year.div_euclid(400)
        + (153 * month + 2) / 5
        + day
        - 1
        - 719_468;
    (days * 86_400 - offset).checked_mul(1_000_000_000)?.checked_add(of_day_ns)
}

/// Parses a time of the day, `14:00:41.979`, to nanoseconds after midnight.
fn time_of_day(text: &str) -> Option<i64> {
    let (clock, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let [hour, minute, second] = numbers(clock, ':', [2, 2, 2])?;
    let digits = !fraction.is_empty() && fraction.len() <= 9 && fraction.bytes().all(|b| b.is_ascii_digit());
    if hour > 23 || minute > 59 || second > 60 || !digits {
        return None;
    }
    let ns: i64 = format!("{fraction:0<9}").parse().ok()?;
    Some((hour * 3600 + minute * 60 + second) * 1_000_000_000 + ns)
}

/// Three numbers of these lengths with a mark between them.
fn numbers(text: &str, mark: char, lengths: [usize; 3]) -> Option<[i64; 3]> {
    let mut parts = text.split(mark);
    let mut one = |length: usize| {
        let part = parts.next()?;
        (part.len() == length && part.bytes().all(|b| b.is_ascii_digit())).then(|| part.parse().ok())?
    };
    let found = [one(lengths[0])?, one(lengths[1])?, one(lengths[2])?];
    parts.next().is_none().then_some(found)
}

/// Parses percent; returns millionths.
pub(super) fn percent(text: &str) -> Result<u64, String> {
    let percent: f64 =
        text.trim_end_matches('%').parse().map_err(|_| "give a number, such as 0.5".to_owned())?;
    if !(0.001..=100.0).contains(&percent) {
        return Err("give a share from 0.001 to 100 percent".to_owned());
    }
    Ok((percent * 10_000.0).round() as u64)
}

/// Parses a number of samples per second and CPU.
pub(super) fn rate(text: &str) -> Result<u32, String> {
    let rate = text.trim_end_matches("Hz").trim().parse().ok().filter(|rate| (1..=999).contains(rate));
    rate.ok_or_else(|| "give a number of samples per second from 1 to 999".to_owned())
}

/// Parses the size of a ring, bytes.
pub(super) fn ring(text: &str) -> Result<u32, String> {
    let (number, factor) = match text.strip_suffix("MiB").or_else(|| text.strip_suffix('M')) {
        Some(number) => (number, 1 << 20),
        None => match text.strip_suffix("KiB").or_else(|| text.strip_suffix('K')) {
            Some(number) => (number, 1 << 10),
            None => (text, 1),
        },
    };
    number
        .parse::<u32>()
        .ok()
        .and_then(|number| number.checked_mul(factor))
        .filter(|bytes| bytes.is_power_of_two() && (16 << 10..=1 << 30).contains(bytes))
        .ok_or_else(|| "give a power of two from 16KiB to 1024MiB".to_owned())
}

/// Parses the sampling period of `gctrace malloc`: bytes per stack.
pub(super) fn malloc_period(text: &str) -> Result<u64, String> {
    let units = [("MiB", 20), ("M", 20), ("KiB", 10), ("K", 10), ("", 0)];
    let sized = units.iter().find_map(|(unit, bits)| Some((text.strip_suffix(unit)?.trim_end(), bits)));
    sized
        .and_then(|(number, bits)| number.parse::<u64>().ok()?.checked_mul(1 << bits))
        .filter(|&bytes| bytes == 0 || (1 << 10..=MAX_MALLOC_PERIOD).contains(&bytes))
        .ok_or_else(|| "give a size from 1KiB to 1024MiB, or 0 for no stacks".to_owned())
}

/// Parses the limit of the part of a recording that is kept in memory, bytes.
pub(super) fn kept(text: &str) -> Result<u64, String> {
    let bytes = size(text).filter(|bytes| (4 << 20..=64 << 30).contains(bytes));
    bytes.ok_or_else(|| "give a size from 4MiB to 64GiB".to_owned())
}

/// Parses the size limit of a recording, bytes.
pub(super) fn recorded(text: &str) -> Result<u64, String> {
    let bytes = size(text).filter(|bytes| (64 << 10..=1 << 40).contains(bytes));
    bytes.ok_or_else(|| "give a size from 64KiB to 1024GiB".to_owned())
}

fn size(text: &str) -> Option<u64> {
    let units = [
        ("GiB", 1 << 30),
        ("G", 1 << 30),
        ("MiB", 1 << 20),
        ("M", 1 << 20),
        ("KiB", 1 << 10),
        ("K", 1 << 10),
        ("GB", 1_000_000_000),
        ("MB", 1_000_000),
        ("kB", 1000),
    ];
    let sized = units.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?.trim_end(), factor)));
    sized.and_then(|(number, factor)| number.parse::<u64>().ok()?.checked_mul(*factor))
}

/// Parses the path of a recording that is written beside other outputs; `-` is refused.
pub(super) fn beside() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| match path.as_os_str().as_encoded_bytes() {
        b"-" => Err("only `gctrace record -o -` writes to standard output; name a file"),
        _ => Ok(path),
    })
}

/// Parses the path of a recording that is read repeatedly; `-` is refused.
pub(super) fn recording_file() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| match path.as_os_str().as_encoded_bytes() {
        b"-" => Err("a pipe cannot be read again and again; name a file"),
        _ => Ok(path),
    })
}

/// Parses the path of a recording to read; `-` is standard input.
pub(super) fn recording() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().map(|path| if path.as_os_str() == "-" { "/dev/stdin".into() } else { path })
}

/// Parses the path of a file to write; every name of standard output is `-`.
pub(super) fn output() -> impl TypedValueParser<Value = PathBuf> {
    const NAMES: [&str; 3] = ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"];
    PathBufValueParser::new()
        .map(|path| if NAMES.iter().any(|name| path.as_os_str() == *name) { "-".into() } else { path })
}

/// Parses an address to listen on: `127.0.0.1:9394`, `[::1]:9394`, `localhost:9394`. A port alone, `9394` or `:9394`, is one
/// on 127.0.0.1: nothing is opened to other hosts unless asked for.
pub(super) fn listen(text: &str) -> Result<SocketAddr, String> {
    address(text, "give an address and a port, such as 127.0.0.1:9394 or 0.0.0.0:9394 (all interfaces)")
}

/// The same for a server that only this host can reach.
pub(super) fn listen_here(text: &str) -> Result<SocketAddr, String> {
    address(text, "give an address of this host and a port, such as 127.0.0.1:8080")
}

fn address(text: &str, usage: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    if let Ok(port) = text.strip_prefix(':').unwrap_or(text).parse::<u16>() {
        return Ok((Ipv4Addr::LOCALHOST, port).into());
    }
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) => (Some(host), port),
        // A host, or a number that is not a port.
        None => (None, text),
    };
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    if digits && port.parse::<u16>().is_err() {
        return Err(format!("`{port}` is not a port: ports are numbers up to 65535"));
    }
    let Some(host) = host.filter(|host| !host.is_empty() && digits) else { return Err(usage.to_owned()) };
    let found: Vec<SocketAddr> =
        text.to_socket_addrs().map_err(|error| format!("`{host}`: {error}; {usage}"))?.collect();
    let first = found.iter().find(|address| address.is_ipv4()).or(found.first());
    first.copied().ok_or_else(|| format!("`{host}` has no address; {usage}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Output of pgrep, lists, and texts that are not lists of pids.
    #[test]
    fn lists_of_pids() {
        for text in ["1,2", "1 2", "1\n2\n", " 1, 2 ", "1,,2"] {
            assert_eq!(pids(text), Ok(Pids(vec![1, 2])), "{text:?}");
        }
        for wrong in ["", " \n", "puma", "1,x", "-1", "0", "4294967296", "1.5"] {
            assert!(pids(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn durations() {
        for (text, ms) in [
            ("1.5s", 1500),
            ("2m", 120_000),
            ("1m30s", 90_000),
            ("1h 2m 3s", 3_723_000),
            ("1d", 86_400_000),
            ("500ms", 500),
            ("30", 30_000),
            ("366d", 366 * 86_400_000),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        // Units as outputs print them, and as users type them.
        for (text, ns) in [
            ("500000ns", 500_000),
            ("1us", 1_000),
            ("1µs", 1_000),
            ("1.5\u{3bc}s", 1_500),
            ("1ms500us", 1_500_000),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_nanos(ns)), "{text}");
        }
        for wrong in [
            "",
            "s",
            "-1s",
            "0",
            "0us",
            "1 u s",
            "0m0s",
            "1y",
            "1m30",
            "1e400s",
            "367d",
            "99999999999h",
            "1..2s",
            "soon",
        ] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }

    /// The same as `date -u -d … +%s` prints.
    #[test]
    fn moments() {
        let at = |seconds: i64, ns: i64| Ok(Moment::At(seconds * 1_000_000_000 + ns));
        assert_eq!(moment("2026-11-23T14:00:00Z"), at(1_795_442_400, 0));
        assert_eq!(moment("2026-11-23T15:00:00.25+01:00"), at(1_795_442_400, 250_000_000));
        // As gctrace prints it.
        assert_eq!(moment("2026-11-23 14:00:00Z"), at(1_795_442_400, 0));
        assert_eq!(moment("2024-02-29T23:59:59-00:30"), at(1_709_252_999, 0));
        assert_eq!(moment("1970-01-01T00:00:00Z"), at(0, 0));
        assert_eq!(moment("1m30s"), Ok(Moment::After(Duration::from_secs(90))));
        let of_day = |seconds: i64, ns: i64| Ok(Moment::OfDay(seconds * 1_000_000_000 + ns));
        assert_eq!(moment("14:00:41.979Z"), of_day(50_441, 979_000_000));
        assert_eq!(moment(" 00:00:00Z"), of_day(0, 0));
        for zero in ["0", "0s", "0.0s", "0µs", " 0m "] {
            assert_eq!(moment(zero), Ok(Moment::After(Duration::ZERO)), "{zero}");
        }
        for wrong in [
            "2026-11-23T14:00:00",
            "2026-13-01T00:00:00Z",
            "2025-02-29T00:00:00Z",
            "2026-11-23T24:00:00Z",
            "2026-11-23T1:00:00Z",
            "2026-11-23T14:00:00+1",
            "2026-11-23T14:00:00.Z",
            "24:00:00Z",
            "14:00Z",
            "14:00:00+01:00",
            "T",
            "yesterday",
            "",
            "-5s",
            "0y",
            "0..0s",
            ".",
        ] {
            assert!(moment(wrong).is_err(), "{wrong}");
        }
        // What looks like a date is not called a duration with an unknown unit.
        for date in ["14:00", "14:00:41.979", "2026-11-23", "2026-11-23 14:00:41", "23.11.2026 14:00"] {
            let error = moment(date).unwrap_err();
            assert!(error.starts_with("give the date, the time and the time zone"), "{date}: {error}");
        }
    }

    #[test]
    fn shares_and_sizes() {
        assert_eq!((percent("0.5"), percent("100%")), (Ok(5_000), Ok(1_000_000)));
        for wrong in ["", "0", "-1", "101", "NaN", "x"] {
            assert!(percent(wrong).is_err(), "{wrong}");
        }
        assert_eq!(ring("16KiB"), Ok(16 << 10));
        for wrong in ["1", "3MiB", "8192MiB", "x"] {
            assert!(ring(wrong).is_err(), "{wrong}");
        }
        assert_eq!((kept("4MiB"), kept("2 G"), kept("64GiB")), (Ok(4 << 20), Ok(2 << 30), Ok(64 << 30)));
        assert_eq!((kept("500 MB"), kept("1GB")), (Ok(500_000_000), Ok(1_000_000_000)));
        for wrong in ["", "64", "3MiB", "4MB", "65GiB", "-1G", "1.5GiB", "99999999999999G", "64KiB"] {
            assert!(kept(wrong).is_err(), "{wrong}");
        }
        assert_eq!((rate("99"), rate("999Hz")), (Ok(99), Ok(999)));
        for wrong in ["0", "1000", "-1", "x", ""] {
            assert!(rate(wrong).is_err(), "{wrong}");
        }
    }

    /// A port alone is not opened to other hosts.
    #[test]
    fn addresses() {
        for (text, expected) in [
            ("127.0.0.1:9394", "127.0.0.1:9394"),
            ("0.0.0.0:1", "0.0.0.0:1"),
            ("[::1]:9394", "[::1]:9394"),
            (":9394", "127.0.0.1:9394"),
            ("9394", "127.0.0.1:9394"),
            ("localhost:9394", "127.0.0.1:9394"),
        ] {
            assert_eq!(listen(text), Ok(expected.parse().unwrap()), "{text}");
        }
        for wrong in ["", "localhost", "localhost:", "localhost:99999", "127.0.0.1", "no such host:1"] {
            assert!(listen(wrong).is_err(), "{wrong}");
        }
        for wrong in ["127.0.0.1:99999", "[::1]:99999", "localhost:99999", ":99999", "99999"] {
            let error = listen_here(wrong).unwrap_err();
            assert_eq!(error, "`99999` is not a port: ports are numbers up to 65535", "{wrong}");
        }
        assert!(listen_here("x").unwrap_err().contains("127.0.0.1:8080"));
    }
}
