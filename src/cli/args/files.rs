//! Flags that name trace and report files.

use std::path::PathBuf;

use clap::Args;

/// Trace and report of a decode.
#[derive(Debug, Args)]
pub struct TraceArgs {
    /// Write a timeline of reads and layers, for ui.perfetto.dev or chrome://tracing
    #[arg(
        long,
        value_name = "FILE",
        hide_short_help = true,
        help_heading = "Output"
    )]
    pub trace: Option<PathBuf>,
    /// Write an HTML report with plots of reads, waits and compute
    #[arg(long, value_name = "FILE.html", help_heading = "Output")]
    pub report: Option<PathBuf>,
}

impl TraceArgs {
    /// Whether the run records a timeline.
    pub fn wanted(&self) -> bool {
        self.trace.is_some() || self.report.is_some()
    }
}

/// Report and histograms of a measurement.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Write a report with plots: one self-contained HTML file
    #[arg(long, value_name = "FILE.html", help_heading = "Output")]
    pub report: Option<PathBuf>,
    /// Write the latencies of every run as an HdrHistogram interval log
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub hlog: Option<PathBuf>,
}
