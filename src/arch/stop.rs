//! Reads stop tokens: `eos_token_id` of `config.json` and `generation_config.json`.

use serde_json::Value;

use super::ConfigError;
use super::keys::Keys;

/// The union of `eos_token_id` in all sources, each a number, a list or null; `default` where no source has the key.
pub fn ids<'a>(
    sources: impl Iterator<Item = &'a Keys<'a>>,
    default: &[u32],
) -> Result<Vec<u32>, ConfigError> {
    const KEY: &str = "eos_token_id";
    let (mut ids, mut given) = (Vec::new(), false);
    for keys in sources {
        let Some(value) = keys.find(KEY) else {
            continue;
        };
        given = true;
        let values = match value {
            Value::Null => continue,
            Value::Array(list) => list.as_slice(),
            value => std::slice::from_ref(value),
        };
        for value in values {
            // Ids beyond the vocabulary are harmless: they are never generated.
            ids.push(keys.check_int(KEY, value, 0, u64::from(u32::MAX))? as u32);
        }
    }
    if !given {
        ids.extend_from_slice(default);
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}
