//! What decode and score need of a loaded model.

use super::stats::EngineStats;

/// A model with a context, loaded and ready.
pub trait Session {
    /// Number of token ids.
    fn vocab(&self) -> usize;

    /// Ids that end a text.
    fn stop_ids(&self) -> Vec<u32>;

    /// Appends `ids` to the context and returns the logits [vocabulary] after the last; `None` when interrupted.
    fn feed(&mut self, ids: &[u32]) -> anyhow::Result<Option<Vec<f32>>>;

    /// As `feed`, but calls `each` with the logits after every id, in order; false when interrupted.
    fn feed_each(&mut self, ids: &[u32], each: &mut dyn FnMut(&[f32])) -> anyhow::Result<bool>;

    /// What reading and computing has cost since the model was loaded.
    fn stats(&mut self) -> EngineStats;
}
