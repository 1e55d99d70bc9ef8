//! Reads the rotary position embedding: `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

use serde_json::Value;

use super::ConfigError;
use super::keys::Keys;

/// Rotary position embedding of interleaved pairs (2i, 2i + 1), without scaling.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Rotated dimensions of a head; even.
    pub dims: usize,
}

impl Rope {
    /// Reads the keys. Only the type `default` is supported.
    pub(super) fn parse(keys: &Keys, dims: usize) -> Result<Rope, ConfigError> {
        Ok(Rope {
            theta: theta(keys)?,
            dims,
        })
    }
}

/// The parameters of all layer types, where they are given for each; they must be equal.
fn by_layer_type<'a>(
    keys: &Keys<'a>,
    key: &str,
    rope: &Keys<'a>,
) -> Result<Option<Keys<'a>>, ConfigError> {
    let mut types = rope.iter().filter(|(_, value)| value.is_object());
    let Some((name, first)) = types.next() else {
        return Ok(None);
    };
    let differs = rope.iter().any(|(_, value)| value != first);
    if differs {
        return Err(keys.unsupported(key, "equal parameters for all layer types".into()));
    }
    rope.nested(name, first).map(Some)
}

/// `rope_scaling` or `rope_parameters`, then `rope_theta`, then 10000.
fn theta(keys: &Keys) -> Result<f64, ConfigError> {
    const MAX_THETA: f64 = 1e15;
    keys.only("partial_rotary_factor", &1.0.into())?;
    let mut theta = None;
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(value) = keys.given(key) else {
            continue;
        };
        let rope = keys.nested(key, value)?;
        let rope = by_layer_type(keys, key, &rope)?.unwrap_or(rope);
        for kind in ["rope_type", "type"] {
            match rope.find(kind) {
                None => continue,
                Some(Value::String(s)) if s == "default" => {}
                Some(Value::String(_)) => return Err(rope.unsupported(kind, "default".into())),
                Some(_) => return Err(rope.wrong_type(kind, "a string")),
            }
            break;
        }
        rope.only("partial_rotary_factor", &1.0.into())?;
        if theta.is_none() && rope.find("rope_theta").is_some() {
            theta = Some(rope.float("rope_theta", 1.0, MAX_THETA, None)?);
        }
    }
    match theta {
        Some(theta) => Ok(theta),
        None => keys.float("rope_theta", 1.0, MAX_THETA, Some(10_000.0)),
    }
}
