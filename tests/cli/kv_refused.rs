//! Unusable KV files and full disks: one line that says what to do, and no data loss.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::{Output, Stdio};

use serde_json::json;

use crate::common::Saved;
use crate::corrupt::{Broken, mkfifo};
use crate::kv::Talk;
use crate::process::{error_of, finish, json_of, on_model, stderr};
use crate::sandbox::{limit_file_size, obey_permissions};
use crate::signals;

const PROMPT: [&str; 4] = ["--prompt-ids", "1,2,3,4", "-n", "3"];

fn model() -> Saved {
    Saved::named("bf16-shared")
}

fn begun() -> Talk {
    let talk = Talk::new();
    talk.report(&model(), &PROMPT);
    talk
}

/// The error line of a run that refuses the file and leaves it unchanged.
#[track_caller]
fn refused(talk: &Talk, model: &Saved, args: &[&str]) -> String {
    let before = talk.bytes();
    let line = error_of(&finish(talk.decode(model, args)));
    assert!(talk.bytes() == before, "{line}");
    assert!(line.contains("talk.kv"), "{line}");
    line
}

#[test]
fn other_models_and_other_settings() {
    let talk = begun();
    let at_other_bits = |args: &[&str]| refused(&talk, &model(), &[&PROMPT, args].concat());
    for (args, named) in [
        (["--dsa", "off"], "--dsa"),
        (["--dense-bits", "8"], "--dense-bits"),
        (["--expert-bits", "4"], "--expert-bits"),
        (["--activations", "int8"], "--activations"),
    ] {
        let line = at_other_bits(&args);
        assert!(
            line.contains(named) && line.contains("--kv-reset"),
            "{line}"
        );
    }
    for name in ["f32-smallest", "int4-grouped", "f16-long"] {
        let line = refused(&talk, &Saved::named(name), &PROMPT);
        assert!(
            line.contains("of another model") && line.contains("--kv-reset"),
            "{line}"
        );
    }
    // The same shapes with one different weight.
    let changed = Broken::copy("bf16-shared");
    changed.change("model.norm.weight", |tensors, at| tensors[at].data[0] ^= 1);
    let same_shape = Saved {
        dirs: vec![changed.path().to_path_buf()],
        ..model()
    };
    let line = refused(&talk, &same_shape, &PROMPT);
    assert!(
        line.contains("weights differ") || line.contains("shards differ"),
        "{line}"
    );
    // A copy of the model is accepted, and so are settings that change no number.
    let copy = Broken::copy("bf16-shared");
    let mut config = copy.config();
    config.insert("max_position_embeddings".to_owned(), json!(100));
    copy.set_config(&config);
    let copied = Saved {
        dirs: vec![copy.path().to_path_buf()],
        ..model()
    };
    let settings = ["--engine", "pread", "--threads", "1", "--cache-slots", "0"];
    let report = talk.report(&copied, &[&PROMPT[..], &settings].concat());
    assert_eq!(report["stats"]["reused_tokens"], 3);
}

#[test]
fn damage_and_what_is_no_kv_file() {
    let talk = begun();
    let whole = talk.bytes();
    let mut damaged = Vec::new();
    for (at, named) in [
        (40, "damaged"),
        (2000, "damaged"),
        (whole.len() - 1, "damaged"),
        (10, "version"),
    ] {
        let mut bytes = whole.clone();
        bytes[at] ^= 4;
        damaged.push((bytes, named, true));
    }
    damaged.push((whole[..whole.len() - 1].to_vec(), "truncated", true));
    damaged.push((whole[..100].to_vec(), "truncated", true));
    for foreign in [&b"a shopping list"[..], b"co", b"colikvc", b"x"] {
        damaged.push((foreign.to_vec(), "no KV file", false));
    }
    for (bytes, named, ours) in damaged {
        fs::write(talk.path(), &bytes).unwrap();
        let line = refused(&talk, &model(), &PROMPT);
        assert!(line.contains(named), "{line}");
        assert_eq!(line.contains("--kv-reset"), ours, "{line}");
        let reset = [&PROMPT[..], &["--kv-reset"]].concat();
        if ours {
            let report = talk.report(&model(), &reset);
            assert_eq!(report["stats"]["reused_tokens"], 0);
            let report = talk.report(&model(), &PROMPT);
            assert_eq!(report["stats"]["reused_tokens"], 3);
        } else {
            refused(&talk, &model(), &reset);
        }
    }
    let path = talk.path();
    let refused = |named| {
        for reset in [&[][..], &["--kv-reset"]] {
            let line = error_of(&finish(
                talk.decode(&model(), &[&PROMPT[..], reset].concat()),
            ));
            assert!(line.contains("talk.kv") && line.contains(named), "{line}");
        }
    };
    fs::remove_file(&path).unwrap();
    mkfifo(&path);
    refused("no KV file");
    fs::remove_file(&path).unwrap();
    symlink("elsewhere/that.kv", &path).unwrap();
    refused("is a link to elsewhere/that.kv, which is not there");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    refused("is a directory");
    fs::remove_dir(&path).unwrap();
    assert_eq!(fs::read_dir(talk.dir()).unwrap().count(), 0);
}

/// As `touch` and `mktemp` make it.
#[test]
fn an_empty_file_is_as_none() {
    for args in [&PROMPT[..], &[&PROMPT[..], &["--kv-reset"]].concat()] {
        let talk = Talk::new();
        fs::write(talk.path(), "").unwrap();
        let first = talk.report(&model(), args);
        assert_eq!(first["stats"]["reused_tokens"], 0);
        assert_eq!(first["stats"]["kv"]["file_bytes"], talk.bytes().len());
        let again = talk.report(&model(), &PROMPT);
        assert_eq!(again["stats"]["reused_tokens"], 3);
        assert_eq!(fs::read_dir(talk.dir()).unwrap().count(), 1);
    }
}

#[test]
fn a_reset_that_fails_loses_nothing() {
    let talk = begun();
    let args = [&PROMPT[..], &["--kv-reset", "--ram", "1MiB"]].concat();
    let before = talk.bytes();
    let line = error_of(&finish(talk.decode(&model(), &args)));
    assert!(line.contains("does not fit"), "{line}");
    assert!(talk.bytes() == before);
    let other = talk.report(
        &Saved::named("f32-smallest"),
        &[&PROMPT[..], &["--kv-reset"]].concat(),
    );
    assert_eq!(other["stats"]["kv"]["file_bytes"], talk.bytes().len());
    assert_eq!(fs::read_dir(talk.dir()).unwrap().count(), 1);
}

#[test]
fn only_the_owner_may_read_it() {
    let talk = begun();
    let mode = || fs::metadata(talk.path()).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(), 0o600);
    talk.report(&model(), &[&PROMPT[..], &["--kv-reset"]].concat());
    assert_eq!(mode(), 0o600);
    let nowhere = Talk::new();
    fs::remove_dir(nowhere.dir()).unwrap();
    let line = error_of(&finish(nowhere.decode(&model(), &PROMPT)));
    let parts = ["cannot create", "talk.kv", "No such file or directory"];
    assert!(parts.iter().all(|part| line.contains(part)), "{line}");
    assert!(!line.contains(".kv-"), "{line}");
}

/// The temporary file would be in a directory that is not writable. The error names the file of --kv.
#[test]
fn a_directory_that_is_not_to_be_written() {
    let talk = begun();
    let before = talk.bytes();
    let mode = |mode| fs::set_permissions(talk.dir(), fs::Permissions::from_mode(mode)).unwrap();
    mode(0o555);
    let path = talk.path();
    let kv = ["--kv", path.to_str().unwrap(), "--kv-reset"];
    let mut command = on_model("decode", &model().dirs, &[&PROMPT[..], &kv].concat());
    obey_permissions(&mut command);
    let output = finish(command);
    mode(0o755);
    not_saved(&output, "permission denied");
    assert!(talk.bytes() == before);
}

/// The text is printed, the summary does not claim that it was saved, and the error says why it was not.
#[track_caller]
fn not_saved(output: &Output, why: &str) {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let [summary, error] = said.lines().collect::<Vec<_>>()[..] else {
        panic!("{said}");
    };
    assert!(summary.starts_with("[3 tokens"), "{said}");
    assert!(
        summary.contains("reused") && !summary.contains("saved"),
        "{said}"
    );
    let parts = ["error: ", "talk.kv", "not saved", why];
    assert!(parts.iter().all(|part| error.contains(part)), "{said}");
    assert!(!error.contains(".kv-"), "{said}");
    assert_eq!(
        String::from_utf8_lossy(&output.stdout).split(' ').count(),
        3
    );
}

/// A limit on the length of files stands for the full disk. The generated text is still printed.
#[test]
fn a_full_disk_loses_nothing() {
    let talk = begun();
    let before = talk.bytes();
    let longer = ["--prompt-ids", "1,2,3,4,5,6,7,8,9", "-n", "20"];
    let expected = Talk::new().report(&model(), &longer);
    for args in [&longer[..], &[&longer[..], &["--kv-reset"]].concat()] {
        for room in [0, 100, 5000] {
            let mut command = talk.decode(&model(), args);
            let limit = if args.len() > 4 {
                1000 + room
            } else {
                before.len() as u64 + room
            };
            limit_file_size(&mut command, limit);
            let output = finish(command);
            assert_eq!(output.status.code(), Some(1));
            let line = stderr(&output);
            let parts = ["talk.kv", "not saved", "stays as it was", "too large"];
            assert!(parts.iter().all(|part| line.contains(part)), "{line}");
            let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(report["token_ids"], expected["token_ids"]);
            assert_eq!(report["stats"]["kv"]["saved"], false);
            assert!(talk.bytes() == before, "{room}");
            assert_eq!(fs::read_dir(talk.dir()).unwrap().count(), 1);
        }
    }
    let path = talk.path();
    let kv = ["--kv", path.to_str().unwrap()];
    let longer_prompt = ["--prompt-ids", "1,2,3,4,5,6,7,8,9", "-n", "3"];
    let mut command = on_model("decode", &model().dirs, &[&longer_prompt[..], &kv].concat());
    limit_file_size(&mut command, before.len() as u64);
    not_saved(&finish(command), "too large");
    let report = talk.report(&model(), &longer);
    assert_eq!(report["stats"]["reused_tokens"], 4);
    assert_eq!(report["stats"]["kv"]["saved"], true);
}

/// The experts become corrupt while the run waits for its prompt. The saved text is unchanged.
#[test]
fn a_prompt_that_fails_takes_nothing_away() {
    const EXPERT: &str = "model.layers.1.mlp.experts.0.down_proj.weight";
    let model = Broken::copy("tiny-text");
    // Write it once first, so that the tensors keep their offsets.
    model.change(EXPERT, |_, _| ());
    let talk = Talk::new();
    let path = talk.path();
    let kv = [
        "--expert-bits",
        "8",
        "-n",
        "4",
        "--kv",
        path.to_str().unwrap(),
    ];
    let prompt = ["--prompt", "The hummingbird"];
    let output = finish(model.run("decode", &[&kv[..], &prompt].concat()));
    assert_eq!(output.status.code(), Some(0));
    let before = talk.bytes();
    let mut child = model
        .run("decode", &kv)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    signals::wait_until(&mut child, |child| {
        let files = fs::read_dir(format!("/proc/{}/fd", child.id())).unwrap();
        let mut files = files.flatten().map(|file| fs::read_link(file.path()));
        files.any(|file| file.is_ok_and(|file| file == path))
    });
    model.change(EXPERT, |tensors, _| {
        let experts = tensors.iter_mut();
        experts
            .filter(|tensor| tensor.name.contains("layers.1.mlp.experts."))
            .for_each(|tensor| tensor.data[..2].copy_from_slice(&0x7fc0u16.to_le_bytes()));
    });
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"The other way round").unwrap();
    drop(input);
    let (code, printed, said) = signals::end(child);
    assert_eq!((code, printed.as_str()), (Some(1), ""), "{said}");
    assert!(said.contains("cannot be quantised"), "{said}");
    assert!(talk.bytes() == before);
}

#[test]
fn two_processes_at_once() {
    let endless = signals::endless();
    let talk = Talk::new();
    let path = talk.path();
    let kv = ["--kv", path.to_str().unwrap(), "--prompt-ids", "1,2"];
    let mut first = endless.run(
        "decode",
        &[&kv[..], &["-n", "100000", "--threads", "2"]].concat(),
    );
    let mut first = first
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    signals::wait_until_it_can_be_stopped(&mut first);
    for args in [&["-n", "1"][..], &["-n", "1", "--kv-reset"]] {
        let line = error_of(&finish(endless.run("decode", &[&kv[..], args].concat())));
        assert!(line.contains("in use by another process"), "{line}");
    }
    signals::interrupt(&first);
    assert_eq!(signals::end(first).0, Some(130));
    json_of(&finish(
        endless.run("decode", &[&kv[..], &["-n", "1", "--json"]].concat()),
    ));
}
