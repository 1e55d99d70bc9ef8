//! Draws horizontal stacked bars as inline SVG.

use std::fmt::Write as _;

use super::area::{self, COLOURS};
use super::escape;

/// One bar.
#[derive(Clone, Debug)]
pub struct Bar {
    /// At its left.
    pub label: String,
    /// Index of a colour and a length, from left to right.
    pub parts: Vec<(usize, f64)>,
    /// A comparison, not a measurement.
    pub faint: bool,
    /// At its right.
    pub note: String,
}

/// Bars of one unit.
#[derive(Clone, Debug)]
pub struct Bars {
    /// Above them.
    pub title: String,
    /// From top to bottom.
    pub bars: Vec<Bar>,
}

const WIDTH: f64 = 1000.0;
const ROW: f64 = 46.0;
/// Of the bars; the rest is for the notes.
const LONGEST: f64 = 800.0;

impl Bars {
    /// Appends them as a figure.
    pub(super) fn draw(&self, out: &mut String) {
        let height = ROW * self.bars.len() as f64;
        area::begin(out, &self.title, false, (WIDTH, height));
        let sum = |bar: &Bar| bar.parts.iter().map(|part| part.1).sum::<f64>();
        let longest = self.bars.iter().map(sum).fold(f64::MIN_POSITIVE, f64::max);
        for (i, bar) in self.bars.iter().enumerate() {
            let top = i as f64 * ROW;
            let _ = write!(
                out,
                "<text class=\"name\" x=\"0\" y=\"{:.1}\">{}</text>",
                top + 15.0,
                escape(&bar.label)
            );
            let mut x = 0.0;
            for (colour, value) in &bar.parts {
                let width = LONGEST * value.max(0.0) / longest;
                let faint = if bar.faint { " faint" } else { "" };
                let _ = write!(
                    out,
                    "<g class=\"s{}\"><rect class=\"bar{faint}\" x=\"{x:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"16\"/></g>",
                    colour % COLOURS,
                    top + 21.0
                );
                x += width;
            }
            let _ = writeln!(
                out,
                "<text class=\"name\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                x + 10.0,
                top + 34.0,
                escape(&bar.note)
            );
        }
        out.push_str("</svg></figure>\n");
    }
}
