//! `--kv`: a conversation that is kept in a file, and what a prompt reuses of it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use clap::builder::FalseyValueParser;
use colibri_uring::generate::Finish;
use colibri_uring::kv_file::{Fingerprint, KvFile};
use colibri_uring::model::{Session, reusable};
use serde::Serialize;

/// Where `decode` keeps what it has computed.
#[derive(Debug, Args)]
pub struct KvArgs {
    /// Keep the context in this file: what the prompt has in common with it is not computed again. The prompt is the whole
    /// text; the file decides speed, never the result
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
    /// Start the file of --kv anew, whatever it has; it is replaced when the run is complete
    #[arg(long, requires = "kv", env = "COLIBRI_KV_RESET", value_parser = FalseyValueParser::new())]
    pub kv_reset: bool,
}

/// What keeping a context has cost and spared, in the JSON of `decode`.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct KvStats {
    /// Tokens of the file that the text no longer has.
    pub dropped_tokens: u64,
    /// Bytes of the file, after this run.
    pub file_bytes: u64,
    /// Reading the file into memory.
    pub restore_seconds: f64,
    /// Writing what is new, until it is on the disk.
    pub save_seconds: f64,
}

/// A context that is kept in a file.
#[derive(Debug)]
pub struct Kept {
    file: KvFile,
    dropped: usize,
    restoring: Duration,
    saving: Duration,
}

impl Kept {
    /// Opens the file, or makes it.
    pub fn open(path: &Path, reset: bool, fingerprint: Fingerprint) -> anyhow::Result<Kept> {
        let file = match reset {
            true => KvFile::reset(path, fingerprint),
            false => KvFile::open(path, fingerprint),
        }?;
        Ok(Kept {
            file,
            dropped: 0,
            restoring: Duration::ZERO,
            saving: Duration::ZERO,
        })
    }

    /// All tokens of the conversation so far.
    pub fn ids(&self) -> &[u32] {
        self.file.ids()
    }

    /// How many tokens of `prompt` need not be computed.
    pub fn reusable(&self, prompt: &[u32]) -> usize {
        reusable(self.file.ids(), prompt).min(self.file.rows())
    }

    /// Brings what `prompt` has in common with the file into `session`, and says how many tokens that are.
    pub fn restore(&mut self, session: &mut Session, prompt: &[u32]) -> anyhow::Result<usize> {
        let start = Instant::now();
        let kept = self.reusable(prompt);
        if let Some(cache) = self.file.read(kept)? {
            session
                .restore(prompt[..kept].to_vec(), cache)
                .with_context(|| format!("cannot go on with {}", self.file.path().display()))?;
        }
        self.restoring += start.elapsed();
        let known = self.file.ids();
        let common = known.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        self.dropped = known.len() - common;
        if self.dropped > common {
            tracing::warn!(
                "the prompt has only {common} of the {} tokens in {}: the others are dropped from it (--kv-append goes on \
                 with them instead)",
                known.len(),
                self.file.path().display()
            );
        }
        Ok(kept)
    }

    /// Saves the turn, after which the text is `history`.
    pub fn save(&mut self, session: &Session, history: &[u32]) -> anyhow::Result<()> {
        let start = Instant::now();
        let saved = self.file.append(history, session.cache(), b"");
        self.saving += start.elapsed();
        Ok(saved?)
    }

    /// What all that has cost.
    pub fn stats(&self) -> KvStats {
        KvStats {
            dropped_tokens: self.dropped as u64,
            file_bytes: self.file.bytes(),
            restore_seconds: self.restoring.as_secs_f64(),
            save_seconds: self.saving.as_secs_f64(),
        }
    }
}

/// The file of one run of `decode`.
#[derive(Debug)]
pub struct Turn {
    kept: Kept,
    append: bool,
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
        Ok(Some(Turn {
            kept: Kept::open(path, args.kv_reset, fingerprint()?)?,
            append: args.kv_append,
        }))
    }

    /// Whether a prompt comes after a text that is there.
    pub fn goes_on(&self) -> bool {
        self.append && !self.kept.ids().is_empty()
    }

    /// The whole text that `prompt` stands for.
    pub fn text(&self, prompt: Vec<u32>) -> Vec<u32> {
        match self.append {
            true => [self.kept.ids(), &prompt].concat(),
            false => prompt,
        }
    }

    /// As [`Kept::reusable`].
    pub fn reusable(&self, prompt: &[u32]) -> usize {
        self.kept.reusable(prompt)
    }

    /// As [`Kept::restore`].
    pub fn restore(&mut self, session: &mut Session, prompt: &[u32]) -> anyhow::Result<usize> {
        self.kept.restore(session, prompt)
    }

    /// Saves what there is after `prompt` was continued with `new`, also when that was interrupted.
    pub fn save(
        &mut self,
        session: &Session,
        prompt: &[u32],
        new: &[u32],
        finish: Finish,
    ) -> anyhow::Result<()> {
        if finish == Finish::Interrupted && new.is_empty() {
            // Whoever gives an unfinished addition again would have it twice. A whole text is worth what was computed of it.
            return match self.append {
                true => Ok(()),
                false => self.kept.save(session, session.ids()),
            };
        }
        self.kept.save(session, &[prompt, new].concat())
    }

    /// As [`Kept::stats`].
    pub fn stats(&self) -> KvStats {
        self.kept.stats()
    }
}
