//! `inspect`: what is in a model's shards.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use clap::builder::FalseyValueParser;
use colibri_uring::shards::{Dtype, Shards, Tensor};
use serde::Serialize;

use super::size::human;

/// Show what is in the safetensors files of a model
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  colibri-uring inspect --model /models/GLM-5.2")]
pub struct InspectArgs {
    /// Directory with *.safetensors files; give it several times for a model split over drives
    #[arg(long, value_name = "DIR", num_args = 1.., required = true, env = "COLIBRI_MODEL")]
    model: Vec<PathBuf>,
    /// Print one JSON object
    #[arg(long, env = "COLIBRI_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

/// The JSON object.
#[derive(Debug, Serialize)]
struct Report {
    /// Number of files.
    shards: usize,
    /// Number of tensors.
    tensors: usize,
    /// Bytes of all tensors.
    bytes: u64,
    /// How long indexing took.
    index_seconds: f64,
    /// Bytes of the largest routed expert; 0 when there is none.
    expert_bytes: u64,
    /// Tensors and bytes by element type.
    formats: BTreeMap<&'static str, Count>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct Count {
    tensors: u64,
    bytes: u64,
}

/// Indexes the shards and prints the report.
pub fn run(args: &InspectArgs) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    let shards = Shards::open(&args.model)?;
    let index_seconds = start.elapsed().as_secs_f64();
    let report = Report {
        shards: shards.files().len(),
        tensors: shards.len(),
        bytes: shards.iter().map(|tensor| tensor.bytes).sum(),
        index_seconds,
        expert_bytes: largest_expert(shards.iter()),
        formats: formats(shards.iter()),
    };
    if args.json {
        super::print_json(&report)?;
    } else {
        print(&report)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn print(report: &Report) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(
        out,
        "{} tensors, {}, in {} files",
        report.tensors,
        human(report.bytes),
        report.shards
    )?;
    for (format, count) in &report.formats {
        writeln!(
            out,
            "  {format:<8} {:>8} tensors  {}",
            count.tensors,
            human(count.bytes)
        )?;
    }
    if report.expert_bytes > 0 {
        writeln!(out, "a routed expert has {}", human(report.expert_bytes))?;
    }
    writeln!(out, "indexed in {:.3} s", report.index_seconds)
}

fn formats<'a>(tensors: impl Iterator<Item = Tensor<'a>>) -> BTreeMap<&'static str, Count> {
    let mut formats: BTreeMap<_, Count> = BTreeMap::new();
    for tensor in tensors {
        let count = formats.entry(Dtype::name(tensor.dtype)).or_default();
        count.tensors += 1;
        count.bytes += tensor.bytes;
    }
    formats
}

/// Bytes of all tensors of the largest routed expert, scales included.
fn largest_expert<'a>(tensors: impl Iterator<Item = Tensor<'a>>) -> u64 {
    let mut experts: BTreeMap<(&str, Option<u32>), u64> = BTreeMap::new();
    for tensor in tensors {
        let Some((layer, rest)) = tensor.name.split_once(".mlp.experts.") else {
            continue;
        };
        let id = rest.split('.').next().and_then(|id| id.parse::<u32>().ok());
        // A fused block [experts, ...] holds an equal share of every expert.
        let bytes = match id {
            Some(_) => tensor.bytes,
            None => tensor.bytes / tensor.shape.first().copied().unwrap_or(1).max(1),
        };
        *experts.entry((layer, id)).or_default() += bytes;
    }
    experts.into_values().max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
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
