//! Reads `generation_config.json`: how a model's authors recommend to sample it.

use std::io;
use std::path::Path;

use super::Sampling;
use crate::arch::{ConfigError, Keys, read_object};

/// The keys of sampling; `None` where a key is absent or null.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Generation {
    /// Whether tokens are drawn at all.
    pub do_sample: Option<bool>,
    /// As in [`Sampling`].
    pub temperature: Option<f32>,
    /// As in [`Sampling`].
    pub top_p: Option<f32>,
    /// As in [`Sampling`].
    pub top_k: Option<usize>,
    /// As in [`Sampling`].
    pub min_p: Option<f32>,
    /// As in [`Sampling`].
    pub repetition_penalty: Option<f32>,
}

impl Generation {
    /// Reads `generation_config.json` of a model directory. Without that file no key is set.
    ///
    /// # Errors
    /// [`ConfigError`], naming the file, the key, its value and what is allowed.
    pub fn load(dir: &Path) -> Result<Generation, ConfigError> {
        let path = dir.join("generation_config.json");
        let value = match read_object(&path) {
            Ok(value) => value,
            Err(ConfigError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(Generation::default());
            }
            Err(error) => return Err(error),
        };
        Generation::of(&Keys::new(&path, &value)?)
    }

    fn of(keys: &Keys) -> Result<Generation, ConfigError> {
        let given = |key: &str| keys.given(key).is_some();
        let number = |key, min, max| -> Result<Option<f32>, ConfigError> {
            let value = given(key).then(|| keys.float(key, min, max, None));
            Ok(value.transpose()?.map(|value| value as f32))
        };
        // The smallest normal numbers: what is above 0 as f64 shall be so as f32.
        let least = f64::from(f32::MIN_POSITIVE);
        Ok(Generation {
            do_sample: (given("do_sample"))
                .then(|| keys.bool("do_sample", false))
                .transpose()?,
            temperature: number("temperature", 0.0, 1e6)?,
            top_p: number("top_p", least, 1.0)?,
            top_k: (given("top_k"))
                .then(|| keys.int("top_k", 0, u64::from(u32::MAX), None))
                .transpose()?,
            min_p: number("min_p", 0.0, 1.0)?,
            repetition_penalty: number("repetition_penalty", least, 1e6)?,
        })
    }

    /// The sampling that these keys ask for. Greedy where `do_sample` is false or no key is set; temperature 1 where only
    /// `do_sample` is true.
    pub fn sampling(&self) -> Sampling {
        let default = Sampling::default();
        let temperature = match (self.do_sample, self.temperature) {
            (Some(false), _) | (None, None) => 0.0,
            (Some(true), None) => 1.0,
            (_, Some(temperature)) => temperature,
        };
        Sampling {
            temperature,
            top_p: self.top_p.unwrap_or(default.top_p),
            top_k: self.top_k.unwrap_or(default.top_k),
            min_p: self.min_p.unwrap_or(default.min_p),
            repetition_penalty: (self.repetition_penalty).unwrap_or(default.repetition_penalty),
            ..default
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn of(value: Value) -> Result<Generation, ConfigError> {
        let path = Path::new("generation_config.json");
        Generation::of(&Keys::new(path, &value)?)
    }

    #[test]
    fn says_how_to_sample() {
        let temperature = |value| of(value).unwrap().sampling().temperature;
        assert_eq!(temperature(json!({})), 0.0);
        assert_eq!(temperature(json!({"temperature": 0.7})), 0.7);
        assert_eq!(temperature(json!({"do_sample": true})), 1.0);
        let off = json!({"do_sample": false, "temperature": 0.7});
        assert_eq!(temperature(off), 0.0);
        let all = json!({"do_sample": true, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1,
            "repetition_penalty": 1.5, "seed": "ignored"});
        let expected = Sampling {
            temperature: 0.5,
            top_p: 0.9,
            top_k: 40,
            min_p: 0.1,
            repetition_penalty: 1.5,
            ..Sampling::default()
        };
        assert_eq!(of(all).unwrap().sampling(), expected);
        let nulls = json!({"do_sample": null, "temperature": null, "top_k": null});
        assert_eq!(of(nulls).unwrap(), Generation::default());
    }

    #[test]
    fn values_out_of_range_are_named() {
        for (key, value) in [
            ("temperature", json!(-1)),
            ("top_p", json!(0)),
            ("top_p", json!(1.5)),
            ("top_k", json!(-1)),
            ("min_p", json!("0.1")),
            ("repetition_penalty", json!(0)),
            ("do_sample", json!("yes")),
        ] {
            let error = of(json!({ key: value })).unwrap_err().to_string();
            let named = error.contains(key) && error.contains("generation_config.json");
            assert!(named, "{error}");
        }
    }

    #[test]
    fn a_missing_file_says_nothing() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Generation::load(dir.path()).unwrap(), Generation::default());
    }
}
