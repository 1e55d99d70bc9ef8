//! Reads the fields that completions and chat completions have in common.

use std::collections::HashMap;

use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, FailedToBufferBody};
use serde::Deserialize;
use serde_json::Value;

use super::error::ApiError;
use super::tools;
use crate::runtime::sample::{Adjustments, Sampling};

/// Choices of a request at most.
const CHOICES: u32 = 128;
/// Stop strings at most, and bytes of each.
const STOPS: usize = 16;
const STOP_BYTES: usize = 1024;
/// Likely tokens named with each token, at most.
const TOP_LOGPROBS: u32 = 20;

/// Fields of a request, besides what is to be continued. `null` is as good as no field.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Fields {
    pub max_tokens: Option<u32>,
    pub max_completion_tokens: Option<u32>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<i64>,
    pub min_p: Option<f32>,
    pub seed: Option<i64>,
    pub stop: Option<OneOrMore>,
    pub n: Option<u32>,
    pub logit_bias: Option<HashMap<String, f32>>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub return_token_ids: Option<bool>,
    pub response_format: Option<Value>,
}

/// How an answer is streamed.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct StreamOptions {
    pub include_usage: Option<bool>,
}

/// A text, or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "it is no text and no list of texts")]
pub enum OneOrMore {
    One(String),
    More(Vec<String>),
}

/// Reads a body as JSON.
pub fn read(body: Result<Bytes, BytesRejection>) -> Result<Value, ApiError> {
    let body = body.map_err(|rejection| match rejection {
        BytesRejection::FailedToBufferBody(FailedToBufferBody::LengthLimitError(_)) => {
            ApiError::too_large(super::BODY)
        }
        _ => ApiError::timeout(),
    })?;
    match serde_json::from_slice(&body) {
        Ok(value @ Value::Object(_)) => Ok(value),
        Ok(_) => Err(ApiError::bad_request("the body is no JSON object")),
        Err(error) => Err(ApiError::bad_request(format!(
            "the body is no JSON object: {error}"
        ))),
    }
}

/// Takes those fields of a body that `T` has. Errors name the field.
pub fn part<'v, T: Deserialize<'v>>(body: &'v Value) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(body).map_err(|error| {
        match error.path().to_string().as_str() {
            "." => ApiError::bad_request(error.inner().to_string()),
            path => ApiError::field(path, error.inner()),
        }
    })
}

/// A value within bounds.
fn within(name: &str, value: f32, least: f32, most: f32) -> Result<f32, ApiError> {
    match (least..=most).contains(&value) {
        true => Ok(value),
        false => Err(ApiError::field(
            name,
            format!("{value} is not from {least} to {most}"),
        )),
    }
}

/// How many of the most likely tokens to name.
pub fn top_logprobs(name: &str, wanted: Option<u32>) -> Result<Option<usize>, ApiError> {
    match wanted {
        Some(n) if n > TOP_LOGPROBS => Err(ApiError::field(
            name,
            format!("{n} is more than {TOP_LOGPROBS}"),
        )),
        wanted => Ok(wanted.map(|n| n as usize)),
    }
}

impl Fields {
    /// How tokens are drawn for choice `choice`, with `defaults` for absent fields.
    pub fn sampling(&self, defaults: Sampling, choice: u32) -> Result<Sampling, ApiError> {
        let or = |name, value: Option<f32>, default, least, most| {
            value.map_or(Ok(default), |value| within(name, value, least, most))
        };
        let seed = match self.seed {
            Some(seed) => seed as u64,
            None => random(),
        };
        Ok(Sampling {
            temperature: or(
                "temperature",
                self.temperature,
                defaults.temperature,
                0.0,
                1e6,
            )?,
            top_p: or("top_p", self.top_p, defaults.top_p, f32::MIN_POSITIVE, 1.0)?,
            top_k: match self.top_k {
                None => defaults.top_k,
                // Some clients write -1 for all.
                Some(-1) => 0,
                Some(k) => usize::try_from(k)
                    .map_err(|_| ApiError::field("top_k", format!("{k} is negative")))?,
            },
            min_p: or("min_p", self.min_p, defaults.min_p, 0.0, 1.0)?,
            repetition_penalty: or(
                "repetition_penalty",
                self.repetition_penalty,
                defaults.repetition_penalty,
                f32::MIN_POSITIVE,
                1e6,
            )?,
            seed: seed.wrapping_add(choice.into()),
            ..defaults
        })
    }

    /// Biases and penalties.
    pub fn adjustments(&self, vocabulary: usize) -> Result<Adjustments, ApiError> {
        let penalty = |name, value: Option<f32>| within(name, value.unwrap_or(0.0), -2.0, 2.0);
        let mut bias = Vec::new();
        for (id, value) in self.logit_bias.iter().flatten() {
            let known = id.parse().ok().filter(|id| (*id as usize) < vocabulary);
            let Some(id) = known else {
                let problem = format!("{id:?} is no token id from 0 to {}", vocabulary - 1);
                return Err(ApiError::field("logit_bias", problem));
            };
            bias.push((id, within("logit_bias", *value, -100.0, 100.0)?));
        }
        // Sums are the same in whatever order a map has them.
        bias.sort_unstable_by_key(|(id, _)| *id);
        Ok(Adjustments {
            bias,
            presence: penalty("presence_penalty", self.presence_penalty)?,
            frequency: penalty("frequency_penalty", self.frequency_penalty)?,
        })
    }

    /// Texts that end an answer.
    pub fn stops(&self) -> Result<Vec<String>, ApiError> {
        let stops = match &self.stop {
            None => Vec::new(),
            Some(OneOrMore::One(stop)) => vec![stop.clone()],
            Some(OneOrMore::More(stops)) => stops.clone(),
        };
        if stops.len() > STOPS {
            let problem = format!("{} strings are more than {STOPS}", stops.len());
            return Err(ApiError::field("stop", problem));
        }
        if stops
            .iter()
            .any(|stop| stop.is_empty() || stop.len() > STOP_BYTES)
        {
            let problem = format!("a string is empty or longer than {STOP_BYTES} bytes");
            return Err(ApiError::field("stop", problem));
        }
        Ok(stops)
    }

    /// New tokens at most; `None` for as many as fit.
    pub fn max_tokens(&self) -> Option<usize> {
        let max = self.max_completion_tokens.or(self.max_tokens);
        max.map(|max| max as usize)
    }

    /// Choices for each prompt.
    pub fn choices(&self) -> Result<u32, ApiError> {
        match self.n.unwrap_or(1) {
            n if (1..=CHOICES).contains(&n) => Ok(n),
            n => Err(ApiError::field(
                "n",
                format!("{n} is not from 1 to {CHOICES}"),
            )),
        }
    }

    /// The schema of the answer, if one is asked for.
    pub fn schema(&self) -> Result<Option<Value>, ApiError> {
        tools::schema(self.response_format.as_ref())
    }

    pub fn streams(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    pub fn includes_usage(&self) -> bool {
        let options = self.stream_options.unwrap_or_default();
        options.include_usage.unwrap_or(false)
    }
}

/// A seed for a request without one.
pub fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}
