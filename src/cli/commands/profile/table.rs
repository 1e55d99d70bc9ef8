//! Prints the runs of `profile`.

use std::io::{self, Write};

use colibri_uring::tools::profile::{ExpertTraffic, Measurement};
use colibri_uring::tools::report::Table;
use serde::Serialize;

use crate::cli::output::size::human;

/// The JSON object.
#[derive(Debug, Serialize)]
pub struct Report {
    runs: Vec<Row>,
    /// Whether a signal stopped the runs before the last one.
    interrupted: bool,
    /// How the runs bypassed the page cache.
    page_cache: Vec<String>,
    /// Tokens per second at the best run's speed; `null` for a file, and after reads of holes.
    tokens_per_second: Option<Tokens>,
}

#[derive(Debug, Serialize)]
struct Row {
    engine: &'static str,
    direct: bool,
    /// The longest block, in bytes.
    block_size: u64,
    queue_depth: usize,
    bytes: u64,
    seconds: f64,
    mib_per_s: f64,
    iops: f64,
    cpu_seconds: f64,
    cpu_seconds_per_gib: f64,
    latency_us: Latency,
}

#[derive(Debug, Serialize)]
struct Latency {
    p50: u64,
    p90: u64,
    p99: u64,
    p999: u64,
    max: u64,
}

/// Upper limits that this drive sets.
#[derive(Debug, Serialize)]
struct Tokens {
    /// Bytes of one token's experts.
    token_bytes: u64,
    /// With an empty cache.
    cold: f64,
    /// Experts that the available memory caches; `null` if the model does not fit.
    cached_experts: Option<u64>,
    experts: u64,
    /// With these in the cache and uniform routing; `null` if all experts or none fit.
    cached: Option<f64>,
}

impl Report {
    /// `best` is the speed of the best run in MiB/s.
    pub fn new(
        runs: &[Measurement],
        cache: &[String],
        demand: Option<&ExpertTraffic>,
        best: f64,
        interrupted: bool,
    ) -> Report {
        let speed = best * f64::from(1 << 20);
        Report {
            runs: runs.iter().map(row).collect(),
            interrupted,
            page_cache: cache.to_vec(),
            tokens_per_second: demand.map(|demand| Tokens {
                token_bytes: demand.token_bytes,
                cold: demand.cold(speed),
                cached_experts: demand.kept.as_ref().ok().copied(),
                experts: demand.experts,
                cached: demand.cached(speed),
            }),
        }
    }

    pub fn table(&self) -> Table {
        Table {
            head: HEAD.map(str::to_owned).into(),
            rows: self.runs.iter().map(cells).collect(),
        }
    }
}

/// Describes how runs of these modes bypassed the page cache.
pub fn cache_lines(runs: &[Measurement]) -> Vec<String> {
    let mut lines = Vec::new();
    if runs.iter().any(|made| made.run.direct) {
        lines.push("Direct: O_DIRECT reads bypass the page cache.".to_owned());
    }
    if runs.iter().any(|made| !made.run.direct) {
        lines.push(
            "Buffered: the files were dropped from the page cache and checked before each run, and what was read was \
             dropped at once."
                .to_owned(),
        );
    }
    lines
}

fn row(measurement: &Measurement) -> Row {
    let (run, outcome) = (&measurement.run, &measurement.outcome);
    let latency = &outcome.latency_us;
    Row {
        engine: run.reader.name(),
        direct: run.direct,
        block_size: run.blocks.longest(),
        queue_depth: run.queue_depth,
        bytes: outcome.bytes,
        seconds: outcome.elapsed.as_secs_f64(),
        mib_per_s: measurement.mib_per_s(),
        iops: measurement.iops(),
        cpu_seconds: outcome.cpu.as_secs_f64(),
        cpu_seconds_per_gib: measurement.cpu_seconds_per_gib(),
        latency_us: Latency {
            p50: latency.value_at_quantile(0.5),
            p90: latency.value_at_quantile(0.9),
            p99: latency.value_at_quantile(0.99),
            p999: latency.value_at_quantile(0.999),
            max: latency.max(),
        },
    }
}

pub fn mode(direct: bool) -> &'static str {
    if direct { "direct" } else { "buffered" }
}

/// Prints the runs as a table, then the verdict.
pub fn print(out: &mut dyn Write, report: &Report, verdict: &[String]) -> io::Result<()> {
    let Table { head, rows } = report.table();
    let widths: Vec<usize> = (0..head.len())
        .map(|i| {
            let cells = rows.iter().chain([&head]).map(|row| row[i].len());
            cells.max().unwrap_or(0)
        })
        .collect();
    for row in std::iter::once(&head).chain(&rows) {
        let line: Vec<String> = (row.iter().zip(&widths))
            .map(|(cell, width)| format!("{cell:>width$}"))
            .collect();
        writeln!(out, "{}", line.join("  "))?;
    }
    writeln!(
        out,
        "\nLatency in milliseconds, from submission to completion."
    )?;
    for line in report.page_cache.iter().chain(verdict) {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

const HEAD: [&str; 12] = [
    "engine",
    "cache",
    "block",
    "depth",
    "MiB/s",
    "IOPS",
    "CPU s/GiB",
    "p50",
    "p90",
    "p99",
    "p99.9",
    "max",
];

fn cells(row: &Row) -> Vec<String> {
    let ms = |us: u64| format!("{:.2}", us as f64 / 1000.0);
    vec![
        row.engine.to_owned(),
        mode(row.direct).to_owned(),
        human(row.block_size),
        row.queue_depth.to_string(),
        format!("{:.0}", row.mib_per_s),
        format!("{:.0}", row.iops),
        format!("{:.4}", row.cpu_seconds_per_gib),
        ms(row.latency_us.p50),
        ms(row.latency_us.p90),
        ms(row.latency_us.p99),
        ms(row.latency_us.p999),
        ms(row.latency_us.max),
    ]
}
