//! Percentages of rows. The drawing library computes them from values rounded to whole units (one sample of four was 24.75
//! %), and does not apply the unit to changes (they were a million times too high). The drawn widths have the exact values.

use std::fmt::Write as _;

/// Replaces the percentages of the graph by exact ones; `factor` is its unit per unit of its lines. An unexpected row is left unchanged.
pub(super) fn exact(svg: &str, factor: f64) -> String {
    let total = number(svg, "total_samples=\"").unwrap_or_default();
    let mut out = String::with_capacity(svg.len());
    let mut rest = svg;
    while let Some(at) = rest.find("<title>") {
        let (before, row) = rest.split_at(at + "<title>".len());
        out.push_str(before);
        let length = row.find("</title>").unwrap_or(row.len());
        let (title, after) = row.split_at(length);
        // Its rectangle comes next.
        let ns = after.split('>').nth(1).and_then(|rectangle| number(rectangle, "fg:w=\""));
        match ns.filter(|_| total > 0.0).and_then(|ns| corrected(title, ns * 100.0 / total, factor)) {
            Some(title) => out.push_str(&title),
            None => out.push_str(title),
        }
        rest = after;
    }
    out + rest
}

/// The number after `before`.
fn number(text: &str, before: &str) -> Option<f64> {
    let (_, rest) = text.split_once(before)?;
    rest.split_once('"')?.0.parse().ok()
}

/// `NAME (10 ms, 24.75%)` or `NAME (10 ms, 24.75%; +3000000.00%)` with this percentage, and with the unit applied to the change.
fn corrected(title: &str, percent: f64, factor: f64) -> Option<String> {
    let (head, shares) = title.strip_suffix("%)")?.rsplit_once(", ")?;
    let change = shares.split_once("%; ").map(|(_, change)| change);
    let mut text = format!("{head}, {percent:.2}%");
    if let Some(change) = change {
        let change = change.parse::<f64>().ok()? * factor;
        // Zero has no sign.
        let _infallible =
            if change.abs() < 0.005 { text.write_str("; 0.00%") } else { write!(text, "; {change:+.2}%") };
    }
    Some(text + ")")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One sample of four, all samples, and changes; names with numbers and anything that is not a row are left unchanged.
    #[test]
    fn rows() {
        let row = |title: &str, width: u64| {
            format!("<g><title>{title}</title><rect x=\"1\" fg:x=\"0\" fg:w=\"{width}\"/><text>a</text></g>")
        };
        let graph = |rows: &[(&str, u64)]| {
            let rows: String = rows.iter().map(|(title, width)| row(title, *width)).collect();
            format!("<svg><title>own</title><svg total_samples=\"40404040\">{rows}</svg></svg>")
        };
        let drawn = graph(&[
            ("all (40 ms, 100%)", 40_404_040),
            ("ruby (2897) (40 ms, 99.00%)", 40_404_040),
            ("a, 5.00%) (x (10 ms, 24.75%)", 10_101_010),
            ("b (10 ms of B, 24.75%; +2500000.00%)", 10_101_010),
            ("c (10 ms of B, 24.75%; -130000.00%)", 10_101_010),
            ("d (10 ms of B, 24.75%; 0.00%)", 10_101_010),
            ("e (10 ms of B, 24.75%; +4000.00%)", 10_101_010),
        ]);
        let expected = graph(&[
            ("all (40 ms, 100.00%)", 40_404_040),
            ("ruby (2897) (40 ms, 100.00%)", 40_404_040),
            ("a, 5.00%) (x (10 ms, 25.00%)", 10_101_010),
            ("b (10 ms of B, 25.00%; +2.50%)", 10_101_010),
            ("c (10 ms of B, 25.00%; -0.13%)", 10_101_010),
            ("d (10 ms of B, 25.00%; 0.00%)", 10_101_010),
            ("e (10 ms of B, 25.00%; 0.00%)", 10_101_010),
        ]);
        assert_eq!(exact(&drawn, 1e-6), expected);
        assert_eq!(exact("<svg><title>", 1.0), "<svg><title>");
    }
}
