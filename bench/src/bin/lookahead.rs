//! Compares `--lookahead auto` with off and every fixed width, on simulated drives and caches.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use colibri_ring::Options;
use colibri_ring::sim::{Clock, SimDrive};
use colibri_uring::arch::Architecture;
use colibri_uring::shards::Shards;
use colibri_uring::stream::slots::{Budget, slots};
use colibri_uring::stream::{Catalog, ExpertFiles, ExpertStore, Lookahead, StoreOptions};
use colibri_uring::tools::simulate::{Compute, Replay, RoutingParams, synthetic_routing};

/// Compare `--lookahead auto` with off and with fixed widths, in simulation
#[derive(Debug, Parser)]
#[command(
    after_help = "Needs no root. It reads no weights, so models of `synth --sparse` are enough.\n\n\
    Example:\n  cargo build --release --workspace\n  \
    target/release/colibri-uring synth glm --preset glm-5.2 --sparse\n  \
    target/release/lookahead --model glm --device 1,2,7 --slots 2,8,16"
)]
struct Args {
    /// Directory of a model; repeat it for more
    #[arg(long, required = true)]
    model: Vec<PathBuf>,
    /// Bandwidths of the drive in MB/s
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "40,100,200,400,800,1600,3200,8000"
    )]
    device: Vec<u64>,
    /// Latency of the drive in microseconds
    #[arg(long, default_value_t = 100)]
    latency: u64,
    /// Whether the drive completes its queue in bursts
    #[arg(long)]
    bursts: bool,
    /// Expert slabs for each layer
    #[arg(long, value_delimiter = ',', default_value = "2,4,8,16,24,48")]
    slots: Vec<usize>,
    /// Weights that the machine computes with per second, in MB/s
    #[arg(long, value_delimiter = ',', default_value = "15000")]
    compute: Vec<u64>,
    /// Seeds of the routing
    #[arg(long, value_delimiter = ',', default_value = "1,2,3")]
    seed: Vec<u64>,
    /// Tokens of a run, of which the first is the prompt
    #[arg(long, default_value_t = 300)]
    tokens: usize,
    /// Share of a layer's experts that the early prediction finds
    #[arg(long, default_value_t = RoutingParams::default().early)]
    early: f64,
    /// Share that the late prediction finds
    #[arg(long, default_value_t = RoutingParams::default().late)]
    late: f64,
    /// Print every point, with the speed of every width
    #[arg(long)]
    all: bool,
}

/// A machine and a model.
#[derive(Clone, Copy, Debug)]
struct Point<'a> {
    model: &'a Model,
    device: u64,
    slots: usize,
    compute: u64,
}

#[derive(Debug)]
struct Model {
    name: String,
    arch: Architecture,
    shards: Shards,
}

impl Model {
    fn open(dir: &PathBuf) -> anyhow::Result<Model> {
        let name = dir.file_name().context("a model is a directory")?;
        Ok(Model {
            name: name.to_string_lossy().into_owned(),
            arch: Architecture::load(dir)?,
            shards: Shards::open(std::slice::from_ref(dir))?,
        })
    }

    /// Off first, then fixed widths, then auto.
    fn modes(&self) -> Vec<Lookahead> {
        let top_k = self.arch.router.top_k;
        let widths = (1..=top_k).filter(|k| top_k <= 4 || k % 2 == 0 || *k == 1);
        let mut modes = vec![Lookahead::Off];
        modes.extend(widths.map(Lookahead::Experts));
        modes.push(Lookahead::Auto);
        modes
    }
}

/// Numbers of points, and the speeds of each mode there.
type Done = Vec<(usize, Vec<f64>)>;

impl Point<'_> {
    /// Tokens per second.
    fn speed(&self, args: &Args, seed: u64, lookahead: Lookahead) -> anyhow::Result<f64> {
        let Model { arch, shards, .. } = self.model;
        let top_k = arch.router.top_k;
        let catalog = Catalog::new(shards, arch)?;
        let compute = Compute::at_rate(arch, shards, &catalog, self.compute as f64 * 1e6);
        let files = ExpertFiles::on_drives(shards, catalog, 1)?;
        let budget = Budget::SlotsPerLayer(self.slots);
        let options = StoreOptions {
            slots: slots(&files.footprints(), files.moe_layers(), top_k, budget)?,
            lookahead,
            engine: Options::default(),
        };
        let latency = Duration::from_micros(args.latency);
        let drive = SimDrive {
            bursts: args.bursts,
            ..SimDrive::new(self.device * 1_000_000, latency)
        };
        let clock = Clock::default();
        let mut store = ExpertStore::simulated(files, top_k, options, vec![drive], clock.clone())?;
        let params = RoutingParams {
            early: args.early,
            late: args.late,
            ..RoutingParams::default()
        };
        let events = synthetic_routing(arch, args.tokens, params, seed);
        let replayed = Replay::new(&mut store, &clock, &compute, top_k).run(&events, |_| {})?;
        Ok(replayed.tokens as f64 / replayed.decode.as_secs_f64())
    }

    /// Mean speed of each mode over the seeds.
    fn speeds(&self, args: &Args) -> anyhow::Result<Vec<f64>> {
        let modes = self.model.modes();
        let mean = |mode: &Lookahead| {
            let mut sum = 0.0;
            for seed in &args.seed {
                sum += self.speed(args, *seed, *mode)?;
            }
            Ok(sum / args.seed.len() as f64)
        };
        modes.iter().map(mean).collect()
    }
}

/// Auto relative to off, and to the best of off and the fixed widths.
fn relative(speeds: &[f64]) -> (f64, f64) {
    let (auto, others) = speeds.split_last().expect("auto is a mode");
    let best = others.iter().copied().fold(0.0, f64::max);
    (auto / others[0], auto / best)
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let models = (args.model.iter())
        .map(Model::open)
        .collect::<anyhow::Result<Vec<Model>>>()?;
    let mut points = Vec::new();
    for model in &models {
        for &compute in &args.compute {
            for &slots in &args.slots {
                points.extend(args.device.iter().map(|&device| Point {
                    model,
                    device,
                    slots,
                    compute,
                }));
            }
        }
    }
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Done::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            match points.get(at) {
                Some(point) => done.push((at, point.speeds(&args)?)),
                None => return Ok(done),
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let results: Vec<anyhow::Result<Done>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let joined = workers.into_iter().map(|worker| worker.join());
        joined.map(|result| result.expect("no panic")).collect()
    });
    let mut speeds = vec![Vec::new(); points.len()];
    for (at, result) in results.into_iter().collect::<Result<Vec<_>, _>>()?.concat() {
        speeds[at] = result;
    }
    if args.all {
        print_all(&points, &speeds);
    }
    for model in &models {
        print_table(&args, model, &points, &speeds);
    }
    print_summary(&points, &speeds);
    Ok(())
}

/// Prints the speed of every width at every point.
fn print_all(points: &[Point], speeds: &[Vec<f64>]) {
    for (point, speeds) in points.iter().zip(speeds) {
        let (off, best) = relative(speeds);
        let each: Vec<String> = speeds.iter().map(|speed| format!("{speed:.3}")).collect();
        println!(
            "{} {} MB/s {} slots compute {}: off {off:.3} best {best:.3} of {}",
            point.model.name,
            point.device,
            point.slots,
            point.compute,
            each.join(" ")
        );
    }
}

/// Prints auto relative to off and to the best, by cache and drive.
fn print_table(args: &Args, model: &Model, points: &[Point], speeds: &[Vec<f64>]) {
    for &compute in &args.compute {
        let devices: Vec<String> = args.device.iter().map(|d| format!("{d} MB/s")).collect();
        println!(
            "\n{}, {compute} MB/s of arithmetic: auto relative to off / to the best\n",
            model.name
        );
        println!(
            "| slots | {} |\n|---{}|",
            devices.join(" | "),
            "|---".repeat(devices.len())
        );
        for &slots in &args.slots {
            let of_row = |point: &Point| {
                (&raw const *point.model, point.compute, point.slots)
                    == (&raw const *model, compute, slots)
            };
            let row = points.iter().zip(speeds).filter(|(point, _)| of_row(point));
            let cells = row.map(|(_, speeds)| {
                let (off, best) = relative(speeds);
                format!("{off:.2} / {best:.3}")
            });
            println!("| {slots} | {} |", cells.collect::<Vec<_>>().join(" | "));
        }
    }
}

/// Prints the mean and the worst point, relative to the best.
fn print_summary(points: &[Point], speeds: &[Vec<f64>]) {
    let ratios: Vec<f64> = speeds.iter().map(|speeds| relative(speeds).1).collect();
    let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
    let low = ratios.iter().filter(|ratio| **ratio < 0.98).count();
    let worst = (points.iter().zip(&ratios)).min_by(|a, b| a.1.total_cmp(b.1));
    println!(
        "\n{} points: mean {mean:.4}, {low} below 0.98",
        ratios.len()
    );
    if let Some((
        Point {
            model,
            device,
            slots,
            compute,
        },
        ratio,
    )) = worst
    {
        println!(
            "worst {ratio:.3}: {}, {device} MB/s, {slots} slots, {compute} MB/s of arithmetic",
            model.name
        );
    }
}
