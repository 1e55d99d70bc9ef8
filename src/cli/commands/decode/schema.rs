//! Reads and compiles the file of `--json-schema`.

use std::path::Path;

use anyhow::Context;
use colibri_uring::runtime::grammar::{Constraint, Grammar, Grammars};
use colibri_uring::runtime::tokenizer::{Tokenizer, TokenizerError};

use crate::cli::args::prompt;

/// The constraint of the schema in `path`, for the model in `dir`.
pub fn constraint(
    path: &Path,
    tokenizer: Option<&Tokenizer>,
    dir: &Path,
    vocab: usize,
    stop: &[u32],
) -> anyhow::Result<Constraint> {
    let text = prompt::verbatim(path)?;
    let schema = serde_json::from_str(&text)
        .with_context(|| format!("the schema in {} is not JSON", path.display()))?;
    let tokenizer = tokenizer.ok_or_else(|| TokenizerError::Missing { dir: dir.into() })?;
    Grammars::new(tokenizer, vocab, stop)?
        .compile(&Grammar::JsonSchema(schema))
        .with_context(|| format!("cannot use the schema in {}", path.display()))
}
