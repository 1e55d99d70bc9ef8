//! Checks the files that `--prompt` and `chat` need: tokenizer and chat template.

use std::path::Path;

use colibri_uring::runtime::chat::{ChatError, Conversation, Format};
use colibri_uring::runtime::template::{ChatTemplate, TemplateError};
use colibri_uring::runtime::tokenizer::{Tokenizer, TokenizerError};
use serde_json::json;

use super::Check;
use crate::cli::output::error::one_line;

/// Checks the tokenizer and the chat template of the model in `dir`.
pub fn checks(dir: &Path) -> [Check; 2] {
    let tokenizer = Tokenizer::load(dir).and_then(|found| {
        found.ok_or_else(|| TokenizerError::Missing {
            dir: dir.to_owned(),
        })
    });
    let file = dir.join("tokenizer.json");
    let details = json!({ "file": file.to_string_lossy(), "usable": tokenizer.is_ok() });
    let first = match &tokenizer {
        Ok(_) => Check::new("tokenizer", file.display().to_string(), details),
        Err(error) => Check::new("tokenizer", error.to_string(), details).unless(
            true,
            "without it decode takes only --prompt-ids, and chat does not work",
        ),
    };
    [first, template(dir, tokenizer.ok().as_ref())]
}

fn template(dir: &Path, tokenizer: Option<&Tokenizer>) -> Check {
    let name = "template";
    let template = match ChatTemplate::load(dir) {
        Ok(template) => template,
        Err(error) => return broken(name, &error),
    };
    let path = template.path().to_owned();
    if let Some(tokenizer) = tokenizer {
        let format = Format::Template(Box::new(template));
        let asked = Conversation::new(tokenizer, format, None).ask("Hello", usize::MAX);
        if let Err(ChatError::Template(error)) = asked {
            return broken(name, &error);
        }
    }
    let details = json!({ "file": path.to_string_lossy(), "usable": true });
    Check::new(name, path.display().to_string(), details)
}

fn broken(name: &str, error: &TemplateError) -> Check {
    let text = one_line(&anyhow::anyhow!("{error}"));
    Check::new(name, text, json!({ "file": null, "usable": false }))
        .unless(true, "without it use chat --raw, and decode without --chat")
}
