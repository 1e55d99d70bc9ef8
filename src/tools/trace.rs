//! Merges the recordings of a decode onto one clock: chunks at the drives, spans of the compute thread, demands.

mod chrome;

use std::time::{Duration, Instant};

use colibri_ring::Priority;
use colibri_ring::extent::PARTS;
use colibri_ring::record::ChunkRead;

use crate::model::{ForwardPass, Phase, PhaseSpan, Runner};
use crate::stream::ExpertKey;
use crate::stream::demand_trace::{self, DemandRecord};

/// Bytes of a chunk, a span and a demand: as they are recorded, and in the trace that is made of them.
const ENTRY: usize = size_of::<ChunkRead>()
    + size_of::<ExpertKey>()
    + size_of::<PhaseSpan>()
    + size_of::<DemandRecord>()
    + size_of::<Chunk>()
    + size_of::<Slice>()
    + size_of::<DemandMark>()
    + 2 * size_of::<ForwardPass>();

// The memory plan reserves ENTRY_BYTES for each.
const _: () = assert!(ENTRY <= demand_trace::ENTRY_BYTES);

/// A chunk at a drive. Times are nanoseconds since the begin of the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// When it was submitted.
    pub begin: u64,
    /// When its end was noticed.
    pub end: u64,
    /// Index in [`Trace::sources`].
    pub source: usize,
    /// Bytes that came.
    pub bytes: u64,
    /// Why it was wanted when it was submitted.
    pub priority: Priority,
    /// Whether it carries bytes of gate and up, and of down.
    pub parts: [bool; PARTS],
    /// Of which expert.
    pub key: Option<ExpertKey>,
}

/// A stretch of the compute thread. Times are nanoseconds since the begin of the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// When it began.
    pub begin: u64,
    /// When it ended.
    pub end: u64,
    /// Index in [`Trace::passes`].
    pub pass: usize,
    /// What was done.
    pub phase: Phase,
    /// In which layer.
    pub layer: Option<u32>,
    /// Of which expert: its id, and whether it was down, or gate and up.
    pub expert: Option<(u32, bool)>,
}

/// Experts of a layer that were demanded at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DemandMark {
    /// When, in nanoseconds since the begin of the trace.
    pub at: u64,
    /// Of which layer.
    pub layer: u32,
    /// Experts that were in memory.
    pub hits: u32,
    /// Experts that were not.
    pub misses: u32,
}

/// What a runner did when.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// The directories that were read from.
    pub sources: Vec<String>,
    /// By begin.
    pub chunks: Vec<Chunk>,
    /// In order.
    pub slices: Vec<Slice>,
    /// The tokens that went through the layers.
    pub passes: Vec<ForwardPass>,
    /// In order.
    pub demands: Vec<DemandMark>,
    /// By layer and expert, how often it was demanded.
    pub uses: Vec<Vec<u32>>,
    /// Chunks, spans and demands beyond the capacity.
    pub lost: u64,
}

impl Trace {
    /// Takes the recording of a runner and its store. `None` when they recorded nothing. `sources` are names of the directories, in
    /// the order of [`Replica::source`](colibri_ring::Replica::source).
    pub fn take(runner: &mut Runner, sources: Vec<String>) -> Option<Trace> {
        let timeline = runner.take_timeline()?;
        let (record, log) = runner.store_mut().take_record()?;
        let first = (record.chunks.iter())
            .map(|chunk| record.epoch + chunk.begin)
            .chain(
                timeline
                    .spans
                    .first()
                    .map(|span| timeline.epoch + span.begin),
            )
            .min()
            .unwrap_or(timeline.epoch);
        let nanos = |at: Instant| nanos(at.saturating_duration_since(first));
        let mut chunks: Vec<Chunk> = (record.chunks.iter())
            .map(|chunk| Chunk {
                begin: nanos(record.epoch + chunk.begin),
                end: nanos(record.epoch + chunk.end),
                source: chunk.source as usize,
                bytes: chunk.bytes,
                priority: chunk.priority,
                parts: chunk.parts,
                key: log.key(chunk.read),
            })
            .collect();
        // Without memory of its own.
        chunks.sort_unstable_by_key(|chunk| chunk.begin);
        let slices = timeline.spans.iter().map(|span| Slice {
            begin: nanos(timeline.epoch + span.begin),
            end: nanos(timeline.epoch + span.end),
            pass: span.pass as usize,
            phase: span.phase,
            layer: span.layer,
            expert: span.expert,
        });
        let demands = log.demands.iter().map(|demand| DemandMark {
            at: nanos(demand.at),
            layer: demand.layer,
            hits: demand.hits,
            misses: demand.misses,
        });
        Some(Trace {
            sources,
            chunks,
            slices: slices.collect(),
            passes: timeline.passes.clone(),
            demands: demands.collect(),
            uses: log.uses,
            lost: record.lost + log.lost + timeline.lost,
        })
    }

    /// For each chunk a lane, so that chunks of one source and lane do not overlap; and for each source the number of its lanes.
    pub fn lanes(&self) -> (Vec<usize>, Vec<usize>) {
        let mut ends: Vec<Vec<u64>> = vec![Vec::new(); self.sources.len()];
        let lane = |chunk: &Chunk| {
            if ends.len() <= chunk.source {
                ends.resize(chunk.source + 1, Vec::new());
            }
            let ends = &mut ends[chunk.source];
            let free = ends.iter().position(|end| *end <= chunk.begin);
            let lane = free.unwrap_or_else(|| {
                ends.push(0);
                ends.len() - 1
            });
            ends[lane] = chunk.end;
            lane
        };
        let lanes = self.chunks.iter().map(lane).collect();
        (lanes, ends.iter().map(Vec::len).collect())
    }

    /// The name of a source.
    pub fn source(&self, source: usize) -> String {
        let name = self.sources.get(source).cloned();
        name.unwrap_or_else(|| format!("source {source}"))
    }
}

/// What a priority is called.
pub fn priority_name(priority: Priority) -> &'static str {
    match priority {
        Priority::Demand => "demand",
        Priority::Prefetch => "speculative",
        Priority::Preload => "preload",
    }
}

/// What a phase is called.
pub fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::IoWait => "waiting",
        _ => Phase::ALL[phase as usize].1,
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
