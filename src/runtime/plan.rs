//! Plans memory: the number of expert slabs that fit next to everything else.

use bytesize::ByteSize;

use crate::memory::MemoryError;
use crate::stream::slots::{self, Budget, Footprint, Slots};

mod survey;
pub use crate::memory::{Available, Roots, available};
pub use survey::{MemoryInputs, PlanRequest, survey};

/// What a model needs besides expert slabs. All sizes in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryBreakdown {
    /// Resident weights.
    pub dense: u64,
    /// KV cache (with indexer keys) of the whole context.
    pub kv: u64,
    /// Activations of the tokens that are computed at once, and logits.
    pub scratch: u64,
    /// Attention scores of every thread.
    pub scores: u64,
    /// Logits and hidden states for drafts.
    pub drafts: u64,
    /// The tensor index.
    pub index: u64,
    /// The program, its stacks, the queues of the ring, buffers in which experts are rounded.
    pub program: u64,
    /// The record for a trace or a report.
    pub record: u64,
}

impl MemoryBreakdown {
    /// The sum of all terms.
    pub fn sum(&self) -> u64 {
        [
            self.dense,
            self.kv,
            self.scratch,
            self.scores,
            self.drafts,
            self.index,
            self.program,
            self.record,
        ]
        .into_iter()
        .fold(0, u64::saturating_add)
    }
}

/// The experts that slabs are for.
#[derive(Clone, Copy, Debug)]
pub struct Experts<'a> {
    /// Footprint and number of the experts of each slab class.
    pub footprints: &'a [Footprint],
    /// Layers that have experts.
    pub moe_layers: usize,
    /// Experts that a token uses in a layer.
    pub top_k: usize,
}

/// Limits given by the user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryOverrides {
    /// Budget in bytes for everything; `None` for what is available.
    pub ram: Option<u64>,
    /// Slabs for each sparse layer; 0 is the minimum over all layers, `None` as many as fit.
    pub cache_slots: Option<u64>,
}

/// A plan that fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Everything except slabs.
    pub needs: MemoryBreakdown,
    /// The expert slabs.
    pub slots: Slots,
    /// Bytes of everything, slabs included.
    pub total: u64,
    /// Allowed bytes.
    pub budget: u64,
}

/// Why memory cannot be planned.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The needs exceed the budget.
    #[error(
        "the model does not fit into {}: it needs {}: {}; {advice}",
        size(*budget), size(needs.sum().saturating_add(*slabs)), terms(needs, *slabs)
    )]
    DoesNotFit {
        /// Everything except slabs.
        needs: MemoryBreakdown,
        /// Bytes of the requested slabs, or of the fewest.
        slabs: u64,
        /// Allowed bytes.
        budget: u64,
        /// What to do.
        advice: String,
    },
    /// The available memory is unknown, and no budget is given.
    #[error("{0}; give --ram")]
    Unknown(MemoryError),
}

fn size(bytes: u64) -> String {
    ByteSize::b(bytes).display().iec().to_string()
}

/// The terms, the largest first.
fn terms(needs: &MemoryBreakdown, slabs: u64) -> String {
    let mut terms = [
        (needs.dense, "resident weights"),
        (slabs, "expert slabs"),
        (needs.kv, "the KV cache"),
        (needs.scratch, "scratch"),
        (needs.scores, "attention scores"),
        (needs.drafts, "drafts"),
        (needs.index, "the index"),
        (needs.program, "the program"),
        (needs.record, "the record"),
    ];
    terms.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
    let terms = terms.iter().filter(|(bytes, _)| *bytes > 0);
    let terms: Vec<String> = terms
        .map(|(bytes, name)| format!("{} for {name}", size(*bytes)))
        .collect();
    terms.join(", ")
}

/// The record takes at most this fraction of the budget: one part of so many.
const RECORD_SHARE: u64 = 16;

/// What to do when `needs` and `slabs` exceed `budget`. `fewest` is the minimum of slab bytes.
fn advice(
    needs: &MemoryBreakdown,
    slabs: u64,
    fewest: u64,
    overrides: MemoryOverrides,
    budget: u64,
) -> String {
    let total = needs.sum().saturating_add(slabs);
    // The record grows with the budget.
    let enough = match needs.record {
        0 => total,
        record => (total - record).saturating_mul(RECORD_SHARE) / (RECORD_SHARE - 1) + 1,
    };
    let mut advice = match (overrides.cache_slots, overrides.ram) {
        _ if fewest < slabs && needs.sum().saturating_add(fewest) <= budget => {
            "lower --cache-slots".to_owned()
        }
        (_, Some(_)) => format!("raise --ram to {}MiB", enough.div_ceil(1 << 20)),
        (_, None) if budget == 0 => {
            "free memory, or give --ram if more is available than the system reports".to_owned()
        }
        (_, None) => "free memory or use a machine with more".to_owned(),
    };
    if needs.kv.saturating_add(needs.scores) > total.saturating_sub(budget) {
        advice += ", or ask for a shorter context";
    }
    advice
}

/// Decides the slabs: the requested number, or as many as fit into `available` bytes.
///
/// # Errors
/// [`PlanError::DoesNotFit`] with every number when the requested slabs, or top_k + 1 of them, do not fit.
pub fn plan(
    needs: &MemoryBreakdown,
    experts: Experts,
    overrides: MemoryOverrides,
    available: u64,
) -> Result<Plan, PlanError> {
    let budget = overrides.ram.unwrap_or(available);
    let room = budget.saturating_sub(needs.sum());
    let wanted = match overrides.cache_slots {
        Some(n) => Budget::SlotsPerLayer(usize::try_from(n).unwrap_or(usize::MAX)),
        None => Budget::Bytes(room),
    };
    let slots = |wanted| {
        slots::slots(
            experts.footprints,
            experts.moe_layers,
            experts.top_k,
            wanted,
        )
    };
    let refused = |slabs| {
        let fewest = slots(Budget::SlotsPerLayer(0)).map_or(slabs, |slots| slots.bytes());
        PlanError::DoesNotFit {
            needs: *needs,
            slabs,
            budget,
            advice: advice(needs, slabs, fewest, overrides, budget),
        }
    };
    let slots = slots(wanted).map_err(|too_small| refused(too_small.needed))?;
    if needs.sum().saturating_add(slots.bytes()) > budget {
        return Err(refused(slots.bytes()));
    }
    Ok(Plan {
        needs: *needs,
        total: needs.sum() + slots.bytes(),
        slots,
        budget,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;

    fn needs() -> MemoryBreakdown {
        MemoryBreakdown {
            dense: 11 * GIB,
            kv: GIB,
            scratch: GIB / 4,
            index: GIB / 16,
            ..MemoryBreakdown::default()
        }
    }

    const EXPERTS: Experts = Experts {
        footprints: &[Footprint {
            bytes: 22 * MIB,
            experts: 256 * 75,
        }],
        moe_layers: 75,
        top_k: 8,
    };

    #[test]
    fn the_rest_of_the_budget_becomes_slabs() {
        let overrides = MemoryOverrides {
            ram: Some(24 * GIB),
            ..MemoryOverrides::default()
        };
        let plan = plan(&needs(), EXPERTS, overrides, 0).unwrap();
        assert!(plan.total <= 24 * GIB && plan.total + 22 * MIB > 24 * GIB);
    }

    #[test]
    fn slots_are_per_layer_and_zero_is_the_minimum() {
        let slabs = |slots| {
            let overrides = MemoryOverrides {
                cache_slots: Some(slots),
                ram: None,
            };
            let plan = plan(&needs(), EXPERTS, overrides, u64::MAX).unwrap();
            plan.slots.classes[0].count
        };
        assert_eq!(slabs(0), 9);
        assert_eq!(slabs(4), 4 * 75 + 9);
        assert_eq!(slabs(u64::MAX), 256 * 75);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_every_number() {
        let error = plan(&needs(), EXPERTS, MemoryOverrides::default(), 8 * GIB)
            .unwrap_err()
            .to_string();
        for part in [
            "8.0 GiB",
            "12.5 GiB",
            "11.0 GiB",
            "1.0 GiB",
            "256.0 MiB",
            "64.0 MiB",
            "198.0 MiB",
        ] {
            assert!(error.contains(part), "{part} is not in: {error}");
        }
        let overrides = MemoryOverrides {
            ram: Some(24 * GIB),
            cache_slots: Some(256),
        };
        let error = plan(&needs(), EXPERTS, overrides, 0)
            .unwrap_err()
            .to_string();
        assert!(error.contains("lower --cache-slots"), "{error}");
        // The fewest slabs do not fit either.
        let overrides = MemoryOverrides {
            ram: Some(8 * GIB),
            ..overrides
        };
        let error = plan(&needs(), EXPERTS, overrides, 0)
            .unwrap_err()
            .to_string();
        assert!(error.contains("raise --ram to "), "{error}");
    }

    proptest! {
        #[test]
        fn no_numbers_overflow_and_no_plan_exceeds_its_budget(
            dense: u64, kv: u64, scratch: u64, index: u64, bytes in 1u64..1 << 40, top_k in 1usize..64,
            experts in 1usize..512, moe_layers in 1usize..512,
            ram: Option<u64>, cache_slots: Option<u64>, available: u64,
        ) {
            let needs = MemoryBreakdown { dense: dense >> 4, kv: kv >> 4, scratch: scratch >> 4, index: index >> 4, ..MemoryBreakdown::default() };
            let footprints = [Footprint { bytes, experts: experts * moe_layers }];
            let of = Experts { footprints: &footprints, moe_layers, top_k };
            if let Ok(plan) = plan(&needs, of, MemoryOverrides { ram, cache_slots }, available) {
                prop_assert!(plan.total <= ram.unwrap_or(available));
                prop_assert!(plan.slots.classes[0].count >= (top_k + 1).min(experts * moe_layers));
            }
        }
    }
}
