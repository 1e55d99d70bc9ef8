//! Defines what a family file provides, and a named config of it with changed dimensions.

use serde_json::Value;

use super::dimensions::Dimension;
use super::keys::Keys;
use super::{Architecture, ConfigError, Names};

/// A model family.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// Spelling of tensors.
    pub(super) names: Names,
    /// Reads the keys. Stop tokens are read by the caller.
    pub(super) parse: fn(&Keys) -> Result<Architecture, ConfigError>,
    /// Shapes with a name, for `synth`.
    pub(super) presets: &'static [Preset],
    /// Stop tokens where no file names any.
    pub(super) default_eos: &'static [u32],
    /// Names of trunk and head in multimodal checkpoints, whose keys are in `text_config`.
    pub(super) multimodal: (&'static str, &'static str),
}

impl Family {
    pub(super) fn parse(&self, keys: &Keys) -> Result<Architecture, ConfigError> {
        (self.parse)(keys)
    }
}

/// A shape with a name: the config of a published model, or of a smaller one.
#[derive(Clone, Copy, Debug)]
pub struct Preset {
    /// What users call it.
    pub name: &'static str,
    /// The model and its size, in a few words.
    pub about: &'static str,
    /// Text of `config.json`.
    pub(super) config: &'static str,
}

impl Preset {
    /// `config.json` of a model of random floats with these changes, with a layer for drafts if `drafts`.
    ///
    /// # Errors
    /// The first of `changes` that is no dimension of the preset.
    pub fn config_json(
        &self,
        changes: &[(Dimension, u64)],
        drafts: bool,
    ) -> Result<Value, Dimension> {
        let mut config: Value =
            serde_json::from_str(self.config).expect("a preset's config is JSON");
        for (dimension, value) in changes {
            dimension.set(&mut config, *value).ok_or(*dimension)?;
        }
        config["num_nextn_predict_layers"] = u8::from(drafts).into();
        // A random model never means to stop, and is stored in other formats than the published one.
        config["eos_token_id"] = Value::Array(Vec::new());
        if let Some(config) = config.as_object_mut() {
            for key in ["quantization_config", "auto_map"] {
                config.remove(key);
            }
        }
        Ok(config)
    }
}
