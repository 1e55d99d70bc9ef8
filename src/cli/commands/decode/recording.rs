//! Records the routers' outputs and the compute time for `--save-routing`.

use std::time::Duration;

use colibri_uring::arch::Architecture;
use colibri_uring::model::{Phase, Runner};
use colibri_uring::stream::routing::{self, RoutingRecorder};

use crate::cli::output::file::Output;

/// Returns a recorder that writes to `file`.
pub fn recorder(file: &Output, config: &Architecture) -> anyhow::Result<RoutingRecorder> {
    let header = routing::RoutingHeader {
        routing: routing::VERSION,
        top_k: config.router.top_k,
        experts: config.experts.count,
        layers: config.num_hidden_layers(),
    };
    Ok(RoutingRecorder::new(Box::new(file.writer()?), &header))
}

/// The compute time of the `tokens` tokens after the prompt.
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
