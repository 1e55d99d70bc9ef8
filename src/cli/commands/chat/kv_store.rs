//! Where a conversation is kept, so that the next `chat` goes on with it.

use std::io::{self, IsTerminal};
use std::path::PathBuf;

use anyhow::ensure;
use clap::Args;
use clap::builder::FalseyValueParser;
use colibri_uring::model::{Runner, Sequence};
use colibri_uring::runtime::chat::Conversation;
use colibri_uring::runtime::kv_file::{Fingerprint, KvFileError, default_path};

use super::status::say;
use crate::cli::commands::kv::KvStore;
use crate::cli::output::pluralize::pluralize;

/// Where `chat` keeps the conversation.
#[derive(Debug, Args)]
pub struct ChatKvArgs {
    /// Keep the conversation in this file, and go on with the one that is there [default: one for each model in
    /// ~/.local/state/colibri-uring, unless the input is redirected]
    #[arg(long, value_name = "FILE", env = "COLIBRI_KV")]
    kv: Option<PathBuf>,
    /// Keep nothing
    #[arg(long, conflicts_with = "kv", env = "COLIBRI_NO_KV", value_parser = FalseyValueParser::new())]
    no_kv: bool,
    /// Start the kept conversation anew; the old one is replaced when there is an answer
    #[arg(long, conflicts_with = "no_kv", env = "COLIBRI_KV_RESET", value_parser = FalseyValueParser::new())]
    kv_reset: bool,
}

impl ChatKvArgs {
    /// Opens the file. One that was chosen without being asked for is no reason not to chat, unless it can be lost.
    pub fn open(
        &self,
        fingerprint: impl FnOnce() -> anyhow::Result<Fingerprint>,
    ) -> anyhow::Result<Option<KvStore>> {
        // A script gets the same answers each time.
        let unasked = self.kv.is_none();
        if self.no_kv || unasked && !io::stdin().is_terminal() {
            return Ok(None);
        }
        let fingerprint = fingerprint()?;
        let path = match &self.kv {
            Some(path) => path.clone(),
            None => match default_path(&fingerprint) {
                Ok(path) => path,
                Err(error) => {
                    tracing::warn!("the conversation is not kept: {error}");
                    return Ok(None);
                }
            },
        };
        match KvStore::open(&path, self.kv_reset, fingerprint) {
            Err(error @ (KvFileError::InUse { .. } | KvFileError::Io { .. })) if unasked => {
                tracing::warn!("the conversation is not kept: {error}");
                Ok(None)
            }
            opened => Ok(Some(opened?)),
        }
    }
}

/// Goes on with what is kept, as far as it is a conversation of this kind.
pub fn resume(
    kept: &mut KvStore,
    runner: &mut Runner,
    sequence: &mut Sequence,
    conversation: &mut Conversation,
) -> anyhow::Result<()> {
    let tokens = kept.file().rows();
    kept.restore(runner, sequence, tokens)?;
    conversation.hold(sequence.ids().to_vec());
    let file = kept.file();
    let next = "it stays as it is: give another file to --kv, or --kv-reset to begin anew";
    let Ok(record) = serde_json::from_slice(file.note()) else {
        ensure!(
            file.ids().is_empty(),
            "what is kept is a text of `decode`, not a conversation; {next}"
        );
        return Ok(());
    };
    ensure!(
        conversation.resume(record, file.ids()),
        "the conversation that is kept has another system message, or another template; {next}"
    );
    let messages = conversation.messages().len();
    if messages > 0 {
        say(&format!(
            "going on with a conversation of {}; /reset begins a new one",
            pluralize(messages, "message")
        ));
    }
    Ok(())
}

/// Keeps what was said. That it cannot be kept is no reason to stop talking.
pub fn keep(
    kept: &mut Option<KvStore>,
    runner: &mut Runner,
    sequence: &mut Sequence,
    conversation: &Conversation,
) {
    let Some(open) = kept else { return };
    let note = serde_json::to_vec(&conversation.record()).map_err(anyhow::Error::from);
    if let Err(error) = note.and_then(|note| open.save(runner, sequence, conversation.ids(), &note))
    {
        tracing::warn!("{error}");
    }
}

/// Forgets what is kept.
pub fn forget(kept: &mut Option<KvStore>) {
    if let Some(Err(error)) = kept.as_mut().map(KvStore::clear) {
        tracing::warn!("{error}");
    }
}
