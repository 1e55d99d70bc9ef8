//! Keeps the beginnings that prompts share in KV files, so that they are known after a restart.
//!
//! Each text that the prefix tree ends with has a file. A text that goes on is appended to its file. As many texts are kept as there are
//! pages for, those that were used last.

use std::collections::HashSet;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::model::{ModelError, PAGE, Runner};
use crate::runtime::kv_file::{Fingerprint, KvFile, KvFileError, RestoreError};

/// Files at most. Each is open while the server runs.
const FILES: usize = 128;

/// The files of one model in a directory.
#[derive(Debug)]
pub struct Beginnings {
    dir: PathBuf,
    fingerprint: Fingerprint,
    files: Vec<KvFile>,
}

/// Why a text is not kept.
#[derive(Debug, thiserror::Error)]
enum KeepError {
    #[error(transparent)]
    File(#[from] KvFileError),
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// Creates the directory for beginnings if it is missing, and checks that files can be written there.
///
/// # Errors
/// They cannot; the error does not name the directory.
pub fn check_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    tempfile::tempfile_in(dir).map(drop)
}

impl Beginnings {
    /// Opens the files of the model in `dir`. Damaged files and those that another process uses are
    /// left as they are.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn open(dir: &Path, fingerprint: Fingerprint) -> io::Result<Beginnings> {
        let mut found = Vec::new();
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if !is_ours(&name, &fingerprint) {
                continue;
            }
            let used = entry.metadata().and_then(|found| found.modified());
            match KvFile::open(&entry.path(), fingerprint) {
                Ok(file) => found.push((used.unwrap_or(SystemTime::UNIX_EPOCH), file)),
                Err(error) => tracing::warn!("a beginning is not reused: {error}"),
            }
        }
        found.sort_by_key(|(used, _)| *used);
        Ok(Beginnings {
            dir: dir.to_owned(),
            fingerprint,
            files: found.into_iter().map(|(_, file)| file).collect(),
        })
    }

    /// Makes the texts of the files known to `runner`: the newest ones, as many as it has pages for.
    pub fn restore(&mut self, runner: &mut Runner) {
        let first = first_that_fits(
            self.files.iter().map(KvFile::rows).collect(),
            runner.pages(),
        );
        let mut tokens = 0;
        for file in &self.files[first..] {
            let mut sequence = runner.sequence();
            let restored = (file.restore(runner, &mut sequence, file.rows()))
                .and_then(|()| runner.publish(&mut sequence).map_err(RestoreError::from));
            match restored {
                Ok(()) => tokens += file.rows(),
                Err(error) => tracing::warn!("a beginning is not reused: {error}"),
            }
        }
        if tokens > 0 {
            let texts = self.files.len() - first;
            tracing::info!(texts, tokens, "beginnings of earlier runs are known");
        }
    }

    /// Saves what has become known, and removes files of what is not known any more. Ends early when `interrupted` says so; then some texts
    /// are not saved yet, and false is returned.
    pub fn save(&mut self, runner: &mut Runner, interrupted: impl Fn() -> bool) -> bool {
        let mut texts = runner.known_texts();
        texts.retain(|ids| ids.len() >= PAGE);
        let first = first_that_fits(texts.iter().map(Vec::len).collect(), runner.pages());
        let first = first.max(texts.len().saturating_sub(FILES));
        let mut claimed = HashSet::new();
        for ids in &texts[first..] {
            if interrupted() {
                return false;
            }
            match self.keep(runner, ids, &claimed) {
                Ok(index) => {
                    claimed.insert(index);
                }
                Err(error) => {
                    tracing::warn!("a beginning is not saved: {error}");
                    return true;
                }
            }
        }
        let mut index = 0;
        self.files.retain(|file| {
            index += 1;
            let keep = claimed.contains(&(index - 1));
            if !keep && let Err(error) = fs::remove_file(file.path()) {
                tracing::warn!("{} is not removed: {error}", file.path().display());
            }
            keep
        });
        true
    }

    /// Saves one text, and returns the index of its file.
    fn keep(
        &mut self,
        runner: &mut Runner,
        ids: &[u32],
        claimed: &HashSet<usize>,
    ) -> Result<usize, KeepError> {
        let unclaimed = (0..self.files.len()).filter(|index| !claimed.contains(index));
        let beginning = unclaimed.filter(|index| ids.starts_with(self.files[*index].ids()));
        let longest = beginning.max_by_key(|index| self.files[*index].ids().len());
        let index = match longest {
            Some(index) => index,
            None => {
                let path = self.vacant();
                self.files.push(KvFile::open(&path, self.fingerprint)?);
                self.files.len() - 1
            }
        };
        let file = &mut self.files[index];
        if file.ids() == ids {
            // The order of times is that of the last uses.
            let touched = File::options().write(true).open(file.path());
            let _ = touched.and_then(|touched| touched.set_modified(SystemTime::now()));
            return Ok(index);
        }
        let mut sequence = runner.sequence();
        // All ids but the last one of a prompt are looked for.
        let tokens = runner.match_prefix(&mut sequence, &[ids, &[0]].concat())?;
        file.append(&ids[..tokens], &sequence.kv(), b"")?;
        Ok(index)
    }

    /// A path that no file has.
    fn vacant(&self) -> PathBuf {
        let name = self.fingerprint.name();
        let paths = (0..).map(|n: u64| self.dir.join(format!("{name}-{n}.kv")));
        let mut free = paths.filter(|path| !path.exists());
        free.next().unwrap_or_else(|| self.dir.join(name))
    }
}

/// Whether a file of this name has a beginning of the model.
fn is_ours(name: &str, fingerprint: &Fingerprint) -> bool {
    let number = name
        .strip_prefix(&fingerprint.name())
        .and_then(|rest| rest.strip_prefix('-')?.strip_suffix(".kv"));
    number.is_some_and(|number| number.parse::<u64>().is_ok())
}

/// The first of texts of these lengths from which on all fit into `pages` pages, even if they share nothing.
fn first_that_fits(lengths: Vec<usize>, pages: usize) -> usize {
    let mut left = pages;
    let fitting = lengths.iter().rev().take_while(|length| {
        let needed = length.div_ceil(PAGE);
        let fits = needed <= left;
        left = left.saturating_sub(needed);
        fits
    });
    lengths.len() - fitting.count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_texts_that_fit_are_kept() {
        for (lengths, pages, first) in [
            (vec![], 3, 0),
            (vec![64, 64, 64], 3, 0),
            (vec![64, 65, 64], 3, 1),
            (vec![64, 65, 64], 2, 2),
            (vec![1, 300, 1], 2, 2),
            (vec![300], 2, 1),
        ] {
            assert_eq!(first_that_fits(lengths, pages), first);
        }
    }
}
