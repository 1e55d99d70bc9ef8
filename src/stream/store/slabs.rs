//! Reads experts into slabs and hands out their matrices.

use colibri_ring::{Engine, Priority, SlabId, SlabState};

use crate::quant::{Activations, Matrix};
use crate::stream::cache::Cache;
use crate::stream::catalog::{Location, Projection};
use crate::stream::demand_trace::DemandTrace;
use crate::stream::error::StreamError;
use crate::stream::files::{ExpertFiles, scales_range, weights_range};
use crate::stream::key::ExpertKey;
use crate::weight::check_sample;

/// The slabs of the engine, and which expert is in each.
#[derive(Debug)]
pub(super) struct ExpertSlabs {
    pub engine: Engine,
    pub files: ExpertFiles,
    pub cache: Cache,
    /// Which expert each read brings, if that is recorded.
    pub trace: Option<DemandTrace>,
    /// By slab: the projections that have been checked since they were read, a bit for each.
    checked: Vec<u8>,
}

/// A read that was started.
pub(super) struct StartedRead {
    pub slab: SlabId,
    /// The slab held another expert.
    pub evicted: bool,
}

impl ExpertSlabs {
    /// The slabs of `engine`, all of them free.
    pub fn new(
        engine: Engine,
        files: ExpertFiles,
        cache: Cache,
        trace: Option<DemandTrace>,
    ) -> ExpertSlabs {
        ExpertSlabs {
            checked: vec![0; engine.slabs()],
            engine,
            files,
            cache,
            trace,
        }
    }

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
        predicted: bool,
    ) -> Result<Option<StartedRead>, StreamError> {
        let layout = self.files.layout(key)?;
        let class = self.files.class(key);
        let Some((slab, evicted)) = self.cache.make_room(class, key.layer, predicted) else {
            return Ok(None);
        };
        if evicted {
            self.engine.release(slab);
        }
        self.cache.insert(key, slab);
        self.checked[slab.0 as usize] = 0;
        let number = self.engine.read(slab, priority, layout);
        if let Some(trace) = &mut self.trace {
            trace.started(number, key);
        }
        Ok(Some(StartedRead { slab, evicted }))
    }

    /// Checks matrices of the expert in a slab, once after they were read.
    ///
    /// # Errors
    /// [`StreamError::Damaged`] for one that is mostly zeros, or has scales of 0.
    pub fn check(
        &mut self,
        slab: SlabId,
        projections: &[Projection],
        locations: &[Location; 3],
    ) -> Result<(), StreamError> {
        for &projection in projections {
            let bit = 1 << projection as u8;
            let checked = self.checked[slab.0 as usize] & bit != 0;
            if checked || self.files.may_be_zeros(&locations[projection as usize]) {
                continue;
            }
            let matrix = self.matrix(slab, projection, locations, Activations::Exact);
            check_sample(&matrix)
                .map_err(|damage| self.files.damaged(self.key(slab), projection, damage))?;
            self.checked[slab.0 as usize] |= bit;
        }
        Ok(())
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
