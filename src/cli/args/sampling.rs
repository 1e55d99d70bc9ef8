//! The flags that say how tokens are chosen.

use clap::Args;
use colibri_uring::runtime::sample::Sampling;

/// How the next token is chosen. In this order: repetition penalty, temperature, top-k, top-p, min-p.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// 0 takes the likeliest token; higher is more varied [default: decode 0; chat what the model's generation_config.json says, or 0]
    #[arg(long, value_name = "T", value_parser = temperature, env = "COLIBRI_TEMPERATURE")]
    temperature: Option<f32>,
    /// Draw from the likeliest tokens that have this probability together [default: as --temperature, or 1]
    #[arg(long, value_name = "P", value_parser = probability, env = "COLIBRI_TOP_P")]
    top_p: Option<f32>,
    /// Draw from this many of the likeliest tokens; 0 is all [default: as --temperature, or 0]
    #[arg(long, value_name = "K", env = "COLIBRI_TOP_K")]
    top_k: Option<usize>,
    /// Draw from tokens at least this share as likely as the likeliest; 0 is all [default: as --temperature, or 0]
    #[arg(long, value_name = "P", value_parser = share, env = "COLIBRI_MIN_P")]
    min_p: Option<f32>,
    /// Make tokens less likely that were there already: their logits are divided by this if positive, else multiplied; 1 is
    /// off [default: as --temperature, or 1]
    #[arg(long, value_name = "R", value_parser = penalty, env = "COLIBRI_REPETITION_PENALTY")]
    repetition_penalty: Option<f32>,
    /// How many of the last tokens, prompt included, --repetition-penalty looks at; 0 is all
    #[arg(
        long,
        value_name = "N",
        default_value_t = Sampling::default().repetition_window,
        env = "COLIBRI_REPETITION_WINDOW"
    )]
    repetition_window: usize,
    /// The same seed draws the same tokens
    #[arg(long, value_name = "S", default_value_t = 0, env = "COLIBRI_SEED")]
    seed: u64,
}

impl SamplingArgs {
    /// What is asked for, and where nothing is, what `defaults` say.
    pub fn over(&self, defaults: Sampling) -> Sampling {
        Sampling {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: (self.repetition_penalty).unwrap_or(defaults.repetition_penalty),
            repetition_window: self.repetition_window,
            seed: self.seed,
        }
    }
}

fn number(text: &str, allowed: impl Fn(f32) -> bool, message: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(x) if x.is_finite() && allowed(x) => Ok(x),
        _ => Err(message.to_owned()),
    }
}

fn temperature(text: &str) -> Result<f32, String> {
    number(text, |t| t >= 0.0, "a temperature is a number, 0 or more")
}

fn probability(text: &str) -> Result<f32, String> {
    let message = "a probability is more than 0 and at most 1";
    number(text, |p| p > 0.0 && p <= 1.0, message)
}

fn share(text: &str) -> Result<f32, String> {
    let message = "a share is from 0 to 1";
    number(text, |p| (0.0..=1.0).contains(&p), message)
}

fn penalty(text: &str) -> Result<f32, String> {
    let message = "a penalty is more than 0 and at most 100; 1 is off";
    number(text, |r| r > 0.0 && r <= 100.0, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_checked_for_their_range() {
        assert_eq!(temperature("0"), Ok(0.0));
        assert_eq!(probability("1"), Ok(1.0));
        assert_eq!(share("0"), Ok(0.0));
        assert_eq!(penalty("1.1"), Ok(1.1));
        for text in ["", "x", "nan", "inf", "-1", "1e39"] {
            for parse in [temperature, probability, share, penalty] {
                assert!(parse(text).is_err(), "{text}");
            }
        }
        assert!(probability("0").is_err() && probability("1.5").is_err());
        assert!(share("1.01").is_err());
        assert!(penalty("0").is_err() && penalty("101").is_err());
    }
}
