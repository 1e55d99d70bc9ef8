//! Reads experts into slabs and hands out their matrices.

use colibri_ring::{Engine, Priority, SlabId, SlabState};

use crate::quant::{Activations, Matrix};
use crate::stream::cache::Cache;
use crate::stream::catalog::{Location, Projection};
use crate::stream::demand_trace::DemandTrace;
use crate::stream::error::StreamError;
use crate::stream::files::{ExpertFiles, scales_range, weights_range};
use crate::stream::key::ExpertKey;

/// The slabs of the engine, and which expert is in each.
#[derive(Debug)]
pub(super) struct ExpertSlabs {
    pub engine: Engine,
    pub files: ExpertFiles,
    pub cache: Cache,
    /// Which expert each read brings, if that is recorded.
    pub trace: Option<DemandTrace>,
}

/// A read that was started.
pub(super) struct StartedRead {
    pub slab: SlabId,
    /// The slab held another expert.
    pub evicted: bool,
}

impl ExpertSlabs {
    /// The expert in a slab.
    ///
    /// # Panics
    /// When there is none: lists of slabs forget a slab together with the cache.
    pub fn key(&self, slab: SlabId) -> ExpertKey {
        self.cache.key(slab).expect("the slab holds an expert")
    }

    pub fn is_full(&self, slab: SlabId) -> bool {
        self.engine.state(slab) == SlabState::Full
    }

    /// Whether any read is under way.
    pub fn is_reading(&self) -> bool {
        let mut slabs = (0..self.engine.slabs() as u32).map(SlabId);
        slabs.any(|slab| matches!(self.engine.state(slab), SlabState::Filling(_)))
    }

    /// Starts the read of an expert, evicting another one if no slab is free. `None` when all slabs of its class are busy.
    pub fn start(
        &mut self,
        key: ExpertKey,
        priority: Priority,
    ) -> Result<Option<StartedRead>, StreamError> {
        let layout = self.files.layout(key)?;
        let class = self.files.class(key);
        let Some((slab, evicted)) = self.cache.make_room(class, key.layer) else {
            return Ok(None);
        };
        if evicted {
            self.engine.release(slab);
        }
        self.cache.insert(key, slab);
        let number = self.engine.read(slab, priority, layout);
        if let Some(trace) = &mut self.trace {
            trace.started(number, key);
        }
        Ok(Some(StartedRead { slab, evicted }))
    }

    /// A matrix of the expert in a slab, whose part has been read.
    pub fn matrix(
        &self,
        slab: SlabId,
        projection: Projection,
        locations: &[Location; 3],
        activations: Activations,
    ) -> Matrix<'_> {
        let Location {
            format, rows, cols, ..
        } = locations[projection as usize];
        let bytes = self.engine.payload(slab, weights_range(projection));
        let scales = self.engine.payload(slab, scales_range(projection));
        Matrix::with_scales(format, rows, cols, bytes, scales)
            .expect("the catalog has checked the sizes")
            .with_activations(activations)
    }
}
