//! Decoding on pairs of unequal simulated drives, against the faster of the two alone: a slower drive must not slow it down.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::{Parser, ValueEnum};
use colibri_ring::Options;
use colibri_ring::sim::{Clock, SimDrive};
use colibri_uring::arch::Architecture;
use colibri_uring::shards::Shards;
use colibri_uring::stream::slots::{Budget, slots};
use colibri_uring::stream::{Catalog, ExpertFiles, ExpertStore, Lookahead, StoreOptions};
use colibri_uring::tools::measure::Rng;
use colibri_uring::tools::simulate::{Compute, Replay, RoutingParams, synthetic_routing};

const MIB: f64 = (1 << 20) as f64;

/// Tokens per second on two unequal simulated drives, relative to the faster one alone
#[derive(Debug, Parser)]
#[command(
    after_help = "Models of `colibri-uring synth --sparse` are enough. Example:\n  \
    cargo run --release -p colibri-bench --bin unequal -- --model synth864 --cases 100 --what cut"
)]
struct Args {
    /// Directory of a model; repeat it for several
    #[arg(long, required = true)]
    model: Vec<PathBuf>,
    /// Cases of each model
    #[arg(long, default_value_t = 40)]
    cases: u64,
    /// Random seed of the cases
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Tokens of a case
    #[arg(long, default_value_t = 40)]
    tokens: usize,
    /// What happens to the drives
    #[arg(long, value_enum, default_value = "steady")]
    what: What,
    /// Prefetch
    #[arg(long)]
    lookahead: Option<usize>,
    /// Print every case
    #[arg(long)]
    all: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// Nothing
    Steady,
    /// Reads take up to half longer or shorter
    Jitter,
    /// The faster completes its queue in bursts
    Bursts,
    /// Both are equal
    Equal,
    /// The faster is cut to less than the slower after a second; counted from 300 ms later on
    Cut,
    /// The slower becomes much faster after a second; compared with two drives that always were so, from 3 s later on
    Recover,
    /// The faster stalls for 200 ms every second
    Stalls,
    /// The slower fails every read
    Fails,
}

struct Model {
    name: String,
    arch: Architecture,
    shards: Shards,
}

/// A random machine.
struct Case {
    drives: [SimDrive; 2],
    slots: usize,
    compute_rate: f64,
    seed: u64,
}

impl Case {
    fn new(rng: &mut Rng, what: What) -> Case {
        let mut random = || rng.below(1 << 30) as f64 / f64::from(1 << 30);
        let mut between = |least: f64, most: f64| least * (most / least).powf(random());
        let mut drive = || {
            let rate = between(20e6, 7168.0 * MIB);
            let latency = between(60.0, 200.0);
            SimDrive::new(rate as u64, Duration::from_secs_f64(latency / 1e6))
        };
        let mut drives = [drive(), drive()];
        // In either order, so that neither is always first.
        let (fast, slow) = match drives[0].bandwidth > drives[1].bandwidth {
            true => (0, 1),
            false => (1, 0),
        };
        let second = Duration::from_secs(1);
        match what {
            What::Steady => {}
            What::Jitter => drives.iter_mut().for_each(|d| d.jitter = 0.5),
            What::Bursts => drives[fast].bursts = true,
            What::Equal => drives[slow] = drives[fast].clone(),
            What::Cut => {
                let cut = between(20e6, drives[slow].bandwidth as f64) as u64;
                drives[fast].changes = vec![(second, cut)];
            }
            What::Recover => {
                let fast = drives[fast].bandwidth;
                drives[slow].changes = vec![(second, fast)];
            }
            What::Stalls => {
                let rate = drives[fast].bandwidth;
                let stall = |n: u32| {
                    let at = second * n + second / 2;
                    [(at, 1), (at + second / 5, rate)]
                };
                drives[fast].changes = (0..1000).flat_map(stall).collect();
            }
            What::Fails => drives[slow].fails_at = Some(Duration::ZERO),
        }
        Case {
            drives,
            slots: between(2.0, 48.0) as usize,
            compute_rate: between(5e9, 30e9),
            seed: between(1.0, 1e9) as u64,
        }
    }

    /// When each token was done.
    fn run(
        &self,
        model: &Model,
        args: &Args,
        drives: &[SimDrive],
        tokens: usize,
    ) -> anyhow::Result<Vec<f64>> {
        let catalog = Catalog::new(&model.shards, &model.arch)?;
        let compute = Compute::at_rate(&model.arch, &model.shards, &catalog, self.compute_rate);
        let files = ExpertFiles::on_drives(&model.shards, catalog, drives.len())?;
        let top_k = model.arch.router.top_k;
        let budget = Budget::SlotsPerLayer(self.slots);
        let options = StoreOptions {
            slots: slots(&files.footprints(), files.moe_layers(), top_k, budget)?,
            lookahead: match args.lookahead {
                None => Lookahead::Auto,
                Some(0) => Lookahead::Off,
                Some(n) => Lookahead::Experts(n),
            },
            engine: Options::default(),
        };
        let clock = Clock::default();
        let mut store =
            ExpertStore::simulated(files, top_k, options, drives.to_vec(), clock.clone())?;
        let events = synthetic_routing(&model.arch, tokens, RoutingParams::default(), self.seed);
        let mut ends = Vec::new();
        Replay::new(&mut store, &clock, &compute, top_k).run(&events, |passes| {
            if passes as usize > ends.len() {
                ends.push(clock.now().as_secs_f64());
            }
        })?;
        ends.push(clock.now().as_secs_f64());
        Ok(ends)
    }

    /// Tokens a second of both, and of the faster one alone.
    fn compare(&self, model: &Model, args: &Args) -> anyhow::Result<[f64; 2]> {
        let alone = |drives: &[SimDrive]| -> anyhow::Result<f64> {
            let rate = |drive: &SimDrive| -> anyhow::Result<f64> {
                let ends = self.run(model, args, std::slice::from_ref(drive), args.tokens)?;
                Ok((ends.len() - 1) as f64 / (ends[ends.len() - 1] - ends[0]))
            };
            let rates = drives.iter().map(rate);
            let rates: Vec<f64> = rates.collect::<anyhow::Result<_>>()?;
            Ok(rates.into_iter().fold(0.0, f64::max))
        };
        let from = match args.what {
            What::Cut => 1.3,
            What::Recover => 4.0,
            _ => {
                let ends = self.run(model, args, &self.drives, args.tokens)?;
                let both = (ends.len() - 1) as f64 / (ends[ends.len() - 1] - ends[0]);
                let healthy: Vec<SimDrive> = (self.drives.iter())
                    .filter(|d| d.fails_at.is_none())
                    .cloned()
                    .map(|d| match args.what {
                        What::Stalls => d,
                        _ => SimDrive {
                            changes: Vec::new(),
                            ..d
                        },
                    })
                    .collect();
                return Ok([both, alone(&healthy)?]);
            }
        };
        // The same tokens as a machine whose drives always were so.
        let later = self.drives.clone().map(|d| SimDrive {
            bandwidth: d.changes.last().map_or(d.bandwidth, |c| c.1),
            changes: Vec::new(),
            ..d
        });
        let steady = match args.what {
            What::Recover => {
                let ends = self.run(model, args, &later, args.tokens)?;
                (ends.len() - 1) as f64 / (ends[ends.len() - 1] - ends[0])
            }
            _ => alone(&later)?,
        };
        let tokens = (steady * 2.0 * (from + 1.0)) as usize + args.tokens;
        let ends = self.run(model, args, &self.drives, tokens.min(4000))?;
        let first = ends
            .iter()
            .position(|end| *end >= from)
            .context("too few tokens")?;
        let last = (first + args.tokens).min(ends.len() - 1);
        ensure!(last > first, "too few tokens");
        // The token that runs at that time counts for its part.
        let begun = first.checked_sub(1).map_or(0.0, |i| ends[i]);
        let part = (ends[first] - from) / (ends[first] - begun);
        Ok([((last - first) as f64 + part) / (ends[last] - from), steady])
    }
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    for path in &args.model {
        let model = Model {
            name: path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            arch: Architecture::load(path)?,
            shards: Shards::open(std::slice::from_ref(path))?,
        };
        let mut rng = Rng(args.seed * 2 + 1);
        let mut ratios = Vec::new();
        for _ in 0..args.cases {
            let case = Case::new(&mut rng, args.what);
            let [both, alone] = match case.compare(&model, &args) {
                Ok(rates) => rates,
                Err(e) if e.to_string() == "too few tokens" => continue,
                Err(e) => return Err(e),
            };
            let ratio = both / alone;
            ratios.push(ratio);
            if args.all || ratio < 0.99 {
                let rate = |d: usize| case.drives[d].bandwidth as f64 / MIB;
                println!(
                    "  {ratio:.3}  {:7.1} + {:7.1} MiB/s, {} and {} us, {} slots, {:.1} GB/s, seed {}: {both:.2} of {alone:.2} tok/s {:?}",
                    rate(0),
                    rate(1),
                    case.drives[0].latency.as_micros(),
                    case.drives[1].latency.as_micros(),
                    case.slots,
                    case.compute_rate / 1e9,
                    case.seed,
                    case.drives
                        .iter()
                        .filter_map(|d| d.changes.first().map(|c| c.1 >> 20))
                        .collect::<Vec<_>>(),
                );
            }
        }
        ratios.sort_by(f64::total_cmp);
        ensure!(!ratios.is_empty(), "no case");
        let below = ratios.iter().filter(|r| **r < 0.99).count();
        let mean = ratios.iter().map(|r| r.ln()).sum::<f64>() / ratios.len() as f64;
        println!(
            "{:12} {:?}: {} cases, {below} below 0.99, worst {:.3}, geometric mean {:.3}",
            model.name,
            args.what,
            ratios.len(),
            ratios[0],
            mean.exp()
        );
    }
    Ok(())
}
