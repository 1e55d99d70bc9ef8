//! Saves a context in a file, and reuses its common prefix with the next prompt.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use colibri_uring::model::{Runner, Sequence, reusable};
use colibri_uring::runtime::generate::Finish;
use colibri_uring::runtime::kv_file::{Fingerprint, KvFile, KvFileError, RestoreError};

use crate::cli::args::kv::KvArgs;
use crate::cli::commands::decode::SavedText;
use crate::cli::output::pluralize::pluralize;
use crate::cli::output::stats::KvStats;

/// A context saved in a file.
#[derive(Debug)]
pub struct KvStore {
    file: KvFile,
    restoring: Duration,
    saving: Duration,
}

impl KvStore {
    /// Opens or creates the file. `reset` starts it anew.
    pub fn open(
        path: &Path,
        reset: bool,
        fingerprint: Fingerprint,
    ) -> Result<KvStore, KvFileError> {
        let file = match reset {
            true => KvFile::reset(path, fingerprint),
            false => KvFile::open(path, fingerprint),
        }?;
        Ok(KvStore {
            file,
            restoring: Duration::ZERO,
            saving: Duration::ZERO,
        })
    }

    pub fn file(&self) -> &KvFile {
        &self.file
    }

    /// Empties the file.
    pub fn clear(&mut self) -> anyhow::Result<()> {
        Ok(self.file.clear()?)
    }

    /// Continues `sequence` after the first `tokens` tokens of the file, which the runner's weights must have computed.
    pub fn restore(
        &mut self,
        runner: &mut Runner,
        sequence: &mut Sequence,
        tokens: usize,
    ) -> anyhow::Result<()> {
        self.file.confirm(runner.weights())?;
        let start = Instant::now();
        match self.file.restore(runner, sequence, tokens) {
            Err(RestoreError::File(error)) => return Err(error.into()),
            Err(error) => {
                let file = self.file.path().display();
                return Err(error).with_context(|| format!("cannot continue {file}"));
            }
            Ok(()) => {}
        }
        self.restoring += start.elapsed();
        Ok(())
    }

    /// Saves the text `history`, of which `sequence` has a prefix, with a `note`.
    pub fn save(
        &mut self,
        runner: &mut Runner,
        sequence: &mut Sequence,
        history: &[u32],
        note: &[u8],
    ) -> anyhow::Result<()> {
        // Otherwise the next run drafts less at first.
        if let Err(error) = runner.settle_drafts(sequence) {
            tracing::debug!("the prediction layer is not up to date: {error}");
        }
        let start = Instant::now();
        let saved = self.file.append(history, &sequence.kv(), note);
        self.saving += start.elapsed();
        Ok(saved?)
    }
}

/// The KV file of one `decode`.
#[derive(Debug)]
pub struct Turn {
    store: KvStore,
    append: bool,
    /// Tokens of the file that the text no longer has.
    dropped: usize,
    saved: bool,
}

impl Turn {
    /// Opens the file of `--kv`, if given.
    pub fn open(
        args: &KvArgs,
        fingerprint: impl FnOnce() -> anyhow::Result<Fingerprint>,
    ) -> anyhow::Result<Option<Turn>> {
        let Some(path) = &args.kv else {
            return Ok(None);
        };
        let store = KvStore::open(path, args.kv_reset, fingerprint()?)?;
        ensure!(
            args.kv_reset || store.file.note().is_empty(),
            "{} has a conversation of `chat`, whose messages `decode` would lose; it is unchanged: give another file to --kv, or \
             --kv-reset to start anew",
            path.display()
        );
        Ok(Some(Turn {
            store,
            append: args.kv_append,
            dropped: 0,
            saved: false,
        }))
    }

    /// Whether the prompt comes after a saved text.
    pub fn goes_on(&self) -> bool {
        self.append && !self.store.file.ids().is_empty()
    }

    /// The text that the prompt is appended to.
    pub fn saved_text(&self) -> Option<SavedText<'_>> {
        let file = &self.store.file;
        self.append.then(|| SavedText {
            path: file.path(),
            tokens: file.ids().len(),
        })
    }

    /// The whole text: with `--kv-append`, the saved text and `prompt`.
    pub fn text(&self, prompt: Vec<u32>) -> Vec<u32> {
        match self.append {
            true => [self.store.file.ids(), &prompt].concat(),
            false => prompt,
        }
    }

    /// How many tokens of `prompt` the file has.
    pub fn reusable(&self, prompt: &[u32]) -> usize {
        let file = &self.store.file;
        reusable(file.ids(), prompt).min(file.rows())
    }

    /// Continues `sequence` after the common prefix of `prompt` and the file. Returns the length of the prefix.
    pub fn restore(
        &mut self,
        runner: &mut Runner,
        sequence: &mut Sequence,
        prompt: &[u32],
    ) -> anyhow::Result<usize> {
        let reused = self.reusable(prompt);
        self.store.restore(runner, sequence, reused)?;
        let file = &self.store.file;
        let known = file.ids();
        let common = known.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        self.dropped = known.len() - common;
        if self.dropped > common {
            tracing::warn!(
                "the prompt shares only {common} of the {} in {}: the others are dropped from it (--kv-append continues \
                 them instead)",
                pluralize(known.len(), "token"),
                file.path().display()
            );
        }
        Ok(reused)
    }

    /// Saves `prompt` and its continuation `new`, even after an interruption.
    pub fn save(
        &mut self,
        runner: &mut Runner,
        sequence: &mut Sequence,
        prompt: &[u32],
        new: &[u32],
        finish: Finish,
    ) -> anyhow::Result<()> {
        let history = match finish == Finish::Interrupted && new.is_empty() {
            // The next --kv-append would repeat an unfinished addition. A whole prompt keeps the computed prefix.
            true if self.append => return Ok(()),
            true => sequence.ids().to_vec(),
            false => [prompt, new].concat(),
        };
        self.store.save(runner, sequence, &history, b"")?;
        self.saved = true;
        Ok(())
    }

    pub fn stats(&self) -> KvStats {
        KvStats {
            dropped_tokens: self.dropped as u64,
            saved: self.saved,
            file_bytes: self.store.file.bytes(),
            restore_seconds: self.store.restoring.as_secs_f64(),
            save_seconds: self.store.saving.as_secs_f64(),
        }
    }
}
