//! What several lab drives give together, against the sum of their speeds; and how soon a drive that slows down loses its
//! share. Needs root: `cargo run --release -p colibri-bench --bin scaling`.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Parser;
use colibri_bench::lab::{Backing, Lab};
use colibri_bench::median;
use colibri_ring::{
    Advice, Class, DirectMode, Engine, EngineKind, Event, File, Files, Layout, Options, Priority,
    Range, Replica, SlabId,
};
use colibri_uring::tools::measure::{self, Load, Measured, Rng};

const MIB: u64 = 1 << 20;

/// What several lab drives give together, against the sum of their speeds
#[derive(Debug, Parser)]
#[command(
    after_help = "Needs root, loop devices, a control group that throttles, and 1 GiB of memory for each drive: it makes its files itself. \
    The cases are \"1 x 400\", \"2 x 400\", \"4 x 400\", \"600 + 200\" and \"cut 400 to 100\".\n\n\
    Example:\n  cargo build --release -p colibri-bench && target/release/scaling --only \"2 x 400\""
)]
struct Args {
    /// Seconds of each measurement
    #[arg(long, default_value_t = 6.0)]
    seconds: f64,
    /// Repetitions; medians are printed
    #[arg(long, default_value_t = 3)]
    repeat: usize,
    /// MiB of an expert: three quarters are its gate and up, the rest its down
    #[arg(long, default_value_t = 20)]
    expert: u64,
    /// Read with pread
    #[arg(long)]
    pread: bool,
    /// Instead of a steady stream, this many experts at a time, and the next when all are in: as a token without lookahead reads
    #[arg(long)]
    batch: Option<usize>,
    /// Multiply all speeds; a batch should be large against what a drive gives in 100 ms
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
    /// Only the case with this name
    #[arg(long)]
    only: Option<String>,
}

impl Args {
    /// Bytes a second of a drive of nominally `rate` MiB/s.
    fn rate(&self, rate: u64) -> u64 {
        ((rate * MIB) as f64 * self.speed) as u64
    }
}

/// Bytes of the file that every drive has a copy of.
const FILE: u64 = 768 * MIB;

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let cases: [(&str, &[u64]); 5] = [
        ("1 x 400", &[400]),
        ("2 x 400", &[400, 400]),
        ("4 x 400", &[400; 4]),
        ("600 + 200", &[600, 200]),
        ("cut 400 to 100", &[400, 400]),
    ];
    let only = |name: &str| args.only.as_deref().is_none_or(|only| only == name);
    let most = cases
        .iter()
        .filter(|(name, _)| only(name))
        .map(|(_, rates)| rates.len());
    let mut lab = Lab::new(Backing::Memory)?;
    for _ in 0..most.max().unwrap_or(0) {
        let drive = lab.add(FILE + FILE / 8, None)?;
        fill(&lab.path(drive).join("blocks"))?;
    }
    lab.join()?;
    println!("drives (MiB/s)    together  of the sum  shares");
    for (name, rates) in cases {
        if !only(name) || (args.batch.is_some() && name.starts_with("cut")) {
            continue;
        }
        let mut ratios = Vec::new();
        for _ in 0..args.repeat {
            for (drive, rate) in rates.iter().enumerate() {
                lab.set_rate(drive, Some(args.rate(*rate)))?;
            }
            ratios.push(if name.starts_with("cut") {
                cut(&lab, &args)?
            } else {
                together(&lab, &args, name, rates)?
            });
        }
        println!(
            "{name:16}  median of {}: {:.3}",
            ratios.len(),
            median(ratios)
        );
    }
    Ok(())
}

/// Bytes that no drive can leave out.
fn fill(path: &Path) -> anyhow::Result<()> {
    let mut rng = Rng(1);
    let block: Vec<u8> = (0..MIB / 8)
        .flat_map(|_| rng.below(u64::MAX).to_ne_bytes())
        .collect();
    let mut file = fs::File::create(path)?;
    for _ in 0..FILE / MIB {
        file.write_all(&block)?;
    }
    file.sync_all()?;
    File::open(path)?.advise(0, FILE, Advice::DontNeed);
    Ok(())
}

fn read(
    lab: &Lab,
    args: &Args,
    drives: usize,
    watch: impl FnMut(Duration, &[u64]),
) -> anyhow::Result<Measured> {
    let copies = (0..drives).map(|source| {
        let file = Arc::new(File::open(lab.path(source).join("blocks"))?);
        anyhow::Ok(Replica::new(file, source))
    });
    let files = Files::new(vec![copies.collect::<Result<_, _>>()?], DirectMode::On)?;
    let engine = Options {
        kind: if args.pread {
            EngineKind::Pread
        } else {
            EngineKind::Auto
        },
        ..Options::default()
    };
    let slab_bytes = args.expert * MIB + 3 * 4096;
    let load = Load {
        engine,
        slabs: measure::slabs(&engine, drives, slab_bytes),
        slab_bytes,
        warm_up: Duration::from_secs(1),
        time: Duration::from_secs_f64(args.seconds),
        watch_every: Duration::from_millis(25),
    };
    let mut rng = Rng(7);
    let expert = args.expert * MIB;
    let layout = || {
        let offset = rng.below(FILE - expert);
        let range = |from: u64, to: u64, part| Range {
            file: 0,
            offset: offset + expert * from / 4,
            len: expert * (to - from) / 4,
            part,
        };
        files
            .layout(&[range(0, 3, 0), range(3, 4, 1)])
            .expect("inside the file")
    };
    match args.batch {
        Some(batch) => in_batches(
            &files,
            Load {
                slabs: batch,
                ..load
            },
            layout,
        ),
        None => Ok(measure::read(&files, load, layout, watch)?),
    }
}

/// Fills all slabs, waits for all of them, and begins again.
fn in_batches(
    files: &Files,
    load: Load,
    mut layout: impl FnMut() -> Layout,
) -> anyhow::Result<Measured> {
    let class = Class {
        bytes: load.slab_bytes as usize,
        count: load.slabs,
    };
    let mut engine = Engine::new(files, &[class], load.engine)?;
    let start = Instant::now();
    let mut warm = None;
    loop {
        for slab in 0..load.slabs {
            engine.read(SlabId(slab as u32), Priority::Demand, layout());
        }
        engine.flush();
        let mut missing = load.slabs;
        while missing > 0 {
            match engine.wait()? {
                Event::Full(slab) => {
                    engine.release(slab);
                    missing -= 1;
                }
                Event::Failed(_, error) => return Err(error.into()),
                Event::Part(..) | Event::Dropped(_) => {}
            }
        }
        let now = Instant::now();
        if now < start + load.warm_up {
            continue;
        }
        let stats = engine.stats().context("the engine has stopped")?;
        let (begin, before) = warm.get_or_insert_with(|| (now, stats.clone()));
        if now >= *begin + load.time {
            let sources = stats.sources.iter().zip(&before.sources);
            return Ok(Measured {
                device: engine.device(),
                elapsed: now - *begin,
                cpu: Duration::ZERO,
                bytes: sources.map(|(a, b)| a.bytes - b.bytes).collect(),
                reads: 0,
                latency_us: stats.latency_us,
            });
        }
    }
}

fn together(lab: &Lab, args: &Args, name: &str, rates: &[u64]) -> anyhow::Result<f64> {
    let measured = read(lab, args, rates.len(), |_, _| ())?;
    let sum: u64 = rates.iter().sum();
    let ratio = measured.mib_per_s() / (sum as f64 * args.speed);
    let total = measured.total() as f64;
    let shares: Vec<String> = (measured.bytes.iter())
        .map(|bytes| format!("{:.3}", *bytes as f64 / total))
        .collect();
    println!(
        "{name:16}  {:8.1}  {ratio:10.3}  {}",
        measured.mib_per_s(),
        shares.join(" ")
    );
    Ok(ratio)
}

/// Cuts the first drive to 100 MiB/s while both are read; compares the second that begins 300 ms later with the new sum.
fn cut(lab: &Lab, args: &Args) -> anyhow::Result<f64> {
    let at = Duration::from_secs(2);
    let mut cut_at = None;
    let mut samples: Vec<(Duration, u64)> = Vec::new();
    let mut failed = None;
    read(lab, args, 2, |now, bytes| {
        samples.push((now, bytes.iter().sum()));
        if now >= at && cut_at.is_none() {
            cut_at = Some(now);
            failed = lab.set_rate(0, Some(100 * MIB)).err();
        }
    })?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    let begin = cut_at.unwrap_or_default() + Duration::from_millis(300);
    let from = |time: Duration| samples.iter().find(|(now, _)| *now >= time).copied();
    let (Some((t0, b0)), Some((t1, b1))) = (from(begin), from(begin + Duration::from_secs(1)))
    else {
        anyhow::bail!("--seconds is too short for the cut");
    };
    let speed = measure::mib_per_s(b1 - b0, t1 - t0);
    let ratio = speed / (500.0 * args.speed);
    println!("{:16}  {speed:8.1}  {ratio:10.3}", "cut 400 to 100");
    Ok(ratio)
}
