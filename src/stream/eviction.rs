//! Ranks cached experts: the one of the least worth is evicted.

use std::fmt::Debug;

use super::key::ExpertKey;
use super::usage::age;

/// Ranks the experts of a [`Cache`](super::cache::Cache). The policy is chosen when the cache is made.
pub trait Eviction: Debug {
    /// What losing an expert costs.
    type Worth: Ord;

    /// `tokens` tokens begin to use the experts `chosen` of `layer`, each listed once for every token that uses it. `tick` is the time:
    /// uses of this pass have later ones.
    fn begin_pass(&mut self, layer: usize, chosen: &[u32], tokens: usize, tick: u64);

    /// The worth of an expert that was last used at `last_use`.
    fn worth(&self, key: ExpertKey, last_use: u64) -> Self::Worth;

    /// Whether the experts of all layers compete for all slabs, without quotas.
    fn is_pooled(&self) -> bool {
        false
    }
}

/// Evicts the least frequently used expert, ties to the least recently used. Experts of the layer's last pass are evicted
/// last, because a token repeats much of what the one before it used. Uses count half after the half-life.
#[derive(Debug)]
pub struct ProtectedLfu {
    half_life: f64,
    experts: usize,
    /// Of each layer, the tick at which its last pass began.
    pass: Vec<u64>,
    /// Aged uses, by `layer * experts + expert`.
    uses: Vec<f32>,
}

impl ProtectedLfu {
    /// Half-life in tokens.
    pub const HALF_LIFE: f64 = 128.0;

    /// No uses yet of `experts` experts in each of `layers` layers.
    pub fn new(layers: usize, experts: usize, half_life: f64) -> ProtectedLfu {
        ProtectedLfu {
            half_life,
            experts,
            pass: vec![0; layers],
            uses: vec![0.0; layers * experts],
        }
    }

    /// Adds uses of an expert, which age like the others.
    pub fn add_uses(&mut self, key: ExpertKey, uses: f32) {
        self.uses[key.layer * self.experts + key.expert as usize] += uses;
    }

    /// The aged uses of an expert. They are not negative, so their bits are in their order.
    pub fn frequency(&self, key: ExpertKey) -> u32 {
        self.uses[key.layer * self.experts + key.expert as usize].to_bits()
    }
}

impl Eviction for ProtectedLfu {
    type Worth = (bool, u32, u64);

    fn begin_pass(&mut self, layer: usize, chosen: &[u32], tokens: usize, tick: u64) {
        self.pass[layer] = tick;
        let uses = &mut self.uses[layer * self.experts..][..self.experts];
        age(uses, tokens as u64, self.half_life);
        for id in chosen {
            uses[*id as usize] += 1.0;
        }
    }

    fn worth(&self, key: ExpertKey, last_use: u64) -> (bool, u32, u64) {
        match last_use >= self.pass[key.layer] {
            true => (true, 0, last_use),
            false => (false, self.frequency(key), last_use),
        }
    }
}
