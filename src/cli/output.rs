//! Files that commands write beside their output: they appear under their name when they are complete.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use colibri_uring::temporary;
use tempfile::{Builder, NamedTempFile};

/// A file that is being written.
#[derive(Debug)]
pub struct Output {
    path: PathBuf,
    /// None for something that is there and is no regular file, like a pipe: it is written as it is.
    temp: Option<NamedTempFile>,
}

impl Output {
    /// Starts a file. Nothing is there under its name before [`Output::keep`]. A file that is there is replaced only if it is empty or
    /// begins as all of its kind do: what a slip of the hand names is not lost.
    pub fn create(path: &Path, begins: &str) -> anyhow::Result<Output> {
        let special = fs::metadata(path).is_ok_and(|found| !found.is_file());
        if !special && path.exists() {
            let mut start = Vec::new();
            let file = File::open(path).with_context(|| cannot_write(path))?;
            file.take(begins.len() as u64)
                .read_to_end(&mut start)
                .with_context(|| cannot_write(path))?;
            ensure!(
                start.is_empty() || start == begins.as_bytes(),
                "{}: it is there and is something else, and is not overwritten; give another name",
                cannot_write(path)
            );
        }
        let temp = (!special).then(|| {
            // As readable as any other file that is made.
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o666);
            temporary::beside(path, Builder::new().permissions(mode))
        });
        Ok(Output {
            temp: temp.transpose().with_context(|| cannot_write(path))?,
            path: path.to_owned(),
        })
    }

    /// Where the content goes.
    pub fn writer(&self) -> anyhow::Result<BufWriter<File>> {
        let file = match &self.temp {
            Some(temp) => temp.reopen(),
            None => File::options().write(true).open(&self.path),
        };
        file.map(BufWriter::new)
            .with_context(|| cannot_write(&self.path))
    }

    /// The content is written, or was not: the file gets its name, or is gone.
    pub fn keep(self, written: io::Result<()>) -> anyhow::Result<()> {
        let persisted = written.and_then(|()| match self.temp {
            Some(temp) => temp.persist(&self.path).map(drop).map_err(|e| e.error),
            None => Ok(()),
        });
        persisted.with_context(|| cannot_write(&self.path))
    }
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}
