//! Measures the server under load: streams at once against tokens a second, times to the first token and between tokens, bytes read.
//!
//! `cargo build --release --workspace && target/release/load --model DIR --cache-slots 8`

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, ensure};
use clap::Parser;
use colibri_bench::load::client::Prompt;
use colibri_bench::load::server::Server;
use colibri_bench::load::streams::{Intrusion, Run, millis, prompts, quantiles, times};
use colibri_bench::{binary, median};
use colibri_uring::Model;
use colibri_uring::tools::report::{Axis, Chart, Scale, Series, picture};
use serde_json::{Value, json};

/// Tokens a second, time to the first token and between tokens of streams at once
#[derive(Debug, Parser)]
#[command(
    after_help = "Needs no root: a model, and colibri-uring beside this program, which it starts. Flags after -- go to `serve`, \
    and to `decode` where both have them.\n\n\
    Example:\n  cargo build --release --workspace\n  \
    target/release/load --model large --cache-slots 8 --decode --plot load.svg\n  \
    target/release/load --model large --cache-slots 8 --long-prompt 4000 --context 4096 --tokens 400 -- --max-stall 1000"
)]
struct Args {
    /// Directory of the model
    #[arg(long)]
    model: PathBuf,
    /// Streams at once
    #[arg(long, num_args = 1.., value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16])]
    streams: Vec<usize>,
    /// Expert slabs of each MoE layer
    #[arg(long)]
    cache_slots: u32,
    /// New tokens of each stream
    #[arg(long, default_value_t = 64)]
    tokens: usize,
    /// Random tokens of each prompt
    #[arg(long, default_value_t = 16)]
    prompt: usize,
    /// Tokens of a request's context
    #[arg(long, default_value_t = 2048)]
    context: usize,
    /// Rounds of interleaved runs; medians are printed
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Compare one stream with `decode`, whose runs alternate with it
    #[arg(long)]
    decode: bool,
    /// Compare each number of streams with the larger of reading and computing: a server with all experts in memory, and a profile of the drive
    #[arg(long)]
    bounds: bool,
    /// Instead, send a prompt of so many tokens while --streams decode, and alone
    #[arg(long)]
    long_prompt: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// File for a plot
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// More flags of the server
    #[arg(last = true)]
    flags: Vec<String>,
}

/// What was measured with some number of streams.
#[derive(Debug, Default)]
struct Row {
    rates: Vec<f64>,
    runs: Vec<Run>,
    /// Seconds of all tokens against the larger of reading and computing them.
    bounds: Vec<f64>,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let vocabulary = Model::open(&args.model, &Default::default())?
        .config()
        .vocab_size;
    let report = match args.long_prompt {
        Some(len) => args.intrude(len, vocabulary)?,
        None => args.sweep(vocabulary)?,
    };
    if args.json {
        println!("{report:#}");
    }
    Ok(())
}

impl Args {
    fn server(&self, cache_slots: u32) -> anyhow::Result<Server> {
        let most = self.streams.iter().max().map_or(1, |n| n + 1);
        let own = [
            ("--parallel", most.to_string()),
            ("--context", self.context.to_string()),
            ("--cache-slots", cache_slots.to_string()),
        ];
        let own = own
            .into_iter()
            .flat_map(|(flag, value)| [flag.to_owned(), value]);
        let flags: Vec<String> = own.chain(self.flags.clone()).collect();
        Server::start(&self.model, &flags)
    }

    fn say(&self, line: &str) {
        if !self.json {
            println!("{line}");
        }
    }

    /// `decode` of the same prompt and seed: its statistics and ids.
    fn decode(&self, prompt: &Prompt) -> anyhow::Result<Value> {
        let mut command = Command::new(binary::path()?);
        let ids: Vec<String> = prompt.ids.iter().map(u32::to_string).collect();
        command
            .args(["decode", "--json", "--model"])
            .arg(&self.model);
        command.args(["--prompt-ids", &ids.join(",")]);
        command.args(["-n", &prompt.tokens.to_string()]);
        command.args(["--cache-slots", &self.cache_slots.to_string()]);
        command.args(["--temperature", "1", "--seed", &prompt.seed.to_string()]);
        // What only the server knows.
        let mut flags = self.flags.iter();
        while let Some(flag) = flags.next() {
            if ["--max-stall", "--queue", "--kv-dir"].contains(&flag.as_str()) {
                flags.next();
            } else {
                command.arg(flag);
            }
        }
        binary::json(command)
    }

    /// MiB/s of the drive.
    fn bandwidth(&self) -> anyhow::Result<f64> {
        let mut command = Command::new(binary::path()?);
        command
            .args(["profile", "--json", "--model"])
            .arg(&self.model);
        command.args(["--engine", "uring", "--queue-depth", "8", "--seconds", "1"]);
        let report = binary::json(command)?;
        let runs = report["runs"].as_array().context("no runs")?;
        let rates = runs.iter().filter_map(|run| run["mib_per_s"].as_f64());
        Ok(rates.fold(0.0, f64::max))
    }

    fn sweep(&self, vocabulary: usize) -> anyhow::Result<Value> {
        let mut rows: Vec<Row> = self.streams.iter().map(|_| Row::default()).collect();
        let (mut ratios, mut decoded) = (Vec::new(), Vec::new());
        for round in 0..self.rounds as u64 {
            for (row, &n) in rows.iter_mut().zip(&self.streams) {
                let prompts = prompts(n, self.prompt, self.tokens, vocabulary, round);
                // A server of its own: nothing is cached that another number of streams has read.
                let run = Run::of(&self.server(self.cache_slots)?, &prompts)?;
                let rate = run.rate();
                if n == 1 && self.decode {
                    let decode = self.decode(&prompts[0])?;
                    ensure!(
                        decode["token_ids"] == json!(run.streamed[0].ids),
                        "decode gives other tokens"
                    );
                    let alone = decode["stats"]["tokens_per_second"].as_f64();
                    let alone = alone.context("no rate")?;
                    decoded.push(alone);
                    ratios.push(rate / alone);
                }
                if self.bounds {
                    row.bounds.push(self.bound(&run, &prompts)?);
                }
                row.rates.push(rate);
                row.runs.push(run);
            }
        }
        self.say("streams  tokens/s   each   ms to first token    ms between tokens        MiB read  tokens/s");
        self.say("                             p50       max      p50     p99     max    a token   of max(read, compute)");
        let mut measured = Vec::new();
        let mut curves = [
            ("tokens a second", Vec::new()),
            ("MiB of experts read a token", Vec::new()),
        ];
        for (row, &n) in rows.iter().zip(&self.streams) {
            let (mut first, mut between) = (times(), times());
            row.runs
                .iter()
                .for_each(|run| run.record(&mut first, &mut between));
            let rate = median(row.rates.clone());
            let bytes = |run: &Run| run.counts.bytes / (1 << 20) as f64 / run.tokens() as f64;
            let read = median(row.runs.iter().map(bytes).collect());
            let bound = (!row.bounds.is_empty()).then(|| median(row.bounds.clone()));
            self.say(&format!(
                "{n:7}  {rate:8.1}  {:5.1}  {:8.1}  {:8.1}  {:7.1} {:7.1} {:7.1}  {read:9.1}   {}",
                rate / n as f64,
                millis(&first, 0.5),
                millis(&first, 1.0),
                millis(&between, 0.5),
                millis(&between, 0.99),
                millis(&between, 1.0),
                bound.map_or("-".into(), |bound| format!("{bound:.3}")),
            ));
            curves[0].1.push((n as f64, rate));
            curves[1].1.push((n as f64, read));
            let mean = |of: fn(&Run) -> f64| median(row.runs.iter().map(of).collect());
            measured.push(json!({
                "streams": n,
                "tokens_per_second": rate,
                "first_token_ms": quantiles(&first),
                "between_tokens_ms": quantiles(&between),
                "expert_mib_per_token": read,
                "demands_per_pass": mean(|run| run.counts.demands / run.counts.passes),
                "misses_per_pass": mean(|run| run.counts.misses / run.counts.passes),
                "compute_seconds": mean(|run| run.counts.compute),
                "io_wait_seconds": mean(|run| run.counts.wait),
                "time_over_bound": bound,
            }));
        }
        let mut report = json!({"streams": measured});
        if !ratios.is_empty() {
            let (ratio, alone) = (median(ratios), median(decoded));
            self.say(&format!("decode: {alone:.1} tokens/s; one stream has {ratio:.3} of it (median of the ratios)"));
            report["decode_tokens_per_second"] = json!(alone);
            report["ratio_to_decode"] = json!(ratio);
        }
        if let Some(file) = &self.plot {
            let charts = curves.map(|(title, points)| self.chart(title, points));
            fs::write(file, picture::svg(&charts)).with_context(|| file.display().to_string())?;
        }
        Ok(report)
    }

    /// Time of a run against the larger of reading what it read, and computing it with all experts in memory.
    fn bound(&self, run: &Run, prompts: &[Prompt]) -> anyhow::Result<f64> {
        let all = self.server(u32::MAX)?;
        // The first run reads the experts.
        Run::of(&all, prompts)?;
        let warm = Run::of(&all, prompts)?;
        drop(all);
        let share = run.rate().recip();
        let reading =
            run.counts.bytes / run.tokens() as f64 / (self.bandwidth()? * (1 << 20) as f64);
        let computing = warm.rate().recip();
        Ok(share / reading.max(computing))
    }

    fn chart(&self, title: &str, points: Vec<(f64, f64)>) -> Chart {
        let marks = self.streams.iter().map(|n| (*n as f64, n.to_string()));
        Chart {
            title: String::new(),
            x: Axis::new("streams at once", Scale::Marked(marks.collect())),
            y: Axis::new(title, Scale::Linear),
            series: vec![Series {
                name: title.to_owned(),
                points,
            }],
        }
    }

    /// A long prompt among streams, and alone against `decode`.
    fn intrude(&self, len: usize, vocabulary: usize) -> anyhow::Result<Value> {
        let mut measured = Vec::new();
        let (mut ratios, mut firsts) = (Vec::new(), Vec::new());
        let long = |round: u64| prompts(1, len, 1, vocabulary, 1_000_000 + round).remove(0);
        self.say(
            "streams   usual ms   worst ms between tokens   s to the first token of the prompt",
        );
        for round in 0..self.rounds as u64 {
            for &n in &self.streams {
                let prompts = prompts(n, self.prompt, self.tokens, vocabulary, round);
                let intrusion =
                    Intrusion::of(&self.server(self.cache_slots)?, &prompts, &long(round))?;
                let [usual, worst] =
                    [intrusion.usual, intrusion.worst].map(|time| time.as_secs_f64() * 1000.0);
                let first = intrusion.first.as_secs_f64();
                self.say(&format!(
                    "{n:7}   {usual:8.1}   {worst:23.1}   {first:34.2}"
                ));
                measured.push(json!({
                    "streams": n,
                    "usual_ms": usual,
                    "worst_ms": worst,
                    "first_token_seconds": first,
                }));
            }
            let alone = long(round).stream(&self.server(self.cache_slots)?.address)?;
            let (at, _) = *alone.came.first().context("no token")?;
            let first = (at - alone.sent).as_secs_f64();
            let decode = self.decode(&long(round))?;
            let prefill = decode["stats"]["prefill_seconds"]
                .as_f64()
                .context("no time")?;
            self.say(&format!(
                "  alone   {:34}   {first:34.2}   decode: {prefill:.2}",
                ""
            ));
            ratios.push(first / prefill);
            firsts.push(first);
        }
        let ratio = median(ratios);
        self.say(&format!(
            "alone: {ratio:.3} times decode's prefill (median of the ratios)"
        ));
        Ok(json!({
            "among_streams": measured,
            "alone_seconds": median(firsts),
            "alone_over_decode": ratio,
        }))
    }
}
