//! Flags of `decode`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};
use colibri_uring::model::draft::Mode;

use crate::cli::args::files::TraceArgs;
use crate::cli::args::kv::KvArgs;
use crate::cli::args::model::{DraftArgs, ModelArgs};
use crate::cli::args::prompt::PromptArgs;
use crate::cli::args::sampling::SamplingArgs;
use crate::cli::args::template::TemplateArgs;
use crate::cli::args::usage::WrongUsage;
use crate::cli::args::values::Ids;

/// Continue a prompt, and print each token as it is generated
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("input").args(["prompt", "prompt_file", "prompt_ids", "replay"])))]
#[command(after_long_help = "Examples:\n  \
    colibri-uring decode --model /models/GLM-5.2 --ram 24GiB -n 64 --prompt \"The hummingbird\"\n  \
    colibri-uring decode --model DIR --prompt-ids 3,14,159 -n 16 --json\n  \
    colibri-uring decode --model DIR --prompt-file prompt.txt --temperature 0.8 --top-p 0.95 --seed 7\n  \
    git log --oneline | colibri-uring decode --model DIR --chat --system \"Write release notes.\"\n  \
    colibri-uring decode --model DIR --kv talk.kv --prompt-file whole-talk.txt   # computes only the new part\n  \
    colibri-uring decode --model DIR --kv story.kv --kv-append --prompt \" Then\"   # continues the story")]
pub struct DecodeArgs {
    #[command(flatten)]
    pub text: PromptArgs,
    /// Token ids to continue, like 3,14,159
    #[arg(long, value_name = "IDS", help_heading = "Prompt")]
    pub prompt_ids: Option<Ids>,
    /// File of token ids to feed one at a time, whatever the model would choose
    ///
    /// The first 4 ids are the prompt.
    #[arg(
        long,
        value_name = "FILE",
        hide_short_help = true,
        help_heading = "Prompt"
    )]
    pub replay: Option<PathBuf>,
    /// Put the prompt into the model's chat template, as one message
    #[arg(long, conflicts_with_all = ["prompt_ids", "replay", "kv_append"], help_heading = "Prompt")]
    pub chat: bool,
    #[command(flatten)]
    pub template: TemplateArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub draft: DraftArgs,
    /// Print the demo model's own prompt and continue it, without reading a prompt.
    #[arg(skip)]
    pub demonstrate: bool,
    /// Tokens to generate, at most [default: 128, or as many as fit]
    #[arg(
        short,
        value_name = "N",
        conflicts_with = "replay",
        help_heading = "Sampling"
    )]
    pub n: Option<usize>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Generate JSON that the schema in this file accepts
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "replay",
        help_heading = "Sampling"
    )]
    pub json_schema: Option<PathBuf>,
    #[command(flatten)]
    pub kv: KvArgs,
    /// Print one JSON object at the end
    #[arg(long, help_heading = "Output")]
    pub json: bool,
    #[command(flatten)]
    pub traces: TraceArgs,
    /// Record the routers' outputs for `simulate --routing`; disables drafts
    #[arg(
        long,
        value_name = "FILE",
        hide_short_help = true,
        help_heading = "Output"
    )]
    pub save_routing: Option<PathBuf>,
}

impl DecodeArgs {
    /// Refuses flags that only `--chat` uses.
    pub fn check_chat(&self) -> Result<(), WrongUsage> {
        let template = &self.template;
        let flags = [
            ("--system", template.system.is_some()),
            ("--chat-template", template.chat_template.is_some()),
            ("--template-var", !template.template_var.is_empty()),
        ];
        match flags.iter().find(|(_, given)| *given && !self.chat) {
            Some((flag, _)) => Err(WrongUsage(format!("{flag} needs --chat"))),
            None => Ok(()),
        }
    }

    /// How many tokens to draft. A replay and a recording of routers take one token per pass.
    pub fn drafts(&self) -> Mode {
        let one_at_a_time = match (&self.replay, &self.save_routing) {
            (Some(_), _) => "--replay",
            (None, Some(_)) => "--save-routing",
            (None, None) => return self.draft.mtp.0,
        };
        if matches!(self.draft.mtp.0, Mode::Drafts(_)) {
            tracing::warn!("{one_at_a_time} takes one token per pass: --mtp is ignored");
        }
        Mode::Off
    }
}
