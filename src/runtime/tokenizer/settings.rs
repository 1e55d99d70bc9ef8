//! Reads `tokenizer_config.json`: the roles of special tokens, and the chat template.

use std::io;
use std::path::Path;

use serde_json::Value;

use crate::arch::{ConfigError, Keys, read_object};

/// The named special tokens that templates may refer to.
const NAMED: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// The used keys of a `tokenizer_config.json`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// Named tokens, like `bos_token`: name and text.
    pub tokens: Vec<(&'static str, String)>,
    /// The key `chat_template`.
    pub chat_template: Option<TemplateSource>,
}

/// How a `tokenizer_config.json` holds a chat template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TemplateSource {
    /// The only template, or the one named `default`.
    Text(String),
    /// The names of several, none of which is `default`.
    Named(Vec<String>),
    /// The JSON type of a value that is not a template.
    Other(&'static str),
}

impl Settings {
    /// Reads `tokenizer_config.json` of a model directory. A missing file gives the default.
    ///
    /// # Errors
    /// [`ConfigError::Read`] and [`ConfigError::Json`], naming the file, and [`ConfigError::Type`] for a value that is not a token,
    /// naming the file and the key.
    pub fn load(dir: &Path) -> Result<Settings, ConfigError> {
        let path = dir.join("tokenizer_config.json");
        let value = match read_object(&path) {
            Ok(value) => value,
            Err(ConfigError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(Settings::default());
            }
            Err(error) => return Err(error),
        };
        Settings::of(&Keys::new(&path, &value)?)
    }

    fn of(keys: &Keys) -> Result<Settings, ConfigError> {
        let mut tokens = Vec::new();
        for name in NAMED {
            // A token is its text, or an object that has the text as content.
            let Some(token) = keys.find(name).filter(|token| !token.is_null()) else {
                continue;
            };
            match token.get("content").unwrap_or(token).as_str() {
                Some(text) => tokens.push((name, text.to_owned())),
                None => {
                    let expected = "the text of a token, an object that has it as content, or null";
                    return Err(keys.wrong_type(name, expected));
                }
            }
        }
        Ok(Settings {
            tokens,
            chat_template: TemplateSource::of_key(keys),
        })
    }

    /// The text of a named token, like `bos_token`.
    pub fn token(&self, name: &str) -> Option<&str> {
        let mut tokens = self.tokens.iter();
        tokens.find_map(|(known, text)| (*known == name).then_some(text.as_str()))
    }
}

impl TemplateSource {
    /// The key `chat_template`.
    pub(in crate::runtime) fn of_key(keys: &Keys) -> Option<TemplateSource> {
        let value = keys.find("chat_template").filter(|value| !value.is_null());
        value.map(TemplateSource::of)
    }

    fn of(value: &Value) -> TemplateSource {
        let list = match value {
            Value::String(text) => return TemplateSource::Text(text.clone()),
            Value::Array(list) => list,
            Value::Object(_) => return TemplateSource::Other("an object"),
            Value::Bool(_) => return TemplateSource::Other("a truth value"),
            _ => return TemplateSource::Other("a number"),
        };
        let of = |entry: &Value, key: &str| Some(entry.get(key)?.as_str()?.to_owned());
        let templates: Vec<(String, String)> = (list.iter())
            .filter_map(|entry| Some((of(entry, "name")?, of(entry, "template")?)))
            .collect();
        match templates.iter().find(|(name, _)| name == "default") {
            Some((_, text)) => TemplateSource::Text(text.clone()),
            None => TemplateSource::Named(templates.into_iter().map(|(name, _)| name).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: Value) -> Result<Settings, ConfigError> {
        let path = Path::new("tokenizer_config.json");
        Settings::of(&Keys::new(path, &value).unwrap())
    }

    fn settings(value: Value) -> Settings {
        read(value).unwrap()
    }

    #[test]
    fn tokens_are_texts_or_objects() {
        let found = settings(json!({
            "bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "pad_token": null,
        }));
        assert_eq!(found.token("bos_token"), Some("<s>"));
        assert_eq!(found.token("eos_token"), Some("</s>"));
        assert_eq!(found.token("pad_token"), None);
        assert_eq!(found.token("unk_token"), None);
        for strange in [
            json!(7),
            json!(true),
            json!(["</s>"]),
            json!({"content": 7}),
            json!({"text": "</s>"}),
        ] {
            let error = read(json!({ "eos_token": strange }))
                .unwrap_err()
                .to_string();
            let says = format!("tokenizer_config.json: eos_token is {strange}, expected the text");
            assert!(error.starts_with(&says), "{error}");
        }
    }

    #[test]
    fn a_template_is_a_text_or_one_of_a_list() {
        let template = |value: Value| settings(json!({ "chat_template": value })).chat_template;
        assert_eq!(template(json!(null)), None);
        assert_eq!(template(json!("x")), Some(TemplateSource::Text("x".into())));
        let list =
            json!([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]);
        assert_eq!(template(list), Some(TemplateSource::Text("d".into())));
        let list = json!([{"name": "tool_use", "template": "t"}, {"name": 7}, "x"]);
        let named = TemplateSource::Named(vec!["tool_use".into()]);
        assert_eq!(template(list), Some(named));
        assert_eq!(template(json!([])), Some(TemplateSource::Named(vec![])));
        assert_eq!(
            template(json!({})),
            Some(TemplateSource::Other("an object"))
        );
    }

    #[test]
    fn a_missing_file_sets_nothing_and_a_broken_one_is_named() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Settings::load(dir.path()).unwrap(), Settings::default());
        for text in ["", "[]", "{\"bos_token\":"] {
            std::fs::write(dir.path().join("tokenizer_config.json"), text).unwrap();
            let error = Settings::load(dir.path()).unwrap_err().to_string();
            assert!(error.contains("tokenizer_config.json"), "{error}");
        }
    }
}
