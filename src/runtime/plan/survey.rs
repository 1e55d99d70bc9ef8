//! Collects what a memory plan depends on: the needs of a model for a context, and the available memory.

use super::{Experts, MemoryBreakdown, MemoryOverrides, Plan, PlanError, RECORD_SHARE, plan};
use crate::arch::Architecture;
use crate::memory::{Available, MemoryError, Roots, available};
use crate::model::{
    BatchLimits, Rounding, RunnerOptions, kv_bytes, resident_bytes, scores_bytes, sequence_bytes,
};
use crate::quant::encode::Packing;
use crate::shards::Shards;
use crate::stream::slots::Footprint;
use crate::stream::{ExpertFiles, demand_trace};

/// The program, its stacks, the queues of the ring.
const PROGRAM: u64 = 24 << 20;
/// Bytes of the index for each tensor.
const INDEX_ENTRY: u64 = 256;

/// How a model will be used.
#[derive(Clone, Copy, Debug)]
pub struct PlanRequest {
    /// Tokens of a sequence's context.
    pub context: usize,
    /// Sequences with such a context.
    pub sequences: usize,
    /// Tokens of a prompt that are computed at once.
    pub prompt: usize,
    /// Compute threads.
    pub threads: usize,
    /// Whether attention is sparse where the model has an indexer.
    pub dsa: bool,
    /// Most tokens that are drafted at once, where the model uses its prediction layer.
    pub drafts: usize,
    /// Format that resident float and FP8 matrices are quantised to; `None` keeps them.
    pub dense: Option<Packing>,
    /// Format that float and FP8 experts are rounded to when they are computed; `None` keeps them.
    pub round_experts: Option<Packing>,
    /// Whether a timeline is recorded.
    pub record: bool,
    /// Limits given by the user.
    pub overrides: MemoryOverrides,
}

impl PlanRequest {
    /// The default: one sequence of `context` tokens, no prompt, a thread on each CPU.
    pub fn usual(context: usize) -> PlanRequest {
        PlanRequest {
            context,
            sequences: 1,
            prompt: 0,
            threads: crate::cpus::default_threads(),
            dsa: true,
            drafts: 0,
            dense: None,
            round_experts: None,
            record: false,
            overrides: MemoryOverrides::default(),
        }
    }
}

/// Everything that a plan depends on.
#[derive(Debug)]
pub struct MemoryInputs {
    /// Everything except slabs, with the least scratch.
    pub needs: MemoryBreakdown,
    /// Scratch with which the prompt is one slice.
    pub prompt_scratch: u64,
    /// Footprint and number of the experts of each slab class.
    pub footprints: Vec<Footprint>,
    /// Layers that have experts.
    pub moe_layers: usize,
    /// Experts that a token uses in a layer.
    pub top_k: usize,
    /// Available memory.
    pub available: Result<Available, MemoryError>,
    /// Bytes of resident weights with `--dense-bits 4`, if that is not requested.
    four_bits: Option<u64>,
    overrides: MemoryOverrides,
}

/// Measures a model and the machine.
pub fn survey(
    shards: &Shards,
    arch: &Architecture,
    files: &ExpertFiles,
    request: PlanRequest,
    roots: &Roots,
) -> MemoryInputs {
    let available = available(roots);
    let budget = budget(&available, &request.overrides);
    let sequences = request.sequences as u64;
    let rounding = (request.round_experts).map_or(0, |_| Rounding::bytes(arch, request.threads));
    MemoryInputs {
        needs: MemoryBreakdown {
            dense: resident_bytes(shards, arch, request.dense),
            kv: kv_bytes(arch, request.dsa, request.context).saturating_mul(sequences),
            scratch: RunnerOptions::default().scratch_bytes as u64,
            scores: scores_bytes(request.threads, request.context),
            drafts: sequence_bytes(arch, request.sequences, request.drafts),
            index: shards.len() as u64 * INDEX_ENTRY,
            program: PROGRAM.saturating_add(rounding),
            record: match request.record {
                true => demand_trace::bytes(demand_trace::MAX_ENTRIES)
                    .min(budget.unwrap_or(0) / RECORD_SHARE),
                false => 0,
            },
        },
        prompt_scratch: BatchLimits::scratch_for(arch, request.dsa, request.prompt),
        footprints: files.footprints(),
        moe_layers: files.moe_layers(),
        top_k: arch.router.top_k,
        available,
        four_bits: (request.dense.is_none())
            .then(|| resident_bytes(shards, arch, Some(Packing::Int4Group(64)))),
        overrides: request.overrides,
    }
}

/// Bytes that a plan may use; `None` if unknown.
fn budget(available: &Result<Available, MemoryError>, overrides: &MemoryOverrides) -> Option<u64> {
    let available = available.as_ref().map(Available::budget).ok();
    overrides.ram.or(available)
}

impl MemoryInputs {
    /// The plan: the requested slabs, or as many as fit.
    ///
    /// Each slice of a prompt reads its experts again, so scratch for longer slices is worth more than slabs. It gets up to an eighth of what
    /// the requested or the fewest slabs leave.
    ///
    /// # Errors
    /// [`PlanError::DoesNotFit`], and [`PlanError::Unknown`] when neither the available memory nor a budget is known.
    pub fn plan(&self) -> Result<Plan, PlanError> {
        let slots = Some(self.overrides.cache_slots.unwrap_or(0));
        let mut fewest = self.plan_with(&self.needs, slots);
        if let Err(PlanError::DoesNotFit { advice, .. }) = &mut fewest
            && let Some(dense) = self.four_bits
        {
            let smaller = MemoryBreakdown {
                dense,
                ..self.needs
            };
            // Advice only where it helps.
            if self.plan_with(&smaller, slots).is_ok() {
                *advice = "give --dense-bits 4, with which it fits".to_owned();
            }
        }
        let fewest = fewest?;
        let spare = fewest.budget - fewest.total;
        let more = self.prompt_scratch.saturating_sub(self.needs.scratch);
        let needs = MemoryBreakdown {
            scratch: self.needs.scratch + more.min(spare / 8),
            ..self.needs
        };
        self.plan_with(&needs, self.overrides.cache_slots)
    }

    /// Bytes of the fewest slabs that work, whether they fit or not.
    pub fn working_bytes(&self) -> u64 {
        let minimum = |f: &Footprint| {
            f.bytes
                .saturating_mul((self.top_k + 1).min(f.experts) as u64)
        };
        self.footprints
            .iter()
            .map(minimum)
            .fold(0, u64::saturating_add)
    }

    /// Bytes that the plan may use; `None` if unknown.
    pub fn budget(&self) -> Option<u64> {
        budget(&self.available, &self.overrides)
    }

    fn plan_with(
        &self,
        needs: &MemoryBreakdown,
        cache_slots: Option<u64>,
    ) -> Result<Plan, PlanError> {
        let available = match (&self.available, self.overrides.ram) {
            (Ok(available), _) => available.budget(),
            // An explicit budget needs no measurement.
            (Err(_), Some(ram)) => ram,
            (Err(error), None) => {
                return Err(PlanError::Unknown(error.clone()));
            }
        };
        let experts = Experts {
            footprints: &self.footprints,
            moe_layers: self.moe_layers,
            top_k: self.top_k,
        };
        let overrides = MemoryOverrides {
            cache_slots,
            ..self.overrides
        };
        plan(needs, experts, overrides, available)
    }
}
