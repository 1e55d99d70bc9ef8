//! Tracks the demanded experts of a layer and picks the one to compute next.

use colibri_ring::{Engine, SlabId, SlabState};

use crate::stream::files::{DOWN, GATE_UP};
use crate::stream::key::ExpertKey;

/// How far a demanded expert is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// It has no slab yet, because none was free.
    NoSlab,
    /// Its gate and up have not been handed out.
    GateUp(SlabId),
    /// Gate and up have been handed out, down has not.
    Down(SlabId),
    /// Handed out whole.
    Done,
}

/// A demanded expert.
#[derive(Clone, Copy, Debug)]
pub(super) struct DemandedExpert {
    pub expert: u32,
    pub progress: Progress,
}

/// The experts of one layer that the router chose.
#[derive(Debug, Default)]
pub(super) struct DemandQueue {
    pub layer: usize,
    pub experts: Vec<DemandedExpert>,
    /// The slab whose last piece was handed out: it is in use until the next call.
    pub borrowed: Option<SlabId>,
}

impl DemandQueue {
    /// Adds an expert that has a slab, or none.
    pub fn push(&mut self, expert: u32, slab: Option<SlabId>) {
        let progress = slab.map_or(Progress::NoSlab, Progress::GateUp);
        self.experts.push(DemandedExpert { expert, progress });
    }

    pub fn key(&self, at: usize) -> ExpertKey {
        ExpertKey {
            layer: self.layer,
            expert: self.experts[at].expert,
        }
    }

    /// Whether an expert waits for a slab.
    pub fn is_waiting(&self) -> bool {
        let waits = |d: &DemandedExpert| d.progress == Progress::NoSlab;
        self.experts.iter().any(waits)
    }

    pub fn is_done(&self) -> bool {
        let done = |d: &DemandedExpert| d.progress == Progress::Done;
        self.experts.iter().all(done)
    }

    /// Whether all experts are in memory.
    pub fn are_read(&self, engine: &Engine) -> bool {
        let mut experts = self.experts.iter();
        experts.all(|d| match d.progress {
            Progress::NoSlab => false,
            Progress::GateUp(slab) | Progress::Down(slab) => engine.state(slab) == SlabState::Full,
            Progress::Done => true,
        })
    }

    /// The expert to compute next: one that is begun and complete, so that its slab is free early; then one that is
    /// complete; then one whose gate and up are complete.
    pub fn computable(&self, engine: &Engine) -> Option<usize> {
        let rank = |d: &DemandedExpert| match d.progress {
            Progress::Down(slab) if engine.ready(slab, DOWN) => Some(0),
            Progress::GateUp(slab) if engine.state(slab) == SlabState::Full => Some(1),
            Progress::GateUp(slab) if engine.ready(slab, GATE_UP) => Some(2),
            _ => None,
        };
        let demands = self.experts.iter().enumerate();
        let ranked = demands.filter_map(|(i, d)| Some((rank(d)?, i)));
        ranked.min().map(|(_, i)| i)
    }

    /// The expert that is read into a slab and has not been handed out whole.
    pub fn on(&self, slab: SlabId) -> Option<usize> {
        let on = |d: &DemandedExpert| matches!(d.progress, Progress::GateUp(s) | Progress::Down(s) if s == slab);
        self.experts.iter().position(on)
    }

    /// Whether the slab is needed for computing.
    pub fn uses(&self, slab: SlabId) -> bool {
        self.borrowed == Some(slab) || self.on(slab).is_some()
    }

    /// Forgets all experts, and returns the slabs of those that were not computed.
    pub fn abandon(&mut self) -> Vec<SlabId> {
        let unfinished = self.experts.drain(..).filter_map(|d| match d.progress {
            Progress::GateUp(slab) | Progress::Down(slab) => Some(slab),
            Progress::NoSlab | Progress::Done => None,
        });
        unfinished.chain(self.borrowed.take()).collect()
    }
}
