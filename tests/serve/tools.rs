//! Tools and structured output by both APIs.

use std::fs;
use std::os::unix::fs::symlink;

use serde_json::{Value, json};

use crate::common::shipped;
use crate::server::Server;

/// A server with a model whose template has tools.
fn server() -> (tempfile::TempDir, Server) {
    let dir = tempfile::tempdir().unwrap();
    for file in fs::read_dir(shipped().join("chat")).unwrap() {
        let file = file.unwrap();
        if file.file_name() != "chat_template.jinja" {
            symlink(file.path(), dir.path().join(file.file_name())).unwrap();
        }
    }
    let template = include_str!("tools.jinja");
    fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    let path = dir.path().to_str().unwrap().to_owned();
    let server = Server::start(&["--model", &path]);
    (dir, server)
}

fn parameters() -> Value {
    json!({
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": false,
    })
}

fn tools() -> Value {
    let function =
        json!({"name": "weather", "description": "Tells the weather.", "parameters": parameters()});
    json!([{"type": "function", "function": function}])
}

fn question(seed: u64) -> Value {
    json!({
        "messages": [{"role": "user", "content": "How is the weather?"}],
        "max_tokens": 1000, "temperature": 1, "seed": seed, "tools": tools(), "tool_choice": "required",
        "chat_template_kwargs": {"enable_thinking": false},
    })
}

fn check(arguments: &Value) {
    assert!(["Paris", "Rome"].contains(&arguments["city"].as_str().unwrap()));
    assert!((1..=9).contains(&arguments["days"].as_u64().unwrap()));
    assert_eq!(arguments.as_object().unwrap().len(), 2);
}

#[test]
fn a_required_call_is_answered_and_comes_back_as_it_was_written() {
    let (_dir, server) = server();
    for seed in 0..4 {
        let mut request = question(seed);
        let first = server.json("/v1/chat/completions", &request);
        let choice = &first["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{first}");
        let message = choice["message"].clone();
        let calls = message["tool_calls"].as_array().unwrap();
        for call in calls {
            assert_eq!(
                (&call["type"], &call["function"]["name"]),
                (&json!("function"), &json!("weather"))
            );
            check(&serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap());
        }
        let streamed = server.stream("/v1/chat/completions", &request);
        let (mut names, mut arguments) = (Vec::new(), Vec::<String>::new());
        let deltas = streamed
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].as_array());
        for delta in deltas.flatten() {
            let index = delta["index"].as_u64().unwrap() as usize;
            if let Some(name) = delta["function"]["name"].as_str() {
                assert_eq!(names.len(), index);
                names.push(name.to_owned());
                arguments.push(String::new());
            }
            arguments[index] += delta["function"]["arguments"].as_str().unwrap();
        }
        let whole: Vec<&str> = calls
            .iter()
            .map(|call| call["function"]["arguments"].as_str().unwrap())
            .collect();
        assert_eq!(arguments, whole);
        let usage = &first["usage"];
        let tokens = usage["total_tokens"].as_u64().unwrap();
        let messages = request["messages"].as_array_mut().unwrap();
        messages.push(message.clone());
        for call in calls {
            messages.push(json!({"role": "tool", "tool_call_id": call["id"], "content": "Rain."}));
        }
        request["tool_choice"] = json!("auto");
        request["max_tokens"] = json!(4);
        let second = server.json("/v1/chat/completions", &request);
        // All but the stop token and the token before it, whose row was not needed.
        let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap();
        assert!(cached + 2 >= tokens, "{cached} of {tokens}");
    }
}

#[test]
fn choices_among_tools_are_kept() {
    let (_dir, server) = server();
    let mut request = question(1);
    request["tool_choice"] = json!({"type": "function", "function": {"name": "weather"}});
    let answer = server.json("/v1/chat/completions", &request);
    assert_eq!(
        answer["choices"][0]["message"]["tool_calls"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    request["tool_choice"] = json!("none");
    let none = server.json("/v1/chat/completions", &request);
    request.as_object_mut().unwrap().remove("tools");
    request.as_object_mut().unwrap().remove("tool_choice");
    let without = server.json("/v1/chat/completions", &request);
    assert_eq!(none["choices"], without["choices"]);
    for (field, value, says) in [
        ("tools", json!([{"type": "web_search"}]), "web_search"),
        (
            "tools",
            json!([{"type": "function", "function": {"name": "a b"}}]),
            "a b",
        ),
        (
            "tools",
            json!([{"type": "function", "function": {}}]),
            "name",
        ),
        ("tool_choice", json!("sometimes"), "required"),
        (
            "tool_choice",
            json!({"type": "function", "function": {"name": "time"}}),
            "time",
        ),
        ("functions", json!([{}]), "tools"),
        (
            "chat_template_kwargs",
            json!({"thinking_budget": 3}),
            "enable_thinking",
        ),
        ("chat_template_kwargs", json!({"messages": []}), "messages"),
    ] {
        let mut wrong = question(1);
        wrong[field] = value;
        let (status, text) = server.post("/v1/chat/completions", wrong.to_string());
        assert!(status == 400 && text.contains(says), "{text}");
        assert!(text.contains(&format!("\"param\":\"{field}")), "{text}");
    }
    let mut wrong = question(1);
    wrong["messages"][0] = json!({"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "weather", "arguments": "{"}}]});
    let (status, text) = server.post("/v1/chat/completions", wrong.to_string());
    assert!(
        status == 400 && text.contains("messages[0].tool_calls[0].function.arguments"),
        "{text}"
    );
}

#[test]
fn a_schema_makes_the_answer_json() {
    let (_dir, server) = server();
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": parameters()}});
    let with = |seed: u64, format: &Value| {
        json!({
            "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 200, "temperature": 1, "seed": seed,
            "response_format": format, "reasoning_effort": "none",
        })
    };
    for seed in 0..3 {
        let mut request = with(seed, &format);
        let answer = server.json("/v1/chat/completions", &request);
        let text = answer["choices"][0]["message"]["content"]
            .as_str()
            .unwrap()
            .to_owned();
        check(&serde_json::from_str(&text).unwrap());
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        let streamed = server.stream("/v1/chat/completions", &request);
        let deltas = streamed
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
        assert_eq!(deltas.collect::<String>(), text);
        // Forced tokens have probabilities, too, and the text does not change.
        request["logprobs"] = json!(true);
        let answer = server.json("/v1/chat/completions", &request);
        let choice = &answer["choices"][0];
        assert_eq!(choice["message"]["content"], text);
        let tokens = choice["logprobs"]["content"].as_array().unwrap();
        assert!(
            tokens
                .iter()
                .all(|token| token["logprob"].as_f64().unwrap() < 0.0)
        );
        assert_eq!(answer["usage"]["completion_tokens"], tokens.len());
    }
    let object = server.json(
        "/v1/chat/completions",
        &with(1, &json!({"type": "json_object"})),
    );
    if object["choices"][0]["finish_reason"] == "stop" {
        let text = object["choices"][0]["message"]["content"].as_str().unwrap();
        assert!(serde_json::from_str::<Value>(text).unwrap().is_object());
    }
    let completion =
        json!({"prompt": "JSON: ", "max_tokens": 200, "response_format": format, "seed": 3});
    let answer = server.json("/v1/completions", &completion);
    check(&serde_json::from_str(answer["choices"][0]["text"].as_str().unwrap()).unwrap());
    for (schema, says) in [
        (json!({"not": {}}), "not"),
        (json!({"type": "strnig"}), "strnig"),
        (json!(7), "schema"),
        (Value::Null, "schema"),
    ] {
        let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
        let (status, text) = server.post("/v1/chat/completions", with(1, &format).to_string());
        assert!(
            status == 400 && text.contains("\"param\":\"response_format\"") && text.contains(says),
            "{text}"
        );
    }
}

#[test]
fn constrained_requests_at_once_give_the_texts_that_they_give_alone() {
    let (_dir, server) = server();
    let path = "/v1/chat/completions";
    let text = |request: &Value| server.json(path, request)["choices"][0]["message"].clone();
    let bare = |mut message: Value| {
        for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
            call.as_object_mut().unwrap().remove("id");
        }
        message
    };
    let requests: Vec<Value> = (0..12).map(question).collect();
    let alone: Vec<Value> = requests.iter().map(|request| bare(text(request))).collect();
    std::thread::scope(|scope| {
        let together: Vec<_> = requests
            .iter()
            .map(|request| scope.spawn(|| bare(text(request))))
            .collect();
        for (thread, alone) in together.into_iter().zip(&alone) {
            assert_eq!(thread.join().unwrap(), *alone);
        }
    });
}

fn message(seed: u64) -> Value {
    // The seed is our own field; other servers ignore it.
    json!({
        "model": "any", "max_tokens": 100, "temperature": 1, "seed": seed, "system": "Be brief.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "How is the weather?"}]}],
        "thinking": {"type": "disabled"},
    })
}

/// The named events of a stream.
fn events(server: &Server, request: &Value) -> Vec<Value> {
    let mut request = request.clone();
    request["stream"] = json!(true);
    let (status, text) = server.post("/v1/messages", request.to_string());
    assert_eq!(status, 200, "{text}");
    let mut name = "";
    let mut events = Vec::new();
    for line in text.lines() {
        if let Some(named) = line.strip_prefix("event: ") {
            name = named;
        } else if let Some(data) = line.strip_prefix("data: ") {
            let value: Value = serde_json::from_str(data).unwrap();
            assert_eq!(value["type"], name);
            events.push(value);
        }
    }
    events
}

#[test]
fn messages_are_those_of_chat_completions() {
    let (_dir, server) = server();
    let chat = json!({
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How is the weather?"}],
        "max_tokens": 100, "temperature": 1, "seed": 3, "reasoning_effort": "none",
    });
    let chat = server.json("/v1/chat/completions", &chat);
    let answer = server.json("/v1/messages", &message(3));
    assert_eq!(
        answer["content"][0]["text"],
        chat["choices"][0]["message"]["content"]
    );
    assert_eq!(
        (&answer["type"], &answer["role"]),
        (&json!("message"), &json!("assistant"))
    );
    let usage = &answer["usage"];
    let prompt = usage["input_tokens"].as_u64().unwrap()
        + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(chat["usage"]["prompt_tokens"], prompt);
    assert_eq!(chat["usage"]["completion_tokens"], usage["output_tokens"]);
    let mut counted = message(3);
    counted.as_object_mut().unwrap().remove("max_tokens");
    assert_eq!(
        server.json("/v1/messages/count_tokens", &counted)["input_tokens"],
        prompt
    );
    let events = events(&server, &message(3));
    let names: Vec<&str> = events
        .iter()
        .map(|event| event["type"].as_str().unwrap())
        .collect();
    assert_eq!(names[..2], ["message_start", "content_block_start"]);
    assert_eq!(
        names[names.len() - 3..],
        ["content_block_stop", "message_delta", "message_stop"]
    );
    let text: String = events
        .iter()
        .filter_map(|event| event["delta"]["text"].as_str())
        .collect();
    assert_eq!(answer["content"][0]["text"], text);
    let stop = text.chars().nth(20).unwrap().to_string();
    let mut stopped = message(3);
    stopped["stop_sequences"] = json!([stop]);
    let stopped = server.json("/v1/messages", &stopped);
    assert_eq!(
        (&stopped["stop_reason"], &stopped["stop_sequence"]),
        (&json!("stop_sequence"), &json!(stop))
    );
}

#[test]
fn messages_call_tools_and_take_their_results() {
    let (_dir, server) = server();
    let mut request = message(2);
    request["tools"] = json!([{"name": "weather", "input_schema": parameters()}]);
    request["tool_choice"] = json!({"type": "any", "disable_parallel_tool_use": true});
    let answer = server.json("/v1/messages", &request);
    assert_eq!(answer["stop_reason"], "tool_use", "{answer}");
    let block = &answer["content"][0];
    assert_eq!(
        (&block["type"], &block["name"]),
        (&json!("tool_use"), &json!("weather"))
    );
    check(&block["input"]);
    let events = events(&server, &request);
    let input: String = events
        .iter()
        .filter_map(|event| event["delta"]["partial_json"].as_str())
        .collect();
    assert_eq!(
        serde_json::from_str::<Value>(&input).unwrap(),
        block["input"]
    );
    let messages = request["messages"].as_array_mut().unwrap();
    messages.push(json!({"role": "assistant", "content": answer["content"]}));
    let result = json!({"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "Rain."}]});
    messages
        .push(json!({"role": "user", "content": [result, {"type": "text", "text": "And then?"}]}));
    request["tool_choice"] = json!({"type": "auto"});
    let usage = &server.json("/v1/messages", &request)["usage"];
    assert!(usage["cache_read_input_tokens"].as_u64() > answer["usage"]["input_tokens"].as_u64());
    for (field, value, says) in [
        ("max_tokens", Value::Null, "missing"),
        ("messages", json!([]), "none"),
        (
            "messages",
            json!([{"role": "user", "content": [{"type": "image"}]}]),
            "image",
        ),
        (
            "messages",
            json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]),
            "continued",
        ),
        (
            "messages",
            json!([{"role": "system", "content": "a"}]),
            "system",
        ),
        (
            "tools",
            json!([{"type": "bash_20250124", "name": "bash"}]),
            "bash_20250124",
        ),
        (
            "tool_choice",
            json!({"type": "tool", "name": "time"}),
            "time",
        ),
        ("thinking", json!({"type": "deep"}), "deep"),
        ("mcp_servers", json!([{}]), "not supported"),
    ] {
        let mut wrong = request.clone();
        wrong[field] = value;
        let (status, text) = server.post("/v1/messages", wrong.to_string());
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, &error["type"]), (400, &json!("error")), "{text}");
        let said = error["error"]["message"].as_str().unwrap();
        assert!(said.contains(says) && said.contains(field), "{said}");
    }
}
