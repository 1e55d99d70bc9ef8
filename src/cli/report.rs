//! Files that a measurement leaves behind: a report to look at, and the histograms.

use std::io::Write;
use std::path::PathBuf;

use anyhow::ensure;
use clap::Args;
use colibri_uring::report::hlog::{self, Interval};

use super::output::Output;

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
        ensure!(
            self.report.is_none() || self.report != self.hlog,
            "--report and --hlog name the same file"
        );
        let create = |path: &Option<PathBuf>, begins| {
            let path = path.as_deref();
            path.map(|path| Output::create(path, begins)).transpose()
        };
        Ok(Reports {
            report: create(&self.report, "<!doctype html>")?,
            hlog: create(&self.hlog, "#")?,
        })
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
