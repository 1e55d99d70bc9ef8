//! Turns errors into answers of the OpenAI API's form.

use std::fmt;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::runtime::sample::SampleError;
use crate::runtime::tokenizer::TokenizerError;
use crate::serve::request::{Refusal, ServeError};

/// Seconds after which a client may try again.
const RETRY_AFTER: u32 = 2;

/// An answer that is an error.
#[derive(Clone, Debug)]
pub struct ApiError {
    status: StatusCode,
    message: String,
    /// The field of the request that is wrong.
    field: Option<String>,
}

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        let message = message.into();
        let field = None;
        ApiError {
            status,
            message,
            field,
        }
    }

    /// 400: the request cannot be understood.
    pub(super) fn bad_request(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, message)
    }

    /// 400: a field is wrong, or asks for what cannot be done.
    pub(super) fn field(field: &str, problem: impl fmt::Display) -> ApiError {
        ApiError {
            field: Some(field.to_owned()),
            ..ApiError::bad_request(format!("{field}: {problem}"))
        }
    }

    pub(super) fn unavailable(message: &str) -> ApiError {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    pub(super) fn not_found(message: &str) -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, message)
    }

    pub(super) fn wrong_method() -> ApiError {
        ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "the path has other methods")
    }

    /// The same error, of a field that has another name in another API.
    pub(super) fn renamed(self, from: &str, to: &str) -> ApiError {
        if self.field.as_deref() != Some(from) {
            return self;
        }
        let problem = self.message.strip_prefix(from);
        let problem = problem.and_then(|rest| rest.strip_prefix(": "));
        ApiError::field(to, problem.unwrap_or(&self.message))
    }

    pub(super) fn unauthorized(message: &str) -> ApiError {
        ApiError::new(StatusCode::UNAUTHORIZED, message)
    }

    pub(super) fn forbidden(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::FORBIDDEN, message)
    }

    pub(super) fn too_large(limit: usize) -> ApiError {
        let message = format!("the body has more than {} MiB", limit >> 20);
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    }

    pub(super) fn too_many_values() -> ApiError {
        let message = "the body has too many values";
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    }

    /// 429: there is no memory for the request now.
    pub(super) fn busy(message: &str) -> ApiError {
        ApiError::new(
            StatusCode::TOO_MANY_REQUESTS,
            format!("{message}; try again later"),
        )
    }

    pub(super) fn timeout() -> ApiError {
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body does not arrive")
    }

    pub(super) fn internal(message: impl fmt::Display) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message.to_string())
    }

    /// Whether the request was wrong, and not the server.
    pub(super) fn is_refusal(&self) -> bool {
        self.status.is_client_error()
    }

    /// The JSON of the answer.
    pub(super) fn body(&self) -> Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        // The outer type is of the Anthropic API.
        json!({"type": "error", "error": {"message": self.message, "type": kind, "param": self.field, "code": null}})
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.body())).into_response();
        let busy = [
            StatusCode::TOO_MANY_REQUESTS,
            StatusCode::SERVICE_UNAVAILABLE,
        ];
        if busy.contains(&self.status) {
            let headers = response.headers_mut();
            headers.insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER));
        }
        response
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> ApiError {
        let message = refusal.to_string();
        match refusal {
            Refusal::Full { .. } => ApiError::new(StatusCode::TOO_MANY_REQUESTS, message),
            Refusal::Draining => ApiError::unavailable(&message),
            Refusal::TooLong { .. } => ApiError::field("max_tokens", message),
            Refusal::Ids(_) => ApiError::field("prompt", message),
        }
    }
}

impl From<ServeError> for ApiError {
    fn from(error: ServeError) -> ApiError {
        if let ServeError::Sample(SampleError::Constraint(error)) = &error {
            return ApiError::field("response_format", error);
        }
        // The drive may come back, and other requests may not need what failed.
        ApiError::unavailable(&error.to_string())
    }
}

impl ApiError {
    /// A text of a field that the tokenizer does not take.
    pub(super) fn of_text(field: &str, error: TokenizerError) -> ApiError {
        match error {
            TokenizerError::EmptyPrompt => ApiError::field(field, error),
            error => error.into(),
        }
    }
}

impl From<TokenizerError> for ApiError {
    fn from(error: TokenizerError) -> ApiError {
        ApiError::internal(error)
    }
}
