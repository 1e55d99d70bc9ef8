//! Selects the experts to pin: those that earlier runs used most.

use super::key::ExpertKey;
use super::usage::Usage;

/// Uses per token from which an expert displaces a slot for what the last token used. A token uses 23% to 41% of the experts
/// of the one before it (GLM-5.2), and the history may be of another subject.
const CERTAIN_RATE: f32 = 0.5;

/// The slabs that may be pinned.
#[derive(Clone, Debug)]
pub struct PinBudget {
    /// Slabs of each class beyond those that one token needs.
    pub by_class: Vec<usize>,
    /// Layers that have experts.
    pub layers: usize,
    /// Experts that a token uses in a layer.
    pub top_k: usize,
}

/// The experts to pin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pins {
    /// The hottest first.
    pub keys: Vec<ExpertKey>,
    /// Slabs that are left to each layer.
    pub per_layer_quota: usize,
}

impl PinBudget {
    /// Selects the hottest experts of all layers for a `share` (0 to 1) of the budget. The slots that one token's experts need in all
    /// layers are pinned only to experts that at least every other token used. `class` is the slab class of an expert;
    /// `None` for one that the model does not have.
    pub fn select(
        &self,
        history: &Usage,
        share: f64,
        class: impl Fn(ExpertKey) -> Option<u8>,
    ) -> Pins {
        let layers = self.layers.max(1);
        let share = share.clamp(0.0, 1.0);
        let mut left: Vec<usize> = (self.by_class.iter())
            .map(|slabs| (*slabs as f64 * share) as usize)
            .collect();
        let all: usize = self.by_class.iter().sum();
        let spare = all.saturating_sub(layers * self.top_k);
        let mut keys = Vec::new();
        for (layer, expert, rate) in history.hottest() {
            let key = ExpertKey { layer, expert };
            let Some(class) = class(key) else { continue };
            let left = &mut left[usize::from(class)];
            if *left > 0 && (keys.len() < spare || rate >= CERTAIN_RATE) {
                *left -= 1;
                keys.push(key);
            }
        }
        Pins {
            per_layer_quota: all.saturating_sub(keys.len()) / layers,
            keys,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(uses: &[(usize, u32, usize)]) -> Usage {
        let mut usage = Usage::new(vec![0, 1], 8, 1);
        for (layer, expert, times) in uses {
            (0..*times).for_each(|_| usage.record(*layer, &[*expert]));
        }
        usage
    }

    fn budget(slabs: usize) -> PinBudget {
        PinBudget {
            by_class: vec![slabs],
            layers: 2,
            top_k: 1,
        }
    }

    #[test]
    fn the_hottest_of_all_layers_are_pinned_up_to_the_share() {
        let history = history(&[(0, 1, 5), (0, 2, 4), (1, 3, 3), (1, 4, 1)]);
        let pins = budget(6).select(&history, 0.5, |_| Some(0));
        let keys = [(0, 1), (0, 2), (1, 3)].map(|(layer, expert)| ExpertKey { layer, expert });
        assert_eq!((&pins.keys[..], pins.per_layer_quota), (&keys[..], 1));
        let known = |key: ExpertKey| (key.expert != 1).then_some(0);
        assert_eq!(budget(6).select(&history, 0.5, known).keys[0], keys[1]);
    }

    #[test]
    fn slots_for_the_last_token_are_pinned_to_certain_experts_only() {
        let history = history(&[(0, 1, 4), (0, 2, 3), (1, 3, 4), (1, 4, 3)]);
        // Every slab is needed for one token's experts.
        let pins = budget(2).select(&history, 1.0, |_| Some(0));
        let of_every_other_token = [(0, 1), (1, 3)];
        let keys: Vec<_> = pins.keys.iter().map(|k| (k.layer, k.expert)).collect();
        assert_eq!(keys, of_every_other_token);
    }
}
