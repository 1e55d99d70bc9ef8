//! Lists the families, and finds one by the `model_type` of a `config.json`.

use super::family::{Family, Preset};
use super::keys::Keys;
use super::{
    ConfigError, TensorId, deepseek_v3, deepseek_v32, glm_moe_dsa, glm4_moe, glm4_moe_lite,
    gpt_oss, kimi_k2, minimax_m2, olmoe, qwen3_moe,
};

/// Every supported family. A family is one file and one line here.
const FAMILIES: &[Family] = &[
    glm_moe_dsa::FAMILY,
    deepseek_v3::FAMILY,
    deepseek_v32::FAMILY,
    kimi_k2::FAMILY,
    glm4_moe_lite::FAMILY,
    glm4_moe::FAMILY,
    qwen3_moe::FAMILY,
    minimax_m2::FAMILY,
    olmoe::FAMILY,
    gpt_oss::FAMILY,
];

/// The family that `model_type` names.
pub(super) fn find(keys: &Keys) -> Result<&'static Family, ConfigError> {
    const KEY: &str = "model_type";
    let name = keys.required(KEY)?.as_str();
    let name = name.ok_or_else(|| keys.wrong_type(KEY, "a string"))?;
    let found = FAMILIES.iter().find(|family| family.model_type == name);
    found.ok_or_else(|| {
        let names: Vec<_> = FAMILIES.iter().map(|family| family.model_type).collect();
        keys.unsupported(KEY, names.join(", "))
    })
}

/// The tensor that a family has by this name, for checkpoints whose family is not known.
pub fn parse_any(name: &str) -> Option<TensorId> {
    FAMILIES.iter().find_map(|family| family.names.parse(name))
}

/// The shapes with a name, of all families.
pub fn presets() -> impl Iterator<Item = &'static Preset> {
    FAMILIES.iter().flat_map(|family| family.presets)
}
