//! A picture of a heap: a cell for each page, a band for each slot size.
//!
//! The colour of a cell shows how full its page is, the bar at its foot the share of old objects, and the mark in its
//! corner that an object on it is pinned. Pages are in order of addresses. In a picture of a large heap a cell represents
//! several neighbouring pages.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use gctrace_tunemygc::printable::printable;

use super::report::Report;
use crate::{
    ruby::heap::Page,
    words::{percent, plural},
};

/// Width of the picture, and the margin around it.
const WIDTH: usize = 1000;
const MARGIN: usize = 24;
/// Side of a cell, with its gap.
const CELL: usize = 14;
const GAP: usize = 2;
const COLUMNS: usize = (WIDTH - 2 * MARGIN) / CELL;
/// Maximum number of cells; in a larger heap a cell represents several pages.
const MOST_CELLS: usize = 20_000;
const FONT: &str = "font-family=\"Verdana,DejaVu Sans,sans-serif\"";

/// Occupancy and its colour, from light to dark, so that it is readable in greyscale.
const STEPS: [(&str, &str); 6] = [
    ("empty", "#f4f4f4"),
    ("1-25 %", "#fde0c5"),
    ("26-50 %", "#facba6"),
    ("51-75 %", "#f08f6e"),
    ("76-99 %", "#c8586c"),
    ("full", "#70284a"),
];
const OLD: &str = "#1d6fb8";
const PINNED: &str = "#ffd400";

/// The pages of one cell.
#[derive(Default)]
struct Cell {
    pages: u64,
    slots: u64,
    live: u64,
    old: u64,
    pinned: u64,
}

impl Cell {
    fn of(pages: &[&Page]) -> Self {
        let mut cell = Self::default();
        for page in pages {
            cell.pages += 1;
            cell.slots += u64::from(page.slots);
            cell.live += u64::from(page.live);
            cell.old += u64::from(page.old);
            cell.pinned += u64::from(page.pinned);
        }
        cell
    }

    fn step(&self) -> usize {
        match self.live {
            0 => 0,
            live if live >= self.slots => 5,
            live => (live * 100).div_ceil(self.slots).div_ceil(25).clamp(1, 4) as usize,
        }
    }
}

/// Draws the pages.
pub(super) fn write(out: &mut dyn Write, report: &Report, pages: &[Page]) -> io::Result<()> {
    let mut bands: BTreeMap<u16, Vec<&Page>> = BTreeMap::new();
    for page in pages {
        bands.entry(page.slot_size).or_default().push(page);
    }
    let per_cell = pages.len().div_ceil(MOST_CELLS).max(1);
    let rows = |pages: usize| pages.div_ceil(per_cell).div_ceil(COLUMNS);
    let top = 132;
    let height = top + bands.values().map(|pages| 34 + rows(pages.len()) * CELL).sum::<usize>() + MARGIN;
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>"
    )?;
    header(out, report, per_cell)?;
    let mut y = top;
    for (size, mut pages) in bands {
        pages.sort_by_key(|page| page.start);
        let sum = Cell::of(&pages);
        let text = format!(
            "slots of {size} bytes: {}, {} of {} slots in use ({}), {} old",
            plural(sum.pages, "page"),
            sum.live,
            sum.slots,
            percent(sum.live, sum.slots),
            percent(sum.old, sum.live),
        );
        let text =
            if report.known.bits { text.as_str() } else { text.rsplit_once(',').map_or("", |(t, _)| t) };
        label(out, MARGIN, y + 20, 12, "#222222", text)?;
        y += 28;
        for (index, chunk) in pages.chunks(per_cell).enumerate() {
            let (x, y) = (MARGIN + index % COLUMNS * CELL, y + index / COLUMNS * CELL);
            draw(out, report, &Cell::of(chunk), chunk[0].start, (x, y))?;
        }
        y += rows(pages.len()) * CELL + 6;
    }
    writeln!(out, "</svg>")
}

fn draw(
    out: &mut dyn Write,
    report: &Report,
    cell: &Cell,
    start: u64,
    (x, y): (usize, usize),
) -> io::Result<()> {
    let side = CELL - GAP;
    let old = if report.known.bits { format!(", {} old", cell.old) } else { String::new() };
    let pinned = if report.known.pins { format!(", {} pinned", cell.pinned) } else { String::new() };
    let title = format!("{start:#x}: {} of {} slots in use{old}{pinned}", cell.live, cell.slots);
    write!(
        out,
        "<g><title>{title}</title><rect x=\"{x}\" y=\"{y}\" width=\"{side}\" height=\"{side}\" fill=\"{}\" \
         stroke=\"#cfcfcf\" stroke-width=\".5\"/>",
        STEPS[cell.step()].1
    )?;
    if report.known.bits && cell.old > 0 {
        // At least one pixel: a single old object can keep the page.
        let width = (cell.old as usize * side).div_ceil(cell.live.max(1) as usize).clamp(1, side);
        write!(
            out,
            "<rect x=\"{x}\" y=\"{}\" width=\"{width}\" height=\"3\" fill=\"{OLD}\"/>",
            y + side - 3
        )?;
    }
    if report.known.pins && cell.pinned > 0 {
        write!(
            out,
            "<rect x=\"{}\" y=\"{y}\" width=\"4\" height=\"4\" fill=\"{PINNED}\" stroke=\"#000000\" stroke-width=\".6\"/>",
            x + side - 4
        )?;
    }
    writeln!(out, "</g>")
}

fn header(out: &mut dyn Write, report: &Report, per_cell: usize) -> io::Result<()> {
    let who = &report.who;
    let command = printable(who.command.as_deref().unwrap_or("ruby")).to_string();
    let command: String = command.chars().take(60).collect();
    label(
        out,
        MARGIN,
        38,
        18,
        "#111111",
        &format!("Heap of {command} (pid {}), Ruby {}", who.pid, who.ruby),
    )?;
    let mut line = format!(
        "GC #{}: {}, {} of {} slots free ({}), {} of which a quarter or less is in use",
        report.gc_count[0],
        plural(report.pages, "page"),
        report.free.count,
        report.total,
        percent(report.free.count, report.total),
        plural(report.nearly_empty, "page"),
    );
    if !report.consistent {
        line += "; ";
        line += report.inconsistent;
    }
    label(out, MARGIN, 60, 12, "#444444", &line)?;
    let mut x = MARGIN;
    label(out, x, 88, 12, "#222222", "slots in use:")?;
    x += 90;
    for (name, colour) in STEPS {
        swatch(out, (x, 78), colour)?;
        label(out, x + 17, 88, 12, "#222222", name)?;
        x += 80;
    }
    let mut x = MARGIN;
    if report.known.bits {
        write!(
            out,
            "<rect x=\"{x}\" y=\"102\" width=\"12\" height=\"12\" fill=\"{}\" stroke=\"#cfcfcf\"/>\
             <rect x=\"{x}\" y=\"111\" width=\"8\" height=\"3\" fill=\"{OLD}\"/>",
            STEPS[2].1
        )?;
        label(out, x + 17, 112, 12, "#222222", "bar at the foot: the share of old objects")?;
        x += 300;
    }
    if report.known.pins {
        write!(
            out,
            "<rect x=\"{x}\" y=\"102\" width=\"12\" height=\"12\" fill=\"{}\" stroke=\"#cfcfcf\"/>\
             <rect x=\"{}\" y=\"102\" width=\"4\" height=\"4\" fill=\"{PINNED}\" stroke=\"#000000\" stroke-width=\".6\"/>",
            STEPS[2].1,
            x + 8
        )?;
        label(out, x + 17, 112, 12, "#222222", "corner: something on it is pinned")?;
        x += 250;
    }
    let cell =
        if per_cell == 1 { "a cell is a page".to_owned() } else { format!("a cell is {per_cell} pages") };
    label(out, x, 112, 12, "#222222", &format!("{cell}, in the order of addresses"))
}

fn swatch(out: &mut dyn Write, (x, y): (usize, usize), colour: &str) -> io::Result<()> {
    writeln!(
        out,
        "<rect x=\"{x}\" y=\"{y}\" width=\"12\" height=\"12\" fill=\"{colour}\" stroke=\"#cfcfcf\"/>"
    )
}

/// Writes escaped text: the name of a command may contain anything.
fn label(out: &mut dyn Write, x: usize, y: usize, size: usize, colour: &str, text: &str) -> io::Result<()> {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    writeln!(out, "<text x=\"{x}\" y=\"{y}\" font-size=\"{size}\" fill=\"{colour}\" {FONT}>{text}</text>")
}
