//! The server as clients see it: the program runs, and is talked to over HTTP.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::thread;

use serde_json::{Value, json};

use crate::server::Server;

const PROMPT: &str = "It is a truth universally acknowledged, that";

fn chat(content: &str) -> Value {
    json!({"messages": [{"role": "user", "content": content}], "max_tokens": 24, "temperature": 1, "seed": 5})
}

fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap()
}

#[test]
fn completions_are_those_of_decode() {
    let server = Server::start(&[]);
    let decode = Command::new(env!("CARGO_BIN_EXE_colibri-uring"))
        .args([
            "decode",
            "--json",
            "--no-usage",
            "-n",
            "24",
            "--temperature",
            "0",
            "--prompt",
            PROMPT,
        ])
        .output()
        .unwrap();
    let decode: Value = serde_json::from_slice(&decode.stdout).unwrap();
    let request =
        json!({"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "return_token_ids": true});
    let answer = server.json("/v1/completions", &request);
    let choice = &answer["choices"][0];
    assert_eq!(
        (&choice["text"], &choice["token_ids"]),
        (&decode["text"], &decode["token_ids"])
    );
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 24);
    // As ids, echoed, and streamed.
    let ids =
        json!({"prompt": [decode["prompt_ids"]], "max_tokens": 24, "temperature": 0, "echo": true});
    let echoed = server.json("/v1/completions", &ids);
    let whole = format!("{PROMPT}{}", decode["text"].as_str().unwrap());
    assert_eq!(echoed["choices"][0]["text"], whole);
    let chunks = server.stream("/v1/completions", &ids);
    let streamed: Vec<&str> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["text"].as_str())
        .collect();
    assert_eq!(streamed.concat(), whole);
    assert!(streamed.len() > 4);
    let usage = &chunks.last().unwrap()["usage"];
    assert_eq!(usage["completion_tokens"], 24);
    assert!(
        usage["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
            > 0
    );
}

#[test]
fn requests_at_once_give_the_texts_that_they_give_alone() {
    let server = Server::start(&["--parallel", "5"]);
    let request = |seed: usize| {
        let mut request = chat(&format!(
            "{} Who is guest {seed}?",
            "Speak. ".repeat(seed * 6)
        ));
        request["seed"] = json!(seed);
        request
    };
    let alone: Vec<Value> = (0..12)
        .map(|seed| server.json("/v1/chat/completions", &request(seed)))
        .collect();
    thread::scope(|scope| {
        for (seed, alone) in alone.iter().enumerate() {
            let server = &server;
            scope.spawn(move || {
                let streamed = server.stream("/v1/chat/completions", &request(seed));
                let texts = streamed
                    .iter()
                    .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
                assert_eq!(texts.collect::<String>(), content(alone));
            });
        }
    });
}

#[test]
fn a_stop_string_ends_the_text_across_tokens() {
    let server = Server::start(&[]);
    let mut request = chat("Who came to the ball?");
    let text = content(&server.json("/v1/chat/completions", &request)).to_owned();
    // Not at the border of a word.
    let at = text.char_indices().nth(12).unwrap().0;
    let stop = &text[at..at + 6];
    request["stop"] = json!(["@@", stop]);
    let stopped = server.json("/v1/chat/completions", &request);
    let before = text[..text.find(stop).unwrap()].trim_end();
    assert_eq!(content(&stopped).trim_end(), before);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    // The next message finds the rest.
    let again = server.json("/v1/chat/completions", &request);
    assert_eq!(content(&again), content(&stopped));
}

#[test]
fn probabilities_and_choices() {
    let server = Server::start(&[]);
    let mut request = chat("Who came?");
    (request["n"], request["logprobs"], request["top_logprobs"]) =
        (json!(3), json!(true), json!(2));
    let answer = server.json("/v1/chat/completions", &request);
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], index);
        let tokens = choice["logprobs"]["content"].as_array().unwrap();
        let texts: String = tokens
            .iter()
            .map(|token| token["token"].as_str().unwrap())
            .collect();
        assert_eq!(texts.trim(), choice["message"]["content"]);
        assert!(
            tokens
                .iter()
                .all(|token| token["top_logprobs"].as_array().unwrap().len() == 2)
        );
        // Choice n is what seed + n draws.
        let mut single = chat("Who came?");
        single["seed"] = json!(5 + index);
        assert_eq!(
            content(&server.json("/v1/chat/completions", &single)),
            choice["message"]["content"]
        );
    }
    let usage = &answer["usage"];
    let alone = &server.json("/v1/chat/completions", &chat("Who came?"))["usage"];
    assert_eq!(usage["prompt_tokens"], alone["prompt_tokens"]);
}

#[test]
fn wrong_requests_are_answered_with_the_field() {
    let server = Server::start(&["--context", "100"]);
    for (field, value) in [
        ("temperature", json!("x")),
        ("temperature", json!(-1)),
        ("top_p", json!(2)),
        ("top_k", json!(-5)),
        ("n", json!(0)),
        ("n", json!(1000)),
        ("max_tokens", json!(-3)),
        ("max_tokens", json!(100)),
        ("stop", json!(5)),
        ("stop", json!([""])),
        ("seed", json!([])),
        ("logit_bias", json!({"x": 1})),
        ("logit_bias", json!({"99999999": 1})),
        ("presence_penalty", json!(3)),
        ("response_format", json!({"type": "yaml"})),
        ("stream_options", json!({"include_usage": 3})),
    ] {
        for (path, mut request) in [
            ("/v1/chat/completions", chat("a")),
            ("/v1/completions", json!({"prompt": "a"})),
        ] {
            request[field] = value.clone();
            let (status, text) = server.post(path, request.to_string());
            assert_eq!(status, 400, "{field} {value}: {text}");
            let error: Value = serde_json::from_str(&text).unwrap();
            let param = error["error"]["param"].as_str().unwrap();
            assert!(param.starts_with(field), "{text}");
        }
    }
    for (path, body, says) in [
        ("/v1/completions", "", "no JSON"),
        ("/v1/completions", "[1]", "no JSON object"),
        ("/v1/completions", "{}", "prompt"),
        ("/v1/completions", "{\"prompt\": []}", "prompt"),
        ("/v1/completions", "{\"prompt\": [99999999]}", "99999999"),
        ("/v1/completions", "{\"prompt\": {}}", "prompt"),
        ("/v1/completions", "{\"prompt\": \"a\"} x", "no JSON"),
        ("/v1/chat/completions", "{\"messages\": []}", "messages"),
        (
            "/v1/chat/completions",
            "{\"messages\": [{\"role\": \"bard\", \"content\": \"a\"}]}",
            "bard",
        ),
        (
            "/v1/chat/completions",
            "{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image_url\"}]}]}",
            "image_url",
        ),
    ] {
        let (status, text) = server.post(path, body);
        assert!(
            status == 400 && text.contains(says),
            "{body}: {status} {text}"
        );
    }
    let deep = "[".repeat(100_000);
    assert_eq!(
        server
            .post("/v1/completions", format!("{{\"prompt\": {deep}"))
            .0,
        400
    );
    assert_eq!(server.post("/v1/completions", [0xff, 0xfe, b'{']).0, 400);
    let large = format!("{{\"prompt\": \"{}\"}}", "a".repeat(17 << 20));
    assert_eq!(server.post("/v1/completions", large).0, 413);
    assert_eq!(server.get("/v1/nothing").0, 404);
    assert_eq!(server.get("/v1/completions").0, 405);
    // And the next client is served.
    assert_eq!(
        server.json("/v1/completions", &json!({"prompt": "a", "max_tokens": 1}))["usage"]["completion_tokens"],
        1
    );
}

#[test]
fn other_hosts_and_wrong_keys_are_refused() {
    let server = Server::start(&[]);
    let raw = |head: &str| {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        write!(
            stream,
            "GET /v1/models HTTP/1.1\r\n{head}connection: close\r\n\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer[9..12].to_owned()
    };
    assert_eq!(raw("host: localhost\r\n"), "200");
    assert_eq!(raw("host: evil.example\r\n"), "403");
    assert_eq!(
        raw("host: localhost\r\norigin: https://evil.example\r\n"),
        "403"
    );
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("key");
    std::fs::write(&file, "a-key\n").unwrap();
    let mut keyed = Server::start(&["--api-key-file", file.to_str().unwrap()]);
    let body = json!({"prompt": "a", "max_tokens": 1}).to_string();
    assert_eq!(keyed.post("/v1/completions", &body).0, 401);
    // The page asks for the key, so it comes without one.
    let (status, page) = keyed.get("/");
    assert_eq!(status, 200);
    assert!(page.starts_with("<!doctype html>"));
    assert_eq!(keyed.get("/metrics").0, 401);
    keyed.key = Some("a-keys");
    assert_eq!(keyed.post("/v1/completions", &body).0, 401);
    keyed.key = Some("a-key");
    assert_eq!(keyed.post("/v1/completions", &body).0, 200);
}

#[test]
fn a_client_that_goes_away_frees_its_place() {
    let server = Server::start(&["--parallel", "1"]);
    let request =
        json!({"prompt": PROMPT, "max_tokens": 900, "temperature": 0, "stream": true}).to_string();
    let mut stream = TcpStream::connect(&server.address).unwrap();
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{request}",
        request.len()
    )
    .unwrap();
    let mut first = [0; 400];
    stream.read_exact(&mut first).unwrap();
    drop(stream);
    // Takes its turn when the other one has gone.
    let answer = server.json("/v1/completions", &json!({"prompt": "a", "max_tokens": 2}));
    assert_eq!(answer["usage"]["completion_tokens"], 2);
    while server.metric("colibri_requests_running") > 0.0 {
        thread::yield_now();
    }
    assert_eq!(
        server.metric("colibri_kv_pages"),
        server.metric("colibri_kv_pages_free")
    );
}

#[test]
fn sigterm_finishes_what_runs() {
    let server = Server::start(&[]);
    assert_eq!(server.get("/health").0, 200);
    let request =
        json!({"prompt": PROMPT, "max_tokens": 600, "temperature": 0, "stream": true}).to_string();
    let mut stream = TcpStream::connect(&server.address).unwrap();
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{request}",
        request.len()
    )
    .unwrap();
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    while !line.contains("\"text\"") {
        line.clear();
        reader.read_line(&mut line).unwrap();
    }
    server.signal(15);
    let mut rest = String::new();
    reader.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: [DONE]"), "{rest}");
    assert_eq!(server.wait().code(), Some(0));
}
