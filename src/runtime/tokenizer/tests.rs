use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::*;

/// The printable stand-in of a byte in byte-level vocabularies.
fn byte_char(byte: u8) -> char {
    let printable = |b: u32| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(byte) {
        b if printable(b) => char::from_u32(b).unwrap(),
        b => char::from_u32(256 + (0..b).filter(|b| !printable(*b)).count() as u32).unwrap(),
    }
}

/// One token a byte, and id 256 as a special token.
fn byte_level() -> (tempfile::TempDir, Tokenizer) {
    let vocab: Map<String, Value> = (0..=255u8)
        .map(|b| (byte_char(b).to_string(), json!(b)))
        .collect();
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [{"id": 256, "content": "<|end|>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
    let tokenizer = Tokenizer::load(dir.path()).unwrap().unwrap();
    (dir, tokenizer)
}

/// The byte-level tokenizer with other values of some keys.
fn altered(keys: &Value) -> Result<Option<Tokenizer>, TokenizerError> {
    let (dir, _) = byte_level();
    let path = dir.path().join("tokenizer.json");
    let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (key, value) in keys.as_object().unwrap() {
        file[key] = value.clone();
    }
    std::fs::write(&path, file.to_string()).unwrap();
    Tokenizer::load(dir.path())
}

#[test]
fn a_prompt_is_neither_cut_nor_filled_up() {
    let (_dir, plain) = byte_level();
    let truncation =
        json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    let padding = json!({"strategy": {"Fixed": 20}, "direction": "Left", "pad_to_multiple_of": null,
        "pad_id": 3, "pad_type_id": 0, "pad_token": "x"});
    let tokenizer = altered(&json!({"truncation": truncation, "padding": padding}))
        .unwrap()
        .unwrap();
    assert_eq!(
        tokenizer.encode("hello").unwrap(),
        plain.encode("hello").unwrap()
    );
}

#[test]
fn what_makes_the_library_panic_is_an_error() {
    let precompiled =
        json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}});
    assert!(matches!(
        altered(&precompiled),
        Err(TokenizerError::Invalid { .. })
    ));
    let template = json!({"post_processor": {"type": "TemplateProcessing", "pair": [], "special_tokens": {},
        "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}]}});
    let encoded = altered(&template).and_then(|t| t.unwrap().encode("hello"));
    assert!(encoded.is_err(), "{encoded:?}");
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut stream = tokenizer.stream();
    let mut text: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    text += &stream.finish().unwrap();
    text
}

#[test]
fn characters_are_never_split() {
    let (_dir, tokenizer) = byte_level();
    let text = "naïve 日本 🦀!";
    let ids = tokenizer.encode(text).unwrap();
    assert_eq!(ids.len(), text.len());
    let mut stream = tokenizer.stream();
    let pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    assert!(
        pieces
            .iter()
            .all(|p| !p.contains(char::REPLACEMENT_CHARACTER))
    );
    assert_eq!(pieces.concat(), text);
    assert_eq!(stream.finish().unwrap(), "");
}

#[test]
fn an_unfinished_character_comes_out_at_the_end() {
    let (_dir, tokenizer) = byte_level();
    let mut stream = tokenizer.stream();
    assert_eq!(stream.push(u32::from(b'a')).unwrap(), "a");
    assert_eq!(stream.push(0xf0).unwrap(), "");
    assert_eq!(stream.finish().unwrap(), "\u{fffd}");
}

#[test]
fn special_and_unknown_ids_have_no_text() {
    let (_dir, tokenizer) = byte_level();
    assert_eq!(streamed(&tokenizer, &[97, 256, 98, 9999]), "ab");
    assert_eq!(streamed(&tokenizer, &[256; 200]), "");
}

#[test]
fn a_missing_and_a_broken_file() {
    let dir = tempfile::tempdir().unwrap();
    assert!(Tokenizer::load(dir.path()).unwrap().is_none());
    std::fs::write(dir.path().join("tokenizer.json"), "{\"version\":").unwrap();
    let error = Tokenizer::load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json is not a valid tokenizer"));
}

#[test]
fn empty_prompts_and_foreign_ids_are_refused() {
    let (_dir, tokenizer) = byte_level();
    assert!(matches!(
        tokenizer.encode(""),
        Err(TokenizerError::EmptyPrompt)
    ));
    assert!(matches!(
        check_ids(&[], 10),
        Err(TokenizerError::EmptyPrompt)
    ));
    assert!(check_ids(&[0, 9], 10).is_ok());
    let error = check_ids(&[3, 10], 10).unwrap_err().to_string();
    assert_eq!(
        error,
        "token id 10 is outside the vocabulary: the model has ids 0 to 9"
    );
}

proptest! {
    #[test]
    fn the_pieces_join_to_the_whole(ids in prop::collection::vec(
        prop_oneof![3 => 0u32..257, 1 => Just(0xf0u32), 1 => Just(0x9f), 1 => Just(97)], 0..120)) {
        let (_dir, tokenizer) = byte_level();
        prop_assert_eq!(streamed(&tokenizer, &ids), tokenizer.decode(&ids).unwrap());
    }
}

/// The tokenizer of a fixture for many scripts, and texts with the ids that the reference gives them.
fn many_scripts() -> (Tokenizer, Vec<(String, Vec<u32>)>) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat");
    let expected: Value =
        serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap();
    let texts = expected["chat"]["texts"].as_array().unwrap().iter();
    let texts = texts.map(|entry| {
        let ids = serde_json::from_value(entry["ids"].clone()).unwrap();
        (entry["text"].as_str().unwrap().to_owned(), ids)
    });
    (Tokenizer::load(&dir).unwrap().unwrap(), texts.collect())
}

#[test]
fn all_scripts_stream_token_by_token() {
    let (tokenizer, texts) = many_scripts();
    let mut held_back = 0;
    for (text, ids) in &texts {
        assert_eq!(&tokenizer.encode_plain(text).unwrap(), ids);
        let mut stream = tokenizer.stream();
        let mut seen = String::new();
        for (i, id) in ids.iter().enumerate() {
            let piece = stream.push(*id).unwrap();
            held_back += usize::from(piece.is_empty());
            seen += &piece;
            assert!(text.starts_with(&seen), "{seen:?} of {text:?}");
            // Were this the end, at most one character would be missing.
            let mut cut = tokenizer.stream();
            for id in &ids[..=i] {
                cut.push(*id).unwrap();
            }
            let rest = cut.finish().unwrap();
            assert!(rest.is_empty() || rest == "\u{fffd}", "{rest:?}");
        }
        assert_eq!(seen + &stream.finish().unwrap(), *text);
    }
    assert!(held_back > 100, "the texts are split inside of characters");
}

proptest! {
    #[test]
    fn a_large_vocabulary_streams_as_it_decodes(ids in prop::collection::vec(0u32..710, 0..200)) {
        let (tokenizer, _) = many_scripts();
        prop_assert_eq!(streamed(&tokenizer, &ids), tokenizer.decode(&ids).unwrap());
    }
}
