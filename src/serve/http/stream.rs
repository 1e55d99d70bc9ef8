//! Runs the choices of a request side by side, and collects or streams their answers.

use std::convert::Infallible;
use std::time::Duration;

use axum::http::header;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value};
use tokio::sync::mpsc::{Sender, channel};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;

use super::answer::{Answer, Piece};
use super::error::ApiError;
use super::metrics::Outcome;
use super::output::{Head, Total};
use super::{App, Served};
use crate::serve::request::{Finish, Summary};

/// Chunks that may wait for a client.
const CHUNKS: usize = 64;
/// Time between comments that keep a silent connection open.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Writes one choice: collects pieces for an answer, or turns each of them into chunks.
pub trait Choice: Send + 'static {
    /// Takes a piece. While streaming, what to send because of it.
    fn piece(&mut self, served: &Served, piece: Piece, streams: bool) -> Vec<Value>;

    /// The whole choice, if it is not streamed.
    fn whole(self, served: &Served, finish: Finish) -> Value;

    /// The last chunk of the choice.
    fn last(&mut self, served: &Served, finish: Finish) -> Vec<Value>;
}

/// A choice and the answer that it writes.
#[derive(Debug)]
pub struct Job<C> {
    pub answer: Answer,
    pub choice: C,
    /// Whether it is the first choice of its prompt.
    pub first: bool,
}

/// Counts and logs a request when it ends, however it does.
#[derive(Debug)]
pub struct Tracked {
    app: &'static App,
    endpoint: &'static str,
    id: String,
    outcome: Outcome,
    /// Why it fails.
    error: Option<String>,
    total: Total,
}

impl Tracked {
    /// A request that is cancelled unless something else is said.
    pub fn new(app: &'static App, endpoint: &'static str, id: &str) -> Tracked {
        Tracked {
            app,
            endpoint,
            id: id.to_owned(),
            outcome: Outcome::Cancelled,
            error: None,
            total: Total::default(),
        }
    }

    /// Counts the only choice of the request.
    pub fn add(&mut self, summary: &Summary) {
        self.total.add(summary, true);
    }

    /// What it took.
    pub fn timings(&self) -> Value {
        self.total.timings()
    }

    /// All of it was answered.
    pub fn succeed(&mut self) {
        self.outcome = Outcome::Ok;
    }

    /// It ends with an error.
    pub fn fail(&mut self, error: ApiError) -> ApiError {
        self.outcome = match error.is_refusal() {
            true => Outcome::Refused,
            false => Outcome::Failed,
        };
        self.error = Some(error.to_string());
        error
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        let done = self.outcome == Outcome::Ok;
        let summary = self.total.slowest();
        self.app
            .metrics
            .ended(self.endpoint, self.outcome, done.then_some(summary));
        let seconds = |time: Duration| (time.as_secs_f64() * 1e3).round() / 1e3;
        tracing::info!(
            id = self.id,
            endpoint = self.endpoint,
            outcome = self.outcome.name(),
            prompt_tokens = self.total.prompt_tokens,
            cached_tokens = self.total.cached_tokens,
            tokens = self.total.tokens,
            queue_seconds = seconds(summary.queue),
            prefill_seconds = seconds(summary.prefill),
            decode_seconds = seconds(summary.decode),
            io_wait_seconds = seconds(summary.io_wait),
            error = self.error,
            "request"
        );
    }
}

/// Collects all choices into one answer.
pub async fn collect<C: Choice>(
    served: &'static Served,
    head: &Head,
    jobs: Vec<Job<C>>,
    tracked: &mut Tracked,
) -> Result<Response, ApiError> {
    let mut running = JoinSet::new();
    for (index, mut job) in jobs.into_iter().enumerate() {
        running.spawn(async move {
            loop {
                match job.answer.next().await? {
                    Piece::End(finish, summary) => {
                        let whole = job.choice.whole(served, finish);
                        return Ok::<_, ApiError>((index, whole, summary, job.first));
                    }
                    piece => drop(job.choice.piece(served, piece, false)),
                }
            }
        });
    }
    let mut choices = Vec::new();
    while let Some(joined) = running.join_next().await {
        let (index, whole, summary, first) = joined.map_err(ApiError::internal)??;
        tracked.total.add(&summary, first);
        choices.push((index, whole));
    }
    choices.sort_unstable_by_key(|(index, _)| *index);
    let choices = choices.into_iter().map(|(_, whole)| whole).collect();
    let mut answer = head.with(choices);
    answer.insert("usage".into(), tracked.total.usage());
    answer.insert("timings".into(), tracked.total.timings());
    tracked.succeed();
    Ok(axum::Json(answer).into_response())
}

/// Streams all choices as server-sent events.
pub fn stream<C: Choice>(
    served: &'static Served,
    head: Head,
    jobs: Vec<Job<C>>,
    usage: bool,
    mut tracked: Tracked,
) -> Response {
    events(move |out| async move {
        let result = run(served, &head, jobs, &out, &mut tracked, usage).await;
        end(result, &out, &mut tracked).await;
    })
}

/// Answers with the events that `write` sends.
pub fn events<F: Future<Output = ()> + Send + 'static>(write: impl FnOnce(Out) -> F) -> Response {
    let (out, events) = channel(CHUNKS);
    tokio::spawn(write(out));
    let events =
        Sse::new(ReceiverStream::new(events)).keep_alive(KeepAlive::new().interval(KEEP_ALIVE));
    // Proxies shall not collect chunks.
    (
        [(header::HeaderName::from_static("x-accel-buffering"), "no")],
        events,
    )
        .into_response()
}

/// Ends a stream: an error becomes its last event.
pub async fn end(result: Result<(), Ended>, out: &Out, tracked: &mut Tracked) {
    match result {
        Ok(()) => tracked.succeed(),
        Err(Ended::Gone) => {}
        Err(Ended::Error(error)) => {
            let body = tracked.fail(error).body();
            // Clients of one API read the name, those of the other ignore it.
            let _ = send(out, named("error", &body)).await;
        }
    }
}

/// Why a stream ends too soon.
pub enum Ended {
    Error(ApiError),
    Gone,
}

/// Where the events of a stream go.
pub type Out = Sender<Result<Event, Infallible>>;

/// Sends an event.
pub async fn send(out: &Out, event: Event) -> Result<(), Ended> {
    out.send(Ok(event)).await.map_err(|_| Ended::Gone)
}

/// Says how much of a prompt is known, in a comment that keeps the connection open.
pub async fn progress(out: &Out, done: usize, all: usize) -> Result<(), Ended> {
    send(
        out,
        Event::default().comment(format!("prefill {done}/{all}")),
    )
    .await
}

async fn run<C: Choice>(
    served: &'static Served,
    head: &Head,
    jobs: Vec<Job<C>>,
    out: &Out,
    tracked: &mut Tracked,
    usage: bool,
) -> Result<(), Ended> {
    let mut running = JoinSet::new();
    for job in jobs {
        running.spawn(pump(served, head.clone(), job, out.clone()));
    }
    while let Some(joined) = running.join_next().await {
        let joined = joined.map_err(|error| Ended::Error(ApiError::internal(error)))?;
        let (summary, first) = joined?;
        tracked.total.add(&summary, first);
    }
    if usage {
        let mut chunk = head.with(Vec::new());
        chunk.insert("usage".into(), tracked.total.usage());
        chunk.insert("timings".into(), tracked.total.timings());
        send(out, data(&Value::Object(chunk))).await?;
    }
    send(out, Event::default().data("[DONE]")).await
}

async fn pump<C: Choice>(
    served: &'static Served,
    head: Head,
    mut job: Job<C>,
    out: Out,
) -> Result<(Summary, bool), Ended> {
    loop {
        let piece = tokio::select! {
            piece = job.answer.next() => piece.map_err(Ended::Error)?,
            () = out.closed() => return Err(Ended::Gone),
        };
        let (choices, ended) = match piece {
            Piece::Progress(done, all) => {
                progress(&out, done, all).await?;
                continue;
            }
            Piece::End(finish, summary) => (job.choice.last(served, finish), Some(summary)),
            piece => (job.choice.piece(served, piece, true), None),
        };
        for choice in choices {
            let chunk: Map<String, Value> = head.with(vec![choice]);
            send(&out, data(&Value::Object(chunk))).await?;
        }
        if let Some(summary) = ended {
            return Ok((summary, job.first));
        }
    }
}

/// An event with a name and JSON.
pub fn named(name: &str, value: &Value) -> Event {
    Event::default().event(name).data(value.to_string())
}

/// An event with JSON.
pub fn data(value: &Value) -> Event {
    Event::default().data(value.to_string())
}
