//! Serves many requests with one model: a scheduler puts their sequences into common passes.
//!
//! [`Engine::start`] moves a [`TextRunner`](crate::TextRunner) to a thread of its own. [`Engine::submit`] queues a [`Request`], token ids
//! with sampling options, and returns a [`Ticket`], on which its [`Event`]s arrive: progress of the prompt, tokens, and the end. Dropping
//! the ticket cancels the request.
//!
//! A request gives the same tokens alone and in company, because a row's bits never depend on what else is in a pass.

mod active;
mod beginnings;
mod budget;
mod engine;
pub mod http;
mod metrics;
mod queue;
mod request;
mod scheduler;
mod watch;

pub use beginnings::check_dir;
pub use engine::{Engine, EngineOptions, Ticket};
pub use metrics::{Metrics, SourceReads};
pub use request::{Drawn, Event, Finish, Refusal, Request, ServeError, Summary};
