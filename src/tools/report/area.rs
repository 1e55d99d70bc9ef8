//! Draws the shared parts of plots: the figure, the axes with lines and labels, the legend.

use std::fmt::Write as _;

use super::escape;

/// Colours that there are.
pub(super) const COLOURS: usize = 8;

/// The part of a picture that has the data, between its edges.
#[derive(Clone, Copy, Debug)]
pub(super) struct Area {
    pub left: f64,
    pub right: f64,
    pub top: f64,
    pub bottom: f64,
}

impl Area {
    /// A line across at the height `y`.
    pub fn line_across(&self, out: &mut String, y: f64) {
        let (left, right) = (self.left, self.right);
        let _ = write!(
            out,
            "<line class=\"grid\" x1=\"{left}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>"
        );
    }

    /// A line from top to bottom at `x`.
    pub fn line_down(&self, out: &mut String, x: f64) {
        let (top, bottom) = (self.top, self.bottom);
        let _ = write!(
            out,
            "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{bottom:.1}\"/>"
        );
    }

    /// A label to the left, at the height `y`.
    pub fn label_left(&self, out: &mut String, y: f64, label: &str) {
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            self.left - 8.0,
            y + 4.0,
            escape(label)
        );
    }

    /// A label below, at `x`.
    pub fn label_below(&self, out: &mut String, x: f64, label: &str) {
        let _ = writeln!(
            out,
            "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            self.bottom + 17.0,
            escape(label)
        );
    }

    /// The left and the lower edge.
    pub fn frame(&self, out: &mut String) {
        let Area {
            left,
            right,
            top,
            bottom,
        } = self;
        let _ = write!(
            out,
            "<path class=\"frame\" d=\"M{left} {top}V{bottom:.1}H{right}\"/>"
        );
    }

    /// The titles of the axes: x below the labels, y at the left edge of the picture.
    pub fn titles(&self, out: &mut String, x: &str, y: &str) {
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
             <text transform=\"translate(14 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            (self.left + self.right) / 2.0,
            self.bottom + 37.0,
            escape(x),
            (self.top + self.bottom) / 2.0,
            escape(y)
        );
    }
}

/// Begins a figure with a picture of this size. A wide one is scrolled where there is no room for it.
pub(super) fn begin(out: &mut String, title: &str, wide: bool, (width, height): (f64, f64)) {
    let title = escape(title);
    let (figure, picture) = match wide {
        true => (
            "<figure class=\"wide\">",
            "<div class=\"scroll\"><svg class=\"plot\"",
        ),
        false => ("<figure>", "<svg"),
    };
    let _ = writeln!(
        out,
        "{figure}<figcaption>{title}</figcaption>\n\
         {picture} viewBox=\"0 0 {width} {height:.0}\" role=\"img\" aria-label=\"{title}\">"
    );
}

/// Ends the figure with a legend: indices of colours, and names. The marks are boxes where areas are filled.
pub(super) fn end_with_legend<'a>(
    out: &mut String,
    wide: bool,
    names: impl Iterator<Item = (usize, &'a str)>,
) {
    let (picture, mark) = match wide {
        true => ("</svg></div>", "<i class=\"box\"></i>"),
        false => ("</svg>", "<i></i>"),
    };
    let _ = write!(out, "{picture}\n<ul class=\"legend\">");
    for (colour, name) in names {
        let _ = write!(
            out,
            "<li class=\"s{}\">{mark}{}</li>",
            colour % COLOURS,
            escape(name)
        );
    }
    out.push_str("</ul></figure>\n");
}
