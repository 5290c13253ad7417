//! Formats figures for people.

/// Formats bytes in the largest unit that leaves a number of at least 1.
pub fn bytes(bytes: u64) -> String {
    let units = [(1_u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|(size, _)| bytes >= *size) {
        Some((size, unit)) => format!("{:.1} {unit}", bytes as f64 / size as f64),
        None => format!("{bytes} B"),
    }
}

/// Formats a count with its thousands separated.
pub fn count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// Formats a count with its noun: `1 application`, `1 234 applications`.
pub fn counted(n: u64, one: &str, many: &str) -> String {
    if n == 1 { format!("1 {one}") } else { format!("{} {many}", count(n)) }
}

/// Formats how long ago something happened, in the largest unit.
pub fn ago(seconds: f64) -> String {
    let (length, name) = unit(seconds);
    format!("{:.0} {name} ago", (seconds / length).floor().max(0.0))
}

/// Formats an upper bound on how long ago something happened: less than one unit more.
pub fn since(seconds: f64) -> String {
    let (length, name) = unit(seconds);
    format!("< {:.0} {name} ago", (seconds / length).floor().max(0.0) + 1.0)
}

fn unit(seconds: f64) -> (f64, &'static str) {
    let units = [(86_400.0, "d"), (3600.0, "h"), (60.0, "min")];
    units.into_iter().find(|(length, _)| seconds >= *length).unwrap_or((1.0, "s"))
}

/// Formats a share (0 to 1) in percent.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

#[cfg(test)]
mod tests {
    /// Units and thousands separators.
    #[test]
    fn figures() {
        assert_eq!([0, 1023, 1024, 3 << 29].map(super::bytes), ["0 B", "1023 B", "1.0 KiB", "1.5 GiB"]);
        assert_eq!(
            [7, 999, 1000, 1_234_567].map(super::count),
            ["7", "999", "1\u{202f}000", "1\u{202f}234\u{202f}567"]
        );
        let apps = |n| super::counted(n, "application", "applications");
        assert_eq!([0, 1, 1000].map(apps), ["0 applications", "1 application", "1\u{202f}000 applications"]);
        assert_eq!(
            [-5.0, 59.0, 60.0, 86_400.0].map(super::ago),
            ["0 s ago", "59 s ago", "1 min ago", "1 d ago"]
        );
        assert_eq!(
            [-5.0, 59.0, 60.0, 86_400.0].map(super::since),
            ["< 1 s ago", "< 60 s ago", "< 2 min ago", "< 2 d ago"]
        );
        assert_eq!(super::percent(0.1234), "12.3 %");
    }
}
