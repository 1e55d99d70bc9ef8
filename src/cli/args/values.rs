//! Parses the values of flags.

use std::str::FromStr;

use clap::ValueEnum;
use colibri_ring::{DirectMode, EngineKind};
use colibri_uring::model::draft;
use colibri_uring::quant::Activations;
use colibri_uring::quant::encode::Packing;
use colibri_uring::stream::Lookahead;

/// `--mirror-weights`: whole numbers, not all 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weights(pub Vec<u32>);

impl FromStr for Weights {
    type Err = String;

    fn from_str(text: &str) -> Result<Weights, String> {
        let weights = (text.split(','))
            .map(|weight| {
                weight
                    .trim()
                    .parse()
                    .map_err(|_| format!("{weight:?} is no weight: they are whole numbers"))
            })
            .collect::<Result<Vec<u32>, _>>()?;
        if weights.iter().all(|weight| *weight == 0) {
            return Err("one weight must be above 0".to_owned());
        }
        Ok(Weights(weights))
    }
}

/// `--engine`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EngineArg {
    /// io_uring if the kernel allows it, else pread
    Auto,
    /// io_uring, or fail
    Uring,
    /// pread on worker threads
    Pread,
}

/// `--direct`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DirectArg {
    /// O_DIRECT for the files that support it
    Auto,
    /// O_DIRECT for all files, or fail
    On,
    /// Read through the page cache, then drop the pages
    Off,
}

impl From<EngineArg> for EngineKind {
    fn from(arg: EngineArg) -> EngineKind {
        match arg {
            EngineArg::Auto => EngineKind::Auto,
            EngineArg::Uring => EngineKind::Uring,
            EngineArg::Pread => EngineKind::Pread,
        }
    }
}

impl From<DirectArg> for DirectMode {
    fn from(arg: DirectArg) -> DirectMode {
        match arg {
            DirectArg::Auto => DirectMode::Auto,
            DirectArg::On => DirectMode::On,
            DirectArg::Off => DirectMode::Off,
        }
    }
}

/// Parses a fraction from 0 to 1, or a percentage.
pub fn share(text: &str) -> Result<f64, String> {
    let (number, unit) = match text.strip_suffix('%') {
        Some(number) => (number, 0.01),
        None => (text, 1.0),
    };
    match number.trim().parse::<f64>() {
        Ok(n) if (0.0..=1.0).contains(&(n * unit)) => Ok(n * unit),
        _ => Err("a share is from 0 to 1, or from 0% to 100%".to_owned()),
    }
}

/// Parses the seconds of one measurement.
pub fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if (0.05..=86_400.0).contains(&s) => Ok(s),
        _ => Err("a time is a number of seconds from 0.05 to 86400".to_owned()),
    }
}

/// `--dense-bits` and `--expert-bits`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Bits {
    /// One scale per row
    #[value(name = "8")]
    Eight,
    /// One scale per 64 columns
    #[value(name = "4")]
    Four,
    /// One scale per row
    #[value(name = "2")]
    Two,
}

impl From<Bits> for Packing {
    fn from(bits: Bits) -> Packing {
        match bits {
            Bits::Eight => Packing::Int8,
            Bits::Four => Packing::Int4Group(64),
            Bits::Two => Packing::Int2,
        }
    }
}

/// `--activations`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ActivationsArg {
    /// f32
    Exact,
    /// Rounded to int8, one scale per 64 columns
    Int8,
}

impl From<ActivationsArg> for Activations {
    fn from(arg: ActivationsArg) -> Activations {
        match arg {
            ActivationsArg::Exact => Activations::Exact,
            ActivationsArg::Int8 => Activations::Int8,
        }
    }
}

/// `--dsa`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DsaArg {
    /// Sparse attention, as config.json says
    On,
    /// Dense attention
    Off,
}

/// `--lookahead`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookaheadArg {
    /// As many as pay off.
    Auto,
    Off,
    Experts(u32),
}

impl From<LookaheadArg> for Lookahead {
    fn from(arg: LookaheadArg) -> Lookahead {
        match arg {
            LookaheadArg::Auto => Lookahead::Auto,
            LookaheadArg::Off => Lookahead::Off,
            LookaheadArg::Experts(n) => Lookahead::Experts(n as usize),
        }
    }
}

impl FromStr for LookaheadArg {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<LookaheadArg, Self::Err> {
        match text {
            "auto" => Ok(LookaheadArg::Auto),
            "off" | "0" => Ok(LookaheadArg::Off),
            _ => text
                .parse()
                .map(LookaheadArg::Experts)
                .map_err(|_| "neither auto, off nor a number of experts"),
        }
    }
}

/// `--mtp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MtpArg(pub draft::Mode);

impl FromStr for MtpArg {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<MtpArg, Self::Err> {
        /// Drafts past this depth are never accepted.
        const MOST: usize = 16;
        let mode = match text {
            "auto" => draft::Mode::Auto,
            "off" | "0" => draft::Mode::Off,
            _ => match text.parse() {
                Ok(n) if n <= MOST => draft::Mode::Drafts(n),
                _ => return Err("neither auto, off nor a number of drafts up to 16"),
            },
        };
        Ok(MtpArg(mode))
    }
}

/// Token ids separated by white space or commas, like `3,14,159`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ids(pub Vec<u32>);

impl FromStr for Ids {
    type Err = String;

    fn from_str(text: &str) -> Result<Ids, String> {
        let mut ids = Vec::new();
        if text.trim().is_empty() {
            return Err("no token id".to_owned());
        }
        for part in text.split(',') {
            if part.trim().is_empty() {
                return Err(format!("token id {} is missing", ids.len() + 1));
            }
            for id in part.split_whitespace() {
                let parsed = id.parse();
                let at = ids.len() + 1;
                ids.push(parsed.map_err(|_| format!("{id:?} is no token id (number {at})"))?);
            }
        }
        Ok(Ids(ids))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_separated_by_commas_or_space() {
        assert_eq!("3,14,159".parse(), Ok(Ids(vec![3, 14, 159])));
        assert_eq!(" 3, 14\n159 ".parse(), Ok(Ids(vec![3, 14, 159])));
        assert_eq!("3,\n14 159".parse(), Ok(Ids(vec![3, 14, 159])));
        for (text, why) in [
            ("", "no token id"),
            (" \n", "no token id"),
            (",", "token id 1 is missing"),
            ("1,,2", "token id 2 is missing"),
            ("1 2, ,3", "token id 3 is missing"),
            ("1,2,", "token id 3 is missing"),
            (",1", "token id 1 is missing"),
            ("3,x", "\"x\" is no token id (number 2)"),
            ("-1", "\"-1\" is no token id (number 1)"),
            ("4294967296", "\"4294967296\" is no token id (number 1)"),
            ("3 1.5", "\"1.5\" is no token id (number 2)"),
        ] {
            assert_eq!(text.parse::<Ids>(), Err(why.to_owned()), "{text:?}");
        }
    }

    #[test]
    fn shares_are_fractions_or_percentages() {
        for (text, expected) in [
            ("0", 0.0),
            ("0.25", 0.25),
            ("25%", 0.25),
            ("100%", 1.0),
            ("1", 1.0),
        ] {
            assert_eq!(share(text), Ok(expected), "{text}");
        }
        for text in ["", "%", "-0.1", "1.5", "101%", "nan", "half"] {
            assert!(share(text).is_err(), "{text}");
        }
    }

    #[test]
    fn weights_are_whole_numbers_not_all_zero() {
        assert_eq!("2,0, 1".parse(), Ok(Weights(vec![2, 0, 1])));
        for text in ["", "0", "0,0", "1,", "1.5,1", "-1,2", "4294967296,1"] {
            assert!(text.parse::<Weights>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn drafts_are_auto_off_or_a_number() {
        for (text, mode) in [
            ("auto", draft::Mode::Auto),
            ("off", draft::Mode::Off),
            ("0", draft::Mode::Off),
            ("3", draft::Mode::Drafts(3)),
        ] {
            assert_eq!(text.parse(), Ok(MtpArg(mode)));
        }
        for text in ["", "17", "-1", "on", "1.5"] {
            assert!(text.parse::<MtpArg>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn lookahead_is_auto_off_or_a_number() {
        assert_eq!("auto".parse(), Ok(LookaheadArg::Auto));
        assert_eq!("0".parse(), Ok(LookaheadArg::Off));
        assert_eq!("6".parse(), Ok(LookaheadArg::Experts(6)));
        assert!("some".parse::<LookaheadArg>().is_err());
    }
}
