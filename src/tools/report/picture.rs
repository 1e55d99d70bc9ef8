//! Writes charts as a picture of their own, for a document.

use std::fmt::Write as _;

use super::chart::{Chart, HEIGHT, WIDTH};

/// What the page's style sheet says of charts, in both schemes.
const STYLE: &str = "\
text { fill: #5c6570; font: 12px system-ui, sans-serif; } .grid { stroke: #e3e5e8; } .frame { stroke: #5c6570; fill: none; } \
.curve { stroke: #0072b2; stroke-width: 2; fill: none; } .dot { fill: #0072b2; } \
@media (prefers-color-scheme: dark) { text { fill: #9aa4af; } .grid { stroke: #333a41; } .frame { stroke: #9aa4af; } \
.curve { stroke: #56b4e9; } .dot { fill: #56b4e9; } }";

/// Charts with one series each, side by side.
pub fn svg(charts: &[Chart]) -> String {
    let width = WIDTH * charts.len() as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {HEIGHT}\">\n<style>{STYLE}</style>\n"
    );
    for (i, chart) in charts.iter().enumerate() {
        // A string takes everything.
        let _ = writeln!(out, "<g transform=\"translate({} 0)\">", WIDTH * i as f64);
        chart.plot(&mut out);
        out.push_str("</g>\n");
    }
    out + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::super::{Axis, Scale, Series};
    use super::*;

    #[test]
    fn charts_are_side_by_side() {
        let chart = |name: &str| Chart {
            title: String::new(),
            x: Axis::new("streams", Scale::Linear),
            y: Axis::new(name, Scale::Linear),
            series: vec![Series {
                name: name.to_owned(),
                points: vec![(1.0, 2.0), (2.0, 3.0)],
            }],
        };
        let text = svg(&[chart("left & low"), chart("right")]);
        assert!(text.contains("left &amp; low") && text.contains("translate(560 0)"));
        assert_eq!(text.matches("<circle").count(), 4);
        assert_eq!(text.matches("<g").count(), text.matches("</g>").count());
        assert!(!text.contains("figure"));
    }
}
