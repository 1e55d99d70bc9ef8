//! Saves a conversation in a file, and continues it in the next `chat`.

use std::io::{self, IsTerminal};

use anyhow::ensure;
use colibri_uring::model::{Runner, Sequence};
use colibri_uring::runtime::chat::Conversation;
use colibri_uring::runtime::kv_file::{Fingerprint, KvFileError, default_path};

use super::status::say;
use crate::cli::args::kv::ChatKvArgs;
use crate::cli::commands::kv::KvStore;
use crate::cli::output::pluralize::pluralize;

/// Opens the file. A default file that is locked or unreadable is skipped with a warning: the chat goes on unsaved.
pub fn open(
    args: &ChatKvArgs,
    fingerprint: impl FnOnce() -> anyhow::Result<Fingerprint>,
) -> anyhow::Result<Option<KvStore>> {
    // A script must get the same answers each time.
    let unasked = args.kv.is_none();
    if args.no_kv || unasked && !io::stdin().is_terminal() {
        return Ok(None);
    }
    let fingerprint = fingerprint()?;
    let path = match &args.kv {
        Some(path) => path.clone(),
        None => match default_path(&fingerprint) {
            Ok(path) => path,
            Err(error) => {
                tracing::warn!("the conversation is not kept: {error}");
                return Ok(None);
            }
        },
    };
    match KvStore::open(&path, args.kv_reset, fingerprint) {
        Err(error @ (KvFileError::InUse { .. } | KvFileError::Io { .. })) if unasked => {
            tracing::warn!("the conversation is not kept: {error}");
            Ok(None)
        }
        opened => Ok(Some(opened?)),
    }
}

/// Continues the saved conversation. Refuses one with another system message or template.
pub fn resume(
    saved: &mut KvStore,
    runner: &mut Runner,
    sequence: &mut Sequence,
    conversation: &mut Conversation,
) -> anyhow::Result<()> {
    let tokens = saved.file().rows();
    saved.restore(runner, sequence, tokens)?;
    conversation.hold(sequence.ids().to_vec());
    let file = saved.file();
    let path = saved.file().path().display();
    let next = "it is unchanged: give another file to --kv, or --kv-reset to start over";
    let Ok(record) = serde_json::from_slice(file.note()) else {
        ensure!(
            file.ids().is_empty(),
            "{path} has a text of `decode`, not a conversation; {next}"
        );
        return Ok(());
    };
    ensure!(
        conversation.resume(record, file.ids()),
        "the conversation in {path} has another system message, or another template; {next}"
    );
    let messages = conversation.messages().len();
    if messages > 0 {
        say(&format!(
            "going on with a conversation of {}; /reset starts a new one",
            pluralize(messages, "message")
        ));
    }
    Ok(())
}

/// Saves the conversation. A failure is a warning: the chat continues.
pub fn save(
    saved: &mut Option<KvStore>,
    runner: &mut Runner,
    sequence: &mut Sequence,
    conversation: &Conversation,
) {
    let Some(open) = saved else { return };
    let note = serde_json::to_vec(&conversation.record()).map_err(anyhow::Error::from);
    if let Err(error) = note.and_then(|note| open.save(runner, sequence, conversation.ids(), &note))
    {
        tracing::warn!("{error}");
    }
}

/// Empties the file.
pub fn forget(saved: &mut Option<KvStore>) {
    if let Some(Err(error)) = saved.as_mut().map(KvStore::clear) {
        tracing::warn!("{error}");
    }
}
