//! Files that a measurement leaves behind: a report to look at, and the histograms.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use colibri_uring::tools::report::hlog::{self, Interval};

use crate::cli::output::file::{self, Output};

/// Which files to write.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Write a report with plots: one HTML file that needs nothing else
    #[arg(long, value_name = "FILE.html", env = "COLIBRI_REPORT")]
    report: Option<PathBuf>,
    /// Write the latencies of every run as an HdrHistogram interval log, for its viewers
    #[arg(long, value_name = "FILE", env = "COLIBRI_HLOG")]
    hlog: Option<PathBuf>,
}

/// The files, made before anything is measured: minutes later is a bad time to find out that there is no such directory.
#[derive(Debug)]
pub struct Reports {
    report: Option<Output>,
    hlog: Option<Output>,
}

impl ReportArgs {
    /// Starts the files.
    pub fn create(&self) -> anyhow::Result<Reports> {
        let files = [
            ("--report", self.report.as_deref(), file::HTML),
            ("--hlog", self.hlog.as_deref(), hlog::BEGIN),
        ];
        let [report, hlog] = file::create(files, &[])?;
        Ok(Reports { report, hlog })
    }
}

impl Reports {
    /// Writes them, the second also where the first cannot be written. What was measured is to be printed all the same.
    pub fn write(
        self,
        html: impl FnOnce() -> String,
        comment: &str,
        intervals: &[Interval<'_>],
    ) -> anyhow::Result<()> {
        let report = self.report.map_or(Ok(()), |file| {
            file.write(|out| out.write_all(html().as_bytes()))
        });
        let hlog = self.hlog.map_or(Ok(()), |file| {
            file.write(|out| hlog::write(out, comment, intervals))
        });
        report.and(hlog)
    }
}
