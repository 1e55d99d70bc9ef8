//! What `decode` is to continue, and how far.

use anyhow::{Context, bail, ensure};
use colibri_uring::config::Config;
use colibri_uring::runtime::chat::Conversation;
use colibri_uring::runtime::demo;
use colibri_uring::runtime::tokenizer::Tokenizer;

use super::DecodeArgs;
use crate::cli::args::WrongUsage;
use crate::cli::args::model::Ids;
use crate::cli::args::prompt;
use crate::cli::output::pluralize::pluralize;

/// How many ids of a replay are the prompt.
const REPLAY_PROMPT: usize = 4;

/// Tokens to generate where nobody says how many.
const DEFAULT_NEW: usize = 128;

/// A prompt, ready to be fed, and the tokenizer that its continuation is printed with.
#[derive(Debug)]
pub struct Input {
    pub prompt: Vec<u32>,
    pub replay: Option<Vec<u32>>,
    pub tokenizer: Option<Tokenizer>,
    /// The prompt is the demo model's own, and is printed before what continues it.
    pub demonstrates: bool,
}

impl Input {
    /// Reads and encodes the prompt, which may come after a text that is there already. Done before the model is loaded, so
    /// that a mistake shows at once.
    pub fn read(args: &DecodeArgs, after_text: bool) -> anyhow::Result<Input> {
        let dir = &args.model.model[0];
        let tokenizer = Tokenizer::load(dir)?;
        let mut demonstrates = false;
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
            // Without a command nobody has meant the standard input for this program.
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
                bail!("no tokenizer.json in {}: give --prompt-ids", dir.display());
            };
            match (args.chat, after_text) {
                (true, _) => (message(args, tokenizer, &text)?, None),
                // What begins a text has no place within one.
                (false, true) => (tokenizer.encode_plain(&text)?, None),
                (false, false) => (prompt::encode(tokenizer, dir, &text)?, None),
            }
        };
        Ok(Input {
            prompt,
            replay,
            tokenizer,
            demonstrates,
        })
    }

    /// Tokens that come after the prompt: those of a replay, or at most as many as are asked for and fit.
    ///
    /// # Errors
    /// That there is no room in the model's context, in numbers.
    pub fn new_tokens(&self, args: &DecodeArgs, config: &Config) -> anyhow::Result<usize> {
        let (prompt, context) = (self.prompt.len(), config.max_position_embeddings);
        let limit = "max_position_embeddings of the model";
        ensure!(
            prompt <= context,
            "the prompt has {}, and the context holds {context} ({limit})",
            pluralize(prompt, "token")
        );
        let room = context - prompt;
        match (self.replay.as_ref().map(Vec::len), args.n) {
            (Some(new), _) => {
                ensure!(
                    new <= room,
                    "the replay has {}, and the context holds {context} ({limit})",
                    pluralize(prompt.saturating_add(new), "token")
                );
                Ok(new)
            }
            (None, Some(n)) => {
                ensure!(
                    n <= room,
                    "-n {n} is too much: after a prompt of {} there is room for {room}, as the context holds {context} \
                     ({limit})",
                    pluralize(prompt, "token")
                );
                Ok(n)
            }
            (None, None) => Ok(room.min(DEFAULT_NEW)),
        }
    }
}

/// The ids of a text as the only message of a conversation.
fn message(args: &DecodeArgs, tokenizer: &Tokenizer, text: &str) -> anyhow::Result<Vec<u32>> {
    let format = args.template.format(&args.model.model[0])?;
    let system = args.template.system.clone();
    // How much fits is known when the config is.
    Ok(Conversation::new(tokenizer, format, system)
        .ask(text, usize::MAX)?
        .ids)
}
