//! `decode --kv`: a text continued in another process equals the text of one process, and only its new part is computed.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::Saved;
use crate::corrupt::Broken;
use crate::process::{error_of, finish, json_of, list, on_model, stderr};
use crate::signals;

/// A file in a temporary directory.
pub struct Talk {
    dir: TempDir,
}

impl Talk {
    pub fn new() -> Talk {
        Talk {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("talk.kv")
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.path()).unwrap()
    }

    /// `decode --json --kv FILE args...`
    pub fn decode(&self, model: &Saved, args: &[&str]) -> Command {
        let path = self.path();
        let kv = ["--json", "--kv", path.to_str().unwrap()];
        on_model("decode", &model.dirs, &[&kv, args].concat())
    }

    pub fn report(&self, model: &Saved, args: &[&str]) -> Value {
        let output = finish(self.decode(model, args));
        let said = stderr(&output);
        assert!(
            said.is_empty() || said.contains("attention stays dense"),
            "{said}"
        );
        json_of(&output)
    }
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().unwrap().iter();
    ids.map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Tokens reused and computed.
fn counts(report: &Value) -> (u64, u64) {
    let stats = &report["stats"];
    let count = |key: &str| stats[key].as_u64().unwrap();
    (count("reused_tokens"), count("prefilled_tokens"))
}

/// Sparse attention in use and switched off, every way of packing, several directories.
const SETTINGS: [(&str, &[&str]); 7] = [
    ("f16-long", &[]),
    ("f16-long", &["--dsa", "off"]),
    ("int4-grouped", &[]),
    ("int4-grouped", &["--activations", "int8"]),
    ("bf16-split", &["--dense-bits", "4"]),
    ("container-mixed", &[]),
    ("f32-no-indexer", &["--engine", "pread", "--threads", "1"]),
];

#[test]
fn an_appended_text_is_the_text_of_one_run() {
    for (name, settings) in SETTINGS {
        let model = Saved::named(name);
        let prompt = model.ids("/prompt_ids");
        let given = list(&prompt);
        let whole = ["--prompt-ids", &given, "-n", "12", "--json"];
        let whole = on_model("decode", &model.dirs, &[&whole, settings].concat());
        let whole = json_of(&finish(whole));
        assert_eq!(counts(&whole), (0, prompt.len() as u64));
        assert_eq!(whole["stats"]["kv"], Value::Null);
        let expected = ids(&whole["token_ids"]);
        let talk = Talk::new();
        let first = ["--prompt-ids", &given, "-n", "5"];
        let first = talk.report(&model, &[&first, settings].concat());
        let mut found = ids(&first["token_ids"]);
        for n in [1, 4, 2] {
            let n = n.to_string();
            let go_on = [&["--kv-append", "-n", &n], settings].concat();
            let report = talk.report(&model, &go_on);
            let text = [&prompt[..], &found].concat();
            assert_eq!(ids(&report["prompt_ids"]), text, "{name}");
            // The logits after the last token are not saved.
            assert_eq!(counts(&report), (text.len() as u64 - 1, 1), "{name}");
            assert_eq!(report["stats"]["kv"]["dropped_tokens"], 0);
            found.extend(ids(&report["token_ids"]));
            if report["finish_reason"] == "stop" {
                break;
            }
        }
        assert_eq!(found[..], expected[..found.len()], "{name} {settings:?}");
    }
}

/// The file decides speed, never the result.
#[test]
fn a_text_that_is_sent_whole_computes_what_is_new() {
    let draw = ["--temperature", "2", "--seed", "5", "-n", "6"];
    for name in ["f16-long", "int8-row", "mixed-mtp"] {
        let model = Saved::named(name);
        let talk = Talk::new();
        let score = model.ids("/score/ids");
        let long = &score[..score.len().min(60)];
        let (mut known, mut computed) = (Vec::new(), 0);
        let mut other = long[..20].to_vec();
        other.extend([1, 2, 3]);
        for prompt in [&long[..10], long, long, &other, &long[..5], &[9, 9]] {
            let given = list(prompt);
            let args = [&["--prompt-ids", &given], &draw[..], &["--json"]].concat();
            let without = json_of(&finish(on_model("decode", &model.dirs, &args)));
            let output = finish(talk.decode(&model, &args[..args.len() - 1]));
            let with = json_of(&output);
            assert_eq!(with["token_ids"], without["token_ids"], "{name}");
            assert_eq!(ids(&with["prompt_ids"]), prompt);
            let common = prompt
                .iter()
                .zip(&known)
                .take_while(|(a, b)| a == b)
                .count();
            let reused = common.min(computed).min(prompt.len() - 1);
            let expected = (reused as u64, (prompt.len() - reused) as u64);
            assert_eq!(counts(&with), expected, "{name} {prompt:?}");
            let dropped = known.len() - common;
            assert_eq!(with["stats"]["kv"]["dropped_tokens"], dropped);
            // A run that drops most of a text warns.
            let warned = stderr(&output).contains("--kv-append");
            assert_eq!(warned, dropped > common, "{}", stderr(&output));
            known = [prompt, &ids(&with["token_ids"])].concat();
            computed = known.len() - usize::from(with["finish_reason"] == "length");
            computed = computed.min(known.len() - 1);
        }
    }
}

#[test]
fn a_prompt_comes_after_what_is_there() {
    let model = Saved::named("tiny-text");
    let talk = Talk::new();
    let first = talk.report(&model, &["--prompt", "The humming", "-n", "0"]);
    assert_eq!(first["token_ids"], json!([]));
    let second = talk.report(&model, &["--kv-append", "--prompt", "bird", "-n", "3"]);
    let start = ids(&first["prompt_ids"]);
    let text = ids(&second["prompt_ids"]);
    assert_eq!(text[..start.len()], start);
    assert_eq!(counts(&second).0, start.len() as u64);
    let text = list(&text);
    let whole = ["--prompt-ids", &text, "-n", "3", "--json"];
    let whole = json_of(&finish(on_model("decode", &model.dirs, &whole)));
    assert_eq!(second["token_ids"], whole["token_ids"]);
    // Without --json the summary has one more part.
    let path = talk.path();
    let args = ["--kv-append", "-n", "2", "--kv", path.to_str().unwrap()];
    let output = finish(on_model("decode", &model.dirs, &args));
    let summary = stderr(&output);
    assert!(
        summary.contains("tokens reused") && summary.lines().count() == 1,
        "{summary}"
    );
}

#[test]
fn what_makes_no_sense_is_said() {
    let model = Saved::named("f32-smallest");
    let talk = Talk::new();
    let empty = error_of(&finish(talk.decode(&model, &["--kv-append"])));
    assert!(empty.contains("nothing to go on with"), "{empty}");
    let path = talk.path();
    let kv = path.to_str().unwrap();
    for args in [
        &["--kv", kv][..],
        &["--kv-append", "--prompt-ids", "1"],
        &["--kv-reset", "--prompt-ids", "1"],
        &["--kv", kv, "--replay", "/dev/null"],
    ] {
        let output = finish(on_model("decode", &model.dirs, args));
        assert_eq!(output.status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn ctrl_c_keeps_what_is_complete() {
    let model = signals::endless();
    let talk = Talk::new();
    let path = talk.path();
    let kv = ["--kv", path.to_str().unwrap()];
    let decode = |args: &[&str]| model.run("decode", &[&kv, args].concat());
    let mut child = decode(&["--prompt-ids", "3,4,5", "-n", "100000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut [0; 40]).unwrap();
    signals::interrupt(&child);
    let reader = std::thread::spawn(move || std::io::copy(&mut out, &mut std::io::sink()).unwrap());
    let (code, ..) = signals::end(child);
    reader.join().unwrap();
    assert_eq!(code, Some(130));
    assert!(saved_of_endless(&model, &talk) > 8);
}

/// Continues the saved text after 3,4,5 as one run would have. Returns how many tokens were saved.
fn saved_of_endless(model: &Broken, talk: &Talk) -> usize {
    let path = talk.path();
    let kv = ["--kv", path.to_str().unwrap(), "--kv-append"];
    let go_on = model.run("decode", &[&kv[..], &["-n", "8", "--json"]].concat());
    let go_on = json_of(&finish(go_on));
    let text = ids(&go_on["prompt_ids"]);
    assert_eq!(counts(&go_on), (text.len() as u64 - 1, 1));
    let n = (text.len() - 3 + 8).to_string();
    let whole = model.run("decode", &["--prompt-ids", "3,4,5", "-n", &n, "--json"]);
    let whole = ids(&json_of(&finish(whole))["token_ids"]);
    assert_eq!(whole[..whole.len() - 8], text[3..]);
    assert_eq!(whole[whole.len() - 8..], ids(&go_on["token_ids"]));
    text.len()
}

/// Like `| head -c 10`: it ends quietly, and the generated text is saved.
#[test]
fn a_reader_that_has_seen_enough() {
    let model = signals::endless();
    let talk = Talk::new();
    let path = talk.path();
    let args = ["--prompt-ids", "3,4,5", "-n", "100000", "--kv"];
    let mut child = model
        .run("decode", &[&args[..], &[path.to_str().unwrap()]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdout
        .take()
        .unwrap()
        .read_exact(&mut [0; 10])
        .unwrap();
    let (code, _, said) = signals::end(child);
    assert_eq!((code, said.as_str()), (Some(0), ""));
    assert!(saved_of_endless(&model, &talk) > 5);
}

/// The error is about the standard output, and the generated text is saved.
#[test]
fn an_output_that_is_full() {
    let model = signals::endless();
    for (n, args) in [("100000", &[][..]), ("0", &[]), ("20", &["--json"])] {
        let talk = Talk::new();
        let path = talk.path();
        let given = ["--prompt-ids", "3,4,5", "-n", n, "--kv"];
        let args = [&given[..], &[path.to_str().unwrap()], args].concat();
        let mut command = model.run("decode", &args);
        let child = command
            .stdout(signals::full())
            .stderr(Stdio::piped())
            .spawn();
        let (code, _, said) = signals::end(child.unwrap());
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("standard output: No space left"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        let saved = saved_of_endless(&model, &talk);
        let expected = [("100000", 4), ("0", 3), ("20", 23)];
        assert!(expected.contains(&(n, saved)), "{n} {saved}");
    }
}

/// An interrupted prompt keeps its complete slices, if the prompt is the whole text.
#[test]
fn ctrl_c_within_a_prompt() {
    let model = signals::endless();
    let prompt = vec!["7"; 20_000].join(",");
    for append in [false, true] {
        let talk = Talk::new();
        let path = talk.path();
        let path = path.to_str().unwrap();
        let kv = ["--kv", path, "--prefill-slice", "16", "--threads", "2"];
        let decode = |args: &[&str]| model.run("decode", &[&kv, args].concat());
        finish(decode(&["--prompt-ids", "7,7", "-n", "0"]));
        let args: &[&str] = &["--prompt-ids", &prompt, "-n", "1", "--kv-append"];
        let mut child = decode(&args[..if append { 5 } else { 4 }])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        signals::wait_until_it_can_be_stopped(&mut child);
        std::thread::sleep(Duration::from_millis(300));
        signals::interrupt(&child);
        assert_eq!(signals::end(child).0, Some(130));
        let report = json_of(&finish(decode(&["--kv-append", "-n", "0", "--json"])));
        let text = ids(&report["prompt_ids"]);
        assert!(text.iter().all(|id| *id == 7) && text.len() < 20_000);
        assert!(append || text.len() % 16 == 2, "{}", text.len());
        assert!(!append || text.len() == 2, "{}", text.len());
    }
}

#[test]
fn killed_at_any_moment_it_goes_on_from_a_whole_turn() {
    let model = Saved::named("bf16-shared");
    let talk = Talk::new();
    let prompt = list(&model.ids("/prompt_ids"));
    let first = talk.report(&model, &["--prompt-ids", &prompt, "-n", "1"]);
    let mut text = [ids(&first["prompt_ids"]), ids(&first["token_ids"])].concat();
    let mut seed = 7u64;
    for _ in 0..12 {
        let mut child = talk
            .decode(&model, &["--kv-append", "--prompt-ids", "5,6", "-n", "2"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        std::thread::sleep(Duration::from_micros((seed >> 33) % 150_000));
        let _ = child.kill();
        child.wait().unwrap();
        let report = talk.report(&model, &["--kv-append", "-n", "1"]);
        let now = ids(&report["prompt_ids"]);
        // The killed turn is saved completely or not at all.
        let added = &now[text.len()..];
        assert_eq!(now[..text.len()], text);
        assert!(
            added.is_empty() || added.len() == 4 && added[..2] == [5, 6],
            "{added:?}"
        );
        let given = list(&now);
        let whole = ["--prompt-ids", &given, "-n", "1", "--json"];
        let whole = json_of(&finish(on_model("decode", &model.dirs, &whole)));
        assert_eq!(report["token_ids"], whole["token_ids"]);
        text = [now, ids(&report["token_ids"])].concat();
    }
}

/// Drafts change no token, and a file continues with or without them.
#[test]
fn drafts_come_and_go() {
    let model = Saved::named("mtp-agrees");
    let prompt = list(&model.ids("/prompt_ids"));
    let given = ["--prompt-ids", &prompt, "-n"];
    let whole = [&given[..], &["40", "--mtp", "off", "--json"]].concat();
    let whole = ids(&json_of(&finish(on_model("decode", &model.dirs, &whole)))["token_ids"]);
    for modes in [
        ["2", "2", "2", "2"],
        ["auto", "off", "3", "off"],
        ["off", "auto", "off", "1"],
        ["off", "off", "1", "auto"],
    ] {
        let talk = Talk::new();
        let mut found = Vec::new();
        for (turn, mode) in modes.into_iter().enumerate() {
            let go_on = match turn {
                0 => [&given[..], &["5"]].concat(),
                _ => vec!["--kv-append", "-n", "7"],
            };
            let report = talk.report(&model, &[&go_on[..], &["--mtp", mode]].concat());
            found.extend(ids(&report["token_ids"]));
            let drafted = report["stats"]["mtp"]["drafted"].as_u64().unwrap();
            assert_eq!(drafted > 0, mode.parse::<u64>().is_ok(), "{modes:?} {turn}");
            let reused = report["stats"]["reused_tokens"].as_u64().unwrap();
            assert_eq!(reused > 0, turn > 0);
        }
        assert_eq!(found[..], whole[..found.len()], "{modes:?}");
    }
}
