//! A report of measurements as one HTML file that needs nothing else: text, plots as inline SVG, a table.
//!
//! The plots take their colours from the page's style sheet, which follows the reader's choice of light or dark.

use std::fmt::Write as _;

mod area;
mod bars;
mod chart;
pub mod decode;
mod grid;
pub mod hlog;
pub mod machine;
pub mod mirrors;
pub mod picture;
mod pipeline;
pub mod profile;
mod stack;

pub use bars::{Bar, Bars};
pub use chart::{Axis, Chart, Scale, Series};
pub use grid::Grid;
pub use stack::Stack;

/// Text that may stand in HTML or in an attribute.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}

/// Of labels that are `step` apart and need `room` each, the distance between two that are shown.
fn every(room: f64, step: f64) -> usize {
    ((room / step).ceil() as usize).max(1)
}

/// A table of text; the first row is its head.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Titles of the columns.
    pub head: Vec<String>,
    /// As many cells in each.
    pub rows: Vec<Vec<String>>,
}

/// A report, filled from top to bottom.
#[derive(Clone, Debug)]
pub struct Page {
    title: String,
    body: String,
}

impl Page {
    /// An empty report.
    pub fn new(title: &str) -> Page {
        Page {
            title: title.to_owned(),
            body: format!("<h1>{}</h1>\n", escape(title)),
        }
    }

    /// What the reader should take away, set off from the rest.
    pub fn verdict(&mut self, sentences: &[String]) {
        self.body.push_str("<div class=\"verdict\">");
        for sentence in sentences {
            let _ = write!(self.body, "<p>{}</p>", escape(sentence));
        }
        self.body.push_str("</div>\n");
    }

    /// A heading.
    pub fn section(&mut self, title: &str) {
        let _ = writeln!(self.body, "<h2>{}</h2>", escape(title));
    }

    /// A paragraph.
    pub fn text(&mut self, text: &str) {
        let _ = writeln!(self.body, "<p class=\"note\">{}</p>", escape(text));
    }

    /// Names and values.
    pub fn facts(&mut self, facts: &[(String, String)]) {
        self.body.push_str("<dl>");
        for (name, value) in facts {
            let _ = write!(
                self.body,
                "<div><dt>{}</dt><dd>{}</dd></div>",
                escape(name),
                escape(value)
            );
        }
        self.body.push_str("</dl>\n");
    }

    /// Plots, as many side by side as there is room for.
    pub fn charts(&mut self, charts: &[Chart]) {
        self.body.push_str("<div class=\"charts\">\n");
        for chart in charts {
            chart.draw(&mut self.body);
        }
        self.body.push_str("</div>\n");
    }

    /// Numbers that sum everything up, each with its name.
    pub fn tiles(&mut self, tiles: &[(String, String)]) {
        self.body.push_str("<div class=\"tiles\">");
        for (value, name) in tiles {
            let (value, name) = (escape(value), escape(name));
            let _ = write!(self.body, "<div><b>{value}</b><span>{name}</span></div>");
        }
        self.body.push_str("</div>\n");
    }

    /// A map of cells.
    pub fn grid(&mut self, grid: &Grid) {
        grid.draw(&mut self.body);
    }

    /// Stacked columns.
    pub fn stack(&mut self, stack: &Stack) {
        stack.draw(&mut self.body);
    }

    /// Bars.
    pub fn bars(&mut self, bars: &Bars) {
        bars.draw(&mut self.body);
    }

    /// A table, numbers to the right.
    pub fn table(&mut self, table: &Table) {
        let row = |tag: &str, cells: &[String]| -> String {
            let cell = |text: &String| {
                let number = text.starts_with(|c: char| c.is_ascii_digit() || c == '-');
                let class = if number { " class=\"n\"" } else { "" };
                format!("<{tag}{class}>{}</{tag}>", escape(text))
            };
            format!("<tr>{}</tr>\n", cells.iter().map(cell).collect::<String>())
        };
        let body: String = table.rows.iter().map(|cells| row("td", cells)).collect();
        let _ = writeln!(
            self.body,
            "<div class=\"scroll\"><table><thead>{}</thead><tbody>{body}</tbody></table></div>",
            row("th", &table.head)
        );
    }

    /// The file.
    pub fn html(&self) -> String {
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n<title>{}</title>\n\
             <style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{}</main>\n</body>\n</html>\n",
            escape(&self.title),
            self.body
        )
    }
}

/// Colours that are told apart with any kind of colour vision, on white and on nearly black.
const STYLE: &str = include_str!("report/style.css");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_needs_nothing_else_and_no_name_breaks_it() {
        let mut page = Page::new("a <b> & \"c\"");
        page.verdict(&["<script>alert(1)</script>".into()]);
        page.facts(&[("<x>".into(), "</dd>".into())]);
        page.table(&Table {
            head: vec!["<h>".into()],
            rows: vec![vec!["1 < 2".into()]],
        });
        page.charts(&[Chart {
            title: "<t>".into(),
            x: Axis::new("<x>", Scale::Linear),
            y: Axis::new("<y>", Scale::Log),
            series: vec![Series {
                name: "</svg>".into(),
                points: vec![(1.0, f64::NAN), (2.0, 0.0), (f64::INFINITY, 3.0)],
            }],
        }]);
        let html = page.html();
        for wrong in [
            "<script", "<b>", "<x>", "<t>", "<h>", "http:", "https:", "NaN", "inf",
        ] {
            assert!(!html.contains(wrong), "{wrong}");
        }
        assert_eq!(html.matches("</svg>").count(), 1);
        assert!(html.contains("1 &lt; 2"));
    }
}
