//! `--mtp`: drafts change no token.

use std::path::PathBuf;
use std::process::Output;

use serde_json::{Value, json};

use crate::common::{self, Saved};
use crate::corrupt::Broken;
use crate::process::{error_of, finish, json_of, list, on_model, stderr};

fn run(model: &Saved, args: &[&str]) -> Output {
    let ids = list(&model.ids("/prompt_ids"));
    let args = [&["--prompt-ids", &ids, "--json"], args].concat();
    finish(on_model("decode", &model.dirs, &args))
}

fn decoded(model: &Saved, args: &[&str]) -> Value {
    let output = run(model, args);
    assert_eq!(stderr(&output), "");
    json_of(&output)
}

#[test]
fn every_mode_decodes_the_reference_tokens() {
    let mut seen = 0;
    for model in common::all() {
        if model.expected.get("mtp").is_none() {
            continue;
        }
        seen += 1;
        let tokens = &model.expected["token_ids"];
        let n = tokens.as_array().unwrap().len().to_string();
        for mode in ["off", "0", "auto", "1", "2", "4", "16"] {
            let report = decoded(&model, &["-n", &n, "--mtp", mode]);
            assert_eq!(report["token_ids"], *tokens, "{} {mode}", model.name);
            assert_eq!(report["finish_reason"], model.expected["finish_reason"]);
            let mtp = &report["stats"]["mtp"];
            let off = mode == "off" || mode == "0";
            assert_eq!(mtp["mode"], if off { "off" } else { mode });
            if off || mode != "auto" {
                assert_eq!(mtp["state"], if off { "off" } else { "on" });
                assert_eq!(mtp["drafted"].as_u64() == Some(0), off);
            }
            let fed = mtp["forwards"].as_u64().unwrap() + mtp["accepted"].as_u64().unwrap();
            assert_eq!(fed, tokens.as_array().unwrap().len() as u64 - 1);
        }
    }
    assert!(seen > 0 || common::root() != common::shipped());
}

#[test]
fn drafts_that_come_true_save_passes() {
    let model = Saved::named("mtp-agrees");
    let report = decoded(&model, &["-n", "64", "--mtp", "2"]);
    let each = report["stats"]["mtp"]["tokens_per_forward"].as_f64();
    assert!(each.unwrap() > 1.5, "{each:?}");
    let output = finish(on_model(
        "decode",
        &model.dirs,
        &["--prompt-ids", "3,4,5", "-n", "9", "--mtp", "2"],
    ));
    assert!(stderr(&output).contains("drafts accepted"));
}

#[test]
fn lengths_and_stop_tokens_end_the_text_where_they_should() {
    let model = Saved::named("mtp-agrees");
    let tokens = model.ids("/token_ids");
    for n in 0..12 {
        let report = decoded(&model, &["-n", &n.to_string(), "--mtp", "4"]);
        assert_eq!(report["token_ids"], json!(tokens[..n]));
        assert_eq!(report["finish_reason"], "length");
    }
    for at in [0, 1, 2, 3, 4, 17, 18, 19] {
        let stopping = Broken::copy("mtp-agrees");
        let mut config = stopping.config();
        config.insert("eos_token_id".into(), json!(tokens[at]));
        stopping.set_config(&config);
        let ids = list(&model.ids("/prompt_ids"));
        let args = ["--prompt-ids", &ids, "-n", "40", "--mtp", "4", "--json"];
        let report = json_of(&finish(stopping.run("decode", &args)));
        // A token may come twice.
        let first = tokens.iter().position(|id| *id == tokens[at]).unwrap();
        assert_eq!(report["token_ids"], json!(tokens[..=first]));
        assert_eq!(report["finish_reason"], "stop");
    }
}

#[test]
fn a_layer_that_is_not_complete_is_left_out_or_refused() {
    for model in ["mixed-mtp", "mtp-share"] {
        let saved = Saved::named(model);
        let layer = Broken::copy(model).config()["num_hidden_layers"].clone();
        let prefix = format!("model.layers.{layer}.");
        let kinds = Broken::copy(model).kinds();
        let own = kinds.iter().filter(|name| name.starts_with(&prefix));
        let common = [
            "input_layernorm.weight",
            "self_attn.o_proj.weight",
            "self_attn.indexer.k_norm.bias",
            "mlp.gate.e_score_correction_bias",
            "mlp.shared_experts.up_proj.weight",
        ];
        let common = common.map(|name| format!("{prefix}{name}"));
        for name in own.chain(&common) {
            let broken = Broken::copy(model);
            broken.change(name, |tensors, at| drop(tensors.remove(at)));
            let ids = list(&saved.ids("/prompt_ids"));
            let args = ["--prompt-ids", &ids, "-n", "5", "--json", "--mtp"];
            let run = |mode| finish(broken.run("decode", &[&args[..], &[mode]].concat()));
            let auto = run("auto");
            let said = stderr(&auto);
            assert_eq!(said.lines().count(), 1, "{said}");
            assert!(said.contains("no drafts") && said.contains(name), "{said}");
            let report = json_of(&auto);
            assert_eq!(report["token_ids"], json!(saved.ids("/token_ids")[..5]));
            assert_eq!(report["stats"]["mtp"]["state"], "absent");
            assert_eq!(stderr(&run("off")), "");
            let error = error_of(&run("2"));
            assert!(error.contains(name), "{error}");
        }
    }
    // A missing layer is an error only if --mtp asks for drafts.
    let without = Saved::named("bf16-shared");
    let report = decoded(&without, &["-n", "3"]);
    assert_eq!(report["stats"]["mtp"]["state"], "absent");
    let error = error_of(&run(&without, &["-n", "3", "--mtp", "1"]));
    assert!(error.contains("eh_proj.weight is missing"), "{error}");
}

/// A NaN in the layer is found at load.
#[test]
fn a_layer_that_cannot_be_loaded_is_left_out_or_refused() {
    let saved = Saved::named("mtp-container");
    let given = list(&saved.ids("/prompt_ids"));
    let run = |name: &str, mode| {
        let broken = Broken::copy("mtp-container");
        spoil(&broken, name);
        let args = ["--prompt-ids", &given, "-n", "5", "--json", "--mtp", mode];
        finish(broken.run("decode", &args))
    };
    for name in [
        "eh_proj.weight.qs",
        "self_attn.o_proj.weight.qs",
        "mlp.gate.weight",
        "hnorm.weight",
    ] {
        let name = &format!("model.layers.2.{name}");
        let auto = run(name, "auto");
        let said = stderr(&auto);
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains("no drafts") && said.contains(name), "{said}");
        let report = json_of(&auto);
        assert_eq!(report["token_ids"], json!(saved.ids("/token_ids")[..5]));
        assert_eq!(report["stats"]["mtp"]["state"], "absent");
        assert_eq!(stderr(&run(name, "off")), "");
        let error = error_of(&run(name, "2"));
        assert!(error.contains(name), "{error}");
    }
    let name = "model.layers.1.self_attn.o_proj.weight.qs";
    let error = error_of(&run(name, "auto"));
    assert!(error.contains(name) && !error.contains("drafts"), "{error}");
}

/// Makes the first number of a tensor a NaN.
fn spoil(model: &Broken, name: &str) {
    model.change(name, |tensors, at| {
        tensors[at].data[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    });
}

/// The layer's experts fail when the first draft reads them. Then drafts end, and nothing else changes.
#[test]
fn experts_of_the_layer_that_cannot_be_used_end_the_drafts() {
    let saved = Saved::named("mtp-container");
    let broken = Broken::copy("mtp-container");
    for expert in 0..5 {
        let name = format!("model.layers.2.mlp.experts.{expert}.down_proj.weight.qs");
        spoil(&broken, &name);
    }
    let short = list(&saved.ids("/prompt_ids"));
    // A prompt so long that the layer computes it in a pass before the first draft.
    let long = vec!["7"; 400].join(",");
    for (prompt, n, modes) in [(&short, "40", ["auto", "2"]), (&long, "3", ["auto", "1"])] {
        let run = |dirs: &[PathBuf], mode| {
            let args = ["--prompt-ids", prompt, "-n", n, "--prefill-slice", "64"];
            let args = [&args[..], &["--json", "--mtp", mode]].concat();
            finish(on_model("decode", dirs, &args))
        };
        let expected = json_of(&run(&saved.dirs, "off"));
        for mode in modes {
            let output = run(&[broken.path().to_path_buf()], mode);
            let said = stderr(&output);
            let said = said
                .lines()
                .filter(|line| !line.contains("attention stays dense"));
            let [said] = said.collect::<Vec<_>>()[..] else {
                panic!("{}", stderr(&output));
            };
            assert!(
                said.contains("no more drafts") && said.contains("model.layers.2.mlp.experts"),
                "{said}"
            );
            assert_eq!(json_of(&output)["token_ids"], expected["token_ids"]);
        }
    }
}

#[test]
fn replays_and_recordings_take_one_token_a_pass() {
    let model = Saved::named("mtp-agrees");
    let dir = tempfile::tempdir().unwrap();
    let (ids, routing) = (dir.path().join("ids"), dir.path().join("routing"));
    std::fs::write(&ids, "3 4 5 6 7 8 9").unwrap();
    let replay = |mode| {
        let args = ["--replay", ids.to_str().unwrap(), "--json", "--mtp", mode];
        finish(on_model("decode", &model.dirs, &args))
    };
    assert_eq!(stderr(&replay("auto")), "");
    assert!(stderr(&replay("2")).contains("--mtp is ignored"));
    let mtp = json_of(&replay("2"))["stats"]["mtp"].clone();
    assert_eq!((&mtp["drafted"], &mtp["forwards"]), (&json!(0), &json!(3)));

    let args = ["-n", "5", "--save-routing", routing.to_str().unwrap()];
    assert_eq!(decoded(&model, &args)["stats"]["mtp"]["drafted"], 0);
    let args = ["--routing", routing.to_str().unwrap(), "--json"];
    let args = [&args[..], &["--device", "1GiB/s", "--ram", "1GiB"]].concat();
    let report = json_of(&finish(on_model("simulate", &model.dirs, &args)));
    assert_eq!(report["tokens"], 4);
}

#[test]
fn the_plan_has_the_layer_where_it_is_used_and_fits() {
    let model = Saved::named("mtp-agrees");
    let plan = |args: &[&str]| {
        let args = [&["--cache-slots", "0", "--json"], args].concat();
        finish(on_model("plan", &model.dirs, &args))
    };
    let of = |args: &[&str], key: &str| json_of(&plan(args))[key].as_u64().unwrap();
    for key in ["dense_bytes", "kv_bytes", "drafts_bytes", "total_bytes"] {
        let off = of(&["--ram", "1GiB", "--mtp", "off"], key);
        assert!(of(&["--ram", "1GiB"], key) > off, "{key}");
        assert!(of(&["--ram", "1GiB", "--mtp", "2"], key) > off, "{key}");
    }
    assert_eq!(of(&["--ram", "1GiB", "--mtp", "off"], "drafts_bytes"), 0);
    // Exactly enough without the layer.
    let total = of(&["--ram", "1GiB", "--mtp", "off"], "total_bytes").to_string();
    let ram = ["--ram", &format!("{total}B")];
    assert_eq!(of(&ram, "drafts_bytes"), 0);
    let args = [&ram[..], &["--mtp", "2"]].concat();
    assert_eq!(plan(&args).status.code(), Some(1));

    let args = ["-n", "300", "--mtp", "4", "--ram", "64MiB"];
    let stats = &decoded(&model, &args)["stats"];
    assert!(stats["peak_rss_bytes"].as_u64().unwrap() <= 64 << 20);
}

#[test]
fn one_history_serves_with_and_without_drafts() {
    let model = Broken::copy("mtp-agrees");
    for (run, mode) in ["off", "2", "auto", "off", "2"].into_iter().enumerate() {
        let args = ["--prompt-ids", "3,4,5", "-n", "20", "--json"];
        let args = [&args[..], &["--mtp", mode, "--cache-slots", "4"]].concat();
        let mut command = model.run("decode", &args);
        command.env_remove("COLIBRI_NO_USAGE");
        let output = finish(command);
        assert_eq!(stderr(&output), "");
        assert_eq!(json_of(&output)["stats"]["usage_runs"], run);
    }
}

#[test]
fn an_unknown_mode_is_wrong_usage() {
    for mode in ["on", "17", "-1", ""] {
        let args = ["--prompt-ids", "3", "--mtp", mode];
        let output = finish(on_model("decode", &Saved::named("mtp-agrees").dirs, &args));
        assert_eq!(output.status.code(), Some(2), "{mode}");
    }
}
