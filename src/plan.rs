//! How much memory there is, and how many expert slabs fit into it.

use bytesize::ByteSize;

use crate::stream::slots::Budget;

mod available;
pub use available::{Available, CgroupBound, Roots, available};

/// What a model needs besides expert slabs, and what a slab takes. All sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Resident weights.
    pub dense: u64,
    /// KV cache (with indexer keys) of the whole context.
    pub kv: u64,
    /// Activations, logits, staging buffers.
    pub scratch: u64,
    /// The tensor index.
    pub index: u64,
    /// One expert slab, rounded up to what it occupies.
    pub slab: u64,
    /// Experts that a token uses in a layer.
    pub top_k: u64,
    /// Routed experts in a layer.
    pub experts: u64,
    /// Layers that have routed experts.
    pub moe_layers: u64,
}

impl Needs {
    /// Everything but the slabs.
    fn fixed(&self) -> u64 {
        [self.dense, self.kv, self.scratch, self.index]
            .into_iter()
            .fold(0, u64::saturating_add)
    }

    /// A token's experts and one that is read beside them: with fewer slabs nothing could overlap.
    fn min_slabs(&self) -> u64 {
        self.top_k.saturating_add(1)
    }

    /// Slabs for `slots` experts of each layer, beside the minimum; more than all experts would never be filled.
    fn slabs(&self, slots: u64) -> u64 {
        let kept = slots.saturating_mul(self.moe_layers);
        let all = self.experts.saturating_mul(self.moe_layers);
        self.min_slabs().saturating_add(kept).min(all)
    }
}

/// What the user asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// Budget in bytes for everything; otherwise what is available.
    pub ram: Option<u64>,
    /// Slabs for each MoE layer; 0 is the minimum in all, `None` as many as fit.
    pub cache_slots: Option<u64>,
}

/// A plan that fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// What the expert store may take.
    pub experts: Budget,
    /// Bytes of everything else.
    pub fixed: u64,
    /// Bytes that were allowed for all.
    pub budget: u64,
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// What is wanted is more than the budget.
    #[error(
        "the model does not fit into {}: it needs {} = dense weights {} + KV cache {} + scratch {} + index {} + \
         {slabs} expert slabs of {} each ({}); {advice}",
        size(*budget), size(*total), size(needs.dense), size(needs.kv), size(needs.scratch), size(needs.index),
        size(needs.slab), size(slabs.saturating_mul(needs.slab))
    )]
    DoesNotFit {
        /// The terms.
        needs: Box<Needs>,
        /// Slabs that were wanted at least.
        slabs: u64,
        /// Sum of all terms in bytes.
        total: u64,
        /// Bytes that were allowed.
        budget: u64,
        /// What can be done.
        advice: &'static str,
    },
    /// `/proc/meminfo` could not be read or understood.
    #[error("cannot tell how much memory is available: {0}")]
    Unknown(String),
}

fn size(bytes: u64) -> String {
    ByteSize::b(bytes).display().iec().to_string()
}

/// Works out what is left for experts: what the wish says if it fits, otherwise the rest of the budget.
/// `available` is what the machine has to spare, in bytes.
///
/// # Errors
/// [`PlanError::DoesNotFit`] with every number when the wished slabs, or top_k + 1 of them, do not fit.
pub fn plan(needs: &Needs, wish: Wish, available: u64) -> Result<Plan, PlanError> {
    let budget = wish.ram.unwrap_or(available);
    let fixed = needs.fixed();
    let slabs = needs.slabs(wish.cache_slots.unwrap_or(0));
    let total = fixed.saturating_add(slabs.saturating_mul(needs.slab));
    if total > budget {
        return Err(PlanError::DoesNotFit {
            needs: Box::new(*needs),
            slabs,
            total,
            budget,
            advice: match (wish.cache_slots, wish.ram) {
                (Some(slots), _) if slots > 0 => "lower --cache-slots",
                (_, Some(_)) => "raise --ram",
                (_, None) => "free memory or use a machine with more",
            },
        });
    }
    Ok(Plan {
        experts: match wish.cache_slots {
            Some(slots) => Budget::SlotsPerLayer(usize::try_from(slots).unwrap_or(usize::MAX)),
            None => Budget::Bytes(budget - fixed),
        },
        fixed,
        budget,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn needs() -> Needs {
        Needs {
            dense: 11 * GIB,
            kv: GIB,
            scratch: GIB / 4,
            index: GIB / 16,
            slab: 22 << 20,
            top_k: 8,
            experts: 256,
            moe_layers: 75,
        }
    }

    #[test]
    fn the_rest_of_the_budget_is_for_experts() {
        let wish = Wish {
            ram: Some(24 * GIB),
            ..Wish::default()
        };
        let fixed = 12 * GIB + GIB / 4 + GIB / 16;
        let with_ram = plan(&needs(), wish, 0).unwrap();
        assert_eq!(with_ram.experts, Budget::Bytes(24 * GIB - fixed));
        let with_all = plan(&needs(), Wish::default(), 20 * GIB).unwrap();
        assert_eq!(with_all.experts, Budget::Bytes(20 * GIB - fixed));
    }

    #[test]
    fn slots_are_beside_the_minimum_and_no_more_than_all_experts() {
        assert_eq!(needs().slabs(0), 9);
        assert_eq!(needs().slabs(4), 309);
        assert_eq!(needs().slabs(u64::MAX), 256 * 75);
        let wish = Wish {
            cache_slots: Some(4),
            ram: None,
        };
        let plan = plan(&needs(), wish, 64 * GIB).unwrap();
        assert_eq!(plan.experts, Budget::SlotsPerLayer(4));
    }

    #[test]
    fn what_does_not_fit_is_refused_with_every_number() {
        let error = plan(&needs(), Wish::default(), 8 * GIB)
            .unwrap_err()
            .to_string();
        for part in [
            "8.0 GiB",
            "11.0 GiB",
            "1.0 GiB",
            "256.0 MiB",
            "64.0 MiB",
            "9 expert slabs",
            "22.0 MiB",
        ] {
            assert!(error.contains(part), "{part} is not in: {error}");
        }
        let wish = Wish {
            ram: Some(24 * GIB),
            cache_slots: Some(256),
        };
        assert!(
            plan(&needs(), wish, 0)
                .unwrap_err()
                .to_string()
                .contains("lower --cache-slots")
        );
    }

    proptest! {
        #[test]
        fn no_numbers_overflow_and_no_plan_exceeds_its_budget(
            dense: u64, kv: u64, scratch: u64, index: u64, slab: u64, top_k: u64, experts: u64, moe_layers: u64,
            ram: Option<u64>, cache_slots: Option<u64>, available: u64,
        ) {
            let needs = Needs { dense, kv, scratch, index, slab, top_k, experts, moe_layers };
            if let Ok(plan) = plan(&needs, Wish { ram, cache_slots }, available) {
                prop_assert!(plan.fixed <= plan.budget);
                if let Budget::Bytes(bytes) = plan.experts {
                    prop_assert!(bytes <= ram.unwrap_or(available) - plan.fixed);
                }
            }
        }
    }
}
