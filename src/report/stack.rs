//! Columns of stacked parts over a row of equal things, as inline SVG.

use std::fmt::Write as _;

use super::chart::{round_step, short};
use super::{axis_titles, escape, every};

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
const LEFT: f64 = 62.0;
const RIGHT: f64 = 4.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 44.0;

impl Stack {
    /// Appends it as a figure.
    pub(super) fn draw(&self, out: &mut String) {
        let title = escape(&self.title);
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let sum = |parts: &Vec<f64>| parts.iter().sum::<f64>();
        let highest = self.columns.iter().map(|c| sum(&c.1));
        let highest = 1.05 * highest.fold(f64::MIN_POSITIVE, f64::max);
        let scale = (bottom - TOP) / highest;
        let wide = (right - LEFT) / self.columns.len().max(1) as f64;
        let gap = if wide > 5.0 { 1.0 } else { 0.0 };
        let _ = writeln!(
            out,
            "<figure class=\"wide\"><figcaption>{title}</figcaption>\n<div class=\"scroll\">\
             <svg class=\"plot\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">"
        );
        let step = round_step(highest / 4.0);
        for i in 0..=(highest / step).floor().min(20.0) as u32 {
            let value = f64::from(i) * step;
            let y = bottom - value * scale;
            let _ = write!(
                out,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 8.0,
                y + 4.0,
                short(value)
            );
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
                        LEFT + c as f64 * wide,
                        bottom - (below + value) * scale
                    );
                }
            }
            let _ = writeln!(
                out,
                "<g class=\"s{}\"><path class=\"bar\" d=\"{path}\"><title>{}</title></path></g>",
                colour % 8,
                escape(name)
            );
        }
        let shown = every(44.0, wide);
        for (c, (label, _)) in self.columns.iter().enumerate().step_by(shown) {
            let _ = write!(
                out,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                LEFT + (c as f64 + 0.5) * wide,
                bottom + 17.0,
                escape(label)
            );
        }
        let _ = write!(
            out,
            "<path class=\"frame\" d=\"M{LEFT} {TOP}V{bottom}H{right}\"/>"
        );
        let middle = ((LEFT + right) / 2.0, (TOP + bottom) / 2.0);
        axis_titles(out, middle, HEIGHT - 8.0, &self.x, &self.y);
        out.push_str("</svg></div>\n<ul class=\"legend\">");
        for (colour, name) in &self.parts {
            let _ = write!(
                out,
                "<li class=\"s{}\"><i class=\"box\"></i>{}</li>",
                colour % 8,
                escape(name)
            );
        }
        out.push_str("</ul></figure>\n");
    }
}
