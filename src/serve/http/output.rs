//! Writes the parts of answers as the OpenAI API names them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::answer::Spelled;
use super::fields::random;
use crate::runtime::tokenizer::Tokenizer;
use crate::serve::request::{Drawn, Finish, Summary};

/// Identifies an answer, and all of its chunks.
#[derive(Clone, Debug)]
pub struct Head {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
}

impl Head {
    pub fn new(prefix: &str, object: &'static str, model: &str) -> Head {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Head {
            id: format!("{prefix}-{:016x}", random()),
            object,
            created: now.map_or(0, |now| now.as_secs()),
            model: model.to_owned(),
        }
    }

    /// An answer or a chunk with these choices.
    pub fn with(&self, choices: Vec<Value>) -> Map<String, Value> {
        let head = json!({
            "id": self.id, "object": self.object, "created": self.created, "model": self.model, "choices": choices,
        });
        match head {
            Value::Object(map) => map,
            _ => Map::new(),
        }
    }
}

/// What all choices of a request took.
#[derive(Clone, Debug, Default)]
pub struct Total {
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub tokens: usize,
    /// The longest of the choices.
    slowest: Summary,
}

impl Total {
    /// Adds a choice. Of the choices of one prompt, only the `first` counts the prompt.
    pub fn add(&mut self, summary: &Summary, first: bool) {
        if first {
            self.prompt_tokens += summary.prompt_tokens;
            self.cached_tokens += summary.cached_tokens;
        }
        self.tokens += summary.tokens;
        let took = |s: &Summary| s.queue + s.prefill + s.decode;
        if took(summary) >= took(&self.slowest) {
            self.slowest = *summary;
        }
    }

    pub fn usage(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        })
    }

    /// Times in seconds, of the choice that took longest.
    pub fn timings(&self) -> Value {
        let Summary {
            queue,
            prefill,
            decode,
            io_wait,
            tokens,
            ..
        } = self.slowest;
        let rate = match decode {
            Duration::ZERO => None,
            decode => Some(tokens.saturating_sub(1) as f64 / decode.as_secs_f64()),
        };
        json!({
            "queue_seconds": queue.as_secs_f64(),
            "prefill_seconds": prefill.as_secs_f64(),
            "decode_seconds": decode.as_secs_f64(),
            "io_wait_seconds": io_wait.as_secs_f64(),
            "cached_tokens": self.cached_tokens,
            "tokens_per_second": rate,
        })
    }

    pub fn slowest(&self) -> &Summary {
        &self.slowest
    }
}

pub fn finish_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Length => "length",
        Finish::Stop => "stop",
    }
}

/// The text of one token.
fn token_text(tokenizer: Option<&Tokenizer>, id: u32) -> String {
    let text = tokenizer.and_then(|tokenizer| tokenizer.decode(&[id]).ok());
    text.unwrap_or_else(|| format!("<{id}>"))
}

/// Probabilities as chat completions have them.
pub fn chat_logprobs(tokenizer: Option<&Tokenizer>, tokens: &[Spelled]) -> Value {
    let entry = |text: &str, logprob: f32| json!({"token": text, "logprob": logprob, "bytes": text.as_bytes()});
    let tokens = tokens.iter().map(|Spelled { drawn, text }| {
        let top = drawn.top.iter();
        let top = top.map(|(id, logprob)| entry(&token_text(tokenizer, *id), *logprob));
        let mut token = entry(text, drawn.logprob.unwrap_or(0.0));
        token["top_logprobs"] = top.collect();
        token
    });
    json!({"content": tokens.collect::<Vec<_>>()})
}

/// Probabilities as completions have them.
#[derive(Debug, Default)]
pub struct Logprobs {
    tokens: Vec<String>,
    logprobs: Vec<Option<f32>>,
    top: Vec<Value>,
    offsets: Vec<usize>,
    /// Characters of the text so far.
    offset: usize,
}

impl Logprobs {
    /// Adds a token. The first one of a prompt has no probability.
    pub fn push(&mut self, tokenizer: Option<&Tokenizer>, text: &str, drawn: Option<&Drawn>) {
        self.tokens.push(text.to_owned());
        self.logprobs.push(drawn.and_then(|drawn| drawn.logprob));
        self.top.push(drawn.map_or(Value::Null, |drawn| {
            let top = drawn.top.iter();
            let top = top.map(|(id, logprob)| (token_text(tokenizer, *id), json!(logprob)));
            Value::Object(top.collect())
        }));
        self.offsets.push(self.offset);
        self.offset += text.chars().count();
    }

    /// Whether no token has come yet.
    pub fn is_empty(&self) -> bool {
        self.offset == 0 && self.tokens.is_empty()
    }

    /// What came since the last call.
    pub fn take(&mut self) -> Value {
        json!({
            "tokens": std::mem::take(&mut self.tokens),
            "token_logprobs": std::mem::take(&mut self.logprobs),
            "top_logprobs": std::mem::take(&mut self.top),
            "text_offset": std::mem::take(&mut self.offsets),
        })
    }
}
