//! What the store tells those who want to see what it does: what routers said, and what was read when.

use colibri_ring::record::Record;
use colibri_ring::{SlabId, SlabState};

use super::ExpertStore;
use crate::stream::demand_trace::DemandTrace;
use crate::stream::routing::Recorder;

impl ExpertStore {
    /// From now on, tells `recorder` what routers say.
    pub fn record_routing(&mut self, recorder: Recorder) {
        self.recorder = Some(recorder);
    }

    /// Ends [`ExpertStore::record_routing`].
    pub fn take_recorder(&mut self) -> Option<Recorder> {
        self.recorder.take()
    }

    fn is_reading(&self) -> bool {
        let slabs = 0..self.engine.slabs() as u32;
        let mut states = slabs.map(|slab| self.engine.state(SlabId(slab)));
        states.any(|state| matches!(state, SlabState::Filling(_)))
    }

    /// Takes what [`Options::record`](colibri_ring::Options::record) asked for: when chunks were read, and what they and the demands were.
    pub fn take_record(&mut self) -> Option<(Record, DemandTrace)> {
        let log = self.log.take()?;
        // Guesses that nobody needed may be under way.
        self.give_up_demands();
        self.prefetches.clear();
        while self.is_reading() {
            let event = self.engine.wait().ok()?;
            if let Err(error) = self.handle(event) {
                tracing::debug!("{error}");
            }
        }
        Some((self.engine.take_record()?, log))
    }
}
