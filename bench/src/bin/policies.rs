//! Hit rates of cache policies over routing: `policies [SESSION.jsonl...]`. Sessions are those that `decode --save-routing`
//! wrote, given in pairs: the history of a warm cache, and what is replayed. Without any, routing is made up.

use std::path::PathBuf;

use clap::Parser;
use colibri_bench::policies::cache::{History, Policy, Shares, Value, history, replay};
use colibri_bench::policies::trace::{MadeUp, Trace, recorded};

/// Compares ways to keep experts by their hit rate
#[derive(Debug, Parser)]
#[command(
    after_help = "Needs nothing: without sessions, routing is made up. Sessions are files of `decode --save-routing`.\n\n\
    Examples:\n  cargo run --release -p colibri-bench --bin policies\n  \
    cargo run --release -p colibri-bench --bin policies -- before.jsonl now.jsonl --slots 0.25"
)]
struct Args {
    /// Pairs of sessions: what was learned from, and what is replayed
    sessions: Vec<PathBuf>,
    /// Slots for each layer, as shares of its experts
    #[arg(long, value_delimiter = ',', default_value = "0.05,0.1,0.25,0.5")]
    slots: Vec<f64>,
    /// Tokens of made-up sessions
    #[arg(long, default_value_t = 800)]
    tokens: usize,
}

/// What was learned from, and what is replayed.
struct Pair {
    name: String,
    history: History,
    trace: Trace,
}

fn synthetic_routing(tokens: usize) -> Vec<Pair> {
    let kinds = [
        (
            "uniform, none repeated",
            MadeUp {
                skew: 0.0,
                repeated: 0.0,
                topics: 1,
                topic_tokens: 1e9,
            },
        ),
        (
            "uniform, 30% repeated",
            MadeUp {
                skew: 0.0,
                repeated: 0.3,
                topics: 1,
                topic_tokens: 1e9,
            },
        ),
        (
            "skew 0.5",
            MadeUp {
                skew: 0.5,
                repeated: 0.3,
                topics: 1,
                topic_tokens: 1e9,
            },
        ),
        (
            "skew 1",
            MadeUp {
                skew: 1.0,
                repeated: 0.3,
                topics: 1,
                topic_tokens: 1e9,
            },
        ),
        (
            "skew 0.7, topics",
            MadeUp {
                skew: 0.7,
                repeated: 0.3,
                topics: 4,
                topic_tokens: 150.0,
            },
        ),
    ];
    let mut pairs = Vec::new();
    for (name, kind) in kinds {
        pairs.push(Pair {
            name: name.to_owned(),
            history: history(&kind.session(2 * tokens, 0, 1)),
            trace: kind.session(tokens, 0, 2),
        });
    }
    let other = MadeUp {
        skew: 0.7,
        repeated: 0.3,
        topics: 2,
        topic_tokens: 1e9,
    };
    pairs.push(Pair {
        name: "skew 0.7, history of another topic".to_owned(),
        history: history(&other.session(2 * tokens, 1, 1)),
        trace: other.session(tokens, 0, 2),
    });
    pairs
}

fn policies() -> Vec<(String, Policy)> {
    let by_layer = |value| Policy {
        value,
        shares: Shares::Equal,
        pinned: 0.0,
        hot: 0.0,
        pins: Shares::Equal,
    };
    let global = Policy {
        shares: Shares::Global,
        ..by_layer(Value::Lru)
    };
    let mut list = vec![
        ("LRU".to_owned(), by_layer(Value::Lru)),
        ("LRU of all layers".to_owned(), global),
        ("LRU-2".to_owned(), by_layer(Value::Lru2)),
        ("W-TinyLFU".to_owned(), by_layer(Value::TinyLfu)),
    ];
    for half_life in [32.0, 512.0] {
        list.push((format!("LFU/{half_life}"), by_layer(Value::Lfu(half_life))));
    }
    list.push((
        "LFU/32 + history".to_owned(),
        by_layer(Value::TwoScales(32.0, 64.0)),
    ));
    for (half_life, passes, seeded) in [
        (32.0, 1, false),
        (128.0, 1, false),
        (128.0, 1, true),
        (128.0, 2, false),
        (512.0, 1, false),
    ] {
        let begins = if seeded { ", begins with history" } else { "" };
        list.push((
            format!("LFU/{half_life}, last {passes} spared{begins}"),
            by_layer(Value::Guarded(half_life, passes, seeded)),
        ));
    }
    let spared = Value::Guarded(128.0, 1, false);
    for (name, value) in [("LRU", Value::Lru), ("LFU/128, last 1 spared", spared)] {
        for (pinned, hot, pins) in [
            (0.25, 0.0, Shares::Equal),
            (0.25, 0.0, Shares::Global),
            (0.25, 0.5, Shares::Global),
            (0.5, 0.0, Shares::Global),
            (0.5, 0.5, Shares::Global),
            (0.75, 0.0, Shares::Global),
            (0.75, 0.5, Shares::Global),
        ] {
            let policy = Policy {
                pinned,
                hot,
                pins,
                ..by_layer(value)
            };
            let of = match (pins, hot > 0.0) {
                (Shares::Equal, _) => " for each layer",
                (Shares::Global, false) => "",
                (Shares::Global, true) => ", hot",
            };
            list.push((format!("{name} + {:.0}% pins{of}", 100.0 * pinned), policy));
        }
    }
    list.push(("(the best possible)".to_owned(), by_layer(Value::Belady)));
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
