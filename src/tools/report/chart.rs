//! Draws line charts as inline SVG.

use std::fmt::Write as _;

use super::area::{self, Area, COLOURS};
use super::escape;

/// How values become places on an axis.
#[derive(Clone, Debug, PartialEq)]
pub enum Scale {
    /// In proportion, from 0.
    Linear,
    /// By their logarithm.
    Log,
    /// By their logarithm, marked only at these values, with these words.
    Marked(Vec<(f64, String)>),
    /// Quantiles from 0 to below 1, so that each further nine has the same width: the tail is what one looks for.
    Percentile,
}

/// One axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    /// What it shows, and in what unit.
    pub label: String,
    /// How.
    pub scale: Scale,
}

impl Axis {
    /// An axis.
    pub fn new(label: &str, scale: Scale) -> Axis {
        Axis {
            label: label.to_owned(),
            scale,
        }
    }

    /// The place of a value, in a unit of the axis's own; `None` where it has none.
    fn place(&self, value: f64) -> Option<f64> {
        let place = match self.scale {
            Scale::Linear => value,
            Scale::Log | Scale::Marked(_) => value.log2(),
            Scale::Percentile => -(1.0 - value).log10(),
        };
        place.is_finite().then_some(place)
    }

    /// First and last place of the axis for these values.
    fn span(&self, values: impl Iterator<Item = f64>) -> (f64, f64) {
        let places = values.filter_map(|value| self.place(value));
        let (mut low, mut high) = places.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), p| {
            (a.min(p), b.max(p))
        });
        if low > high {
            (low, high) = (0.0, 1.0);
        }
        match self.scale {
            Scale::Linear => (0.0, if high > 0.0 { 1.08 * high } else { 1.0 }),
            Scale::Percentile => (0.0, high.max(1.0)),
            Scale::Log => (low - 0.15, (high + 0.15).max(low + 1.0)),
            // Room at the sides, so that the first and last mark have it.
            Scale::Marked(_) => {
                let room = 0.06 * (high - low).max(1.0);
                (low - room, high + room)
            }
        }
    }

    /// Values to mark, with words.
    fn ticks(&self, low: f64, high: f64) -> Vec<(f64, String)> {
        match &self.scale {
            Scale::Marked(marks) => marks.clone(),
            Scale::Linear => {
                let step = round_step((high - low) / 5.0);
                let count = (high / step).floor().min(20.0) as u32;
                (0..=count)
                    .map(|i| (f64::from(i) * step, short(f64::from(i) * step)))
                    .collect()
            }
            Scale::Log => {
                let decades =
                    (low * 2f64.log10()).floor() as i32..=(high * 2f64.log10()).ceil() as i32;
                // With few decades 2 and 5 are marked too.
                let within: &[f64] = if high - low < 14.0 {
                    &[1.0, 2.0, 5.0]
                } else {
                    &[1.0]
                };
                decades
                    .flat_map(|d| within.iter().map(move |m| m * 10f64.powi(d)))
                    .filter(|v| (low..=high).contains(&v.log2()))
                    .map(|v| (v, short(v)))
                    .collect()
            }
            Scale::Percentile => {
                let nines = (1..=high.floor() as i32).map(|n| 1.0 - 10f64.powi(-n));
                [0.0, 0.5]
                    .into_iter()
                    .chain(nines)
                    .map(|q| (q, format!("{}%", short(100.0 * q))))
                    .collect()
            }
        }
    }
}

/// 1, 2 or 5 times a power of ten, at least `step`.
pub(super) fn round_step(step: f64) -> f64 {
    let power = 10f64.powf(step.max(f64::MIN_POSITIVE).log10().floor());
    let round = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .find(|m| m * power >= step);
    round.unwrap_or(10.0) * power
}

/// Without digits that say nothing.
pub(super) fn short(value: f64) -> String {
    let text = format!("{value:.6}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A line through points.
#[derive(Clone, Debug)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// (x, y). Those that have no place on an axis are left out.
    pub points: Vec<(f64, f64)>,
}

/// Lines over two axes.
#[derive(Clone, Debug)]
pub struct Chart {
    /// Above it.
    pub title: String,
    /// To the right.
    pub x: Axis,
    /// Upwards.
    pub y: Axis,
    /// The lines.
    pub series: Vec<Series>,
}

pub(super) const WIDTH: f64 = 560.0;
pub(super) const HEIGHT: f64 = 320.0;
const AREA: Area = Area {
    left: 62.0,
    right: WIDTH - 14.0,
    top: 10.0,
    bottom: HEIGHT - 46.0,
};

/// Places of an axis on the picture.
struct Lane<'a> {
    axis: &'a Axis,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Lane<'_> {
    fn at(&self, value: f64) -> Option<f64> {
        let part = (self.axis.place(value)? - self.low) / (self.high - self.low);
        let at = self.from + part * (self.to - self.from);
        at.is_finite().then_some(at)
    }
}

impl Chart {
    /// Appends it as a figure.
    pub(super) fn draw(&self, out: &mut String) {
        area::begin(out, &self.title, false, (WIDTH, HEIGHT));
        self.plot(out);
        let names = self.series.iter().map(|series| series.name.as_str());
        area::end_with_legend(out, false, names.enumerate());
    }

    /// Appends axes and lines.
    pub(super) fn plot(&self, out: &mut String) {
        let points = || self.series.iter().flat_map(|s| &s.points);
        let lane = |axis, (low, high), from, to| Lane {
            axis,
            low,
            high,
            from,
            to,
        };
        let x_span = self.x.span(points().map(|p| p.0));
        let x = lane(&self.x, x_span, AREA.left, AREA.right);
        let y_span = self.y.span(points().map(|p| p.1));
        let y = lane(&self.y, y_span, AREA.bottom, AREA.top);
        for (value, label) in self.y.ticks(y.low, y.high) {
            if let Some(at) = y.at(value) {
                AREA.line_across(out, at);
                AREA.label_left(out, at, &label);
            }
        }
        for (value, label) in self.x.ticks(x.low, x.high) {
            if let Some(at) = x.at(value) {
                AREA.line_down(out, at);
                AREA.label_below(out, at, &label);
            }
        }
        AREA.frame(out);
        AREA.titles(out, &self.x.label, &self.y.label);
        for (i, series) in self.series.iter().enumerate() {
            self.line(out, i, series, &x, &y);
        }
    }

    fn line(&self, out: &mut String, i: usize, series: &Series, x: &Lane, y: &Lane) {
        let places: Vec<(f64, f64)> = (series.points.iter())
            .filter_map(|point| Some((x.at(point.0)?, y.at(point.1)?)))
            .collect();
        let path: String = (places.iter().enumerate())
            .map(|(n, (x, y))| format!("{}{x:.1} {y:.1}", if n == 0 { 'M' } else { 'L' }))
            .collect();
        let (class, name) = (i % COLOURS, escape(&series.name));
        let _ = writeln!(
            out,
            "<g class=\"s{class}\"><path class=\"curve\" d=\"{path}\"><title>{name}</title></path>"
        );
        // Points that were measured are marked; a curve of percentiles is dense enough.
        if places.len() <= 12 {
            for ((px, py), (_, value)) in places.iter().zip(&series.points) {
                let _ = write!(
                    out,
                    "<circle class=\"dot\" cx=\"{px:.1}\" cy=\"{py:.1}\" r=\"3.5\"><title>{name}: {}</title></circle>",
                    short((value * 100.0).round() / 100.0)
                );
            }
        }
        out.push_str("</g>\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_nine_has_the_same_width() {
        let axis = Axis::new("", Scale::Percentile);
        let places: Vec<f64> = [0.0, 0.9, 0.99, 0.999]
            .map(|q| axis.place(q).unwrap())
            .into();
        for (place, nines) in places.iter().zip(0u8..) {
            assert!((place - f64::from(nines)).abs() < 1e-9, "{places:?}");
        }
        assert_eq!(axis.place(1.0), None);
        let labels: Vec<String> = axis.ticks(0.0, 3.2).into_iter().map(|t| t.1).collect();
        assert_eq!(labels, ["0%", "50%", "90%", "99%", "99.9%"]);
    }

    #[test]
    fn ticks_are_round_and_inside() {
        let linear = Axis::new("", Scale::Linear).ticks(0.0, 1944.0);
        assert_eq!(linear.last().unwrap(), &(1500.0, "1500".to_owned()));
        let log = Axis::new("", Scale::Log).ticks(0.3f64.log2(), 70f64.log2());
        let labels: Vec<&str> = log.iter().map(|t| &*t.1).collect();
        assert_eq!(labels, ["0.5", "1", "2", "5", "10", "20", "50"]);
    }
}
