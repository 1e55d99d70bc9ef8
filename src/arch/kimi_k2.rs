//! The family `kimi_k2` (Kimi K2, and the language model of K2.5): the arithmetic of `deepseek_v3` under another name.
//!
//! Follows `modeling_deepseek_v3.py` of transformers, which loads it with that class.

use super::deepseek_v3;
use super::family::{Family, Preset};
use super::keys::Keys;
use super::mla::{self, Defaults};
use super::{Architecture, ConfigError};

/// The family.
pub const FAMILY: Family = Family {
    model_type: "kimi_k2",
    names: mla::NAMES,
    parse,
    presets: &[Preset {
        name: "kimi-k2",
        about: "Kimi K2: 1 trillion parameters",
        config: include_str!("published/kimi-k2.json"),
    }],
    default_eos: deepseek_v3::FAMILY.default_eos,
    multimodal: deepseek_v3::FAMILY.multimodal,
};

const DEFAULTS: Defaults = Defaults {
    model_type: FAMILY.model_type,
    ..deepseek_v3::DEFAULTS
};

fn parse(keys: &Keys) -> Result<Architecture, ConfigError> {
    mla::parse(keys, &DEFAULTS)
}
