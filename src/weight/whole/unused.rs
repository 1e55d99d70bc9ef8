//! Finds tensors that the architecture does not use.

use std::collections::HashMap;

use crate::arch::{Architecture, Part, TensorId};
use crate::shards::{Finding, Kind, Severity, Shards, Tensor};
use crate::weight::stored::{id_of, owner_of_scales};

/// Ends of names that change no number here: buffers, and scales of activations and of the cache.
const HARMLESS: [&str; 7] = [
    ".inv_freq",
    ".input_scale",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".attn.bias",
];

/// What an unused tensor means.
enum Unused {
    /// It is of a layer that is used, which may compute something else with it.
    InLayer,
    /// It is of a layer that the config does not count.
    Beyond,
    /// It is of no layer, or of one more layer for drafts.
    Elsewhere,
}

/// The tensors that the architecture does not use.
pub(super) fn unused(shards: &Shards, arch: &Architecture) -> Vec<Finding> {
    let mut parts = HashMap::new();
    let mut found = Vec::new();
    for tensor in shards.iter() {
        if let Some(why) = why(shards, arch, &mut parts, &tensor) {
            found.push(finding(arch, &tensor, &why));
        }
    }
    found
}

fn why(
    shards: &Shards,
    arch: &Architecture,
    parts: &mut HashMap<usize, Vec<Part>>,
    tensor: &Tensor<'_>,
) -> Option<Unused> {
    let id = id_of(arch, tensor.name);
    match id {
        Some(TensorId::Expert(layer, expert, _))
            if layer < arch.layers() && (expert as usize) < arch.experts.count =>
        {
            return None;
        }
        Some(TensorId::Layer(layer, part)) if layer < arch.layers() => {
            let parts = parts.entry(layer).or_insert_with(|| arch.parts(layer));
            let copy = matches!(part, Part::DraftEmbedding | Part::DraftHead);
            // Layers that share the choice of another one may keep their indexers.
            if copy || parts.contains(&part) || Part::INDEXER.contains(&part) {
                return None;
            }
        }
        Some(id) if id.layer().is_none_or(|layer| layer < arch.layers()) => return None,
        _ => {}
    }
    let Some(layer) = layer_of(arch, tensor.name) else {
        return Some(Unused::Elsewhere);
    };
    let harmless = HARMLESS.iter().any(|end| tensor.name.ends_with(end));
    // Scales whose matrix became floats.
    let scales = owner_of_scales(tensor.name).is_some_and(|owner| shards.find(owner).is_some());
    if harmless || scales {
        return Some(Unused::Elsewhere);
    }
    let drafts = arch.is_draft(layer) && arch.prediction.is_some();
    Some(match layer < arch.layers() {
        true => Unused::InLayer,
        false if drafts => Unused::Elsewhere,
        false => Unused::Beyond,
    })
}

/// The layer in the name of a tensor of the trunk, whether the family has the tensor or not.
fn layer_of(arch: &Architecture, name: &str) -> Option<usize> {
    let rest = name.strip_prefix(arch.names.trunk)?.strip_prefix('.')?;
    let rest = rest.strip_prefix(arch.names.layers)?.strip_prefix('.')?;
    rest.split('.').next()?.parse().ok()
}

fn finding(arch: &Architecture, tensor: &Tensor<'_>, why: &Unused) -> Finding {
    let name = tensor.name;
    let (severity, problem, remedy) = match why {
        Unused::InLayer => (
            Severity::Warning,
            format!("tensor {name} is not used, because config.json does not announce it"),
            "the text may differ from the original's; compare config.json with the original",
        ),
        Unused::Beyond => (
            Severity::Warning,
            format!(
                "tensor {name} is not used, because config.json has {} layers (num_hidden_layers)",
                arch.num_hidden_layers()
            ),
            "compare config.json with the original",
        ),
        Unused::Elsewhere => (Severity::Note, format!("tensor {name} is not used"), ""),
    };
    Finding {
        kind: Kind::UnusedTensor,
        severity,
        tensor: Some(name.to_owned()),
        file: None,
        problem,
        remedy: remedy.to_owned(),
    }
}
