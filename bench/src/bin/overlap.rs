//! Does a token cost the larger of reading and computing, or their sum? Decodes the same ids in turn with what is to be
//! measured, without lookahead, and with everything in memory, and profiles the drive in between.
//!
//! `cargo build --release --workspace && target/release/overlap --model DIR --replay ids.txt --cache-slots 40`

use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, bail, ensure};
use clap::Parser;
use colibri_bench::{binary, median};
use colibri_uring::stream::routing::{self, RoutingEvent};

/// Seconds for each token: decoding, against reading alone and computing alone
#[derive(Debug, Parser)]
#[command(
    after_help = "Needs no root: a model on the drive, a text file of token ids (some 40, separated by white space), memory for the \
    whole model, and colibri-uring beside this program.\n\n\
    Example:\n  cargo build --release --workspace\n  \
    target/release/colibri-uring synth small --preset small\n  \
    seq 3 5 200 > ids.txt\n  \
    target/release/overlap --model small --replay ids.txt --cache-slots 40"
)]
struct Args {
    /// Directory of the model
    #[arg(long)]
    model: PathBuf,
    /// File of token ids, of which the first 4 are the prompt
    #[arg(long)]
    replay: PathBuf,
    /// Expert slabs for each MoE layer
    #[arg(long)]
    cache_slots: u64,
    /// Compute threads
    #[arg(long)]
    threads: Option<u16>,
    /// Rounds of interleaved runs; medians are printed
    #[arg(long, default_value_t = 7)]
    rounds: usize,
}

/// What one decode took for a token.
struct Decode {
    seconds: f64,
    bytes: f64,
}

impl Args {
    fn command(&self, name: &str) -> anyhow::Result<Command> {
        let mut command = Command::new(binary::path()?);
        command.arg(name).arg("--model").arg(&self.model);
        command.arg("--json");
        Ok(command)
    }

    fn decode(&self, slots: u64, lookahead: &str, extra: &[&str]) -> anyhow::Result<Decode> {
        let mut command = self.command("decode")?;
        command.arg("--replay").arg(&self.replay);
        command.args(["--cache-slots", &slots.to_string()]);
        command.args(["--lookahead", lookahead]).args(extra);
        if let Some(threads) = self.threads {
            command.args(["--threads", &threads.to_string()]);
        }
        let report = binary::json(command)?;
        let stats = &report["stats"];
        let count = |ids: &str| report[ids].as_array().map_or(0, Vec::len) as f64;
        let number = |key: &str| stats[key].as_f64().with_context(|| format!("no {key}"));
        let tokens = count("token_ids");
        Ok(Decode {
            seconds: number("decode_seconds")? / tokens,
            bytes: number("expert_bytes_read")? / (tokens + count("prompt_ids")),
        })
    }

    /// Seconds of arithmetic for a token, with everything in memory.
    fn arithmetic(&self) -> anyhow::Result<f64> {
        let routing = tempfile::NamedTempFile::new()?;
        let path = routing
            .path()
            .to_str()
            .context("a strange temporary directory")?;
        self.decode(u64::from(u32::MAX), "auto", &["--save-routing", path])?;
        // That of the tokens alone, without the prompt, stands at the end of the routing.
        let (_, events) = routing::read(BufReader::new(File::open(path)?))?;
        match events.last() {
            Some(RoutingEvent::Measured { tokens, seconds }) => {
                Ok(seconds.values().sum::<f64>() / *tokens as f64)
            }
            _ => bail!("nothing was measured"),
        }
    }

    fn bandwidth(&self) -> anyhow::Result<f64> {
        let mut command = self.command("profile")?;
        command.args(["--engine", "uring", "--queue-depth", "8", "--seconds", "1"]);
        let report = binary::json(command)?;
        let runs = report["runs"].as_array().context("no runs")?;
        let rates = runs.iter().filter_map(|run| run["mib_per_s"].as_f64());
        let best = rates.fold(0.0, f64::max);
        ensure!(best > 0.0, "the profile read nothing");
        Ok(best * 1024.0 * 1024.0)
    }
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let (mut decode, mut read, mut compute, mut ratios, mut rates) =
        (vec![], vec![], vec![], vec![], vec![]);
    println!("ms for each token: decoding   reading   computing   decoding / larger");
    for _ in 0..args.rounds {
        let measured = args.decode(args.cache_slots, "auto", &[])?;
        let bandwidth = args.bandwidth()?;
        let off = args.decode(args.cache_slots, "off", &[])?;
        let (reading, computing) = (off.bytes / bandwidth, args.arithmetic()?);
        let ratio = measured.seconds / reading.max(computing);
        let [d, r, c] = [measured.seconds, reading, computing].map(|s| s * 1000.0);
        println!("                   {d:8.1}  {r:8.1}    {c:8.1}   {ratio:17.3}");
        decode.push(d);
        read.push(r);
        compute.push(c);
        ratios.push(ratio);
        rates.push(bandwidth / 1024.0 / 1024.0);
    }
    println!(
        "medians            {:8.1}  {:8.1}    {:8.1}   {:17.3}   (drive {:.0} MiB/s)",
        median(decode),
        median(read),
        median(compute),
        median(ratios),
        median(rates)
    );
    Ok(())
}
