//! Decoding on lab drives, against what `simulate` predicts for them: one, two and four drives, with little and with more
//! memory for experts. Needs root: `cargo build --release --workspace && target/release/machines`.
//!
//! The throttle behind lab drives works in slices of 100 ms. So experts are large here and drives slow: what a drive gives in a
//! slice is a small part of what a layer reads.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use clap::Parser;
use colibri_bench::lab::{Backing, Lab};
use colibri_bench::{binary, median};
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// Tokens per second on lab drives, measured and predicted
#[derive(Debug, Parser)]
#[command(
    after_help = "Needs root, loop devices, a control group that throttles, colibri-uring beside this program, and 2 GiB of memory \
    for each drive: it makes its model itself.\n\n\
    Example:\n  cargo build --release --workspace && target/release/machines --drives 1,2 --cache-slots 0"
)]
struct Args {
    /// MiB/s of each drive
    #[arg(long, default_value_t = 160)]
    rate: u64,
    /// Numbers of drives
    #[arg(long, value_delimiter = ',', default_value = "1,2,4")]
    drives: Vec<usize>,
    /// Expert slabs for each MoE layer
    #[arg(long, value_delimiter = ',', default_value = "0,10")]
    cache_slots: Vec<u64>,
    /// Tokens after the prompt
    #[arg(long, default_value_t = 8)]
    tokens: usize,
    /// Rounds of interleaved runs; medians are printed
    #[arg(long, default_value_t = 3)]
    rounds: usize,
}

/// Three sparse layers of 24 experts of 20 MiB, 8 of which a token uses.
const SHAPE: [(&str, &str); 6] = [
    ("--layers", "4"),
    ("--dense-layers", "1"),
    ("--routed-experts", "24"),
    ("--experts-per-token", "8"),
    ("--hidden", "6144"),
    ("--moe-intermediate", "2048"),
];

struct Scene {
    args: Args,
    lab: Lab,
    temp: tempfile::TempDir,
}

impl Scene {
    fn new(args: Args) -> anyhow::Result<Scene> {
        let temp = tempfile::Builder::new().tempdir_in("/dev/shm")?;
        let model = temp.path().join("model");
        let mut synth = Command::new(binary::path()?);
        synth.arg("synth").arg(&model).arg("--json");
        SHAPE.iter().for_each(|(key, value)| {
            synth.args([key, value]);
        });
        let bytes = binary::json(synth)?["bytes"].as_u64();
        let bytes = bytes.context("synth does not say how large the model is")?;
        let mut lab = Lab::new(Backing::Memory)?;
        let most = args.drives.iter().copied().max().unwrap_or(1).clamp(1, 5);
        for _ in 0..most {
            let drive = lab.add(bytes + bytes / 8 + 64 * MIB, None)?;
            lab.copy_to(drive, &model)?;
        }
        std::fs::remove_dir_all(&model)?;
        let scene = Scene { args, lab, temp };
        let ids: Vec<String> = (0..4 + scene.args.tokens)
            .map(|i| (i * 37 % 1000).to_string())
            .collect();
        std::fs::write(scene.file("ids"), ids.join(" "))?;
        Ok(scene)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    fn decode(&self, drives: usize, slots: u64, extra: &[&str]) -> anyhow::Result<Value> {
        let mut command = self.lab.command(binary::path()?);
        command
            .args(["decode", "--json", "--model"])
            .arg(self.lab.path(0));
        for mirror in 1..drives {
            command.arg("--mirror").arg(self.lab.path(mirror));
        }
        command.arg("--replay").arg(self.file("ids"));
        command
            .args(["--cache-slots", &slots.to_string()])
            .args(extra);
        binary::json(command)
    }

    fn simulate(&self, routing: &Path, drives: usize, slots: u64) -> anyhow::Result<f64> {
        let mut command = Command::new(binary::path()?);
        command
            .args(["simulate", "--json", "--model"])
            .arg(self.lab.path(0));
        command.arg("--routing").arg(routing);
        for _ in 0..drives {
            command.args(["--device", &format!("{}MiB/s", self.args.rate)]);
        }
        command.args(["--cache-slots", &slots.to_string()]);
        let report = binary::json(command)?;
        report["tokens_per_second"].as_f64().context("no rate")
    }
}

fn main() -> anyhow::Result<()> {
    let scene = Scene::new(Args::parse())?;
    let args = &scene.args;
    ensure!(args.rounds > 0, "at least one round");
    // The routing and the arithmetic, with unlimited drives.
    let routing = scene.file("routing");
    let path = routing.to_str().context("a strange temporary directory")?;
    scene.decode(1, u64::from(u32::MAX), &["--save-routing", path])?;
    for drive in 0..scene.lab.drives().len() {
        scene.lab.set_rate(drive, Some(args.rate * MIB))?;
    }
    println!(
        "drives of {} MiB/s  slots  measured tok/s  predicted  measured/predicted  of one drive",
        args.rate
    );
    for &slots in &args.cache_slots {
        let mut measured = vec![Vec::new(); args.drives.len()];
        for _ in 0..args.rounds {
            for (&drives, measured) in args.drives.iter().zip(&mut measured) {
                let report = scene.decode(drives, slots, &[])?;
                let rate = report["stats"]["tokens_per_second"].as_f64();
                measured.push(rate.context("no rate")?);
            }
        }
        let medians: Vec<f64> = measured.into_iter().map(median).collect();
        for (&drives, &rate) in args.drives.iter().zip(&medians) {
            let predicted = scene.simulate(&routing, drives, slots)?;
            println!(
                "{drives:19}  {slots:5}  {rate:14.3}  {predicted:9.3}  {:18.3}  {:12.3}",
                rate / predicted,
                rate / medians[0]
            );
        }
    }
    Ok(())
}
