//! Bounds the memory and time of encoding texts, which take the tokenizer some 100 bytes of memory for each byte.

use tokio::runtime::Handle;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::task::spawn_blocking;

use super::error::ApiError;
use super::served::Served;
use crate::runtime::tokenizer::Tokenizer;

/// Bytes of text that are encoded at once. A longer text is encoded alone.
const AT_ONCE: usize = 1 << 20;
/// Bytes of text that a permit stands for.
const PERMIT: usize = 1 << 10;

/// What texts may be encoded, and how many at once.
#[derive(Debug)]
pub struct Texts {
    permits: Semaphore,
    /// Bytes of a text that may fit into a context.
    most: usize,
    context: usize,
}

impl Texts {
    /// Texts for contexts of `context` tokens.
    pub fn new(tokenizer: Option<&Tokenizer>, context: usize) -> Texts {
        let longest = tokenizer.map_or(0, Tokenizer::longest);
        Texts {
            permits: Semaphore::new(AT_ONCE / PERMIT),
            most: context.saturating_mul(longest),
            context,
        }
    }

    /// Refuses a text of field `field` that is too long whatever its tokens are.
    pub fn check(&self, field: &str, bytes: usize) -> Result<(), ApiError> {
        if bytes <= self.most {
            return Ok(());
        }
        let problem = format!(
            "{bytes} bytes of text are more than the context of {} tokens",
            self.context
        );
        Err(ApiError::field(field, problem))
    }

    async fn permit(&self, bytes: usize) -> Option<SemaphorePermit<'_>> {
        let permits = bytes.clamp(1, AT_ONCE).div_ceil(PERMIT) as u32;
        // It is never closed.
        self.permits.acquire_many(permits).await.ok()
    }

    /// Waits until so many bytes may be encoded. For threads that may block.
    pub fn wait(&self, bytes: usize) -> Option<SemaphorePermit<'_>> {
        Handle::current().block_on(self.permit(bytes))
    }
}

/// The ids of texts in field `field`.
pub async fn encode(
    served: &'static Served,
    field: &'static str,
    texts: Vec<String>,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let tokenizer = served.tokenizer(field)?;
    let longest = texts.iter().map(String::len).max().unwrap_or(0);
    served.texts.check(field, longest)?;
    let permit = served.texts.permit(longest).await;
    let encode = move || {
        let encoded = texts.iter().map(|text| tokenizer.encode(text));
        encoded.collect::<Result<Vec<_>, _>>()
    };
    // A long text takes seconds.
    let encoded = spawn_blocking(encode).await.map_err(ApiError::internal)?;
    drop(permit);
    encoded.map_err(|error| ApiError::of_text(field, error))
}
