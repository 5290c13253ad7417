//! Values of flags.

use std::{
    net::{Ipv4Addr, SocketAddr, ToSocketAddrs as _},
    time::Duration,
};

/// Pids given by one flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pids(pub Vec<u32>);

/// A year is more than any run takes.
const LONGEST: Duration = Duration::from_hours(366 * 24);

/// Pids, separated by commas or white space: `4242`, `1,2`, what `pgrep` prints.
pub(super) fn pids(text: &str) -> Result<Pids, String> {
    let parse = |word: &str| match word.parse::<u32>() {
        Ok(pid) if pid > 0 => Ok(pid),
        _ => Err(format!("`{word}` is no pid; programs are selected by name with --name")),
    };
    let pids: Vec<u32> = words(text).map(parse).collect::<Result<_, _>>()?;
    if pids.is_empty() {
        return Err("there is no pid in it; is the program running?".to_owned());
    }
    Ok(Pids(pids))
}

/// The words of a list, separated by commas or white space.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| c == ',' || c.is_whitespace()).filter(|word| !word.is_empty())
}

/// A time: `500ms`, `30s`, `1.5m`, `1m30s`, `1d`; without a unit, seconds.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    const USAGE: &str = "give a time such as 500ms, 30s, 1m30s, 2h or 1d";
    let mut rest = text.trim();
    let mut sum = 0.0;
    while !rest.is_empty() {
        let split = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, tail) = rest.split_at(split);
        let end = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(end);
        let seconds = match unit.trim() {
            "ms" => 0.001,
            "s" | "sec" => 1.0,
            // A number alone cannot be a part of a longer time.
            "" if number.len() == text.trim().len() => 1.0,
            "m" | "min" => 60.0,
            "h" => 3600.0,
            "d" => 86_400.0,
            "" => return Err(USAGE.to_owned()),
            unit => return Err(format!("unknown unit `{unit}`; use ms, s, m, h or d")),
        };
        let number: f64 = number.parse().map_err(|_| USAGE.to_owned())?;
        sum += number * seconds;
        rest = tail.trim_start();
    }
    let time = Duration::try_from_secs_f64(sum).ok().filter(|time| *time <= LONGEST);
    match time {
        Some(Duration::ZERO) => Err("give a time above zero, such as 30s".to_owned()),
        Some(time) => Ok(time),
        None => Err("give at most 366d; without a limit a run lasts until Ctrl-C".to_owned()),
    }
}

/// Percent as millionths.
pub(super) fn percent(text: &str) -> Result<u64, String> {
    let percent: f64 =
        text.trim_end_matches('%').parse().map_err(|_| "give a number, such as 0.5".to_owned())?;
    if !(0.001..=100.0).contains(&percent) {
        return Err("give a share from 0.001 to 100 percent".to_owned());
    }
    Ok((percent * 10_000.0).round() as u64)
}

/// Samples per second and CPU.
pub(super) fn rate(text: &str) -> Result<u32, String> {
    let rate = text.trim_end_matches("Hz").trim().parse().ok().filter(|rate| (1..=999).contains(rate));
    rate.ok_or_else(|| "give a number of samples per second from 1 to 999".to_owned())
}

/// The size of a ring.
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

/// Where to listen: `127.0.0.1:9394`, `[::1]:9394`, `localhost:9394`; a port alone, `9394` or `:9394`, means one on
/// 127.0.0.1, because nothing is opened to other hosts that was not asked for.
pub(super) fn listen(text: &str) -> Result<SocketAddr, String> {
    const USAGE: &str = "give an address and a port, such as 127.0.0.1:9394 or 0.0.0.0:9394 (all interfaces)";
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    if let Ok(port) = text.strip_prefix(':').unwrap_or(text).parse::<u16>() {
        return Ok((Ipv4Addr::LOCALHOST, port).into());
    }
    let Some((host, port)) = text.rsplit_once(':') else { return Err(USAGE.to_owned()) };
    if host.is_empty() || port.parse::<u16>().is_err() {
        return Err(USAGE.to_owned());
    }
    let found: Vec<SocketAddr> =
        text.to_socket_addrs().map_err(|error| format!("`{host}`: {error}; {USAGE}"))?.collect();
    let first = found.iter().find(|address| address.is_ipv4()).or(found.first());
    first.copied().ok_or_else(|| format!("`{host}` has no address; {USAGE}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What pgrep prints, lists, and what is no list of pids.
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
        for wrong in
            ["", "s", "-1s", "0", "0m0s", "1y", "1m30", "1e400s", "367d", "99999999999h", "1..2s", "soon"]
        {
            assert!(duration(wrong).is_err(), "{wrong}");
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
        assert_eq!((rate("99"), rate("999Hz")), (Ok(99), Ok(999)));
        for wrong in ["0", "1000", "-1", "x", ""] {
            assert!(rate(wrong).is_err(), "{wrong}");
        }
    }

    /// A port alone is not open to other hosts.
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
    }
}
