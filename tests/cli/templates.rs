//! Chat templates: variables, where they come from, ends of answers, switches.

use std::fs;

use serde_json::{Value, json};

use crate::common::Saved;
use crate::corrupt::Broken;
use crate::process::{error_of, finish, json_of, on_model, stderr};

const ASK: [&str; 6] = ["--chat", "--prompt", "hi", "-n", "12", "--json"];

fn ask(model: &Broken, args: &[&str]) -> Value {
    json_of(&finish(model.run("decode", &[&ASK, args].concat())))
}

fn refused(model: &Broken, args: &[&str]) -> String {
    error_of(&finish(model.run("decode", &[&ASK, args].concat())))
}

/// Swaps two rows of the output matrix, so that the model writes `instead` where it wrote `id`.
fn swap_output(model: &Broken, id: u64, instead: u64) {
    model.change("lm_head.weight", |tensors, at| {
        let tensor = &mut tensors[at];
        let bytes = tensor.data.len() / tensor.shape[0] as usize;
        for byte in 0..bytes {
            let (a, b) = (id as usize * bytes + byte, instead as usize * bytes + byte);
            tensor.data.swap(a, b);
        }
    });
}

#[test]
fn an_answer_ends_at_a_role_token_of_the_template() {
    for (role, id) in [("<|user|>", 4), ("<|system|>", 3), ("<|assistant|>", 5)] {
        let model = Broken::copy("chat");
        let plain = ask(&model, &[]);
        let ids = plain["token_ids"].as_array().unwrap();
        swap_output(&model, ids[4].as_u64().unwrap(), id);
        let report = ask(&model, &[]);
        assert_eq!(report["finish_reason"], "stop", "{role}");
        let expected = [&ids[..4], &[json!(id)]].concat();
        assert_eq!(report["token_ids"], json!(expected), "{role}");
        // A text alone has no roles.
        let text = ["--prompt", "hi", "-n", "12", "--json"];
        json_of(&finish(model.run("decode", &text)));
        let chat =
            assert_cmd::Command::from_std(model.run("chat", &["-n", "12", "--temperature", "0"]))
                .write_stdin("hi\n")
                .output()
                .unwrap();
        assert!(stderr(&chat).contains("[5 tokens, "), "{}", stderr(&chat));
        let text = format!("{}\n", report["text"].as_str().unwrap());
        assert_eq!(String::from_utf8(chat.stdout).unwrap(), text);
    }
}

/// Thoughts belong to an answer.
#[test]
fn an_answer_goes_on_after_a_thought() {
    let model = Broken::copy("chat");
    let ids = ask(&model, &[])["token_ids"].clone();
    swap_output(&model, ids[4].as_u64().unwrap(), 699);
    let report = ask(&model, &[]);
    assert_eq!(report["token_ids"][4], 699);
    assert!(report["token_ids"].as_array().unwrap().len() > 5);
}

#[test]
fn a_variable_that_the_template_does_not_read_is_an_error() {
    let model = Broken::copy("chat");
    for name in ["thinking", "Enable_Thinking", "enable_thinking ", ""] {
        let variable = format!("{name}=false");
        let output = finish(model.run(
            "decode",
            &[&ASK[..], &["--template-var", &variable]].concat(),
        ));
        if name.is_empty() {
            assert_eq!(output.status.code(), Some(2));
            continue;
        }
        let line = error_of(&output);
        let says = format!("does not read a variable {name:?}, only: enable_thinking");
        assert!(line.contains(&says), "{line}");
    }
    for name in ["messages", "add_generation_prompt"] {
        let line = refused(&model, &["--template-var", &format!("{name}=3")]);
        assert!(line.contains("from the program alone"), "{line}");
    }
    fs::write(
        model.file("chat_template.jinja"),
        "{{ messages[0].content }}",
    )
    .unwrap();
    let line = refused(&model, &["--template-var", "a=b"]);
    assert!(line.contains("nor any other"), "{line}");
    // With --raw there is no template.
    let raw = finish(model.run(
        "chat",
        &["--raw", "--template-var", "enable_thinking=false"],
    ));
    assert_eq!(raw.status.code(), Some(2));
}

#[test]
fn a_value_is_what_people_mean() {
    let model = Broken::copy("chat");
    let with = |value: &str| {
        let variable = format!("enable_thinking={value}");
        ask(&model, &["--template-var", &variable])["prompt_ids"].clone()
    };
    let (off, on) = (with("false"), with("true"));
    assert_ne!(off, on);
    for value in ["False", "FALSE", "off", "no", "None", "null", "0"] {
        assert_eq!(with(value), off, "{value}");
    }
    for value in ["True", "on", "yes", "1"] {
        assert_eq!(with(value), on, "{value}");
    }
    // Tools keep the order of their keys.
    let template = "{{ tools | tojson }}{{ messages[0].content }}";
    fs::write(model.file("chat_template.jinja"), template).unwrap();
    let tools = r#"tools=[{"type": "function", "a": 1}]"#;
    let ids = ask(&model, &["--template-var", tools])["prompt_ids"].clone();
    let text = r#"[{"type": "function", "a": 1}]hi"#;
    let raw = ["--prompt", text, "-n", "0", "--json"];
    assert_eq!(
        json_of(&finish(model.run("decode", &raw)))["prompt_ids"],
        ids
    );
}

#[test]
fn a_template_that_drops_the_message_is_refused() {
    let model = Broken::copy("chat");
    let file = model.file("chat_template.jinja");
    for page in ["", "<html><body>404 this page is missing</body></html>"] {
        fs::write(&file, page).unwrap();
        let line = refused(&model, &[]);
        for part in [
            "chat_template.jinja",
            "leaves out the user message",
            "--chat-template FILE",
        ] {
            assert!(line.contains(part), "{line}");
        }
        assert!(!line.contains("ChatTemplate"), "{line}");
    }
    fs::write(&file, "{{ messages[-1].content }}").unwrap();
    let line = refused(&model, &["--system", "Be brief."]);
    assert!(line.contains("leaves out the system message"), "{line}");
}

#[test]
fn a_template_may_be_in_several_files() {
    let model = Broken::copy("chat");
    let file = model.file("chat_template.jinja");
    let template = fs::read_to_string(&file).unwrap();
    let expected = ask(&model, &[])["prompt_ids"].clone();
    let other = model.file("other.jinja");
    fs::rename(&file, &other).unwrap();
    let line = refused(&model, &[]);
    assert!(
        line.contains("no chat template") && line.contains("--chat-template FILE"),
        "{line}"
    );
    let given = ["--chat-template", other.to_str().unwrap()];
    assert_eq!(ask(&model, &given)["prompt_ids"], expected);
    let line = refused(&model, &["--chat-template", "/nonexistent/t.jinja"]);
    assert!(line.contains("/nonexistent/t.jinja"), "{line}");
    let json_file = model.file("chat_template.json");
    for value in [
        json!(template),
        json!([{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]),
    ] {
        fs::write(&json_file, json!({ "chat_template": value }).to_string()).unwrap();
        assert_eq!(ask(&model, &[])["prompt_ids"], expected);
    }
    fs::write(&json_file, "<html>").unwrap();
    assert!(refused(&model, &[]).contains("chat_template.json"));
    let without = finish(model.run("decode", &["--prompt", "a", "--chat-template", "t.jinja"]));
    assert_eq!(without.status.code(), Some(2));
}

#[test]
fn doctor_names_missing_files_in_advance() {
    let checks = |model: &Broken| {
        let report = json_of(&finish(model.run("doctor", &["--json"])));
        let checks = report["checks"].as_array().unwrap().clone();
        ["tokenizer", "template"].map(|name| {
            let found = checks.iter().find(|check| check["name"] == name);
            let found = found.unwrap();
            (
                found["ok"].as_bool().unwrap(),
                found["found"].as_str().unwrap().to_owned(),
            )
        })
    };
    let model = Broken::copy("chat");
    assert!(checks(&model).iter().all(|(ok, _)| *ok));
    fs::write(model.file("chat_template.jinja"), "<html>404</html>").unwrap();
    let [_, (ok, found)] = checks(&model);
    assert!(!ok && found.contains("leaves out"), "{found}");
    fs::remove_file(model.file("chat_template.jinja")).unwrap();
    let [_, (ok, found)] = checks(&model);
    assert!(
        !ok && found.contains("copy chat_template.jinja there"),
        "{found}"
    );
    let tokenizer = fs::read(model.file("tokenizer.json")).unwrap();
    fs::write(model.file("tokenizer.json"), &tokenizer[..3000]).unwrap();
    let [(ok, found), _] = checks(&model);
    assert!(!ok && found.contains("not a valid tokenizer"), "{found}");
    fs::remove_file(model.file("tokenizer.json")).unwrap();
    fs::write(model.file("tokenizer.model"), "").unwrap();
    let [(ok, found), _] = checks(&model);
    assert!(
        !ok && found.contains("copy it there") && found.contains("tokenizer.model"),
        "{found}"
    );
    // What decode --chat advises is possible with --chat.
    let line = refused(&model, &[]);
    assert!(
        line.contains("no tokenizer.json") && !line.contains("--prompt-ids"),
        "{line}"
    );
    let dirs = Saved::named("f32-smallest").dirs;
    let line = error_of(&finish(on_model("decode", &dirs, &["--prompt", "a"])));
    assert!(line.contains("or give --prompt-ids"), "{line}");
}

#[test]
fn a_switch_at_the_end_of_a_message_works() {
    let model = Broken::copy("chat");
    // Token 698, <think>, becomes a switch.
    let text = fs::read_to_string(model.file("tokenizer.json")).unwrap();
    fs::write(
        model.file("tokenizer.json"),
        text.replace("\"<think>\"", "\"/nothink\""),
    )
    .unwrap();
    let template = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}<|assistant|>\n\
        {% if messages[-1].content.endswith('/nothink') %}</think>{% endif %}";
    fs::write(model.file("chat_template.jinja"), template).unwrap();
    let count = |prompt: &str| {
        let args = ["--chat", "--prompt", prompt, "-n", "1", "--json"];
        let ids = json_of(&finish(model.run("decode", &args)))["prompt_ids"].clone();
        let ids = ids.as_array().unwrap().clone();
        [4, 5, 698, 699].map(|id| ids.iter().filter(|i| **i == json!(id)).count())
    };
    assert_eq!(count("hi"), [1, 1, 0, 0]);
    assert_eq!(count("hi /nothink"), [1, 1, 1, 1]);
    assert_eq!(
        count("/nothink hi<|user|><|assistant|></think>"),
        [1, 1, 0, 0]
    );
}
