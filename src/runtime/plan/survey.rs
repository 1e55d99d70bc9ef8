//! What a model needs for a context, and what there is for it: what `decode` follows and `plan` prints.

use super::{Experts, MemoryBreakdown, MemoryOverrides, Plan, PlanError, RECORD_SHARE, plan};
use crate::config::Config;
use crate::memory::{Available, MemoryError, Roots, available};
use crate::model::{
    BatchLimits, Rounding, RunnerOptions, draft_bytes, kv_bytes, resident_bytes, scores_bytes,
};
use crate::quant::encode::Packing;
use crate::shards::Shards;
use crate::stream::slots::Footprint;
use crate::stream::{ExpertFiles, demand_trace};

/// The program itself, its stacks, the queues of the ring.
const PROGRAM: u64 = 24 << 20;
/// Bytes of index for a tensor: name, shape, place, hash.
const INDEX_ENTRY: u64 = 256;

/// How a model is going to be used.
#[derive(Clone, Copy, Debug)]
pub struct PlanRequest {
    /// Tokens of the whole context.
    pub context: usize,
    /// Tokens of it that come at once, as a prompt.
    pub prompt: usize,
    /// Compute threads.
    pub threads: usize,
    /// Whether attention is sparse where the model has an indexer.
    pub dsa: bool,
    /// Tokens that are drafted at once, at most, where the model has its prediction layer.
    pub drafts: usize,
    /// What resident float and FP8 matrices become; `None` keeps them.
    pub dense: Option<Packing>,
    /// What float and FP8 experts are rounded to when they are computed; `None` keeps them.
    pub round_experts: Option<Packing>,
    /// Whether it is recorded what is read and computed when.
    pub record: bool,
    /// What the user asked for.
    pub wish: MemoryOverrides,
}

impl PlanRequest {
    /// As the model is used when nothing else is asked for: `context` tokens, no prompt that comes at once, all of this machine's threads.
    pub fn usual(context: usize) -> PlanRequest {
        PlanRequest {
            context,
            prompt: 0,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            dsa: true,
            drafts: 0,
            dense: None,
            round_experts: None,
            record: false,
            wish: MemoryOverrides::default(),
        }
    }
}

/// Everything that a plan depends on.
#[derive(Debug)]
pub struct MemoryInputs {
    /// What is needed besides slabs, with the least scratch.
    pub needs: MemoryBreakdown,
    /// Scratch with which the prompt goes through each layer at once.
    pub prompt_scratch: u64,
    /// Footprint and number of the experts of each slab class.
    pub footprints: Vec<Footprint>,
    /// Layers that have experts.
    pub moe_layers: usize,
    /// Experts that a token uses in a layer.
    pub top_k: usize,
    /// What the machine has to spare.
    pub available: Result<Available, MemoryError>,
    /// Bytes of resident weights with `--dense-bits 4`, where that was not asked for.
    four_bits: Option<u64>,
    wish: MemoryOverrides,
}

/// Looks at a model and at the machine.
pub fn survey(
    shards: &Shards,
    config: &Config,
    files: &ExpertFiles,
    ask: PlanRequest,
    roots: &Roots,
) -> MemoryInputs {
    let available = available(roots);
    let budget = budget(&available, &ask.wish);
    let rounding = (ask.round_experts).map_or(0, |_| Rounding::bytes(config, ask.threads));
    MemoryInputs {
        needs: MemoryBreakdown {
            dense: resident_bytes(shards, config, ask.dense),
            kv: kv_bytes(config, ask.dsa, ask.context),
            scratch: RunnerOptions::default().scratch_bytes as u64,
            scores: scores_bytes(ask.threads, ask.context),
            drafts: draft_bytes(config, ask.drafts),
            index: shards.len() as u64 * INDEX_ENTRY,
            program: PROGRAM.saturating_add(rounding),
            record: match ask.record {
                true => demand_trace::bytes(demand_trace::MAX_ENTRIES)
                    .min(budget.unwrap_or(0) / RECORD_SHARE),
                false => 0,
            },
        },
        prompt_scratch: BatchLimits::scratch_for(config, ask.dsa, ask.prompt),
        footprints: files.footprints(),
        moe_layers: files.moe_layers(),
        top_k: config.num_experts_per_tok,
        available,
        four_bits: (ask.dense.is_none())
            .then(|| resident_bytes(shards, config, Some(Packing::Int4Group(64)))),
        wish: ask.wish,
    }
}

/// What a plan may use, if anything is known about it.
fn budget(available: &Result<Available, MemoryError>, wish: &MemoryOverrides) -> Option<u64> {
    let available = available.as_ref().map(Available::budget).ok();
    wish.ram.or(available)
}

impl MemoryInputs {
    /// The plan: the slabs that were wished, else as many as fit.
    ///
    /// A prompt that is cut into slices reads its experts once for each, so scratch for longer slices is worth more than
    /// slabs: it gets up to an eighth of what is left beside the wished or the fewest slabs.
    ///
    /// # Errors
    /// [`PlanError::DoesNotFit`], and [`PlanError::Unknown`] where nothing is known and no budget was given.
    pub fn plan(&self) -> Result<Plan, PlanError> {
        let slots = Some(self.wish.cache_slots.unwrap_or(0));
        let mut fewest = self.plan_with(&self.needs, slots);
        if let Err(PlanError::DoesNotFit { advice, .. }) = &mut fewest
            && let Some(dense) = self.four_bits
        {
            let smaller = MemoryBreakdown {
                dense,
                ..self.needs
            };
            // Worth saying only where it helps.
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
        self.plan_with(&needs, self.wish.cache_slots)
    }

    /// The fewest slabs that work, whether they fit or not: bytes.
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

    /// What the plan may use, if anything is known about it.
    pub fn budget(&self) -> Option<u64> {
        budget(&self.available, &self.wish)
    }

    fn plan_with(
        &self,
        needs: &MemoryBreakdown,
        cache_slots: Option<u64>,
    ) -> Result<Plan, PlanError> {
        let available = match (&self.available, self.wish.ram) {
            (Ok(available), _) => available.budget(),
            // What is not known bounds nothing that was given explicitly.
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
        let wish = MemoryOverrides {
            cache_slots,
            ..self.wish
        };
        plan(needs, experts, wish, available)
    }
}
