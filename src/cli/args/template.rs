//! Flags that turn messages into a prompt.

use std::path::Path;
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
    /// Variable for the chat template, like enable_thinking=false; repeatable
    ///
    /// A value that is not JSON is a text.
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
        let mut template = ChatTemplate::load(dir)?;
        for Variable { name, value } in &self.template_var {
            template.set(name.clone(), value.clone());
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
    value: serde_json::Value,
}

impl FromStr for Variable {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Variable, Self::Err> {
        match text.split_once('=') {
            Some((name, value)) if !name.is_empty() => Ok(Variable {
                name: name.to_owned(),
                value: serde_json::from_str(value).unwrap_or_else(|_| value.into()),
            }),
            _ => Err("a variable is NAME=VALUE"),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_variable_is_json_or_a_text() {
        let value = |text: &str| text.parse::<Variable>().unwrap().value;
        assert_eq!(value("a=false"), json!(false));
        assert_eq!(value("a=[1]"), json!([1]));
        assert_eq!(value("a=low=er"), json!("low=er"));
        assert_eq!(value("a="), json!(""));
        assert!("a".parse::<Variable>().is_err() && "=1".parse::<Variable>().is_err());
    }
}
