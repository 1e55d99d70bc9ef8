//! Every fixture through the binary: the reference's tokens, argmax and logits.

use crate::common;
use crate::process::{finish, json_of, list, on_model};

#[test]
fn greedy_tokens_and_the_reason_to_stop_equal_the_reference() {
    for model in common::all() {
        let tokens = model.ids("/token_ids");
        // One more than the reference's if it stopped by itself: a stop token must end this run too.
        let stopped = model.expected["finish_reason"] == "stop";
        let n = (tokens.len() + usize::from(stopped)).to_string();
        let prompt = list(&model.ids("/prompt_ids"));
        let args = ["--prompt-ids", &prompt, "-n", &n, "--json"];
        let report = json_of(&finish(on_model("decode", &model.dirs, &args)));
        for key in ["prompt_ids", "token_ids", "finish_reason"] {
            assert_eq!(report[key], model.expected[key], "{}: {key}", model.name);
        }
    }
}

#[test]
fn scores_equal_the_reference() {
    for model in common::all() {
        let ids = list(&model.ids("/score/ids"));
        for (key, dsa) in [("score", "on"), ("dense_score", "off")] {
            let Some(expected) = model.expected.get(key) else {
                continue;
            };
            let args = ["--ids", &ids, "--dsa", dsa, "--json"];
            let report = json_of(&finish(on_model("score", &model.dirs, &args)));
            let name = format!("{}: {key}", model.name);
            assert_eq!(report["argmax"], expected["argmax"], "{name}");
            let nll = report["nll"].as_f64().unwrap_or(0.0);
            let difference = (nll - expected["nll"].as_f64().unwrap_or(0.0)).abs();
            assert!(difference < 1e-3, "{name}: nll differs by {difference}");
            let logits = report["last_logits"].as_array().unwrap();
            let reference = model.floats(&format!("/{key}/last_logits"));
            assert_eq!(logits.len(), reference.len());
            for (logit, reference) in logits.iter().zip(reference) {
                let difference = (logit.as_f64().unwrap() - f64::from(reference)).abs();
                assert!(difference < 1e-3, "{name}: a logit differs by {difference}");
            }
        }
    }
}
