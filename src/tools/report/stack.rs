//! Draws stacked columns as inline SVG.

use std::fmt::Write as _;

use super::area::{self, Area, COLOURS};
use super::chart::{round_step, short};
use super::{escape, every};

/// Columns.
#[derive(Clone, Debug)]
pub struct Stack {
    /// Above them.
    pub title: String,
    /// What a column is.
    pub x: String,
    /// What is stacked, and its unit.
    pub y: String,
    /// The parts: index of a colour and a name, from the bottom up.
    pub parts: Vec<(usize, String)>,
    /// Their labels and the heights of their parts.
    pub columns: Vec<(String, Vec<f64>)>,
}

const WIDTH: f64 = 1140.0;
const HEIGHT: f64 = 260.0;
const AREA: Area = Area {
    left: 62.0,
    right: WIDTH - 4.0,
    top: 10.0,
    bottom: HEIGHT - 44.0,
};

impl Stack {
    /// Appends it as a figure.
    pub(super) fn draw(&self, out: &mut String) {
        let sum = |parts: &Vec<f64>| parts.iter().sum::<f64>();
        let highest = self.columns.iter().map(|c| sum(&c.1));
        let highest = 1.05 * highest.fold(f64::MIN_POSITIVE, f64::max);
        let scale = (AREA.bottom - AREA.top) / highest;
        let wide = (AREA.right - AREA.left) / self.columns.len().max(1) as f64;
        let gap = if wide > 5.0 { 1.0 } else { 0.0 };
        area::begin(out, &self.title, true, (WIDTH, HEIGHT));
        let step = round_step(highest / 4.0);
        for i in 0..=(highest / step).floor().min(20.0) as u32 {
            let value = f64::from(i) * step;
            let y = AREA.bottom - value * scale;
            AREA.line_across(out, y);
            AREA.label_left(out, y, &short(value));
        }
        for (part, (colour, name)) in self.parts.iter().enumerate() {
            let mut path = String::new();
            for (c, (_, values)) in self.columns.iter().enumerate() {
                let below: f64 = values[..part.min(values.len())].iter().sum();
                let value = values.get(part).copied().unwrap_or(0.0);
                let (w, h) = (wide - gap, value * scale);
                if h > 0.0 {
                    let _ = write!(
                        path,
                        "M{:.1} {:.1}h{w:.1}v{h:.1}h-{w:.1}z",
                        AREA.left + c as f64 * wide,
                        AREA.bottom - (below + value) * scale
                    );
                }
            }
            let _ = writeln!(
                out,
                "<g class=\"s{}\"><path class=\"bar\" d=\"{path}\"><title>{}</title></path></g>",
                colour % COLOURS,
                escape(name)
            );
        }
        let shown = every(44.0, wide);
        for (c, (label, _)) in self.columns.iter().enumerate().step_by(shown) {
            AREA.label_below(out, AREA.left + (c as f64 + 0.5) * wide, label);
        }
        AREA.frame(out);
        AREA.titles(out, &self.x, &self.y);
        let names = self.parts.iter().map(|(colour, name)| (*colour, &**name));
        area::end_with_legend(out, true, names);
    }
}
