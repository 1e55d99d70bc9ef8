//! Reads the bodies of requests: bounds the memory that all of them take together, and the time of each.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes};
use axum::extract::{Request, State};
use axum::http::{Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tower_http::timeout::TimeoutError;

use super::{ApiError, App};

/// Bytes of a body at most.
pub const BODY: usize = 16 << 20;
/// Bodies up to this size are not counted: all connections may have one.
const SMALL: usize = 64 << 10;
/// Memory for all larger ones, until they are answered.
const BUDGET: usize = 128 << 20;
/// Bytes of memory that a permit stands for.
const PERMIT: usize = 1 << 10;
/// Memory of a value of JSON, besides its text. A member of an object counts as two.
const VALUE: usize = size_of::<serde_json::Value>();
/// Bytes and time of a refused body that are read and forgotten: a client that still sends does not see the answer.
const FORGOTTEN: usize = 64 << 20;
const FORGETTING: Duration = Duration::from_secs(10);
/// Time for a whole body.
const TIME: Duration = Duration::from_secs(300);

/// The memory of bodies.
#[derive(Debug)]
pub struct Bodies(Arc<Semaphore>);

impl Default for Bodies {
    fn default() -> Bodies {
        Bodies(Arc::new(Semaphore::new(BUDGET / PERMIT)))
    }
}

/// What a request has of the budget.
type Held = Option<OwnedSemaphorePermit>;

impl Bodies {
    async fn read(&self, pieces: &mut BodyDataStream) -> Result<(Bytes, Held), ApiError> {
        let (mut bytes, mut held) = (Vec::new(), None);
        while let Some(piece) = pieces.next().await {
            let piece = piece.map_err(broken)?;
            if bytes.len() + piece.len() > BODY {
                return Err(ApiError::too_large(BODY));
            }
            bytes.extend_from_slice(&piece);
            self.hold(&mut held, bytes.capacity())?;
        }
        let values = values(&bytes) * VALUE;
        self.hold(&mut held, bytes.capacity() + values)?;
        Ok((bytes.into(), held))
    }

    /// Makes `held` enough for `bytes` bytes.
    fn hold(&self, held: &mut Held, bytes: usize) -> Result<(), ApiError> {
        if bytes <= SMALL {
            return Ok(());
        }
        if bytes > BUDGET {
            return Err(ApiError::too_many_values());
        }
        let has = held.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let more = bytes.div_ceil(PERMIT).saturating_sub(has) as u32;
        let permit = Arc::clone(&self.0).try_acquire_many_owned(more);
        let permit = permit.map_err(|_| ApiError::busy("other requests are too large"))?;
        match held {
            Some(held) => held.merge(permit),
            None => *held = Some(permit),
        }
        Ok(())
    }
}

/// Values and names in JSON, at least. Of what is no JSON it counts something.
fn values(json: &[u8]) -> usize {
    let (mut count, mut quoted, mut escaped) = (1, false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b',' | b':' | b'[' | b'{' if !quoted => count += 1,
            _ => {}
        }
    }
    count
}

fn broken(error: axum::Error) -> ApiError {
    match error.into_inner().downcast_ref::<TimeoutError>() {
        Some(_) => ApiError::timeout(),
        None => ApiError::bad_request("the body is cut, or not encoded as its header says"),
    }
}

/// Reads what is left of a body.
async fn forget(mut pieces: BodyDataStream) {
    let mut left = FORGOTTEN;
    while let Some(Ok(piece)) = pieces.next().await {
        match left.checked_sub(piece.len()) {
            Some(less) => left = less,
            None => return,
        }
    }
}

/// Reads the body before the request is answered.
pub async fn bound(State(app): State<&'static App>, request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    if head.method != Method::POST {
        return next.run(Request::from_parts(head, body)).await;
    }
    let length = head.headers.get(header::CONTENT_LENGTH);
    let length = length.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    let mut pieces = body.into_data_stream();
    let read = match length.is_some_and(|length| length > BODY as u64) {
        true => Ok(Err(ApiError::too_large(BODY))),
        false => timeout(TIME, app.bodies.read(&mut pieces)).await,
    };
    match read {
        Err(_) => ApiError::timeout().into_response(),
        Ok(Err(error)) => {
            if length.is_none_or(|length| length <= FORGOTTEN as u64) {
                // Whether it ends or not: the client has had its time.
                let _ = timeout(FORGETTING, forget(pieces)).await;
            }
            error.into_response()
        }
        Ok(Ok((bytes, held))) => {
            let answer = next.run(Request::from_parts(head, Body::from(bytes))).await;
            // The values have been read.
            drop(held);
            answer
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_outside_of_strings() {
        for (json, count) in [
            ("{}", 2),
            ("[1,2,3]", 4),
            (r#"{"a,[{:": "b\",,\\", "c": [[], 5]}"#, 8),
        ] {
            assert_eq!(values(json.as_bytes()), count, "{json}");
        }
    }

    #[test]
    fn large_bodies_share_a_budget() {
        let bodies = Bodies::default();
        let mut first = None;
        bodies.hold(&mut first, SMALL).unwrap();
        assert!(first.is_none());
        bodies.hold(&mut first, BUDGET / 2).unwrap();
        bodies.hold(&mut first, BUDGET / 2 + 1).unwrap();
        let mut second = None;
        assert!(bodies.hold(&mut second, BUDGET / 2).is_err());
        bodies.hold(&mut second, BUDGET / 4).unwrap();
        drop(first);
        bodies.hold(&mut second, BUDGET).unwrap();
        assert!(bodies.hold(&mut second, BUDGET + 1).is_err());
    }
}
