//! Draws a heat map as inline SVG.

use std::fmt::Write as _;

use super::area::{self, Area, COLOURS};
use super::{escape, every};

/// A map.
#[derive(Clone, Debug)]
pub struct Grid {
    /// Above it.
    pub title: String,
    /// What a row is.
    pub row: String,
    /// What a column is.
    pub column: String,
    /// Labels of the rows, from top to bottom.
    pub rows: Vec<String>,
    /// Labels of the columns.
    pub columns: Vec<String>,
    /// `[rows][columns]` from 0 to 1; `None` where there is nothing to say.
    pub cells: Vec<Vec<Option<f64>>>,
    /// Index of the colour.
    pub colour: usize,
    /// What the faintest and the strongest cells mean.
    pub ends: (String, String),
}

const WIDTH: f64 = 1140.0;
const LEFT: f64 = 62.0;
const TOP: f64 = 6.0;
const BOTTOM: f64 = 44.0;
/// Steps between nothing and everything: cells of one step are one path, which keeps the file small.
const STEPS: usize = 10;

impl Grid {
    /// Appends it as a figure.
    pub(super) fn draw(&self, out: &mut String) {
        let (rows, columns) = (self.rows.len().max(1), self.columns.len().max(1));
        let wide = (WIDTH - LEFT - 4.0) / columns as f64;
        let high = (320.0 / rows as f64).clamp(3.0, 26.0);
        let area = Area {
            left: LEFT,
            right: LEFT + wide * columns as f64,
            top: TOP,
            bottom: TOP + high * rows as f64,
        };
        area::begin(out, &self.title, true, (WIDTH, area.bottom + BOTTOM));
        let _ = write!(
            out,
            "<rect class=\"none\" x=\"{LEFT}\" y=\"{TOP}\" width=\"{:.1}\" height=\"{:.1}\"/>",
            area.right - area.left,
            area.bottom - area.top
        );
        // Gaps where cells are large enough to have them.
        let gap = if wide > 6.0 && high > 6.0 { 1.0 } else { 0.0 };
        let mut paths = vec![String::new(); STEPS + 1];
        for (r, row) in self.cells.iter().enumerate() {
            for (c, cell) in row.iter().enumerate() {
                let Some(value) = cell.filter(|value| value.is_finite()) else {
                    continue;
                };
                let step = (value.clamp(0.0, 1.0) * STEPS as f64).round() as usize;
                let (w, h) = (wide - gap, high - gap);
                let _ = write!(
                    paths[step],
                    "M{:.1} {:.1}h{w:.1}v{h:.1}h-{w:.1}z",
                    LEFT + c as f64 * wide,
                    TOP + r as f64 * high
                );
            }
        }
        let _ = write!(out, "<g class=\"s{}\">", self.colour % COLOURS);
        for (step, path) in paths.iter().enumerate().filter(|(_, p)| !p.is_empty()) {
            let _ = write!(
                out,
                "<path class=\"cell\" fill-opacity=\"{:.2}\" d=\"{path}\"/>",
                opacity(step)
            );
        }
        out.push_str("</g>\n");
        for (r, label) in self.rows.iter().enumerate().step_by(every(15.0, high)) {
            area.label_left(out, TOP + (r as f64 + 0.5) * high, label);
        }
        for (c, label) in self.columns.iter().enumerate().step_by(every(44.0, wide)) {
            area.label_below(out, LEFT + (c as f64 + 0.5) * wide, label);
        }
        area.titles(out, &self.column, &self.row);
        out.push_str("</svg></div>\n");
        let _ = write!(
            out,
            "<p class=\"scale s{}\">{} ",
            self.colour % COLOURS,
            escape(&self.ends.0)
        );
        for step in (0..=STEPS).step_by(2) {
            let _ = write!(out, "<i style=\"opacity:{:.2}\"></i>", opacity(step));
        }
        let _ = writeln!(out, " {}</p></figure>", escape(&self.ends.1));
    }
}

fn opacity(step: usize) -> f64 {
    0.07 + 0.93 * step as f64 / STEPS as f64
}
