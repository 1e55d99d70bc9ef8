//! Speaks HTTP: the APIs of OpenAI and Anthropic, health, metrics and the chat page.
//!
//! [`App`] exists once. [`serve`] accepts connections from the beginning, and answers 503 until [`App::ready`] is given a [`Served`] model.

mod answer;
mod anthropic;
mod blocks;
mod body;
mod chat;
mod completions;
mod connections;
mod error;
mod fields;
mod guard;
mod metrics;
mod output;
mod page;
mod prepare;
mod said;
mod served;
mod stream;
mod text;
mod tools;
mod turn;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::json;

use body::BODY;
pub use connections::serve;
pub use error::ApiError;
pub use guard::Access;
pub use served::{Parts, Served};

/// What all connections share.
#[derive(Debug)]
pub struct App {
    access: Access,
    served: OnceLock<Served>,
    draining: AtomicBool,
    metrics: metrics::Requests,
    bodies: body::Bodies,
}

type Shared = State<&'static App>;

impl App {
    /// A server that loads.
    pub fn new(access: Access) -> App {
        App {
            access,
            served: OnceLock::new(),
            draining: AtomicBool::new(false),
            metrics: metrics::Requests::default(),
            bodies: body::Bodies::default(),
        }
    }

    /// From now on requests are answered by `served`.
    pub fn ready(&self, served: Served) {
        // Set once: a process serves one model.
        let _ = self.served.set(served);
    }

    /// From now on no request is taken.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
        if let Some(served) = self.served.get() {
            served.engine.drain();
        }
    }

    /// Ends all requests.
    pub fn stop(&self) {
        self.drain();
        if let Some(served) = self.served.get() {
            served.engine.stop();
        }
    }

    /// Waits for the engine after [`App::drain`] or [`App::stop`].
    pub fn join(&self) {
        if let Some(served) = self.served.get() {
            served.engine.join();
        }
    }

    fn served(&self) -> Result<&Served, ApiError> {
        if self.draining.load(Ordering::SeqCst) {
            return Err(ApiError::unavailable("the server is shutting down"));
        }
        let served = self.served.get();
        served.ok_or_else(|| ApiError::unavailable("the model is being loaded"))
    }
}

/// The routes.
pub fn router(app: &'static App) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat::handle))
        .route("/v1/completions", post(completions::handle))
        .route("/v1/messages", post(anthropic::handle))
        .route("/v1/messages/count_tokens", post(anthropic::count))
        .route("/v1/models", get(models))
        .route("/v1/models/{id}", get(model))
        .route("/", get(page::handle))
        .route("/health", get(health))
        .route("/metrics", get(metrics::handle))
        .fallback(|| async { ApiError::not_found("there is no such path") })
        .method_not_allowed_fallback(|| async { ApiError::wrong_method() })
        .layer(middleware::from_fn_with_state(app, body::bound))
        .layer(middleware::from_fn_with_state(app, guard::check))
        .layer(DefaultBodyLimit::max(BODY))
        .with_state(app)
}

async fn health(State(app): Shared) -> Response {
    match app.served() {
        Ok(_) => (StatusCode::OK, axum::Json(json!({"status": "ok"}))).into_response(),
        Err(error) => error.into_response(),
    }
}

fn description(served: &Served) -> serde_json::Value {
    json!({
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "colibri-uring",
        "max_model_len": served.engine.options().context,
    })
}

async fn models(State(app): Shared) -> Result<Response, ApiError> {
    let data = [description(app.served()?)];
    Ok(axum::Json(json!({"object": "list", "data": data})).into_response())
}

async fn model(
    State(app): Shared,
    axum::extract::Path(id): axum::extract::Path<String>,
) -> Result<Response, ApiError> {
    let served = app.served()?;
    match id == served.name {
        true => Ok(axum::Json(description(served)).into_response()),
        false => Err(ApiError::not_found(&format!(
            "there is no model {id:?}, only {:?}",
            served.name
        ))),
    }
}
