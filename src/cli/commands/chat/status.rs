//! Prints the statistics of an answer and of the session.

use std::io::{self, Write};
use std::time::Duration;

use colibri_uring::runtime::generate::Generated;

use crate::cli::output::pluralize::pluralize;
use crate::cli::output::size::human;
use crate::cli::output::stats::{EngineStats, rss_bytes};
use crate::cli::output::terminal;

/// A snapshot of the session's counters.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    hits: u64,
    misses: u64,
    bytes: u64,
}

impl From<&EngineStats> for Counters {
    fn from(stats: &EngineStats) -> Counters {
        Counters {
            hits: stats.expert_hits,
            misses: stats.expert_misses,
            bytes: stats.expert_bytes_read,
        }
    }
}

/// Tokens of the context: used, and the capacity.
#[derive(Clone, Copy, Debug)]
pub struct ContextUsage {
    pub used: usize,
    pub of: usize,
}

/// Formats the line after an answer.
pub fn line(
    generated: &Generated,
    prefilled: usize,
    before: Counters,
    after: Counters,
    room: ContextUsage,
) -> String {
    let (hits, misses) = (after.hits - before.hits, after.misses - before.misses);
    let bytes = after.bytes - before.bytes;
    format!(
        "[{}, {:.2} tok/s; {} read in {:.2} s; {:.0}% of experts in memory, {:.0} MB/s read; {} resident; context {} \
         of {}]",
        pluralize(generated.ids.len(), "token"),
        per_second(generated.decoded as f64, generated.decode),
        pluralize(prefilled, "token"),
        generated.prefill.as_secs_f64(),
        100.0 * hits as f64 / (hits + misses).max(1) as f64,
        per_second(bytes as f64 / 1e6, generated.prefill + generated.decode),
        human(rss_bytes()),
        room.used,
        room.of
    )
}

fn per_second(amount: f64, time: Duration) -> f64 {
    match time.as_secs_f64() {
        seconds if seconds > 0.0 => amount / seconds,
        _ => 0.0,
    }
}

/// Formats `/stats`: the whole session.
pub fn report(stats: &EngineStats, tokens: u64, messages: usize, room: ContextUsage) -> String {
    let demanded = (stats.expert_hits + stats.expert_misses).max(1);
    let direct = if stats.direct { " (O_DIRECT)" } else { "" };
    format!(
        "messages     {messages}\n\
         context      {} of {}\n\
         computed     {} in {:.2} s, and {:.2} s of waiting for the disk\n\
         experts      {:.1}% of {demanded} were in memory; {} pinned\n\
         read         {} by {}{direct}, in {} into the kernel; p50 {} us, p99 {} us\n\
         prefetches   {} read, {} used\n\
         memory       {} resident",
        room.used,
        pluralize(room.of, "token"),
        pluralize(tokens, "token"),
        stats.compute_seconds,
        stats.io_wait_seconds,
        100.0 * stats.expert_hits as f64 / demanded as f64,
        stats.pinned,
        human(stats.expert_bytes_read),
        stats.engine,
        pluralize(stats.ring_enters, "call"),
        stats.latency_us.p50,
        stats.latency_us.p99,
        stats.speculative_reads,
        stats.speculative_used,
        human(rss_bytes()),
    )
}

/// Prints a line to stderr, dim on a terminal.
pub fn say(text: &str) {
    let stderr = io::stderr();
    let (dim, plain) = match terminal::styled(&stderr) {
        true => ("\x1b[2m", "\x1b[0m"),
        false => ("", ""),
    };
    // A closed stderr is not an error.
    let _ = writeln!(stderr.lock(), "{dim}{text}{plain}");
}
