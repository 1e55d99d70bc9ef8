//! `tokenize` and `detokenize`: text to token ids and back.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use colibri_uring::runtime::tokenizer::{Tokenizer, TokenizerError};
use serde::Serialize;

use crate::cli::args::prompt::{self, PromptArgs};
use crate::cli::args::usage::WrongUsage;
use crate::cli::args::values::Ids;
use crate::cli::output::printer::{print_json, to_stdout};

/// Print the token ids of a text
#[derive(Debug, Args)]
#[command(
    after_long_help = "Example:\n  colibri-uring tokenize --model DIR --prompt \"The hummingbird\""
)]
pub struct TokenizeArgs {
    /// Directory with tokenizer.json
    #[arg(
        short,
        long,
        value_name = "DIR",
        env = "COLIBRI_MODEL",
        help_heading = "Model"
    )]
    pub model: Vec<PathBuf>,
    #[command(flatten)]
    text: PromptArgs,
    /// Print one JSON object with ids and the text of each
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// Print the text of token ids
#[derive(Debug, Args)]
#[command(after_long_help = "Example:\n  colibri-uring detokenize --model DIR --ids 3,14,159")]
pub struct DetokenizeArgs {
    /// Directory with tokenizer.json
    #[arg(
        short,
        long,
        value_name = "DIR",
        env = "COLIBRI_MODEL",
        help_heading = "Model"
    )]
    pub model: Vec<PathBuf>,
    /// Token ids, like 3,14,159
    #[arg(long, value_name = "IDS", help_heading = "Prompt")]
    ids: Ids,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// The JSON object of `tokenize`.
#[derive(Debug, Serialize)]
struct Tokens {
    ids: Vec<u32>,
    /// What each id adds to the text. A part of a character is empty, and the last part has the character.
    texts: Vec<String>,
}

/// The JSON object of `detokenize`.
#[derive(Debug, Serialize)]
struct Text {
    text: String,
}

fn tokenizer(model: &[PathBuf]) -> anyhow::Result<Tokenizer> {
    let dir = &model[0];
    let found = Tokenizer::load(dir)?;
    Ok(found.ok_or_else(|| TokenizerError::Missing { dir: dir.clone() })?)
}

pub fn tokenize(args: &TokenizeArgs) -> anyhow::Result<ExitCode> {
    let tokenizer = tokenizer(&args.model)?;
    let Some(text) = args.text.read()? else {
        bail!(WrongUsage(
            "tokenize needs --prompt or --prompt-file".into()
        ));
    };
    let ids = prompt::encode(&tokenizer, &args.model[0], &text)?;
    if !args.json {
        let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
        to_stdout(|out| writeln!(out, "{}", ids.join(",")))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut stream = tokenizer.stream();
    let texts = ids.iter().map(|id| stream.push(*id));
    let texts = texts.collect::<Result<_, _>>()?;
    print_json(&Tokens { ids, texts })?;
    Ok(ExitCode::SUCCESS)
}

pub fn detokenize(args: &DetokenizeArgs) -> anyhow::Result<ExitCode> {
    let text = tokenizer(&args.model)?.decode(&args.ids.0)?;
    match args.json {
        true => print_json(&Text { text })?,
        false => to_stdout(|out| writeln!(out, "{text}"))?,
    }
    Ok(ExitCode::SUCCESS)
}
