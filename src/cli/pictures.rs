//! Pictures of a decode: a trace for Perfetto, and a report.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use colibri_uring::model::Session;
use colibri_uring::trace::Trace;

use super::open::Opened;
use super::output::Output;

/// Which pictures to make.
#[derive(Debug, Args)]
pub struct PictureArgs {
    /// Write when each chunk was read and when each layer was computed, for ui.perfetto.dev or chrome://tracing
    #[arg(long, value_name = "FILE", env = "COLIBRI_TRACE")]
    trace: Option<PathBuf>,
}

/// The files, made before anything is loaded: after a long decode is a bad time to find out that there is no such directory.
#[derive(Debug)]
pub struct Pictures {
    trace: Option<Output>,
}

impl PictureArgs {
    /// Whether there is something to record.
    pub fn wanted(&self) -> bool {
        self.trace.is_some()
    }

    /// Starts the files.
    pub fn create(&self) -> anyhow::Result<Pictures> {
        let create = |path: &Option<PathBuf>, begins| {
            let path = path.as_deref();
            path.map(|path| Output::create(path, begins)).transpose()
        };
        Ok(Pictures {
            trace: create(&self.trace, "{\"displayTimeUnit\":")?,
        })
    }
}

impl Pictures {
    /// What was recorded, if a picture is wanted.
    pub fn take(&self, session: &mut Session<'_>, opened: &Opened) -> Option<Trace> {
        self.trace.as_ref()?;
        Trace::take(session, opened.sources())
    }

    /// Writes them.
    pub fn write(self, trace: Option<Trace>) -> anyhow::Result<()> {
        let Some(file) = self.trace else {
            return Ok(());
        };
        let trace = trace.context("nothing is recorded: the reads have ended early")?;
        if trace.lost > 0 {
            tracing::warn!(
                "the record was full: its last {} entries are missing",
                trace.lost
            );
        }
        let mut out = file.writer()?;
        let written = trace.write_chrome(&mut out).and_then(|()| out.flush());
        file.keep(written)
    }
}
