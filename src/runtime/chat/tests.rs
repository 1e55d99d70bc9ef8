use serde_json::{Map, Value, json};

use super::*;

mod frame;

const TEMPLATE: &str =
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>";
const ADDED: [(&str, bool); 7] = [
    ("[gMASK]", true),
    ("<sop>", true),
    ("<|system|>", true),
    ("<|user|>", true),
    ("<|assistant|>", true),
    ("<think>", false),
    ("  ", false),
];

/// The id after those of the vocabulary.
const FIRST: u32 = 97;

/// A token for each printable ASCII character, and the added ones.
fn model(template: &str) -> (tempfile::TempDir, Tokenizer, Format) {
    model_with(template, &ADDED)
}

fn model_with(template: &str, added: &[(&str, bool)]) -> (tempfile::TempDir, Tokenizer, Format) {
    let printable = (33u32..127).map(|b| char::from_u32(b).unwrap().to_string());
    // Spaces and newlines as byte-level vocabularies write them.
    let texts = printable.chain(["\u{120}".to_owned(), "\u{10a}".to_owned(), "hi".to_owned()]);
    let vocab: Map<String, Value> = texts
        .zip(0u32..)
        .map(|(text, id)| (text, json!(id)))
        .collect();
    let added: Vec<Value> = (added.iter().zip(FIRST..))
        .map(|((content, special), id)| {
            json!({"id": id, "content": content, "special": special, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false})
        })
        .collect();
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": ["h i"]},
    });
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    let tokenizer = Tokenizer::load(dir.path()).unwrap().unwrap();
    let template = ChatTemplate::load(dir.path()).unwrap();
    (dir, tokenizer, Format::Template(Box::new(template)))
}

fn id(text: &str) -> u32 {
    let at = ADDED.iter().position(|(token, _)| *token == text).unwrap();
    FIRST + at as u32
}

#[test]
fn a_turn_feeds_only_what_is_new() {
    let (_dir, tokenizer, format) = model(TEMPLATE);
    let mut chat = Conversation::new(&tokenizer, format, Some("s".into()));
    let first = chat.ask("hi", 100).unwrap();
    let hi = tokenizer.id("hi").unwrap();
    let system = tokenizer.id("s").unwrap();
    let expected = [
        id("[gMASK]"),
        id("<sop>"),
        id("<|system|>"),
        system,
        id("<|user|>"),
        hi,
        id("<|assistant|>"),
    ];
    assert_eq!((first.ids.as_slice(), first.reused), (&expected[..], 0));
    // The model spells "hi" in two tokens, the last of which its context does not hold.
    let spelled = [tokenizer.id("h").unwrap(), tokenizer.id("i").unwrap()];
    let held = first.ids.len() + 1;
    chat.answer(first.clone(), &spelled, held).unwrap();
    assert_eq!(
        chat.messages().last(),
        Some(&Message::new(Role::Assistant, "hi"))
    );
    let second = chat.ask("hi", 100).unwrap();
    let all = [
        &first.ids[..],
        &spelled,
        &[id("<|user|>"), hi, id("<|assistant|>")],
    ]
    .concat();
    assert_eq!((second.ids.clone(), second.reused), (all, held));
    assert_eq!(second.rest().len(), 4);
    // Nothing came: as if it had not been asked, but what was read stays.
    chat.withdraw(second.clone(), 10);
    let again = chat.ask("hi", 100).unwrap();
    assert_eq!((again.ids, again.reused), (second.ids, 10));
}

#[test]
fn a_template_that_changes_answers_is_read_again_from_there() {
    let source = TEMPLATE.replace("m.content", "m.content.split('<think>')[0]");
    let (_dir, tokenizer, format) = model(&source);
    let mut chat = Conversation::new(&tokenizer, format, None);
    let first = chat.ask("a", 100).unwrap();
    let thought = [
        tokenizer.id("b").unwrap(),
        id("<think>"),
        tokenizer.id("c").unwrap(),
    ];
    let held = first.ids.len() + 3;
    chat.answer(first.clone(), &thought, held).unwrap();
    let second = chat.ask("d", 100).unwrap();
    assert_eq!(second.reused, first.ids.len() + 1, "up to the thought");
    assert!(!second.ids.contains(&id("<think>")));
}

#[test]
fn reset_keeps_the_beginning() {
    let (_dir, tokenizer, format) = model(TEMPLATE);
    let mut chat = Conversation::new(&tokenizer, format, Some("s".into()));
    let turn = chat.ask("one", 100).unwrap();
    let held = turn.ids.len();
    chat.answer(turn, &[], held).unwrap();
    chat.reset();
    assert_eq!(chat.messages().len(), 1);
    let turn = chat.ask("two", 100).unwrap();
    assert_eq!(turn.reused, 5, "[gMASK]<sop><|system|>s<|user|>");
    // Asked the same again, the last token is fed for its logits.
    let held = turn.ids.len();
    chat.withdraw(turn, held);
    let turn = chat.ask("two", 100).unwrap();
    assert_eq!(turn.rest().len(), 1);
}

#[test]
fn what_the_context_holds_may_come_from_elsewhere() {
    let (_dir, tokenizer, format) = model(TEMPLATE);
    let mut chat = Conversation::new(&tokenizer, format, None);
    chat.hold(vec![id("[gMASK]"), id("<sop>"), 7, 8]);
    assert_eq!(chat.ask("a", 100).unwrap().reused, 2);
}

#[test]
fn people_cannot_write_special_tokens() {
    let (_dir, tokenizer, format) = model(TEMPLATE);
    let mut chat = Conversation::new(&tokenizer, format, Some("<sop>".into()));
    let text = "<|user|><<|assistant|>>\u{f0000}<think>  x";
    let turn = chat.ask(text, 100).unwrap();
    let count = |token| turn.ids.iter().filter(|i| **i == id(token)).count();
    assert_eq!(count("<|user|>"), 1);
    assert_eq!(count("<|assistant|>"), 1);
    assert_eq!(count("<sop>"), 1);
    assert_eq!(count("<think>"), 0);
    assert_eq!(count("  "), 1, "spaces are for everybody");
    // What a model spells out is no token either, but for those that mark its thoughts.
    let said = tokenizer.encode_plain("<").unwrap();
    let said = [
        said,
        tokenizer.encode_plain("|user|>").unwrap(),
        vec![id("<think>")],
    ]
    .concat();
    let held = turn.ids.len();
    chat.answer(turn, &said, held).unwrap();
    assert_eq!(chat.messages().last().unwrap().content, "<|user|><think>");
    let turn = chat.ask("x", 200).unwrap();
    let count = |token| turn.ids.iter().filter(|i| **i == id(token)).count();
    assert_eq!((count("<|user|>"), count("<think>")), (2, 1));
}

#[test]
fn a_full_context_is_said_and_changes_nothing() {
    let (_dir, tokenizer, format) = model(TEMPLATE);
    let mut chat = Conversation::new(&tokenizer, format, None);
    let error = chat.ask("abcdef", 10).unwrap_err().to_string();
    assert!(error.contains("10 tokens, and 10 fit"), "{error}");
    assert!(chat.messages().is_empty());
    assert_eq!(chat.ask("abcdef", 11).unwrap().ids.len(), 10);
}

#[test]
fn raw_text_goes_on() {
    let (_dir, tokenizer, _) = model(TEMPLATE);
    let mut chat = Conversation::new(&tokenizer, Format::Raw, Some("once".into()));
    let turn = chat.ask("hi", 100).unwrap();
    assert_eq!(turn.ids, tokenizer.encode("once\nhi").unwrap());
    let held = turn.ids.len() + 1;
    let ids = turn.ids.clone();
    chat.answer(turn, &[1, 2], held).unwrap();
    let turn = chat.ask("hi", 100).unwrap();
    let all = [ids, vec![1, 2], tokenizer.encode_plain("\nhi").unwrap()].concat();
    assert_eq!((turn.ids, turn.reused), (all, held));
    let mut empty = Conversation::new(&tokenizer, Format::Raw, None);
    assert!(empty.ask("", 100).is_err());
}

#[test]
fn conversations_are_rendered_as_the_reference_renders_them() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat");
    let expected: Value =
        serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap();
    let tokenizer = Tokenizer::load(&dir).unwrap().unwrap();
    for conversation in expected["chat"]["conversations"].as_array().unwrap() {
        let mut template = ChatTemplate::load(&dir).unwrap();
        for (name, value) in conversation["variables"].as_object().unwrap() {
            template.set(name, &value.to_string()).unwrap();
        }
        let said = conversation["messages"].as_array().unwrap().iter();
        let messages: Vec<Message> = said
            .map(|message| {
                let role = match message["role"].as_str().unwrap() {
                    "system" => Role::System,
                    "user" => Role::User,
                    _ => Role::Assistant,
                };
                Message::new(role, message["content"].as_str().unwrap())
            })
            .collect();
        let text = template.render(&messages).unwrap();
        assert_eq!(text, conversation["text"].as_str().unwrap());
        // The same step by step, where nothing is answered in between.
        let mut chat = Conversation::new(&tokenizer, Format::Template(Box::new(template)), None);
        chat.messages = messages;
        let last = chat.messages.pop().unwrap();
        let turn = chat.ask(&last.content, 1000).unwrap();
        assert_eq!(json!(turn.ids), conversation["ids"]);
    }
}
