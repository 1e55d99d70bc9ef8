//! Answers `/v1/messages` and `/v1/messages/count_tokens`: the Anthropic API.

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::answer::{Answer, Piece};
use super::blocks::{Blocks, Said, messages, tools};
use super::error::ApiError;
use super::fields::{self, Fields, OneOrMore, random};
use super::prepare::{Prepared, Wanted, prepare};
use super::stream::{self, Ended, Out, Tracked};
use super::turn::Turn;
use super::{Served, Shared};
use crate::runtime::dialect::Part;
use crate::serve::request::{Finish, Request, Summary};

#[derive(Debug, Deserialize)]
struct Body {
    messages: Vec<Said>,
    system: Option<Blocks>,
    stop_sequences: Option<Vec<String>>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    thinking: Option<Switch>,
    output_config: Option<OutputConfig>,
    mcp_servers: Option<Vec<Value>>,
}

#[derive(Debug, Deserialize)]
struct Switch {
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Debug, Deserialize)]
struct OutputConfig {
    effort: Option<String>,
    format: Option<Format>,
}

#[derive(Debug, Deserialize)]
struct Format {
    #[serde(rename = "type")]
    kind: String,
    schema: Option<Value>,
}

impl Body {
    fn wanted(self) -> Result<Wanted, ApiError> {
        if self.mcp_servers.is_some_and(|servers| !servers.is_empty()) {
            return Err(ApiError::field("mcp_servers", "it is not supported"));
        }
        let switched = match self
            .thinking
            .as_ref()
            .map(|thinking| thinking.kind.as_str())
        {
            None | Some("adaptive") => None,
            Some("enabled") => Some("high"),
            Some("disabled") => Some("none"),
            Some(kind) => {
                let problem = format!("type {kind:?} is not supported");
                return Err(ApiError::field("thinking", problem));
            }
        };
        let output = self.output_config;
        let (effort, format) = output.map_or((None, None), |output| (output.effort, output.format));
        let schema = match format {
            None => None,
            Some(Format {
                kind,
                schema: Some(schema),
            }) if kind == "json_schema" => Some(schema),
            Some(_) => {
                let problem = "it is no {\"type\": \"json_schema\", \"schema\": SCHEMA}";
                return Err(ApiError::field("output_config.format", problem));
            }
        };
        Ok(Wanted {
            messages: messages(self.system, self.messages)?,
            tools: tools(self.tools, self.tool_choice)?,
            schema,
            variables: Vec::new(),
            effort: match switched {
                Some("none") => Some("none".to_owned()),
                switched => effort.or_else(|| switched.map(str::to_owned)),
            },
        })
    }
}

/// The conversation of a body, with its stop strings.
async fn prepared(served: &'static Served, body: Body) -> Result<Prepared, ApiError> {
    served.check_chat()?;
    let wanted = body.wanted()?;
    // Rendering a hostile text takes seconds.
    let prepared = tokio::task::spawn_blocking(move || prepare(served, wanted)).await;
    prepared.map_err(ApiError::internal)?
}

pub async fn count(
    State(app): Shared,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let served = app.served()?;
    let body = fields::read(body)?;
    let prepared = prepared(served, fields::part(&body)?).await?;
    Ok(axum::Json(json!({"input_tokens": prepared.ids.len()})).into_response())
}

pub async fn handle(
    State(app): Shared,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let served = app.served()?;
    let id = format!("msg_{:016x}", random());
    let mut tracked = Some(Tracked::new(app, "messages", &id));
    let answered = answer(served, id, body, &mut tracked).await;
    answered.map_err(|error| match &mut tracked {
        Some(tracked) => tracked.fail(error),
        None => error,
    })
}

async fn answer(
    served: &'static Served,
    id: String,
    body: Result<Bytes, BytesRejection>,
    tracked: &mut Option<Tracked>,
) -> Result<Response, ApiError> {
    let body = fields::read(body)?;
    let fields: Fields = fields::part(&body)?;
    let mut body: Body = fields::part(&body)?;
    let stops = Fields {
        stop: body.stop_sequences.take().map(OneOrMore::More),
        ..Fields::default()
    };
    let stops = (stops.stops()).map_err(|error| error.renamed("stop", "stop_sequences"))?;
    let max_tokens = fields.max_tokens();
    let max_tokens = max_tokens.ok_or_else(|| ApiError::field("max_tokens", "it is missing"))?;
    let prepared = prepared(served, body).await?;
    let turn = Turn::new(served, &prepared);
    let prompt = prepared.ids.len();
    let request = Request {
        ids: prepared.ids,
        sampling: fields.sampling(served.sampling, 0)?,
        constraint: prepared.constraint,
        max_tokens,
        stop: served.chat_stop().to_vec(),
        ..Request::default()
    };
    let answer = Answer::begin(served, request, stops)?;
    let message = Message {
        id,
        served,
        answer,
        turn,
    };
    let Some(mut request) = tracked.take() else {
        return Err(ApiError::internal("the request is answered already"));
    };
    if fields.streams() {
        return Ok(stream::events(move |out| async move {
            let result = message.stream(&out, prompt, &mut request).await;
            stream::end(result, &out, &mut request).await;
        }));
    }
    let whole = message.collect(&mut request).await;
    whole.map_err(|error| request.fail(error))
}

/// A message in the making.
struct Message {
    id: String,
    served: &'static Served,
    answer: Answer,
    turn: Turn,
}

impl Message {
    /// The message without its content.
    fn head(&self) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.served.name,
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
        })
    }

    fn stop_reason(&self, finish: Finish) -> &'static str {
        match finish {
            Finish::Length => "max_tokens",
            Finish::Stop if self.answer.stop_string().is_some() => "stop_sequence",
            Finish::Stop if !self.turn.calls().is_empty() => "tool_use",
            Finish::Stop => "end_turn",
        }
    }

    /// The whole message.
    async fn collect(mut self, tracked: &mut Tracked) -> Result<Response, ApiError> {
        let (finish, summary) = loop {
            match self.answer.next().await? {
                Piece::Text(text, tokens) => self.turn.push(&text, &tokens),
                Piece::End(finish, summary) => break (finish, summary),
                Piece::Progress(..) | Piece::Prompt(_) => {}
            }
        };
        self.turn.end(self.served);
        let mut content: Vec<Value> = Vec::new();
        for part in self.turn.take() {
            let last = content.last_mut();
            match (part, last) {
                (Part::Reasoning(text), Some(block)) if block["type"] == "thinking" => {
                    append(&mut block["thinking"], &text);
                }
                (Part::Content(text), Some(block)) if block["type"] == "text" => {
                    append(&mut block["text"], &text);
                }
                (Part::Arguments { .. }, _) => {}
                (Part::Call { index, .. }, _) => {
                    let call = &self.turn.calls()[index];
                    let mut block = begin(
                        &self.turn,
                        &Part::Call {
                            index,
                            name: call.name.clone(),
                        },
                    );
                    block["input"] = serde_json::from_str(&call.arguments).unwrap_or(json!({}));
                    content.push(block);
                }
                (part, _) => {
                    let mut block = begin(&self.turn, &part);
                    if let Some((_, key, text)) = delta(&part) {
                        block[key] = text.into();
                    }
                    content.push(block);
                }
            }
        }
        tracked.add(&summary);
        let mut message = self.head();
        message["content"] = content.into();
        message["stop_reason"] = self.stop_reason(finish).into();
        message["stop_sequence"] = self.answer.stop_string().into();
        message["usage"] = usage(&summary);
        message["timings"] = tracked.timings();
        tracked.succeed();
        Ok(axum::Json(message).into_response())
    }

    async fn stream(
        mut self,
        out: &Out,
        prompt: usize,
        tracked: &mut Tracked,
    ) -> Result<(), Ended> {
        let mut message = self.head();
        message["usage"] = json!({"input_tokens": prompt, "output_tokens": 0});
        send(out, json!({"type": "message_start", "message": message})).await?;
        let mut blocks = Open::default();
        let (finish, summary) = loop {
            let piece = tokio::select! {
                piece = self.answer.next() => piece.map_err(Ended::Error)?,
                () = out.closed() => return Err(Ended::Gone),
            };
            match piece {
                Piece::Text(text, tokens) => self.turn.push(&text, &tokens),
                Piece::End(finish, summary) => break (finish, summary),
                Piece::Progress(done, all) => stream::progress(out, done, all).await?,
                Piece::Prompt(_) => {}
            }
            blocks.send(&mut self.turn, out).await?;
        };
        self.turn.end(self.served);
        blocks.send(&mut self.turn, out).await?;
        blocks.close(out).await?;
        tracked.add(&summary);
        let delta = json!({
            "stop_reason": self.stop_reason(finish),
            "stop_sequence": self.answer.stop_string(),
        });
        let event = json!({"type": "message_delta", "delta": delta, "usage": usage(&summary)});
        send(out, event).await?;
        send(out, json!({"type": "message_stop"})).await
    }
}

/// The content block that is being streamed.
#[derive(Debug, Default)]
struct Open {
    /// Blocks so far.
    count: usize,
    /// Type of the open block.
    kind: Option<&'static str>,
}

impl Open {
    async fn send(&mut self, turn: &mut Turn, out: &Out) -> Result<(), Ended> {
        for part in turn.take() {
            let kind = match &part {
                Part::Reasoning(_) => "thinking",
                Part::Content(_) => "text",
                Part::Call { .. } | Part::Arguments { .. } => "tool_use",
            };
            if self.kind != Some(kind) || matches!(part, Part::Call { .. }) {
                self.close(out).await?;
                self.kind = Some(kind);
                self.count += 1;
                let block = begin(turn, &part);
                let index = self.count - 1;
                let start =
                    json!({"type": "content_block_start", "index": index, "content_block": block});
                send(out, start).await?;
            }
            if let Some((kind, key, text)) = delta(&part) {
                let index = self.count - 1;
                let delta = json!({"type": kind, key: text});
                let event = json!({"type": "content_block_delta", "index": index, "delta": delta});
                send(out, event).await?;
            }
        }
        Ok(())
    }

    async fn close(&mut self, out: &Out) -> Result<(), Ended> {
        match self.kind.take() {
            None => Ok(()),
            Some(_) => {
                let index = self.count - 1;
                send(out, json!({"type": "content_block_stop", "index": index})).await
            }
        }
    }
}

/// An empty block for a part.
fn begin(turn: &Turn, part: &Part) -> Value {
    match part {
        Part::Reasoning(_) => json!({"type": "thinking", "thinking": "", "signature": ""}),
        Part::Content(_) => json!({"type": "text", "text": ""}),
        Part::Call { index, .. } | Part::Arguments { index, .. } => {
            let call = &turn.calls()[*index];
            json!({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        }
    }
}

/// What a part adds to its block: type and key of the delta, and the text.
fn delta(part: &Part) -> Option<(&'static str, &'static str, &str)> {
    match part {
        Part::Reasoning(text) => Some(("thinking_delta", "thinking", text)),
        Part::Content(text) => Some(("text_delta", "text", text)),
        Part::Arguments { text, .. } => Some(("input_json_delta", "partial_json", text)),
        Part::Call { .. } => None,
    }
}

fn append(value: &mut Value, text: &str) {
    if let Value::String(known) = value {
        known.push_str(text);
    }
}

fn usage(summary: &Summary) -> Value {
    json!({
        "input_tokens": summary.prompt_tokens - summary.cached_tokens,
        "cache_read_input_tokens": summary.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": summary.tokens,
    })
}

/// Sends an event named after its type.
async fn send(out: &Out, value: Value) -> Result<(), Ended> {
    let name = value["type"].as_str().unwrap_or_default();
    stream::send(out, stream::named(name, &value)).await
}
