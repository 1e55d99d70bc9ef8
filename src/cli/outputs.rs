//! Files that a measurement leaves behind: a report to look at, and the histograms.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use colibri_uring::report::hlog::{self, Interval};

/// Which files to write.
#[derive(Debug, Args)]
pub struct OutputArgs {
    /// Write a report with plots: one HTML file that needs nothing else
    #[arg(long, value_name = "FILE.html", env = "COLIBRI_REPORT")]
    report: Option<PathBuf>,
    /// Write the latencies of every run as an HdrHistogram interval log, for its viewers
    #[arg(long, value_name = "FILE", env = "COLIBRI_HLOG")]
    hlog: Option<PathBuf>,
}

/// A file that is open for writing, and its name.
type Output = (PathBuf, File);

/// The files, made before anything is measured: minutes later is a bad time to find out that there is no such directory.
#[derive(Debug)]
pub struct Outputs {
    report: Option<Output>,
    hlog: Option<Output>,
}

impl OutputArgs {
    /// Makes the files.
    pub fn create(&self) -> anyhow::Result<Outputs> {
        let create = |path: &Option<PathBuf>| -> anyhow::Result<Option<Output>> {
            let Some(path) = path else { return Ok(None) };
            let file = File::create(path).with_context(|| cannot_write(path))?;
            Ok(Some((path.clone(), file)))
        };
        Ok(Outputs {
            report: create(&self.report)?,
            hlog: create(&self.hlog)?,
        })
    }
}

impl Outputs {
    /// Writes them.
    pub fn write(
        self,
        html: impl FnOnce() -> String,
        comment: &str,
        intervals: &[Interval<'_>],
    ) -> anyhow::Result<()> {
        if let Some((path, mut file)) = self.report {
            file.write_all(html().as_bytes())
                .with_context(|| cannot_write(&path))?;
        }
        if let Some((path, file)) = self.hlog {
            let mut out = BufWriter::new(file);
            hlog::write(&mut out, comment, intervals)
                .and_then(|()| out.flush())
                .with_context(|| cannot_write(&path))?;
        }
        Ok(())
    }
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}
