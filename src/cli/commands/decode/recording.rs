//! `--save-routing`: the file of what the routers said, and how long the arithmetic took.

use std::time::Duration;

use colibri_uring::config::Config;
use colibri_uring::model::{Phase, Runner};
use colibri_uring::stream::routing::{self, RoutingRecorder};

use crate::cli::output::file::Output;

/// Records into the file of `--save-routing`.
pub fn recorder(file: &Output, config: &Config) -> anyhow::Result<RoutingRecorder> {
    let header = routing::RoutingHeader {
        routing: routing::VERSION,
        top_k: config.num_experts_per_tok,
        experts: config.n_routed_experts,
        layers: config.num_hidden_layers,
    };
    Ok(RoutingRecorder::new(Box::new(file.writer()?), &header))
}

/// How long the arithmetic of `tokens` tokens took that came after the prompt.
pub fn measured(
    prompt: &[(Phase, &'static str, Duration)],
    runner: &Runner,
    tokens: usize,
) -> routing::RoutingEvent {
    let total = runner.stats().phases;
    let arithmetic = total.iter().zip(prompt);
    let seconds = arithmetic
        .filter(|((phase, ..), _)| *phase != Phase::IoWait)
        .map(|((_, name, spent), (.., before))| {
            ((*name).to_owned(), (*spent - *before).as_secs_f64())
        });
    routing::RoutingEvent::Measured {
        tokens: tokens as u64,
        seconds: seconds.collect(),
    }
}
