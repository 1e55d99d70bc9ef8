//! Checks that every key of a published config is used, refused by name, or known to be without effect.

use std::path::Path;

use serde_json::Value;

use crate::arch::{Architecture, Attention, ConfigError, Gqa};

/// Keys that change no number in any family, and why.
const WITHOUT_EFFECT: [&str; 15] = [
    // Which class, which element type, which version.
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    // Training.
    "attention_dropout",
    "initializer_range",
    "output_router_logits",
    "router_aux_loss_coef",
    // How other engines cache, and how weights are stored.
    "use_cache",
    "quantization_config",
    // Tensors tell whether there is a layer for drafts.
    "num_nextn_predict_layers",
    // Tokens that only prompts have.
    "pad_token_id",
    "bos_token_id",
    // A name.
    "_name_or_path",
];

/// A published `config.json`.
pub struct Config {
    /// Its text.
    pub text: &'static str,
    /// More keys that change no number.
    pub without_effect: &'static [&'static str],
    /// Keys, values that ask for arithmetic that is not implemented, and what the error says.
    pub refused: &'static [(&'static str, &'static str, &'static str)],
}

impl Config {
    fn json(&self) -> Value {
        serde_json::from_str(self.text).unwrap()
    }

    /// The architecture.
    pub fn parse(&self) -> Architecture {
        parse(&self.json()).unwrap()
    }

    /// With these keys instead.
    pub fn with(&self, changes: Value) -> Result<Architecture, ConfigError> {
        let mut config = self.json();
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        parse(&config)
    }

    /// Without one key.
    pub fn without(&self, key: &str) -> Architecture {
        let mut config = self.json();
        config.as_object_mut().unwrap().remove(key);
        parse(&config).unwrap()
    }

    /// Checks every key with a value of a type that none takes, and those that are refused.
    pub fn check(&self) {
        let before = self.parse();
        let known = |key: &str| WITHOUT_EFFECT.contains(&key) || self.without_effect.contains(&key);
        for key in self.json().as_object().unwrap().keys() {
            let mut config = self.json();
            config[key] = serde_json::json!([[]]);
            match parse(&config) {
                Ok(after) => {
                    assert!(known(key), "{key} is read over");
                    assert_eq!(after, before, "{key}");
                }
                Err(error) if known(key) => panic!("{key} has an effect: {error}"),
                Err(error) => assert!(error.to_string().contains(key), "{key}: {error}"),
            }
        }
        for (key, value, says) in self.refused {
            let mut config = self.json();
            config[*key] = serde_json::from_str(value).unwrap();
            let error = parse(&config).unwrap_err().to_string();
            assert!(error.contains(key) && error.contains(says), "{error}");
        }
    }
}

/// The grouped-query attention of an architecture.
pub fn gqa(arch: &Architecture) -> &Gqa {
    match &arch.attention {
        Attention::Gqa(gqa) => gqa,
        Attention::Mla(_) => panic!("not an architecture with GQA"),
    }
}

fn parse(config: &Value) -> Result<Architecture, ConfigError> {
    Architecture::from_json(Path::new("config.json"), config, None)
}
