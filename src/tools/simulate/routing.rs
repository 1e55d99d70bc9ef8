//! Generates synthetic routing: random, with the regularities that were measured on real models.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::arch::Architecture;
use crate::stream::routing::RoutingEvent;

/// How regular synthetic routing is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutingParams {
    /// Share of a token's experts that the token before also used.
    pub repeated: f64,
    /// Share of a layer's experts that the early prediction finds, made at the router of the layer before.
    pub early: f64,
    /// Share that the late prediction finds, made at the end of the layer before.
    pub late: f64,
}

impl Default for RoutingParams {
    /// GLM-5.2: 23% to 41% are repeated; 72% and 84% are predicted.
    fn default() -> RoutingParams {
        RoutingParams {
            repeated: 0.3,
            early: 0.72,
            late: 0.84,
        }
    }
}

struct Rng(ChaCha8Rng);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        ((u64::from(self.0.next_u32()) * n as u64) >> 32) as usize
    }

    fn chance(&mut self, p: f64) -> bool {
        f64::from(self.0.next_u32()) < p * 2f64.powi(32)
    }

    /// An expert that is not among `taken`.
    fn other(&mut self, experts: usize, taken: &[u32]) -> u32 {
        loop {
            let id = self.below(experts) as u32;
            if !taken.contains(&id) {
                return id;
            }
        }
    }
}

/// Routing of `tokens` tokens, one at a time. The same seed gives the same routing.
pub fn synthetic_routing(
    arch: &Architecture,
    tokens: usize,
    params: RoutingParams,
    seed: u64,
) -> Vec<RoutingEvent> {
    let mut rng = Rng(ChaCha8Rng::seed_from_u64(seed));
    let (experts, top_k) = (arch.experts.count, arch.router.top_k);
    let layers: Vec<usize> = arch.sparse_layers().collect();
    let mut chosen: Vec<Vec<u32>> = vec![Vec::new(); layers.len()];
    let mut events = Vec::new();
    for _ in 0..tokens {
        for (ids, _) in chosen.iter_mut().zip(&layers) {
            let before = std::mem::take(ids);
            ids.extend(before.iter().filter(|_| rng.chance(params.repeated)));
            while ids.len() < top_k {
                let taken: Vec<u32> = ids.iter().chain(&before).copied().collect();
                // A token may use more than half of the experts.
                let taken = if taken.len() < experts { &taken } else { &*ids };
                let id = rng.other(experts, taken);
                ids.push(id);
            }
        }
        for (i, &layer) in layers.iter().enumerate() {
            events.push(predicted(layer, &chosen[i], params.late, experts, &mut rng));
            let experts_of_layer = chosen[i].clone();
            events.push(RoutingEvent::Routed {
                layer,
                experts: experts_of_layer,
            });
            if let Some(&next) = layers.get(i + 1) {
                events.push(predicted(
                    next,
                    &chosen[i + 1],
                    params.early,
                    experts,
                    &mut rng,
                ));
            }
            events.push(RoutingEvent::Computed { layer });
        }
    }
    events
}

/// A prediction that finds a share `found` of the `chosen` experts; its first candidates are more often right.
fn predicted(
    layer: usize,
    chosen: &[u32],
    found: f64,
    experts: usize,
    rng: &mut Rng,
) -> RoutingEvent {
    let ranks = chosen.len().min(experts);
    let mut ranked: Vec<u32> = Vec::with_capacity(ranks);
    for (rank, &id) in chosen.iter().enumerate() {
        // Falls evenly from nearly certain at the first rank, with `found` as the mean.
        let position = (rank as f64 + 0.5) / ranks as f64;
        let chance = found + (1.0 - found).min(found) * (1.0 - 2.0 * position);
        if rng.chance(chance) || ranked.len() + chosen.len() >= experts {
            ranked.push(id);
        } else {
            let taken: Vec<u32> = ranked.iter().chain(chosen).copied().collect();
            ranked.push(rng.other(experts, &taken));
        }
    }
    RoutingEvent::Predicted {
        layer,
        ranks,
        experts: ranked,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(experts: usize, top_k: usize) -> Architecture {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/f32-smallest");
        let mut arch = Architecture::load(std::path::Path::new(path)).unwrap();
        (arch.experts.count, arch.router.top_k) = (experts, top_k);
        arch
    }

    #[test]
    fn it_is_as_regular_as_requested() {
        let params = RoutingParams::default();
        let events = synthetic_routing(&model(64, 8), 400, params, 1);
        let layer = model(64, 8).sparse_layers().next().unwrap();
        let (mut before, mut predicted): (Vec<u32>, Vec<u32>) = Default::default();
        let (mut repeated, mut late, mut all) = (0, 0, 0);
        for event in &events {
            match event {
                RoutingEvent::Predicted {
                    layer: l, experts, ..
                } if *l == layer => predicted.clone_from(experts),
                RoutingEvent::Routed { layer: l, experts } if *l == layer => {
                    assert_eq!(experts.len(), 8);
                    repeated += experts.iter().filter(|id| before.contains(id)).count();
                    late += experts.iter().filter(|id| predicted.contains(id)).count();
                    all += 8;
                    before.clone_from(experts);
                }
                _ => {}
            }
        }
        let share = |n: usize| n as f64 / f64::from(all);
        assert!(
            (share(repeated) - params.repeated).abs() < 0.05,
            "{}",
            share(repeated)
        );
        assert!((share(late) - params.late).abs() < 0.05, "{}", share(late));
    }

    #[test]
    fn a_token_may_use_all_experts() {
        for (experts, top_k) in [(4, 4), (5, 4), (1, 1)] {
            for event in synthetic_routing(&model(experts, top_k), 20, RoutingParams::default(), 2)
            {
                let mut ids = match event {
                    RoutingEvent::Predicted { experts, .. }
                    | RoutingEvent::Routed { experts, .. } => experts,
                    _ => continue,
                };
                ids.sort_unstable();
                ids.dedup();
                assert_eq!(ids.len(), top_k, "all different");
            }
        }
    }
}
