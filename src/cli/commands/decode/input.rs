//! Reads the prompt of `decode`, and limits the number of new tokens.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use colibri_uring::arch::Architecture;
use colibri_uring::runtime::chat::Conversation;
use colibri_uring::runtime::demo;
use colibri_uring::runtime::tokenizer::{Tokenizer, TokenizerError};

use super::args::DecodeArgs;
use crate::cli::args::prompt;
use crate::cli::args::usage::WrongUsage;
use crate::cli::args::values::Ids;
use crate::cli::output::pluralize::pluralize;

/// Ids of a replay that are the prompt.
const REPLAY_PROMPT: usize = 4;

/// Tokens to generate without -n.
const DEFAULT_NEW: usize = 128;

/// An encoded prompt, and the tokenizer that prints its continuation.
#[derive(Debug)]
pub struct Input {
    pub prompt: Vec<u32>,
    pub replay: Option<Vec<u32>>,
    pub tokenizer: Option<Tokenizer>,
    /// Ids that end an answer besides the model's stop tokens. They are not printed.
    pub ends: Vec<u32>,
    /// The prompt is the demo model's own, and is printed too.
    pub demonstrates: bool,
}

impl Input {
    /// Reads and encodes the prompt. `after_text` tells that it continues a saved text. Call it before the model loads, so that a
    /// mistake shows at once.
    pub fn read(args: &DecodeArgs, after_text: bool) -> anyhow::Result<Input> {
        let dir = &args.model.model[0];
        let tokenizer = Tokenizer::load(dir)?;
        let (mut demonstrates, mut ends) = (false, Vec::new());
        let (prompt, replay) = if let Some(ids) = &args.prompt_ids {
            (ids.0.clone(), None)
        } else if let Some(path) = &args.replay {
            let mut ids = prompt::verbatim(path)?
                .parse::<Ids>()
                .map_err(anyhow::Error::msg)
                .with_context(|| format!("cannot replay {}", path.display()))?
                .0;
            ensure!(
                ids.len() > REPLAY_PROMPT,
                "cannot replay {}: it has {}, and the first {REPLAY_PROMPT} are the prompt",
                path.display(),
                pluralize(ids.len(), "token id")
            );
            let rest = ids.split_off(REPLAY_PROMPT);
            (ids, Some(rest))
        } else if args.kv.kv_append && !args.text.is_given() {
            // The text in the file is the prompt.
            (Vec::new(), None)
        } else {
            // Without a command the standard input is not for this program.
            let given = if args.demonstrate {
                None
            } else {
                args.text.read()?
            };
            let text = match given {
                Some(text) => text,
                None if args.demonstrate || args.model.demo => {
                    demonstrates = true;
                    demo::PROMPT.to_owned()
                }
                None => bail!(WrongUsage(
                    "no prompt: give --prompt, --prompt-file, --prompt-ids or --replay, or a standard input that is not empty".into(),
                )),
            };
            let Some(tokenizer) = &tokenizer else {
                let missing = TokenizerError::Missing { dir: dir.clone() };
                match args.chat {
                    true => return Err(missing.into()),
                    false => bail!("{missing}; or give --prompt-ids"),
                }
            };
            match (args.chat, after_text) {
                (true, _) => {
                    let (ids, tokens) = message(args, tokenizer, &text)?;
                    ends = tokens;
                    (ids, None)
                }
                // No bos_token within a text.
                (false, true) => (tokenizer.encode_plain(&text)?, None),
                (false, false) => (prompt::encode(tokenizer, dir, &text)?, None),
            }
        };
        Ok(Input {
            prompt,
            replay,
            tokenizer,
            ends,
            demonstrates,
        })
    }

    /// Tokens after the prompt: those of the replay, or -n, or a default that fits. `saved` names the text of --kv-append.
    ///
    /// # Errors
    /// The context is too short; the error has the numbers.
    pub fn new_tokens(
        &self,
        args: &DecodeArgs,
        config: &Architecture,
        saved: Option<SavedText>,
    ) -> anyhow::Result<usize> {
        let (tokens, context) = (self.prompt.len(), config.max_position_embeddings);
        let limit = "max_position_embeddings of the model";
        let text = describe(tokens, args.chat, saved);
        ensure!(
            tokens <= context,
            "{text}, and the context holds {context} ({limit}): give a shorter prompt"
        );
        let room = context - tokens;
        match (self.replay.as_ref().map(Vec::len), args.n) {
            (Some(new), _) => {
                ensure!(
                    new <= room,
                    "the replay has {}, and the context holds {context} ({limit})",
                    pluralize(tokens.saturating_add(new), "token")
                );
                Ok(new)
            }
            (None, Some(n)) => {
                ensure!(
                    n <= room,
                    "-n {n} is too much: after {} there is room for {room}, as the context holds {context} ({limit})",
                    before(tokens, saved)
                );
                Ok(n)
            }
            (None, None) => {
                ensure!(
                    room > 0,
                    "{text}, and the context holds {context} ({limit}): there is no room for an answer; give a shorter prompt"
                );
                Ok(room.min(DEFAULT_NEW))
            }
        }
    }
}

/// The text of a file that `--kv-append` continues.
#[derive(Clone, Copy, Debug)]
pub struct SavedText<'a> {
    pub path: &'a Path,
    pub tokens: usize,
}

/// The text of `tokens` tokens, in the numbers of the prompt that was given.
fn describe(tokens: usize, chat: bool, saved: Option<SavedText>) -> String {
    let prompt = match chat {
        true => "the prompt in its chat template",
        false => "the prompt",
    };
    let Some(saved) = saved.filter(|saved| saved.tokens > 0) else {
        return format!("{prompt} has {}", pluralize(tokens, "token"));
    };
    let text = format!(
        "the text in {} has {}",
        saved.path.display(),
        pluralize(saved.tokens, "token")
    );
    match tokens - saved.tokens {
        0 => text,
        new => format!("{text} and {prompt} {new}, {tokens} together"),
    }
}

/// What the answer comes after.
fn before(tokens: usize, saved: Option<SavedText>) -> String {
    let Some(saved) = saved.filter(|saved| saved.tokens > 0) else {
        return format!("a prompt of {}", pluralize(tokens, "token"));
    };
    let (text, path) = (pluralize(saved.tokens, "token"), saved.path.display());
    match tokens - saved.tokens {
        0 => format!("the {text} in {path}"),
        new => format!("the {text} in {path} and a prompt of {new}"),
    }
}

/// Encodes a text as the only message of a conversation. Returns its ids, and those that end the answer.
fn message(
    args: &DecodeArgs,
    tokenizer: &Tokenizer,
    text: &str,
) -> anyhow::Result<(Vec<u32>, Vec<u32>)> {
    let format = args.template.format(&args.model.model[0])?;
    let system = args.template.system.clone();
    // `new_tokens` checks the length.
    let mut conversation = Conversation::new(tokenizer, format, system);
    let turn = conversation.ask(text, usize::MAX)?;
    Ok((turn.ids, conversation.end_tokens().to_vec()))
}
