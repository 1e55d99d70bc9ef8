//! Computes how many slabs of which size fit into a budget. Experts of the same stored size share a class of slabs.

use colibri_ring::Class;

/// Most classes of a model; the closest sizes share one.
const MAX_CLASSES: usize = 3;

/// Memory for slabs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// This many experts for each MoE layer, plus the working set of one token.
    SlotsPerLayer(usize),
    /// This many bytes for all slabs.
    Bytes(u64),
}

/// Experts of one footprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Bytes of slab that the largest of them needs.
    pub bytes: u64,
    /// How many experts there are.
    pub experts: usize,
}

/// Groups (stored bytes, aligned footprint) of every expert into classes, smallest first. Experts of the
/// same stored size differ in footprint by the alignment only.
pub fn footprints(experts: impl Iterator<Item = (u64, u64)>) -> Vec<(u64, Footprint)> {
    let mut by_size = std::collections::BTreeMap::<u64, Footprint>::new();
    for (stored, footprint) in experts {
        let class = by_size.entry(stored).or_insert(Footprint {
            bytes: 0,
            experts: 0,
        });
        class.bytes = class.bytes.max(footprint);
        class.experts += 1;
    }
    let mut classes: Vec<(u64, Footprint)> = by_size.into_iter().collect();
    while classes.len() > MAX_CLASSES {
        // Stored sizes ascend, footprints need not: an expert may lie in several places, each rounded outwards.
        let growth = |i: &usize| classes[i + 1].1.bytes.abs_diff(classes[*i].1.bytes);
        let closest = (0..classes.len() - 1)
            .min_by_key(growth)
            .expect("more than one is left");
        let smaller = classes.remove(closest).1;
        let larger = &mut classes[closest].1;
        larger.experts += smaller.experts;
        larger.bytes = larger.bytes.max(smaller.bytes);
    }
    classes
}

/// The budget does not hold the experts that one token needs at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{bytes} bytes hold fewer than the {slabs} experts of up to {slab_bytes} bytes that a token needs at once ({needed} bytes)"
)]
pub struct TooSmall {
    /// The budget.
    pub bytes: u64,
    /// Experts needed at once.
    pub slabs: usize,
    /// Size of the largest slab.
    pub slab_bytes: u64,
    /// Bytes needed.
    pub needed: u64,
}

/// The slabs of every class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slots {
    /// Smallest first.
    pub classes: Vec<Class>,
    /// Experts that each MoE layer may cache.
    pub per_layer_quota: usize,
}

impl Slots {
    /// Bytes of memory that the slabs take.
    pub fn bytes(&self) -> u64 {
        self.classes
            .iter()
            .map(|class| (class.bytes as u64) * (class.count as u64))
            .sum()
    }
}

/// Computes the slabs of each class and each layer's quota. A class has at least `top_k + 1` slabs (or all its experts), so
/// that a token always fits and one more read can be under way; never more than it has experts.
///
/// # Errors
/// [`TooSmall`] with every number.
pub fn slots(
    footprints: &[Footprint],
    layers: usize,
    top_k: usize,
    budget: Budget,
) -> Result<Slots, TooSmall> {
    let experts: usize = footprints.iter().map(|f| f.experts).sum();
    let minimum = |f: &Footprint| (top_k + 1).min(f.experts);
    let working: usize = footprints.iter().map(minimum).sum();
    let cached = match budget {
        Budget::SlotsPerLayer(n) => n.saturating_mul(layers),
        Budget::Bytes(bytes) => {
            let needed = footprints.iter().map(|f| minimum(f) as u64 * f.bytes).sum();
            let largest = footprints.iter().max_by_key(|f| f.bytes);
            let slab_bytes = largest.map_or(0, |f| f.bytes);
            let rest = bytes.checked_sub(needed).ok_or(TooSmall {
                bytes,
                slabs: working,
                slab_bytes,
                needed,
            })?;
            let total: u128 = footprints
                .iter()
                .map(|f| u128::from(f.bytes) * f.experts as u128)
                .sum();
            usize::try_from(u128::from(rest) * experts as u128 / total.max(1)).unwrap_or(usize::MAX)
        }
    };
    let cached = cached.min(experts);
    let classes = footprints
        .iter()
        .map(|f| {
            let count =
                minimum(f) + (cached as u128 * f.experts as u128 / experts as u128) as usize;
            Class {
                bytes: f.bytes as usize,
                count: count.min(f.experts),
            }
        })
        .collect();
    Ok(Slots {
        classes,
        per_layer_quota: cached / layers.max(1),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn one_size_is_one_class() {
        let classes = footprints([(100, 8192), (100, 4096), (100, 8192)].into_iter());
        assert_eq!(
            classes,
            [(
                100,
                Footprint {
                    bytes: 8192,
                    experts: 3
                }
            )]
        );
    }

    #[test]
    fn the_closest_sizes_share_a_class() {
        let sizes = [(10, 10), (20, 20), (22, 22), (40, 40)];
        let bytes: Vec<_> = footprints(sizes.into_iter())
            .iter()
            .map(|c| (c.1.bytes, c.1.experts))
            .collect();
        assert_eq!(bytes, [(10, 1), (22, 2), (40, 1)]);
    }

    #[test]
    fn footprints_need_not_ascend_with_the_stored_sizes() {
        let sizes = [(10, 9000), (20, 20), (30, 30), (40, 40)];
        let classes = footprints(sizes.into_iter());
        assert_eq!(classes.len(), 3);
        assert_eq!(classes[0].1.bytes, 9000);
    }

    #[test]
    fn no_slots_leave_the_working_set() {
        let f = [Footprint {
            bytes: MIB,
            experts: 64,
        }];
        let Slots {
            classes,
            per_layer_quota,
        } = slots(&f, 4, 8, Budget::SlotsPerLayer(0)).unwrap();
        assert_eq!((classes[0].count, per_layer_quota), (9, 0));
        let Slots {
            classes,
            per_layer_quota,
        } = slots(&f, 4, 8, Budget::SlotsPerLayer(2)).unwrap();
        assert_eq!((classes[0].count, per_layer_quota), (17, 2));
        let Slots { classes, .. } = slots(&f, 4, 8, Budget::SlotsPerLayer(usize::MAX)).unwrap();
        assert_eq!(classes[0].count, 64, "never more than there are experts");
    }

    #[test]
    fn a_budget_that_cannot_work_is_refused_with_the_numbers() {
        let f = [Footprint {
            bytes: MIB,
            experts: 64,
        }];
        let e = slots(&f, 4, 8, Budget::Bytes(9 * MIB - 1)).unwrap_err();
        assert_eq!(e.needed, 9 * MIB);
        assert_eq!(
            slots(&f, 4, 8, Budget::Bytes(9 * MIB)).unwrap().classes[0].count,
            9
        );
        assert_eq!(
            slots(&f, 4, 8, Budget::Bytes(30 * MIB)).unwrap().classes[0].count,
            30
        );
    }

    proptest! {
        #[test]
        fn budgets_hold(
            sizes in prop::collection::vec((1u64..1000, 1usize..300), 1..4),
            layers in 1usize..80, top_k in 1usize..9, bytes in any::<u64>(), per_layer in any::<usize>(),
        ) {
            let f: Vec<_> = sizes.iter().map(|&(bytes, experts)| Footprint { bytes, experts }).collect();
            if let Ok(slots) = slots(&f, layers, top_k, Budget::Bytes(bytes % 1_000_000)) {
                prop_assert!(slots.bytes() <= bytes % 1_000_000);
            }
            let Slots { classes, .. } = super::slots(&f, layers, top_k, Budget::SlotsPerLayer(per_layer)).unwrap();
            for (class, f) in classes.iter().zip(&f) {
                prop_assert!(class.count >= (top_k + 1).min(f.experts) && class.count <= f.experts);
            }
        }
    }
}
