//! `inspect`: lists the formats, layers and sizes in a model's shards.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::ensure;
use clap::Args;
use colibri_ring::EngineKind;
use colibri_uring::arch::{Architecture, Part, TensorId, parse_any};
use colibri_uring::model::{prediction, resident_formats};
use colibri_uring::quant::Format;
use colibri_uring::shards::{Findings, Shards, Tensor};
use colibri_uring::stream::Catalog;
use colibri_uring::stream::catalog::Projection;
use colibri_uring::weight::{self, Counts, owner_of_scales};
use serde::Serialize;

use crate::cli::output::findings::print_findings;
use crate::cli::output::formats;
use crate::cli::output::pluralize::pluralize;
use crate::cli::output::printer::{print_json, to_stdout};
use crate::cli::output::size::human;

/// List what the safetensors files of a model hold
#[derive(Debug, Args)]
#[command(after_long_help = "Example:\n  colibri-uring inspect --model /models/GLM-5.2")]
pub struct InspectArgs {
    /// Directory with *.safetensors; repeat it for a split model [default: the demo model]
    #[arg(long, value_name = "DIR", num_args = 1.., env = "COLIBRI_MODEL", help_heading = "Model")]
    pub model: Vec<PathBuf>,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// The JSON object.
#[derive(Debug, Serialize)]
struct Report {
    /// Number of files.
    shards: usize,
    /// Number of tensors, scales included.
    tensors: usize,
    /// Tensors that are scales of other tensors.
    scales: usize,
    /// Bytes of all tensors.
    bytes: u64,
    /// Bytes of the files, with their headers.
    file_bytes: u64,
    index_seconds: f64,
    /// Bytes of the largest routed expert; 0 without experts.
    expert_bytes: u64,
    /// Tensors and bytes by format, or by element type. Scales count with their matrices.
    formats: Counts,
    /// `null` without a config.json.
    layers: Option<Layers>,
    /// What is missing, does not fit or is not used.
    findings: Findings,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Layers {
    dense: usize,
    sparse: usize,
    /// Layers of multi-token prediction, after the last decoder layer.
    mtp: usize,
}

pub fn run(args: &InspectArgs) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    let shards = Shards::open_partial(&args.model, &[], EngineKind::Auto)?;
    let index_seconds = start.elapsed().as_secs_f64();
    // Files without a config.json, or with a wrong one, can still be listed.
    let loaded = (args.model[0].join("config.json").exists())
        .then(|| Architecture::load(&args.model[0]))
        .transpose();
    let config = loaded.as_ref().ok().and_then(Option::as_ref);
    let findings = match config {
        Some(config) => weight::findings(&shards, config)?,
        None => shards.findings().clone(),
    };
    let lacks = findings.lacks();
    // Formats follow from sizes, so they need a whole model.
    let whole = config.filter(|_| lacks.is_empty());
    let packed = whole.map_or_else(HashMap::new, |config| {
        packed(&shards, config).unwrap_or_else(|e| {
            tracing::warn!("formats are element types only: {e:#}");
            HashMap::new()
        })
    });
    let (formats, scales) = by_format(shards.iter(), &packed);
    let report = Report {
        shards: shards.files().len(),
        tensors: shards.len(),
        scales,
        bytes: shards.iter().map(|tensor| tensor.bytes).sum(),
        file_bytes: shards.files().iter().map(|file| file.size()).sum(),
        index_seconds,
        expert_bytes: largest_expert(shards.iter()),
        formats,
        layers: config.map(|config| layers(&shards, config)),
        findings,
    };
    if args.json {
        print_json(&report)?;
    } else {
        to_stdout(|out| print(out, &report))?;
    }
    loaded?;
    ensure!(lacks.is_empty(), "{lacks}");
    Ok(ExitCode::SUCCESS)
}

fn print(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    writeln!(
        out,
        "{} ({} of them scales), {}, in {} of {}",
        pluralize(report.tensors, "tensor"),
        report.scales,
        human(report.bytes),
        pluralize(report.shards, "file"),
        human(report.file_bytes)
    )?;
    out.write_all(formats::table(&report.formats).as_bytes())?;
    if let Some(layers) = report.layers {
        writeln!(
            out,
            "{} with a dense MLP, {} with experts, {} of multi-token prediction",
            pluralize(layers.dense, "layer"),
            layers.sparse,
            layers.mtp
        )?;
    }
    if report.expert_bytes > 0 {
        writeln!(out, "a routed expert has {}", human(report.expert_bytes))?;
    }
    writeln!(out, "indexed in {:.3} s", report.index_seconds)?;
    print_findings(out, &report.findings)
}

/// Formats of all matrices that the model uses, by tensor name.
fn packed(shards: &Shards, config: &Architecture) -> anyhow::Result<HashMap<String, Format>> {
    let with_prediction = prediction(shards, config).ok();
    let config = with_prediction.as_ref().unwrap_or(config);
    let mut formats = resident_formats(shards, config)?;
    let catalog = Catalog::new(shards, config)?;
    for layer in catalog.layers() {
        for expert in 0..catalog.experts() as u32 {
            let matrices = catalog.expert(layer, expert).into_iter().flatten();
            for (projection, matrix) in Projection::ALL.into_iter().zip(matrices) {
                let name = catalog.tensor_name(layer, expert, projection);
                formats.insert(name, matrix.format);
            }
        }
    }
    Ok(formats)
}

fn layers(shards: &Shards, config: &Architecture) -> Layers {
    let sparse = config.sparse_layers().count();
    let beyond = |i: &usize| {
        let norm = config.part_name(*i, Part::AttentionNorm);
        shards.find(&norm).is_some()
    };
    Layers {
        dense: config.num_hidden_layers() - sparse,
        sparse,
        mtp: (config.num_hidden_layers()..).take_while(beyond).count(),
    }
}

/// Counts the tensors by format, and the scales among them.
fn by_format<'a>(
    tensors: impl Iterator<Item = Tensor<'a>>,
    packed: &HashMap<String, Format>,
) -> (Counts, usize) {
    let (mut counts, mut scales) = (Counts::default(), 0);
    for tensor in tensors {
        let owner = owner_of_scales(tensor.name);
        if let Some(format) = owner.and_then(|owner| packed.get(owner)) {
            counts.scales(format.to_string(), tensor.bytes);
            scales += 1;
            continue;
        }
        let format = packed.get(tensor.name).map(Format::to_string);
        let format = format.unwrap_or_else(|| tensor.dtype.to_string());
        counts.tensor(format, tensor.bytes);
    }
    (counts, scales)
}

/// Bytes of the largest routed expert, scales included.
fn largest_expert<'a>(tensors: impl Iterator<Item = Tensor<'a>>) -> u64 {
    let mut experts: BTreeMap<(usize, Option<u32>), u64> = BTreeMap::new();
    for tensor in tensors {
        let id = parse_any(tensor.name).or_else(|| parse_any(owner_of_scales(tensor.name)?));
        let (layer, expert, bytes) = match id {
            Some(TensorId::Expert(layer, expert, _)) => (layer, Some(expert), tensor.bytes),
            // A fused tensor [experts, ...] holds an equal share of every expert.
            Some(TensorId::FusedGateUp(layer) | TensorId::FusedDown(layer)) => {
                let count = tensor.shape.first().copied().unwrap_or(1).max(1);
                (layer, None, tensor.bytes / count)
            }
            _ => continue,
        };
        *experts.entry((layer, expert)).or_default() += bytes;
    }
    experts.into_values().max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use colibri_uring::shards::Dtype;

    use super::*;

    fn tensor<'a>(name: &'a str, shape: &'a [u64], bytes: u64) -> Tensor<'a> {
        Tensor {
            name,
            file: 0,
            offset: 0,
            bytes,
            dtype: Dtype::Bf16,
            shape,
        }
    }

    #[test]
    fn an_expert_is_the_sum_of_its_tensors() {
        let separate = [
            tensor("model.layers.1.mlp.experts.0.gate_proj.weight", &[4, 8], 64),
            tensor("model.layers.1.mlp.experts.0.down_proj.weight", &[8, 4], 64),
            tensor("model.layers.1.mlp.experts.1.gate_proj.weight", &[4, 8], 64),
            tensor(
                "model.layers.1.mlp.shared_experts.gate_proj.weight",
                &[99, 99],
                9999,
            ),
        ];
        assert_eq!(largest_expert(separate.into_iter()), 128);
        let fused = [
            tensor("model.layers.1.mlp.experts.gate_up_proj", &[16, 8, 8], 2048),
            tensor("model.layers.1.mlp.experts.down_proj", &[16, 8, 4], 1024),
        ];
        assert_eq!(largest_expert(fused.into_iter()), 128 + 64);
        assert_eq!(largest_expert(std::iter::empty()), 0);
    }
}
