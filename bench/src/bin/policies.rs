//! Prints hit rates of cache policies: `policies [SESSION.jsonl...]`. Sessions are files of `decode --save-routing` in pairs: the
//! history of a warm cache, and the session to replay. Without any, routing is synthetic.

use std::path::PathBuf;

use clap::Parser;
use colibri_bench::policies::cache::{Policy, history, replay};
use colibri_bench::policies::trace::{SyntheticRouting, Trace, recorded};
use colibri_uring::stream::usage::Usage;

/// Compare cache policies by their hit rates
#[derive(Debug, Parser)]
#[command(
    after_help = "Needs nothing: without sessions, routing is synthetic. Sessions are files of `decode --save-routing`.\n\n\
    Examples:\n  cargo run --release -p colibri-bench --bin policies\n  \
    cargo run --release -p colibri-bench --bin policies -- before.jsonl now.jsonl --slots 0.25"
)]
struct Args {
    /// Pairs of sessions: the history, and the one to replay
    sessions: Vec<PathBuf>,
    /// Slots for each layer, as shares of its experts
    #[arg(long, value_delimiter = ',', default_value = "0.05,0.1,0.25,0.5")]
    slots: Vec<f64>,
    /// Tokens of synthetic sessions
    #[arg(long, default_value_t = 800)]
    tokens: usize,
}

/// A history and the session to replay.
struct Pair {
    name: String,
    history: Usage,
    trace: Trace,
}

fn synthetic_routing(tokens: usize) -> Vec<Pair> {
    let kind = |skew, repeated| SyntheticRouting {
        skew,
        repeated,
        topics: 1,
        topic_tokens: 1e9,
    };
    let topics = SyntheticRouting {
        topics: 4,
        topic_tokens: 150.0,
        ..kind(0.7, 0.3)
    };
    let kinds = [
        ("uniform, none repeated", kind(0.0, 0.0)),
        ("uniform, 30% repeated", kind(0.0, 0.3)),
        ("skew 0.5", kind(0.5, 0.3)),
        ("skew 1", kind(1.0, 0.3)),
        ("skew 0.7, topics", topics),
    ];
    let mut pairs = Vec::new();
    for (name, kind) in kinds {
        pairs.push(Pair {
            name: name.to_owned(),
            history: history(&kind.session(2 * tokens, 0, 1)),
            trace: kind.session(tokens, 0, 2),
        });
    }
    let other = SyntheticRouting {
        topics: 2,
        ..kind(0.7, 0.3)
    };
    pairs.push(Pair {
        name: "skew 0.7, history of another topic".to_owned(),
        history: history(&other.session(2 * tokens, 1, 1)),
        trace: other.session(tokens, 0, 2),
    });
    pairs
}

/// The policies, each with the share of slots that is pinned.
fn policies() -> Vec<(String, (Policy, f64))> {
    let protected = |half_life, seeded| Policy::Protected { half_life, seeded };
    let mut list = vec![
        ("LRU".to_owned(), (Policy::Lru, 0.0)),
        ("LRU of all layers".to_owned(), (Policy::PooledLru, 0.0)),
        ("LRU-2".to_owned(), (Policy::Lru2, 0.0)),
    ];
    for half_life in [32.0, 512.0] {
        list.push((format!("LFU/{half_life}"), (Policy::Lfu { half_life }, 0.0)));
    }
    for (half_life, seeded) in [(32.0, false), (128.0, false), (128.0, true), (512.0, false)] {
        let begins = if seeded { ", begins with history" } else { "" };
        let name = format!("LFU/{half_life}, last pass protected{begins}");
        list.push((name, (protected(half_life, seeded), 0.0)));
    }
    for (name, policy) in [
        ("LRU", Policy::Lru),
        ("LFU/128, last pass protected", protected(128.0, false)),
    ] {
        for pinned in [0.25, 0.5, 0.75] {
            list.push((
                format!("{name} + {:.0}% pins", 100.0 * pinned),
                (policy, pinned),
            ));
        }
    }
    list.push(("(optimal)".to_owned(), (Policy::Optimal, 0.0)));
    list
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let mut pairs = Vec::new();
    for pair in args.sessions.chunks_exact(2) {
        let name = |i: usize| pair[i].file_stem().unwrap_or_default().to_string_lossy();
        pairs.push(Pair {
            name: format!("{} after {}", name(1), name(0)),
            history: history(&recorded(&pair[0])?),
            trace: recorded(&pair[1])?,
        });
    }
    if pairs.is_empty() {
        pairs = synthetic_routing(args.tokens);
    }
    for pair in &pairs {
        println!("\n{}: hits in %, cold / with history\n", pair.name);
        let slots: Vec<usize> = args
            .slots
            .iter()
            .map(|s| (s * pair.trace.experts as f64).round().max(1.0) as usize)
            .collect();
        let heads: Vec<String> = slots
            .iter()
            .map(|n| format!("{n} of {}", pair.trace.experts))
            .collect();
        println!(
            "| policy | {} |\n|---|{}",
            heads.join(" | "),
            "---|".repeat(heads.len())
        );
        for (name, policy) in policies() {
            let rate = |slots, history| {
                let (hits, uses) = replay(&pair.trace, policy, slots, history);
                100.0 * hits as f64 / uses as f64
            };
            let cell = |slots: &usize| {
                format!(
                    "{:.1} / {:.1}",
                    rate(*slots, None),
                    rate(*slots, Some(&pair.history))
                )
            };
            let cells: Vec<String> = slots.iter().map(cell).collect();
            println!("| {name} | {} |", cells.join(" | "));
        }
    }
    Ok(())
}
