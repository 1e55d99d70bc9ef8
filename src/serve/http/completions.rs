//! Answers `/v1/completions`.

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};

use super::answer::{Answer, Piece, Spelled};
use super::error::ApiError;
use super::fields::{self, Fields, OneOrMore};
use super::output::{Head, Logprobs, finish_reason};
use super::prepare::compile;
use super::stream::{Choice, Job, Tracked, collect, stream};
use super::text;
use super::{Served, Shared};
use crate::runtime::grammar::{Constraint, Grammar};
use crate::serve::request::{Drawn, Finish, Request};

/// New tokens at most, for requests that do not say.
const MAX_TOKENS: usize = 16;

#[derive(Debug, Deserialize)]
struct Body {
    prompt: Prompt,
    echo: Option<bool>,
    logprobs: Option<u32>,
    best_of: Option<u32>,
    suffix: Option<String>,
}

/// Texts or token ids.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "it is no text, no token ids and no list of either"
)]
enum Prompt {
    Ids(Vec<u32>),
    IdLists(Vec<Vec<u32>>),
    Text(OneOrMore),
}

pub async fn handle(
    State(app): Shared,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let served = app.served()?;
    let head = Head::new("cmpl", "text_completion", &served.name);
    let mut tracked = Some(Tracked::new(app, "completions", &head.id));
    let answered = answer(served, head, body, &mut tracked).await;
    answered.map_err(|error| match &mut tracked {
        Some(tracked) => tracked.fail(error),
        None => error,
    })
}

async fn answer(
    served: &'static Served,
    head: Head,
    body: Result<Bytes, BytesRejection>,
    tracked: &mut Option<Tracked>,
) -> Result<Response, ApiError> {
    let body = fields::read(body)?;
    let fields: Fields = fields::part(&body)?;
    let body: Body = fields::part(&body)?;
    let schema = fields.schema()?;
    if body
        .best_of
        .is_some_and(|best| best > fields.n.unwrap_or(1))
    {
        return Err(ApiError::field("best_of", "more than n is not supported"));
    }
    if body.suffix.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::field("suffix", "it is not supported"));
    }
    let logprobs = fields::top_logprobs("logprobs", body.logprobs)?;
    let echo = body.echo.unwrap_or(false);
    let prompts = match body.prompt {
        Prompt::Ids(ids) => vec![ids],
        Prompt::IdLists(lists) => lists,
        Prompt::Text(texts) => {
            let texts = match texts {
                OneOrMore::One(text) => vec![text],
                OneOrMore::More(texts) => texts,
            };
            text::encode(served, "prompt", texts).await?
        }
    };
    if prompts.is_empty() {
        return Err(ApiError::field("prompt", "it is empty"));
    }
    let stops = fields.stops()?;
    if !stops.is_empty() {
        served.tokenizer("stop")?;
    }
    let constraint = match schema {
        Some(schema) => Some(constraint(served, schema).await?),
        None => None,
    };
    // A grammar may end with any of them.
    let stop = match constraint {
        Some(_) => [&served.stop, served.chat_stop()].concat(),
        None => served.stop.clone(),
    };
    let mut jobs = Vec::new();
    for ids in &prompts {
        for n in 0..fields.choices()? {
            let request = Request {
                ids: ids.clone(),
                sampling: fields.sampling(served.sampling, n)?,
                adjustments: fields.adjustments(served.vocabulary)?,
                max_tokens: fields.max_tokens().unwrap_or(MAX_TOKENS),
                constraint: constraint.clone(),
                stop: stop.clone(),
                logprobs,
                prompt_logprobs: echo && logprobs.is_some(),
            };
            jobs.push(Job {
                answer: Answer::begin(served, request, stops.clone())?,
                choice: Completion {
                    index: jobs.len(),
                    ids: fields
                        .return_token_ids
                        .unwrap_or(served.tokenizer.is_none())
                        .then(Vec::new),
                    logprobs: logprobs.map(|_| Logprobs::default()),
                    prompt: echo.then(|| spelled(served, ids)).transpose()?,
                    text: String::new(),
                },
                first: n == 0,
            });
        }
    }
    let Some(mut request) = tracked.take() else {
        return Err(ApiError::internal("the request is answered already"));
    };
    if !fields.streams() {
        return collect(served, &head, jobs, &mut request)
            .await
            .map_err(|error| request.fail(error));
    }
    let usage = fields.includes_usage();
    Ok(stream(served, head, jobs, usage, request))
}

/// The constraint of a text that is JSON.
async fn constraint(served: &'static Served, schema: Value) -> Result<Constraint, ApiError> {
    let grammar = Grammar::JsonSchema(schema);
    let compiled =
        tokio::task::spawn_blocking(move || compile(served, &grammar, "response_format"));
    compiled.await.map_err(ApiError::internal)?
}

/// The tokens of a prompt with the texts that they complete.
fn spelled(served: &Served, ids: &[u32]) -> Result<Vec<(u32, String)>, ApiError> {
    let mut stream = served.tokenizer.map(crate::Tokenizer::stream);
    let mut spelled = Vec::with_capacity(ids.len());
    for id in ids {
        let text = stream.as_mut().map(|stream| stream.push(*id)).transpose()?;
        spelled.push((*id, text.unwrap_or_default()));
    }
    if let (Some(stream), Some((_, last))) = (stream, spelled.last_mut()) {
        *last += &stream.finish()?;
    }
    Ok(spelled)
}

#[derive(Debug)]
struct Completion {
    index: usize,
    /// Where ids are wanted.
    ids: Option<Vec<u32>>,
    logprobs: Option<Logprobs>,
    /// The prompt, until it is out.
    prompt: Option<Vec<(u32, String)>>,
    text: String,
}

impl Completion {
    /// Puts the prompt in front, whose probabilities `drawn` may be of its first tokens.
    fn echo(&mut self, served: &Served, drawn: &[Drawn]) {
        let Some(prompt) = &mut self.prompt else {
            return;
        };
        // The first token has no probability, and comes with the second.
        let first = self.logprobs.as_ref().is_some_and(Logprobs::is_empty);
        let n = drawn.len() + usize::from(first);
        let n = if self.logprobs.is_some() {
            n.min(prompt.len())
        } else {
            prompt.len()
        };
        let drawn = std::iter::repeat_n(None, usize::from(first)).chain(drawn.iter().map(Some));
        let mut drawn = drawn.chain(std::iter::repeat(None));
        for (_, text) in prompt.drain(..n) {
            self.text += &text;
            if let Some(logprobs) = &mut self.logprobs {
                logprobs.push(served.tokenizer, &text, drawn.next().flatten());
            }
        }
        if prompt.is_empty() {
            self.prompt = None;
        }
    }

    fn push(&mut self, served: &Served, text: &str, tokens: &[Spelled]) {
        self.text += text;
        if let Some(ids) = &mut self.ids {
            ids.extend(tokens.iter().map(|token| token.drawn.id));
        }
        if let Some(logprobs) = &mut self.logprobs {
            for token in tokens {
                logprobs.push(served.tokenizer, &token.text, Some(&token.drawn));
            }
        }
    }

    fn json(&mut self, finish: Option<Finish>) -> Value {
        let mut choice = json!({
            "index": self.index,
            "text": std::mem::take(&mut self.text),
            "logprobs": self.logprobs.as_mut().map(Logprobs::take),
            "finish_reason": finish.map(finish_reason),
        });
        if let Some(ids) = &mut self.ids {
            choice["token_ids"] = json!(std::mem::take(ids));
        }
        choice
    }
}

impl Choice for Completion {
    fn piece(&mut self, served: &Served, piece: Piece, streams: bool) -> Vec<Value> {
        match piece {
            Piece::Prompt(drawn) => self.echo(served, &drawn),
            Piece::Text(text, tokens) => {
                self.echo(served, &[]);
                self.push(served, &text, &tokens);
            }
            Piece::Progress(..) | Piece::End(..) => {}
        }
        let some = streams
            && (!self.text.is_empty() || self.ids.as_ref().is_some_and(|ids| !ids.is_empty()));
        some.then(|| self.json(None)).into_iter().collect()
    }

    fn whole(mut self, served: &Served, finish: Finish) -> Value {
        self.echo(served, &[]);
        self.json(Some(finish))
    }

    fn last(&mut self, served: &Served, finish: Finish) -> Vec<Value> {
        self.echo(served, &[]);
        vec![self.json(Some(finish))]
    }
}
