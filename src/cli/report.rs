//! Files that a measurement leaves behind: a report to look at, and the histograms.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use colibri_uring::report::hlog::{self, Interval};

use super::output::{self, Output};

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
        let [report, hlog] = output::create([
            ("--report", self.report.as_deref(), output::HTML),
            ("--hlog", self.hlog.as_deref(), hlog::BEGIN),
        ])?;
        Ok(Reports { report, hlog })
    }
}

impl Reports {
    /// Writes them.
    pub fn write(
        self,
        html: impl FnOnce() -> String,
        comment: &str,
        intervals: &[Interval<'_>],
    ) -> anyhow::Result<()> {
        if let Some(file) = self.report {
            let mut out = file.writer()?;
            let written = out.write_all(html().as_bytes()).and_then(|()| out.flush());
            file.keep(written)?;
        }
        if let Some(file) = self.hlog {
            let mut out = file.writer()?;
            let written = hlog::write(&mut out, comment, intervals).and_then(|()| out.flush());
            file.keep(written)?;
        }
        Ok(())
    }
}
