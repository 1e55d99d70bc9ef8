//! Flags that turn messages into a prompt.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use colibri_uring::runtime::chat::Format;
use colibri_uring::runtime::template::ChatTemplate;
use colibri_uring::runtime::tokenizer::{Settings, Tokenizer};

/// What a chat template gets besides the messages.
#[derive(Debug, Args)]
pub struct TemplateArgs {
    /// System message: it comes before all others
    #[arg(
        long,
        value_name = "TEXT",
        allow_hyphen_values = true,
        help_heading = "Prompt"
    )]
    pub system: Option<String>,
    /// Use this chat template instead of the model's
    #[arg(
        long,
        value_name = "FILE",
        hide_short_help = true,
        help_heading = "Prompt"
    )]
    pub chat_template: Option<PathBuf>,
    /// Variable for the chat template, like enable_thinking=false; repeatable
    ///
    /// The template must read it. False, off, no, None and the like in any spelling, and JSON, have their meaning. Another value is a text.
    #[arg(
        long,
        value_name = "NAME=VALUE",
        hide_short_help = true,
        help_heading = "Prompt"
    )]
    pub template_var: Vec<Variable>,
}

impl TemplateArgs {
    /// Loads the chat template of the model in `dir` and sets the variables.
    pub fn format(&self, dir: &Path) -> anyhow::Result<Format> {
        let mut template = match &self.chat_template {
            Some(path) => ChatTemplate::from_file(path, dir)?,
            None => ChatTemplate::load(dir)?,
        };
        for Variable { name, value } in &self.template_var {
            template.set(name, value)?;
        }
        Ok(Format::Template(Box::new(template)))
    }
}

/// Returns eos_token of tokenizer_config.json, which may be missing from config.json's eos_token_id.
pub fn end_of_message(tokenizer: &Tokenizer, dir: &Path) -> anyhow::Result<Option<u32>> {
    let settings = Settings::load(dir)?;
    let Some(token) = settings.token("eos_token") else {
        return Ok(None);
    };
    let id = tokenizer.id(token);
    if id.is_none() {
        tracing::warn!(
            "eos_token of {} ends nothing: {token:?} is no token of tokenizer.json",
            dir.join("tokenizer_config.json").display()
        );
    }
    Ok(id)
}

/// `--template-var`.
#[derive(Clone, Debug, PartialEq)]
pub struct Variable {
    name: String,
    value: String,
}

impl FromStr for Variable {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Variable, Self::Err> {
        match text.split_once('=') {
            Some((name, value)) if !name.is_empty() => Ok(Variable {
                name: name.to_owned(),
                value: value.to_owned(),
            }),
            _ => Err("a variable is NAME=VALUE"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_has_a_name_and_a_value() {
        let value = |text: &str| text.parse::<Variable>().unwrap().value;
        assert_eq!(value("a=low=er"), "low=er");
        assert_eq!(value("a="), "");
        assert!("a".parse::<Variable>().is_err() && "=1".parse::<Variable>().is_err());
    }
}
