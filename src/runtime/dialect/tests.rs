use proptest::prelude::*;
use serde_json::json;

use super::*;

const PAIRS: Dialect = Dialect {
    thinks: true,
    calls: Some(CallFormat::Pairs),
};
const JSON: Dialect = Dialect {
    thinks: false,
    calls: Some(CallFormat::Json),
};

fn tools() -> Vec<Tool> {
    let schema = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "options": {"type": "object"},
        },
    });
    vec![Tool {
        name: "weather".into(),
        parameters: schema.as_object().unwrap().clone(),
    }]
}

/// An answer in parts: reasoning, content, and calls with their arguments.
#[derive(Debug, Default, PartialEq)]
struct Whole {
    reasoning: String,
    content: String,
    calls: Vec<(String, String)>,
}

fn whole(parts: Vec<Part>) -> Whole {
    let mut whole = Whole::default();
    for part in parts {
        match part {
            Part::Reasoning(text) => whole.reasoning += &text,
            Part::Content(text) => whole.content += &text,
            Part::Call { index, name } => {
                assert_eq!(index, whole.calls.len());
                whole.calls.push((name, String::new()));
            }
            Part::Arguments { index, text } => whole.calls[index].1 += &text,
        }
    }
    whole
}

fn split<'t>(
    dialect: Dialect,
    prompt: &str,
    tools: Vec<Tool>,
    pieces: impl Iterator<Item = &'t str>,
) -> Whole {
    let mut splitter = dialect.splitter(prompt, tools);
    let mut parts: Vec<Part> = pieces.flat_map(|piece| splitter.push(piece)).collect();
    parts.extend(splitter.finish());
    whole(parts)
}

/// The parts, which must be the same whether the answer comes at once or by characters.
#[track_caller]
fn parts(dialect: Dialect, prompt: &str, answer: &str) -> Whole {
    let at_once = split(dialect, prompt, tools(), [answer].into_iter());
    let by_character = split(dialect, prompt, tools(), answer.split_inclusive(|_| true));
    assert_eq!(at_once, by_character);
    at_once
}

#[test]
fn reasoning_then_content() {
    for (prompt, answer) in [
        ("<|assistant|>", "\n<think>\nhm, < 3\n</think>\n\nYes.\n"),
        ("<|assistant|><think>", "hm, < 3</think>Yes."),
        ("<|assistant|>\n<think>\n", "hm, < 3\n</think>\nYes."),
    ] {
        let found = parts(PAIRS, prompt, answer);
        assert_eq!((&*found.reasoning, &*found.content), ("hm, < 3", "Yes."));
    }
    // Reasoning is switched off, the model does not reason, or its answer ends too soon.
    let found = parts(PAIRS, "<think></think>", "Yes.\n\n<think> is a tag.");
    assert_eq!(
        (&*found.reasoning, &*found.content),
        ("", "Yes.\n\n<think> is a tag.")
    );
    let found = parts(PAIRS, "<think>", "hm </thi");
    assert_eq!((&*found.reasoning, &*found.content), ("hm </thi", ""));
    let found = parts(JSON, "<think>", "<think>no tag</think>");
    assert_eq!(found.content, "<think>no tag</think>");
}

#[test]
fn pairs_become_arguments_of_the_schema() {
    let answer = "I look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>10 \"Downing\" St\n</arg_value>\n\
        <arg_key>days</arg_key><arg_value>3</arg_value><arg_key>unit</arg_key><arg_value>5</arg_value>\
        <arg_key>options</arg_key><arg_value>{\"a\": [1]}</arg_value><arg_key>new</arg_key><arg_value>true</arg_value>\n</tool_call>\n\
        <tool_call>now</tool_call>";
    let found = parts(PAIRS, "", answer);
    assert_eq!(found.content, "I look.");
    let calls = &found.calls;
    assert_eq!(
        (calls.len(), &*calls[0].0, &*calls[1].0),
        (2, "weather", "now")
    );
    let arguments: Value = serde_json::from_str(&calls[0].1).unwrap();
    let expected = json!({"city": "10 \"Downing\" St\n", "days": 3, "unit": "5", "options": {"a": [1]}, "new": true});
    assert_eq!(arguments, expected);
    assert_eq!(calls[1].1, "{}");
}

#[test]
fn arguments_come_while_the_call_is_written() {
    let mut splitter = PAIRS.splitter("<think></think>", tools());
    let named = splitter.push("<tool_call>weather\n<arg_key>");
    assert_eq!(named.len(), 1);
    let first = splitter.push("days</arg_key><arg_value>3</arg_value>");
    let text = "{\"days\": 3".to_owned();
    assert_eq!(first, [Part::Arguments { index: 0, text }]);
    // Cut off here, the arguments stay open.
    assert_eq!(splitter.calls(), 1);
    assert_eq!(splitter.finish(), []);
}

#[test]
fn json_calls() {
    let answer = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"a </tool_call\"}}\n</tool_call>\n\
        <tool_call>{\"name\":\"now\"}</tool_call><tool_call>{\"name\": \"x\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call> Done.";
    let found = parts(JSON, "", answer);
    let calls: Vec<_> = found.calls.iter().map(|(n, a)| (&**n, &**a)).collect();
    assert_eq!(
        calls,
        [
            ("weather", "{\"city\":\"a </tool_call\"}"),
            ("now", "{}"),
            ("x", "{\"a\":1}")
        ]
    );
    assert_eq!(found.content, "Done.");
}

#[test]
fn what_is_no_call_is_content() {
    for (dialect, answer) in [
        (
            PAIRS,
            "Write <tool_call> and a name with blanks <arg_key> in it.",
        ),
        (PAIRS, "<tool_call>unfinished"),
        (PAIRS, "<tool_call></tool_call>"),
        (JSON, "<tool_call>{\"name\": 5}</tool_call>"),
        (
            JSON,
            "<tool_call>{\"name\": \"a\", \"arguments\": [1]}</tool_call> more",
        ),
        (JSON, "<tool_call>{\"name\": \"a\", \"argum"),
    ] {
        let found = parts(dialect, "", answer);
        assert_eq!((&*found.content, found.calls.len()), (answer, 0));
    }
    // Without tools, nothing is a call.
    let text = "<tool_call>weather</tool_call>";
    let found = split(PAIRS, "", Vec::new(), [text].into_iter());
    assert_eq!(found.content, text);
}

#[test]
fn a_call_with_unreadable_arguments_has_those_that_can_be_read() {
    let answer = "<tool_call>weather<arg_key>days</arg_key><arg_value>3</arg_value>nonsense</tool_call>Done.";
    let found = parts(PAIRS, "", answer);
    assert_eq!(found.calls, [("weather".into(), "{\"days\": 3}".into())]);
    assert_eq!(found.content, "Done.");
}

proptest! {
    /// Where the pieces end changes nothing, and no word is lost or made up outside of calls.
    #[test]
    fn pieces_do_not_count(
        fragments in prop::collection::vec(prop::sample::select(vec![
            "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
            "weather", "days", "3", "{\"name\": \"now\", \"arguments\": {}}", " ", "\n", "<", "é", "</tool", "\"",
        ]), 0..24),
        cuts in prop::collection::vec(any::<bool>(), 256),
        pairs: bool,
        opened: bool,
    ) {
        let answer = fragments.concat();
        let dialect = if pairs { PAIRS } else { Dialect { thinks: true, ..JSON } };
        let prompt = if opened { "<think>" } else { "" };
        let mut cut = cuts.iter().cycle();
        let pieces = answer.split_inclusive(|_| *cut.next().unwrap());
        let in_pieces = split(dialect, prompt, tools(), pieces);
        prop_assert_eq!(&in_pieces, &split(dialect, prompt, tools(), [&*answer].into_iter()));
        for (_, arguments) in &in_pieces.calls {
            prop_assert!(arguments.is_empty() || arguments.starts_with('{'), "{arguments}");
        }
        // Without tools, only the tags of the reasoning and white space go.
        let text = split(dialect, prompt, Vec::new(), [&*answer].into_iter());
        let letters = |text: &str| text.chars().filter(|c| !c.is_whitespace()).collect::<String>();
        let kept = letters(&(text.reasoning + &text.content));
        let mut expected = letters(&answer);
        if !opened && expected.starts_with("<think>") {
            expected = expected["<think>".len()..].to_owned();
        }
        if opened || letters(&answer).starts_with("<think>") {
            expected = expected.replacen("</think>", "", 1);
        }
        prop_assert_eq!(kept, expected);
    }
}

fn section(template: &str) -> Dialect {
    let calls = section::of(template).map(CallFormat::Section);
    Dialect {
        thinks: true,
        calls,
    }
}

#[test]
fn calls_in_a_section_of_special_tokens() {
    let call = |name: &str, arguments: &str| (name.to_owned(), arguments.to_owned());
    for (template, answer) in [
        (
            "<｜tool▁calls▁begin｜>",
            "<think>hm</think>Look:\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"days\": 2}<｜tool▁call▁end｜>\
             <｜tool▁call▁begin｜>weather<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            "<｜tool▁calls▁begin｜>```json",
            "<think>hm</think>Look:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"days\": 2}\n```\
             <｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            "<|tool_calls_section_begin|>",
            "<think>hm</think>Look: <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>\
             {\"days\": 2}<|tool_call_end|><|tool_call_begin|>functions.weather:1<|tool_call_argument_begin|>{}<|tool_call_end|>\
             <|tool_calls_section_end|>",
        ),
    ] {
        let whole = parts(section(template), "", answer);
        assert_eq!(
            (whole.reasoning.as_str(), whole.content.as_str()),
            ("hm", "Look:")
        );
        let calls = [call("weather", "{\"days\":2}"), call("weather", "{}")];
        assert_eq!(whole.calls, calls);
    }
}

#[test]
fn a_section_that_ends_early_loses_no_text() {
    let kimi = section("<|tool_calls_section_begin|>");
    for (answer, content) in [
        ("a<|tool_calls_section_begin|>b", "ab"),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.x:0",
            "<|tool_call_begin|>functions.x:0",
        ),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>x<|tool_call_argument_begin|>[1]<|tool_call_end|>",
            "<|tool_call_begin|>x<|tool_call_argument_begin|>[1]<|tool_call_end|>",
        ),
    ] {
        let whole = parts(kimi, "", answer);
        assert_eq!((whole.content.as_str(), whole.calls.len()), (content, 0));
    }
    assert_eq!(section("<tool_call>").calls, None);
}
