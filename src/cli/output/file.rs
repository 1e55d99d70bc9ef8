//! Writes trace and report files atomically: temporary file, then rename.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use colibri_uring::atomic_file;
use tempfile::{Builder, NamedTempFile};

use crate::cli::interrupt;

/// How a report begins.
pub const HTML: &str = "<!doctype html>";

/// A file that is being written.
#[derive(Debug)]
pub struct Output {
    path: PathBuf,
    /// `None` for a link, a pipe or a device, which is written in place.
    temp: Option<NamedTempFile>,
}

/// Starts the files that have a path. Each has the flag that names it, and the text that files of its kind begin with. No two paths may be
/// equal, here or among `others`, which the caller writes.
pub fn create<const N: usize>(
    files: [(&str, Option<&Path>, &str); N],
    others: &[(&str, Option<&Path>)],
) -> anyhow::Result<[Option<Output>; N]> {
    let own = files.iter().map(|&(flag, path, _)| (flag, path));
    let mut taken: Vec<(&str, PathBuf)> = Vec::new();
    for (flag, path) in others.iter().copied().chain(own) {
        // Without `.` components; links are not followed.
        let Some(path) = path.and_then(|path| std::path::absolute(path).ok()) else {
            continue;
        };
        if let Some((named, _)) = taken.iter().find(|(_, other)| *other == path) {
            bail!("{named} and {flag} name the same file");
        }
        taken.push((flag, path));
    }
    let mut outputs = [const { None::<Output> }; N];
    for (output, (_, path, begins)) in outputs.iter_mut().zip(files) {
        *output = path.map(|path| Output::create(path, begins)).transpose()?;
    }
    Ok(outputs)
}

impl Output {
    /// Starts a file. It has no name before [`Output::keep`]. An existing file is replaced only if it is empty or begins with `begins`, so
    /// that a mistyped path destroys nothing.
    fn create(path: &Path, begins: &str) -> anyhow::Result<Output> {
        let found = fs::metadata(path).ok();
        ensure!(
            !found.as_ref().is_some_and(fs::Metadata::is_dir),
            "{}: it is a directory",
            cannot_write(path)
        );
        if found.as_ref().is_some_and(fs::Metadata::is_file) {
            let mut start = Vec::new();
            let read = File::open(path)
                .and_then(|file| file.take(begins.len() as u64).read_to_end(&mut start));
            read.with_context(|| cannot_write(path))?;
            ensure!(
                start.is_empty() || start == begins.as_bytes(),
                "{}: the file exists and has other content, and is not overwritten; give another name",
                cannot_write(path)
            );
        }
        let in_place = path.is_symlink() || found.is_some_and(|found| !found.is_file());
        let temp = (!in_place).then(|| {
            // The umask applies, as to any new file.
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o666);
            interrupt::tidy_at_end()?;
            atomic_file::beside(path, Builder::new().permissions(mode))
        });
        Ok(Output {
            temp: temp.transpose().with_context(|| cannot_write(path))?,
            path: path.to_owned(),
        })
    }

    /// Writes the content and names the file.
    pub fn write(
        self,
        content: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
    ) -> anyhow::Result<()> {
        let mut out = self.writer()?;
        let written = content(&mut out).and_then(|()| out.flush());
        self.keep(written)
    }

    /// Returns a writer of the content. Call [`Output::keep`] after the last byte.
    pub fn writer(&self) -> anyhow::Result<BufWriter<File>> {
        let file = match &self.temp {
            // A duplicate descriptor: an error then cannot contain the temporary name.
            Some(temp) => temp.as_file().try_clone(),
            None => File::options()
                .write(true)
                .truncate(true)
                .create(true)
                .open(&self.path),
        };
        file.map(BufWriter::new)
            .with_context(|| cannot_write(&self.path))
    }

    /// Names the file if its content was written, else removes it.
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
