//! `simulate`: predicts decode speed on drives and memory that you describe.

use std::fs::File;
use std::io::{self, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use colibri_ring::Options;
use colibri_ring::sim::{Clock, SimDrive};
use colibri_uring::arch::Architecture;
use colibri_uring::pool::Pool;
use colibri_uring::runtime::plan::{self, MemoryOverrides, Plan, PlanRequest, Roots};
use colibri_uring::shards::Shards;
use colibri_uring::stream::routing::{self, RoutingEvent};
use colibri_uring::stream::{Catalog, ExpertFiles, ExpertStore, StoreOptions};
use colibri_uring::tools::simulate::{
    Compute, Replay, Replayed, RoutingParams, kernel_rate, passes, synthetic_routing,
};
use serde::Serialize;

use crate::cli::args::size::{self, Size};
use crate::cli::args::values::LookaheadArg;
use crate::cli::output::pluralize::pluralize;
use crate::cli::output::printer::{print_json, to_stdout};
use crate::cli::output::progress;
use crate::cli::output::size::human;

/// Predict decode speed on a machine that you describe: the real expert store on simulated drives
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    colibri-uring simulate --model /models/GLM-5.2 --device 7GiB/s --device 3.5GiB/s --ram 64GiB\n  \
    colibri-uring decode --model DIR --prompt-file p.txt --save-routing routing.jsonl\n  \
    colibri-uring simulate --model DIR --routing routing.jsonl --device 1.9GiB/s@90us --cache-slots 8\n\
It reads no weights, so a model from `synth --sparse` is enough.")]
pub struct SimulateArgs {
    /// Directory with config.json and *.safetensors; repeat it for a split model [default: the demo model]
    #[arg(long, value_name = "DIR", num_args = 1.., env = "COLIBRI_MODEL", help_heading = "Model")]
    pub model: Vec<PathBuf>,
    /// Bandwidth of a drive with a copy of the model, like 7GiB/s@80us; repeat it for each drive
    ///
    /// The latency defaults to 100us.
    #[arg(long, value_name = "RATE[@LATENCY]", num_args = 1.., required = true, value_delimiter = ',', help_heading = "Drives")]
    device: Vec<Drive>,
    /// Memory budget of the whole process, like 64GiB [default: this machine's available memory]
    #[arg(long, value_name = "SIZE", value_parser = size::memory, env = "COLIBRI_RAM", help_heading = "Memory")]
    ram: Option<Size>,
    /// Expert slabs per MoE layer [default: as many as fit]
    #[arg(long, value_name = "N", help_heading = "Memory")]
    cache_slots: Option<u64>,
    /// Tokens of context to reserve memory for
    #[arg(
        short,
        long,
        value_name = "N",
        default_value_t = 4096,
        help_heading = "Memory"
    )]
    context: usize,
    /// Weights that the machine computes with per second, like 20GB/s [default: measured]
    ///
    /// The default is the rate in the file of --routing, or else this machine's, which is measured first.
    #[arg(long, value_name = "RATE", value_parser = rate, help_heading = "Compute")]
    compute_rate: Option<u64>,
    /// Routing to replay, from `decode --save-routing` [default: synthetic]
    ///
    /// Synthetic routing is as predictable as that of GLM-5.2.
    #[arg(long, value_name = "FILE", help_heading = "Routing")]
    routing: Option<PathBuf>,
    /// Tokens of synthetic routing
    #[arg(
        long,
        value_name = "N",
        default_value_t = 64,
        conflicts_with = "routing",
        value_parser = clap::value_parser!(u32).range(2..=100_000), help_heading = "Routing")]
    tokens: u32,
    /// Random seed of synthetic routing
    #[arg(long, value_name = "S", default_value_t = 0, help_heading = "Routing")]
    seed: u64,
    /// Experts of the next layer to prefetch: auto, off or a number
    #[arg(
        long,
        value_name = "auto|off|K",
        default_value = "auto",
        help_heading = "Drives"
    )]
    lookahead: LookaheadArg,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// Parses bytes per second, like `7GiB/s`.
fn rate(text: &str) -> Result<u64, String> {
    let size = text.strip_suffix("/s").unwrap_or(text);
    if size.trim().parse::<f64>().is_ok() {
        return Err(format!("{size} has no unit: a rate is like 7GiB/s"));
    }
    match size.parse::<Size>() {
        Ok(Size(0)) => Err("a rate is more than 0".to_owned()),
        Ok(Size(bytes)) => Ok(bytes),
        Err(e) => Err(e.to_string()),
    }
}

/// `--device`.
#[derive(Clone, Debug)]
struct Drive(SimDrive);

impl FromStr for Drive {
    type Err = String;

    fn from_str(text: &str) -> Result<Drive, String> {
        let (bandwidth, latency) = match text.split_once('@') {
            Some((bandwidth, latency)) => (bandwidth, microseconds(latency)?),
            None => (text, Duration::from_micros(100)),
        };
        Ok(Drive(SimDrive::new(rate(bandwidth)?, latency)))
    }
}

fn microseconds(text: &str) -> Result<Duration, String> {
    let (number, unit) = match (text.strip_suffix("us"), text.strip_suffix("ms")) {
        (Some(number), _) => (number, 1.0),
        (_, Some(number)) => (number, 1000.0),
        _ => return Err("a latency is like 80us or 1.5ms".to_owned()),
    };
    match number.trim().parse::<f64>() {
        Ok(n) if (0.0..=1e7).contains(&(n * unit)) => Ok(Duration::from_secs_f64(n * unit / 1e6)),
        _ => Err("a latency is from 0us to 10000ms".to_owned()),
    }
}

/// The JSON object.
#[derive(Debug, Serialize)]
struct Report {
    tokens_per_second: f64,
    tokens: u64,
    decode_seconds: f64,
    prompt_seconds: f64,
    io_wait_seconds: f64,
    compute_seconds: f64,
    /// "drives" or "compute".
    bottleneck: &'static str,
    limits: Limits,
    expert_hits: u64,
    expert_misses: u64,
    expert_bytes_read: u64,
    speculative_reads: u64,
    speculative_used: u64,
    cache_slots_per_layer: usize,
    experts_per_layer: usize,
    memory_bytes: u64,
    devices: Vec<Device>,
    /// "recorded" or "made up".
    routing: &'static str,
    /// "measured" in the run of --routing, "given", or "as this machine", measured now.
    compute: &'static str,
    /// Bytes of weights per second, if only that rate is known. The model then assumes that everything else takes no time.
    #[serde(skip_serializing_if = "Option::is_none")]
    compute_bytes_per_second: Option<u64>,
}

/// Speed if the other side took no time.
#[derive(Clone, Copy, Debug, Serialize)]
struct Limits {
    drives_tokens_per_second: f64,
    compute_tokens_per_second: f64,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Device {
    bytes_per_second: u64,
    latency_us: u64,
    bytes: u64,
    /// Fraction of the time that it was reading.
    busy: f64,
}

/// The compute rate was measured on this machine.
const AS_THIS_MACHINE: &str = "as this machine";

/// The inputs of a simulation.
struct Scene {
    config: Architecture,
    shards: Shards,
    files: ExpertFiles,
    plan: Plan,
    events: Vec<RoutingEvent>,
    compute: Compute,
    compute_from: &'static str,
    /// Bytes of weights per second, if only that rate is known.
    compute_rate: Option<f64>,
    /// The load average of this machine, if other work disturbed the measurement of its compute rate.
    busy: Option<f64>,
}

impl Scene {
    fn new(args: &SimulateArgs) -> anyhow::Result<Scene> {
        ensure!(args.context > 0, "a context has at least one token");
        let config = Architecture::load(&args.model[0])?;
        let shards = Shards::open(&args.model)?;
        let catalog = Catalog::new(&shards, &config)?;
        ensure!(
            catalog.layers().next().is_some(),
            "the model has no sparse layer, so nothing is streamed"
        );
        let events = match &args.routing {
            Some(path) => recorded(path, &config)?,
            None => synthetic_routing(
                &config,
                args.tokens as usize,
                RoutingParams::default(),
                args.seed,
            ),
        };
        let measured = events.iter().rev().find_map(|event| match event {
            RoutingEvent::Measured { tokens, seconds } if *tokens > 0 => Some((*tokens, seconds)),
            _ => None,
        });
        let mut busy = None;
        let (compute_rate, compute_from) = match (args.compute_rate, measured) {
            (Some(rate), _) => (Some(rate as f64), "given"),
            (None, Some(_)) => (None, "measured"),
            (None, None) => {
                let threads = colibri_uring::cpus::default_threads();
                // Read it first: the measurement itself is load.
                busy = load_above_half(&load_averages(), threads);
                let rate = kernel_rate(&catalog, &Pool::new(threads));
                (Some(rate), AS_THIS_MACHINE)
            }
        };
        let compute = match (compute_rate, measured) {
            (None, Some((tokens, seconds))) => Compute::measured(&config, seconds, tokens),
            (rate, _) => Compute::at_rate(&config, &shards, &catalog, rate.unwrap_or(1.0)),
        };
        let token = compute.token(config.sparse_layers().count(), config.router.top_k);
        ensure!(
            !token.is_zero(),
            "the arithmetic of a token takes no time, {}",
            match (compute_rate, &args.routing) {
                (None, Some(path)) => format!("says {}: give --compute-rate", path.display()),
                _ => "at that --compute-rate".to_owned(),
            }
        );
        let files = ExpertFiles::on_drives(&shards, catalog, args.device.len())?;
        let ask = PlanRequest {
            threads: 1,
            overrides: MemoryOverrides {
                // --cache-slots without --ram describes a machine with enough memory for them.
                ram: (args.ram.map(|size| size.0)).or(args.cache_slots.map(|_| u64::MAX)),
                cache_slots: args.cache_slots,
            },
            ..PlanRequest::usual(args.context)
        };
        let survey = plan::survey(&shards, &config, &files, ask, &Roots::default());
        let plan = survey.plan()?;
        Ok(Scene {
            config,
            shards,
            files,
            plan,
            events,
            compute,
            compute_from,
            compute_rate,
            busy,
        })
    }
}

/// The content of /proc/loadavg; empty if it cannot be read.
fn load_averages() -> String {
    std::fs::read_to_string("/proc/loadavg").unwrap_or_default()
}

/// The load average of the last minute, if it is above half of the CPUs.
fn load_above_half(loads: &str, cpus: usize) -> Option<f64> {
    let load = loads.split_whitespace().next()?.parse::<f64>().ok()?;
    (load > cpus as f64 / 2.0).then_some(load)
}

/// Reads the routing file, which must be of this model.
fn recorded(path: &Path, config: &Architecture) -> anyhow::Result<Vec<RoutingEvent>> {
    let read = || -> anyhow::Result<_> {
        let (header, events) = routing::read(BufReader::new(File::open(path)?))?;
        let model = routing::RoutingHeader {
            routing: routing::VERSION,
            top_k: config.router.top_k,
            experts: config.experts.count,
            layers: config.num_hidden_layers(),
        };
        ensure!(
            header == model,
            "it is of another model: top {} of {} experts in {} layers, this one has top {} of {} in {}",
            header.top_k,
            header.experts,
            header.layers,
            model.top_k,
            model.experts,
            model.layers
        );
        ensure!(passes(&events) > 0, "it has the routing of no token");
        ensure!(
            passes(&events) > 1,
            "it has the routing of a prompt, and of no token after it"
        );
        let sparse: Vec<usize> = config.sparse_layers().collect();
        let layer_of = |event: &RoutingEvent| match event {
            RoutingEvent::Predicted { layer, .. } | RoutingEvent::Routed { layer, .. } => {
                Some(*layer)
            }
            RoutingEvent::Computed { .. } | RoutingEvent::Measured { .. } => None,
        };
        let dense = (events.iter().filter_map(layer_of)).find(|layer| !sparse.contains(layer));
        if let Some(layer) = dense {
            anyhow::bail!("it has routing of layer {layer}, which is dense");
        }
        Ok(events)
    };
    read().with_context(|| format!("cannot use the routing {}", path.display()))
}

pub fn run(args: &SimulateArgs) -> anyhow::Result<ExitCode> {
    let scene = Scene::new(args)?;
    if let Some(load) = scene.busy {
        tracing::warn!(
            "this machine is busy (a load of {load:.1}), which disturbs the measurement of its compute rate: --compute-rate gives an answer that can be \
             repeated"
        );
    }
    let drives: Vec<SimDrive> = args.device.iter().map(|d| d.0.clone()).collect();
    let top_k = scene.config.router.top_k;
    let share = scene.plan.slots.per_layer_quota;
    let options = StoreOptions {
        slots: scene.plan.slots.clone(),
        lookahead: args.lookahead.into(),
        engine: Options::default(),
    };
    let clock = Clock::default();
    let mut store =
        ExpertStore::simulated(scene.files, top_k, options, drives.clone(), clock.clone())?;
    let bar = progress::tokens(passes(&scene.events));
    let replayed = Replay::new(&mut store, &clock, &scene.compute, top_k)
        .run(&scene.events, |passes| bar.set_position(passes));
    bar.finish_and_clear();
    let replayed = replayed?;
    let stats = store.stats();
    let sources = store.read_stats().map_or_else(Vec::new, |s| s.sources);
    let Replayed {
        prompt,
        decode,
        waited,
        tokens,
        read,
    } = replayed;
    let all = clock.now().as_secs_f64();
    let sparse = scene.config.sparse_layers().count();
    let compute_token = scene.compute.token(sparse, top_k).as_secs_f64();
    let read_token = read as f64 / tokens.max(1) as f64;
    let bandwidth: u64 = drives.iter().map(|d| d.bandwidth).sum();
    let limits = Limits {
        drives_tokens_per_second: bandwidth as f64 / read_token.max(1.0),
        compute_tokens_per_second: 1.0 / compute_token.max(1e-12),
    };
    let report = Report {
        tokens_per_second: tokens as f64 / decode.as_secs_f64(),
        tokens,
        decode_seconds: decode.as_secs_f64(),
        prompt_seconds: prompt.as_secs_f64(),
        io_wait_seconds: waited.as_secs_f64(),
        compute_seconds: (decode - waited).as_secs_f64(),
        bottleneck: match limits.drives_tokens_per_second < limits.compute_tokens_per_second {
            true => "drives",
            false => "compute",
        },
        limits,
        expert_hits: stats.hits,
        expert_misses: stats.misses,
        expert_bytes_read: sources.iter().map(|s| s.bytes).sum(),
        speculative_reads: stats.speculative_reads,
        speculative_used: stats.speculative_used,
        cache_slots_per_layer: share,
        experts_per_layer: scene.config.experts.count,
        memory_bytes: scene.plan.total,
        devices: (drives.iter().zip(&sources))
            .map(|(drive, read)| Device {
                bytes_per_second: drive.bandwidth,
                latency_us: drive.latency.as_micros() as u64,
                bytes: read.bytes,
                busy: read.bytes as f64 / drive.bandwidth as f64 / all,
            })
            .collect(),
        routing: if args.routing.is_some() {
            "recorded"
        } else {
            "made up"
        },
        compute: scene.compute_from,
        compute_bytes_per_second: scene.compute_rate.map(|rate| rate as u64),
    };
    drop(scene.shards);
    if args.json {
        print_json(&report)?;
    } else {
        to_stdout(|out| print(out, &report))?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Report {
    /// Describes where the compute rate comes from.
    fn arithmetic(&self) -> &'static str {
        match self.compute {
            AS_THIS_MACHINE => "as this machine, measured just now",
            other => other,
        }
    }
}

fn print(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    writeln!(
        out,
        "{:.2} tok/s over {} (routing {}, arithmetic {})",
        report.tokens_per_second,
        pluralize(report.tokens, "token"),
        report.routing,
        report.arithmetic()
    )?;
    let demanded = (report.expert_hits + report.expert_misses).max(1);
    writeln!(
        out,
        "memory     {}: {} of {} kept in each layer, {:.0}% of those used are in memory in time, cached or prefetched",
        human(report.memory_bytes),
        report.cache_slots_per_layer,
        pluralize(report.experts_per_layer, "expert"),
        100.0 * report.expert_hits as f64 / demanded as f64
    )?;
    for (i, device) in report.devices.iter().enumerate() {
        writeln!(
            out,
            "drive {i}    {}/s, {} us: read {}, busy {:.0}% of the time",
            human(device.bytes_per_second),
            device.latency_us,
            human(device.bytes),
            100.0 * device.busy
        )?;
    }
    writeln!(
        out,
        "limits     drives {:.2} tok/s, arithmetic {:.2} tok/s",
        report.limits.drives_tokens_per_second, report.limits.compute_tokens_per_second
    )?;
    if let Some(rate) = report.compute_bytes_per_second {
        writeln!(
            out,
            "assumed    arithmetic is weights at {}/s ({}), and nothing else. That is about right for a large model, and may be far off for \
             a small one: `decode --save-routing` measures it, and --routing takes it from there",
            human(rate),
            report.arithmetic()
        )?;
    }
    writeln!(
        out,
        "bottleneck {}",
        match report.bottleneck {
            "drives" =>
                "the drives: more of them, faster ones, or more memory for experts would help",
            _ => "the arithmetic: faster drives would change little",
        }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_busy_above_half_of_its_cpus() {
        assert_eq!(
            load_above_half("1.01 0.50 0.20 2/345 6789\n", 2),
            Some(1.01)
        );
        assert_eq!(load_above_half("1.00 9.00 9.00 2/345 6789\n", 2), None);
        assert_eq!(load_above_half("1.01 0.50 0.20 2/345 6789\n", 4), None);
        assert_eq!(load_above_half("", 1), None);
    }
}
