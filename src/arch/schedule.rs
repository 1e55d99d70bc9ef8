//! Reads the kind of each layer from lists, patterns and frequencies.

use serde_json::Value;

use super::keys::Keys;
use super::{ConfigError, IndexerKind, MlpKind};

/// `mlp_layer_types`, else the first `first_k_dense_replace` layers are dense and the rest sparse; `default` of them without that key.
pub fn mlp_kinds(keys: &Keys, layers: usize, default: usize) -> Result<Vec<MlpKind>, ConfigError> {
    if let Some(value) = keys.given("mlp_layer_types") {
        return names(
            keys,
            "mlp_layer_types",
            value,
            layers,
            &[("dense", MlpKind::Dense), ("sparse", MlpKind::Sparse)],
        );
    }
    first_dense(keys, layers, default)
}

/// The first `first_k_dense_replace` layers are dense and the rest sparse.
pub fn first_dense(
    keys: &Keys,
    layers: usize,
    default: usize,
) -> Result<Vec<MlpKind>, ConfigError> {
    let key = "first_k_dense_replace";
    let dense = keys.int(key, 0, u64::from(u32::MAX), Some(default))?;
    let kind = |i| {
        if i < dense {
            MlpKind::Dense
        } else {
            MlpKind::Sparse
        }
    };
    Ok((0..layers).map(kind).collect())
}

/// Every `decoder_sparse_step`-th layer is sparse, unless `mlp_only_layers` names it.
pub fn sparse_steps(keys: &Keys, layers: usize) -> Result<Vec<MlpKind>, ConfigError> {
    const DENSE: &str = "mlp_only_layers";
    let step = keys.int("decoder_sparse_step", 1, u64::from(u32::MAX), Some(1))?;
    let mut dense = Vec::new();
    if let Some(value) = keys.given(DENSE) {
        let list = value.as_array();
        for layer in list.ok_or_else(|| keys.wrong_type(DENSE, "a list of integers"))? {
            dense.push(keys.check_int(DENSE, layer, 0, u64::from(u32::MAX))? as usize);
        }
    }
    let kind = |layer: usize| match (layer + 1).is_multiple_of(step) && !dense.contains(&layer) {
        true => MlpKind::Sparse,
        false => MlpKind::Dense,
    };
    Ok((0..layers).map(kind).collect())
}

/// `layer_types`, else every other layer from the first on attends to `window` positions, and the others to all.
pub fn windows(
    keys: &Keys,
    layers: usize,
    window: usize,
) -> Result<Vec<Option<usize>>, ConfigError> {
    const KEY: &str = "layer_types";
    let types = [
        ("sliding_attention", Some(window)),
        ("full_attention", None),
    ];
    if let Some(value) = keys.given(KEY) {
        return names(keys, KEY, value, layers, &types);
    }
    let window = |layer: usize| layer.is_multiple_of(2).then_some(window);
    Ok((0..layers).map(window).collect())
}

/// `indexer_types`, else `index_topk_pattern`, else every `index_topk_freq`-th layer from
/// `index_skip_topk_offset` - 1 on (and all before it) is full.
pub fn indexer_kinds(keys: &Keys, layers: usize) -> Result<Vec<IndexerKind>, ConfigError> {
    const TYPES: [(&str, IndexerKind); 2] =
        [("full", IndexerKind::Full), ("shared", IndexerKind::Shared)];
    let (key, kinds) = if let Some(value) = keys.given("indexer_types") {
        let kinds = names(keys, "indexer_types", value, layers, &TYPES)?;
        ("indexer_types", kinds)
    } else if let Some(value) = keys.given("index_topk_pattern") {
        let kinds = match value {
            Value::String(pattern) => letters(keys, pattern, layers)?,
            _ => names(keys, "index_topk_pattern", value, layers, &TYPES)?,
        };
        ("index_topk_pattern", kinds)
    } else {
        let freq = keys
            .int("index_topk_freq", 0, u64::from(u32::MAX), Some(1))?
            .max(1);
        let offset = keys.int("index_skip_topk_offset", 0, u64::from(u32::MAX), Some(2))?;
        let kind = |i: usize| {
            if (i + 1).saturating_sub(offset).is_multiple_of(freq) {
                IndexerKind::Full
            } else {
                IndexerKind::Shared
            }
        };
        let kinds = (0..layers).map(kind).collect();
        ("index_skip_topk_offset", kinds)
    };
    if kinds.first() != Some(&IndexerKind::Full) {
        return Err(keys.range(
            key,
            "a schedule whose first layer is full (a shared layer has none to share with)".into(),
        ));
    }
    Ok(kinds)
}

/// A list of type names; it may be longer than the model (an entry for the prediction layer).
fn names<T: Copy>(
    keys: &Keys,
    key: &str,
    value: &Value,
    layers: usize,
    types: &[(&str, T)],
) -> Result<Vec<T>, ConfigError> {
    let list = value
        .as_array()
        .ok_or_else(|| keys.wrong_type(key, "a list of strings"))?;
    if list.len() < layers {
        return Err(too_short(keys, key, list.len(), layers));
    }
    let find = |value: &Value| {
        let name = value
            .as_str()
            .ok_or_else(|| keys.wrong_type(key, "a list of strings"))?;
        let found = types.iter().find(|(n, _)| *n == name);
        found.map(|(_, kind)| *kind).ok_or_else(|| {
            keys.range(
                key,
                format!("a list of \"{}\" and \"{}\"", types[0].0, types[1].0),
            )
        })
    };
    list[..layers].iter().map(find).collect()
}

fn letters(keys: &Keys, pattern: &str, layers: usize) -> Result<Vec<IndexerKind>, ConfigError> {
    let key = "index_topk_pattern";
    let count = pattern.chars().count();
    if count < layers {
        return Err(too_short(keys, key, count, layers));
    }
    let kind = |c| match c {
        'F' => Ok(IndexerKind::Full),
        'S' => Ok(IndexerKind::Shared),
        _ => Err(keys.range(key, "a string of F and S".into())),
    };
    pattern.chars().take(layers).map(kind).collect()
}

fn too_short(keys: &Keys, key: &str, found: usize, layers: usize) -> ConfigError {
    keys.range(
        key,
        format!("one entry for each of {layers} layers (it has {found})"),
    )
}

/// Refuses `layer_types` other than those of sparse attention, which every layer of these families has.
pub fn only_indexed(keys: &Keys) -> Result<(), ConfigError> {
    let kinds = ["indexed_attention", "deepseek_sparse_attention"];
    only_kinds(keys, "layer_types", &kinds)
}

/// Refuses a list of layer kinds with any other kind than `supported`; absent and null pass.
pub fn only_kinds(keys: &Keys, key: &str, supported: &[&str]) -> Result<(), ConfigError> {
    let Some(value) = keys.given(key) else {
        return Ok(());
    };
    let wrong_type = || keys.wrong_type(key, "a list of strings");
    for kind in value.as_array().ok_or_else(wrong_type)? {
        if !supported.contains(&kind.as_str().ok_or_else(wrong_type)?) {
            return Err(keys.unsupported_of(key, kind, supported.join(", ")));
        }
    }
    Ok(())
}
