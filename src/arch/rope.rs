//! Reads the rotary position embedding: `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

use serde_json::Value;

use super::ConfigError;
use super::keys::Keys;

const MAX_THETA: f64 = 1e15;
const MAX_SCALE: f64 = 1e6;

/// Which values of a head are a rotated pair, of n rotated dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeLayout {
    /// Neighbours: 2i and 2i + 1.
    Interleaved,
    /// i and i + n/2.
    HalfSplit,
}

/// Rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Rotated dimensions of a head, the first ones; even.
    pub dims: usize,
    /// Pairs of them.
    pub layout: RopeLayout,
    /// How frequencies change for contexts that are longer than those of the first training; `None` for not at all.
    pub scaling: Option<Yarn>,
}

/// YaRN: low frequencies are divided by a factor, high ones stay, and those between are blended.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    /// Divisor of the low frequencies; at least 1.
    pub factor: f64,
    /// Context length of the first training, in tokens.
    pub original_length: usize,
    /// Frequencies with more rotations in the original length stay.
    pub beta_fast: f64,
    /// Frequencies with fewer rotations in the original length are divided by the whole factor.
    pub beta_slow: f64,
    /// Whether the blended range is widened to whole pairs.
    pub truncate: bool,
    /// Factor on cosine and sine.
    pub amplitude: f64,
    /// Factor on the attention scores of families that follow `mscale_all_dim`; 1 without the key.
    pub score_scale: f64,
}

impl Rope {
    /// Reads the keys for heads of `width` dimensions. Supported are the types `default` and `yarn`.
    pub(super) fn parse(
        keys: &Keys,
        width: usize,
        defaults: RopeDefaults,
    ) -> Result<Rope, ConfigError> {
        let sources = parameters(keys)?;
        let (mut theta, mut first) = (None, None);
        for (key, rope) in &sources {
            if theta.is_none() && rope.find("rope_theta").is_some() {
                theta = Some(rope.float("rope_theta", 1.0, MAX_THETA, None)?);
            }
            if rope.iter().next().is_none() {
                continue;
            }
            let scaling = scaling(keys, rope)?;
            if *first.get_or_insert_with(|| scaling.clone()) != scaling {
                return Err(keys.unsupported(key, "the scaling of rope_scaling".into()));
            }
        }
        Ok(Rope {
            theta: match theta {
                Some(theta) => theta,
                None => keys.float("rope_theta", 1.0, MAX_THETA, Some(defaults.theta))?,
            },
            dims: rotated(keys, &sources, width, defaults)?,
            layout: defaults.layout,
            scaling: first.flatten(),
        })
    }

    /// Factor on the attention scores: [`Yarn::score_scale`].
    pub(super) fn score_scale(&self) -> f64 {
        self.scaling.as_ref().map_or(1.0, |yarn| yarn.score_scale)
    }
}

/// What a family does where its config says nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct RopeDefaults {
    /// Pairs: no key sets them.
    pub layout: RopeLayout,
    /// Base of the frequencies.
    pub theta: f64,
    /// Share of a head that is rotated; `None` where it is the whole head, and any other share is refused.
    pub share: Option<f64>,
}

impl RopeDefaults {
    /// Of a family that rotates whole heads, with the most common base.
    pub const fn whole(layout: RopeLayout) -> RopeDefaults {
        RopeDefaults {
            layout,
            theta: 10_000.0,
            share: None,
        }
    }
}

/// The share of a head that is rotated.
const PARTIAL: &str = "partial_rotary_factor";

/// The objects that may hold the parameters, with their keys, in the order in which they are looked up.
fn parameters<'a>(keys: &Keys<'a>) -> Result<Vec<(&'static str, Keys<'a>)>, ConfigError> {
    let mut found = Vec::new();
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(value) = keys.given(key) else {
            continue;
        };
        let rope = keys.nested(key, value)?;
        found.push((key, by_layer_type(keys, key, &rope)?.unwrap_or(rope)));
    }
    Ok(found)
}

/// The rotated dimensions of a head of `width`.
fn rotated(
    keys: &Keys,
    sources: &[(&str, Keys)],
    width: usize,
    defaults: RopeDefaults,
) -> Result<usize, ConfigError> {
    let mut sources = sources.iter().map(|(_, rope)| rope).chain([keys]);
    let Some(default) = defaults.share else {
        sources.try_for_each(|source| source.only(PARTIAL, &1.0.into()))?;
        return Ok(width);
    };
    let share = match sources.find(|source| source.given(PARTIAL).is_some()) {
        Some(source) => source.float(PARTIAL, 0.0, 1.0, None)?,
        None => default,
    };
    let dims = (width as f64 * share) as usize;
    if dims == 0 || !dims.is_multiple_of(2) {
        let allowed = format!("a share of head_dim ({width}) that is an even number");
        return Err(keys.range(PARTIAL, allowed));
    }
    Ok(dims)
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

/// The scaling that `rope_type`, or the older `type`, asks for.
fn scaling(keys: &Keys, rope: &Keys) -> Result<Option<Yarn>, ConfigError> {
    for kind in ["rope_type", "type"] {
        return match rope.find(kind) {
            None => continue,
            Some(Value::String(s)) if s == "default" => Ok(None),
            Some(Value::String(s)) if s == "yarn" => yarn(keys, rope).map(Some),
            Some(Value::String(_)) => Err(rope.unsupported(kind, "default, yarn".into())),
            Some(_) => Err(rope.wrong_type(kind, "a string")),
        };
    }
    Ok(None)
}

fn yarn(keys: &Keys, rope: &Keys) -> Result<Yarn, ConfigError> {
    const LENGTH: &str = "original_max_position_embeddings";
    let max_length = u64::from(u32::MAX);
    // Null and 0 stand for the default, as in transformers.
    let number = |key: &str| -> Result<Option<f64>, ConfigError> {
        let given = rope
            .given(key)
            .map(|_| rope.float(key, 0.0, MAX_SCALE, None));
        Ok(given.transpose()?.filter(|x| *x != 0.0))
    };
    let longest = || keys.int("max_position_embeddings", 1, max_length, None);
    let original_length = if keys.given(LENGTH).is_some() {
        keys.int(LENGTH, 1, max_length, None)?
    } else if rope.given(LENGTH).is_some() {
        rope.int(LENGTH, 1, max_length, None)?
    } else {
        longest()?
    };
    let factor = match rope.given("factor") {
        Some(_) => rope.float("factor", 1.0, MAX_SCALE, None)?,
        None => (longest()? as f64 / original_length as f64).max(1.0),
    };
    let (mscale, all) = (number("mscale")?, number("mscale_all_dim")?);
    let amplitude = match (rope.given("attention_factor"), mscale, all) {
        (Some(_), ..) => rope.float("attention_factor", 0.0, MAX_SCALE, None)?,
        (None, Some(mscale), Some(all)) => magnitude(factor, mscale) / magnitude(factor, all),
        _ => magnitude(factor, 1.0),
    };
    let yarn = Yarn {
        factor,
        original_length,
        beta_fast: number("beta_fast")?.unwrap_or(32.0),
        beta_slow: number("beta_slow")?.unwrap_or(1.0),
        truncate: rope.bool("truncate", true)?,
        amplitude,
        score_scale: all.map_or(1.0, |all| magnitude(factor, all).powi(2)),
    };
    if yarn.beta_fast < yarn.beta_slow {
        return Err(rope.range("beta_fast", "at least beta_slow".into()));
    }
    Ok(yarn)
}

/// Growth of attention's scores with the logarithm of the factor.
fn magnitude(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 {
        return 1.0;
    }
    0.1 * mscale * factor.ln() + 1.0
}
