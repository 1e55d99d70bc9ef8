//! Answers `/v1/chat/completions`.

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};

use super::answer::{Answer, Piece, Spelled};
use super::error::ApiError;
use super::fields::{self, Fields};
use super::output::{Head, chat_logprobs, finish_reason};
use super::stream::{Choice, Job, Tracked, collect, stream};
use super::{Served, Shared};
use crate::runtime::dialect::{Part, Splitter};
use crate::runtime::template::{Message, Role};
use crate::serve::request::{Finish, Request};

#[derive(Debug, Deserialize)]
struct Body {
    messages: Vec<Said>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
    tools: Option<Vec<Value>>,
    functions: Option<Vec<Value>>,
}

/// A message of a request.
#[derive(Debug, Deserialize)]
struct Said {
    role: String,
    content: Option<Content>,
    tool_calls: Option<Vec<Value>>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "it is no text and no list of parts")]
enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

#[derive(Debug, Deserialize)]
struct ContentPart {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

impl Said {
    fn message(self, index: usize) -> Result<Message, ApiError> {
        let wrong = |problem: String| ApiError::field(&format!("messages[{index}]"), problem);
        let role = match self.role.as_str() {
            "system" | "developer" => Role::System,
            "user" => Role::User,
            "assistant" => Role::Assistant,
            role => return Err(wrong(format!("role {role:?} is not supported"))),
        };
        if self.tool_calls.is_some_and(|calls| !calls.is_empty()) {
            return Err(wrong("tool_calls are not supported yet".into()));
        }
        let text = match self.content {
            Some(Content::Text(text)) => text,
            Some(Content::Parts(parts)) => {
                let text = parts.into_iter().map(|part| match part.text {
                    Some(text) if part.kind == "text" => Ok(text),
                    _ => Err(wrong(format!(
                        "content of type {:?} is not supported, only text",
                        part.kind
                    ))),
                });
                text.collect::<Result<Vec<_>, _>>()?.concat()
            }
            None if role == Role::Assistant => String::new(),
            None => return Err(wrong("it has no content".into())),
        };
        Ok(Message::new(role, text))
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
    fields.check_format()?;
    for (name, tools) in [("tools", &body.tools), ("functions", &body.functions)] {
        if tools.as_ref().is_some_and(|tools| !tools.is_empty()) {
            return Err(ApiError::field(name, "tools are not supported yet"));
        }
    }
    let logprobs = match body.logprobs {
        Some(true) => fields::top_logprobs("top_logprobs", body.top_logprobs.or(Some(0)))?,
        _ => None,
    };
    served.check_chat()?;
    if body.messages.is_empty() {
        return Err(ApiError::field("messages", "there is none"));
    }
    let messages = body.messages.into_iter().enumerate();
    let messages: Vec<Message> = messages
        .map(|(index, said)| said.message(index))
        .collect::<Result<_, _>>()?;
    let stops = fields.stops()?;
    // Rendering a hostile text takes seconds.
    let rendered = tokio::task::spawn_blocking(move || served.prompt(messages)).await;
    let (prompt, ids) = rendered.map_err(ApiError::internal)??;
    let mut jobs = Vec::new();
    for n in 0..fields.choices()? {
        let request = Request {
            ids: ids.clone(),
            sampling: fields.sampling(served.sampling, n)?,
            adjustments: fields.adjustments(served.vocabulary)?,
            max_tokens: fields.max_tokens().unwrap_or(usize::MAX),
            stop: served.chat_stop().to_vec(),
            logprobs,
            prompt_logprobs: false,
        };
        jobs.push(Job {
            answer: Answer::begin(served, request, stops.clone())?,
            choice: Turn {
                index: n,
                begun: false,
                splitter: Some(served.dialect().splitter(&prompt, Vec::new())),
                said: Vec::new(),
                logprobs: logprobs.map(|_| Vec::new()),
                return_ids: fields.return_token_ids.unwrap_or(false),
                sent_ids: 0,
                raw: String::new(),
                ids: Vec::new(),
                prompt: prompt.clone(),
                prompt_ids: ids.clone(),
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
struct Turn {
    index: u32,
    /// The first chunk is out.
    begun: bool,
    splitter: Option<Splitter>,
    /// Parts that are not out.
    said: Vec<Part>,
    logprobs: Option<Vec<Spelled>>,
    return_ids: bool,
    /// Ids that are out.
    sent_ids: usize,
    /// All of the text.
    raw: String,
    ids: Vec<u32>,
    prompt: String,
    prompt_ids: Vec<u32>,
}

impl Turn {
    fn push(&mut self, text: &str, tokens: Vec<Spelled>) {
        self.raw += text;
        self.ids.extend(tokens.iter().map(|token| token.drawn.id));
        if let Some(splitter) = &mut self.splitter {
            self.said.extend(splitter.push(text));
        }
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.extend(tokens);
        }
    }

    /// At the end of the answer: what was held back. Remembers the ids for the next message.
    fn end(&mut self, served: &Served) {
        if let Some(splitter) = self.splitter.take() {
            self.said.extend(splitter.finish());
        }
        served.remember(&self.prompt, &self.prompt_ids, &self.raw, &self.ids);
    }

    /// Takes reasoning and content.
    fn texts(&mut self) -> (String, String) {
        let (mut reasoning, mut content) = (String::new(), String::new());
        for part in self.said.drain(..) {
            match part {
                Part::Reasoning(text) => reasoning += &text,
                Part::Content(text) => content += &text,
                // Without tools, there are no calls.
                Part::Call { .. } | Part::Arguments { .. } => {}
            }
        }
        (reasoning, content)
    }

    fn logprobs(&mut self, served: &Served) -> Value {
        let logprobs = self.logprobs.as_mut().map(std::mem::take);
        logprobs.map_or(Value::Null, |tokens| {
            chat_logprobs(served.tokenizer, &tokens)
        })
    }

    fn chunk(&mut self, served: &Served, finish: Option<Finish>) -> Option<Value> {
        let (reasoning, content) = self.texts();
        let logprobs = self
            .logprobs
            .as_ref()
            .is_some_and(|tokens| !tokens.is_empty());
        if reasoning.is_empty() && content.is_empty() && !logprobs && finish.is_none() {
            return None;
        }
        let mut delta = json!({});
        if !std::mem::replace(&mut self.begun, true) {
            delta["role"] = json!("assistant");
        }
        for (key, text) in [("reasoning_content", reasoning), ("content", content)] {
            if !text.is_empty() {
                delta[key] = json!(text);
            }
        }
        let mut choice = json!({
            "index": self.index,
            "delta": delta,
            "logprobs": self.logprobs(served),
            "finish_reason": finish.map(finish_reason),
        });
        if self.return_ids {
            choice["token_ids"] = json!(self.ids[self.sent_ids..]);
            self.sent_ids = self.ids.len();
        }
        Some(choice)
    }
}

impl Choice for Turn {
    fn piece(&mut self, served: &Served, piece: Piece, streams: bool) -> Vec<Value> {
        if let Piece::Text(text, tokens) = piece {
            self.push(&text, tokens);
        }
        let chunk = streams.then(|| self.chunk(served, None)).flatten();
        chunk.into_iter().collect()
    }

    fn whole(mut self, served: &Served, finish: Finish) -> Value {
        self.end(served);
        let (reasoning, content) = self.texts();
        let mut message = json!({"role": "assistant", "content": content});
        if !reasoning.is_empty() {
            message["reasoning_content"] = json!(reasoning);
        }
        let mut choice = json!({
            "index": self.index,
            "message": message,
            "logprobs": self.logprobs(served),
            "finish_reason": finish_reason(finish),
        });
        if self.return_ids {
            choice["token_ids"] = json!(self.ids);
        }
        choice
    }

    fn last(&mut self, served: &Served, finish: Finish) -> Vec<Value> {
        self.end(served);
        self.chunk(served, Some(finish)).into_iter().collect()
    }
}
