//! Builds the report of `profile`.

use bytesize::ByteSize;

use super::{Axis, Chart, Page, Scale, Series, Table};
use crate::tools::profile::Measurement;

/// What is said about the measurements.
#[derive(Clone, Debug)]
pub struct About<'a> {
    /// What was read.
    pub subject: &'a str,
    /// What it means.
    pub verdict: &'a [String],
    /// On what it was measured, see [`super::machine::facts`].
    pub facts: &'a [(String, String)],
    /// How the page cache was kept out.
    pub cache: &'a [String],
    /// All runs.
    pub table: Table,
}

/// The report.
pub fn page(about: About<'_>, runs: &[Measurement]) -> Page {
    let mut page = Page::new(&format!("Reads of {}", about.subject));
    page.verdict(about.verdict);
    page.facts(about.facts);
    let blocks = distinct(runs, |m| m.run.blocks.longest());
    let modes = distinct(runs, mode);
    page.section("Bandwidth");
    page.charts(&bandwidth(runs, &blocks, &modes));
    page.section("Latency");
    page.text(
        "From the submission of a read to its completion, by percentile: the further right, the rarer. Both axes are \
         logarithmic. Reads that wait behind others take longer, so more reads at once mean higher curves.",
    );
    page.charts(&latency(runs, &blocks, &modes));
    page.section("All runs");
    for line in about.cache {
        page.text(line);
    }
    page.table(&about.table);
    page
}

fn mode(measurement: &Measurement) -> String {
    let run = &measurement.run;
    let cache = if run.direct { "" } else { ", buffered" };
    format!("{}{cache}", run.reader.name())
}

/// Each value once, in the order of its first occurrence.
fn distinct<T: PartialEq>(runs: &[Measurement], of: impl Fn(&Measurement) -> T) -> Vec<T> {
    let mut found = Vec::new();
    for value in runs.iter().map(of) {
        if !found.contains(&value) {
            found.push(value);
        }
    }
    found
}

fn size(bytes: u64) -> String {
    ByteSize::b(bytes).display().iec().to_string()
}

/// For each block size, bandwidth by depth; and where there are several, the best bandwidth by block size.
fn bandwidth(runs: &[Measurement], blocks: &[u64], modes: &[String]) -> Vec<Chart> {
    let y = || Axis::new("MiB/s", Scale::Linear);
    let mut depths = distinct(runs, |m| m.run.queue_depth);
    depths.sort_unstable();
    let marks: Vec<_> = depths.iter().map(|d| (*d as f64, d.to_string())).collect();
    let by_depth = blocks.iter().map(|block| Chart {
        title: format!("Blocks of {}, by reads at once", size(*block)),
        x: Axis::new("reads at once", Scale::Marked(marks.clone())),
        y: y(),
        series: lines(modes, |name| {
            let of_line = runs
                .iter()
                .filter(|m| m.run.blocks.longest() == *block && mode(m) == *name);
            of_line
                .map(|m| (m.run.queue_depth as f64, m.mib_per_s()))
                .collect()
        }),
    });
    let mut charts: Vec<Chart> = by_depth.collect();
    if blocks.len() > 1 {
        let mut sorted = blocks.to_vec();
        sorted.sort_unstable();
        let marks = sorted.iter().map(|b| (*b as f64, size(*b))).collect();
        charts.push(Chart {
            title: "Best depth, by block size".to_owned(),
            x: Axis::new("bytes of a read", Scale::Marked(marks)),
            y: y(),
            series: lines(modes, |name| {
                let best = |block: &u64| -> Option<(f64, f64)> {
                    let of_block = runs
                        .iter()
                        .filter(|m| m.run.blocks.longest() == *block && mode(m) == *name);
                    let best = of_block.map(Measurement::mib_per_s).reduce(f64::max)?;
                    Some((*block as f64, best))
                };
                sorted.iter().filter_map(best).collect()
            }),
        });
    }
    charts
}

fn lines(names: &[String], points: impl Fn(&String) -> Vec<(f64, f64)>) -> Vec<Series> {
    let line = |name: &String| Series {
        name: name.clone(),
        points: points(name),
    };
    names.iter().map(line).collect()
}

/// For each reader and block size, a curve for each depth.
fn latency(runs: &[Measurement], blocks: &[u64], modes: &[String]) -> Vec<Chart> {
    let mut charts = Vec::new();
    for block in blocks {
        for name in modes {
            let of_chart = runs
                .iter()
                .filter(|m| m.run.blocks.longest() == *block && mode(m) == *name);
            let series: Vec<Series> = of_chart
                .map(|m| Series {
                    name: format!("{} at once", m.run.queue_depth),
                    points: percentiles(&m.outcome.latency_us),
                })
                .collect();
            if !series.is_empty() {
                charts.push(percentile_chart(
                    &format!("{name}, {}", size(*block)),
                    series,
                ));
            }
        }
    }
    charts
}

/// A plot of curves from [`percentiles`].
pub(super) fn percentile_chart(title: &str, series: Vec<Series>) -> Chart {
    Chart {
        title: title.to_owned(),
        x: Axis::new("percentile", Scale::Percentile),
        y: Axis::new("milliseconds", Scale::Log),
        series,
    }
}

/// Quantiles and milliseconds, up to the last that one read can tell.
pub(super) fn percentiles(latency_us: &hdrhistogram::Histogram<u64>) -> Vec<(f64, f64)> {
    let last = 1.0 - 1.0 / latency_us.len().max(2) as f64;
    let mut points: Vec<(f64, f64)> = Vec::new();
    for step in latency_us.iter_quantiles(8) {
        let quantile = step.quantile_iterated_to().min(last);
        let milliseconds = step.value_iterated_to() as f64 / 1000.0;
        if points.last().is_none_or(|(before, _)| quantile > *before) {
            points.push((quantile, milliseconds));
        }
    }
    points
}
