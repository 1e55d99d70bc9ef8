//! Flags that save a context in a file.

use std::path::PathBuf;

use clap::Args;
use clap::builder::FalseyValueParser;

/// Where `decode` saves its context.
#[derive(Debug, Args)]
pub struct KvArgs {
    /// Save the context in this file, and reuse its common prefix with the prompt
    ///
    /// The prompt is the whole text. What follows it in the file, like an earlier answer, is replaced. --kv-append
    /// continues the text instead. The file decides speed, never the result.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "replay",
        env = "COLIBRI_KV",
        help_heading = "Saved context"
    )]
    pub kv: Option<PathBuf>,
    /// Append the prompt, if any, to the text in the file of --kv, and continue it
    #[arg(long, requires = "kv", help_heading = "Saved context")]
    pub kv_append: bool,
    /// Start the file of --kv anew
    ///
    /// It replaces any KV file when the run is complete.
    #[arg(
        long,
        requires = "kv",
        hide_short_help = true,
        help_heading = "Saved context"
    )]
    pub kv_reset: bool,
}

/// Where `chat` saves the conversation.
#[derive(Debug, Args)]
pub struct ChatKvArgs {
    /// Save the conversation in this file, and continue the one in it
    ///
    /// By default each model has a file in ~/.local/state/colibri-uring. A chat whose input is redirected saves nothing
    /// by default.
    #[arg(
        long,
        value_name = "FILE",
        env = "COLIBRI_KV",
        help_heading = "Saved context"
    )]
    pub kv: Option<PathBuf>,
    /// Save nothing
    #[arg(long, conflicts_with = "kv", env = "COLIBRI_NO_KV", value_parser = FalseyValueParser::new(), help_heading = "Saved context")]
    pub no_kv: bool,
    /// Start the saved conversation anew; the first answer replaces the old one
    #[arg(long, conflicts_with = "no_kv", help_heading = "Saved context")]
    pub kv_reset: bool,
}
