//! `plan`: the itemised memory estimate, and whether it fits.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::common::Saved;
use crate::corrupt::Broken;
use crate::process::{colibri, error_of, finish, json_of, on_model, stderr};

fn model() -> Vec<PathBuf> {
    Saved::named("tiny-text").dirs
}

fn plan(args: &[&str]) -> Value {
    json_of(&finish(on_model(
        "plan",
        &model(),
        &[args, &["--json"]].concat(),
    )))
}

const TERMS: [&str; 10] = [
    "dense_bytes",
    "kv_bytes",
    "scratch_bytes",
    "scores_bytes",
    "drafts_bytes",
    "index_bytes",
    "program_bytes",
    "record_bytes",
    "working_slab_bytes",
    "cache_slab_bytes",
];

fn bytes(plan: &Value, key: &str) -> u64 {
    plan[key]
        .as_u64()
        .unwrap_or_else(|| panic!("{key}: {plan}"))
}

fn sum(plan: &Value) -> u64 {
    TERMS.iter().map(|key| bytes(plan, key)).sum()
}

/// The cache is printed as slots of all experts.
#[test]
fn experts_that_are_kept_are_so_many_of_all() {
    let plan = plan(&["--cache-slots", "2"]);
    let all = bytes(&plan, "experts_per_layer");
    assert!(all > 2);
    let args = ["--cache-slots", "2"];
    let printed = finish(on_model("plan", &model(), &args));
    let printed = String::from_utf8(printed.stdout).unwrap();
    let slots = format!("2 of {all} experts kept in each layer");
    assert!(printed.contains(&slots), "{printed}");
}

#[test]
fn the_terms_add_up_and_fit() {
    let plan = plan(&["--ram", "1GiB", "--context", "100"]);
    assert_eq!(plan["fits"], true);
    assert!(bytes(&plan, "cache_slots_per_layer") > 0);
    assert_eq!(sum(&plan), bytes(&plan, "total_bytes"));
    assert_eq!(bytes(&plan, "budget_bytes"), 1 << 30);
    assert!(bytes(&plan, "total_bytes") <= 1 << 30);
    // The machine's memory is printed with any budget.
    assert!(bytes(&plan, "mem_available_bytes") <= bytes(&plan, "mem_total_bytes"));
}

#[test]
fn without_a_budget_it_is_what_is_available() {
    let plan = plan(&[]);
    let available = bytes(&plan, "mem_available_bytes");
    let left = plan["cgroup"]["left_bytes"].as_u64().unwrap_or(u64::MAX);
    let budget = available.min(left) - bytes(&plan, "reserve_bytes");
    assert_eq!(bytes(&plan, "budget_bytes"), budget);
    assert_eq!(plan["budget_source"], "available");
}

#[test]
fn a_longer_context_and_a_longer_prompt_take_more() {
    let model = Broken::copy("tiny-text");
    let mut config = model.config();
    config.insert("max_position_embeddings".to_owned(), json!(100_000));
    model.set_config(&config);
    let of = |args: &[&str], key: &str| {
        let args = [&["--ram", "2GiB", "--json"], args].concat();
        bytes(&json_of(&finish(model.run("plan", &args))), key)
    };
    let kv = |context: &str| of(&["--context", context], "kv_bytes");
    assert!(kv("20000") > kv("10000"));
    let scratch = |prompt: &str| {
        let args = ["--context", "99999", "--prompt-tokens", prompt];
        of(&args, "scratch_bytes")
    };
    assert!(scratch("99999") > scratch("1"));
    assert_eq!(of(&["--cache-slots", "2"], "cache_slots_per_layer"), 2);
    let longer = finish(model.run("plan", &["--context", "100001"]));
    let line = error_of(&longer);
    assert!(
        line.contains("100001") && line.contains("max_position_embeddings is 100000"),
        "{line}"
    );
}

#[test]
fn what_does_not_fit_is_told_with_every_term() {
    let args = ["--ram", "2MiB", "--json"];
    let output = finish(on_model("plan", &model(), &args));
    assert_eq!(output.status.code(), Some(1));
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(plan["fits"], false);
    assert_eq!(plan["cache_slots_per_layer"], Value::Null);
    assert_eq!(sum(&plan), bytes(&plan, "total_bytes"));
    assert!(stderr(&output).contains("does not fit into 2.0 MiB"));

    let output = finish(on_model("plan", &model(), &["--ram", "2MiB"]));
    assert_eq!(output.status.code(), Some(1));
    let table = String::from_utf8(output.stdout).unwrap();
    for term in ["resident weights", "KV cache", "budget", "it does not fit"] {
        assert!(table.contains(term), "{table}");
    }
}

/// The memory that an error names is enough.
#[test]
fn what_does_not_fit_says_what_would() {
    let record: &[&str] = &["--record"];
    let slots: &[&str] = &["--cache-slots", "1"];
    let some: &[&str] = &["--prompt-ids", "1,2", "-n", "2"];
    for (command, args) in [
        ("plan", &[][..]),
        ("plan", record),
        ("plan", slots),
        ("decode", some),
    ] {
        let with = |ram: &str| {
            let args = [args, &["--ram", ram, "--json"]].concat();
            finish(on_model(command, &model(), &args))
        };
        let said = stderr(&with("2MiB"));
        for part in [
            " for resident weights",
            " for expert slabs",
            " for the KV cache",
        ] {
            assert!(said.contains(part), "{said}");
        }
        assert!(!said.contains(" 0 B for"), "{said}");
        let (_, enough) = said.split_once("raise --ram to ").unwrap();
        let enough = enough.split(|c: char| !c.is_alphanumeric()).next().unwrap();
        let output = with(enough);
        assert!(output.status.success(), "{enough}: {}", stderr(&output));
    }
}

#[test]
fn a_number_without_unit_gets_a_hint() {
    let output = finish(on_model("plan", &model(), &["--ram", "24"]));
    assert_eq!(output.status.code(), Some(2));
    let text = stderr(&output);
    assert!(text.contains("did you mean 24GiB?"), "{text}");
}

#[test]
fn without_a_context_it_is_no_longer_than_the_model_allows() {
    let mut command = crate::process::colibri();
    command.args(["plan", "--json", "--ram", "1GiB"]);
    // The demo model, which allows 1024 tokens.
    command.env("XDG_CACHE_HOME", tempfile::tempdir().unwrap().path());
    assert_eq!(json_of(&finish(command))["fits"], true);
}

#[test]
fn a_prompt_longer_than_its_context_is_refused() {
    let args = ["--context", "10", "--prompt-tokens", "11"];
    let line = error_of(&finish(on_model("plan", &model(), &args)));
    assert!(line.contains("prompt of 11 tokens"), "{line}");
    let mut help = colibri();
    help.args(["plan", "--help"]);
    assert_eq!(finish(help).status.code(), Some(0));
}

#[test]
fn a_record_is_planned_for() {
    let record = |args: &[&str]| bytes(&plan(args), "record_bytes");
    assert_eq!(record(&["--ram", "4GiB"]), 0);
    let full = record(&["--ram", "4GiB", "--record"]);
    assert!(full > 0 && full < 128 << 20, "{full}");
    assert_eq!(full, record(&["--ram", "16GiB", "--record"]));
    // A small budget leaves its memory to the experts.
    assert_eq!(record(&["--ram", "64MiB", "--record"]), 4 << 20);
}

/// Decoding stays within its plan.
#[test]
fn a_run_stays_within_its_plan() {
    let dir = tempfile::tempdir().unwrap();
    let [trace, report] = ["trace.json", "report.html"].map(|name| dir.path().join(name));
    let pictures = [
        "--trace",
        trace.to_str().unwrap(),
        "--report",
        report.to_str().unwrap(),
    ];
    let run = [
        "--prompt-ids",
        "1,2,3",
        "-n",
        "200",
        "--ram",
        "64MiB",
        "--json",
    ];
    let asked = ["--ram", "64MiB", "--context", "203", "--prompt-tokens", "3"];
    for (pictures, record) in [(&[][..], &[][..]), (&pictures, &["--record"])] {
        let run = [&run[..], pictures].concat();
        let run = json_of(&finish(on_model("decode", &model(), &run)));
        let plan = plan(&[&asked[..], record].concat());
        let peak = run["stats"]["peak_rss_bytes"].as_u64().unwrap();
        assert!(peak <= bytes(&plan, "total_bytes"), "{peak}: {plan}");
    }
}
