//! Files that commands write beside their output: they appear under their name when they are complete.

use std::fs::{self, File, Metadata};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::MetadataExt;
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
    /// None for something that is there and is no regular file, like a pipe: it is written as it is.
    temp: Option<NamedTempFile>,
}

/// Starts those files that have a path. Each has the flag that names it, and how files of its kind begin: see [`Output::create`]. No two of
/// them may be one, and none may be one of the files `others`, which are written by other means.
pub fn create<const N: usize>(
    files: [(&str, Option<&Path>, &str); N],
    others: &[(&str, Option<&Path>)],
) -> anyhow::Result<[Option<Output>; N]> {
    let own = files.iter().map(|&(flag, path, _)| (flag, path));
    let mut taken: Vec<(&str, PathBuf)> = Vec::new();
    for (flag, path) in others.iter().copied().chain(own) {
        let Some(place) = path.map(place) else {
            continue;
        };
        if let Some((named, _)) = taken.iter().find(|(_, other)| *other == place) {
            bail!("{named} and {flag} name the same file");
        }
        taken.push((flag, place));
    }
    let mut outputs = [const { None::<Output> }; N];
    for (output, (_, path, begins)) in outputs.iter_mut().zip(files) {
        *output = path.map(|path| Output::create(path, begins)).transpose()?;
    }
    Ok(outputs)
}

impl Output {
    /// Starts a file. Nothing is there under its name before [`Output::keep`]. A file that is there is replaced only if it is empty or
    /// begins as all of its kind do: what a slip of the hand names is not lost.
    fn create(path: &Path, begins: &str) -> anyhow::Result<Output> {
        let path = &behind_links(path)?;
        let found = fs::metadata(path);
        if let Ok(found) = &found {
            ensure!(!found.is_dir(), "{}: it is a directory", cannot_write(path));
            ensure!(
                !found.is_file() || !is_an_output(found),
                "{}: that is where the output goes already; give another name",
                cannot_write(path)
            );
        }
        let special = found.is_ok_and(|found| !found.is_file());
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
            interrupt::tidy_at_end()?;
            atomic_file::beside(path, Builder::new().permissions(mode))
        });
        Ok(Output {
            temp: temp.transpose().with_context(|| cannot_write(path))?,
            path: path.to_owned(),
        })
    }

    /// Writes the content, and then the file gets its name.
    pub fn write(
        self,
        content: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
    ) -> anyhow::Result<()> {
        let mut out = self.writer()?;
        let written = content(&mut out).and_then(|()| out.flush());
        self.keep(written)
    }

    /// Where the content goes, for [`Output::keep`] to be called when it is there.
    pub fn writer(&self) -> anyhow::Result<BufWriter<File>> {
        let file = match &self.temp {
            // Not opened by its name: the directory may be gone, and an error would tell the name.
            Some(temp) => temp.as_file().try_clone(),
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

/// A path that is the same however the file is named, by links or through another directory.
fn place(path: &Path) -> PathBuf {
    let path = &behind_links(path).unwrap_or_else(|_| path.to_owned());
    let dir = fs::canonicalize(atomic_file::directory(path));
    match (dir, path.file_name()) {
        (Ok(dir), Some(name)) => dir.join(name),
        _ => path.to_owned(),
    }
}

/// Where links lead: what they name is written, and they stay.
fn behind_links(path: &Path) -> anyhow::Result<PathBuf> {
    if !path.is_symlink() {
        return Ok(path.to_owned());
    }
    match fs::canonicalize(path) {
        Ok(named) => Ok(named),
        // A pipe behind /dev/stdout has no name.
        Err(_) if path.exists() => Ok(path.to_owned()),
        Err(error) => Err(error).with_context(|| format!("{}, a link", cannot_write(path))),
    }
}

/// Whether the standard output or the standard error is this file.
fn is_an_output(file: &Metadata) -> bool {
    let same = |other: rustix::io::Result<rustix::fs::Stat>| {
        other.is_ok_and(|other| (other.st_dev, other.st_ino) == (file.dev(), file.ino()))
    };
    same(rustix::fs::fstat(io::stdout())) || same(rustix::fs::fstat(io::stderr()))
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}
