//! Streams one answer and notes when its tokens come.

use std::io::{BufRead, BufReader};
use std::time::Instant;

use anyhow::{Context, bail};
use serde_json::{Value, json};

/// A text to be continued.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// Token ids.
    pub ids: Vec<u32>,
    /// New tokens.
    pub tokens: usize,
    /// For the sampler.
    pub seed: u64,
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Streamed {
    /// When it was sent.
    pub sent: Instant,
    /// When tokens came, and how many at once.
    pub came: Vec<(Instant, usize)>,
    /// Their ids.
    pub ids: Vec<u32>,
}

impl Prompt {
    fn body(&self) -> Value {
        json!({
            "prompt": self.ids,
            "max_tokens": self.tokens,
            "temperature": 1,
            "top_p": 1,
            "top_k": 0,
            "min_p": 0,
            "repetition_penalty": 1,
            "seed": self.seed,
            "stream": true,
            "return_token_ids": true,
        })
    }

    /// Sends it to `address` and reads the answer to its end.
    ///
    /// # Errors
    /// When the server refuses it or fails.
    pub fn stream(&self, address: &str) -> anyhow::Result<Streamed> {
        let url = format!("http://{address}/v1/completions");
        let sent = Instant::now();
        let answer = ureq::post(&url).send(self.body().to_string());
        let answer = answer.context("the request is refused")?;
        let mut streamed = Streamed {
            sent,
            came: Vec::new(),
            ids: Vec::new(),
        };
        for line in BufReader::new(answer.into_body().into_reader()).lines() {
            let line = line.context("the stream breaks")?;
            let Some(data) = line.strip_prefix("data: ") else {
                continue;
            };
            if data == "[DONE]" {
                return Ok(streamed);
            }
            let now = Instant::now();
            let chunk: Value = serde_json::from_str(data).context("a chunk is no JSON")?;
            if !chunk["error"].is_null() {
                bail!("the stream ends with an error: {}", chunk["error"]);
            }
            let ids = chunk["choices"][0]["token_ids"].as_array();
            let ids = ids.into_iter().flatten().filter_map(Value::as_u64);
            let before = streamed.ids.len();
            streamed.ids.extend(ids.map(|id| id as u32));
            match streamed.ids.len() - before {
                0 => {}
                n => streamed.came.push((now, n)),
            }
        }
        bail!("the stream ends too soon")
    }
}
