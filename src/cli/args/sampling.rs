//! Flags that choose tokens.

use clap::Args;
use colibri_uring::runtime::sample::Sampling;

/// Chooses the next token. The order is repetition penalty, temperature, top-k, top-p, min-p.
#[derive(Debug, Args)]
pub struct SamplingArgs {
    /// Randomness: 0 always takes the most likely token
    ///
    /// chat takes the defaults of all sampling flags from the model's generation_config.json. Without it, and in decode,
    /// the temperature is 0, top-p 1, top-k 0, min-p 0 and the penalty 1.
    #[arg(long, value_name = "T", value_parser = temperature, help_heading = "Sampling")]
    temperature: Option<f32>,
    /// Sample from the most likely tokens that make up probability P
    #[arg(long, value_name = "P", value_parser = probability, help_heading = "Sampling")]
    top_p: Option<f32>,
    /// Sample from the K most likely tokens; 0 is all
    #[arg(long, value_name = "K", help_heading = "Sampling")]
    top_k: Option<usize>,
    /// Keep tokens with probability >= P x the most likely token's
    #[arg(long, value_name = "P", value_parser = share, hide_short_help = true, help_heading = "Sampling")]
    min_p: Option<f32>,
    /// Penalise tokens that occurred before; 1 is off
    ///
    /// Divides a positive logit by R, and multiplies a negative one by it.
    #[arg(long, value_name = "R", value_parser = penalty, hide_short_help = true, help_heading = "Sampling")]
    repetition_penalty: Option<f32>,
    /// Recent tokens that --repetition-penalty applies to; 0 is all
    ///
    /// The prompt counts.
    #[arg(
        long,
        value_name = "N",
        default_value_t = Sampling::default().repetition_window,
        hide_short_help = true,
        help_heading = "Sampling"
    )]
    repetition_window: usize,
    /// Random seed: the same seed samples the same tokens
    #[arg(long, value_name = "S", default_value_t = 0, help_heading = "Sampling")]
    seed: u64,
}

impl SamplingArgs {
    /// The given flags, and `defaults` for the rest.
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
