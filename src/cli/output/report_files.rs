//! Writes the report and the histograms of a measurement.

use std::io::Write;
use std::path::Path;

use colibri_uring::tools::report::hlog::{self, Interval};

use super::file::{self, Output};

/// The files. They are created before the measurement, so that a wrong path fails at once.
#[derive(Debug)]
pub struct Reports {
    report: Option<Output>,
    hlog: Option<Output>,
}

impl Reports {
    /// Starts the files of `--report` and `--hlog`.
    pub fn create(report: Option<&Path>, log: Option<&Path>) -> anyhow::Result<Reports> {
        let files = [
            ("--report", report, file::HTML),
            ("--hlog", log, hlog::BEGIN),
        ];
        let [report, hlog] = file::create(files, &[])?;
        Ok(Reports { report, hlog })
    }

    /// Writes both, the second even if the first fails. The caller prints the measurement before it returns the error.
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
