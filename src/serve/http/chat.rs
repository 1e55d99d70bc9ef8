//! Answers `/v1/chat/completions`.

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::answer::{Answer, Piece, Spelled};
use super::error::ApiError;
use super::fields::{self, Fields};
use super::output::{Head, chat_logprobs, finish_reason};
use super::prepare::{Wanted, prepare};
use super::said::{self, Said};
use super::stream::{Choice, Job, Tracked, collect, stream};
use super::tools::Tools;
use super::turn::Turn;
use super::{Served, Shared};
use crate::runtime::dialect::Part;
use crate::serve::request::{Finish, Request};

#[derive(Debug, Deserialize)]
struct Body {
    messages: Vec<Said>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    functions: Option<Vec<Value>>,
    modalities: Option<Vec<String>>,
    web_search_options: Option<Value>,
    chat_template_kwargs: Option<Map<String, Value>>,
    reasoning_effort: Option<String>,
}

impl Body {
    fn wanted(self, schema: Option<Value>) -> Result<Wanted, ApiError> {
        if self
            .functions
            .is_some_and(|functions| !functions.is_empty())
        {
            return Err(ApiError::field("functions", "it is superseded by tools"));
        }
        let modalities = self.modalities.unwrap_or_default();
        if let Some(other) = modalities.iter().find(|kind| *kind != "text") {
            let problem = format!("{other:?} is not supported, only \"text\"");
            return Err(ApiError::field("modalities", problem));
        }
        if self.web_search_options.is_some() {
            return Err(ApiError::field("web_search_options", "it is not supported"));
        }
        Ok(Wanted {
            messages: said::messages(self.messages)?,
            tools: Tools::of_openai(self.tools, self.tool_choice, self.parallel_tool_calls)?,
            schema,
            variables: self.chat_template_kwargs.into_iter().flatten().collect(),
            effort: self.reasoning_effort,
        })
    }
}

pub async fn handle(
    State(app): Shared,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let served = app.served()?;
    let head = Head::new("chatcmpl", "chat.completion", &served.name);
    let mut tracked = Some(Tracked::new(app, "chat", &head.id));
    let answered = answer(served, head, body, &mut tracked).await;
    answered.map_err(|error| match &mut tracked {
        Some(tracked) => tracked.fail(error),
        None => error,
    })
}

async fn answer(
    served: &'static Served,
    mut head: Head,
    body: Result<Bytes, BytesRejection>,
    tracked: &mut Option<Tracked>,
) -> Result<Response, ApiError> {
    let body = fields::read(body)?;
    let fields: Fields = fields::part(&body)?;
    let body: Body = fields::part(&body)?;
    let schema = fields.schema()?;
    let logprobs = match body.logprobs {
        Some(true) => fields::top_logprobs("top_logprobs", body.top_logprobs.or(Some(0)))?,
        _ => None,
    };
    served.check_chat()?;
    let stops = fields.stops()?;
    let wanted = body.wanted(schema)?;
    // Rendering a hostile text takes seconds.
    let prepared = tokio::task::spawn_blocking(move || prepare(served, wanted)).await;
    let prepared = prepared.map_err(ApiError::internal)??;
    let mut jobs = Vec::new();
    for n in 0..fields.choices()? {
        let request = Request {
            ids: prepared.ids.clone(),
            constraint: prepared.constraint.clone(),
            sampling: fields.sampling(served.sampling, n)?,
            adjustments: fields.adjustments(served.vocabulary)?,
            max_tokens: fields.max_tokens().unwrap_or(usize::MAX),
            stop: served.chat_stop().to_vec(),
            logprobs,
            prompt_logprobs: false,
        };
        jobs.push(Job {
            answer: Answer::begin(served, request, stops.clone())?,
            choice: ChatChoice {
                index: n,
                begun: false,
                turn: Turn::new(served, &prepared),
                logprobs: logprobs.map(|_| Vec::new()),
                return_ids: fields.return_token_ids.unwrap_or(false),
                sent_ids: 0,
            },
            first: n == 0,
        });
    }
    let Some(mut request) = tracked.take() else {
        return Err(ApiError::internal("the request is answered already"));
    };
    if !fields.streams() {
        return collect(served, &head, jobs, &mut request)
            .await
            .map_err(|error| request.fail(error));
    }
    head.object = "chat.completion.chunk";
    let usage = fields.includes_usage();
    Ok(stream(served, head, jobs, usage, request))
}

/// The answer of one choice.
#[derive(Debug)]
struct ChatChoice {
    index: u32,
    /// The first chunk is out.
    begun: bool,
    turn: Turn,
    logprobs: Option<Vec<Spelled>>,
    return_ids: bool,
    /// Ids that are out.
    sent_ids: usize,
}

impl ChatChoice {
    fn push(&mut self, text: &str, tokens: Vec<Spelled>) {
        self.turn.push(text, &tokens);
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.extend(tokens);
        }
    }

    fn logprobs(&mut self, served: &Served) -> Value {
        let logprobs = self.logprobs.as_mut().map(std::mem::take);
        logprobs.map_or(Value::Null, |tokens| {
            chat_logprobs(served.tokenizer, &tokens)
        })
    }

    fn finish_reason(&self, finish: Finish) -> &'static str {
        match finish {
            Finish::Stop if !self.turn.calls().is_empty() => "tool_calls",
            finish => finish_reason(finish),
        }
    }

    fn chunk(&mut self, served: &Served, finish: Option<Finish>) -> Option<Value> {
        let parts = self.turn.take();
        let logprobs = self
            .logprobs
            .as_ref()
            .is_some_and(|tokens| !tokens.is_empty());
        if parts.is_empty() && !logprobs && finish.is_none() {
            return None;
        }
        let (reasoning, content) = texts(&parts);
        let mut delta = json!({});
        if !std::mem::replace(&mut self.begun, true) {
            delta["role"] = json!("assistant");
        }
        for (key, text) in [("reasoning_content", reasoning), ("content", content)] {
            if !text.is_empty() {
                delta[key] = json!(text);
            }
        }
        let calls: Vec<Value> = parts
            .iter()
            .filter_map(|part| self.call_delta(part))
            .collect();
        if !calls.is_empty() {
            delta["tool_calls"] = calls.into();
        }
        let mut choice = json!({
            "index": self.index,
            "delta": delta,
            "logprobs": self.logprobs(served),
            "finish_reason": finish.map(|finish| self.finish_reason(finish)),
        });
        if self.return_ids {
            choice["token_ids"] = json!(self.turn.ids()[self.sent_ids..]);
            self.sent_ids = self.turn.ids().len();
        }
        Some(choice)
    }

    fn call_delta(&self, part: &Part) -> Option<Value> {
        match part {
            Part::Call { index, name } => Some(json!({
                "index": index,
                "id": self.turn.calls()[*index].id,
                "type": "function",
                "function": {"name": name, "arguments": ""},
            })),
            Part::Arguments { index, text } => {
                Some(json!({"index": index, "function": {"arguments": text}}))
            }
            Part::Reasoning(_) | Part::Content(_) => None,
        }
    }
}

/// Reasoning and content of parts.
fn texts(parts: &[Part]) -> (String, String) {
    let (mut reasoning, mut content) = (String::new(), String::new());
    for part in parts {
        match part {
            Part::Reasoning(text) => reasoning += text,
            Part::Content(text) => content += text,
            Part::Call { .. } | Part::Arguments { .. } => {}
        }
    }
    (reasoning, content)
}

impl Choice for ChatChoice {
    fn piece(&mut self, served: &Served, piece: Piece, streams: bool) -> Vec<Value> {
        if let Piece::Text(text, tokens) = piece {
            self.push(&text, tokens);
        }
        let chunk = streams.then(|| self.chunk(served, None)).flatten();
        chunk.into_iter().collect()
    }

    fn whole(mut self, served: &Served, finish: Finish) -> Value {
        self.turn.end(served);
        let (reasoning, content) = texts(&self.turn.take());
        let calls = self.turn.calls();
        let content = (!content.is_empty() || calls.is_empty()).then_some(content);
        let mut message = json!({"role": "assistant", "content": content});
        if !reasoning.is_empty() {
            message["reasoning_content"] = json!(reasoning);
        }
        if !calls.is_empty() {
            let calls = calls.iter().map(|call| {
                let function = json!({"name": call.name, "arguments": call.arguments});
                json!({"id": call.id, "type": "function", "function": function})
            });
            message["tool_calls"] = calls.collect();
        }
        let mut choice = json!({
            "index": self.index,
            "message": message,
            "logprobs": self.logprobs(served),
            "finish_reason": self.finish_reason(finish),
        });
        if self.return_ids {
            choice["token_ids"] = json!(self.turn.ids());
        }
        choice
    }

    fn last(&mut self, served: &Served, finish: Finish) -> Vec<Value> {
        self.turn.end(served);
        self.chunk(served, Some(finish)).into_iter().collect()
    }
}
