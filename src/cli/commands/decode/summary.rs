//! Prints the summary line of a decode.

use std::io::{self, Write};

use colibri_uring::quant::Activations;
use colibri_uring::runtime::generate::Generated;

use crate::cli::output::pluralize::pluralize;
use crate::cli::output::size::human;
use crate::cli::output::stats::Stats;

/// Decoded tokens per second, without the prompt.
pub fn rate(generated: &Generated) -> f64 {
    match generated.decoded {
        0 => 0.0,
        n => n as f64 / generated.decode.as_secs_f64().max(f64::MIN_POSITIVE),
    }
}

/// Prints one line to stderr.
pub fn summarise(generated: &Generated, stats: &Stats) {
    let engine = &stats.engine;
    let demanded = (engine.expert_hits + engine.expert_misses).max(1);
    // A closed stderr is not an error.
    let _ = writeln!(
        io::stderr(),
        "[{}, {:.2} tok/s; load {:.2} s, prefill {:.2} s; waited {:.2} s for the disk, computed {:.2} s; \
         {} of experts read by {}{}, {:.0}% were in memory; peak {}{}{}{}]",
        pluralize(generated.ids.len(), "token"),
        stats.tokens_per_second,
        stats.load_seconds,
        stats.prefill_seconds,
        engine.io_wait_seconds,
        engine.compute_seconds,
        human(engine.expert_bytes_read),
        engine.engine,
        if engine.direct { " (O_DIRECT)" } else { "" },
        100.0 * engine.expert_hits as f64 / demanded as f64,
        human(stats.peak_rss_bytes),
        match engine.activations {
            Activations::Exact => "",
            Activations::Int8 => "; activations rounded to int8",
        },
        stats.kv.map_or_else(String::new, |kv| format!(
            "; {} reused in {:.2} s, {} computed{}",
            pluralize(stats.reused_tokens, "token"),
            kv.restore_seconds,
            stats.prefilled_tokens,
            match kv.saved {
                true => format!(
                    ", saved in {:.2} s: {}",
                    kv.save_seconds,
                    human(kv.file_bytes)
                ),
                false => String::new(),
            },
        )),
        match &stats.mtp {
            mtp if mtp.drafted > 0 => format!(
                "; {} of {} accepted, {:.2} tokens a pass",
                mtp.accepted,
                pluralize(mtp.drafted, "draft"),
                mtp.tokens_per_forward
            ),
            _ => String::new(),
        },
    );
}
