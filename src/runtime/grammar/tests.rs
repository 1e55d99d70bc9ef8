use std::path::Path;
use std::sync::OnceLock;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde_json::{Map, Value, json};

use super::*;
use crate::runtime::sample::{Sampler, Sampling};

const STOP: u32 = 0;
const VOCAB: usize = 704;

fn tokenizer() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/chat");
        Tokenizer::load(Path::new(dir)).unwrap().unwrap()
    })
}

fn grammars() -> &'static Grammars {
    static GRAMMARS: OnceLock<Grammars> = OnceLock::new();
    GRAMMARS.get_or_init(|| Grammars::new(tokenizer(), VOCAB, &[STOP]).unwrap())
}

fn refused(grammar: Grammar) -> String {
    grammars().compile(&grammar).unwrap_err().to_string()
}

/// Draws a text from random logits, which depend on the place in the text alone. Takes at most `most` forced tokens at once.
fn draw(grammar: &Grammar, seed: u64, most: usize) -> Vec<u32> {
    let sampling = Sampling {
        temperature: 1.0,
        seed,
        ..Sampling::default()
    };
    let mut sampler = Sampler::new(sampling).constrained(grammars().compile(grammar).unwrap());
    let mut ids: Vec<u32> = Vec::new();
    while ids.last() != Some(&STOP) && ids.len() < 3000 {
        let forced = sampler.forced(most).unwrap();
        if !forced.is_empty() {
            ids.extend(forced);
            continue;
        }
        let mut random = ChaCha8Rng::seed_from_u64(seed ^ (ids.len() as u64) << 32);
        let logits: Vec<f32> = (0..VOCAB)
            .map(|_| (random.next_u32() % 64) as f32 / 16.0)
            .collect();
        ids.push(sampler.sample(&logits).unwrap());
    }
    ids
}

fn text(grammar: &Grammar, seed: u64) -> String {
    let ids = draw(grammar, seed, usize::MAX);
    assert_eq!(ids.last(), Some(&STOP), "the text does not end");
    tokenizer().decode(&ids).unwrap()
}

/// A random schema, of which every text is finite.
fn schema(random: &mut ChaCha8Rng, depth: usize) -> Value {
    let mut below = |n: u32| random.next_u32() % n;
    match below(if depth == 0 { 5 } else { 8 }) {
        0 => json!({"type": "null"}),
        1 => json!({"type": "boolean"}),
        2 => {
            let (low, size) = (i64::from(below(300)) - 150, i64::from(below(900)));
            json!({"type": "integer", "minimum": low, "maximum": low + size})
        }
        3 => {
            let least = below(5);
            json!({"type": "string", "minLength": least, "maxLength": least + below(9)})
        }
        4 => json!({"enum": ["cat", 7, null, "<|user|>", {"a": [1, "\u{e9}\u{1f600}"]}]}),
        5 => {
            let least = below(3);
            let most = least + below(3);
            json!({"type": "array", "minItems": least, "maxItems": most, "items": schema(random, depth - 1)})
        }
        6 => json!({"anyOf": [schema(random, depth - 1), schema(random, depth - 1)]}),
        _ => {
            let keys = ["name", "a b", "<think>", "\u{e9}\"\\"];
            let n = 1 + below(keys.len() as u32) as usize;
            let required: Vec<&str> = keys[..n]
                .iter()
                .copied()
                .filter(|_| below(2) == 0)
                .collect();
            let properties: Map<String, Value> = (keys[..n].iter())
                .map(|key| ((*key).to_owned(), schema(random, depth - 1)))
                .collect();
            json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
        }
    }
}

/// Whether `value` is valid, by the keywords of [`schema`].
fn valid(schema: &Value, value: &Value) -> bool {
    if let Some(options) = schema["anyOf"].as_array() {
        return options.iter().any(|option| valid(option, value));
    }
    if let Some(options) = schema["enum"].as_array() {
        return options.contains(value);
    }
    let within = |least: &str, most: &str, n: usize| {
        n as u64 >= schema[least].as_u64().unwrap() && n as u64 <= schema[most].as_u64().unwrap()
    };
    match schema["type"].as_str().unwrap() {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.as_i64().is_some_and(|n| {
            n >= schema["minimum"].as_i64().unwrap() && n <= schema["maximum"].as_i64().unwrap()
        }),
        "string" => (value.as_str())
            .is_some_and(|text| within("minLength", "maxLength", text.chars().count())),
        "array" => value.as_array().is_some_and(|items| {
            within("minItems", "maxItems", items.len())
                && items.iter().all(|item| valid(&schema["items"], item))
        }),
        _ => value.as_object().is_some_and(|members| {
            let required = schema["required"].as_array().unwrap();
            required
                .iter()
                .all(|key| members.contains_key(key.as_str().unwrap()))
                && members.iter().all(|(key, value)| {
                    (schema["properties"].get(key)).is_some_and(|schema| valid(schema, value))
                })
        }),
    }
}

#[test]
fn texts_of_random_schemas_are_valid() {
    for seed in 0..150 {
        let schema = schema(&mut ChaCha8Rng::seed_from_u64(seed), 3);
        let text = text(&Grammar::JsonSchema(schema.clone()), seed);
        let value = serde_json::from_str(&text);
        let value = value.unwrap_or_else(|error| panic!("{error} in {text:?} of {schema}"));
        assert!(valid(&schema, &value), "{text} of {schema}");
    }
}

#[test]
fn forced_tokens_are_the_same_one_at_a_time() {
    let mut forced = 0;
    for seed in 0..60 {
        let grammar = Grammar::JsonSchema(schema(&mut ChaCha8Rng::seed_from_u64(seed), 3));
        let together = draw(&grammar, seed, usize::MAX);
        assert_eq!(together, draw(&grammar, seed, 1));
        let mut sampler =
            Sampler::new(Sampling::greedy()).constrained(grammars().compile(&grammar).unwrap());
        forced += sampler.forced(usize::MAX).unwrap().len();
    }
    assert!(forced > 0);
}

#[test]
fn regexes_and_grammars_match_the_whole_text() {
    for seed in 0..20 {
        let date = text(&Grammar::Regex("20[0-9]{2}-[01][0-9] (ok|no)".into()), seed);
        assert_eq!(date.len(), "2026-12 ok".len(), "{date}");
        let sum = text(
            &Grammar::Lark("start: N \"+\" N\nN: /[0-9]{1,3}/".into()),
            seed,
        );
        let (left, right) = sum.split_once('+').unwrap();
        assert!(
            left.parse::<u32>().is_ok() && right.parse::<u32>().is_ok(),
            "{sum}"
        );
    }
}

#[test]
fn an_object_is_an_object() {
    let mut constraint = grammars().compile(&Grammar::JsonObject).unwrap();
    for id in tokenizer().encode_plain("{\"a\": [1, {}]}").unwrap() {
        assert!(!constraint.is_complete());
        constraint.accept(id).unwrap();
    }
    assert!(constraint.is_complete());
    assert_eq!(constraint.forced(9), Ok(vec![STOP]));
    let mut constraint = grammars().compile(&Grammar::JsonObject).unwrap();
    let bracket = tokenizer().encode_plain("[").unwrap()[0];
    assert_eq!(
        constraint.accept(bracket),
        Err(ConstraintError::Refused(bracket))
    );
}

#[test]
fn special_tokens_are_no_text() {
    let string = json!({"type": "string"});
    let mut constraint = grammars().compile(&Grammar::JsonSchema(string)).unwrap();
    for id in tokenizer().encode_plain("\"a").unwrap() {
        constraint.accept(id).unwrap();
    }
    let mut logits = vec![0.0; VOCAB];
    constraint.mask(&mut logits).unwrap();
    for name in ["<|endoftext|>", "<|user|>", "<think>"] {
        let id = tokenizer().id(name).unwrap();
        assert_eq!(logits[id as usize], f32::NEG_INFINITY, "{name}");
    }
    let letter = tokenizer().encode_plain("b").unwrap()[0];
    assert_eq!(logits[letter as usize], 0.0);
}

#[test]
fn what_is_not_supported_is_named() {
    for (schema, named) in [
        (json!({"if": {"type": "string"}}), "\"if\""),
        (json!({"properties": {"a": {"not": {}}}}), "\"not\""),
        (
            json!({"type": "array", "uniqueItems": true}),
            "\"uniqueItems\"",
        ),
        (json!({"type": "string", "format": "unicorn"}), "unicorn"),
        (json!({"$ref": "http://localhost/x"}), "http://localhost/x"),
        (json!({"$ref": "#/$defs/x"}), "#/$defs/x"),
        (json!({"type": "strnig"}), "strnig"),
        (
            json!({"type": "integer", "minimum": 1e300}),
            "minimum of 1e+300",
        ),
        (
            json!({"type": "integer", "minimum": 5, "maximum": 3}),
            "minimum (5)",
        ),
        (
            json!({"oneOf": [{"type": "string"}, {"minLength": 2}]}),
            "use anyOf",
        ),
        (
            json!({"type": "string", "x-guidance": {"lenient": true}}),
            "x-guidance",
        ),
        (json!({"type": "string", "pattern": "("}), "unclosed group"),
        (json!([]), "object or boolean"),
        (json!(false), "false"),
    ] {
        let error = refused(Grammar::JsonSchema(schema));
        assert!(error.contains(named), "{error}");
    }
    let error = refused(Grammar::Regex("a(".into()));
    assert!(
        error.starts_with("cannot compile the regular expression"),
        "{error}"
    );
    let error = refused(Grammar::Lark("start: nothing".into()));
    assert!(error.contains("nothing"), "{error}");
}

#[test]
fn hostile_schemas_are_refused() {
    let nested = (0..100).fold(json!({}), |inner, _| json!({"items": inner}));
    assert!(refused(Grammar::JsonSchema(nested)).contains("64 levels"));
    let large = json!({"enum": (0..60_000).map(|n| n.to_string()).collect::<Vec<_>>()});
    assert!(refused(Grammar::JsonSchema(large)).contains("at most"));
    let doubled: Map<String, Value> = (0..40)
        .map(|n| {
            let next = json!({"$ref": format!("#/$defs/a{}", n + 1)});
            let any = |other: &str| json!({"anyOf": [next, {"type": other}]});
            (
                format!("a{n}"),
                json!({"allOf": [any("string"), any("null")]}),
            )
        })
        .chain([("a40".to_owned(), json!({"type": "string"}))])
        .collect();
    let doubled = json!({"$ref": "#/$defs/a0", "$defs": doubled});
    assert!(refused(Grammar::JsonSchema(doubled)).contains("too large"));
    refused(Grammar::JsonSchema(json!({"$ref": "#"})));
    assert!(refused(Grammar::Regex("a".repeat(20_000))).contains("at most"));
}

#[test]
fn a_model_without_stop_tokens_is_refused() {
    let error = Grammars::new(tokenizer(), VOCAB, &[9999]).unwrap_err();
    assert_eq!(error, GrammarError::NoStop);
}
