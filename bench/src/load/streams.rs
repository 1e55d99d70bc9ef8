//! Runs streams at once and measures them.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use colibri_uring::tools::measure::Rng;
use hdrhistogram::Histogram;
use serde_json::{Value, json};

use super::client::{Prompt, Streamed};
use super::server::{Counts, Server};

/// Times in microseconds.
pub type Times = Histogram<u64>;

/// An empty histogram, exact to a thousandth.
pub fn times() -> Times {
    // Two or more and at most five digits are valid.
    Times::new(3).expect("three digits")
}

/// Adds a time.
pub fn record(times: &mut Times, time: Duration) {
    // Values that it cannot hold would take days.
    let _ = times.record(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
}

/// Milliseconds at a quantile.
pub fn millis(times: &Times, quantile: f64) -> f64 {
    times.value_at_quantile(quantile) as f64 / 1000.0
}

/// Prompts that differ from each other, from `seed` on.
pub fn prompts(n: usize, len: usize, tokens: usize, vocabulary: usize, seed: u64) -> Vec<Prompt> {
    let prompt = |i: usize| {
        let seed = seed * 1000 + i as u64;
        let mut rng = Rng(seed + 1);
        let ids = (0..len).map(|_| rng.below(vocabulary as u64) as u32);
        Prompt {
            ids: ids.collect(),
            tokens,
            seed,
        }
    };
    (0..n).map(prompt).collect()
}

/// Streams that ran at once.
#[derive(Clone, Debug)]
pub struct Run {
    /// Their answers.
    pub streamed: Vec<Streamed>,
    /// What the server did for them.
    pub counts: Counts,
}

impl Run {
    /// Sends all prompts at once.
    ///
    /// # Errors
    /// When one of them is not answered.
    pub fn of(server: &Server, prompts: &[Prompt]) -> anyhow::Result<Run> {
        let before = server.counts()?;
        let streamed = all(server, prompts)?;
        let counts = server.counts()?.since(before);
        Ok(Run { streamed, counts })
    }

    /// Tokens of all streams.
    pub fn tokens(&self) -> usize {
        self.streamed.iter().map(|s| s.ids.len()).sum()
    }

    /// Tokens a second of all streams together, from the last first token to the first end: while all of them decode.
    pub fn rate(&self) -> f64 {
        let (from, to) = self.all_decode();
        let came = self.streamed.iter().flat_map(|s| &s.came);
        let inside = came.filter(|(at, _)| *at > from && *at <= to);
        let tokens: usize = inside.map(|(_, n)| n).sum();
        tokens as f64 / to.saturating_duration_since(from).as_secs_f64()
    }

    fn all_decode(&self) -> (Instant, Instant) {
        let firsts = self.streamed.iter().filter_map(|s| s.came.first());
        let lasts = self.streamed.iter().filter_map(|s| s.came.last());
        let now = Instant::now();
        let from = firsts.map(|(at, _)| *at).max().unwrap_or(now);
        (from, lasts.map(|(at, _)| *at).min().unwrap_or(now))
    }

    /// Adds times to the first token to `first`, and times between tokens to `between`.
    pub fn record(&self, first: &mut Times, between: &mut Times) {
        for streamed in &self.streamed {
            if let Some((at, _)) = streamed.came.first() {
                record(first, *at - streamed.sent);
            }
            for pair in streamed.came.windows(2) {
                record(between, pair[1].0 - pair[0].0);
                // Drafts come with the token before them.
                (1..pair[1].1).for_each(|_| record(between, Duration::ZERO));
            }
        }
    }
}

/// The answers to all prompts, sent at once.
fn all(server: &Server, prompts: &[Prompt]) -> anyhow::Result<Vec<Streamed>> {
    thread::scope(|scope| {
        let clients: Vec<_> = prompts
            .iter()
            .map(|prompt| scope.spawn(|| prompt.stream(&server.address)))
            .collect();
        let answers = clients.into_iter().map(|client| {
            let joined = client.join();
            joined.map_err(|_| anyhow!("a client has panicked"))?
        });
        answers.collect()
    })
}

/// How a long prompt disturbs streams that decode.
#[derive(Clone, Debug)]
pub struct Intrusion {
    /// The longest time between two tokens of a stream while the prompt was computed.
    pub worst: Duration,
    /// The usual time between tokens before it came.
    pub usual: Duration,
    /// Time until the first token of the long prompt.
    pub first: Duration,
}

impl Intrusion {
    /// Sends `long` when all of `prompts` decode. They may end before it is answered.
    ///
    /// # Errors
    /// When one of them is not answered.
    pub fn of(server: &Server, prompts: &[Prompt], long: &Prompt) -> anyhow::Result<Intrusion> {
        let settle = Duration::from_secs(4);
        thread::scope(|scope| {
            let others = scope.spawn(|| all(server, prompts));
            thread::sleep(settle);
            let intruder = long.stream(&server.address)?;
            let others = others
                .join()
                .map_err(|_| anyhow!("a client has panicked"))??;
            let (at, _) = *intruder.came.first().ok_or_else(|| anyhow!("no token"))?;
            let mut usual = times();
            let mut worst = Duration::ZERO;
            for streamed in &others {
                for pair in streamed.came.windows(2) {
                    let (before, after) = (pair[0].0, pair[1].0);
                    match after < intruder.sent {
                        true => record(&mut usual, after - before),
                        false if before <= at => worst = worst.max(after - before),
                        false => {}
                    }
                }
            }
            Ok(Intrusion {
                worst,
                usual: Duration::from_micros(usual.value_at_quantile(0.5)),
                first: at - intruder.sent,
            })
        })
    }
}

/// Quantiles in milliseconds, for JSON.
pub fn quantiles(times: &Times) -> Value {
    json!({
        "p50": millis(times, 0.5),
        "p90": millis(times, 0.9),
        "p99": millis(times, 0.99),
        "max": millis(times, 1.0),
        "count": times.len(),
    })
}
