//! Experts that stay because earlier runs used them most.

use colibri_ring::Priority;

use super::{ExpertStore, Stage, StreamError};
use crate::stream::cache::Key;
use crate::stream::usage::Usage;

impl ExpertStore {
    /// Keeps the experts that `history` found to be the hottest in a `share` (0 to 1) of the slabs that are not needed for the
    /// work itself, but for slots that would hold what the last token used: these are given up for an expert only that is used as often
    /// as such a slot. They are read whenever the drives have nothing else to do, and stay. Comes before the first demand.
    ///
    /// # Errors
    /// When a tensor's place in its file is impossible.
    pub fn pin(&mut self, history: &Usage, share: f64) -> Result<(), StreamError> {
        /// A token uses 23% to 41% of the experts of the one before it (GLM-5.2), and the history may be of another subject.
        const SURE: f32 = 0.5;
        let kept = |kept: &usize| (*kept as f64 * share.clamp(0.0, 1.0)) as usize;
        let mut room: Vec<usize> = self.kept.iter().map(kept).collect();
        let mut pinned = Vec::new();
        let layers = self.files.moe_layers().max(1);
        let kept: usize = self.kept.iter().sum();
        let spare = kept.saturating_sub(layers * self.top_k);
        for (layer, expert, rate) in history.hottest() {
            // The run may leave out a layer.
            if self.files.catalog.expert(layer, expert).is_none() {
                continue;
            }
            let key = Key { layer, expert };
            let room = &mut room[usize::from(self.files.class(key))];
            if *room > 0 && (pinned.len() < spare || rate >= SURE) {
                *room -= 1;
                pinned.push(key);
            }
        }
        let rest = kept.saturating_sub(pinned.len()) / layers;
        self.cache.pin(&pinned, self.share.min(rest));
        self.stats.pinned = pinned.len() as u64;
        self.preloads = pinned.into();
        self.start_preloads()?;
        self.engine.flush();
        Ok(())
    }

    /// Starts the reads of pinned experts that nobody has demanded yet, a few at a time, in slabs that nobody else waits for.
    pub(super) fn start_preloads(&mut self) -> Result<(), StreamError> {
        /// Enough to keep the drives busy while an attention is computed.
        const AT_ONCE: usize = 8;
        let waiting = self.demands.iter().any(|d| d.stage == Stage::NoSlab);
        if waiting || !self.prefetches.is_empty() {
            return Ok(());
        }
        while self.preloading.len() < AT_ONCE
            && let Some(&key) = self.preloads.front()
        {
            if self.cache.slab(key).is_none() {
                let Some(slab) = self.start(key, Priority::Preload)? else {
                    break;
                };
                self.preloading.push(slab);
            }
            self.preloads.pop_front();
        }
        Ok(())
    }
}
