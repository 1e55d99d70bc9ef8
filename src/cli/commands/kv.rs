//! `--kv`: a conversation that is kept in a file, and what a prompt reuses of it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use clap::builder::FalseyValueParser;
use colibri_uring::model::{Runner, Sequence, reusable};
use colibri_uring::runtime::generate::Finish;
use colibri_uring::runtime::kv_file::{Fingerprint, KvFile, KvFileError, RestoreError};
use serde::Serialize;

use crate::cli::output::pluralize::pluralize;

/// Where `decode` keeps what it has computed.
#[derive(Debug, Args)]
pub struct KvArgs {
    /// Keep the context in this file: what the prompt has in common with it is not computed again. The prompt is the whole
    /// text: what follows it in the file, like an earlier answer to it, is replaced (--kv-append goes on with it instead). The
    /// file decides speed, never the result
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "replay",
        env = "COLIBRI_KV"
    )]
    pub kv: Option<PathBuf>,
    /// Go on with the text in the file of --kv: the prompt, if there is one, comes after it
    #[arg(long, requires = "kv", env = "COLIBRI_KV_APPEND", value_parser = FalseyValueParser::new())]
    pub kv_append: bool,
    /// Start the file of --kv anew, whatever KV file is there; it is replaced when the run is complete
    #[arg(long, requires = "kv", env = "COLIBRI_KV_RESET", value_parser = FalseyValueParser::new())]
    pub kv_reset: bool,
}

/// What keeping a context has cost and spared, in the JSON of `decode`.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct KvStats {
    /// Tokens of the file that the text no longer has.
    pub dropped_tokens: u64,
    /// Whether the file has the text of this run. (An addition that was interrupted before anything followed it is left out.)
    pub saved: bool,
    /// Bytes of the file, after this run.
    pub file_bytes: u64,
    /// Reading the file into memory.
    pub restore_seconds: f64,
    /// Writing what is new, until it is on the disk.
    pub save_seconds: f64,
}

/// A context that is kept in a file.
#[derive(Debug)]
pub struct KvStore {
    file: KvFile,
    restoring: Duration,
    saving: Duration,
}

impl KvStore {
    /// Opens the file, or makes it; with `reset` one that is begun anew.
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

    /// The file.
    pub fn file(&self) -> &KvFile {
        &self.file
    }

    /// Forgets what is in the file, at once.
    pub fn clear(&mut self) -> anyhow::Result<()> {
        Ok(self.file.clear()?)
    }

    /// Continues `sequence` after the first `tokens` tokens of the file.
    pub fn restore(
        &mut self,
        runner: &mut Runner,
        sequence: &mut Sequence,
        tokens: usize,
    ) -> anyhow::Result<()> {
        let start = Instant::now();
        match self.file.restore(runner, sequence, tokens) {
            Err(RestoreError::File(error)) => return Err(error.into()),
            Err(error) => {
                let file = self.file.path().display();
                return Err(error).with_context(|| format!("cannot go on with {file}"));
            }
            Ok(()) => {}
        }
        self.restoring += start.elapsed();
        Ok(())
    }

    /// Saves the text `history`, whose beginning `sequence` has, with a `note`.
    pub fn save(
        &mut self,
        runner: &mut Runner,
        sequence: &mut Sequence,
        history: &[u32],
        note: &[u8],
    ) -> anyhow::Result<()> {
        // Without it the text is drafted less when it goes on.
        if let Err(error) = runner.settle_drafts(sequence) {
            tracing::debug!("the prediction layer is not up to date: {error}");
        }
        let start = Instant::now();
        let saved = self.file.append(history, &sequence.kv(), note);
        self.saving += start.elapsed();
        Ok(saved?)
    }
}

/// The file of one run of `decode`.
#[derive(Debug)]
pub struct Turn {
    kept: KvStore,
    append: bool,
    /// Tokens of the file that the text no longer has.
    dropped: usize,
    saved: bool,
}

impl Turn {
    /// Opens the file that the flags name, if they do.
    pub fn open(
        args: &KvArgs,
        fingerprint: impl FnOnce() -> anyhow::Result<Fingerprint>,
    ) -> anyhow::Result<Option<Turn>> {
        let Some(path) = &args.kv else {
            return Ok(None);
        };
        let kept = KvStore::open(path, args.kv_reset, fingerprint()?)?;
        ensure!(
            args.kv_reset || kept.file.note().is_empty(),
            "{} has a conversation of `chat`, whose messages `decode` would lose; it stays as it is: give another file to --kv, or \
             --kv-reset to begin anew",
            path.display()
        );
        Ok(Some(Turn {
            kept,
            append: args.kv_append,
            dropped: 0,
            saved: false,
        }))
    }

    /// Whether a prompt comes after a text that is there.
    pub fn goes_on(&self) -> bool {
        self.append && !self.kept.file.ids().is_empty()
    }

    /// The whole text that `prompt` stands for.
    pub fn text(&self, prompt: Vec<u32>) -> Vec<u32> {
        match self.append {
            true => [self.kept.file.ids(), &prompt].concat(),
            false => prompt,
        }
    }

    /// How many tokens of `prompt` need not be computed.
    pub fn reusable(&self, prompt: &[u32]) -> usize {
        let file = &self.kept.file;
        reusable(file.ids(), prompt).min(file.rows())
    }

    /// Continues `sequence` after what `prompt` has in common with the file, and returns how many tokens that are.
    pub fn restore(
        &mut self,
        runner: &mut Runner,
        sequence: &mut Sequence,
        prompt: &[u32],
    ) -> anyhow::Result<usize> {
        let reused = self.reusable(prompt);
        self.kept.restore(runner, sequence, reused)?;
        let file = &self.kept.file;
        let known = file.ids();
        let common = known.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        self.dropped = known.len() - common;
        if self.dropped > common {
            tracing::warn!(
                "the prompt has only {common} of the {} in {}: the others are dropped from it (--kv-append goes on \
                 with them instead)",
                pluralize(known.len(), "token"),
                file.path().display()
            );
        }
        Ok(reused)
    }

    /// Saves what there is after `prompt` was continued with `new`, also when that was interrupted.
    pub fn save(
        &mut self,
        runner: &mut Runner,
        sequence: &mut Sequence,
        prompt: &[u32],
        new: &[u32],
        finish: Finish,
    ) -> anyhow::Result<()> {
        let history = match finish == Finish::Interrupted && new.is_empty() {
            // Whoever gives an unfinished addition again would have it twice. A whole text is worth what was computed of it.
            true if self.append => return Ok(()),
            true => sequence.ids().to_vec(),
            false => [prompt, new].concat(),
        };
        self.kept.save(runner, sequence, &history, b"")?;
        self.saved = true;
        Ok(())
    }

    /// What all that has cost.
    pub fn stats(&self) -> KvStats {
        KvStats {
            dropped_tokens: self.dropped as u64,
            saved: self.saved,
            file_bytes: self.kept.file.bytes(),
            restore_seconds: self.kept.restoring.as_secs_f64(),
            save_seconds: self.kept.saving.as_secs_f64(),
        }
    }
}
