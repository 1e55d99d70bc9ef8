//! Counts how often each expert was selected, in this run and in earlier ones, which a file in the model directory keeps.
//!
//! Counts age by the tokens that follow: a use counts half after [`HALF_LIFE`] of them. So a history of any length stays small,
//! and a new subject displaces the old one in time. The counts decide only which experts are cached, so a file that cannot
//! be used is a warning, never an error.

use std::path::Path;

use crate::arch::{Architecture, Part};
use crate::shards::Shards;

mod file;
mod history;

pub use file::{FILE_NAME, UsageError};
pub use history::History;

/// Tokens after which a use counts half.
pub const HALF_LIFE: f64 = 4096.0;

/// Identifies the model of a history. A model of another shape or content has another identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The layers that have experts, ascending; that for multi-token prediction among them, whether it is used or not.
    pub layers: Vec<usize>,
    /// Experts of each.
    pub experts: usize,
    /// Experts that a token uses in a layer.
    pub top_k: usize,
    /// Tensors of the model.
    pub tensors: u64,
    /// Bytes of all tensors.
    pub bytes: u64,
}

impl Identity {
    /// The identity of the model that `arch` describes, in these shards.
    pub fn of(shards: &Shards, arch: &Architecture) -> Identity {
        let mut layers: Vec<usize> = arch.sparse_layers().collect();
        let prediction = arch.num_hidden_layers();
        let has_prediction = || {
            arch.names.has(Part::DraftInput)
                && (shards.find(&arch.part_name(prediction, Part::DraftInput))).is_some()
        };
        if arch.prediction.is_none() && has_prediction() {
            layers.push(prediction);
        }
        Identity {
            layers,
            experts: arch.experts.count,
            top_k: arch.router.top_k,
            tensors: shards.len() as u64,
            bytes: (shards.iter()).fold(0, |sum, tensor| sum.saturating_add(tensor.bytes)),
        }
    }
}

/// Aged numbers of uses.
#[derive(Clone, Debug, PartialEq)]
pub struct Usage {
    layers: Vec<usize>,
    experts: usize,
    top_k: usize,
    /// [layers with experts][experts].
    counts: Vec<f32>,
    /// Tokens counted in each layer in this run.
    tokens: Vec<u64>,
    /// Runs that were counted.
    runs: u64,
}

impl Usage {
    /// No uses yet in these `layers`, which are ascending. A token uses `top_k` of the `experts` of each.
    pub fn new(layers: Vec<usize>, experts: usize, top_k: usize) -> Usage {
        Usage {
            counts: vec![0.0; layers.len() * experts],
            tokens: vec![0; layers.len()],
            runs: 0,
            layers,
            experts,
            top_k,
        }
    }

    fn row(&self, layer: usize) -> Option<usize> {
        self.layers.binary_search(&layer).ok()
    }

    /// Counts what the router of `layer` chose: [tokens, top_k].
    pub fn record(&mut self, layer: usize, chosen: &[u32]) {
        let Some(row) = self.row(layer) else { return };
        let tokens = (chosen.len() / self.top_k.max(1)) as u64;
        self.tokens[row] += tokens;
        let counts = &mut self.counts[row * self.experts..][..self.experts];
        age(counts, tokens, HALF_LIFE);
        for id in chosen {
            if let Some(count) = counts.get_mut(*id as usize) {
                *count += 1.0;
            }
        }
    }

    /// Uses of an expert, aged; 0 for one that the model does not have.
    pub fn count(&self, layer: usize, expert: u32) -> f32 {
        let row = self.row(layer).filter(|_| (expert as usize) < self.experts);
        row.map_or(0.0, |row| self.counts[row * self.experts + expert as usize])
    }

    /// Runs in a saved history; 0 for the current run.
    pub fn runs(&self) -> u64 {
        self.runs
    }

    /// Tokens counted since [`Usage::new`].
    pub fn tokens(&self) -> u64 {
        self.tokens.iter().copied().max().unwrap_or(0)
    }

    /// Every expert that was used, the hottest of all layers first: layer, id, and the share of tokens that used it.
    pub fn hottest(&self) -> Vec<(usize, u32, f32)> {
        let mut used: Vec<usize> = (0..self.counts.len()).collect();
        used.retain(|at| self.counts[*at] > 0.0);
        // Stable: what was used equally often stays in the order of the model.
        used.sort_by(|a, b| self.counts[*b].total_cmp(&self.counts[*a]));
        let uses = self
            .counts
            .chunks(self.experts.max(1))
            .map(|row| row.iter().sum());
        let tokens: Vec<f32> = uses.map(|uses: f32| uses / self.top_k as f32).collect();
        let name = |at: usize| {
            let (row, id) = (at / self.experts, at % self.experts);
            (self.layers[row], id as u32, self.counts[at] / tokens[row])
        };
        used.into_iter().map(name).collect()
    }

    /// Adds a later run. Both are of the same model, of which the run need not have used all layers.
    fn append(&mut self, run: &Usage) {
        age(&mut self.counts, run.tokens(), HALF_LIFE);
        let rows = self.counts.chunks_mut(self.experts.max(1));
        for (layer, counts) in self.layers.iter().zip(rows) {
            let Some(row) = run.row(*layer) else { continue };
            let new = &run.counts[row * run.experts..][..run.experts];
            counts
                .iter_mut()
                .zip(new)
                .for_each(|(count, new)| *count += new);
        }
        self.runs = self.runs.saturating_add(1);
    }
}

/// Counts as of `tokens` later.
pub(super) fn age(counts: &mut [f32], tokens: u64, half_life: f64) {
    let left = (-(tokens as f64) / half_life).exp2() as f32;
    counts.iter_mut().for_each(|count| *count *= left);
}

/// Reads the history of a model from the file in its directory, if there is one. A file that cannot be used is a
/// warning.
pub fn read(dir: &Path, model: &Identity) -> Option<Usage> {
    file::read(&dir.join(FILE_NAME), model).unwrap_or_else(|error| {
        tracing::warn!("{error}");
        None
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uses_are_counted_and_age() {
        let mut usage = Usage::new(vec![1, 3], 4, 2);
        usage.record(3, &[0, 2, 2, 1]);
        assert_eq!(usage.count(3, 2), 2.0);
        assert_eq!(
            (usage.count(3, 3), usage.count(1, 2), usage.count(2, 2)),
            (0.0, 0.0, 0.0)
        );
        assert_eq!(usage.count(3, 4), 0.0, "an unknown expert");
        let long = vec![3; 2 * HALF_LIFE as usize];
        usage.record(3, &long);
        assert!((usage.count(3, 2) - 1.0).abs() < 1e-6);
        assert_eq!(usage.tokens(), 2 + HALF_LIFE as u64);
    }

    #[test]
    fn a_new_subject_wins_in_time() {
        let mut history = Usage::new(vec![0], 8, 1);
        for (expert, runs) in [(1, 40), (2, 12)] {
            for _ in 0..runs {
                let mut run = Usage::new(vec![0], 8, 1);
                (0..500).for_each(|_| run.record(0, &[expert]));
                history.append(&run);
            }
        }
        let hottest: Vec<u32> = history.hottest().iter().map(|(_, id, _)| *id).collect();
        assert_eq!(hottest, [2, 1]);
        assert_eq!(history.runs(), 52);
        assert!(
            history
                .counts
                .iter()
                .all(|count| *count < 2.0 * HALF_LIFE as f32)
        );
    }

    #[test]
    fn a_run_may_leave_out_a_layer() {
        let mut history = Usage::new(vec![1, 2, 5], 2, 1);
        let mut run = Usage::new(vec![1, 5], 2, 1);
        run.record(5, &[1]);
        history.append(&run);
        let counts = [(1, 1), (2, 1), (5, 0), (5, 1)].map(|(l, id)| history.count(l, id));
        assert_eq!(counts, [0.0, 0.0, 0.0, 1.0]);
    }

    #[test]
    fn the_hottest_of_all_layers_come_first() {
        let mut usage = Usage::new(vec![2, 5], 3, 1);
        for (layer, ids) in [(2, &[0][..]), (5, &[1, 1, 1]), (2, &[2, 2])] {
            ids.iter().for_each(|id| usage.record(layer, &[*id]));
        }
        let hottest = usage.hottest();
        let names: Vec<_> = hottest.iter().map(|(l, id, _)| (*l, *id)).collect();
        assert_eq!(names, [(5, 1), (2, 2), (2, 0)]);
        assert_eq!(hottest[0].2, 1.0);
        assert!((hottest[2].2 - 0.333).abs() < 0.01);
    }
}
