//! Finds what keeps a model from being whole: tensors and files that are missing, do not fit, or are in a format of other software.
//!
//! Reads no data of tensors, except where a file has holes. Every command that opens a model asks [`findings`], so that all of them give the same answer.

mod foreign;
mod holes;
mod unused;

use std::collections::{HashMap, HashSet};

use super::error::WeightError;
use super::stored::{Matrices, floats, is_stored};
use crate::arch::{Architecture, IndexerKind, Part, Prediction, Projection, Shape, TensorId};
use crate::shards::{Finding, Findings, Kind, Severity, ShardError, Shards, Tensor};

/// Whether the checkpoint has an indexer: any tensor of that of a full layer. Then it must have all of them.
pub fn has_indexers(arch: &Architecture, exists: impl Fn(TensorId) -> bool) -> bool {
    let Some(indexer) = &arch.indexer else {
        return false;
    };
    let layers = indexer.layers.iter().enumerate();
    let mut full = layers.filter(|(_, kind)| **kind == IndexerKind::Full);
    full.any(|(layer, _)| has_indexer(layer, &exists))
}

/// Whether any tensor of a layer's indexer exists.
pub fn has_indexer(layer: usize, exists: impl Fn(TensorId) -> bool) -> bool {
    let mut ids = (Part::INDEXER.into_iter()).map(|part| TensorId::Layer(layer, part));
    ids.any(exists)
}

/// The architecture with its prediction layer, if the checkpoint has any tensor that only this layer has.
pub fn with_prediction(shards: &Shards, arch: &Architecture) -> Option<Architecture> {
    let layer = arch.num_hidden_layers();
    let exists = |id| shards.find(&arch.name(id)).is_some();
    let mut parts = (Part::DRAFT.into_iter()).filter(|part| arch.names.has(*part));
    if !parts.any(|part| exists(TensorId::Layer(layer, part))) {
        return None;
    }
    let indexer = arch.indexer.is_some() && has_indexer(layer, exists);
    Some(Architecture {
        prediction: Some(Prediction { indexer }),
        ..arch.clone()
    })
}

/// Everything that is wrong with the model, files included.
///
/// # Errors
/// A malformed stamp of formats, and an index that cannot be read again.
pub fn findings(shards: &Shards, arch: &Architecture) -> Result<Findings, WeightError> {
    let mut findings = shards.findings().clone();
    let with_prediction = with_prediction(shards, arch);
    let arch = with_prediction.as_ref().unwrap_or(arch);
    let mut check = Check {
        shards,
        arch,
        matrices: Matrices::new(shards)?,
        indexers: has_indexers(arch, |id| shards.find(&arch.name(id)).is_some()),
        used: 0,
        found: Vec::new(),
    };
    // Without any file, every tensor is missing.
    if !shards.is_empty() {
        check.everything();
    }
    let (mut found, used) = (check.found, check.used);
    let known: HashSet<&str> = findings
        .0
        .iter()
        .filter_map(|f| f.tensor.as_deref())
        .collect();
    found.retain(|f| {
        !f.tensor
            .as_deref()
            .is_some_and(|tensor| known.contains(tensor))
    });
    if found.iter().any(|f| f.kind == Kind::MissingTensor) {
        let named = shards.named_files()?;
        found.iter_mut().for_each(|f| name_file(f, shards, &named));
        findings.0.extend(shards.number_gaps().0);
        findings.0.extend(foreign::consolidated(shards));
    }
    findings.0.extend(found);
    findings.0.extend(holes::holes(shards, arch));
    if findings.errors().is_empty() {
        findings.0.extend(dense_attention(shards, arch));
        if used < shards.len() {
            findings.0.extend(unused::unused(shards, arch));
        }
    }
    Ok(findings)
}

/// Adds to a missing tensor the file that the index names for it.
fn name_file(finding: &mut Finding, shards: &Shards, named: &HashMap<String, String>) {
    let Some(tensor) = finding.tensor.as_deref() else {
        return;
    };
    if finding.kind == Kind::MissingTensor && finding.file.is_none() {
        *finding = Finding {
            severity: finding.severity,
            ..Finding::missing_tensor(tensor, &shards.shown_dirs(), named.get(tensor).cloned())
        };
    }
}

/// Long contexts are attended densely by a model that was made for sparse attention.
fn dense_attention(shards: &Shards, arch: &Architecture) -> Option<Finding> {
    let top_k = arch.indexer.as_ref()?.top_k;
    let exists = |id| shards.find(&arch.name(id)).is_some();
    if has_indexers(arch, exists) || top_k >= arch.max_position_embeddings {
        return None;
    }
    Some(Finding {
        kind: Kind::DenseAttention,
        severity: Severity::Note,
        tensor: None,
        file: None,
        problem: format!(
            "attention is dense: the model has no indexer tensors, although its config selects {top_k} positions (index_topk)"
        ),
        remedy: "beyond that many tokens the text may differ from the original's".into(),
    })
}

/// The search for what is missing or does not fit.
struct Check<'a> {
    shards: &'a Shards,
    arch: &'a Architecture,
    matrices: Matrices<'a>,
    indexers: bool,
    /// Tensors that the architecture uses, scales included.
    used: usize,
    found: Vec<Finding>,
}

impl Check<'_> {
    fn everything(&mut self) {
        let arch = self.arch;
        self.tensor(TensorId::Embedding);
        for layer in 0..arch.layers() {
            let before = self.found.len();
            for part in arch.parts(layer) {
                if self.indexers || !Part::INDEXER.contains(&part) {
                    self.tensor(TensorId::Layer(layer, part));
                }
            }
            if arch.sparse_layers().any(|sparse| sparse == layer) {
                self.experts(layer);
            }
            if layer == arch.num_hidden_layers() {
                let drafts = |finding: &mut Finding| finding.severity = Severity::Drafts;
                self.found[before..].iter_mut().for_each(drafts);
            }
        }
        self.tensor(TensorId::Norm);
        if !arch.tie_word_embeddings {
            self.tensor(TensorId::Head);
        }
    }

    /// The experts of a layer, in the layout that any tensor of it tells.
    fn experts(&mut self, layer: usize) {
        let fused = [TensorId::FusedGateUp(layer), TensorId::FusedDown(layer)];
        let pairs = self.arch.experts.in_pairs();
        let exists = |id: &TensorId| is_stored(self.shards, &self.arch.name(*id));
        let single = TensorId::Expert(layer, 0, Projection::Gate);
        match fused.iter().find(|id| exists(id)) {
            Some(id) if !pairs && exists(&single) => {
                let tensor = self.arch.name(*id);
                let problem = format!(
                    "layer {layer} has its experts twice, as {tensor} and one by one ({})",
                    self.arch.name(single)
                );
                self.found.push(Finding {
                    kind: Kind::TwoLayouts,
                    severity: Severity::Error,
                    tensor: Some(tensor),
                    file: None,
                    problem,
                    remedy: "remove one of them".into(),
                });
            }
            Some(_) => fused.into_iter().for_each(|id| self.tensor(id)),
            None if pairs => fused.into_iter().for_each(|id| self.tensor(id)),
            None => {
                let foreign = fused.into_iter().find_map(|id| {
                    foreign::format(self.shards, &self.arch.name(id), self.arch.shape(id)?)
                });
                if let Some(finding) = foreign {
                    self.found.push(finding);
                    return;
                }
                for expert in 0..self.arch.experts.count as u32 {
                    for projection in Projection::ALL {
                        self.tensor(TensorId::Expert(layer, expert, projection));
                    }
                }
            }
        }
    }

    fn tensor(&mut self, id: TensorId) {
        let name = self.arch.name(id);
        let Some(shape) = self.arch.shape(id) else {
            return;
        };
        let found = match shape {
            Shape::Vector(len) => (self.shards.get(&name).map_err(WeightError::from))
                .and_then(|tensor| floats(&tensor, &[len]).map(|_| None)),
            Shape::Matrix(rows, cols) => self.scales(&name, &[rows, cols]),
            Shape::Stack(stack, rows, cols) if self.arch.experts.in_pairs() => (self.matrices)
                .find_in_pairs(&name, [stack, rows, cols])
                .map(|stored| stored.scales),
            Shape::Stack(stack, rows, cols) => self.scales(&name, &[stack, rows, cols]),
        };
        match found {
            Ok(scales) => self.used += 1 + usize::from(scales.is_some()),
            Err(error) => {
                let foreign = foreign::format(self.shards, &name, shape);
                let finding = foreign.unwrap_or_else(|| self.unfit(&name, &error));
                self.found.push(finding);
            }
        }
    }

    /// The scales of a matrix, where it has any.
    fn scales(&self, name: &str, shape: &[usize]) -> Result<Option<Tensor<'_>>, WeightError> {
        self.matrices.find(name, shape).map(|stored| stored.scales)
    }

    fn unfit(&self, name: &str, error: &WeightError) -> Finding {
        let finding = |kind, tensor: &str, remedy: &str| Finding {
            kind,
            severity: Severity::Error,
            tensor: Some(tensor.to_owned()),
            file: None,
            problem: error.to_string(),
            remedy: remedy.to_owned(),
        };
        let missing = |name| Finding::missing_tensor(name, &self.shards.shown_dirs(), None);
        let cause = match error {
            WeightError::In { source, .. } => source,
            error => error,
        };
        match cause {
            WeightError::Shard(ShardError::Missing { name, .. }) => missing(name),
            WeightError::NoScales { scales, .. } => missing(scales),
            WeightError::Format { .. } => finding(Kind::Unfit, name, ""),
            _ => finding(
                Kind::Unfit,
                name,
                "take config.json and weights of one model",
            ),
        }
    }
}
